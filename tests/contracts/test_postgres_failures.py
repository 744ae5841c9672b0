"""A PostgreSQL that loses what it acknowledged, or has no room left: it is said, and nothing more is lost."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import asyncpg
import pytest

from covenant.ledger.postgres import connections
from covenant.ledger.postgres.batch_writer import QUIET_MS
from covenant.ledger.postgres.connections import Connections
from covenant.ledger.postgres.database_admin import find_troubles, mark_restored
from covenant.ledger.postgres.migrations import NotDurable
from covenant.ledger.postgres.open_postgres import open_postgres_ledger
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from covenant.ledger.postgres.sql import Statement
from covenant.model.errors import Unavailable
from covenant.model.ids import TaskId
from tests.ledger_contract.driver import LedgerDriver, refused
from tests.ledger_contract.postgres_engine import PostgresEngine
from tests.ledger_contract.postgres_proxy import proxy_before
from tests.ledger_contract.postgres_server import OPTIONS, UNPRIVILEGED, Databases, Server, programs
from tests.ledger_contract.samples import OPERATOR, make_task, task_id
from tests.matrices import first_rows_of
from tests.places import short_folder
from tests.waits import BOUND_S

LEASE_MS: Final = 1_500
DISK_BYTES: Final = 48 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that the server's user can enter."""
    with short_folder() as place:
        place.chmod(0o755)
        yield place


def make_server(folder: Path, name: str) -> Server:
    (folder / name).mkdir()
    return Server(folder / name, programs(), OPTIONS)


async def execute(url: str, *texts: str) -> None:
    connection: asyncpg.Connection[Any] = await asyncpg.connect(url)
    try:
        for text in texts:
            await connection.execute(text)
    finally:
        await connection.close()


async def until(is_so: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(BOUND_S):
        while True:
            if await is_so():
                return
            await asyncio.sleep(0.02)


async def refusal(driver: LedgerDriver, number: int) -> str | None:
    try:
        await driver.send(make_task(number, intent_text=os.urandom(8_000).hex()))
    except Unavailable as error:
        return error.code
    return None


async def is_taken(driver: LedgerDriver, number: int) -> None:
    async def is_so() -> bool:
        return await refusal(driver, number) is None

    await until(is_so)


async def is_refused_as(driver: LedgerDriver, code: str, number: int) -> None:
    """Until it is refused so; other refusals may come before, and nothing is taken."""

    async def is_so() -> bool:
        return await refusal(driver, number) == code

    await until(is_so)


@pytest.mark.parametrize("is_slow", [False, True], ids=["within a lease", "after a lease"])
async def test_the_promotion_of_a_standby_without_the_last_commits_is_noticed_and_refused(
    folder: Path, is_slow: bool
) -> None:
    primary, standby = make_server(folder, "primary"), make_server(folder, "standby")
    await asyncio.to_thread(primary.prepare)
    await asyncio.to_thread(primary.start)
    try:
        await execute(primary.url("postgres"), "CREATE DATABASE covenant")
        await asyncio.to_thread(primary.copy_to, standby, "standby")
        await asyncio.to_thread(standby.start)
        async with proxy_before(primary.url("covenant")) as first, proxy_before(primary.url("covenant")) as second:
            engine, drivers = PostgresEngine(first.url, lease_ms=LEASE_MS), list[LedgerDriver]()
            for name, proxy in (("a", first), ("b", second)):
                engine.url = proxy.url
                joined = await engine.join(name, lost_path=folder / f"{name}.json")
                drivers.append(LedgerDriver(joined, engine.clock))
            await drivers[0].send(make_task(1))
            await _has_all(primary, standby)
            await execute(standby.url("postgres"), "ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()")
            await _is_true(primary, "SELECT count(*) = 0 FROM pg_stat_replication")
            for number in range(2, 6):
                for driver, offset in zip(drivers, (0, 10), strict=True):
                    await driver.send(make_task(number + offset))
            await asyncio.to_thread(primary.kill)
            await execute(standby.url("postgres"), "SELECT pg_promote(true)")
            if is_slow:
                await _is_true(standby, "SELECT bool_and(until_ms < extract(epoch FROM now()) * 1000) FROM nodes")
            for driver, proxy, number in zip(drivers, (first, second), (20, 21), strict=True):
                proxy.lead_to(standby.url("covenant"))
                await is_refused_as(driver, "ledger_rolled_back", number)
                assert "covenant ledger restored" in ((await driver.ledger.counts()).failure or "")
                if is_slow and driver is drivers[0]:
                    await _is_true(standby, "SELECT lost_at_ms IS NOT NULL FROM nodes WHERE node = 'b'")
            for driver, name in zip(drivers, "ab", strict=True):
                await engine.close_one(driver.ledger)
                with pytest.raises(Unavailable, match="covenant ledger restored"):
                    await engine.join(name, lost_path=folder / f"{name}.json")
            left = await asyncpg.connect(standby.url("covenant"))
            try:
                assert await left.fetchval("SELECT count(*) FROM live") == 1, "nothing was written after the loss"
            finally:
                await left.close()
            await engine.close()
    finally:
        for server in (standby, primary):
            if server.running:
                await asyncio.to_thread(server.stop)


async def _has_all(primary: Server, standby: Server) -> None:
    one, other = await asyncpg.connect(primary.url("postgres")), await asyncpg.connect(standby.url("postgres"))
    try:
        written = await one.fetchval("SELECT pg_current_wal_lsn()::text")
        await until(lambda: other.fetchval("SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn", written))
    finally:
        await one.close()
        await other.close()


async def _is_true(server: Server, asked: str) -> None:
    connection = await asyncpg.connect(server.url("covenant"))
    try:
        await until(lambda: connection.fetchval(asked))
    finally:
        await connection.close()


@pytest.mark.parametrize(
    ("settings", "named"),
    first_rows_of(
        [
            (("fsync = off",), "fsync = off"),
            (("full_page_writes = off",), "full_page_writes = off"),
            (("synchronous_commit = off",), "synchronous_commit = off"),
            (("synchronous_commit = local", "synchronous_standby_names = 'standby'"), "synchronous_commit = local"),
        ]
    ),
)
async def test_a_setting_with_which_commits_can_be_lost_is_named_at_the_start(
    folder: Path, settings: tuple[str, ...], named: str
) -> None:
    (folder / "server").mkdir()
    server = Server(folder / "server", programs(), ("listen_addresses=", "max_connections=20"))
    await asyncio.to_thread(server.prepare)
    await asyncio.to_thread(server.start)
    try:
        await execute(server.url("postgres"), "CREATE DATABASE covenant")
        url = server.url("covenant")
        await (await open_postgres_ledger(url, clock=lambda: 1)).close()
        for each in settings:
            await execute(url, f"ALTER SYSTEM SET {each}")
        await execute(url, "SELECT pg_reload_conf()")

        async def is_refused() -> bool:  # a session that begins before the server has read them has the old ones
            try:
                await (await open_postgres_ledger(url, clock=lambda: 1)).close()
            except NotDurable as refusal:
                return named in str(refusal) and "ledger.durability" in str(refusal)
            return False

        await until(is_refused)
        if "fsync" in named:
            await (await open_postgres_ledger(url, clock=lambda: 1, durability="os")).close()
    finally:
        await asyncio.to_thread(server.stop)


async def test_the_doctor_names_a_synchronous_standby_that_is_away(folder: Path) -> None:
    server = make_server(folder, "primary")
    await asyncio.to_thread(server.prepare)
    await asyncio.to_thread(server.start)
    try:
        await execute(server.url("postgres"), "CREATE DATABASE covenant")
        url = server.url("covenant")
        await (await open_postgres_ledger(url, clock=lambda: 1, durability="os")).close()
        assert (await find_troubles(url, durable=False))[1] == []
        await execute(url, "ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()")
        commit = asyncio.create_task(_commit_once_it_waits(url))

        async def is_named() -> bool:
            return any(
                "wait for a synchronous standby" in each.what for each in (await find_troubles(url, durable=False))[1]
            )

        await until(is_named)
        assert not commit.done()
        await execute(url, "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
        await commit
        assert (await find_troubles(url, durable=False))[1] == []
    finally:
        await asyncio.to_thread(server.stop)


@pytest.mark.parametrize("looked", [True, False])
async def test_a_daemon_a_start_and_a_command_name_a_synchronous_standby_that_is_away(
    folder: Path, *, looked: bool
) -> None:
    """`looked`: whether the daemon had read the news of the others before."""
    server = make_server(folder, "primary")
    await asyncio.to_thread(server.prepare)
    await asyncio.to_thread(server.start)
    try:
        engine = PostgresEngine(server.url("postgres"), lease_ms=LEASE_MS)
        driver = LedgerDriver(await engine.open(), engine.clock)
        fix = "take it out of synchronous_standby_names"
        assert isinstance(driver.ledger, PostgresLedger)
        membership = driver.ledger._membership
        async with membership._busy:
            await execute(
                engine.url, "ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()"
            )
            await until(partial(_has_setting, engine.url, "synchronous_standby_names", "nobody"))
            membership._looked = looked

        async def is_named() -> bool:
            return fix in ((await driver.ledger.counts()).failure or "")

        await until(is_named)
        with pytest.raises(Unavailable, match=fix):
            await driver.send(make_task(1))
        with pytest.raises(Unavailable, match=fix):
            await engine.join("b")
        with pytest.raises(Unavailable, match=fix):
            await mark_restored(engine.url, OPERATOR, 1_000, "a row")
        await execute(engine.url, "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
        await is_taken(driver, 2)
        await engine.close()
    finally:
        await asyncio.to_thread(server.stop)


async def test_a_caller_whose_commit_waits_for_a_standby_is_told_of_the_standby(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "COMMAND_S", 2.0)  # nobody need wait half a minute for a standby
    monkeypatch.setitem(connections.WRITER_SETTINGS, "lock_timeout", "1s")
    server = make_server(folder, "primary")
    await asyncio.to_thread(server.prepare)
    await asyncio.to_thread(server.start)
    try:
        engine = PostgresEngine(server.url("postgres"), lease_ms=LEASE_MS)
        driver = LedgerDriver(await engine.open(), engine.clock)
        await execute(engine.url, "ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()")
        with pytest.raises(Unavailable, match="take it out of synchronous_standby_names") as told:
            await asyncio.wait_for(_send_until_refused(driver), BOUND_S)
        assert told.value.code == "outcome_unknown"
        await execute(engine.url, "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
        await is_taken(driver, 2_000_000)
        await engine.close()
    finally:
        await asyncio.to_thread(server.stop)


async def _has_setting(url: str, name: str, value: str) -> bool:
    connection = await asyncpg.connect(url)
    try:
        return bool(await connection.fetchval("SELECT current_setting($1)", name) == value)
    finally:
        connection.terminate()


async def _send_until_refused(driver: LedgerDriver) -> None:
    """Until the server has read the setting, commits do not wait."""
    for number in range(1_000_000):
        await driver.send(make_task(number))


async def _commit_once_it_waits(url: str) -> None:
    """Commits when the session has read the new setting."""
    connection = await asyncpg.connect(url)
    try:
        await until(lambda: connection.fetchval("SELECT current_setting('synchronous_standby_names') <> ''"))
        await connection.execute("UPDATE ledger_level SET level = level")
    finally:
        await connection.close()


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    place = folder / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.root
async def test_a_full_disk_of_the_database_is_said_and_room_is_all_that_it_needs(
    folder: Path, small_disk: Path
) -> None:
    server = make_server(folder, "server")
    tables = small_disk / "tables"
    tables.mkdir()
    subprocess.run(["chown", UNPRIVILEGED, str(tables)], check=True)
    await asyncio.to_thread(server.prepare)
    await asyncio.to_thread(server.start)
    engine = PostgresEngine(server.url("covenant"), lease_ms=LEASE_MS)
    try:
        await execute(
            server.url("postgres"),
            f"CREATE TABLESPACE small LOCATION '{tables}'",
            "CREATE DATABASE covenant TABLESPACE small",
        )
        driver = LedgerDriver(await engine.join("a"), engine.clock)
        taken: list[TaskId] = []
        filler = small_disk / "filler"
        disk = os.statvfs(small_disk)
        filler.write_bytes(b"x" * (disk.f_bavail * disk.f_frsize - (256 << 10)))
        with refused("database_unavailable", 503):
            for number in range(1, 1_000):
                await driver.send(make_task(number, intent_text=os.urandom(8_000).hex()))
                taken.append(task_id(number))
        assert await refusal(driver, 2_000) == "database_unavailable"
        assert await driver.queued_ids() == taken
        filler.unlink()

        async def goes_on() -> bool:
            return await refusal(driver, 3_000) is None

        await until(goes_on)
        assert await driver.queued_ids() == [*taken, task_id(3_000)]
        assert (await driver.ledger.audit_verify()).valid
    finally:
        await engine.close()
        await asyncio.to_thread(server.stop)


async def test_no_connection_holds_locks_for_ever_after_its_client_vanished(databases: Databases) -> None:
    url = await databases.borrow()
    opened = Connections(url)
    await opened.open()
    try:
        async with opened.transaction() as db:
            assert await db.fetchval("SHOW idle_in_transaction_session_timeout") == "10s"
    finally:
        await opened.close()
        await databases.give_back(url)


async def test_a_read_whose_connection_is_dropped_once_its_statement_is_prepared_is_refused(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = await databases.borrow()
    opened = Connections(url)
    await opened.open()
    prepare: Callable[..., Awaitable[Any]] = asyncpg.Connection._get_statement

    async def prepare_and_drop(*given: Any, **named: Any) -> Any:
        prepared = await prepare(*given, **named)
        opened.drop_all()
        await asyncio.sleep(0)
        return prepared

    monkeypatch.setattr(asyncpg.Connection, "_get_statement", prepare_and_drop)
    try:
        with pytest.raises(Unavailable, match="cannot be reached"):
            await opened.fetch(Statement("SELECT 1"), {})
    finally:
        monkeypatch.undo()
        await opened.close()
        await databases.give_back(url)


NO_ROOM: Final = """
CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full';
END $$;
CREATE TRIGGER no_room BEFORE INSERT ON events FOR EACH ROW WHEN (length(NEW.body) > 12000) EXECUTE FUNCTION no_room()
"""


async def test_a_full_disk_is_over_when_there_is_room_again_and_not_when_a_small_write_fits(
    databases: Databases, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "covenant.ledger.postgres.batch_writer")
    url = await databases.make()
    engine = PostgresEngine(url, lease_ms=LEASE_MS)
    driver = LedgerDriver(await engine.join("a"), engine.clock)
    await execute(url, NO_ROOM)
    for number in range(10, 20):
        assert await refusal(driver, number) == "database_unavailable"
        await driver.send(make_task(number + 10))
        assert "has no room left" in ((await driver.ledger.counts()).failure or "")
        engine.clock.advance(QUIET_MS)
        await driver.send(make_task(number + 20))
        await driver.send(make_task(number + 30))  # once it is taken, the writer has looked for room
        assert "has no room left" in ((await driver.ledger.counts()).failure or "")
    await execute(url, "DROP FUNCTION no_room CASCADE")
    engine.clock.advance(QUIET_MS)

    async def is_well() -> bool:
        return (await driver.ledger.counts()).failure is None

    await until(is_well)  # although nobody writes
    lines = [each.message for each in caplog.records if each.name.endswith("batch_writer")]
    assert lines == ["ledger.write_refused", "ledger.write_again"]
    left = await asyncpg.connect(url)
    assert await left.fetchval("SELECT count(*) FROM events WHERE no < 0") == 0
    await left.close()
    await engine.close()
    await databases.drop(url)


async def test_a_full_disk_is_not_over_before_no_write_found_it_full_for_a_while(databases: Databases) -> None:
    url = await databases.make()
    engine = PostgresEngine(url, lease_ms=LEASE_MS)
    driver = LedgerDriver(await engine.join("a"), engine.clock)
    # The writer's own look for room succeeds.
    await execute(url, NO_ROOM.replace("> 12000", "BETWEEN 12000 AND 40000"))

    async def failure() -> str:
        return (await driver.ledger.counts()).failure or ""

    assert await refusal(driver, 10) == "database_unavailable"
    for number in (11, 12):
        await driver.send(make_task(number))
        assert "has no room left" in await failure()
    engine.clock.advance(QUIET_MS)

    async def is_well() -> bool:
        return not await failure()

    await until(is_well)
    await engine.close()
    await databases.drop(url)
