"""Agents from code and files: those that each node serves, known to all nodes like the registers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from covenant.ledger.contract.identities import Resident
from covenant.ledger.postgres.connections import Connections
from covenant.ledger.postgres.database_errors import UNAVAILABLE
from covenant.ledger.postgres.nodes import Membership, stop_task
from covenant.ledger.postgres.registers import Registers, StoredResident, resident_name
from covenant.ledger.postgres.stored_task import column
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.errors import Unavailable

AWAY_S: Final = 3_600.0
"""How long the agents of a node that is gone stay known: callers are told to try again."""
RETRY_S: Final = 1.0
"""The pause after a failed announcement, in seconds."""

log = logging.getLogger(__name__)


class NodeAgents:
    def __init__(self, connections: Connections, registers: Registers, membership: Membership, node: str) -> None:
        self._connections = connections
        self._registers = registers
        self._membership = membership
        self._node = node
        self._announced: Sequence[CatalogueAgent] = ()
        self._reannouncing: asyncio.Task[None] | None = None

    def residents(self) -> Sequence[Resident]:
        found = []
        for each in self._registers.residents.values():
            node, is_alive = each.node, self._membership.alive(each.node, each.boot)
            if node != self._node and (is_alive or self._membership.away_s(node) < AWAY_S):
                found.append(Resident(node, each.agent, is_alive))
        return found

    async def announce(self, agents: Sequence[CatalogueAgent]) -> None:
        self._announced, node, boot = agents, self._node, self._membership.boot
        if not agents and not any(each.node == node for each in self._registers.residents.values()):
            return  # nothing changes: without a row, other nodes would not see the new version
        (row,) = await self._connections.rows(
            *("nodes", "announce"),
            prefix=column(f"[{msgspec.json.encode(node).decode()},"),
            names=[column(resident_name(node, agent)) for agent in agents],
            bodies=[msgspec.json.encode(StoredResident(node, boot, agent)).decode() for agent in agents],
        )
        await self._membership.spread(row["version"])

    def announce_again(self) -> None:
        """Announces the agents again, after this node has begun a new run."""
        if self._announced and (self._reannouncing is None or self._reannouncing.done()):
            self._reannouncing = asyncio.create_task(self._announce_until_known())

    async def _announce_until_known(self) -> None:
        boot = ""
        while boot != self._membership.boot:
            try:
                boot = self._membership.boot
                await self.announce(self._announced)
            except (Unavailable, *UNAVAILABLE) as away:
                log.warning("ledger.agents_unannounced", extra={"reason": str(away) or type(away).__name__})
                boot = ""
                await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        await stop_task(self._reannouncing)
