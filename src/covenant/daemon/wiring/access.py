"""Who may use a daemon, which agents it has, and the mailbox."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import msgspec

from covenant.daemon.home import save_token
from covenant.daemon.schedulers import RetryScheduler, Scheduler
from covenant.daemon.settings import Settings
from covenant.daemon.telemetry import Telemetry
from covenant.daemon.wiring.storage import Storage
from covenant.doors.http.bearer_auth import TenantGate
from covenant.exchange.access.identities import IdentityAdmin
from covenant.exchange.access.principals import IdentityAuth
from covenant.exchange.access.tenants import TenantAccess, TenantLimiter
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.mailbox import MailboxExchange, MailboxLimits
from covenant.model.retry_policy import RetryPolicy
from covenant.model.tenants import TenantLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    identity_auth: IdentityAuth
    identity_admin: IdentityAdmin
    gate: TenantGate
    catalogue: Catalogue
    mailbox: MailboxExchange
    schedulers: tuple[Scheduler, ...]


async def open_access(settings: Settings, storage: Storage, telemetry: Telemetry) -> Access:
    """Nothing of it needs to be closed."""
    ledger, operator = storage.ledger, storage.operator
    identity_auth, catalogue = IdentityAuth(ledger, operator.agent), Catalogue(ledger, storage.key)
    tenants = TenantAccess(ledger, operator.agent, identity_auth)
    await tenants.open()
    mailbox = MailboxExchange(ledger, operator.agent, _mailbox_limits(settings), telemetry.tracer)
    retry = settings.retry
    policy = RetryPolicy(
        enabled=True,
        min_lease_age_ms=retry.min_lease_age_ms,
        max_attempts=retry.max_attempts,
        max_requeues=retry.max_requeues,
        scan_limit=retry.scan_limit,
    )
    scheduler = RetryScheduler(mailbox, operator, policy, interval_ms=retry.interval_ms, log=telemetry.log)
    return Access(
        identity_auth=identity_auth,
        identity_admin=IdentityAdmin(
            ledger,
            identity_auth,
            operator.agent,
            storage.key,
            partial(save_token, settings.home),
            seat=catalogue.seat,
        ),
        gate=TenantGate(
            tenants,
            TenantLimiter(
                ledger.clock.monotonic_ms, msgspec.convert(settings.tenants, TenantLimits, from_attributes=True)
            ),
        ),
        catalogue=catalogue,
        mailbox=mailbox,
        schedulers=(scheduler,) if retry.scheduler else (),
    )


def _mailbox_limits(settings: Settings) -> MailboxLimits:
    return msgspec.structs.replace(
        msgspec.convert(settings.limits, MailboxLimits, from_attributes=True),
        recipient_admission=settings.access.recipient_admission,
        depth_max=settings.delegation.depth_max,
    )
