"""The embedded engine under test, on files and in memory.

A crash needs no help from the engine: the files are copied as they are at that moment, whatever is half written, and
the copy is opened. What the abandoned ledger does afterwards happens to files that nobody looks at any more.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.embedded.journal.journal import SEGMENT_BYTES
from covenant.ledger.embedded.open import memory_ledger, open_ledger
from covenant.model.settings import Limits
from tests.ledger_contract.fake_clock import FakeClock

NODE: Final = "here"
PAGE_BYTES: Final = 4_096
ARCHIVE: Final = "archive.db"


class EmbeddedEngine:
    """Homes in a folder, one after the other. Segments are small, so that tests see several."""

    def __init__(
        self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES, body_bytes_on_disk: int | None = None
    ) -> None:
        self.clock = FakeClock()
        self.home = folder / "home-0"
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._body_bytes_on_disk = body_bytes_on_disk
        self._boots = 0
        self._homes = 0
        self.node = NODE
        self._limits: Limits | None = None
        self._open: list[Ledger] = []

    async def open(self, limits: Limits | None = None) -> Ledger:
        self._boots += 1
        self._limits = limits
        if self._body_bytes_on_disk is not None:
            limits = replace(limits or Limits(), body_bytes_on_disk=self._body_bytes_on_disk)
        ledger = await open_ledger(
            self.home,
            clock=self.clock,
            limits=limits,
            segment_bytes=self._segment_bytes,
            node=self.node,
            boot=f"boot-{self._boots}",
        )
        self._open.append(ledger)
        return ledger

    async def close_and_reopen(self, ledger: Ledger) -> Ledger:
        await self._close(ledger)
        return await self.open(self._limits)

    async def crash_and_reopen(self, ledger: Ledger) -> Ledger:
        self._homes += 1
        copied = self._folder / f"home-{self._homes}"
        await asyncio.to_thread(copy_home, self.home, copied)
        await self._close(ledger)
        self.home = copied
        return await self.open(self._limits)

    async def _close(self, ledger: Ledger) -> None:
        self._open.remove(ledger)
        await ledger.close()

    async def close(self) -> None:
        for ledger in list(self._open):
            await self._close(ledger)


def copy_home(home: Path, target: Path) -> None:
    """A home as a crash would leave it now.

    The archive first: it must not be ahead of the journal. Its writer is held off, or the two files of a database that
    is written to would not belong together.
    """
    target.mkdir(mode=0o700)
    with closing(sqlite3.connect(home / ARCHIVE, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        for name in (ARCHIVE, f"{ARCHIVE}-wal"):
            if (home / name).exists():
                shutil.copy(home / name, target / name)
        db.execute("ROLLBACK")
    shutil.copytree(
        home,
        target,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("lock", f"{ARCHIVE}*"),
        copy_function=_copy_backwards,
    )


def _copy_backwards(source: str, target: str) -> None:
    """Copies a file that is appended to. The end first: so no bytes are in the copy without those before them."""
    with Path(source).open("rb", buffering=0) as file, Path(target).open("wb") as copy:
        size = os.fstat(file.fileno()).st_size
        for start in reversed(range(0, size, PAGE_BYTES)):
            os.pwrite(copy.fileno(), os.pread(file.fileno(), min(PAGE_BYTES, size - start), start), start)


class EmbeddedInMemory:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self._open: list[Ledger] = []

    async def open(self, limits: Limits | None = None) -> Ledger:
        ledger = await memory_ledger(clock=self.clock, limits=limits, node=NODE, boot="boot-1")
        self._open.append(ledger)
        return ledger

    async def close(self) -> None:
        for ledger in self._open:
            await ledger.close()
