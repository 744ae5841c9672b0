"""A task as rows: the stored form of an entry, and of each event.

The task itself is stored once, in its first event, and its result once, in the event that ended it. A row of `live` has
the task without its body, so that decisions need not read the body.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final, TypeGuard, get_args

import msgspec

from covenant.ledger.machine.entry import EndedTurn, Entry, Hold
from covenant.ledger.machine.events import (
    TASK_EVENTS,
    AnyEvent,
    AnyTaskEvent,
    LeaseInterrupted,
    LeaseRenewed,
    ResultDrained,
    ResultReturned,
    SignalKept,
    SignalTaken,
    TaskEvent,
    TaskPromoted,
    TaskUpdated,
)
from covenant.ledger.machine.states import State
from covenant.ledger.machine.view import Archived
from covenant.ledger.postgres.counters import Contribution
from covenant.model.peers.delegation import Delegation, OutboxMessage
from covenant.model.push import Push
from covenant.model.task import CacheKey, Cause, Ending, Lease, Result, Task
from covenant.model.task_event import ArtifactUpdate, Interruption, MessageUpdate, Signal, Wait

BIGINT_MAX: Final = (1 << 63) - 1
ARTIFACT: Final = "artifact"
"""The kind of an event that writes to an artifact; any other kind is the event's tag."""
NOT_KEPT: Final = frozenset({LeaseRenewed, LeaseInterrupted, TaskPromoted, ResultDrained, SignalKept, SignalTaken})
"""Events that the history does not keep."""

_ESCAPED: Final = re.compile("\x01[\x01\x02]?")

Row = Mapping[str, Any]
_encode: Final = msgspec.json.Encoder().encode
decode_push: Final = msgspec.json.Decoder(Push).decode
decode_delegation: Final = msgspec.json.Decoder(Delegation).decode
decode_message: Final = msgspec.json.Decoder(OutboxMessage).decode
decode_head: Final = msgspec.json.Decoder(Task).decode
"""The task of a row of `live`, without its body."""
_TAGS: Final[dict[type, str]] = {each: str(each.__struct_config__.tag) for each in get_args(AnyTaskEvent)}


def column(text: str) -> str:
    """Escapes a text for PostgreSQL, which has no NUL; different texts stay different."""
    if "\x00" not in text and "\x01" not in text:
        return text
    return text.replace("\x01", "\x01\x01").replace("\x00", "\x01\x02")


def uncolumn(text: str) -> str:
    """The original of an escaped text, which may have been cut."""
    if "\x01" not in text:
        return text
    return _ESCAPED.sub(lambda pair: "\x00" if pair[0] == "\x01\x02" else "\x01", text)


def encode_text(value: Any) -> str:
    return _encode(value).decode()


class Slot(msgspec.Struct, gc=False):
    """Where a task is stored."""

    no: int
    table: str | None = None
    """The task's table when this batch began."""
    n: int = 0
    """The number of its events."""
    held_n: int = 0
    """`n` when this batch began."""
    place: int = 0
    """Its place in its recipient's queue."""
    settled_place: int | None = None
    """The place of its result among those of its sender."""
    touched: int | None = None
    """The place of the last lease or renewal: the order of leases."""
    pushed: bool = False
    ended_n: int | None = None
    intent: str = ""
    """The beginning of the task's intent."""
    size: int = 0
    """The size of its events, in bytes."""
    counted: Contribution | None = None
    """Its contribution to the counts, if that is known."""
    attempt: int = 0
    """For an ended task: this and `turn` are the values with which it continues if its result is returned."""
    turn: int = 1


class StoredEntry(msgspec.Struct, frozen=True, gc=False, array_like=True, omit_defaults=True):
    """An entry without its task, its state and its result, which have their own columns or rows."""

    digest: str
    accepted_at_ms: int
    updated_at_ms: int
    generation: int = 1
    turn: int = 1
    attempt: int = 0
    undelivered: int = 0
    lease: Lease | None = None
    turn_started_ms: int = 0
    interrupted: bool = False
    interruption: Interruption | None = None
    update_no: int = 0
    update_generation: int = 0
    artifacts: frozenset[str] = frozenset()
    recent_ids: tuple[tuple[str, int], ...] = ()
    ending: Ending | None = None
    cause: Cause | None = None
    messages: tuple[MessageUpdate, ...] = ()
    kept: tuple[MessageUpdate, ...] = ()
    ended_turn: EndedTurn | None = None
    events: int = 1
    body_bytes: int = 0
    messages_bytes: int = 0
    kept_bytes: int = 0
    result_bytes: int = 0
    kept_cache_key: CacheKey | None = None
    open_text: str | None = None
    hold: Hold | None = None
    wait: Wait | None = None
    continues: bool = False
    cut: bool = False
    signals: tuple[Signal, ...] = ()
    signals_bytes: int = 0


decode_rest: Final = msgspec.json.Decoder(StoredEntry).decode
_rest_of: Final = attrgetter(
    *("cache_key" if name == "kept_cache_key" else name for name in StoredEntry.__struct_fields__)
)
# An entry has the same fields in the same order, and besides them `task`, `state`, `result` and `body_on_disk`.
_RESULT: Final = StoredEntry.__struct_fields__.index("ending")
_ON_DISK: Final = StoredEntry.__struct_fields__.index("kept_cache_key")


class _Result(msgspec.Struct, frozen=True, gc=False):
    result: Result


class _Task(msgspec.Struct, frozen=True, gc=False):
    task: Task


_result: Final = msgspec.json.Decoder(_Result).decode
_task: Final = msgspec.json.Decoder(_Task).decode


def encode_head(entry: Entry) -> str:
    return encode_text(entry.without_body().task)


def encode_rest(entry: Entry) -> str:
    return encode_text(StoredEntry(*_rest_of(entry)))


def decode_entry(row: Row) -> Entry:
    """The entry of a row of `live`, without its task's body."""
    ended, rest = row["ended_body"], msgspec.structs.astuple(decode_rest(row["rest"]))
    result = _result(ended).result if ended is not None else None
    head, state = decode_head(row["head"]), State(row["state"])
    values = (head, rest[0], state, *rest[1:_RESULT], result, *rest[_RESULT:_ON_DISK], True, *rest[_ON_DISK:])
    return Entry(*values)


def decode_archived(row: Row) -> Archived:
    """The archived task of a row of `tasks`, with the texts of its first and its last event."""
    rest, task = decode_rest(row["rest"]), decode_task(row["task_body"])
    assert rest.ending is not None
    assert rest.cause is not None
    return Archived(
        digest=rest.digest,
        sender=task.sender,
        recipient=task.recipient,
        leased_to=rest.lease.leased_to.pubkey if rest.lease is not None else None,
        ending=rest.ending,
        cause=rest.cause,
        result=decode_result(row["ended_body"]),
        task=task,
        generation=rest.generation,
        accepted_at_ms=rest.accepted_at_ms,
        lease=rest.lease,
    )


def decode_task(text: str) -> Task:
    """The task in the text of its first event."""
    return _task(text).task


def decode_result(text: str) -> Result:
    """The result in the text of the event that ended a task."""
    return _result(text).result


class Returned(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="result_returned"):
    """The stored part of a returned result: the rest is in earlier rows."""

    task_id: str
    reason: str


decode_returned: Final = msgspec.json.Decoder(Returned).decode
decode_event: Final[Callable[[str], AnyTaskEvent]] = msgspec.json.Decoder(AnyTaskEvent).decode


def is_task_event(event: AnyEvent) -> TypeGuard[AnyTaskEvent]:
    return type(event) in TASK_EVENTS


def encode_event(event: TaskEvent, encoded: bytes) -> tuple[str, str]:
    """The kind and the text of an event that the history keeps."""
    if type(event) is TaskUpdated and type(event.update) is ArtifactUpdate:
        return ARTIFACT, encoded.decode()
    if type(event) is ResultReturned:
        return "result_returned", encode_text(Returned(event.task_id, event.reason))
    return _TAGS[type(event)], encoded.decode()
