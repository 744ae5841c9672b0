"""Assigns work that only one node may do, and divides work that the living nodes share.

A row of `singletons` names the node of each work. A node takes a row that no living node has, and keeps it for its
life. Each part of shared work is one row: its owner is computed from the names of the nodes that do such work, and a
node that has another's part releases it. The node stops first; the row is free a heartbeat later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from covenant.ledger.postgres.connections import execute, fetch_rows

if TYPE_CHECKING:
    import asyncpg


class Singletons:
    def __init__(self, node: str, is_current: Callable[[], bool], beat_now: Callable[[], None]) -> None:
        """`is_current`: whether this node knows that it is alive. `beat_now` has `reassign` called soon."""
        self._node = node
        self._is_current = is_current
        self._beat_now = beat_now
        self._wanted: set[str] = set()
        self._parts: dict[str, str] = {}
        """The work of each part of shared work."""
        self._led: set[str] = set()
        self._to_release: set[str] = set()

    def leads(self, name: str) -> bool:
        """Whether this node does the work now; from now on it applies for it."""
        if name not in self._wanted:
            self._wanted.add(name)
            self._beat_now()
        return name in self._led and self._is_current()

    def shares(self, work: str, part: str) -> bool:
        name = _part(work, part)
        if name not in self._parts:
            self._parts[name] = work
            self._beat_now()
        return name in self._led and self._is_current()

    def forget(self) -> None:
        """Forgets all rows: a new run has none yet."""
        self._led, self._to_release = set(), set()

    async def reassign(self, connection: asyncpg.Connection[Any], boot: str) -> None:
        """Takes free rows, and releases those that another node should have."""
        if not self._wanted and not self._parts:
            return
        holders = await self._holders(connection)
        target = self._rows_to_hold(holders)
        released = list(self._to_release - target)
        if released:
            await execute("nodes", connection, "release", names=released, node=self._node, boot=boot)
        free = sorted(target - holders.keys())
        if free:
            await execute("nodes", connection, "lead", names=free, node=self._node, boot=boot)
        if free or released:
            holders = await self._holders(connection)
            target = self._rows_to_hold(holders)
        held = {name for name, node in holders.items() if node == self._node}
        self._led, self._to_release = held & target, held - target

    async def _holders(self, connection: asyncpg.Connection[Any]) -> dict[str, str]:
        return {row["name"]: row["node"] for row in await fetch_rows("nodes", connection, "held")}

    def _rows_to_hold(self, holders: dict[str, str]) -> set[str]:
        works = set(self._parts.values())
        members = {
            work: {self._node, *(node for name, node in holders.items() if name == _member(work, node))}
            for work in works
        }
        mine = {name for name, work in self._parts.items() if _owner(name, members[work]) == self._node}
        return self._wanted | mine | {_member(work, self._node) for work in works}


def _part(work: str, part: str) -> str:
    return f"{work}/{part}"


def _member(work: str, node: str) -> str:
    return f"{work}@{node}"


def _owner(name: str, nodes: Iterable[str]) -> str:
    """The owner of a part: the same at every node that knows the same nodes. A new node takes only its own share."""
    return max(nodes, key=lambda node: hashlib.sha256(f"{node}\n{name}".encode()).digest())
