"""Removes rows that nobody needs any more. Every node may do so at any time.

A node that ended a day ago is forgotten: its row among the nodes, what it announced, and the work that it alone did are
removed, and its counts are added to the others. Its writer's row stays for ever. That row fences a run that was
suspended meanwhile, has the head of the node's audit chain, and counts batches that peers were told of.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import asyncpg

from covenant.ledger.postgres.connections import execute, fetch_rows
from covenant.ledger.postgres.counters import counter_number
from covenant.ledger.postgres.news import KEPT_S

MESSAGES_KEPT: Final = 1_000
NODES_KEPT_MS: Final = 86_400_000
"""Longer than a node that ended is needed: its agents are reported as away for an hour (`node_agents.AWAY_S`)."""
FORGOTTEN_AT_ONCE: Final = 100

_rows, _execute = partial(fetch_rows, "nodes"), partial(execute, "nodes")


async def remove_old_rows(connection: asyncpg.Connection[Any], writer: int, written: int) -> None:
    """`written`: the number of the last batch of this node's `writer`."""
    await _execute(connection, "forget_news", kept_s=KEPT_S)
    await _merge_counts(connection, writer, counter_number(writer, written))
    await _execute(connection, "forget_messages", kept=MESSAGES_KEPT)
    for row in await _rows(connection, "forget_nodes", kept_ms=NODES_KEPT_MS, count=FORGOTTEN_AT_ONCE):
        await _merge_counts(connection, row["writer"], counter_number(row["writer"] + 1, 0))


async def _merge_counts(connection: asyncpg.Connection[Any], writer: int, counter: int) -> None:
    first = counter_number(writer, 0)
    await _execute(connection, "merge_counts", writer=writer, first_counter=first, counter=counter)
