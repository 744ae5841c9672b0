"""Which model plays whom, by the settings, against a server on loopback that speaks as OpenAI's does."""

import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from covenant.agents.model.model_agent import FALLBACK, ModelAgent
from covenant.agents.router import UnavailableAgent
from covenant.daemon.settings import ModelSettings
from covenant.daemon.wiring.language_models import ModelAgents, Models
from covenant.model.agent_definition import read_agent_definition
from covenant.model.task import ResultStatus
from covenant.model.task_event import StatusUpdate
from covenant.model.task_view import TaskState
from tests.agents.agents_under_test import function, open_agents, said, values
from tests.agents.openai_server import Cut, Drip, Line, openai_server
from tests.agents.pool_under_test import chunks
from tests.waits import BOUND_S


@asynccontextmanager
async def opening() -> AsyncIterator[Callable[[ModelSettings], Awaitable[Models]]]:
    """Opens models, and closes them at the end."""
    made: list[Models] = []

    async def open_models(settings: ModelSettings) -> Models:
        made.append(Models(settings))
        return made[-1]

    yield open_models
    for models in made:
        await models.close()


async def test_text_is_streamed_and_tools_are_called_over_the_wire(tmp_path: Path) -> None:
    call = ("agent", {"agent": "poet", "message": "spring"})
    async with (
        openai_server([call, "roses for you"]) as server,
        open_agents(tmp_path, function("poet", "roses")) as under_test,
        opening() as opened,
    ):
        models = await opened(ModelSettings(name="openai:small", base_url=server.url))
        assert models.default is not None, models.problem
        under_test.models[""] = models.default
        under_test.add({"id": "bot", "goal": "Be kind"})
        view = await under_test.ask("bot", "Something about spring")
        assert (view.state, said(view)) == (TaskState.COMPLETED, "rosesforyou")
        steps = await under_test.steps(view)
        assert len([chunk for chunk in chunks(steps) if chunk.artifact_id.endswith("-text-0")]) >= 3
        assert values(steps, "sub_agent_response") == [{"agent": "poet", "depth": 1, "content": "roses"}]
        first, second = server.asked
        assert first["model"] == "small"
        assert "Be kind" in first["messages"][0]["content"]
        assert {tool["function"]["name"] for tool in first["tools"]} >= {"agent", "parallel", "fetch", "write"}
        assert second["messages"][-1]["content"] == "[/agent poet spring]\nroses\n[END AGENT]"
        assert server.keys == ["Bearer none", "Bearer none"]
        assert view.result is not None
        assert isinstance(view.result.metadata, dict)
        usage = view.result.metadata["usage"]
        assert (usage["input_tokens"], usage["output_tokens"], usage["tokens"]) == (22, 10, 32)


async def test_a_failure_of_the_server_is_one_word_to_the_sender(tmp_path: Path) -> None:
    async with openai_server([400]) as server, open_agents(tmp_path) as under_test, opening() as opened:
        models = await opened(ModelSettings(name="openai:small", base_url=server.url))
        assert models.default is not None
        under_test.models[""] = models.default
        under_test.add({"id": "bot"})
        view = await under_test.ask("bot", "x")
        assert (view.state, said(view)) == (TaskState.FAILED, "the model failed: invalid_request")


async def test_the_key_comes_from_the_variable_that_the_settings_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "k-1")
    async with openai_server(["hi"]) as server, open_agents(tmp_path) as under_test, opening() as opened:
        models = await opened(ModelSettings(name="openai:small", base_url=server.url, api_key_env="MY_KEY"))
        assert models.default is not None
        under_test.models[""] = models.default
        under_test.add({"id": "bot"})
        await under_test.ask("bot", "x")
        assert server.keys == ["Bearer k-1"]


def agent(**more: Any) -> Any:
    return read_agent_definition({"id": "bot", **more})


def test_a_definition_may_name_the_models_that_are_allowed_and_no_others() -> None:
    models = Models(ModelSettings(name="openai:small", others=("openai:big",), base_url="http://127.0.0.1:9/v1"))
    assert models.default is not None
    assert models.model_of(agent()) is models.default
    big = models.model_of(agent(model="openai/big"))
    assert big is not None
    assert big.model_name == "big"
    assert models.model_of(agent(model="openai:big")) is big
    assert models.model_of(agent(model="openai:bigger")) is models.default


@pytest.mark.parametrize("name", ["nobody:nothing", "openai:gpt-5"])
def test_a_model_that_cannot_be_used_is_none_and_says_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    models = Models(ModelSettings(name=name))
    assert models.default is None
    assert name in models.problem


def test_an_agent_that_names_no_model_is_played_by_the_daemons_own() -> None:
    others = ("openai:big", "anthropic:claude-sonnet-5")
    models = Models(ModelSettings(name="openai:small", others=others, base_url="http://127.0.0.1:9/v1"))
    for declared in ({}, {"model": ""}):
        model = models.model_of(agent(**declared))
        assert model is not None
        assert model.model_name == "small"


async def test_the_address_and_its_key_are_one_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "k-1")
    monkeypatch.setenv("DEEPSEEK_API_KEY", "k-2")
    async with openai_server([]) as server, opening() as opened:
        settings = ModelSettings(
            name="openai:small",
            others=("deepseek:deepseek-chat", "openai:big"),
            base_url=server.url,
            api_key_env="MY_KEY",
        )
        models = await opened(settings)
        ours, theirs = models.allowed_model("openai:big"), models.allowed_model("deepseek:deepseek-chat")
        assert ours is not None
        assert (ours.base_url or "").startswith(server.url)
        assert theirs is not None, models.problem
        assert theirs.system == "deepseek"
        assert "127.0.0.1" not in (theirs.base_url or "")
        assert theirs.provider is not None
        assert theirs.provider.client.api_key == "k-2"


@pytest.mark.parametrize("line", [Drip("word", 0.05), 500], ids=["a word now and then", "failures and retries"])
async def test_a_whole_answer_has_a_time_limit_however_often_something_comes(tmp_path: Path, line: Line) -> None:
    async with openai_server([line] * 50) as server, open_agents(tmp_path) as under_test, opening() as opened:
        settings = ModelSettings(name="openai:small", base_url=server.url, request_ms=400)
        model_agents = ModelAgents(settings, await opened(settings), under_test.services)
        definition = agent()
        under_test.catalogue.add_resident("default", definition, "code")
        under_test.workers.register(under_test.catalogue.identity("default", "bot"), model_agents.body(definition))
        view = await under_test.ask("bot", "go")
        assert (view.state, said(view)) == (TaskState.FAILED, "the model failed: timed_out")


async def test_another_model_is_asked_when_one_is_overloaded_and_the_sender_is_told(tmp_path: Path) -> None:
    note = ("mem_write", {"title": "t", "text": "once"})
    lines: list[Line] = [503, 503, 503, note, "hello"]
    async with openai_server(lines) as server, open_agents(tmp_path) as under_test, opening() as opened:
        settings = ModelSettings(name="openai:small", base_url=server.url, others=("openai:big",))
        model_agents = ModelAgents(settings, await opened(settings), under_test.services)
        definition = agent(fallback_models=["openai:small", "openai:unlisted", "openai:big"])
        under_test.catalogue.add_resident("default", definition, "code")
        under_test.workers.register(under_test.catalogue.identity("default", "bot"), model_agents.body(definition))
        view = await under_test.ask("bot", "go")
        assert (view.state, said(view)) == (TaskState.COMPLETED, "hello")
        # The library asks three times by itself. The other model goes on for the rest of the turn.
        assert [asked["model"] for asked in server.asked] == ["small"] * 3 + ["big"] * 2
        assert view.result is not None
        assert isinstance(view.result.metadata, dict)
        assert view.result.metadata["model"] == "big"
        usage = view.result.metadata["usage"]
        assert (usage["model_fallbacks"], usage["tokens"]) == (1, 32)
        told = [step.what for step in await under_test.steps(view) if isinstance(step.what, StatusUpdate)]
        (change,) = (each for each in told if each.metadata and FALLBACK in each.metadata)
        assert change.text == "The model small is overloaded; big is asked now"
        assert change.metadata == {FALLBACK: {"model": "small", "why": "overloaded", "asked": "big"}}


async def test_an_agent_that_names_no_fallbacks_has_those_of_the_settings(tmp_path: Path) -> None:
    async with (
        openai_server([503, 503, 503, "hello"]) as server,
        open_agents(tmp_path) as under_test,
        opening() as opened,
    ):
        settings = ModelSettings(name="openai:small", base_url=server.url, fallbacks=("openai:spare",))
        models = await opened(settings)
        definition = agent()
        under_test.catalogue.add_resident("default", definition, "code")
        body = ModelAgents(settings, models, under_test.services).body(definition)
        under_test.workers.register(under_test.catalogue.identity("default", "bot"), body)
        view = await under_test.ask("bot", "go")
        assert (view.state, said(view)) == (TaskState.COMPLETED, "hello")
        assert [asked["model"] for asked in server.asked] == ["small"] * 3 + ["spare"]
        # Whoever names fallbacks has these alone: also none at all, by naming the model itself.
        assert models.fallbacks(agent(fallback_models=["openai:small"])) == ()
        assert [model.model_name for model in models.fallbacks(agent(model="openai:spare"))] == []


async def test_an_advisor_that_cannot_answer_has_its_own_fallbacks(tmp_path: Path) -> None:
    lines: list[Line] = ["fine", 503, 503, 503, "CONTINUE"]
    async with openai_server(lines) as server, open_agents(tmp_path) as under_test, opening() as opened:
        settings = ModelSettings(
            name="openai:small",
            base_url=server.url,
            others=("openai:wise", "openai:wiser"),
            fallbacks=("openai:spare",),
        )
        advisor = {"model": "openai:wise", "mode": "gate", "fallback_models": ["openai:unlisted", "openai:wiser"]}
        definition = agent(advisor=advisor)
        under_test.catalogue.add_resident("default", definition, "code")
        body = ModelAgents(settings, await opened(settings), under_test.services).body(definition)
        under_test.workers.register(under_test.catalogue.identity("default", "bot"), body)
        view = await under_test.ask("bot", "go")
        assert (view.state, said(view)) == (TaskState.COMPLETED, "fine")
        assert [asked["model"] for asked in server.asked] == ["small"] + ["wise"] * 3 + ["wiser"]
        told = [step.what for step in await under_test.steps(view) if isinstance(step.what, StatusUpdate)]
        assert [each.metadata[FALLBACK]["asked"] for each in told if each.metadata and FALLBACK in each.metadata] == [
            "wiser"
        ]


async def test_a_gate_whose_advisor_cannot_answer_stays_shut_whatever_the_settings_name(tmp_path: Path) -> None:
    lines: list[Line] = ["a secret", 503, 503, 503]
    async with openai_server(lines) as server, open_agents(tmp_path) as under_test, opening() as opened:
        settings = ModelSettings(
            name="openai:small", base_url=server.url, others=("openai:wise",), fallbacks=("openai:spare",)
        )
        definition = agent(advisor={"model": "openai:wise", "mode": "gate"})
        under_test.catalogue.add_resident("default", definition, "code")
        body = ModelAgents(settings, await opened(settings), under_test.services).body(definition)
        under_test.workers.register(under_test.catalogue.identity("default", "bot"), body)
        view = await under_test.ask("bot", "go")
        assert view.state is TaskState.FAILED
        assert "secret" not in str(await under_test.steps(view))
        assert [asked["model"] for asked in server.asked] == ["small"] + ["wise"] * 3


async def test_an_answer_that_is_cut_says_so(tmp_path: Path) -> None:
    async with (
        openai_server([Cut("half an"), Cut("")]) as server,
        open_agents(tmp_path) as under_test,
        opening() as opened,
    ):
        models = await opened(ModelSettings(name="openai:small", base_url=server.url))
        assert models.default is not None
        under_test.models[""] = models.default
        under_test.add({"id": "bot"})
        view = await under_test.ask("bot", "go")
        assert (view.state, said(view)) == (TaskState.COMPLETED, "halfan")
        assert view.result is not None
        assert view.result.status is ResultStatus.PARTIAL
        assert isinstance(view.result.metadata, dict)
        assert view.result.metadata["stop_reason"] == "length"
        nothing = await under_test.ask("bot", "go")
        assert nothing.state is TaskState.FAILED
        assert "cut at max_tokens" in said(nothing)
        assert nothing.result is not None
        assert isinstance(nothing.result.metadata, dict)
        assert nothing.result.metadata["stop_reason"] == "length"
        assert nothing.result.metadata["usage"]["tokens"] == 16


async def test_an_advisor_is_a_model_that_is_allowed_and_without_it_a_gate_stays_shut(tmp_path: Path) -> None:
    lines = ["an answer", "CONTINUE", "unasked"]
    async with openai_server(lines) as server, open_agents(tmp_path) as under_test, opening() as opened:
        settings = ModelSettings(name="openai:small", base_url=server.url, others=("openai:wise",))
        model_agents = ModelAgents(settings, await opened(settings), under_test.services)
        for model, mode, told in (
            ("openai/wise", "gate", "ananswer"),
            ("openai:other", "gate", "the model of this agent's advisor, openai:other, cannot be used"),
            ("openai:other", "consult", "unasked"),
        ):
            agent_id = f"{model.partition(':')[2] or 'wise'}-{mode}"
            definition = read_agent_definition({"id": agent_id, "advisor": {"model": model, "mode": mode}})
            under_test.catalogue.add_resident("default", definition, "code")
            under_test.workers.register(
                under_test.catalogue.identity("default", agent_id), model_agents.body(definition)
            )
            assert told in said(await under_test.ask(agent_id, "go"))
        assert [asked["model"] for asked in server.asked] == ["small", "wise", "small"]
        assert "advise" in {tool["function"]["name"] for tool in server.asked[0]["tools"]}
        assert "advise" not in {tool["function"]["name"] for tool in server.asked[2]["tools"]}


async def test_agents_are_played_by_a_model_if_there_is_one(tmp_path: Path) -> None:
    async with open_agents(tmp_path) as under_test:
        with_model, without = ModelSettings(name="test"), ModelSettings()
        assert isinstance(ModelAgents(with_model, Models(with_model), under_test.services).body(agent()), ModelAgent)
        assert isinstance(ModelAgents(without, Models(without), under_test.services).body(agent()), UnavailableAgent)


def test_without_the_extra_there_is_no_model_and_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covenant.daemon.wiring.language_models.LIBRARY", "no_such_library")
    models = Models(ModelSettings(name="openai:small"))
    assert (models.default, models.model_of(agent())) == (None, None)
    assert "pip install 'covenant-a2a[model]'" in models.problem


def test_a_daemon_without_a_model_does_not_load_the_library() -> None:
    code = "import sys; sys.modules['pydantic_ai'] = None; import covenant.daemon.lifecycle"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=BOUND_S)
