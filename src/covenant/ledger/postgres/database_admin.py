"""Work on the database without a run of a node: migrates its schema, records that it was restored, and checks it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import asyncpg
import msgspec

from covenant.ledger.postgres.connections import Connections, execute, fetch_rows, fetch_value
from covenant.ledger.postgres.database_errors import STANDBY_FIX
from covenant.ledger.postgres.lost_commits import LOST, LOST_FIX, find_lost_commits
from covenant.ledger.postgres.migrations import (
    ENCODING_FIX,
    LEVEL,
    LOST_ROW,
    LOST_ROW_FIX,
    LOST_TASKS_FIX,
    NotDurable,
    check_durability,
    describe_foreign,
    find_altered,
    find_foreign,
    find_lost_tasks,
    find_narrow_encoding,
    migrate,
)
from covenant.ledger.postgres.open_postgres import usable_database
from covenant.ledger.postgres.queue_head import PLACE_BITS
from covenant.ledger.postgres.registers import IDENTITY, decode_row
from covenant.model.grant import GENESIS, AuditHead, AuditRow, Identity, link
from covenant.model.ids import AgentId

_FIX: Final = "put it back from a backup of the schema, or grant it to this role"
HIDDEN: Final = "the database: the tables of a ledger are in the schema {}, outside of this role's search_path"
HIDDEN_FIX: Final = "set the role's search_path to the schema {}, and grant it USAGE there"
_STANDBY: Final = "the database: {} sessions wait for a synchronous standby that does not answer"
_LEVEL: Final = "SELECT coalesce(max(level), 0)::integer FROM ledger_level"
CHAIN: Final = "(console)"
"""The audit chain of operations on the database without a daemon. No daemon can have this name (`daemon.node`)."""


@asynccontextmanager
async def _session(dsn: str) -> AsyncIterator[tuple[Connections, asyncpg.Connection[Any]]]:
    """A plain session, since a pooler may be in between whatever the daemons' settings say. Raises DatabaseUnusable."""
    connections = Connections(dsn, pooler=True)
    with usable_database():
        connection = await connections.connect()
        try:
            yield connections, connection
        finally:
            await connection.close()


async def migrate_database(dsn: str) -> tuple[int, int]:
    """Returns the schema's level before and after.

    Raises DatabaseUnusable and WrongSchema, and Unavailable if the database waits for a standby.
    """
    async with _session(dsn) as (connections, connection):
        return await connections.watch_for_standby(migrate(connection)), LEVEL


async def mark_restored(dsn: str, by: AgentId, now_ms: int, row_id: str) -> int:
    """Fences every run of every node, since their knowledge may be newer than the database. Returns their number.

    An audit row by `by` records it, in a chain of its own.

    A daemon that still runs begins anew with the database's content. Open tasks whose rows are gone are not counted as
    open any more.
    Raises DatabaseUnusable, and Unavailable if the database waits for a standby.
    """
    async with _session(dsn) as (connections, connection):
        return await connections.watch_for_standby(_mark_restored(connection, by, now_ms, row_id))


async def _mark_restored(connection: asyncpg.Connection[Any], by: AgentId, now_ms: int, row_id: str) -> int:
    async with connection.transaction():
        await execute("nodes", connection, "restored")
        await execute("nodes", connection, "fence_writers")
        fenced: int = await fetch_value("nodes", connection, "fence_nodes")
        if await connection.fetchval(_LEVEL) == LEVEL and await find_lost_tasks(connection) is not None:
            await execute("nodes", connection, "recount_live")
        kind = {"type": "ledger_restored", "fenced": fenced}
        await _audit(connection, AuditRow(id=row_id, timestamp_ms=now_ms, issuer=by, kind=kind))
    return fenced


async def _audit(connection: asyncpg.Connection[Any], row: AuditRow) -> None:
    (found,) = await fetch_rows("nodes", connection, "chain", chain=CHAIN, genesis=GENESIS.chain_hash)
    text = msgspec.json.encode(row).decode()
    head = link(AuditHead(found["audit_index"], found["audit_hash"]), text)
    values = {
        "chain": CHAIN,
        "idx": head.index,
        "place": found["place"] << PLACE_BITS,
        "ts_ms": row.timestamp_ms,
        "issuer": row.issuer.pubkey,
        "chain_hash": head.chain_hash,
        "row": text,
    }
    for name in ("chain_row", "chain_moved"):
        await execute("nodes", connection, name, **values)


async def forget_node(dsn: str, node: str) -> None:
    """Removes a daemon that never served here, so that it is not listed as lost. Raises DatabaseUnusable."""
    async with _session(dsn) as (_, connection):
        await execute("nodes", connection, "forget_node", node=node)


class Instance(NamedTuple):
    secrets: Mapping[str, str]
    identities: Sequence[Identity]
    is_empty: bool
    """Whether no daemon has served a ledger there yet."""
    hidden_in: str | None = None
    """If there are no tables: the schema that has those of a ledger, outside of this role's search_path."""


async def read_instance(dsn: str) -> Instance:
    """The secrets and the identities of the ledger. Raises DatabaseUnusable.

    There are none in an empty database, and none are read from an older or newer schema: opening the ledger migrates or
    refuses that.
    """
    async with _session(dsn) as (_, connection):
        if await connection.fetchval("SELECT to_regclass('ledger_level')") is None:
            return Instance({}, (), is_empty=True, hidden_in=await fetch_value("nodes", connection, "hidden_in"))
        if await connection.fetchval(_LEVEL) != LEVEL:
            return Instance({}, (), is_empty=False)
        rows = await fetch_rows("nodes", connection, "identities")
        found = [decode_row(IDENTITY, "", row["body"]).body for row in rows]
        secrets = await fetch_rows("nodes", connection, "secrets")
        return Instance({row["name"]: row["body"] for row in secrets}, found, is_empty=not found)


class Trouble(NamedTuple):
    what: str
    fix: str


async def find_troubles(
    dsn: str, *, durable: bool = True, served: bool = False, lost_path: Path | None = None
) -> tuple[int, list[Trouble]]:
    """The level of the schema, and problems that would stop a daemon. Changes nothing.

    `served`: the home was served on a database before, so the tables of its ledger have to be there. `lost_path`: the
    home's file of the commits that the database has lost. Raises DatabaseUnusable and HomeUnusable.
    """
    async with _session(dsn) as (_, connection):
        troubles: list[Trouble] = []
        if durable:
            try:
                await check_durability(connection)
            except NotDurable as trouble:
                troubles.append(Trouble(trouble.what, trouble.fix))
        if (narrow := await find_narrow_encoding(connection)) is not None:
            troubles.append(Trouble(narrow, ENCODING_FIX))
        if waiting := await fetch_value("nodes", connection, "waiting_for_standby"):
            troubles.append(Trouble(_STANDBY.format(waiting), STANDBY_FIX))
        hidden_in = await fetch_value("nodes", connection, "hidden_in")
        if await connection.fetchval("SELECT current_schema()") is None:
            fix = _FIX if hidden_in is None else HIDDEN_FIX.format(hidden_in)
            return 0, [*troubles, Trouble("the database: this role may use no schema of its search_path", fix)]
        is_made = await connection.fetchval("SELECT to_regclass('ledger_level')") is not None
        level: int = await connection.fetchval(_LEVEL) if is_made else 0
        if served and level == 0 and hidden_in is not None:
            troubles.append(Trouble(HIDDEN.format(hidden_in), HIDDEN_FIX.format(hidden_in)))
        if level == 0 and (foreign := await find_foreign(connection)) is not None:
            troubles.append(Trouble(*describe_foreign(level, foreign)))
        if level == LEVEL:
            altered = await find_altered(connection)
            troubles += [Trouble(f"the database: {each}", _FIX) for each in (*altered.columns, *altered.problems)]
            if not troubles and not await connection.fetchval("SELECT EXISTS (SELECT FROM registers)"):
                troubles.append(Trouble(LOST_ROW, LOST_ROW_FIX))
            if not troubles and (lost := await find_lost_tasks(connection)) is not None:
                troubles.append(Trouble(lost, LOST_TASKS_FIX))
            sign = await find_lost_commits(connection, lost_path) if not troubles and lost_path is not None else None
            if sign is not None:
                troubles.append(Trouble(LOST.format(sign), LOST_FIX))
        return level, troubles
