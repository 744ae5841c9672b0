"""What becomes of tasks that came by the simple door: restarts, tenants, timeouts, programs, and what is shown."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from covenant.agents.api import Agent
from covenant.exchange.a2a_service import A2ARequest
from covenant.ledger.machine.commands import Settle, Take
from covenant.model.a2a_requests import Message, SendMessage
from covenant.model.agent_definition import AgentDefinition
from covenant.model.content import Text
from covenant.model.ids import TaskId
from covenant.model.task import Result
from tests.doors.simple.simple_under_test import TOKEN, Patient, SimpleUnderTest, echo, open_simple, text_of
from tests.waits import BOUND_S


async def test_a_task_is_still_known_after_a_restart(tmp_path: Path) -> None:
    patient = Patient("second")
    async with open_simple(tmp_path, echo()) as s:
        finished = await s.ended((await s.sent("Hello"))["id"])
    async with open_simple(tmp_path, echo(project=""), patient.agent) as s:
        assert (await s.get(finished["id"])).json() == finished
        running = await s.sent("go")
        await asyncio.wait_for(patient.spoke.wait(), BOUND_S)
    async with open_simple(tmp_path) as s:
        assert (await s.get(finished["id"])).json() == finished
        assert (await s.get(running["id"])).json()["state"] == "working"


async def test_another_tenants_task_is_not_found(tmp_path: Path) -> None:
    async with open_simple(tmp_path, echo()) as s:
        stranger = await s.tenant("stranger")
        task = await s.ended((await s.sent())["id"])
        foreign = await s.get(task["id"], token=stranger)
        unknown = await s.get("00000000-0000-4000-8000-000000000000", token=stranger)
        malformed = await s.get("no-such-task", token=stranger)
        assert {(each.status_code, each.text) for each in (foreign, unknown, malformed)} == {
            (404, '{"error":"Task not found","code":"NOT_FOUND"}')
        }
        assert (await s.send({"message": "Hello"}, token=stranger)).status_code == 404


async def test_a_timeout_fails_the_task_and_stops_its_agent_and_nothing_is_said_afterwards(tmp_path: Path) -> None:
    patient = Patient()
    async with open_simple(tmp_path, patient.agent) as s:
        task = await s.sent("Hello", timeoutMs=5_000)
        await asyncio.wait_for(patient.spoke.wait(), BOUND_S)
        assert not (await s.later(4_999)).timed_out
        assert (await s.later(1)).timed_out == (task["id"],)
        await asyncio.wait_for(patient.stopped.wait(), BOUND_S)
        failed = await s.ended(task["id"])
        assert (failed["state"], text_of(failed)) == ("failed", "Task timed out")
        assert [message["role"] for message in failed["messages"]] == ["user", "agent", "agent"]
        patient.go_on.set()
        await asyncio.wait_for(s.workers.idle(), BOUND_S)
        assert (await s.get(task["id"])).json() == failed


async def test_a_timeout_holds_across_a_restart(tmp_path: Path) -> None:
    patient = Patient()
    async with open_simple(tmp_path, patient.agent) as s:
        task = await s.sent("Hello", timeoutMs=5_000)
        await asyncio.wait_for(patient.spoke.wait(), BOUND_S)
        clock = s.clock
    async with open_simple(tmp_path, clock=clock) as s:
        await s.later(5_000)
        failed = await s.ended(task["id"])
        assert (failed["state"], text_of(failed)) == ("failed", "Task timed out")


def program(code: str, name: str = "program") -> AgentDefinition:
    return AgentDefinition(id=name, kind="process", command=(sys.executable, "-c", code), default_project="work")


async def test_a_program_that_cannot_be_started_fails_the_task(tmp_path: Path) -> None:
    missing = AgentDefinition(
        id="missing", kind="process", command=(str(tmp_path / "not-there"),), default_project="work"
    )
    async with open_simple(tmp_path / "home", missing) as s:
        failed = await s.ended((await s.sent())["id"])
        assert (failed["state"], text_of(failed)) == ("failed", "the agent could not be started")


async def test_a_task_that_nobody_begins_fails_when_its_time_is_over(tmp_path: Path) -> None:
    async with open_simple(tmp_path, AgentDefinition(id="absent", kind="worker", default_project="work")) as s:
        task = await s.sent("Hello", timeoutMs=5_000)
        assert task["state"] == "submitted"
        await s.later(5_000)
        failed = await s.ended(task["id"])
        assert (failed["state"], text_of(failed)) == ("failed", "Task timed out")


async def test_a_worker_from_outside_takes_the_task_and_its_result_is_the_answer(tmp_path: Path) -> None:
    async with open_simple(tmp_path, AgentDefinition(id="outside", kind="worker", default_project="work")) as s:
        task = await s.sent("Hello")
        worker = s.catalogue.identity("default", "outside")
        (leased,) = (await s.ledger.commit(Take(holder=worker, recipient=worker.pubkey))).tasks
        assert (leased.task.id, leased.task.intent_text) == (task["id"], "Hello")
        assert (await s.get(task["id"])).json()["state"] == "working"
        result = Result.ok(leased.task.id, "Hi there")
        await s.ledger.commit(Settle(task_id=leased.task.id, holder=worker, result=result))
        done = await s.ended(task["id"])
        assert (done["state"], text_of(done)) == ("completed", "Hi there")


@pytest.mark.parametrize(
    ("code", "state", "said"),
    [
        ('print(\'{"type": "assistant", "text": "Hi"}\\n{"type": "session_exited"}\')', "completed", "Hi"),
        ('print(\'{"type": "assistant", "text": "Hi"}\\n{"type": "session_stopped"}\')', "completed", "Hi"),
        ('print(\'{"type": "session_exited"}\\n{"type": "error", "message": "late"}\')', "completed", None),
        ('print(\'{"type": "error", "message": "no"}\\n{"type": "session_exited"}\')', "failed", "no"),
        ('print(\'{"type": "session_error", "message": "no"}\')', "failed", "no"),
        ('print(\'{"type": "assistant", "text": "Hi"}\'); raise SystemExit(3)', "failed", "exited with status 3"),
        ('print(\'{"type": "assistant", "text": "Hi"}\')', "completed", "Hi"),
    ],
)
async def test_whatever_a_program_says_its_first_end_is_the_end(
    tmp_path: Path, code: str, state: str, said: str | None
) -> None:
    async with open_simple(tmp_path, program(code)) as s:
        task = await s.ended((await s.sent())["id"])
        assert task["state"] == state
        if said is None:
            assert [message["role"] for message in task["messages"]] == ["user"]
        else:
            assert said in text_of(task)


async def test_what_waits_for_an_approval_is_told_as_working_and_fails_when_nobody_answers(tmp_path: Path) -> None:
    asking = program('print(\'{"type": "approval_request", "text": "May I?"}\')')
    async with open_simple(tmp_path, asking) as s:
        task = await s.sent("Hello", timeoutMs=5_000)
        with s.ledger.watch(TaskId(task["id"])) as watch:
            while text_or_nothing(shown := (await s.get(task["id"])).json()) != "May I?":
                await watch.next(BOUND_S)
        assert shown["state"] == "working"
        await s.later(5_000)
        failed = await s.ended(task["id"])
        assert (failed["state"], text_of(failed)) == ("failed", "Task timed out")


def text_or_nothing(task: dict[str, Any]) -> str:
    return text_of(task) if any(message["role"] == "agent" for message in task["messages"]) else ""


async def test_what_was_canceled_or_rejected_is_told_as_failed(tmp_path: Path) -> None:
    patient, picky = Patient(), Agent("picky", default_project="work", skills=["refuse"])

    @picky
    async def refuse(turn: Any) -> Any:
        return turn.reject("not this")

    async with open_simple(tmp_path, patient.agent, picky) as s:
        task = await s.sent()
        assert (await s.ask("POST", f"/v1/requests/{task['id']}/cancel")).status_code == 200
        assert (await s.ended(task["id"]))["state"] == "failed"
        rejected = await s.ended((await s.sent(skill="refuse"))["id"])
        assert (rejected["state"], text_of(rejected)) == ("failed", "not this")


async def test_what_an_agent_has_said_so_far_is_shown_while_it_works(tmp_path: Path) -> None:
    patient = Patient()
    async with open_simple(tmp_path, patient.agent) as s:
        task = await s.sent("Hello")
        with s.ledger.watch(TaskId(task["id"])) as watch:
            while not text_or_nothing(shown := (await s.get(task["id"])).json()):
                await watch.next(BOUND_S)
        assert (shown["state"], text_of(shown)) == ("working", "Hello: first, ")
        patient.go_on.set()
        done = await s.ended(task["id"])
        assert (done["state"], text_of(done)) == ("completed", "Hello: first, second")
        assert len(done["messages"]) == 2


async def test_only_what_can_be_said_in_text_is_told(tmp_path: Path) -> None:
    agent = Agent("maker", default_project="work")

    @agent
    async def make(turn: Any) -> AsyncIterator[Any]:
        yield turn.file("picture.png", b"\x89PNG")
        yield turn.data({"answer": 42})

    async with open_simple(tmp_path, agent) as s:
        done = await s.ended((await s.sent("Hello"))["id"])
        assert done["state"] == "completed"
        assert all(part["type"] == "text" for message in done["messages"] for part in message["parts"])


async def test_a_task_of_another_door_is_not_shown_here_and_one_of_this_door_is_shown_everywhere(
    tmp_path: Path,
) -> None:
    async with open_simple(tmp_path, echo()) as s:
        ask = ask_of(s)
        sent = SendMessage(message=Message(message_id="m", parts=(Text("Hello"),)))
        view = await s.conversations.send(ask, sent)
        assert (await s.get(view.task.id)).status_code == 404
        task = await s.ended((await s.sent("Hello"))["id"])
        shown = (await s.ask("GET", f"/v1/requests/{task['id']}")).json()["request"]
        assert (shown["origin"], shown["state"], shown["agent_id"]) == ("simple", "completed", "echo")


def ask_of(s: SimpleUnderTest) -> A2ARequest:
    caller, agent = s.tenancy.recognise(TOKEN), s.catalogue.agent("default", "echo")
    assert caller is not None
    assert agent is not None
    return A2ARequest(caller=caller, agent=agent)
