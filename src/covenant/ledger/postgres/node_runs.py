"""Begins a run of a node: its writer's row, and its row among the nodes."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import asyncpg

from covenant.ledger.postgres.connections import fetch_rows, fetch_value
from covenant.ledger.postgres.migrations import LEVEL, LOST_ROW, LOST_ROW_FIX, WrongSchema
from covenant.model.errors import Unavailable
from covenant.model.grant import GENESIS


class Joined(NamedTuple):
    """A run of a node, as the database has it."""

    boot: str
    writer: int
    seq: int
    started_ms: int
    restored_at_ms: int


async def join(connection: asyncpg.Connection[Any], *, node: str, boot: str, lease_ms: int) -> Joined:
    """Begins a run of a node. An earlier one is fenced. Raises WrongSchema, or Unavailable for a moved ledger."""
    async with connection.transaction():
        if (home := await fetch_value("nodes", connection, "left")) is not None:
            raise Unavailable(
                "ledger_moved",
                f"this ledger was moved out of the database, into the home {home}; serve it there without --ledger, or "
                "move it into an empty database with `covenant ledger move`",
            )
        rows = partial(fetch_rows, "nodes", connection)
        (writer,) = await rows("new_writer", node=node, boot=boot, genesis=GENESIS.chain_hash)
        (joined,) = await rows("join", node=node, boot=boot, lease_ms=lease_ms, level=LEVEL)
        if joined["restored_at_ms"] is None:
            raise WrongSchema(f"{LOST_ROW}; {LOST_ROW_FIX}")
    return Joined(boot, writer["writer"], writer["seq"], joined["started_ms"], joined["restored_at_ms"])
