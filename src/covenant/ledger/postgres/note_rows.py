"""Agents' notes between their tasks: a row an agent, replaced only if its version is the one that was read."""

from __future__ import annotations

from covenant.ledger.postgres.task_history import History


class NoteRows:
    def __init__(self, history: History) -> None:
        self._history = history

    async def read(self, tenant: str, agent_id: str) -> tuple[int, str | None]:
        for row in await self._history.rows("notes", tenant=tenant, agent_id=agent_id):
            return row["version"], row["body"]
        return 0, None

    async def keep(self, tenant: str, agent_id: str, version: int, body: str) -> bool:
        return bool(
            await self._history.rows("keep_notes", tenant=tenant, agent_id=agent_id, version=version, body=body)
        )
