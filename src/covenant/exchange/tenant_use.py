"""How much each tenant uses of its limits: by the ledger's counts, this daemon's open requests, and its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from covenant.exchange.access.tenants import TenantLimiter, share
from covenant.exchange.stored_files import StoredFiles
from covenant.ledger.contract.ledger import Ledger, TenantSize
from covenant.model.tenants import LimitUse, Tenant, TenantLimits, TenantUse


class TenantUsage:
    """`defaults` apply where a tenant has no limit of its own; 0 there: no limit. `turns` counts those running here."""

    def __init__(
        self,
        ledger: Ledger,
        limiter: TenantLimiter,
        files: StoredFiles,
        defaults: TenantLimits,
        turns: Callable[[str], int],
    ) -> None:
        self._ledger = ledger
        self._limiter = limiter
        self._files = files
        self._defaults = defaults
        self._turns = turns

    async def measure(self, tenants: Sequence[Tenant]) -> list[TenantUse]:
        """The use of each tenant, in the order given."""
        sizes = await self._ledger.tenant_sizes([tenant.name for tenant in tenants])
        return [await self._measure(tenant, size) for tenant, size in zip(tenants, sizes, strict=True)]

    async def _measure(self, tenant: Tenant, size: TenantSize) -> TenantUse:
        def use(limit: str, used: int | None) -> LimitUse:
            return LimitUse(used, getattr(tenant.limits, limit) or getattr(self._defaults, limit))

        turns = use("concurrency", self._turns(tenant.name))
        stored, quota = await self._files.usage(tenant.name), self._files.settings
        return TenantUse(
            concurrency=LimitUse(turns.used, share(turns.most, self._ledger.living())),
            requests=self._limiter.requests(tenant),
            connections=self._limiter.connections(tenant),
            streams=self._limiter.streams(tenant),
            live_tasks=use("live_tasks", size.live_tasks),
            queued_bytes=use("queued_bytes", size.queued_bytes),
            kept_bytes=use("kept_bytes", size.kept_bytes),
            files=LimitUse(stored.files, quota.tenant_files_max),
            file_bytes=LimitUse(stored.bytes, quota.tenant_bytes_max),
        )
