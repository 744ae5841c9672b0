"""Applies an event to the row of its task, and collects its other rows. Pure.

Only fields with a column are decoded: other content stays encoded. `evolution.evolve` defines the meaning of an event;
this module applies it to the columns. Tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec
from msgspec import Raw

from covenant.ledger.embedded.archive.sql import Row
from covenant.ledger.machine.events import LedgerEvent, kinds_of
from covenant.ledger.machine.states import State
from covenant.model.ids import AgentId
from covenant.model.task import Lease

QUEUED, LEASED, PARKED, FOLLOWING, SETTLED, DRAINED = (state.wire_name for state in State)


CountedBy = tuple[str, str, str, str, str]
"""The recipient's key and display, the tenant, and both states."""
_NULL: Final = Raw(b"null")


class TaskRowUpdate(msgspec.Struct, gc=False, array_like=True):
    """A row of `a2a_tasks`, in the order of its columns."""

    task_no: int
    task_id: str
    tenant_id: str
    agent_id: str
    context_id: str
    context_no: int | None
    parent: str | None
    parent_no: int | None
    created_at: int
    updated_at: int
    ledger_state: str
    state: str
    digest: str
    sender_display: str
    sender_pubkey: str
    recipient_display: str
    recipient_pubkey: str
    task_kind: str | None
    deadline_ms: int | None
    origin: str
    idempotency_key: str | None
    place: int
    settled_place: int | None = None
    generation: int = 1
    turn: int = 1
    attempt: int = 0
    interrupted: int = 0
    interruption: str | None = None
    lease_id: str | None = None
    leased_to_display: str | None = None
    leased_to_pubkey: str | None = None
    leased_at_ms: int | None = None
    renewed_at_ms: int | None = None
    node: str | None = None
    boot: str | None = None
    ending: str | None = None
    cause: str | None = None
    result: str | None = None
    """None also means unchanged."""

    def queue(self, place: int) -> None:
        self.ledger_state = QUEUED
        self.place = place

    def next_turn(self, place: int) -> None:
        self.queue(place)
        self.turn += 1
        self.attempt = 0
        self.interruption = None
        self.forget_lease()

    def forget_lease(self) -> None:
        self.lease_id = self.leased_to_display = self.leased_to_pubkey = None
        self.leased_at_ms = self.renewed_at_ms = self.node = self.boot = None

    def a2a_state_now(self) -> str:
        if self.ending is not None:
            return self.ending
        if self.ledger_state == PARKED and self.interruption is not None:
            return self.interruption
        return "working" if self.attempt > 0 or self.turn > 1 else "submitted"


class Rows:
    """The new rows of a batch, and the place and time of the event that is being applied."""

    def __init__(self) -> None:
        self.place = 0
        self.ts_ms = 0
        self.tasks: dict[str, TaskRowUpdate] = {}
        """Every changed task by id, in its new state."""
        self.ids: dict[str, int] = {}
        """Numbers of new tasks."""
        self.names: dict[bytes, int] = {}
        """Numbers of the texts that they are the first to name."""
        self.requests: list[tuple[int, str]] = []
        self.updates: list[tuple[int, int, str, int, str | None]] = []
        self.handovers: list[tuple[int, int, str, int, str | None, str | None]] = []
        self.counts: dict[CountedBy, int] = {}
        """Changes of the numbers of tasks."""
        self.audit: list[Row] = []
        self.purged: list[tuple[int, str]] = []
        """Purged indexes, each with the hash at which the chain is then anchored."""

    def add_update(self, row: TaskRowUpdate, generation: int, kind: str, body: str | None) -> None:
        row.generation = generation
        self.updates.append((row.task_no, generation, kind, self.ts_ms, body))

    def add_handover(self, row: TaskRowUpdate, event: str, lease: str | None, reason: str | None) -> None:
        self.handovers.append((row.task_no, self.place, event, self.ts_ms, lease, reason))


# The decoded parts of a line.


class _Idempotency(msgspec.Struct, frozen=True, gc=False):
    key: str


class RequestFields(msgspec.Struct, frozen=True, gc=False):
    sender: AgentId
    recipient: AgentId
    tenant: str | None = None
    context_id: str | None = None
    parent: str | None = None
    task_kind: str | None = None
    deadline_ms: int | None = None
    origin: str = "mailbox"
    idempotency: _Idempotency | None = None

    @property
    def has_context(self) -> bool:
        """Whether the task refers to a context. A tenant's task that names none is in the unnamed one."""
        return bool(self.tenant or self.context_id)


class _Kind(msgspec.Struct, frozen=True, gc=False):
    type: str
    state: str = "working"


class _AuditRow(msgspec.Struct, frozen=True, gc=False):
    timestamp_ms: int


decode_request: Final = msgspec.json.Decoder(RequestFields).decode
_lease: Final = msgspec.json.Decoder(Lease).decode
_kind: Final = msgspec.json.Decoder(_Kind).decode
decode_audit_row: Final = msgspec.json.Decoder(_AuditRow).decode


def text_of(raw: Raw) -> str:
    return str(raw, "utf-8")


def _text_or_none(raw: Raw) -> str | None:
    """The encoded JSON, or None for null."""
    text = text_of(raw)
    return None if text == "null" else text


class EventRow(msgspec.Struct, frozen=True, gc=False, tag_field="type"):
    pass


class TaskEventRow(EventRow, frozen=True, gc=False):
    apply: ClassVar[Callable[[Any, TaskRowUpdate, Rows], None]]
    task_id: str


class TaskStartRow(TaskEventRow, frozen=True, gc=False):
    state: ClassVar[str]
    task: Raw
    digest: str


class _TaskSent(TaskStartRow, frozen=True, gc=False, tag="task_sent"):
    state: ClassVar[str] = QUEUED


class _TaskFollowed(TaskStartRow, frozen=True, gc=False, tag="task_followed"):
    state: ClassVar[str] = FOLLOWING


class _TaskPromoted(TaskEventRow, frozen=True, gc=False, tag="task_promoted"):
    def apply(self, row: TaskRowUpdate, rows: Rows, /) -> None:
        row.queue(rows.place)


class _TaskLeased(TaskEventRow, frozen=True, gc=False, tag="task_leased"):
    lease: Raw
    generation: int = 0

    def apply(self, row: TaskRowUpdate, rows: Rows, /) -> None:
        lease = _lease(self.lease)
        row.ledger_state = LEASED
        row.interrupted = 0
        row.attempt = lease.attempt
        row.lease_id = lease.lease_id
        row.leased_to_display = lease.leased_to.display
        row.leased_to_pubkey = lease.leased_to.pubkey
        row.leased_at_ms = lease.leased_at_ms
        row.renewed_at_ms = lease.renewed_at_ms
        row.node = lease.node
        row.boot = lease.boot
        if self.generation:
            rows.add_update(row, self.generation, "working", None)
        rows.add_handover(row, "leased", text_of(self.lease), None)


class _LeaseRenewed(TaskEventRow, frozen=True, gc=False, tag="lease_renewed"):
    renewed_at_ms: int

    def apply(self, row: TaskRowUpdate, _: Rows, /) -> None:
        row.ledger_state = LEASED
        row.interrupted = 0
        row.renewed_at_ms = self.renewed_at_ms


class _ReturnedToQueue(TaskEventRow, frozen=True, gc=False):
    event: ClassVar[str]
    reason: Raw

    def apply(self, row: TaskRowUpdate, rows: Rows, /) -> None:
        row.queue(rows.place)
        row.interrupted = 0
        rows.add_handover(row, self.event, None, _text_or_none(self.reason))


class _LeaseReleased(_ReturnedToQueue, frozen=True, gc=False, tag="lease_released"):
    event: ClassVar[str] = "released"
    undelivered: bool = False
    untouched: bool = False

    def apply(self, row: TaskRowUpdate, rows: Rows, /) -> None:
        # The caller never got the lease: the task keeps its place in the queue.
        place = row.place if self.undelivered else rows.place
        super().apply(row, rows)
        row.place = place
        if self.untouched:
            row.forget_lease()


class _TaskRequeued(_ReturnedToQueue, frozen=True, gc=False, tag="task_requeued"):
    event: ClassVar[str] = "requeued"


class _LeaseInterrupted(TaskEventRow, frozen=True, gc=False, tag="lease_interrupted"):
    def apply(self, row: TaskRowUpdate, _: Rows, /) -> None:
        row.ledger_state = LEASED
        row.interrupted = 1


class _TaskUpdated(TaskEventRow, frozen=True, gc=False, tag="task_updated"):
    generation: int
    update: Raw

    def apply(self, row: TaskRowUpdate, rows: Rows, /) -> None:
        row.ledger_state = LEASED
        rows.add_update(row, self.generation, _kind(self.update).type, text_of(self.update))


class _TaskParked(TaskEventRow, frozen=True, gc=False, tag="task_parked"):
    generation: int
    interruption: str
    update: Raw

    def apply(self, row: TaskRowUpdate, rows: Rows, /) -> None:
        row.ledger_state = PARKED
        row.interruption = self.interruption
        rows.add_update(row, self.generation, "parked", text_of(self.update))
        rows.add_handover(row, "parked", None, None)


class _TaskSuspended(TaskEventRow, frozen=True, gc=False, tag="task_suspended"):
    generation: int = 0
    update: Raw = _NULL

    def apply(self, row: TaskRowUpdate, rows: Rows, /) -> None:
        row.ledger_state = PARKED
        row.interrupted = 0
        row.interruption = None
        if self.generation:
            kind = _kind(self.update)
            if kind.type == "status" and kind.state != "working":  # a question
                row.interruption = kind.state
                rows.add_update(row, self.generation, "parked", text_of(self.update))
            else:
                rows.add_update(row, self.generation, kind.type, text_of(self.update))
        rows.add_handover(row, "suspended", None, None)


class _TaskResumed(TaskEventRow, frozen=True, gc=False, tag="task_resumed"):
    generation: int = 0
    update: Raw = _NULL

    def apply(self, row: TaskRowUpdate, rows: Rows, /) -> None:
        row.queue(rows.place)
        row.interruption = None
        if self.generation:
            rows.add_update(row, self.generation, _kind(self.update).type, text_of(self.update))
        rows.add_handover(row, "resumed", None, None)


class _Signaled(TaskEventRow, frozen=True, gc=False):
    """Sets only the time of the last change: the state stays the same, and watchers see nothing."""

    def apply(self, row: TaskRowUpdate, rows: Rows, /) -> None:
        pass


class _SignalKept(_Signaled, frozen=True, gc=False, tag="signal_kept"):
    pass


class _SignalTaken(_Signaled, frozen=True, gc=False, tag="signal_taken"):
    pass


class _TaskContinued(TaskEventRow, frozen=True, gc=False, tag="task_continued"):
    generation: int
    message: Raw

    def apply(self, row: TaskRowUpdate, rows: Rows, /) -> None:
        row.next_turn(rows.place)
        rows.add_update(row, self.generation, "continued", text_of(self.message))
        rows.add_handover(row, "continued", None, None)


class _MessageKept(TaskEventRow, frozen=True, gc=False, tag="message_kept"):
    """The state stays the same."""

    generation: int
    message: Raw

    def apply(self, row: TaskRowUpdate, rows: Rows, /) -> None:
        rows.add_update(row, self.generation, "continued", text_of(self.message))


class _TurnEnded(TaskEventRow, frozen=True, gc=False, tag="turn_ended"):
    reply: Raw = _NULL
    generation: int = 0

    def apply(self, row: TaskRowUpdate, rows: Rows, /) -> None:
        row.next_turn(rows.place)
        row.interrupted = 0
        if self.generation:
            rows.add_update(row, self.generation, "message", _text_or_none(self.reply))
        rows.add_handover(row, "continued", None, None)


class _Ends(TaskEventRow, frozen=True, gc=False):
    state: ClassVar[str]
    result: Raw
    ending: str
    cause: str
    generation: int
    reason: Raw = _NULL

    def apply(self, row: TaskRowUpdate, rows: Rows, /) -> None:
        row.ledger_state = self.state
        row.interrupted = 0
        row.interruption = None
        row.settled_place = rows.place
        row.ending = self.ending
        row.cause = self.cause
        row.result = text_of(self.result)
        rows.add_update(row, self.generation, "settled", None)
        rows.add_handover(row, "settled", None, _text_or_none(self.reason))


class _TaskSettled(_Ends, frozen=True, gc=False, tag="task_settled"):
    state: ClassVar[str] = SETTLED


class _TaskClosed(_Ends, frozen=True, gc=False, tag="task_closed"):
    state: ClassVar[str] = DRAINED


class _ResultDrained(TaskEventRow, frozen=True, gc=False, tag="result_drained"):
    def apply(self, row: TaskRowUpdate, _: Rows, /) -> None:
        row.ledger_state = DRAINED


class ResultReturnedRow(TaskStartRow, frozen=True, gc=False, tag="result_returned"):
    """Carries the whole task, so that a task whose beginning is lost can still be stored."""

    state: ClassVar[str] = SETTLED
    reason: Raw
    result: Raw
    ending: str
    cause: str
    generation: int

    def apply(self, row: TaskRowUpdate, rows: Rows, /) -> None:
        if row.settled_place is None:
            row.settled_place = rows.place
            row.ending, row.cause, row.result = self.ending, self.cause, text_of(self.result)
            rows.add_update(row, self.generation, "settled", None)
        row.ledger_state = self.state
        rows.add_handover(row, "returned", None, _text_or_none(self.reason))


class AuditedRow(EventRow, frozen=True, gc=False, tag="audited"):
    index: int
    chain_hash: str
    issuer: str
    row: str


class AuditPurgedRow(EventRow, frozen=True, gc=False, tag="audit_purged"):
    through: int
    anchor_hash: str


def _event_rows() -> Iterable[Any]:
    """Every kind of event. Of one without rows in the archive only the type is decoded."""
    rows: dict[Any, type[msgspec.Struct]] = {kind.__struct_config__.tag: kind for kind in kinds_of(EventRow)}
    for event in kinds_of(LedgerEvent):
        tag = event.__struct_config__.tag
        if tag not in rows:
            rows[tag] = msgspec.defstruct(event.__name__, [], bases=(EventRow,), tag=tag, frozen=True, gc=False)
    return rows.values()


if TYPE_CHECKING:
    AnyEventRow = EventRow
else:  # to decode by
    AnyEventRow = reduce(or_, _event_rows())


class JournalLine(msgspec.Struct, gc=False):
    seq: int
    ts_ms: int
    events: list[AnyEventRow]


decode_lines: Final = msgspec.json.Decoder(JournalLine).decode_lines
