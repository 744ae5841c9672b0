"""Ships sealed segments of the journal by running `backup.command` for each, the oldest first.

A segment counts as shipped when the command has ended with 0, and that was written down. A daemon that dies in between
runs it once more for the same segment, so the command must be able to write the same file twice. One that fails is run
again after a pause that grows; what it said last is in `covenant a2a status`, in `covenant doctor` and in the log.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shlex
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from covenant.daemon.settings import BackupSettings
from covenant.daemon.telemetry import Log
from covenant.doors.metrics import Meter
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.embedded.journal.shipped_segments import SealedSegment, ShippedSegments
from covenant.model.errors import CovenantError, SettingsError
from covenant.model.rate_limits import Backoff

LOOK_S: Final = 1.0
SAID_BYTES_MAX: Final = 4_096
PAUSES: Final = Backoff(1.0, 300.0)


class CommandFailed(CovenantError):
    """The command did not ship its segment. The message says how it ended, and what it said last."""


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
        """Have its numbers told with the others."""
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
            await asyncio.sleep(PAUSES.pause(failures) if failures else LOOK_S)

    async def _seal(self) -> None:
        """A quiet ledger fills no segment: what is in the active one is shipped after a while all the same."""
        now_ms = self._ledger.clock.monotonic_ms()
        if now_ms - self._sealed_ms >= self._settings.seal_ms:
            self._sealed_ms = now_ms
            await self._ledger.seal()

    async def ship(self, segment: SealedSegment) -> bool:
        """Run the command for one segment; whether it did."""
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
        told = {"path": str(segment.path), "name": segment.path.name, "incarnation": self._incarnation}
        words = [_filled(word, told) for word in self._words]
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={
                **self._variables,
                "COVENANT_SEGMENT": told["path"],
                "COVENANT_SEGMENT_NAME": told["name"],
                "COVENANT_SEGMENT_SHA256": digest,
                "COVENANT_INCARNATION": self._incarnation,
            },
            start_new_session=True,
        )
        assert process.stderr is not None
        try:
            async with asyncio.timeout(self._settings.command_ms / 1000):
                said = await _last_said(process.stderr)
                code = await process.wait()
        except TimeoutError:
            raise CommandFailed(f"it did not end within {self._settings.command_ms} ms, and was killed") from None
        finally:
            # With all that it has started.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if code != 0:
            raise CommandFailed(f"it ended with {code}: {said or 'and said nothing'}")


def command_words(command: str) -> list[str]:
    """The program and its arguments. Raises SettingsError."""
    try:
        return shlex.split(command)
    except ValueError as error:
        raise SettingsError(f"backup.command cannot be read: {error}") from error


async def _last_said(stream: asyncio.StreamReader) -> str:
    """The last line, of however many."""
    tail = b""
    while chunk := await stream.read(65_536):
        tail = (tail + chunk)[-SAID_BYTES_MAX:]
    return tail.decode(errors="replace").strip().rpartition("\n")[2]


def _filled(word: str, told: Mapping[str, str]) -> str:
    for name, value in told.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
