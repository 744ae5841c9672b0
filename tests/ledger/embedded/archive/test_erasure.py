"""Erasing from the archive: by size, whole or not at all through crashes and full disks, and the file gets smaller."""

import asyncio
import errno
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from covenant.ledger.contract.retention import EraseTasks
from covenant.ledger.embedded.archive.archive_file import ARCHIVE_NAME
from covenant.ledger.embedded.archive.archive_writer import LocalWriter
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.embedded.open import SEEN, open_ledger
from covenant.ledger.machine.commands import Withdraw
from covenant.model.errors import Unavailable
from tests.ledger_contract import fault_plans
from tests.ledger_contract.driver import LedgerDriver, refused
from tests.ledger_contract.erasure import LARGE_BYTES, LATER_MS, erase, finish, known
from tests.ledger_contract.fake_clock import FakeClock
from tests.ledger_contract.samples import ALICE, make_task, ok, task_id
from tests.waits import BOUND_S

NUMBERS = range(1, 41)


async def filled(home: Path) -> LedgerDriver:
    clock = FakeClock()
    driver = LedgerDriver(await open_ledger(home, clock=clock), clock)
    await finish(driver, *NUMBERS)
    assert await known(driver, NUMBERS[-1])  # all is archived
    clock.advance(LATER_MS)
    return driver


def counts(home: Path) -> dict[str, int]:
    with closing(sqlite3.connect(home / ARCHIVE_NAME)) as db:
        tables = ("a2a_tasks", "packs", "requests", "updates", "handovers", "aged_out")
        found = {table: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}
        (found["ids"],) = db.execute("SELECT count(*) FROM ids WHERE typeof(task_id) = 'text'").fetchone()
        (found["names"],) = db.execute("SELECT count(*) FROM ids WHERE typeof(task_id) = 'blob'").fetchone()
        (found["sized"],) = db.execute("SELECT coalesce(sum(tasks), 0) FROM stored_sizes").fetchone()
        return found


async def test_nothing_is_left_of_an_erased_task_but_its_id(tmp_path: Path) -> None:
    driver = await filled(tmp_path)
    whole = counts(tmp_path)
    assert whole["packs"] == whole["sized"] == whole["names"] == len(NUMBERS)
    await erase(driver)
    await driver.ledger.close()
    left = counts(tmp_path)
    assert left.pop("ids") == left.pop("aged_out") == len(NUMBERS)
    assert set(left.values()) == {0}


async def test_what_is_too_much_goes_the_oldest_first_however_young_it_is(tmp_path: Path) -> None:
    driver = await filled(tmp_path)
    with closing(sqlite3.connect(tmp_path / ARCHIVE_NAME)) as db:
        ((held,),) = db.execute("SELECT bytes FROM stored_sizes").fetchall()
    erased = await driver.ledger.erase_tasks(EraseTasks(tenant="", before_ms=0, bytes_max=held // 2))
    assert erased.tasks in (len(NUMBERS) // 2, len(NUMBERS) // 2 + 1)  # their sizes differ a little
    assert erased.bytes == pytest.approx(held / 2, rel=0.1)
    assert await known(driver, *NUMBERS) == list(NUMBERS)[erased.tasks :]
    assert (await driver.ledger.erase_tasks(EraseTasks(tenant="", before_ms=0, bytes_max=held // 2))).tasks == 0
    await driver.ledger.close()


async def test_what_was_acknowledged_before_is_erased_although_the_archive_was_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = await filled(tmp_path)
    ledger, sync = driver.ledger, LocalWriter.checkpoint
    assert isinstance(ledger, EmbeddedLedger)
    reached, asked = threading.Event(), threading.Event()

    def checkpoint(writer: LocalWriter) -> bool:
        reached.set()
        assert asked.wait(BOUND_S)
        return sync(writer)

    monkeypatch.setattr(LocalWriter, "checkpoint", checkpoint)
    # The archive has applied what there was, and is syncing while more comes.
    syncing = asyncio.create_task(ledger._archive.checkpoint())
    assert await asyncio.to_thread(reached.wait, BOUND_S)
    await finish(driver, len(NUMBERS) + 1)
    driver.clock.advance(LATER_MS)
    erasing = asyncio.create_task(erase(driver))
    await asyncio.sleep(0)
    asked.set()
    assert (await erasing).tasks == len(NUMBERS) + 1
    await syncing
    await ledger.close()


async def test_a_large_task_that_moves_again_is_counted_once(tmp_path: Path) -> None:
    clock = FakeClock()
    driver = LedgerDriver(await open_ledger(tmp_path, clock=clock), clock)
    await driver.finish(await driver.taken(make_task(1, intent_text="x" * LARGE_BYTES)), ok(task_id(1)))
    for request_id in ("first", "second"):
        assert await driver.drain(request_id=request_id)
        assert await known(driver, 1)
        with closing(sqlite3.connect(tmp_path / ARCHIVE_NAME)) as db:
            ((tasks, size),) = db.execute("SELECT tasks, bytes FROM stored_sizes").fetchall()
            assert (tasks, size) == db.execute("SELECT count(*), sum(bytes) FROM kept_sizes").fetchone()
            assert size > LARGE_BYTES
        await driver.ledger.commit(Withdraw(by=ALICE, request_id=request_id))
    assert await driver.drain()
    clock.advance(LATER_MS)
    assert (await erase(driver)).tasks == 1
    await driver.ledger.close()
    with closing(sqlite3.connect(tmp_path / ARCHIVE_NAME)) as db:
        assert db.execute("SELECT tasks, bytes FROM stored_sizes").fetchall() == [(0, 0)]


async def test_the_ids_are_known_when_the_filter_of_ids_is_made_anew(tmp_path: Path) -> None:
    driver = await filled(tmp_path)
    await erase(driver)
    await driver.ledger.compact()
    await driver.ledger.close()
    (tmp_path / SEEN).unlink()
    driver = LedgerDriver(await open_ledger(tmp_path, clock=driver.clock), driver.clock)
    for number in (NUMBERS[0], NUMBERS[-1]):
        with refused("duplicate_task_id", 409):
            await driver.send(make_task(number))
    await driver.ledger.close()


@pytest.mark.parametrize("point", ["archive.erase", "archive.erase_commit"])
async def test_a_full_disk_erases_nothing_and_the_next_batch_works(tmp_path: Path, point: str) -> None:
    driver = await filled(tmp_path)
    with fault_plans.armed(fault_plans.Plan(point, fault_plans.fail(errno.ENOSPC))):
        with pytest.raises(Unavailable, match="No space left"):
            await erase(driver)
        assert await known(driver, *NUMBERS) == list(NUMBERS)
    assert (await erase(driver)).tasks == len(NUMBERS)
    await driver.ledger.close()


KILLED = """
import asyncio, sys
from pathlib import Path
from tests.ledger_contract import fault_plans
from tests.ledger.embedded.archive.test_erasure import filled
from tests.ledger_contract.erasure import erase

async def main() -> None:
    driver = await filled(Path(sys.argv[1]))
    fault_plans.arm(fault_plans.Plan(sys.argv[2], fault_plans.kill, nth=2))
    await erase(driver, limit=15)

asyncio.run(main())
"""


@pytest.mark.parametrize("point", ["archive.erase", "archive.erase_commit"])
def test_a_kill_within_a_batch_leaves_those_before_it_and_the_rest_is_erased_afterwards(
    tmp_path: Path, point: str
) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), point], cwd=Path.cwd(), check=False)
    assert ended.returncode == -signal.SIGKILL

    async def check() -> None:
        clock = FakeClock()
        clock.advance(2 * LATER_MS)
        driver = LedgerDriver(await open_ledger(tmp_path, clock=clock), clock)
        left = await known(driver, *NUMBERS)
        assert left == list(NUMBERS)[15:]
        assert (await erase(driver)).tasks == len(left)
        assert await known(driver, *NUMBERS) == []
        await driver.ledger.close()

    asyncio.run(check())


async def test_the_file_gets_smaller(tmp_path: Path) -> None:
    clock = FakeClock()
    driver = LedgerDriver(await open_ledger(tmp_path, clock=clock), clock)
    for number in NUMBERS:
        task = make_task(number, intent_text=os.urandom(20_000).hex())
        leased = await driver.taken(task)
        await driver.cancel(leased.task.id)
        await driver.drain()
    clock.advance(LATER_MS)
    await driver.ledger.compact()
    before = (tmp_path / ARCHIVE_NAME).stat().st_size
    await erase(driver, limit=10)
    await driver.ledger.compact()
    after = (tmp_path / ARCHIVE_NAME).stat().st_size
    await driver.ledger.close()
    assert after < before / 2
