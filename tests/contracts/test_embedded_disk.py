"""The log engine on a disk that fails, lies or is shared: what is refused, what is still read, what is found out."""

import asyncio
import errno
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from covenant.ledger.contract.task_query import TaskQuery
from covenant.ledger.contract.tasks import QueueQuery, TaskDetail
from covenant.ledger.embedded import fault_points, reads
from covenant.ledger.embedded import open as homes
from covenant.ledger.embedded.journal import snapshot
from covenant.ledger.embedded.journal.segments import list_segments
from covenant.ledger.embedded.open import open_ledger
from covenant.ledger.machine.states import FOLLOWING, LEASED, PARKED, QUEUED
from covenant.model.errors import Damaged, HomeLocked, HomeUnusable, Unavailable
from covenant.model.ids import LeaseId, TaskId
from tests.ledger_contract import fault_plans
from tests.ledger_contract.driver import LedgerDriver, refused
from tests.ledger_contract.embedded_engine import EmbeddedEngine, copy_home
from tests.ledger_contract.samples import ALICE, BOB, CAROL, DAVE, make_task, ok, same_work, task_id
from tests.waits import BOUND_S


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(tmp_path)
    yield engine
    await engine.close()


@pytest.fixture
async def driver(engine: EmbeddedEngine) -> LedgerDriver:
    return LedgerDriver(await engine.open(), engine.clock)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.parametrize("point", ["journal.write", "journal.sync", "journal.acknowledge"])
async def test_a_write_that_fails_is_never_acknowledged_and_reads_go_on(
    engine: EmbeddedEngine, driver: LedgerDriver, point: str, number: int
) -> None:
    leased = await driver.taken(make_task(1))
    await driver.send(make_task(2))
    before = [await driver.entry(task_id(1)), await driver.entry(task_id(2))]
    with fault_plans.armed(fault_plans.Plan(point, fault_plans.fail(number, written=20))):
        with refused("outcome_unknown", 503):
            await driver.finish(leased, ok(task_id(1)))
        with refused("storage_failed", 503):
            await driver.send(make_task(3))
        with refused("storage_failed", 503):
            await driver.take()
    assert [await driver.entry(task_id(1)), await driver.entry(task_id(2))] == before
    assert [entry.state for entry in await driver.queue()] == ["in_flight", "queued"]
    assert await driver.ledger.entry(task_id(3)) is None
    counts = await driver.ledger.counts()
    assert (counts.leased, counts.queued, counts.settled) == (1, 1, 0)
    assert counts.failure is not None
    await driver.check_audit()
    driver = LedgerDriver(await engine.close_and_reopen(driver.ledger), engine.clock)
    await driver.finish(leased, ok(task_id(1)))
    assert await driver.drain(count=9) == (ok(task_id(1)),)
    await driver.send(make_task(3))


class FullDisk(fault_plans.Plan):
    """A disk that takes nothing more, at these steps, for as long as this is armed."""

    def __init__(self, *points: str, number: int = errno.ENOSPC) -> None:
        super().__init__()
        self._points = points
        self._number = number

    def hit(self, step: fault_points.FaultPoint) -> None:
        super().hit(step)
        if step.name in self._points:
            raise OSError(self._number, os.strerror(self._number))


async def populated(driver: LedgerDriver) -> None:
    """Tasks in every live state, and a result that waits."""
    for number in range(1, 7):
        await driver.send(make_task(number, deadline_ms=driver.clock() + 1_000 * number))
    await driver.send_all([same_work(10), same_work(11)])
    first, second, third, *_ = await driver.take(count=5)
    driver.clock.advance(50)
    await driver.report(first, "half")
    await driver.finish(second, ok(second.task.id))
    await driver.park(third)
    await driver.taken_here(make_task(20, recipient=CAROL))


QUERIES = (
    QueueQuery(limit=100),
    QueueQuery(limit=2),
    QueueQuery(viewer=BOB.pubkey, limit=100),
    QueueQuery(viewer=CAROL.pubkey, limit=100),
    QueueQuery(min_lease_age_ms=10, limit=100),
    QueueQuery(deadline_within_ms=2_500, limit=100),
    *(QueueQuery(state_filter=state, limit=100) for state in ("queued", "in_flight", "parked", "following")),
)


LIVE = (QUEUED, LEASED, PARKED, FOLLOWING)
SEARCHES = (
    TaskQuery(states=LIVE, limit=200, count=True),
    TaskQuery(states=(QUEUED,), limit=200, agent=BOB.display),
    TaskQuery(states=LIVE, limit=200, ascending=True, attempt_min=1),
    TaskQuery(states=LIVE, limit=200, viewer=ALICE.pubkey, viewer_names=(ALICE.display,)),
)


async def live_reads(driver: LedgerDriver) -> list[object]:
    """Everything that is told of what is live."""
    ledger = driver.ledger
    return [
        *[await ledger.queue(query) for query in QUERIES],
        *[await ledger.find(query) for query in SEARCHES],
        *[await ledger.recent_tasks(viewer, 3) for viewer in (None, BOB.pubkey, ALICE.pubkey)],
        *[await ledger.recent_results(viewer, 3) for viewer in (None, BOB.pubkey, ALICE.pubkey)],
        *[await ledger.entry(task_id(number)) for number in range(1, 22)],
        msgspec.structs.replace(await ledger.counts(), history_failure=None, behind=0, gauges={}),
    ]


def without_past(shown: TaskDetail | None) -> TaskDetail | None:
    """What memory knows of a task: not the updates, and of the leases the live one."""
    if shown is None:
        return None
    return msgspec.structs.replace(shown, updates=(), leases=tuple(x for x in shown.leases if x.outcome is None))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
async def test_what_is_live_is_told_while_the_archive_cannot_be_written(
    engine: EmbeddedEngine, driver: LedgerDriver, number: int
) -> None:
    await driver.send(make_task(30, recipient=DAVE))
    await driver.queue()
    with fault_plans.armed(FullDisk("archive.apply", number=number)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(reads, "CATCH_UP_S", 0.1)  # what never comes need not be waited for
        patch.setattr(reads, "LIVE_S", 0.1)
        await populated(driver)
        await driver.queue()
        assert (await driver.ledger.counts()).history_failure is not None
        during = await live_reads(driver)
        shown = [without_past(await driver.ledger.show(task_id(n), None, 100)) for n in range(1, 31)]
        assert len(await driver.ledger.steps(task_id(30), 0, 10)) == 1, "it has not moved since it was archived"
        with refused("history_lagging", 503):
            await driver.ledger.find(TaskQuery())
        with refused("history_lagging", 503):
            await driver.ledger.steps(task_id(1), 0, 10)
    await driver.ledger.of_tenant("acme", 1)  # waits until the archive has everything
    assert during == await live_reads(driver)
    assert shown == [without_past(await driver.ledger.show(task_id(n), None, 100)) for n in range(1, 31)]
    assert sum(each is not None for each in shown) == 10


async def test_what_is_live_is_told_when_the_archive_cannot_be_read(
    engine: EmbeddedEngine, driver: LedgerDriver
) -> None:
    await populated(driver)
    before = await live_reads(driver)
    shown = without_past(await driver.ledger.show(task_id(1), None, 100))
    for name in ("archive.db", "archive.db-wal"):
        path = engine.home / name
        with path.open("r+b") as file:
            file.write(b"\xa5" * path.stat().st_size)
    assert await live_reads(driver) == before
    assert without_past(await driver.ledger.show(task_id(1), None, 100)) == shown
    with refused("archive_unreadable", 503):
        await driver.ledger.show(task_id(404), None, 100)
    await driver.send(make_task(40))
    assert task_id(40) in await driver.queued_ids()


async def test_a_full_disk_stops_writing_and_what_is_live_can_be_read(
    engine: EmbeddedEngine, driver: LedgerDriver
) -> None:
    await populated(driver)
    before = await live_reads(driver)
    with fault_plans.armed(FullDisk("journal.write", "archive.apply")):
        with refused("outcome_unknown", 503):
            await driver.send(make_task(40))
        after = await live_reads(driver)
        assert after[:-1] == before[:-1]
        assert without_past(await driver.ledger.show(task_id(1), None, 100)) is not None


@pytest.mark.parametrize(
    "point", ["opening.copy_tail", "opening.sync_tail", "opening.rename_tail", "opening.keep_torn"]
)
async def test_a_start_on_a_full_disk_names_the_file_the_room_and_the_way_out(
    engine: EmbeddedEngine, driver: LedgerDriver, point: str
) -> None:
    await driver.send(make_task(1))
    await driver.ledger.close()
    tail = list_segments(engine.home / "journal")[-1].path
    with tail.open("ab") as file:
        file.write(b'{"seq":2,"ts_')
    with fault_plans.armed(FullDisk(point)), pytest.raises(HomeUnusable) as refusal:
        await engine.open()
    told = str(refusal.value)
    assert str(tail) in told
    assert "No space left on device" in told
    assert "MiB are free there" in told
    assert "make room" in told
    assert "covenant doctor" in told
    assert (await (await engine.open()).counts()).queued == 1


async def test_a_start_does_not_wait_for_an_archive_that_cannot_be_written(
    engine: EmbeddedEngine, driver: LedgerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot is ahead of the archive, as a full disk leaves it: the archive must have caught up first."""
    monkeypatch.setattr(homes, "UNWRITABLE_WAIT_S", 0.5)
    with fault_plans.armed(FullDisk("archive.apply")):
        await driver.send(make_task(1))
        compacting = asyncio.ensure_future(driver.ledger.compact())
        async with asyncio.timeout(BOUND_S):
            while snapshot.newest(engine.home / "journal") is None:
                await asyncio.wait((compacting,), timeout=0.01)
        compacting.cancel()
        await asyncio.wait((compacting,))
        await driver.ledger.close()
        with pytest.raises(HomeUnusable, match=r"archive\.db: .*No space left") as refusal:
            await engine.open()
    assert "covenant doctor" in str(refusal.value)
    assert (await (await engine.open()).counts()).queued == 1


async def test_everybody_who_waits_for_a_failing_disk_is_told_that_the_outcome_is_unknown(driver: LedgerDriver) -> None:
    with fault_plans.armed(fault_plans.Plan("journal.sync", fault_plans.fail(errno.EIO))):
        answers = await asyncio.gather(*(driver.send(make_task(n)) for n in range(20)), return_exceptions=True)
    assert all(isinstance(answer, Unavailable) for answer in answers)
    assert (await driver.ledger.counts()).queued == 0


async def test_a_refusal_whose_audit_row_cannot_be_written_is_not_told_as_that_refusal(driver: LedgerDriver) -> None:
    with (
        fault_plans.armed(fault_plans.Plan("journal.sync", fault_plans.fail(errno.EIO))),
        refused("outcome_unknown", 503),
    ):
        await driver.settle(ok(task_id(404)))


async def test_a_home_is_open_once_at_a_time(engine: EmbeddedEngine, driver: LedgerDriver) -> None:
    with pytest.raises(HomeLocked, match="already open"):
        await open_ledger(engine.home, clock=engine.clock)
    await driver.ledger.close()
    await (await open_ledger(engine.home, clock=engine.clock)).close()


async def test_a_torn_tail_is_cut_and_a_changed_record_refuses_to_open(
    engine: EmbeddedEngine, driver: LedgerDriver
) -> None:
    for number in range(5):
        await driver.send(make_task(number))
    await driver.ledger.close()
    tail = list_segments(engine.home / "journal")[-1].path
    with tail.open("ab") as file:
        file.write(b'{"seq":6,"ts_')
    driver = LedgerDriver(await engine.open(), engine.clock)
    assert (await driver.ledger.counts()).queued == 5
    await driver.ledger.close()
    tail.write_bytes(tail.read_bytes().replace(b"piece of work 1", b"piece of cake 1", 1))
    with pytest.raises(Damaged, match=r"line 2"):
        await engine.open()


TAMPERING = {
    "a changed row": "UPDATE audit SET row = replace(row, 'row 2', 'row 9') WHERE idx = 3",
    "a missing row": "DELETE FROM audit WHERE idx = 3",
    "a missing tail": "DELETE FROM audit WHERE idx > 3",
    "an empty audit": "DELETE FROM audit",
}


@pytest.mark.parametrize("how", TAMPERING)
async def test_an_audit_that_was_tampered_with_does_not_verify(
    engine: EmbeddedEngine, driver: LedgerDriver, how: str
) -> None:
    for number in range(5):
        await driver.note(f"row {number}")
    await driver.check_audit()
    await driver.ledger.close()
    with closing(sqlite3.connect(engine.home / "archive.db")) as db:
        assert db.execute(TAMPERING[how]).rowcount > 0
        db.commit()
    driver = LedgerDriver(await engine.open(), engine.clock)
    report = await driver.ledger.audit_verify()
    assert not report.valid
    assert report.failures


async def test_callers_at_the_same_moment_share_syncs(driver: LedgerDriver) -> None:
    before = (await driver.ledger.counts()).gauges["syncs"]
    await asyncio.gather(*(driver.send(make_task(number)) for number in range(200)))
    assert (await driver.ledger.counts()).gauges["syncs"] - before <= 20


async def test_a_crash_at_any_moment_under_load_keeps_what_was_acknowledged_by_then(
    engine: EmbeddedEngine, driver: LedgerDriver, tmp_path: Path
) -> None:
    """Files are copied while they are written to: each copy is what a kill at that moment would have left."""
    acknowledged: set[TaskId] = set()
    leases: dict[TaskId, LeaseId] = {}

    async def send(number: int) -> None:
        for step in range(40):
            acknowledged.add((await driver.send(make_task(1_000 * number + step))).task_id)

    async def take() -> None:
        for _ in range(40):
            for leased in await driver.take(count=2):
                leases[leased.task.id] = leased.lease.lease_id

    callers = [asyncio.ensure_future(action) for action in (*map(send, range(8)), take(), take())]
    copies: list[tuple[Path, set[TaskId], dict[TaskId, LeaseId]]] = []
    while not all(caller.done() for caller in callers):
        known = (tmp_path / f"copy-{len(copies)}", set(acknowledged), dict(leases))
        await asyncio.to_thread(copy_home, engine.home, known[0])
        copies.append(known)
    await asyncio.gather(*callers)
    assert len(copies) > 1
    for home, sent, held in copies:
        ledger = await open_ledger(home, clock=engine.clock)
        for which in sent:
            entry = await ledger.entry(which)
            assert entry is not None, "an acknowledged task is lost"
            assert which not in held or (entry.lease is not None and entry.lease.lease_id == held[which])
        await ledger.close()
