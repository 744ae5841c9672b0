"""Snapshots: the live state at one seq, as a file `snapshot-<seq>.jsonl` beside the segments.

The first line has the seq; the last line has the number of lines and their SHA-256. A snapshot gets its name only when
all of it is on disk, so a named one with a wrong sum is damage, never a crash.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

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


class IdentityLine(_Line, frozen=True, gc=False, tag="identity"):
    identity: Identity


class GrantLine(_Line, frozen=True, gc=False, tag="grant"):
    grant: Grant


class TenantLine(_Line, frozen=True, gc=False, tag="tenant"):
    tenant: Tenant


class AgentLine(_Line, frozen=True, gc=False, tag="agent"):
    agent: CatalogueAgent


class PushLine(_Line, frozen=True, gc=False, tag="push"):
    push: Push


class PeerLine(_Line, frozen=True, gc=False, tag="peer"):
    peer: Peer


class DelegationLine(_Line, frozen=True, gc=False, tag="delegation"):
    delegation: Delegation


class OutboxLine(_Line, frozen=True, gc=False, tag="parcel"):
    message: OutboxMessage = msgspec.field(name="parcel")


class EnvelopeLine(_Line, frozen=True, gc=False, tag="envelope"):
    envelope: ReceivedEnvelope


class RevokedLine(_Line, frozen=True, gc=False, tag="revoked"):
    token: TokenRevoked


class UsageLine(_Line, frozen=True, gc=False, tag="peer_usage"):
    usage: PeerUsage


class MessageLine(_Line, frozen=True, gc=False, tag="message"):
    message: LoggedMessage


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


Line = (
    Head
    | EntryLine
    | IdentityLine
    | GrantLine
    | TenantLine
    | AgentLine
    | PushLine
    | PeerLine
    | DelegationLine
    | OutboxLine
    | EnvelopeLine
    | RevokedLine
    | UsageLine
    | MessageLine
    | CacheLine
    | RequestLine
    | End
)

_decode = msgspec.json.Decoder(Line).decode


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


def _restore(state: LedgerState, line: Line) -> None:
    match line:
        case EntryLine(entry):
            state.restore(entry)
        case CacheLine(key, cached):
            state.cache.put(msgspec.structs.replace(key, task_kind=short_kind(key.task_kind)), cached)
        case RequestLine(verb, holder, request_id, remembered):
            state.requests[verb, holder, request_id] = remembered
        case IdentityLine(identity):
            state.put_identity(identity)
        case GrantLine(grant):
            state.put_grant(grant)
        case TenantLine(tenant):
            state.put_tenant(tenant)
        case AgentLine(agent):
            state.put_agent(agent)
        case PushLine(push):
            state.put_push(push)
        case PeerLine(peer):
            state.put_peer(peer)
        case DelegationLine(delegation):
            state.put_delegation(delegation)
        case OutboxLine(message):
            state.put_outbox_message(message)
        case EnvelopeLine(envelope):
            state.put_envelope(envelope)
        case RevokedLine(token):
            state.put_revoked(token, token.at_ms)
        case UsageLine(usage):
            state.add_usage(usage)
        case MessageLine(message):
            state.messages.append(message)
        case Head():
            state.audit_head, state.audit_anchor = line.audit_head, line.audit_anchor
            state.large.unloaded_seq = line.seq
        case End():
            raise AssertionError("the last line restores nothing")


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


def state_lines(seq: int, state: LedgerState, read_task: Callable[[TaskId], Task]) -> Iterator[Line]:
    """All lines of a snapshot but the last one."""
    yield Head(seq, state.audit_head, state.audit_anchor)
    for identity in state.identities_by_token.values():
        yield IdentityLine(identity)
    for grant in state.grants_by_signature.values():
        yield GrantLine(grant)
    for tenant in state.tenants.values():
        yield TenantLine(tenant)
    for stored in state.stored_agents.values():
        for agent in stored.values():
            yield AgentLine(agent)
    for push in state.all_pushes():
        yield PushLine(push)
    yield from map(PeerLine, state.peers_by_id.values())
    yield from map(DelegationLine, state.delegations_in_order())
    yield from map(OutboxLine, state.all_outbox_messages())
    yield from map(EnvelopeLine, state.all_envelopes())
    yield from map(RevokedLine, state.tokens_revoked.values())
    yield from map(UsageLine, state.usage.values())
    yield from map(MessageLine, state.messages)
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
