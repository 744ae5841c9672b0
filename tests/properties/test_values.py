"""Whatever Python value goes into whichever public entry: what is acknowledged can be read again after a start.

A refusal is a `Refusal` that names what is wrong, and leaves the ledger at work.
"""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from covenant import (
    Agent,
    AgentId,
    Client,
    ForceError,
    Mailbox,
    Requeue,
    Result,
    SyncTurn,
    Task,
    Turn,
    Worker,
    connect,
    local_agent,
)
from covenant.agents.api import BaseTurn, Rejection, TurnWork
from covenant.ledger.machine.event_codec import decode_events, encode_events
from covenant.ledger.machine.events import TaskSent, TaskUpdated
from covenant.model.content import Json
from covenant.model.errors import Refusal, WrongType
from covenant.model.ids import LeaseId, TaskId
from covenant.model.task import ResultStatus
from covenant.model.task_event import StatusUpdate
from covenant.simple import A2ATaskDeps, handle_task_get, handle_task_send
from tests.properties.values import ODD, VALUES
from tests.waits import BOUND_S

ALICE, BOB = local_agent("alice@here"), local_agent("bob@here")
FIELDS = Task.__struct_fields__
VERBS = (
    "recv_task_for",
    "try_recv_task_for",
    "recent_tasks",
    "task_queue",
    "repair_task",
    "repair_reason",
    "requeue",
    "force_error",
    "send_task",
    "send_result",
    "lease_id",
    "timeout_s",
    "request_id",
    "result_request_id",
    "try_recv_result_for",
    "recent_results",
    "new_task",
)
ENTRIES = [*(f"task.{field}" for field in FIELDS), *(f"result.{field}" for field in Result.__struct_fields__), *VERBS]
MODERATE = settings(max_examples=25, suppress_health_check=list(HealthCheck), deadline=None)


def task(**change: Any) -> Task:
    fields = {"id": str(uuid.uuid4()), "sender": ALICE, "recipient": BOB, "intent_text": "do this", **change}
    return Task(**fields)


async def call(mailbox: Mailbox, verb: str, value: Any) -> Any:
    """One verb with the value where it does not belong, or perhaps does."""
    one = TaskId(str(uuid.uuid4()))
    calls: dict[str, Any] = {
        "recv_task_for": lambda: mailbox.recv_task_for(value, timeout_s=0),
        "try_recv_task_for": lambda: mailbox.try_recv_task_for(value),
        "recent_tasks": lambda: mailbox.recent_tasks(value),
        "task_queue": lambda: mailbox.task_queue(value),
        "repair_task": lambda: mailbox.repair_task(value, ForceError("given up"), "it hangs"),
        "repair_reason": lambda: mailbox.repair_task(one, ForceError("given up"), value),
        "requeue": lambda: mailbox.repair_task(one, Requeue(value), "it hangs"),
        "force_error": lambda: mailbox.repair_task(one, ForceError(value, value), "it hangs"),
        "send_task": lambda: mailbox.send_task(value),
        "send_result": lambda: mailbox.send_result(value),
        "lease_id": lambda: mailbox.send_result(Result.ok(one, "done"), value),
        "timeout_s": lambda: mailbox.recv_result(timeout_s=value if not isinstance(value, float) else 0),
        "request_id": lambda: mailbox.recv_task(request_id=value, timeout_s=0),
        "result_request_id": lambda: mailbox.recv_result(request_id=value, timeout_s=0),
        "try_recv_result_for": lambda: mailbox.try_recv_result_for(value),
        "recent_results": lambda: mailbox.recent_results(value),
        "new_task": lambda: mailbox.send_task(mailbox.new_task(ALICE, BOB, value, parent=value)),
    }
    async with asyncio.timeout(0.2 if verb == "timeout_s" else 20):
        return await calls[verb]()


async def settle(mailbox: Mailbox, field: str, value: Any) -> Result:
    """A result with one field of any value, for a task of its own that is leased."""
    sent = task(recipient=local_agent(f"{uuid.uuid4().hex}@here"))
    await mailbox.send_task(sent)
    await mailbox.recv_task_for(sent.recipient)
    fields: dict[str, Any] = {"task_id": sent.id, "status": ResultStatus.ERROR, "error_message": "no", field: value}
    result = Result(**fields)
    await mailbox.send_result(result)
    return result


async def hand_over(home: Path, entries: list[tuple[str, Any]]) -> None:
    told: dict[TaskId, bytes] = {}
    results: dict[TaskId, bytes] = {}
    async with Mailbox.open(home, durability="os") as mailbox:
        for entry, value in entries:
            kind, _, field = entry.partition(".")
            try:
                if kind == "task":
                    sent = task(**{field: value})
                    accepted = await mailbox.send_task(sent)
                    told[accepted.task_id] = msgspec.json.encode(sent)
                elif kind == "result":
                    result = await settle(mailbox, field, value)
                    results[result.task_id] = msgspec.json.encode(result)
                else:
                    await call(mailbox, entry, value)
            except (Refusal, TimeoutError):
                pass
            last = task()
            told[(await mailbox.send_task(last)).task_id] = msgspec.json.encode(last)
    async with Mailbox.open(home) as mailbox:
        await mailbox.compact()
        assert await mailbox.recent_results(100) is not None  # waits for the archive to have everything
        for task_id, encoded in told.items():
            kept = await mailbox._ledger.entry(task_id)
            assert kept is not None
            assert msgspec.json.decode(msgspec.json.encode(kept.task)) == msgspec.json.decode(encoded)
        for task_id, encoded in results.items():
            shown = await mailbox._ledger.show(task_id, None, 0)
            assert shown is not None
            assert msgspec.json.decode(msgspec.json.encode(shown.result)) == msgspec.json.decode(encoded)
    async with Mailbox.open(home) as mailbox:  # and the snapshot can be read
        assert await mailbox.recent_tasks(1)


@pytest.mark.matrix
@MODERATE
@given(st.lists(st.tuples(st.sampled_from(ENTRIES), VALUES), min_size=1, max_size=6))
@example([("task.deadline_ms", 1.5), ("task.parent", 5), ("task.parts", ["x"]), ("task.timeout_ms", 1.5)])
@example([("result.error_message", None), ("result.status", "finished"), ("result.content", ("x",))])
@example([("task.deadline_ms", 2**63), ("task.timeout_ms", 2**64), ("task.depth", 2**63), ("task.depth", -1)])
def test_whatever_is_handed_to_the_library_it_opens_again_and_has_what_it_acknowledged(
    entries: list[tuple[str, Any]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(hand_over(Path(folder) / "home", entries))


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_odd_value_at_every_entry_of_the_library(entry: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(hand_over(Path(folder) / "home", [(entry, value) for value in ODD]))


SAYINGS: dict[str, Any] = {
    "yield": lambda turn, value: value,
    "status": lambda turn, value: turn.status(value),
    "need_input": lambda turn, value: turn.need_input(value),
    "reject": lambda turn, value: turn.reject(value),
    "reply": lambda turn, value: turn.reply(value, "and more"),
    "data": lambda turn, value: turn.data(value),
    "file": lambda turn, value: turn.file(value, b"data", media_type=value),
    "file_data": lambda turn, value: turn.file("name", value),
    "spend": lambda turn, value: turn.spend(value, more=value) or "spent",
    "update": lambda turn, value: StatusUpdate(value, metadata=value, message_id=value),
    "metadata": lambda turn, value: StatusUpdate("on it", metadata={"a": value}),
    "rejection": lambda turn, value: Rejection(value),
    "json": lambda turn, value: Json(value),
    "spend_name": lambda turn, value: turn.spend(**{str(value): 1}) or "spent",
}


SHAPES = ("async_generator", "async_function", "plain_generator", "plain_function")


def shaped(shape: str, say: Callable[[BaseTurn], Any]) -> Any:
    """A function of this shape, which says this."""

    async def async_generator(turn: Turn) -> Any:
        yield say(turn)

    async def async_function(turn: Turn) -> Any:
        return say(turn)

    def plain_generator(turn: SyncTurn) -> Any:
        yield say(turn)

    def plain_function(turn: SyncTurn) -> Any:
        return say(turn)

    made = (async_generator, async_function, plain_generator, plain_function)
    return dict(zip(SHAPES, made, strict=True))[shape]


async def speak(home: Path, saying: str, value: Any, shape: str) -> None:
    agent = Agent("speaker", default_project="project")
    agent(shaped(shape, lambda turn: SAYINGS[saying](turn, value)))
    async with A2ATaskDeps.open(home, agent) as deps:
        sent = await handle_task_send(deps, {"message": "speak"})
        task_id = TaskId(sent.id)
        assert deps.ledger is not None
        async with asyncio.timeout(BOUND_S):
            while (entry := await deps.ledger.entry(task_id)) is not None and not entry.finished:
                if entry.state == "parked":
                    break
                await deps.ledger.finished(task_id, 20)
        before = await handle_task_get(task_id)
    async with A2ATaskDeps.open(home, agent):
        assert await handle_task_get(task_id) == before
        assert before is not None


@settings(max_examples=20, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.sampled_from(sorted(SAYINGS)), VALUES, st.sampled_from(SHAPES))
@example("status", 5, "async_generator")
@example("need_input", 5, "async_function")
@example("reject", None, "plain_generator")
@example("metadata", {"\ud800": 1}, "async_generator")
@example("rejection", None, "plain_generator")
@example("json", float("nan"), "plain_generator")
@example("spend_name", "\ud800", "plain_function")
def test_whatever_an_agent_says_its_task_ends_and_the_ledger_opens_again(saying: str, value: Any, shape: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(speak(Path(folder) / "home", saying, value, shape))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("saying", sorted(SAYINGS))
def test_every_odd_value_said_by_every_shape_of_a_function(saying: str, shape: str) -> None:
    for value in ODD:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(speak(Path(folder) / "home", saying, value, shape))


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_the_gate_is_as_strict_as_the_journals_decoder(value: Any) -> None:
    """What passes is read back as what is applied; what does not pass, the decoder would refuse or change."""
    lease, refused = LeaseId("l"), list[WrongType]()
    for events in (
        [TaskUpdated(TaskId("t"), lease, 1, StatusUpdate(value))],
        [TaskUpdated(TaskId("t"), lease, 1, StatusUpdate("x", metadata=value))],
        [TaskUpdated(TaskId("t"), lease, value, StatusUpdate("x", parts=value))],
        [TaskSent(TaskId("t"), task(parts=value, idempotency=value), value)],
    ):
        try:
            encoded, applied = encode_events(events)
        except WrongType as wrong:
            refused.append(wrong)
        else:
            assert decode_events(encoded) == applied
            assert b"\n" not in encoded
    for each in refused:
        assert each.field.startswith(("task_updated", "task_sent", "events"))
        assert each.message.encode().startswith(each.field.encode())


TYPED: list[tuple[str, Any]] = [
    ("text", lambda: Turn.status(5)),  # type: ignore[arg-type]
    ("text", lambda: Turn.need_input(None)),  # type: ignore[arg-type]
    ("text", lambda: Turn.need_auth(b"x")),  # type: ignore[arg-type]
    ("text", lambda: Turn.reject(None)),  # type: ignore[arg-type]
    ("content[1]", lambda: Turn.reply("x", 5)),  # type: ignore[arg-type]
    ("value.a", lambda: Turn.data({"a": float("nan")})),
    ("more", lambda: Turn(cast(TurnWork, None)).spend(**{"\ud800": 1})),
    ("url", lambda: Turn.file("x", url=5)),  # type: ignore[arg-type]
    ("data", lambda: Turn.file("x", "text")),  # type: ignore[arg-type]
    ("name", lambda: Agent(5)),  # type: ignore[arg-type]
    ("timeout_ms", lambda: Agent("x", timeout_ms=1.5)),  # type: ignore[arg-type]
    ("idempotent", lambda: Agent("x", idempotent="yes")),  # type: ignore[arg-type]
    ("on_lost", lambda: Agent("x", on_lost="run")),  # type: ignore[arg-type]
    ("skills", lambda: Agent("x", skills="skill")),
    ("concurrency", lambda: Agent("x", concurrency=True)),
    ("display", lambda: local_agent(5)),  # type: ignore[arg-type]
    ("sender.pubkey", lambda: Mailbox.new_task(AgentId("a@b", 5), BOB, "x")),  # type: ignore[arg-type]
    ("parent", lambda: Mailbox.new_task(ALICE, BOB, "x", parent=5)),  # type: ignore[arg-type]
    ("home", lambda: Mailbox.open(5)),  # type: ignore[arg-type]
    ("durability", lambda: Mailbox.open("home", durability="never")),  # type: ignore[arg-type]
    ("token", lambda: Client("http://localhost", 5)),  # type: ignore[arg-type]
    ("count", lambda: Client("http://localhost", "t").take(1.5)),  # type: ignore[arg-type]
    ("wait_ms", lambda: Client("http://localhost", "t").results(wait_ms="1")),  # type: ignore[arg-type]
    ("task.deadline_ms", lambda: Client("http://localhost", "t").send(task(deadline_ms=1.5))),
    ("result.status", lambda: Client("http://localhost", "t").settle(_result(status="finished"), LeaseId("l"))),
    ("result.error_message", lambda: Client("http://localhost", "t").settle(_result(error_message=None), LeaseId("l"))),
    ("concurrency", lambda: Worker("http://localhost", "t", concurrency=1.5)),  # type: ignore[arg-type]
    ("url_or_name", lambda: connect(5)),  # type: ignore[arg-type]
    ("timeout_s", lambda: connect("http://localhost", timeout_s="1")),  # type: ignore[arg-type]
    ("headers", lambda: connect("http://localhost", headers=[("a", "b")])),  # type: ignore[arg-type]
    ("task_id", lambda: handle_task_get(5)),  # type: ignore[arg-type]
]


def _result(**change: Any) -> Result:
    fields: dict[str, Any] = {"task_id": TaskId("t"), "status": ResultStatus.OK, **change}
    return Result(**fields)


@pytest.mark.parametrize(("field", "wrong"), TYPED, ids=[f"{place}-{row[0]}" for place, row in enumerate(TYPED)])
def test_a_wrong_type_is_refused_at_the_call_with_the_fields_name(field: str, wrong: Any) -> None:
    with pytest.raises(WrongType) as refused:
        wrong()
    assert refused.value.field == field
    assert isinstance(refused.value, TypeError)
