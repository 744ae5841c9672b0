"""What is done to the deployment while clients work: each by its name, and mended before it returns."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from typing import Final

from covenant.ledger.postgres.migrations import LEVEL
from tests.cluster.deployment import LEASE_MS, NODES, ROLE, Deployment
from tests.waits import eventually

Fault = Callable[[Deployment, random.Random], Awaitable[None]]

SHORT_S: Final = 0.5
LONG_S: Final = LEASE_MS * 2 / 1_000
"""Longer than a node may be silent: the others declare it lost."""


async def kill_daemon(deployment: Deployment, chance: random.Random) -> None:
    node = chance.choice(NODES)
    await deployment.kill(node)
    await asyncio.sleep(chance.choice((0.0, LONG_S)))
    await deployment.start(node)


async def stop_the_clock_of_a_daemon(deployment: Deployment, chance: random.Random) -> None:
    """It finds itself declared lost, and goes on as a new run."""
    process = deployment.daemons[chance.choice(NODES)].process
    process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(LONG_S)
    finally:
        process.send_signal(signal.SIGCONT)


async def kill_database(deployment: Deployment, _: random.Random) -> None:
    await deployment.restart_database()


async def terminate_backends(deployment: Deployment, _: random.Random) -> None:
    await deployment.terminate_backends()


async def leave_no_connection(deployment: Deployment, chance: random.Random) -> None:
    await deployment.execute(f"ALTER ROLE {ROLE} CONNECTION LIMIT 0")
    await deployment.terminate_backends()
    await asyncio.sleep(chance.choice((SHORT_S, LONG_S)))
    await deployment.execute(f"ALTER ROLE {ROLE} CONNECTION LIMIT -1")


async def revoke_a_right(deployment: Deployment, chance: random.Random) -> None:
    table = chance.choice(("events", "live", "writers", "nodes", "news", "requests"))
    await deployment.execute(f"REVOKE INSERT, UPDATE ON {table} FROM {ROLE}")
    await asyncio.sleep(chance.choice((SHORT_S, LONG_S)))
    await deployment.execute(f"GRANT INSERT, UPDATE ON {table} TO {ROLE}")


async def rename_a_column(deployment: Deployment, chance: random.Random) -> None:
    table, column = chance.choice((("events", "body"), ("nodes", "until_ms"), ("requests", "given")))
    await deployment.execute(f"ALTER TABLE {table} RENAME COLUMN {column} TO other")
    await asyncio.sleep(chance.choice((SHORT_S, LONG_S)))
    await deployment.execute(f"ALTER TABLE {table} RENAME COLUMN other TO {column}")


NO_ROOM: Final = """
    CREATE SEQUENCE no_room_told;
    CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN
        PERFORM nextval('public.no_room_told');
        RAISE EXCEPTION 'could not extend file "base/16384/16397": No space left on device'
            USING ERRCODE = 'disk_full', HINT = 'Check free disk space.';
    END $$
"""
AT_THE_ROW: Final = "CREATE TRIGGER no_room BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION no_room()"
AT_THE_COMMIT: Final = (
    "CREATE CONSTRAINT TRIGGER no_room AFTER INSERT ON {table} DEFERRABLE INITIALLY DEFERRED "
    "FOR EACH ROW EXECUTE FUNCTION no_room()"
)


async def leave_no_room(deployment: Deployment, chance: random.Random) -> None:
    """What a daemon sees of a full disk: PostgreSQL takes no row of a table that grows, with SQLSTATE 53100.

    A size bound on the real disk needs root; `tests/contracts/test_postgres_failures.py` has that. A disk that is full
    for PostgreSQL's log is a database that was killed.
    """
    table, when = chance.choice(("events", "live", "news", "ids")), chance.choice((AT_THE_ROW, AT_THE_COMMIT))
    await deployment.execute(NO_ROOM, when.format(table=table))
    await eventually(lambda: deployment.value("SELECT is_called FROM no_room_told"))
    await asyncio.sleep(chance.choice((SHORT_S, LONG_S)))
    await deployment.execute("DROP FUNCTION no_room CASCADE; DROP SEQUENCE no_room_told")


async def cut_connections(deployment: Deployment, chance: random.Random) -> None:
    deployment.proxies[chance.choice(NODES)].cut()


async def lose_answers(deployment: Deployment, chance: random.Random) -> None:
    """A partition in one direction: what is asked arrives, and no answer comes back."""
    proxy = deployment.proxies[chance.choice(NODES)]
    proxy.answers_lost = True
    try:
        await asyncio.sleep(chance.choice((SHORT_S, LONG_S)))
    finally:
        proxy.answers_lost = False
        proxy.cut()


async def partition(deployment: Deployment, chance: random.Random) -> None:
    """In both directions."""
    proxy = deployment.proxies[chance.choice(NODES)]
    proxy.silence()
    try:
        await asyncio.sleep(chance.choice((SHORT_S, LONG_S)))
    finally:
        proxy.mend()


async def restart_in_turn(deployment: Deployment, _: random.Random) -> None:
    for node in NODES:
        await deployment.stop(node)
        await deployment.start(node)


async def upgrade_in_turn(deployment: Deployment, _: random.Random) -> None:
    """To the version of this tree. Daemons of both work for a while."""
    assert await deployment.level() == LEVEL - 1
    for node in NODES:
        await asyncio.sleep(LONG_S)
        await deployment.stop(node)
        deployment.trees[node] = None
        await deployment.start(node)
        assert await deployment.level() == LEVEL
    await asyncio.sleep(LONG_S)


async def fail_over(deployment: Deployment, _: random.Random) -> None:
    if not deployment.promoted:
        await deployment.promote()


FAULTS: Final[dict[str, Fault]] = {
    "daemon killed": kill_daemon,
    "daemon stopped for longer than its lease": stop_the_clock_of_a_daemon,
    "database killed": kill_database,
    "backends terminated": terminate_backends,
    "no connection left": leave_no_connection,
    "right revoked": revoke_a_right,
    "column renamed": rename_a_column,
    "no room left": leave_no_room,
    "connections cut": cut_connections,
    "answers lost": lose_answers,
    "partition": partition,
    "rolling restart": restart_in_turn,
    "failover": fail_over,
}
UPGRADE: Final = "rolling upgrade"
"""Can be done once, and where an older version runs."""
