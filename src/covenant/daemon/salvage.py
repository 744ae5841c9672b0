"""What can be saved of a damaged journal, what cannot, and how the rest is made whole again.

A record that cannot be read is lost, and so is each later one that makes no sense without it: a lease of a task that
was never sent. Everything else is kept. In place of a lost record stands an empty one, so that the numbering goes on
and what the snapshot and the archive know stays true. The journal as it was found is set aside, not deleted.

The home must be locked by whoever calls this.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from covenant.daemon.home import JOURNAL_NAME
from covenant.ledger.log import snapshot
from covenant.ledger.log.codec import decode_events
from covenant.ledger.log.record import BadLine, Record, decode_line, encode_line
from covenant.ledger.log.segments import list_segments, segment_path, sync_dir
from covenant.ledger.log.state import LedgerState
from covenant.ledger.machine.entry import IllegalMoveError
from covenant.ledger.machine.events import TaskEvent
from covenant.ledger.machine.view import Limits

EMPTY: Final = b"[]"


class Loss(NamedTuple):
    """One record that cannot be kept. `said` is what it held, where that can still be read."""

    seq: int
    where: str
    reason: str
    said: tuple[str, ...] = ()


class Salvage(NamedTuple):
    """What a repaired journal would hold: the records from `first_seq` to `last_seq`, but for the losses."""

    first_seq: int
    last_seq: int
    losses: tuple[Loss, ...]


class _Found(NamedTuple):
    record: Record
    line: bytes
    where: str


def plan(home: Path, *, snapshot_seq: int, archived_seq: int, limits: Limits) -> Salvage:
    """What would be lost. Reads only."""
    folder = home / JOURNAL_NAME
    found, unreadable = _read(folder)
    covered = min(snapshot_seq, archived_seq)
    last_seq = max([*found, snapshot_seq, archived_seq])
    missing = {
        seq: unreadable.get(seq, Loss(seq, str(folder), "it is not there"))
        for seq in range(covered + 1, last_seq + 1)
        if seq not in found
    }
    senseless: dict[int, Loss] = {}
    while (loss := _first_senseless(folder, found, {*missing, *senseless}, snapshot_seq, limits)) is not None:
        senseless[loss.seq] = loss
    losses = missing | senseless
    return Salvage(covered + 1, last_seq, tuple(losses[seq] for seq in sorted(losses)))


def _read(folder: Path) -> tuple[dict[int, _Found], dict[int, Loss]]:
    """Every good record, and for each bad line the record that should be there."""
    found: dict[int, _Found] = {}
    unreadable: dict[int, Loss] = {}
    for segment in list_segments(folder):
        expected = segment.first_seq
        with segment.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{segment.path.name}, line {number}"
                try:
                    record = decode_line(line)
                except BadLine as bad:
                    unreadable[expected] = Loss(expected, where, bad.reason)
                    expected += 1
                else:
                    found[record.seq] = _Found(record, line, where)
                    expected = record.seq + 1
    return found, unreadable


def _first_senseless(
    folder: Path, found: dict[int, _Found], lost: set[int], snapshot_seq: int, limits: Limits
) -> Loss | None:
    """The first record after the snapshot that cannot follow what is left before it.

    From the beginning each time: a record that fails half-way leaves the state half changed.
    """
    state = LedgerState(limits)
    newest = snapshot.newest(folder)
    if newest is not None:
        snapshot.load(newest[1], state)
    for seq in sorted(found):
        if seq <= snapshot_seq or seq in lost:
            continue
        record, _, where = found[seq]
        try:
            state.apply(decode_events(record.events), record.ts_ms, seq)
        except (IllegalMoveError, LookupError, msgspec.MsgspecError) as error:
            reason = f"it makes no sense without what is lost: {error}"
            return Loss(seq, where, reason, tuple(_said(record)))
    return None


def _said(record: Record) -> Iterator[str]:
    try:
        events = decode_events(record.events)
    except msgspec.MsgspecError:
        return
    for event in events:
        name = str(event.__struct_config__.tag).replace("_", " ")
        yield f"{name} {event.task_id}" if isinstance(event, TaskEvent) else name


def carry_out(home: Path, salvage: Salvage, now_ms: int) -> Path:
    """Put a repaired journal in place of the damaged one; where that one is now.

    The repaired folder is whole and on disk before the names change, and the damaged one keeps every byte.
    """
    folder = home / JOURNAL_NAME
    repaired = home / f"{JOURNAL_NAME}.repaired"
    aside = home / f"{JOURNAL_NAME}.damaged-{now_ms}"
    shutil.rmtree(repaired, ignore_errors=True)
    repaired.mkdir(mode=0o700)
    found, _ = _read(folder)
    lost = {loss.seq for loss in salvage.losses}
    _write(segment_path(repaired, salvage.first_seq), _lines(salvage, found, lost))
    for path in sorted(folder.glob(f"{snapshot.PREFIX}*.jsonl")):
        _write(repaired / path.name, iter([path.read_bytes()]))
    sync_dir(repaired)
    folder.rename(aside)
    repaired.rename(folder)
    sync_dir(home)
    return aside


def _lines(salvage: Salvage, found: dict[int, _Found], lost: set[int]) -> Iterator[bytes]:
    ts_ms = 0
    for seq in range(salvage.first_seq, salvage.last_seq + 1):
        if seq in lost:
            yield encode_line(seq, ts_ms, seq - 1, EMPTY)
        else:
            ts_ms = found[seq].record.ts_ms
            yield found[seq].line


def _write(path: Path, chunks: Iterator[bytes]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(fd)
