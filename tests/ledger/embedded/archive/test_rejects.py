"""Records that the archive cannot take: set aside one by one, told, and never in the way of the others."""

import asyncio
import errno
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.ledger.contract.tasks import QueueQuery
from covenant.ledger.embedded import fault_points
from covenant.ledger.embedded.archive import apply_batch
from covenant.ledger.embedded.archive.apply_batch import LiveRows, apply_or_reject, read_rejects
from covenant.ledger.embedded.archive.archive_file import archived_seq_of, open_writer
from covenant.ledger.embedded.journal.record import decode_line, encode_line
from covenant.ledger.embedded.journal.segments import Cursor, Lines
from covenant.ledger.embedded.open import open_ledger
from covenant.ledger.machine.events import Audited
from covenant.model.errors import CovenantError
from covenant.model.grant import AuditRow
from covenant.model.ids import AgentId, PublicKey
from tests.ledger.embedded.recorded import encode, leased, sent
from tests.ledger.embedded.recorded import task_id as recorded_id
from tests.ledger_contract import fault_plans
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.fake_clock import FakeClock
from tests.ledger_contract.samples import make_task, ok, task_id
from tests.waits import BOUND_S

ROW = msgspec.json.encode(
    AuditRow(id="row", timestamp_ms=1, issuer=AgentId("a@test", PublicKey("key")), kind={})
).decode()
BAD_EVENTS = {
    "a task that moves and was never sent": encode([leased(404)]),
    "a task that was sent before": encode([sent(1)]),
    "an event without its fields": b'[{"type":"task_sent","task_id":"x"}]',
    "an event of no known type": b'[{"type":"task_vanished"}]',
    "a number that SQLite cannot hold": encode([Audited(1 << 70, "chain", PublicKey("issuer"), ROW)]),
}


def lines_of(*events: bytes) -> Lines:
    data = b"".join(encode_line(seq, 1_000, seq - 1, each) for seq, each in enumerate(events, 1))
    return Lines(data, len(events), Cursor(len(events), 1, len(data)))


@pytest.mark.parametrize("bad", BAD_EVENTS)
def test_a_record_that_cannot_be_applied_is_set_aside_with_its_reason(tmp_path: Path, bad: str) -> None:
    good = [encode([sent(number)]) for number in range(1, 8)]
    with closing(open_writer(tmp_path / "archive.db", lasting=True)) as db:
        lines = lines_of(*good[:4], BAD_EVENTS[bad], *good[4:])
        assert apply_or_reject(db, lines, 0, LiveRows()) == 1
        assert archived_seq_of(db) == 8
        (reject,) = read_rejects(db, 10)
        assert bytes(decode_line(reject.line).events) == BAD_EVENTS[bad]
        assert reject.seq == 5
        assert reject.error
        held = {row[0] for row in db.execute("SELECT task_id FROM a2a_tasks")}
        assert held == {recorded_id(number) for number in range(1, 8)}


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_of_any_batch_the_good_records_are_applied_and_the_bad_ones_set_aside(good: list[bool]) -> None:
    events = [encode([sent(at)]) if fine else encode([leased(1_000)]) for at, fine in enumerate(good, 1)]
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(open_writer(Path(folder) / "archive.db", lasting=False)) as db,
    ):
        assert apply_or_reject(db, lines_of(*events), 0, LiveRows()) == good.count(False)
        assert archived_seq_of(db) == len(good)
        assert [reject.seq for reject in read_rejects(db, 100)] == [at for at, fine in enumerate(good, 1) if not fine]
        (held,) = db.execute("SELECT count(*) FROM a2a_tasks").fetchone()
        assert held == good.count(True)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), sqlite3.OperationalError("locked")])
def test_a_disk_that_fails_says_nothing_about_a_record(tmp_path: Path, error: Exception) -> None:
    def fail(_: fault_points.FaultPoint) -> None:
        raise error

    with closing(open_writer(tmp_path / "archive.db", lasting=True)) as db:
        with fault_plans.armed(fault_plans.Plan("archive.apply", fail)), pytest.raises(type(error)):
            apply_or_reject(db, lines_of(encode([sent(1)])), 0, LiveRows())
        assert (archived_seq_of(db), read_rejects(db, 10)) == (0, [])


def test_when_nearly_everything_is_rejected_the_archive_stops_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply_batch, "REJECTS_MAX", 2)
    with closing(open_writer(tmp_path / "archive.db", lasting=True)) as db:
        with pytest.raises(CovenantError, match="takes no more"):
            apply_or_reject(db, lines_of(*(encode([leased(9)]) for _ in range(4))), 0, LiveRows())
        assert (archived_seq_of(db), len(read_rejects(db, 10))) == (2, 2)


@pytest.mark.parametrize("apart", [False, True], ids=["in a thread", "in a process"])
async def test_a_ledger_whose_archive_rejects_a_record_reads_compacts_and_restarts(
    tmp_path: Path, *, apart: bool
) -> None:
    """The archive holds a task that the journal does not know: as an accepted loss used to leave it."""
    clock = FakeClock()

    async def opened() -> LedgerDriver:
        return LedgerDriver(await open_ledger(tmp_path, clock=clock, archive_process=apart), clock)

    driver = await opened()
    await driver.send(make_task(1))
    await driver.ledger.close()
    with closing(sqlite3.connect(tmp_path / "archive.db")) as db:
        db.execute("INSERT INTO ids_new VALUES (?, 1)", (task_id(2),))
        db.commit()
    driver = await opened()
    async with asyncio.timeout(BOUND_S):
        for number in (2, 3):
            await driver.send(make_task(number))
        assert {line.task.id for line in (await driver.ledger.queue(QueueQuery())).tasks} >= {task_id(1), task_id(3)}
        while not (await driver.ledger.counts()).rejected:  # noqa: ASYNC110  (a thread or a process writes it)
            await asyncio.sleep(0.005)
        assert (await driver.ledger.counts()).rejected == 1
        for taken in await driver.take(count=9):
            await driver.finish(taken, ok(taken.task.id))
        assert len(await driver.drain(count=9)) == 3
        await driver.ledger.compact()
    await driver.ledger.close()
    driver = await opened()
    async with asyncio.timeout(BOUND_S):
        assert (await driver.ledger.counts()).rejected > 0
        assert (await driver.show(task_id(3))).state == "resolved"
    await driver.ledger.close()
