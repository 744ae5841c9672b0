"""Encrypted secrets that the daemons on one ledger share: all of them learn of a replacement at once."""

from __future__ import annotations

from covenant.ledger.postgres.connections import Connections
from covenant.ledger.postgres.nodes import Membership
from covenant.ledger.postgres.registers import Registers


class SecretRows:
    def __init__(self, connections: Connections, registers: Registers, membership: Membership) -> None:
        self._connections = connections
        self._registers = registers
        self._membership = membership

    async def find(self, name: str) -> str | None:
        rows = await self._connections.rows("nodes", "secret", name=name)
        return rows[0]["body"] if rows else None

    async def keep(self, name: str, body: str) -> None:
        await self._connections.rows("nodes", "keep_secret", name=name, body=body)

    async def replace(self, name: str, before: str, body: str) -> bool:
        rows = await self._connections.rows("nodes", "replace_secret", name=name, before=before, body=body)
        if not rows:
            return False
        await self._membership.look()
        await self._membership.wait_acknowledged(rows[0]["version"])
        return True

    def replaced(self, name: str) -> str | None:
        return self._registers.secrets.get(name)
