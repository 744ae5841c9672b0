"""Rows of a removed tenant: erases its finished tasks with their ids, and searches for its traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from covenant.ledger.contract.retention import EraseTasks, SearchedPlace, tenant_markers
from covenant.ledger.postgres.connections import Connections
from covenant.ledger.postgres.sql import Statement, statements
from covenant.model.task import CacheKey

VACUUM_S: Final = 3_600.0
KEPT_TRACES: Final = {"audit": "true", "news": "true", "register_rows": "x.kind = 'tenant'"}
"""Traces that stay on purpose: the audit's chain; news for other nodes, for two minutes; and the removal's record."""
_REWRITTEN: Final = (
    "tasks",
    "events",
    "ids",
    "live",
    "lane_counts",
    "counted",
    "register_rows",
    "requests",
    "shared",
    "pushes",
    "notes",
)

_cache_key = msgspec.json.Decoder(CacheKey).decode


class TenantRows:
    _connections: Connections

    async def _erase_ids(self, which: EraseTasks) -> None:
        await self._fetch("ids_gone", task_ids=await self._task_ids(which))

    async def _task_ids(self, which: EraseTasks) -> list[str]:
        query = Statement(statements("removal")["ids"].format(condition=erased_condition(which)))
        values = {"tenant": which.tenant, "parties": which.parties, "after": which.after_no, "count": which.limit}
        return [row["task_id"] for row in await self._connections.fetch(query, values)]

    async def cached_keys(self, parties: Sequence[str]) -> Sequence[CacheKey]:
        wanted = frozenset(parties)
        keys = [_cache_key(row["name"]) for row in await self._fetch("cached")]
        return tuple([key for key in keys if key.sender in wanted or key.recipient in wanted])

    async def scrub(self, tenant: str, parties: Sequence[str]) -> None:
        await self._fetch("requests_gone", parties=parties)
        await self._fetch("notes_gone", tenant=tenant)
        await self._fetch("counts_added", tenant=tenant, parties=parties)
        await self._fetch("counts_gone", tenant=tenant, parties=parties)
        for table in _REWRITTEN:
            await self._connections.execute(f"VACUUM {table}", timeout_s=VACUUM_S)

    async def search(self, tenant: str, parties: Sequence[str]) -> Sequence[SearchedPlace]:
        # A row as text has each quotation mark twice.
        markers = [marker.replace('"', '""') for marker in tenant_markers(tenant, parties)]
        found: list[SearchedPlace] = []
        for row in await self._fetch("tables"):
            name = row["name"]
            text = statements("removal")["search"].format(
                table=name,
                kept=KEPT_TRACES.get(name, "false"),
                own="x.tenant = :tenant" if row["has_tenant"] else "false",
            )
            values: dict[str, Any] = {"markers": markers, "tenant": tenant}
            (counted,) = await self._connections.fetch(Statement(text), values)
            found.append(SearchedPlace(place=f"table {name}", found=counted["found"], kept=counted["kept"]))
        return found

    async def removed_tenants(self, after: int | None) -> tuple[int, Sequence[str]]:
        (row,) = await self._fetch("removed", after=after)
        return row["version"], row["names"]

    async def _fetch(self, name: str, **values: Any) -> Sequence[Any]:
        return await self._connections.rows("removal", name, **values)


def erased_condition(which: EraseTasks) -> str:
    """The condition for the tasks that are looked at."""
    of_tenant = "tenant = :tenant" if which.tenant else "tenant IS NULL AND :tenant = ''"
    if not which.parties:
        return of_tenant
    return f"{of_tenant} AND (sender = ANY(:parties::text[]) OR recipient = ANY(:parties::text[]))"
