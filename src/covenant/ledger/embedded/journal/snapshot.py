"""Snapshots: the live state at one seq, as a file `snapshot-<seq>.jsonl` beside the segments.

The first line has the seq; the last line has the number of lines and their SHA-256. A snapshot gets its name only when
all of it is on disk, so a named one with a wrong sum is damage, never a crash.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, Union

import msgspec

from covenant.ledger.embedded import fault_points
from covenant.ledger.embedded.disk import open_owned, sync_dir
from covenant.ledger.embedded.journal.record import BadLine, Record, decode_line
from covenant.ledger.embedded.journal.segments import list_segments, write_all
from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.event_codec import decode_events
from covenant.ledger.machine.events import AnyEvent, TokenRevoked
from covenant.ledger.machine.view import Cached, Remembered
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.errors import Damaged
from covenant.model.grant import AuditHead, Grant, Identity
from covenant.model.ids import PublicKey, TaskId
from covenant.model.peers.delegation import Delegation, LoggedMessage, OutboxMessage, Peer, ReceivedEnvelope
from covenant.model.peers.usage_by_day import PeerUsage
from covenant.model.push import Push
from covenant.model.settings import Limits
from covenant.model.task import CacheKey, Task, short_kind
from covenant.model.tenants import Tenant

PREFIX: Final = "snapshot-"
VERSION: Final = 1
BUFFER_BYTES: Final = 1 << 20
_encode = msgspec.json.Encoder().encode
EVICT_EVERY: Final = 4_096
"""Records between two evictions while many are replayed."""


class _Line(msgspec.Struct, frozen=True, gc=False, tag_field="type"):
    pass


class Head(_Line, frozen=True, gc=False, tag="head"):
    seq: int
    audit_head: AuditHead
    audit_anchor: AuditHead
    version: int = VERSION


class EntryLine(_Line, frozen=True, gc=False, tag="entry"):
    entry: Entry


class CacheLine(_Line, frozen=True, gc=False, tag="cached"):
    key: CacheKey
    cached: Cached


class RequestLine(_Line, frozen=True, gc=False, tag="request"):
    verb: str
    holder: PublicKey
    request_id: str
    remembered: Remembered


class End(_Line, frozen=True, gc=False, tag="end"):
    lines: int
    sha256: str


class SnapshotRegister(NamedTuple):
    """A register of the state, and the struct of its lines: each line has one entry, in the field `name`."""

    name: str
    line: Callable[[Any], Any]
    put: Callable[[LedgerState, Any], object]
    entries: Callable[[LedgerState], Iterable[Any]]


def _register(
    tag: str,
    kind: type,
    put: Callable[[LedgerState, Any], object],
    entries: Callable[[LedgerState], Iterable[Any]],
    *,
    name: str = "",
) -> SnapshotRegister:
    """`name`: the name of the field, if that is not the tag."""
    name = name or tag
    line = msgspec.defstruct(f"{tag}_line", [(name, kind)], bases=(_Line,), tag=tag, frozen=True, gc=False)
    return SnapshotRegister(name, line, put, entries)


def _agents(state: LedgerState) -> Iterator[CatalogueAgent]:
    return (agent for stored in state.stored_agents.values() for agent in stored.values())


def _put_revoked(state: LedgerState, token: TokenRevoked) -> None:
    state.put_revoked(token, token.at_ms)


REGISTERS: Final = (
    _register("identity", Identity, LedgerState.put_identity, lambda state: state.identities_by_token.values()),
    _register("grant", Grant, LedgerState.put_grant, lambda state: state.grants_by_signature.values()),
    _register("tenant", Tenant, LedgerState.put_tenant, lambda state: state.tenants.values()),
    _register("agent", CatalogueAgent, LedgerState.put_agent, _agents),
    _register("push", Push, LedgerState.put_push, LedgerState.all_pushes),
    _register("peer", Peer, LedgerState.put_peer, lambda state: state.peers_by_id.values()),
    _register("delegation", Delegation, LedgerState.put_delegation, LedgerState.delegations_in_order),
    _register("parcel", OutboxMessage, LedgerState.put_outbox_message, LedgerState.all_outbox_messages),
    _register("envelope", ReceivedEnvelope, LedgerState.put_envelope, LedgerState.all_envelopes),
    _register("revoked", TokenRevoked, _put_revoked, lambda state: state.tokens_revoked.values(), name="token"),
    _register("peer_usage", PeerUsage, LedgerState.add_usage, lambda state: state.usage.values(), name="usage"),
    _register("message", LoggedMessage, lambda state, row: state.messages.append(row), lambda state: state.messages),
)
"""In the order of a snapshot."""
_BY_LINE: Final[dict[Any, SnapshotRegister]] = {register.line: register for register in REGISTERS}

_decode = msgspec.json.Decoder(Union[Head, EntryLine, CacheLine, RequestLine, End, *_BY_LINE]).decode


def path_of(folder: Path, seq: int) -> Path:
    return folder / f"{PREFIX}{seq:020d}.jsonl"


def newest(folder: Path) -> tuple[int, Path] | None:
    """The newest snapshot's seq and file."""
    found = sorted(folder.glob(f"{PREFIX}*.jsonl")) if folder.is_dir() else []
    return (int(found[-1].stem.removeprefix(PREFIX)), found[-1]) if found else None


def drop_older(folder: Path, seq: int) -> None:
    for path in sorted(folder.glob(f"{PREFIX}*.jsonl")):
        if int(path.stem.removeprefix(PREFIX)) < seq:
            fault_points.point("compaction.drop_snapshot")
            path.unlink()


def write(folder: Path, seq: int, state: LedgerState, read_task: Callable[[TaskId], Task] | None = None) -> Path:
    """Writes a snapshot: written, synced, renamed, and the directory synced, in this order.

    A snapshot is complete: `read_task` returns the tasks whose bodies are not in memory, one at a time.
    """
    path = path_of(folder, seq)
    unfinished = path.with_suffix(".tmp")
    fd = open_owned(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for chunk in _chunks(_lines(seq, state, read_task or _no_body)):
            fault_points.point("snapshot.write", fd, chunk)
            write_all(fd, chunk)
        fault_points.point("snapshot.sync", fd)
        os.fsync(fd)
    finally:
        os.close(fd)
    fault_points.point("snapshot.rename")
    os.replace(unfinished, path)
    fault_points.point("snapshot.sync_dir", path=path)
    sync_dir(folder)
    return path


def _no_body(task_id: TaskId) -> Task:
    raise AssertionError(f"there is no reader for the body of task {task_id}")


def load(path: Path, state: LedgerState, on_entry: Callable[[Entry, int, int], None] | None = None) -> int:
    """Fills an empty state and returns its seq. Raises Damaged if any byte differs from what was written.

    `on_entry` gets the place of each entry in the file: its offset and its length.
    """
    digest = hashlib.sha256()
    seq, count, offset = -1, 0, 0
    with open(path, "rb", buffering=BUFFER_BYTES) as lines:
        for raw in lines:
            count += 1
            try:
                line = _decode(raw)
            except msgspec.MsgspecError as error:
                raise Damaged(str(path), count, f"cannot be read: {error}") from error
            if isinstance(line, End):
                if line.lines != count - 1 or line.sha256 != digest.hexdigest() or seq < 0:
                    raise Damaged(str(path), count, "the SHA-256 does not match the lines above it")
                return seq
            digest.update(raw)
            if isinstance(line, Head):
                if line.version > VERSION:
                    reason = f"it has version {line.version}, and this program knows {VERSION}: run the newer program"
                    raise Damaged(str(path), count, reason)
                seq = line.seq
            elif on_entry is not None and isinstance(line, EntryLine):
                on_entry(line.entry, offset, len(raw))
            offset += len(raw)
            try:
                _restore(state, line)
            except (LookupError, TypeError, ValueError, AssertionError) as error:
                raise Damaged(str(path), count, f"cannot be used: {error!r}") from error
    raise Damaged(str(path), count + 1, "the last line is missing")


def _restore(state: LedgerState, line: _Line) -> None:
    match line:
        case EntryLine(entry):
            state.restore(entry)
        case CacheLine(key, cached):
            state.cache.put(msgspec.structs.replace(key, task_kind=short_kind(key.task_kind)), cached)
        case RequestLine(verb, holder, request_id, remembered):
            state.requests[verb, holder, request_id] = remembered
        case Head():
            state.audit_head, state.audit_anchor = line.audit_head, line.audit_anchor
            state.large.unloaded_seq = line.seq
        case _:
            register = _BY_LINE[type(line)]
            register.put(state, getattr(line, register.name))


def read_entry(path: Path, offset: int, length: int) -> Entry:
    """The entry at a place that `load` passed to `on_entry`."""
    with open(path, "rb") as file:
        file.seek(offset)
        line = _decode(file.read(length))
    assert isinstance(line, EntryLine)
    return line.entry


def _lines(seq: int, state: LedgerState, read_task: Callable[[TaskId], Task]) -> Iterator[bytes]:
    digest = hashlib.sha256()
    count = 0
    for line in state_lines(seq, state, read_task):
        raw = _encode(line) + b"\n"
        digest.update(raw)
        count += 1
        yield raw
    yield _encode(End(count, digest.hexdigest())) + b"\n"


def state_lines(seq: int, state: LedgerState, read_task: Callable[[TaskId], Task]) -> Iterator[_Line]:
    """All lines of a snapshot but the last one."""
    yield Head(seq, state.audit_head, state.audit_anchor)
    for register in REGISTERS:
        yield from map(register.line, register.entries(state))
    for key, cached in state.cache.items():
        yield CacheLine(key, cached)
    for (verb, holder, request_id), remembered in state.requests.items():
        yield RequestLine(verb, holder, request_id, remembered)
    for entry in state.ordered():
        yield EntryLine(entry.with_body(read_task(entry.task.id)) if entry.body_on_disk else entry)


def _chunks(lines: Iterable[bytes]) -> Iterator[bytes]:
    buffer = bytearray()
    for line in lines:
        buffer += line
        if len(buffer) >= BUFFER_BYTES:
            yield bytes(buffer)
            buffer.clear()
    yield bytes(buffer)


class Replayed(NamedTuple):
    """A record, and its line's segment and place."""

    seq: int
    ts_ms: int
    events: list[AnyEvent]
    path: Path
    offset: int
    length: int


def records(folder: Path, after_seq: int, through_seq: int) -> Iterator[Replayed]:
    """The records in between, all of which are known to be synced: a bad one is damage."""
    expected = after_seq + 1
    segments = list_segments(folder)
    for segment, following in zip(segments, [*segments[1:], None], strict=True):
        if following is not None and following.first_seq <= expected:
            continue
        if segment.first_seq > through_seq:
            return
        end = 0
        with open(segment.path, "rb", buffering=1 << 20) as lines:
            for number, line in enumerate(lines, 1):
                offset, end = end, end + len(line)
                if expected > through_seq:
                    return
                record = _decode_synced(line, str(segment.path), number)
                if record.seq < expected:
                    continue
                if record.seq != expected:
                    raise Damaged(str(segment.path), number, f"record {record.seq} is where {expected} belongs")
                expected += 1
                events = decode_events(record.events)
                yield Replayed(record.seq, record.ts_ms, events, segment.path, offset, len(line))


def read_events(path: Path, offset: int, length: int) -> list[AnyEvent]:
    """The events of the record at this place."""
    with open(path, "rb") as file:
        file.seek(offset)
        return decode_events(decode_line(file.read(length)).events)


def _decode_synced(line: bytes, file: str, number: int) -> Record:
    try:
        return decode_line(line)
    except BadLine as bad:
        raise Damaged(file, number, f"{bad.reason}, and it had been synced") from bad


def state_at(folder: Path, through_seq: int, limits: Limits) -> LedgerState:
    """The state on disk, from the newest snapshot and the records after it."""
    state = LedgerState(limits)
    found = newest(folder)
    seq = load(found[1], state) if found is not None else 0
    for record in records(folder, seq, through_seq):
        state.apply(record.events, record.ts_ms, record.seq)
    return state
