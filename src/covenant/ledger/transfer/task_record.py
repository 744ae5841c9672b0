"""A task with all of its history, in a form that both engines share. Nothing here does IO.

The archive of a home has a task's steps and its handovers as two lists; a database has the events that both came from.
`make_events` builds events that result in the same two lists, and `read_events` builds the lists from events. The order
of a step and a handover within the same millisecond is unknown, and no reader sees it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw

from covenant.ledger.embedded.archive.apply_batch import Batch, KnownRows
from covenant.ledger.embedded.archive.row_updates import DRAINED
from covenant.ledger.embedded.archive.task_packs import TaskParts
from covenant.ledger.embedded.journal.record import encode_line
from covenant.model.retry_policy import Posture

_encode: Final = msgspec.json.Encoder().encode

PAIRED: Final = {
    "leased": ("working",),
    "parked": ("parked",),
    "suspended": ("parked",),
    "settled": ("settled",),
}
"""The steps that share an event with a handover."""
RETURNED: Final = "result_returned"
WAITING: Final = ("parked", "suspended")


class TaskEventText(NamedTuple):
    """An event as JSON. `generation` is 0 for an event that no watcher sees."""

    ts_ms: int
    kind: str
    generation: int
    text: str


class TaskFacts(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The facts in a task's row: states have the archive's names."""

    task_id: str
    created_at_ms: int
    updated_at_ms: int
    ledger_state: str
    a2a_state: str
    digest: str
    generation: int
    turn: int
    attempt: int
    ending: str | None
    cause: str | None


class TaskRecord(msgspec.Struct, gc=False):
    facts: TaskFacts
    parts: TaskParts
    events: Sequence[TaskEventText]

    @property
    def finished(self) -> bool:
        return self.facts.ledger_state == DRAINED

    def comparable(self) -> bytes:
        """Everything that readers can see of the task, without the numbers of its places."""
        parts = self.parts
        handovers = [each[1:] for each in parts.handovers]
        return _encode((self.facts, parts.task, parts.result, parts.updates, handovers))


class _EventMaker:
    def __init__(self, facts: TaskFacts, parts: TaskParts, leader: str | None) -> None:
        self._facts = facts
        self._parts = parts
        self._leader = leader
        self._updates = deque(parts.updates)
        self._lease_id = ""
        self._events: list[TaskEventText] = []

    def make(self) -> list[TaskEventText]:
        facts, parts = self._facts, self._parts
        begun = {"task": Raw((parts.task or "null").encode()), "digest": facts.digest}
        if self._updates and self._updates[0][1] == "submitted":
            self._updates.popleft()
        if self._leader is None:
            self._add("task_sent", facts.created_at_ms, 1, **begun)
        else:
            self._add("task_followed", facts.created_at_ms, 1, **begun, leader=self._leader)
        before = ""
        for _, handover, ts_ms, lease, reason in parts.handovers:
            self._hand_over(handover, ts_ms, lease, reason, before)
            before = handover
        while self._updates:
            self._step(self._updates.popleft())
        return self._events

    def _add(self, tag: str, ts_ms: int, generation: int, /, **fields: Any) -> None:
        numbered = {"generation": generation} if generation else {}
        text = _encode({"type": tag, "task_id": self._facts.task_id, **fields, **numbered}).decode()
        self._events.append(TaskEventText(ts_ms, tag, generation, text))

    def _take(self, kinds: Sequence[str], ts_ms: int) -> tuple[int, dict[str, Raw]]:
        """Takes the step that belongs to a handover, after adding the earlier ones. Generation 0: there is none."""
        for index, (generation, kind, at_ms, body) in enumerate(self._updates):
            if kind in kinds and at_ms == ts_ms:
                for _ in range(index):
                    self._step(self._updates.popleft())
                self._updates.popleft()
                return generation, {"body": Raw((body or "null").encode())}
            if at_ms != ts_ms and kind in ("working", "parked", "settled"):
                break
        return 0, {}

    def _hand_over(self, handover: str, ts_ms: int, lease: str | None, reason: str | None, before: str) -> None:
        reason_json = Raw((reason or "null").encode())
        if handover == "continued":
            self._continue(ts_ms, before)
            return
        generation, event = self._take(PAIRED.get(handover, ()), ts_ms)
        match handover:
            case "leased":
                raw = (lease or "null").encode()
                self._lease_id = msgspec.json.decode(raw)["lease_id"]
                self._add("task_leased", ts_ms, generation, lease=Raw(raw))
            case "released":
                self._add("lease_released", ts_ms, 0, lease_id=self._lease_id, reason=reason_json)
            case "requeued":
                risk = {"duplicate_risk": Posture.OPERATOR_ACCEPTED, "attempt": self._facts.attempt}
                self._add("task_requeued", ts_ms, 0, lease_id=self._lease_id, reason=reason_json, **risk)
            case "parked":
                self._park(ts_ms, generation, event)
            case "suspended":
                update = {"update": event["body"]} if event else {}
                self._add(
                    "task_suspended", ts_ms, generation, wait={"since_ms": ts_ms}, lease_id=self._lease_id, **update
                )
            case "resumed":
                self._add("task_resumed", ts_ms, 0)
            case "settled":
                self._settle(ts_ms, generation, reason_json)
            case _:
                self._add(RETURNED, ts_ms, 0, reason=reason_json)

    def _park(self, ts_ms: int, generation: int, event: dict[str, Raw]) -> None:
        body = event.get("body", Raw(b"{}"))
        interruption = msgspec.json.decode(body).get("state", "input-required")
        self._add("task_parked", ts_ms, generation, lease_id=self._lease_id, interruption=interruption, update=body)

    def _settle(self, ts_ms: int, generation: int, reason_json: Raw) -> None:
        facts = self._facts
        result = {"result": Raw((self._parts.result or "null").encode()), "ending": facts.ending, "cause": facts.cause}
        self._add("task_settled", ts_ms, generation or facts.generation, **result, reason=reason_json)

    def _continue(self, ts_ms: int, before: str) -> None:
        """Adds the event of a message to a waiting task, or of the end of a turn of a task at work."""
        if before in WAITING:
            generation, event = self._take(("continued",), ts_ms)
            self._add("task_continued", ts_ms, generation, message=event.get("body"), message_id="")
            return
        generation, event = self._take(("message",), ts_ms)
        reply = {"reply": event["body"]} if event else {}
        self._add("turn_ended", ts_ms, generation, lease_id=self._lease_id, **reply)

    def _step(self, update: tuple[int, str, int, str | None]) -> None:
        """Adds a step that belongs to no handover."""
        generation, kind, ts_ms, body = update
        raw = Raw((body or "null").encode())
        if kind == "settled":
            self._settle(ts_ms, generation, Raw(b"null"))
        elif kind == "parked":
            self._park(ts_ms, generation, {"body": raw})
        elif kind == "continued":
            self._add("message_kept", ts_ms, generation, message=raw, message_id="")
        elif kind != "working":
            self._add("task_updated", ts_ms, generation, lease_id=self._lease_id, update=raw)
            if kind == "artifact":
                self._events[-1] = self._events[-1]._replace(kind=kind)


def make_events(facts: TaskFacts, parts: TaskParts, leader: str | None = None) -> Sequence[TaskEventText]:
    """`leader`: the task that this one follows now."""
    return _EventMaker(facts, parts, leader).make()


def journal_lines(record: TaskRecord, after_seq: int) -> Iterator[bytes]:
    """The task's events as journal lines, for the archive."""
    facts, parts, seq = record.facts, record.parts, after_seq
    closed = False
    for event in record.events:
        seq += 1
        text = event.text
        closed = event.kind == "task_closed" or (closed and event.kind != RETURNED)
        if event.kind == RETURNED:
            whole = {
                "task": Raw((parts.task or "null").encode()),
                "result": Raw((parts.result or "null").encode()),
                "digest": facts.digest,
                "ending": facts.ending,
                "cause": facts.cause,
                "generation": facts.generation,
                "accepted_at_ms": facts.created_at_ms,
            }
            text = _encode(msgspec.json.decode(text, type=dict[str, Raw]) | whole).decode()
        yield encode_line(seq, event.ts_ms, seq - 1, b"[" + text.encode() + b"]")
    if record.finished and not closed:
        drained = _encode([{"type": "result_drained", "task_id": facts.task_id}])
        yield encode_line(seq + 1, facts.updated_at_ms, seq, drained)


class _Ended(msgspec.Struct, frozen=True, gc=False):
    result: Raw


class _Begun(msgspec.Struct, frozen=True, gc=False):
    task: Raw


def read_events(facts: TaskFacts, events: Sequence[TaskEventText]) -> TaskRecord:
    """The record of a task from its events, as the archive would have it."""
    task = str(msgspec.json.decode(events[0].text, type=_Begun).task, "utf-8")
    results = [event.text for event in events if event.kind in ("task_settled", "task_closed")]
    result = str(msgspec.json.decode(results[-1], type=_Ended).result, "utf-8") if results else None
    record = TaskRecord(facts, TaskParts(0, task, result, [], []), events)
    rows = Batch(b"".join(journal_lines(record, 0)), 0).rows(KnownRows({}, {}, {}))
    record.parts.updates = [each[1:] for each in rows.updates]
    record.parts.handovers = [each[1:] for each in rows.handovers]
    return record
