"""Backups of a home beside the ledger's own file: shipping the journal's sealed segments, and restoring a home.

`SegmentShipper` runs `backup.command` for each sealed segment, the oldest first. A segment counts as shipped when the
command has ended with 0 and that was recorded. If the daemon dies in between, the next one runs the command again for
the same segment, so the command must be able to write the same file twice. A command that fails is run again after a
growing pause; its last output is in `covenant a2a status`, in `covenant doctor` and in the log.

`restore` makes a home from a backup and from segments that were shipped after it. Everything is made in the folder
`restoring` of the home, opened and checked there as a start would, marked as restored, and moved to its place last. A
home with that folder does not open: a restore that was cut off is never half a home.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shlex
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import IO, Final, NamedTuple
from uuid import uuid4

import msgspec

from covenant.daemon.settings import BackupSettings
from covenant.daemon.telemetry import Log
from covenant.doors.metrics import Meter
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
from covenant.ledger.embedded.journal.shipped_segments import SealedSegment, ShippedSegments
from covenant.ledger.embedded.open import RESTORING_NAME, open_ledger
from covenant.ledger.machine.identity_commands import WriteAuditRow
from covenant.mailbox import local_agent
from covenant.model.errors import CovenantError, SettingsError
from covenant.model.rate_limits import Backoff

POLL_S: Final = 1.0
OUTPUT_BYTES_MAX: Final = 4_096
PAUSES: Final = Backoff(1.0, 300.0)
POSITION_MAX: Final = 2**62
_POSITION: Final = re.compile(r"[0-9]{1,18}")


class CommandFailed(CovenantError):
    """The command did not ship its segment. The message has its exit status and its last output."""


class SegmentShipper:
    """A scheduler. `variables`: the environment of the command."""

    def __init__(
        self,
        ledger: EmbeddedLedger,
        shipped: ShippedSegments,
        settings: BackupSettings,
        *,
        incarnation: str,
        variables: Mapping[str, str],
        log: Log,
    ) -> None:
        self._ledger = ledger
        self._shipped = shipped
        self._settings = settings
        self._words = command_words(settings.command)
        self._incarnation = incarnation
        self._variables = variables
        self._log = log
        self._sealed_ms = ledger.clock.monotonic_ms()

    def count(self, meter: Meter) -> None:
        """Adds its numbers to the metrics."""
        shipped = self._shipped
        for name, text, read in (
            ("covenant_backup_failing", "1 while backup.command fails.", lambda: shipped.status.failure is not None),
            ("covenant_backup_failures", "Failures in a row.", lambda: shipped.status.failures),
            ("covenant_backup_shipped_position", "Last record shipped.", lambda: shipped.status.shipped_seq),
            ("covenant_backup_pending_segments", "Sealed segments to ship.", lambda: len(shipped.pending())),
            (
                "covenant_backup_gap",
                "1 if segments went unshipped.",
                lambda: shipped.status.gap > shipped.status.backup_seq,
            ),
        ):
            meter.gauge(name, text, read)

    async def run(self) -> None:
        while True:
            await self._seal()
            for segment in await asyncio.to_thread(self._shipped.pending):
                if not await self.ship(segment):
                    break
            failures = self._shipped.status.failures
            await asyncio.sleep(PAUSES.pause(failures) if failures else POLL_S)

    async def _seal(self) -> None:
        """Seals the active segment every `backup.seal_ms`, since a quiet ledger would never fill it."""
        now_ms = self._ledger.clock.monotonic_ms()
        if now_ms - self._sealed_ms >= self._settings.seal_ms:
            self._sealed_ms = now_ms
            await self._ledger.seal()

    async def ship(self, segment: SealedSegment) -> bool:
        """Runs the command for one segment. Returns whether it succeeded."""
        try:
            digest = await asyncio.to_thread(_sha256, segment.path)
            await self._run(segment, digest)
        except (CommandFailed, OSError) as error:
            self._log.warning("backup.command_failed", segment=segment.path.name, reason=str(error))
            await asyncio.to_thread(self._shipped.note_failure, str(error), self._ledger.now_ms())
            return False
        await asyncio.to_thread(self._shipped.note_shipped, segment)
        self._log.info("backup.shipped", segment=segment.path.name, position=segment.last_seq)
        return True

    async def _run(self, segment: SealedSegment, digest: str) -> None:
        values = {"path": str(segment.path), "name": segment.path.name, "incarnation": self._incarnation}
        words = [_fill_in(word, values) for word in self._words]
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={
                **self._variables,
                "COVENANT_SEGMENT": values["path"],
                "COVENANT_SEGMENT_NAME": values["name"],
                "COVENANT_SEGMENT_SHA256": digest,
                "COVENANT_INCARNATION": self._incarnation,
            },
            start_new_session=True,
        )
        assert process.stderr is not None
        try:
            async with asyncio.timeout(self._settings.command_ms / 1000):
                message = await _last_line(process.stderr)
                code = await process.wait()
        except TimeoutError:
            raise CommandFailed(f"it did not end within {self._settings.command_ms} ms, and was killed") from None
        finally:
            # The whole process group, with everything that the command has started.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if code != 0:
            raise CommandFailed(f"it ended with {code}: {message or 'and said nothing'}")


def command_words(command: str) -> list[str]:
    """The program and its arguments. Raises SettingsError."""
    try:
        return shlex.split(command)
    except ValueError as error:
        raise SettingsError(f"backup.command cannot be read: {error}") from error


async def _last_line(stream: asyncio.StreamReader) -> str:
    tail = b""
    while chunk := await stream.read(65_536):
        tail = (tail + chunk)[-OUTPUT_BYTES_MAX:]
    return tail.decode(errors="replace").strip().rpartition("\n")[2]


def _fill_in(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither a position nor a time such as 2026-01-31T12:00:00Z") from None
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
        position = _extend_journal(folder / "journal", manifest, segments, until or Until())
        incarnation = Incarnation(
            id=str(uuid4()), restored_from=manifest.backup_id, position=position, restored_at_ms=now_ms()
        )
        replace_private(folder / INCARNATION_NAME, msgspec.json.encode(incarnation))
        ledger = await open_ledger(folder, clock=now_ms)
        try:
            counts = await ledger.counts()
            await _audit_restore(ledger, incarnation)
        finally:
            await ledger.close()
        _move_into_place(folder, home)
    return Restored(manifest, incarnation, counts)


def _extend_journal(journal: Path, manifest: Manifest, segments: Path | None, until: Until) -> int:
    """Brings the unpacked journal to the end of the restore. Returns that position."""
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
    """Appends the records after `position` to a journal, from a folder of shipped segments. Returns the last number.

    Every line is checked. Raises CannotRestore if a record is missing or is not what was written.
    """
    expected = position + 1
    found = list_segments(source)
    for segment, after in zip_longest(found, found[1:]):
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
    """The number of the last record, and whether the restore goes on after this segment."""
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


async def _audit_restore(ledger: EmbeddedLedger, incarnation: Incarnation) -> None:
    """Writes to the audit that the ledger was restored."""
    operators = [each.agent for each in await ledger.identities() if each.operator and each.revoked_at_ms is None]
    by = operators[0] if operators else local_agent("process@local")
    row: dict[str, object] = {
        "type": "ledger_restored",
        "incarnation": incarnation.id,
        "backup_id": incarnation.restored_from,
        "position": incarnation.position,
    }
    await ledger.commit(WriteAuditRow(by=by, row=row))


def _move_into_place(folder: Path, home: Path) -> None:
    """Moves everything to its place, and then removes the folder: only then does the home open."""
    (folder / "lock").unlink(missing_ok=True)
    for path in sorted(folder.iterdir()):
        path.replace(home / path.name)
    sync_dir(home)
    folder.rmdir()
    sync_dir(home)
