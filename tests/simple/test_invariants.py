"""The invariants of the simple exchange, one test each, through `covenant.simple`.

`tests/conformance/simple.toml` says which is which.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from covenant.agents.api import Agent
from covenant.exchange.simple import SimpleLimits
from covenant.ledger.machine.commands import Sweep
from covenant.model.agent_definition import AgentDefinition
from covenant.model.errors import Invalid
from covenant.model.ids import TaskId
from covenant.simple import (
    A2ATask,
    A2ATaskDeps,
    A2ATaskParams,
    A2ATaskSendRequest,
    NotFoundError,
    build_agent_card,
    build_agent_card_for_agent,
    clear_task_store,
    handle_task_get,
    handle_task_send,
)
from tests.doors.simple.simple_under_test import Patient, echo
from tests.ledger_contract.fake_clock import FakeClock
from tests.waits import BOUND_S


def program(*events: dict[str, Any], then: str = "") -> AgentDefinition:
    """A program that says this, line by line, and then does that."""
    lines = "".join(f"print({json.dumps(json.dumps(event))}, flush=True)\n" for event in events)
    return AgentDefinition(
        id="program", kind="process", default_project="work", command=(sys.executable, "-c", lines + then)
    )


async def ended(deps: A2ATaskDeps, task: A2ATask) -> A2ATask:
    assert deps.ledger is not None
    assert await deps.ledger.finished(TaskId(task.id), int(BOUND_S * 1000))
    found = await handle_task_get(task.id)
    assert found is not None
    return found


def said(task: A2ATask) -> list[str]:
    return ["".join(part.text for part in message.parts) for message in task.messages if message.role == "agent"]


async def states(deps: A2ATaskDeps, task: A2ATask) -> list[str]:
    """Every state that the task was ever in, as this door tells them."""
    assert deps.ledger is not None
    kinds = {"Began": "submitted", "Started": "working", "Ended": "ended"}
    steps = await deps.ledger.steps(TaskId(task.id), 0, 1_000)
    return [kinds[name] for step in steps if (name := type(step.what).__name__) in kinds]


async def test_a_tasks_states_only_go_forward() -> None:
    failing = program({"type": "session_exited"}, {"type": "error", "message": "late"}, {"type": "session_stopped"})
    async with A2ATaskDeps.memory(failing) as deps:
        task = await handle_task_send(deps, {"message": "Hello"})
        done = await ended(deps, task)
        assert (task.state, done.state, said(done)) == ("working", "completed", [])
        assert await states(deps, task) == ["submitted", "working", "ended"]


async def test_states_change_by_what_the_program_says_and_nothing_looks_for_it() -> None:
    hello = {"type": "assistant", "content": "Hi there"}
    for event, state, words in (
        ({"type": "session_exited"}, "completed", "Hi there"),
        ({"type": "session_stopped"}, "completed", "Hi there"),
        ({"type": "error", "message": "no luck"}, "failed", "no luck"),
    ):
        # The program goes on after its last word: that word ends the task, not the program's exit.
        async with A2ATaskDeps.memory(program(hello, event, then="import time; time.sleep(600)")) as deps:
            done = await ended(deps, await handle_task_send(deps, {"message": "Hello"}))
            assert (done.state, said(done)[-1]) == (state, words)


async def test_two_assistant_events_are_two_messages() -> None:
    first, second = ({"type": "assistant", "content": words} for words in ("Hi there", "and good night"))
    for last in ({"type": "session_exited"}, {"type": "result", "text": "Hi thereand good night"}):
        async with A2ATaskDeps.memory(program(first, second, last)) as deps:
            done = await ended(deps, await handle_task_send(deps, {"message": "Hello"}))
            assert said(done) == ["Hi there", "and good night"]
            assert [message.role for message in done.messages] == ["user", "agent", "agent"]


async def test_the_first_agent_with_a_project_gets_the_task() -> None:
    async with A2ATaskDeps.memory(echo("without", project=""), echo("first"), echo("second")) as deps:
        done = await ended(deps, await handle_task_send(deps, {"message": "Hello"}))
        assert said(done) == ["first: Hello"]
    async with A2ATaskDeps.memory(echo("without", project="")) as deps:
        with pytest.raises(NotFoundError, match="Agent with default project not found"):
            await handle_task_send(deps, {"message": "Hello"})


async def test_at_most_a_thousand_tasks_are_shown_and_the_oldest_hundred_that_ended_go_together(
    tmp_path: Path,
) -> None:
    async with A2ATaskDeps.open(tmp_path, echo()) as deps:
        assert deps.ledger is not None
        sent = [await ended(deps, await handle_task_send(deps, {"message": "Hello"})) for _ in range(1_000)]
        assert await handle_task_get(sent[0].id) == sent[0]
        last = await ended(deps, await handle_task_send(deps, {"message": "one more"}))
        shown = [task for task in (*sent, last) if await handle_task_get(task.id) is not None]
        assert shown == [*sent[100:], last]
        assert len(await deps.ledger.of_tenant("default", 2_000)) == 1_001
    async with A2ATaskDeps.open(tmp_path, echo()) as deps:
        # The view begins with the newest thousand again: nothing was lost by not being shown.
        assert await handle_task_get(sent[1].id) == sent[1]
        assert await handle_task_get(sent[0].id) is None


async def test_what_has_not_ended_is_always_shown() -> None:
    patient, quick = Patient(), echo("quick", skills=["quick"])
    async with A2ATaskDeps.memory(patient.agent, quick, limits=SimpleLimits(rate_per_min=0, kept_max=4, pruned=2)) as d:
        waiting = await handle_task_send(d, {"message": "Hello"})
        done = [await ended(d, await handle_task_send(d, {"message": "x", "skill": "quick"})) for _ in range(10)]
        still = await handle_task_get(waiting.id)
        assert still is not None
        assert still.state == "working"
        shown = [task for task in done if await handle_task_get(task.id) is not None]
        assert shown == done[-len(shown) :]
        assert 1 + len(shown) <= 4
        patient.go_on.set()
        assert (await ended(d, waiting)).state == "completed"


async def test_what_is_not_done_in_its_time_fails_and_says_so() -> None:
    clock, patient = FakeClock(), Patient()
    async with A2ATaskDeps.memory(patient.agent, clock=clock) as deps:
        assert deps.ledger is not None
        for body, ms in (({"message": "Hello", "timeoutMs": 5_000}, 5_000), ({"message": "Hello"}, 300_000)):
            patient.spoke.clear()
            patient.stopped.clear()
            task = await handle_task_send(deps, body)
            await asyncio.wait_for(patient.spoke.wait(), BOUND_S)
            clock.advance(ms - 1)
            assert (await deps.ledger.commit(Sweep())).timed_out == ()
            clock.advance(1)
            await deps.ledger.commit(Sweep())
            await asyncio.wait_for(patient.stopped.wait(), BOUND_S)
            failed = await ended(deps, task)
            assert (failed.state, said(failed)[-1]) == ("failed", "Task timed out")


async def test_what_has_ended_does_not_time_out_any_more() -> None:
    clock = FakeClock()
    broken = Agent("broken", default_project="work", skills=["break"])

    @broken
    async def fail(turn: Any) -> None:
        raise RuntimeError(turn.text)

    async with A2ATaskDeps.memory(echo(), broken, clock=clock) as deps:
        assert deps.ledger is not None
        for skill, state in (("chat", "completed"), ("break", "failed")):
            task = await handle_task_send(deps, {"message": "Hello", "timeoutMs": 1_000, "skill": skill})
            done = await ended(deps, task)
            clock.advance(10_000)
            swept = await deps.ledger.commit(Sweep())
            assert (swept.timed_out, swept.expired) == ((), ())
            assert await handle_task_get(task.id) == done
            assert done.state == state
            assert await states(deps, task) == ["submitted", "working", "ended"]


SERVERS = {
    "servers": {
        "corvid": {
            "command": "corvid-mcp",
            "tools": [
                {"name": "corvid_github_list_prs", "description": "Lists them"},
                {"name": "corvid_web_search"},
                {"name": "plain"},
            ],
        }
    }
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "mcp_servers.json").write_text(json.dumps(SERVERS), encoding="utf-8")
    return tmp_path


def test_a_card_has_every_registered_tool_as_a_skill(home: Path) -> None:
    card = build_agent_card("https://agents.example.com/", home=home)
    skills = {skill.id: skill for skill in card.skills}
    assert {"corvid_github_list_prs", "corvid_web_search", "plain"} <= skills.keys()
    assert (skills["corvid_github_list_prs"].name, skills["corvid_github_list_prs"].tags) == (
        "GitHub List PRs",
        ("github", "pull-requests"),
    )
    assert (skills["corvid_web_search"].name, skills["corvid_web_search"].tags) == ("Web Search", ("search", "web"))
    assert (skills["plain"].description, skills["plain"].tags) == ("Tool: plain", ("general",))
    assert card.url.startswith("https://agents.example.com/v1/")
    assert build_agent_card(home=home).url.startswith("http://127.0.0.1:8421/")


async def test_an_agent_is_told_that_its_task_comes_from_an_agent() -> None:
    echoing = (
        "import sys; given = sys.stdin.readline(); print(__import__('json').dumps({'type': 'result', 'text': given}))"
    )
    async with A2ATaskDeps.memory(program(then=echoing)) as deps:
        done = await ended(deps, await handle_task_send(deps, {"message": "Hello"}))
        given = json.loads(said(done)[-1])
        assert (given["source"], given["text"]) == ("agent", "Hello")


def test_an_agents_card_has_only_the_tools_it_may_use(home: Path) -> None:
    may = AgentDefinition(id="may", mcp_tool_permissions=("corvid_web_search", "not_registered"))
    card = build_agent_card_for_agent(may, "https://agents.example.com", home=home)
    assert [skill.id for skill in card.skills] == ["chat", "corvid_web_search"]
    usual = build_agent_card_for_agent(AgentDefinition(id="usual"), "https://agents.example.com", home=home)
    assert {skill.id for skill in usual.skills} == {"chat", "corvid_github_list_prs", "corvid_web_search", "plain"}


# What the functions do besides.


async def test_a_request_may_come_as_a_mapping_as_bytes_or_as_itself() -> None:
    async with A2ATaskDeps.memory(echo()) as deps:
        for body in (
            {"params": {"message": "Hello"}},
            b'{"message": "Hello"}',
            A2ATaskSendRequest(params=A2ATaskParams(message="Hello")),
        ):
            assert said(await ended(deps, await handle_task_send(deps, body))) == ["echo: Hello"]
        for bad in ({}, {"message": " "}, {"message": "Hello", "depth": 4}, b"{"):
            with pytest.raises(Invalid):
                await handle_task_send(deps, bad)


async def test_a_cleared_store_shows_nothing_and_takes_what_is_new() -> None:
    patient, quick = Patient(), echo("quick", skills=["quick"])
    async with A2ATaskDeps.memory(patient.agent, quick) as deps:
        running = await handle_task_send(deps, {"message": "Hello"})
        done = await ended(deps, await handle_task_send(deps, {"message": "Hello", "skill": "quick"}))
        clear_task_store()
        assert (await handle_task_get(running.id), await handle_task_get(done.id)) == (None, None)
        again = await ended(deps, await handle_task_send(deps, {"message": "Hello", "skill": "quick"}))
        assert again.state == "completed"
    assert await handle_task_get(again.id) is None
