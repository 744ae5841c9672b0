"""Copies of a running ledger, each in a folder of its own under `backups/` in the home, until somebody has read them.

A copy costs as much room as the archive: it is not begun where that would leave less than `ROOM_BYTES_MIN` free. Two
are kept at most, and none over a restart: whoever reads one that is gone begins again.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from covenant.ledger.embedded.archive.archive import ARCHIVE_NAME
from covenant.ledger.embedded.disk import MIB, free_bytes
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.embedded.journal.shipped_segments import ShippedSegments
from covenant.model.errors import Conflict, Unavailable

STAGED_NAME: Final = "backups"
STAGED_MAX: Final = 2
ROOM_BYTES_MIN: Final = 256 * MIB
INCARNATION_NAME: Final = "incarnation.json"
ORIGINAL: Final = "original"


class Incarnation(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Which life of a ledger this is: each restore begins another one, with `position` records of the one before."""

    id: str = ORIGINAL
    restored_from: str | None = None
    position: int = 0
    restored_at_ms: int | None = None


def read_incarnation(home: Path) -> Incarnation:
    try:
        return msgspec.json.decode((home / INCARNATION_NAME).read_bytes(), type=Incarnation)
    except FileNotFoundError:
        return Incarnation()


class StagedBackup(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`folder` has the archive and the journal through record `position`, and nothing of a later one."""

    id: str
    folder: str
    position: int
    incarnation: str
    made_at_ms: int


class StagedBackups:
    """For the loop of its ledger. `shipped` hears of each copy: it closes gaps between those before."""

    def __init__(
        self,
        home: Path,
        ledger: EmbeddedLedger,
        new_id: Callable[[], str],
        *,
        shipped: ShippedSegments | None = None,
    ) -> None:
        self._folder = home / STAGED_NAME
        self._home = home
        self._ledger = ledger
        self._new_id = new_id
        self._shipped = shipped
        self._staged: dict[str, Path] = {}
        self._staging = asyncio.Lock()

    @property
    def warning(self) -> str | None:
        return self._shipped.status.warning if self._shipped is not None else None

    async def clear(self) -> None:
        """Remove what an earlier process has left."""
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def begin(self) -> StagedBackup:
        """A copy of the ledger as it is now. Raises Conflict while another one is being made."""
        if self._staging.locked():
            raise Conflict("backup_running", "another backup is being made; repeat when it is done")
        async with self._staging:
            while len(self._staged) >= STAGED_MAX:
                await self.end(next(iter(self._staged)))
            self._check_room()
            backup_id = self._new_id()
            folder = self._folder / backup_id
            await asyncio.to_thread(_make_folder, folder)
            try:
                position = await self._ledger.copy_to(folder)
            except BaseException:
                await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))
                raise
            self._staged[backup_id] = folder
        now_ms = self._ledger.now_ms()
        if self._shipped is not None:
            await asyncio.to_thread(self._shipped.note_backup, position, now_ms)
        return StagedBackup(
            id=backup_id,
            folder=str(folder),
            position=position,
            incarnation=read_incarnation(self._home).id,
            made_at_ms=now_ms,
        )

    async def end(self, backup_id: str) -> bool:
        """Remove a copy; False if there is none by this id."""
        folder = self._staged.pop(backup_id, None)
        if folder is None:
            return False
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return True

    def _check_room(self) -> None:
        needed = ROOM_BYTES_MIN + sum(_size(self._home / name) for name in (ARCHIVE_NAME, f"{ARCHIVE_NAME}-wal"))
        free = free_bytes(self._home)
        if free is not None and free < needed:
            told = f"a backup needs {needed / MIB:,.0f} MiB of room beside the home, and {free / MIB:,.0f} MiB are free"
            raise Unavailable("no_room", told)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _make_folder(folder: Path) -> None:
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    os.mkdir(folder, 0o700)
