"""The master without a model: who is handed what, why, and what is said when nobody fits."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from covenant.agents.agent_directory import FETCHES_MAX, CallableAgent
from covenant.agents.api import Agent
from covenant.agents.keyword_match import THRESHOLD, KeywordIndex
from covenant.agents.router import ROUTE
from covenant.model.agent_card import RemoteSkill
from covenant.model.agent_definition import Skill
from covenant.model.content import Embedded, Json, Resource, Text
from covenant.model.task_event import StatusUpdate
from covenant.model.task_view import TaskState
from tests.agents.agents_under_test import DEAD, function, open_agents, said, values
from tests.outbound.remotes import card, hand_made, task

WEATHER = {"description": "Tells the weather of a city", "skills": ["forecast"]}


async def test_what_is_addressed_to_nobody_goes_to_the_agent_whose_words_it_shares(tmp_path: Path) -> None:
    weather = function("weather", "sunny: {}", **WEATHER)
    poet = function("poet", "roses", description="Writes poems and songs")
    async with open_agents(tmp_path, poet, weather) as under_test:
        view = await under_test.ask("index", "What is the forecast for Paris?")
        assert (view.state, said(view)) == (TaskState.COMPLETED, "sunny: What is the forecast for Paris?")
        steps = await under_test.steps(view)
        (status,) = [step.what for step in steps if isinstance(step.what, StatusUpdate)]
        assert status.text == "Handing this to weather: its card matches 'forecast' (skill)"
        assert status.metadata is not None
        route = status.metadata[ROUTE]
        assert (route["agent"], route["remote"], route["by"]) == ("weather", False, "ranking")
        assert view.result is not None
        assert isinstance(view.result.metadata, dict)
        assert view.result.metadata[ROUTE] == route
        assert values(steps, "tool_call") == [{"tool": "agent:weather", "ok": True}]
        content = "sunny: What is the forecast for Paris?"
        assert values(steps, "sub_agent_response") == [{"agent": "weather", "depth": 1, "content": content}]
        tree = await under_test.ledger.tree(view.task.id, None)
        assert [child.task.recipient.display for child in tree.children if child.task] == ["weather@default"]


async def test_when_nobody_fits_the_master_says_so_and_who_there_is(tmp_path: Path) -> None:
    async with open_agents(tmp_path, function("weather", "sunny", **WEATHER)) as under_test:
        view = await under_test.ask("index", "Compose a sonnet")
        assert view.state is TaskState.COMPLETED
        assert "weather — Tells the weather of a city (skills: forecast)" in said(view)
        assert "no model is configured" in said(view)
        assert values(await under_test.steps(view), "sub_agent_response") == []
        assert view.result is not None
        assert isinstance(view.result.metadata, dict)
        assert view.result.metadata[ROUTE]["agent"] == "index"


async def test_without_any_agent_the_master_answers_all_the_same(tmp_path: Path) -> None:
    async with open_agents(tmp_path) as under_test:
        view = await under_test.ask("index", "hello")
        assert view.state is TaskState.COMPLETED
        assert "There are no agents yet" in said(view)


async def test_a_question_of_the_agent_is_passed_on_and_so_is_the_answer(tmp_path: Path) -> None:
    poet = Agent("poet", description="Writes poems")

    @poet
    async def write(turn: Any) -> AsyncIterator[Any]:
        if turn.turn == 1:
            yield turn.need_input("About what?")
        else:
            yield f"a poem about {turn.text}"

    async with open_agents(tmp_path, poet, function("weather", "sunny", **WEATHER)) as under_test:
        asked = await under_test.ask("index", "Write a poem")
        assert (asked.state, said(asked)) == (TaskState.INPUT_REQUIRED, "About what?")
        # The answer goes to whoever asked, whatever its words would match.
        view = await under_test.ask("index", "the weather forecast", task_id=asked.task.id)
        assert (view.state, said(view)) == (TaskState.COMPLETED, "a poem about the weather forecast")


async def test_what_fails_there_fails_here_with_its_name(tmp_path: Path) -> None:
    broken = Agent("weather", **WEATHER)  # type: ignore[arg-type]

    @broken
    async def fail(turn: Any) -> str:
        raise RuntimeError("swordfish")

    async with open_agents(tmp_path, broken) as under_test:
        view = await under_test.ask("index", "weather?")
        assert (view.state, said(view)) == (TaskState.FAILED, "weather: the agent failed")
        assert values(await under_test.steps(view), "tool_call") == [{"tool": "agent:weather", "ok": False}]


async def test_files_go_to_a_local_agent_and_what_it_makes_comes_back(tmp_path: Path) -> None:
    copier = Agent("copier", description="Copies files")

    @copier
    async def copy(turn: Any) -> AsyncIterator[Any]:
        (given,) = [part for part in turn.parts if isinstance(part, Resource)]
        yield given
        yield "copied"

    blob = Resource(Embedded(uri="", mimeType="text/plain", blob="aGk="), "a.txt")
    async with open_agents(tmp_path, copier) as under_test:
        view = await under_test.ask("index", (Text("Copy these files"), blob))
        assert said(view) == "copied"
        assert [artifact.parts for artifact in view.artifacts if artifact.name == "a.txt"] == [(blob,)]


async def test_a_remote_agent_is_picked_by_its_card_and_sent_the_words_alone(tmp_path: Path) -> None:
    def describe(url: str) -> Any:
        skill = {"id": "translate", "name": "Translation", "description": "Translates texts", "tags": ["language"]}
        return {**card(url, streaming=False), "description": "Speaks many languages", "skills": [skill]}

    async with (
        hand_made(lambda called: called.result({"task": task("COMPLETED", "bonjour")}), made=describe) as remote,
        open_agents(tmp_path, function("weather", "sunny", **WEATHER)) as under_test,
    ):
        under_test.register(translator=remote.served.url(""))
        await under_test.known()
        canary = (Json({"secret": "canary-7"}), Resource(Embedded(uri="", blob="Y2FuYXJ5LTc="), "canary.txt"))
        view = await under_test.ask("index", (Text("Translate hello into French"), *canary))
        assert (view.state, said(view)) == (TaskState.COMPLETED, "bonjour")
        assert values(await under_test.steps(view), "tool_call") == [{"tool": "a2a:translator", "ok": True}]
        (call,) = remote.calls
        assert call.params["message"]["parts"] == [{"text": "Translate hello into French"}]
        everything = call.request.body.decode() + str(call.headers) + call.request.target
        for secret in ("canary", under_test.token, "Y2FuYXJ5", "weather"):
            assert secret not in everything


async def test_a_turn_neither_waits_for_dead_remotes_nor_asks_them(tmp_path: Path) -> None:
    never, busy, asked = asyncio.Event(), asyncio.Event(), list[str]()

    async def hang(name: str) -> None:
        asked.append(name)
        if len(asked) == FETCHES_MAX:
            busy.set()
        await never.wait()

    async with open_agents(tmp_path, function("weather", "sunny", **WEATHER)) as under_test:
        under_test.remote_cards._find_card = hang
        under_test.register(**{f"dead{number}": DEAD for number in range(50)})
        under_test.remote_cards.refresh()
        await busy.wait()
        assert said(await under_test.ask("index", "What is the forecast?")) == "sunny"
        assert len(asked) == FETCHES_MAX, "those who wait for a card hold up nobody, and the turn asked for none"
        assert under_test.directory.remote("default") == []
        never.set()


LISTED = (
    CallableAgent(
        name="weather", description="Tells the weather of a city", skills=(RemoteSkill(id="forecast", name="forecast"),)
    ),
    CallableAgent(name="poet", description="Writes poems about the weather and more"),
    CallableAgent(name="translator", skills=(RemoteSkill(id="t", name="t", examples=("Translate this into French",)),)),
)


@pytest.mark.parametrize(
    ("request_", "best"),
    [
        ("weather in Paris", "weather"),
        ("forecasts, please", "weather"),
        ("I want to write a poem", "poet"),
        ("translating something to french", "translator"),
        ("POEMS", "poet"),
    ],
)
def test_the_words_of_names_skills_examples_and_descriptions_decide(request_: str, best: str) -> None:
    ranked = KeywordIndex(LISTED).rank(request_)
    assert ranked[0].listed.name == best
    assert ranked[0].score >= THRESHOLD


def test_equal_scores_go_by_order_and_common_words_count_for_nothing() -> None:
    twins = [CallableAgent(name="a", description="counts sheep"), CallableAgent(name="b", description="counts sheep")]
    assert [ranked.listed.name for ranked in KeywordIndex(twins).rank("count my sheep")] == ["a", "b"]
    assert KeywordIndex(LISTED).rank("what can you do about the and") == []


def test_one_word_of_its_description_is_enough_for_an_agent_that_is_alone() -> None:
    (ranked,) = KeywordIndex([CallableAgent(name="w", description="Tells the weather forecast")]).rank(
        "What is the forecast?"
    )
    assert ranked.score >= THRESHOLD


def test_a_skill_may_be_declared_with_examples() -> None:
    agent = function("x", "y", skills=[Skill(id="sum", examples=("Add up these numbers",))])
    assert agent.skills[0].examples == ("Add up these numbers",)
