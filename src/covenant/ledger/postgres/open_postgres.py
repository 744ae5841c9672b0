"""Opens the ledger on a database: its schema, this node's membership, and a ledger on top."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

import asyncpg

from covenant.ledger.clock import PAUSE_MS, Clock, keep_nothing, uuid_source
from covenant.ledger.postgres.blob_rows import BlobRows, UploadBytes
from covenant.ledger.postgres.connections import CONNECT_S, Connections
from covenant.ledger.postgres.database_errors import UNAVAILABLE, describe_trouble
from covenant.ledger.postgres.lost_commits import check_lost_commits
from covenant.ledger.postgres.migrations import check_durability, check_tasks, migrate
from covenant.ledger.postgres.node_runs import join
from covenant.ledger.postgres.nodes import LEASE_MS
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from covenant.model.clock_steps import STEADY, Ages
from covenant.model.errors import CovenantError
from covenant.model.settings import Limits

NODE: Final = "local"


class DatabaseUnusable(CovenantError):
    """The database cannot be reached, or refuses this program."""


@contextmanager
def usable_database() -> Iterator[None]:
    """Raises DatabaseUnusable in place of the database's errors."""
    try:
        yield
    except (*UNAVAILABLE, asyncpg.PostgresError, ValueError) as error:
        raise DatabaseUnusable(describe_trouble(error)) from error


async def open_postgres_ledger(
    dsn: str,
    *,
    clock: Callable[[], int],
    monotonic_ms: Callable[[], int] | None = None,
    clock_pause_ms: int = PAUSE_MS,
    keep: Callable[[Ages], None] = keep_nothing,
    kept: Ages = STEADY,
    new_id: Callable[[], str] | None = None,
    limits: Limits | None = None,
    durability: Literal["fsync", "os"] = "fsync",
    node: str = NODE,
    boot: str | None = None,
    lease_ms: int = LEASE_MS,
    pooler: bool = False,
    lost_path: Path | None = None,
) -> PostgresLedger:
    """The ledger in the database that `dsn` names; missing tables are created.

    `keep` writes down the steps of the clock; `kept` are those of the process before. `node` is this daemon's permanent
    name, unique among running daemons: an earlier run of it is fenced here. `lease_ms`: how long it may be silent
    before the others declare it lost. `pooler`: a transaction pooler is in between. `lost_path`: the file that says
    which commits the database has lost; without it, only this process refuses a database that has lost commits.

    Raises DatabaseUnusable, WrongSchema, NotDurable, HomeUnusable, or Unavailable if the database waits for a standby
    or has lost commits.
    """
    new_id = new_id or uuid_source()
    boot = boot or new_id()
    connections = Connections(dsn, pooler=pooler, connect_s=lease_ms / 1_000)
    with usable_database():
        connection = await connections.connect(connect_s=CONNECT_S)
        try:
            if durability == "fsync":
                await check_durability(connection)
            await connections.watch_for_standby(migrate(connection))
            await check_tasks(connection)
            if lost_path is not None:
                await check_lost_commits(connection, lost_path)
            joining = join(connection, node=node, boot=boot, lease_ms=lease_ms)
            joined = await connections.watch_for_standby(joining)
        finally:
            await connection.close()
        await connections.open()
    guarded = Clock(clock, monotonic_ms or clock, pause_ms=clock_pause_ms, keep=keep)
    guarded.opened(0, kept)
    ledger = PostgresLedger(
        connections,
        joined=joined,
        lease_ms=lease_ms,
        lost_path=lost_path,
        node=node,
        clock=guarded,
        new_id=new_id,
        limits=limits or Limits(),
    )
    try:
        await ledger.begin()
    except (*UNAVAILABLE, asyncpg.PostgresError) as error:
        await ledger.abort()
        raise DatabaseUnusable(describe_trouble(error)) from error
    except BaseException:
        await ledger.abort()
        raise
    return ledger


async def open_blob_rows(dsn: str, *, pooler: bool = False, upload_bytes: UploadBytes | None = None) -> BlobRows:
    """The blob store of an open ledger. `upload_bytes`: the store of the bytes, if not the database.

    Raises DatabaseUnusable.
    """
    connections = Connections(dsn, pooler=pooler)
    with usable_database():
        await connections.open()
    return BlobRows(connections, upload_bytes)
