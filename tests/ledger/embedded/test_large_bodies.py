"""Bodies that stay on disk: what memory holds, what a lease is given, and what happens when one cannot be read."""

import asyncio
import hashlib
import json
import random
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from covenant.ledger.embedded import queues
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.embedded.journal import snapshot
from covenant.ledger.embedded.open import open_ledger
from covenant.model.content import Json
from covenant.model.errors import Refusal
from covenant.model.task import Task, cache_key, short_kind, weigh
from tests.ledger_contract.driver import LedgerDriver, refused
from tests.ledger_contract.embedded_engine import ARCHIVE, EmbeddedEngine
from tests.ledger_contract.samples import ALICE, BOB, CAROL, idempotent, make_task, ok, task_id

LARGE = 70_000


def large(number: int, **fields: Any) -> Task:
    """A task with a large body that is like no other's."""
    text = random.Random(number).randbytes(LARGE // 2).hex()
    return make_task(number, intent_text=text, parts=(Json({"number": number, "also": text[:100]}),), **fields)


def in_memory(ledger: object) -> int:
    """How many bytes of bodies the live state holds."""
    assert isinstance(ledger, EmbeddedLedger)
    return sum(weigh(entry.task) for entry in ledger._state.entries.values())


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(tmp_path, segment_bytes=300_000)
    yield engine
    await engine.close()


@pytest.fixture
async def driver(engine: EmbeddedEngine) -> LedgerDriver:
    return LedgerDriver(await engine.open(), engine.clock)


async def archived(driver: LedgerDriver) -> None:
    """The archive has everything that was decided by now."""
    await driver.show(task_id(1))


async def test_a_large_body_leaves_memory_when_the_archive_has_it_and_is_leased_whole(driver: LedgerDriver) -> None:
    await driver.send_all([large(1), make_task(2), large(3)])
    await archived(driver)
    assert in_memory(driver.ledger) < 1_000
    assert [leased.task for leased in await driver.take(count=9)] == [large(1), make_task(2), large(3)]
    assert (await driver.entry(task_id(3))).task == large(3)


@pytest.mark.parametrize("compacts", [False, True])
@pytest.mark.parametrize("crashes", [False, True])
async def test_a_restart_reads_no_large_body_into_memory_and_leases_are_given_theirs(
    engine: EmbeddedEngine, driver: LedgerDriver, *, crashes: bool, compacts: bool
) -> None:
    wanted = [large(number, recipient=BOB if number % 2 else CAROL) for number in range(1, 9)]
    await driver.send_all(wanted[:5])
    leased = await driver.take_one(CAROL)
    if compacts:
        await driver.ledger.compact()
        await driver.send_all(wanted[5:7])
        await driver.ledger.compact()
    else:
        await driver.send_all(wanted[5:7])
    await driver.send(wanted[7])
    reopen = engine.crash_and_reopen if crashes else engine.close_and_reopen
    driver = LedgerDriver(await reopen(driver.ledger), engine.clock)
    await archived(driver)
    assert in_memory(driver.ledger) < 1_000
    taken = [each.task for who in (BOB, CAROL) for each in await driver.take(who, count=100)]
    assert taken == [wanted[n - 1] for n in (1, 3, 5, 7, 4, 6, 8)]
    await driver.requeue(leased.task.id)
    assert (await driver.take_one(CAROL)).task == leased.task == wanted[1]


async def test_bodies_that_wait_for_the_archive_are_bounded_in_memory(
    engine: EmbeddedEngine, driver: LedgerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "WAITING_BYTES_MAX", 3 * LARGE)
    with closing(sqlite3.connect(engine.home / ARCHIVE, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")  # the archive cannot be written to
        await driver.send_all([large(number) for number in range(1, 11)])
        assert in_memory(driver.ledger) < 3 * (LARGE + 200)
        db.execute("ROLLBACK")
    assert [each.task for each in await driver.take(count=10)] == [large(number) for number in range(1, 11)]


async def test_a_body_that_cannot_be_read_is_not_leased_and_holds_up_nobody(
    engine: EmbeddedEngine, driver: LedgerDriver
) -> None:
    await driver.send_all([large(1), make_task(2)])
    await archived(driver)
    with closing(sqlite3.connect(engine.home / ARCHIVE, isolation_level=None)) as db:
        ((number, good),) = db.execute("SELECT task_no, task FROM requests ORDER BY task_no LIMIT 1").fetchall()
        db.execute("UPDATE requests SET task = substr(task, 1, 1000) WHERE task_no = ?", (number,))
        assert [each.task.id for each in await driver.take(count=9)] == [task_id(2)]
        with refused("body_unreadable", 503):
            await driver.take()
        entry = driver.ledger._state.entries[task_id(1)]  # type: ignore[attr-defined]
        assert (entry.attempt, entry.lease) == (0, None)
        db.execute("UPDATE requests SET task = ? WHERE task_no = ?", (good, number))
    assert (await driver.take_one()).task == large(1)


async def test_many_unreadable_bodies_cost_a_receive_few_reads(
    engine: EmbeddedEngine, driver: LedgerDriver, caplog: pytest.LogCaptureFixture
) -> None:
    await driver.send_all([large(number) for number in range(1, 21)])
    await driver.send(make_task(21))
    await archived(driver)
    with closing(sqlite3.connect(engine.home / ARCHIVE, isolation_level=None)) as db:
        db.execute("UPDATE requests SET task = '{' WHERE length(task) > 1000")
    assert (await driver.take_one()).task.id == task_id(21)
    assert sum(record.message == "ledger.body_unreadable" for record in caplog.records) == queues.UNREADABLE_MAX


async def test_two_who_receive_at_once_get_different_tasks_whole(driver: LedgerDriver) -> None:
    await driver.send_all([large(number) for number in range(1, 7)])
    await archived(driver)
    taken = [each.task for batch in await asyncio.gather(*(driver.take(count=2) for _ in range(3))) for each in batch]
    assert sorted(task.id for task in taken) == [task_id(number) for number in range(1, 7)]
    assert all(task == large(int(task.id[-2:], 16)) for task in taken)


async def test_a_receive_repeated_under_its_request_id_is_given_the_same_body(driver: LedgerDriver) -> None:
    await driver.send(large(1))
    first = await driver.take(request_id="r1")
    await archived(driver)
    assert await driver.take(request_id="r1") == first


async def test_same_work_with_a_large_text_is_still_the_same_work(engine: EmbeddedEngine, driver: LedgerDriver) -> None:
    def work(number: int) -> Task:
        return make_task(number, intent_text="x" * LARGE, idempotency=idempotent())

    await driver.send(work(1))
    await archived(driver)
    assert (await driver.send(work(2))).following == task_id(1)
    driver = LedgerDriver(await engine.close_and_reopen(driver.ledger), engine.clock)
    await archived(driver)
    assert (await driver.send(work(3))).following == task_id(1)
    await driver.finish(await driver.take_one(), ok(task_id(1)))
    await driver.ledger.compact()
    driver = LedgerDriver(await engine.close_and_reopen(driver.ledger), engine.clock)
    assert (await driver.send(work(4))).replayed


async def test_a_snapshot_that_was_written_before_entries_had_sizes_opens(
    engine: EmbeddedEngine, driver: LedgerDriver
) -> None:
    text = "x" * LARGE
    await driver.send_all([large(1), make_task(2, intent_text=text, idempotency=idempotent())])
    await driver.finish(
        await driver.taken(make_task(3, intent_text=text, recipient=CAROL, idempotency=idempotent())), ok(task_id(3))
    )
    await driver.ledger.compact()
    await driver.ledger.close()
    _write_as_before(engine.home / "journal", text)
    ledger = await open_ledger(engine.home, clock=engine.clock)
    try:
        again = LedgerDriver(ledger, engine.clock)
        assert in_memory(ledger) < 1_000
        assert ledger._state.account(f"@{ALICE.pubkey}").size == weigh(large(1)) + LARGE
        assert [each.task.id for each in await again.take(count=9)] == [task_id(1), task_id(2)]
        repeated = make_task(4, intent_text=text, recipient=CAROL, idempotency=idempotent())
        assert (await again.send(repeated)).replayed
    finally:
        await ledger.close()


def _write_as_before(folder: Path, text: str) -> None:
    """The newest snapshot as it was before: no sizes, and whole texts as kinds."""
    found = snapshot.newest(folder)
    assert found is not None
    lines = [json.loads(line) for line in found[1].read_bytes().splitlines()[:-1]]
    kinds = 0
    for line in lines:
        for name in ("body_bytes", "messages_bytes", "kept_bytes"):
            line.get("entry", {}).pop(name, None)
        if line["type"] == "cached" and line["key"]["task_kind"] == short_kind(text):
            line["key"]["task_kind"] = text
            kinds += 1
    assert kinds == 1
    whole = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    end = {"type": "end", "lines": len(lines), "sha256": hashlib.sha256(whole).hexdigest()}
    found[1].write_bytes(whole + msgspec.json.encode(end) + b"\n")


def test_a_key_is_small_however_large_its_task_is() -> None:
    first = cache_key(make_task(1, intent_text="x" * LARGE, idempotency=idempotent()))
    second = cache_key(make_task(2, intent_text="x" * LARGE + "y", idempotency=idempotent()))
    assert first is not None
    assert second is not None
    assert len(first.task_kind) < 100
    assert first.task_kind != second.task_kind


async def test_an_entry_is_read_with_its_body_or_not_at_all(engine: EmbeddedEngine, driver: LedgerDriver) -> None:
    await driver.send(large(1))
    await archived(driver)
    with closing(sqlite3.connect(engine.home / ARCHIVE, isolation_level=None)) as db:
        db.execute("DELETE FROM requests")
    with pytest.raises(Refusal, match="cannot be read from the archive"):
        await driver.entry(task_id(1))
