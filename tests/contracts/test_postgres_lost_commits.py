"""A daemon that refuses a database without its commits refuses it after a restart, too, until somebody decides."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from covenant.ledger.postgres.database_admin import CHAIN, mark_restored
from covenant.ledger.postgres.lost_commits import read_lost_commits
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from covenant.model.errors import HomeUnusable, Unavailable
from tests.contracts.test_postgres_liveness import LEASE_MS, execute, membership, serves, until
from tests.ledger_contract.driver import LedgerDriver, refused
from tests.ledger_contract.postgres_engine import PostgresEngine
from tests.ledger_contract.postgres_server import Databases
from tests.ledger_contract.samples import OPERATOR, make_task, task_id

REFUSED = r"lost commits.*covenant ledger restored"


@pytest.fixture
async def engine(databases: Databases) -> AsyncIterator[PostgresEngine]:
    url = await databases.borrow()
    engine = PostgresEngine(url, lease_ms=LEASE_MS)
    yield engine
    await engine.close()
    await databases.give_back(url)


async def joined(engine: PostgresEngine, name: str, path: Path) -> LedgerDriver:
    driver = LedgerDriver(await engine.join(name, lost_path=path), engine.clock)
    await until(lambda: membership(driver)._looked)
    return driver


async def is_refused(driver: LedgerDriver) -> None:
    await until(lambda: membership(driver).refusal is not None)
    with refused("ledger_rolled_back", 503):
        await driver.send(make_task(99))


async def lose(engine: PostgresEngine, node: str, count: int) -> None:
    """As a standby that had not been sent the last batches: their rows are not there, and the writer is behind."""
    await execute(engine, f"UPDATE writers SET seq = seq - {count} WHERE node = '{node}'")
    await execute(engine, "DELETE FROM counted")
    await execute(engine, "DELETE FROM news")


async def stop(engine: PostgresEngine, driver: LedgerDriver, *, killed: bool) -> None:
    if killed:
        await engine.kill(driver.ledger)  # type: ignore[arg-type]
    else:
        await engine.close_one(driver.ledger)


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
async def test_a_restarted_daemon_refuses_lost_commits_until_somebody_accepts_the_loss(
    engine: PostgresEngine, tmp_path: Path, killed: bool
) -> None:
    paths = {name: tmp_path / f"{name}.json" for name in "ab"}
    a, b = [await joined(engine, name, path) for name, path in paths.items()]
    for number in range(5):
        await a.send(make_task(number))
    await until(lambda: membership(b)._cursors[membership(a)._joined.writer] == membership(a).written)
    await lose(engine, "a", 3)
    for driver in (a, b):
        await is_refused(driver)
        await stop(engine, driver, killed=killed)
    for name, path in paths.items():
        for _ in range(2):
            with pytest.raises(Unavailable, match=REFUSED) as refusal:
                await joined(engine, name, path)
            assert refusal.value.code == "ledger_rolled_back"
            assert str(path) in refusal.value.message
    await mark_restored(engine.url, OPERATOR, 1_000, "a row")
    a, b = [await joined(engine, name, path) for name, path in paths.items()]
    await until(lambda: serves(a, 10))
    await until(lambda: serves(b, 11))
    rows = [each for each in await a.ledger.audit_recent(None, 100, None) if '"ledger_restored"' in each.row]
    assert [each.chain for each in rows] == [CHAIN]
    assert not any(path.exists() for path in paths.values())


async def test_a_running_daemon_forgets_a_loss_that_was_accepted_or_is_over(
    engine: PostgresEngine, tmp_path: Path
) -> None:
    a = await joined(engine, "a", path := tmp_path / "lost.json")
    await a.send(make_task(1))
    await lose(engine, "a", 1)
    await is_refused(a)
    assert path.exists()
    await mark_restored(engine.url, OPERATOR, 1_000, "a row")
    await until(lambda: serves(a, 2))
    assert not path.exists()
    await lose(engine, "a", 1)
    await is_refused(a)
    assert path.exists()
    await execute(engine, "UPDATE writers SET seq = seq + 1")
    await until(lambda: serves(a, 3))
    assert not path.exists()


async def test_a_new_run_is_tried_again_if_the_database_goes_away_as_it_begins(
    engine: PostgresEngine, tmp_path: Path
) -> None:
    a = await joined(engine, "a", tmp_path / "lost.json")
    begin, tries = membership(a)._on_fenced, list[int]()

    async def begin_at_the_second_try() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise asyncpg.ConnectionDoesNotExistError("the connection was closed in the middle of operation")
        await begin()

    membership(a)._on_fenced = begin_at_the_second_try
    await a.send(make_task(1))
    await lose(engine, "a", 1)
    await is_refused(a)
    await execute(engine, "UPDATE writers SET seq = seq + 1")
    await until(lambda: serves(a, 2))
    assert len(tries) == 2


async def test_a_daemon_stops_although_the_database_refuses_to_let_it_leave(
    engine: PostgresEngine, tmp_path: Path
) -> None:
    a = await joined(engine, "a", tmp_path / "lost.json")
    await execute(engine, "ALTER TABLE nodes RENAME TO elsewhere")
    try:
        await engine.close_one(a.ledger)
    finally:
        await execute(engine, "ALTER TABLE elsewhere RENAME TO nodes")


async def test_a_restarted_daemon_serves_a_database_that_has_the_lost_commits_again(
    engine: PostgresEngine, tmp_path: Path
) -> None:
    a = await joined(engine, "a", path := tmp_path / "lost.json")
    await a.send(make_task(1))
    await lose(engine, "a", 1)
    await is_refused(a)
    await stop(engine, a, killed=False)
    with pytest.raises(Unavailable, match=REFUSED):
        await joined(engine, "a", path)
    await execute(engine, "UPDATE writers SET seq = seq + 1")
    again = await joined(engine, "a", path)
    assert not path.exists()
    await until(lambda: serves(again, 2))


async def test_a_restarted_daemon_refuses_lost_commits_whose_numbers_a_new_run_has_used(
    engine: PostgresEngine, tmp_path: Path
) -> None:
    a, b = [await joined(engine, name, tmp_path / name) for name in "ab"]
    for number in range(5):
        await b.send(make_task(number))
    await until(lambda: membership(a)._cursors.get(membership(b)._joined.writer) == membership(b).written)
    await engine.close_one(b.ledger)
    await lose(engine, "b", 3)
    await is_refused(a)
    await engine.close_one(a.ledger)
    again = await joined(engine, "b", tmp_path / "b")  # it was not up, and has seen nothing
    for number in range(10, 20):
        await again.send(make_task(number))
    with pytest.raises(Unavailable, match=REFUSED):
        await joined(engine, "a", tmp_path / "a")


async def test_a_loss_that_cannot_be_written_down_is_refused_and_written_down_later(
    engine: PostgresEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a = await joined(engine, "a", path := tmp_path / "away" / "lost.json")
    await a.send(make_task(1))
    await lose(engine, "a", 1)
    await is_refused(a)
    beaten_s = membership(a)._fresh_s
    await until(lambda: membership(a)._fresh_s > beaten_s + LEASE_MS / 1_000)
    logged = [each for each in caplog.records if each.getMessage() == "ledger.loss_not_saved"]
    assert [each.levelno for each in logged] == [logging.WARNING], "once, however often it is tried"
    path.parent.mkdir()
    await until(path.exists)
    await engine.close_one(a.ledger)
    with pytest.raises(Unavailable, match=REFUSED):
        await joined(engine, "a", path)


async def test_a_ledger_that_begins_in_an_empty_database_has_lost_nothing(
    engine: PostgresEngine, tmp_path: Path, databases: Databases
) -> None:
    a = await joined(engine, "a", path := tmp_path / "lost.json")
    await a.send(make_task(1))
    await lose(engine, "a", 1)
    await is_refused(a)
    await engine.close_one(a.ledger)
    other = PostgresEngine(await databases.make(), lease_ms=LEASE_MS)
    again = await joined(other, "a", path)
    await again.send(make_task(2))
    assert await again.queued_ids() == [task_id(2)]
    assert not path.exists()
    await other.close()
    await databases.drop(other.url)


async def test_a_file_of_lost_commits_that_cannot_be_read_is_named(engine: PostgresEngine, tmp_path: Path) -> None:
    (path := tmp_path / "lost.json").write_text("{")
    with pytest.raises(HomeUnusable, match=r"lost\.json cannot be read.*delete it"):
        await joined(engine, "a", path)
    with pytest.raises(HomeUnusable, match="Is a directory"):
        await joined(engine, "a", tmp_path)
    path.unlink()
    assert read_lost_commits(path) is None


async def test_callers_are_told_that_the_ledger_was_restored(engine: PostgresEngine, tmp_path: Path) -> None:
    a, b = [await joined(engine, name, tmp_path / name) for name in "ab"]
    before = b.ledger.boot
    async with membership(a)._busy, membership(b)._busy:  # no heartbeat finds out before the writer does
        await mark_restored(engine.url, OPERATOR, 1_000, "a row")
        with pytest.raises(Unavailable, match=r"the ledger was restored.*begins anew") as refusal:
            await a.send(make_task(1))
        assert refusal.value.code == "ledger_fenced"
    await until(lambda: serves(a, 2))
    await until(lambda: b.ledger.boot != before)
    await until(lambda: serves(b, 3))


async def test_the_heartbeat_finds_out_that_the_ledger_was_restored(engine: PostgresEngine, tmp_path: Path) -> None:
    a = await joined(engine, "a", tmp_path / "a")
    member = membership(a)
    assert isinstance(a.ledger, PostgresLedger)
    async with a.ledger._writer.at_rest:  # no new run begins meanwhile
        await mark_restored(engine.url, OPERATOR, 1_000, "a row")
        await until(lambda: member.refusal is not None)
        with pytest.raises(Unavailable, match="the ledger was restored"):
            member.check()
    await until(lambda: serves(a, 1))
