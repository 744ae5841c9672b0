"""Replay: the events of a journal's records, read back from its segments in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from covenant.ledger.log import snapshot
from covenant.ledger.log.codec import decode_events
from covenant.ledger.log.record import BadLine, Record, decode_line
from covenant.ledger.log.segments import list_segments
from covenant.ledger.log.state import LedgerState
from covenant.ledger.machine.events import AnyEvent
from covenant.ledger.machine.view import Limits
from covenant.model.errors import Damaged

EVICT_EVERY: Final = 4_096
"""Records between two evictions while many are read back."""


class Replayed(NamedTuple):
    """A record, and where in which segment its line is."""

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
                record = _decode(line, str(segment.path), number)
                if record.seq < expected:
                    continue
                if record.seq != expected:
                    raise Damaged(str(segment.path), number, f"record {record.seq} is where {expected} belongs")
                expected += 1
                events = decode_events(record.events)
                yield Replayed(record.seq, record.ts_ms, events, segment.path, offset, len(line))


def read_events(path: Path, offset: int, length: int) -> list[AnyEvent]:
    """The events of the record whose line is there."""
    with open(path, "rb") as file:
        file.seek(offset)
        return decode_events(decode_line(file.read(length)).events)


def _decode(line: bytes, file: str, number: int) -> Record:
    try:
        return decode_line(line)
    except BadLine as bad:
        raise Damaged(file, number, f"{bad.reason}, and it had been synced") from bad


def state_at(folder: Path, through_seq: int, limits: Limits) -> LedgerState:
    """The state as the disk has it, from the newest snapshot and what follows it."""
    state = LedgerState(limits)
    found = snapshot.newest(folder)
    seq = snapshot.load(found[1], state) if found is not None else 0
    for record in records(folder, seq, through_seq):
        state.apply(record.events, record.ts_ms, record.seq)
    return state
