"""The archive's writer in a process of its own: the same rows, and no silence when it dies."""

import asyncio
import os
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from covenant.ledger.embedded.archive import archive as archive_module
from covenant.ledger.embedded.archive.archive import Archive
from covenant.ledger.embedded.archive.archive_writer import LocalWriter, WriterProcess
from covenant.ledger.embedded.journal.segments import Cursor, segment_path
from covenant.ledger.embedded.open import open_ledger
from covenant.model.errors import CovenantError, Unavailable
from covenant.model.rate_limits import Backoff
from tests.ledger.embedded.recorded import Recorded, leased, sent, settled
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.fake_clock import FakeClock
from tests.waits import BOUND_S


class Journaled(Recorded):
    """Records as a journal has them: in a segment, which is durable as far as a test says."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        folder.mkdir()
        self.end = Cursor(0, 1, 0)

    def sync(self, through_seq: int) -> None:
        """Write everything, and call it durable up to there."""
        segment_path(self.folder, 1).write_bytes(b"".join(self.lines))
        self.end = Cursor(through_seq, 1, len(b"".join(self.lines[:through_seq])))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "archive.db"


@pytest.fixture
def journaled(tmp_path: Path) -> Journaled:
    return Journaled(tmp_path / "journal")


def rows(path: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT task_id, ledger_state FROM a2a_tasks ORDER BY 1").fetchall()


def pid_of(archive: Archive) -> int:
    """The process that writes this archive: the one child of ours that was started for it."""
    assert isinstance(archive._writer, WriterProcess)
    return archive._writer._process.pid


@asynccontextmanager
async def following(path: Path, journaled: Journaled) -> AsyncIterator[Archive]:
    archive = Archive(path)
    archive.start(journaled, lambda seq: None, lambda: WriterProcess(path, journaled))
    try:
        yield archive
    finally:
        await archive.close()


async def test_it_makes_the_same_rows_as_the_thread(path: Path, journaled: Journaled, tmp_path: Path) -> None:
    journaled.each([sent(1), leased(1), sent(2), settled(1)])
    journaled.sync(4)
    async with following(path, journaled) as archive:
        archive.notify(4)
        await archive.caught_up(4, BOUND_S)
        assert archive.archived_seq == 4
        assert await archive.checkpoint() == 4
    with closing(LocalWriter(tmp_path / "other.db", journaled, lasting=True)) as here:
        here.apply_next()
    assert rows(path) == rows(tmp_path / "other.db")


async def test_what_is_not_durable_does_not_exist_for_it(path: Path, journaled: Journaled) -> None:
    journaled.each([sent(1), sent(2), sent(3)])
    journaled.sync(2)
    async with following(path, journaled) as archive:
        archive.notify(2)
        await archive.caught_up(2, BOUND_S)
        assert len(rows(path)) == 2
        journaled.sync(3)
        archive.notify(3)
        await archive.caught_up(3, BOUND_S)
        assert len(rows(path)) == 3


async def test_a_writer_that_was_killed_is_replaced_and_nothing_is_missing(
    path: Path, journaled: Journaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_module, "RETRIES", Backoff(0.01, 5.0))
    journaled.each([sent(1), sent(2)])
    journaled.sync(1)
    async with following(path, journaled) as archive:
        archive.notify(1)
        await archive.caught_up(1, BOUND_S)
        os.kill(pid_of(archive), signal.SIGKILL)
        journaled.sync(2)
        archive.notify(2)
        await archive.caught_up(2, BOUND_S)
        assert archive.failure is None
        assert len(rows(path)) == 2


async def test_while_no_writer_can_be_had_whoever_asks_is_told_why(
    path: Path, journaled: Journaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    journaled.record(sent(1))
    journaled.sync(1)
    async with following(path, journaled) as archive:
        archive.notify(1)
        with pytest.raises(Unavailable, match="writer has died") as refusal:
            await archive.caught_up(1, 1.0)
        assert refusal.value.code == "history_lagging"
        assert await archive.checkpoint() == 0


async def test_an_error_in_it_is_told_in_its_own_words(path: Path, journaled: Journaled) -> None:
    journaled.record(sent(1))
    journaled.sync(1)
    journaled.end = Cursor(2, 1, journaled.end.offset + 1_000)
    apart = await asyncio.to_thread(WriterProcess, path, journaled)
    try:
        assert await asyncio.to_thread(apart.apply_next) == 1
        with pytest.raises(CovenantError, match="shorter than what was written"):
            await asyncio.to_thread(apart.apply_next)
    finally:
        await asyncio.to_thread(apart.close)


async def test_it_outlives_the_signals_that_stop_a_daemon_and_ends_with_its_input(
    path: Path, journaled: Journaled
) -> None:
    journaled.record(sent(1))
    journaled.sync(1)
    apart = await asyncio.to_thread(WriterProcess, path, journaled)
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(apart._process.pid, number)
        assert await asyncio.to_thread(apart.apply_next) == 1
    finally:
        await asyncio.to_thread(apart.close)
    assert apart._process.returncode == 0


async def test_a_ledger_with_it_answers_from_history(tmp_path: Path) -> None:
    clock = FakeClock()
    for round_no in (1, 2):
        ledger = await open_ledger(tmp_path / "home", clock=clock, archive_process=True)
        driver = LedgerDriver(ledger, clock)
        try:
            await driver.note(f"opened {round_no}")
            await driver.check_audit()
            assert len(await ledger.audit_recent(None, 10, None)) == round_no
            await ledger.compact()
        finally:
            await ledger.close()
