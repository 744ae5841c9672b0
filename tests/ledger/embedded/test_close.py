"""Closing a ledger whose archive is behind: it is fed to the end, and afterwards nothing of the home is open."""

import asyncio
import resource
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from covenant import Mailbox
from covenant.ledger.embedded import fault_points
from covenant.ledger.embedded.journal.segments import list_segments
from covenant.ledger.embedded.open import open_ledger
from covenant.model.errors import HomeUnusable
from tests.ledger.embedded.recorded import task
from tests.ledger_contract import fault_plans
from tests.ledger_contract.fake_clock import FakeClock
from tests.ledger_contract.fault_plans import Plan
from tests.waits import BOUND_S

TASKS = 30


def open_in(folder: Path) -> list[str]:
    """The files of a folder that this process has open."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            path = str(fd.readlink())
        except FileNotFoundError:  # the one of this listing
            continue
        if path.startswith(str(folder)):
            found.append(path)
    return found


async def test_an_archive_that_is_behind_reads_on_after_the_journal_has_closed_and_leaves_nothing_open(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    reached, gate = threading.Event(), threading.Event()

    def hold(_step: fault_points.FaultPoint) -> None:
        reached.set()
        assert gate.wait(BOUND_S)

    ledger = await open_ledger(home, clock=FakeClock(), segment_bytes=2_000)
    (writer,) = [thread for thread in threading.enumerate() if thread.name == "journal-writer"]
    with fault_plans.armed(Plan("archive.apply", hold)):
        mailbox = Mailbox(ledger)
        await mailbox.send_task(task(1))
        assert await asyncio.to_thread(reached.wait, BOUND_S)  # with one record; the others are in later segments
        for number in range(2, TASKS + 1):
            await mailbox.send_task(task(number))
        assert len(list_segments(home / "journal")) > 2
        close = asyncio.create_task(ledger.close())
        await asyncio.to_thread(writer.join, BOUND_S)
        gate.set()
        async with asyncio.timeout(BOUND_S):
            await close
    assert open_in(home) == []
    with closing(sqlite3.connect(home / "archive.db")) as db:
        assert db.execute("SELECT count(*) FROM a2a_tasks").fetchone() == (TASKS,)


async def test_a_home_whose_journal_cannot_be_opened_for_writing_is_unusable_and_not_locked(tmp_path: Path) -> None:
    home, wall_clock, limits = tmp_path / "home", FakeClock(), resource.getrlimit(resource.RLIMIT_NOFILE)
    recovered = False

    def clock() -> int:
        """The opened ledger reads the clock after the recovery. From then on the process may open no further file."""
        nonlocal recovered
        if not recovered and (home / "journal").exists():
            recovered = True
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        return wall_clock()

    try:
        with pytest.raises(HomeUnusable, match="Too many open files"):
            await open_ledger(home, clock=clock)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert recovered
    ledger = await open_ledger(home, clock=wall_clock)
    await ledger.close()
