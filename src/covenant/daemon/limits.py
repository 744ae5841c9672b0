"""The ledger's limits, as the settings name them: for whoever opens a home, and for whoever checks one."""

from __future__ import annotations

from covenant.daemon.settings import Settings
from covenant.ledger.machine.view import Limits


def ledger_limits(settings: Settings) -> Limits:
    accounts = {"live_tasks_max": settings.tenants.live_tasks, "queued_bytes_max": settings.tenants.queued_bytes}
    named = {name: getattr(settings.limits, name) for name in Limits.__struct_fields__ if name not in accounts}
    return Limits(**named, **accounts)
