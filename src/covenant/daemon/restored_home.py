"""Making a home from a backup, and from segments that were shipped after it.

Everything is made in the folder `restoring` of the home, opened and checked there as a start would, marked as restored,
and moved to its place last. A home with that folder does not open: a restore that was cut off is never half a home.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import IO, Final, NamedTuple
from uuid import uuid4

import msgspec

from covenant.ledger.contract.ledger import Counts
from covenant.ledger.embedded.backup_file import INCARNATION_NAME, Incarnation, Manifest, unpack_backup
from covenant.ledger.embedded.disk import (
    make_owned_folder,
    make_private_folder,
    open_owned,
    replace_private,
    sync_dir,
)
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.embedded.journal.record import BadLine, decode_line
from covenant.ledger.embedded.journal.recovery import lock_home
from covenant.ledger.embedded.journal.segments import list_segments, segment_path
from covenant.ledger.embedded.open import RESTORING_NAME, open_ledger
from covenant.ledger.machine.identity_commands import WriteAuditRow
from covenant.mailbox import local_agent
from covenant.model.errors import CovenantError

POSITION_MAX: Final = 2**62
_POSITION: Final = re.compile(r"[0-9]{1,18}")


class CannotRestore(CovenantError):
    """Nothing was restored. The message says why, and what to do."""


class Until(NamedTuple):
    """Where a restore ends: with this record, or before the first one that was decided after this time."""

    position: int = POSITION_MAX
    time_ms: int | None = None


class Restored(NamedTuple):
    manifest: Manifest
    incarnation: Incarnation
    counts: Counts


def parse_until(text: str) -> Until:
    """A position, or a time with its zone. Raises ValueError."""
    if _POSITION.fullmatch(text):
        return Until(position=int(text))
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("a time needs its zone: 2026-01-31T12:00:00Z")
    return Until(time_ms=int(moment.timestamp() * 1000))


def check_target(home: Path) -> None:
    """Raises CannotRestore unless the home can be made here: it is not there, or an empty folder."""
    if not home.exists():
        return
    if not home.is_dir():
        raise CannotRestore(f"{home} is not a folder; choose another with --home")
    if (home / "lock").exists():
        lock_home(home).close()
    if os.path.lexists(home / RESTORING_NAME):
        raise CannotRestore(f"a restore into {home} was cut off; empty the folder, and restore again")
    if any(path.name != "lock" for path in home.iterdir()):
        raise CannotRestore(f"{home} is not empty; restore into a new folder, and put it in its place yourself")


async def restore(
    source: IO[bytes],
    home: Path,
    *,
    now_ms: Callable[[], int],
    segments: Path | None = None,
    until: Until | None = None,
) -> Restored:
    """Raises CannotRestore, BadBackup, HomeLocked, Damaged and OSError."""
    check_target(home)
    make_private_folder(home)
    with lock_home(home):
        folder = home / RESTORING_NAME
        make_owned_folder(folder)
        sync_dir(home)
        manifest = unpack_backup(source, folder)
        position = _extend(folder / "journal", manifest, segments, until or Until())
        incarnation = Incarnation(
            id=str(uuid4()), restored_from=manifest.backup_id, position=position, restored_at_ms=now_ms()
        )
        replace_private(folder / INCARNATION_NAME, msgspec.json.encode(incarnation))
        ledger = await open_ledger(folder, clock=now_ms)
        try:
            counts = await ledger.counts()
            await _mark(ledger, incarnation)
        finally:
            await ledger.close()
        _move_up(folder, home)
    return Restored(manifest, incarnation, counts)


def _extend(journal: Path, manifest: Manifest, segments: Path | None, until: Until) -> int:
    """Bring the unpacked journal to where the restore ends; that position."""
    position = manifest.position
    if until.position < position or (until.time_ms is not None and until.time_ms < manifest.made_at_ms):
        raise CannotRestore(f"this backup is of position {position}, which is later than --until; take an older one")
    if segments is not None:
        position = add_segments(journal, segments, position, until)
    if until.position != POSITION_MAX and position < until.position:
        raise CannotRestore(
            f"the backup and its segments end with record {position}, and --until is later; "
            "give an earlier --until, or --segments with later records"
        )
    return position


def add_segments(journal: Path, source: Path, position: int, until: Until) -> int:
    """Put the records after `position` behind a journal, from a folder of shipped segments; the last one's number.

    Every line is checked. Raises CannotRestore if a record is missing or is not what was written.
    """
    expected = position + 1
    found = list_segments(source)
    for segment, after in zip(found, [*found[1:], None], strict=True):
        if after is not None and after.first_seq <= expected:
            continue
        if segment.first_seq > expected:
            raise CannotRestore(
                f"the segment with record {expected} is missing in {source}; "
                f"put it there, or end before it with --until {expected - 1}"
            )
        last, whole = _copy_records(segment.path, segment_path(journal, expected), expected, until)
        expected = last + 1
        if not whole:
            break
    sync_dir(journal)
    return expected - 1


def _copy_records(source: Path, target: Path, expected: int, until: Until) -> tuple[int, bool]:
    """The last record that is there now, and whether the restore goes on behind this segment."""
    whole, first = True, expected
    unfinished = target.with_suffix(".tmp")
    fd = open_owned(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(fd, "wb") as file, source.open("rb", buffering=1 << 20) as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = decode_line(line)
            except BadLine as bad:
                raise CannotRestore(f"{source}, line {number}: {bad.reason}; ship this segment again") from bad
            if record.seq < expected:
                continue
            if record.seq != expected:
                raise CannotRestore(
                    f"{source}, line {number}: record {record.seq} is where {expected} belongs; ship this segment again"
                )
            if record.seq > until.position or (until.time_ms is not None and record.ts_ms > until.time_ms):
                whole = False
                break
            file.write(line)
            expected += 1
        file.flush()
        os.fsync(file.fileno())
    if expected > first:
        unfinished.replace(target)
    else:
        unfinished.unlink()
    return expected - 1, whole


async def _mark(ledger: EmbeddedLedger, incarnation: Incarnation) -> None:
    """A row in the audit: that the ledger was restored can be proved, and not be taken back."""
    operators = [each.agent for each in await ledger.identities() if each.operator and each.revoked_at_ms is None]
    by = operators[0] if operators else local_agent("process@local")
    row: dict[str, object] = {
        "type": "ledger_restored",
        "incarnation": incarnation.id,
        "backup_id": incarnation.restored_from,
        "position": incarnation.position,
    }
    await ledger.commit(WriteAuditRow(by=by, row=row))


def _move_up(folder: Path, home: Path) -> None:
    """The home opens when the folder is gone, and then everything is in its place."""
    (folder / "lock").unlink(missing_ok=True)
    for path in sorted(folder.iterdir()):
        path.replace(home / path.name)
    sync_dir(home)
    folder.rmdir()
    sync_dir(home)
