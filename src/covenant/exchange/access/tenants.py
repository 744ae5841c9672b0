"""Tenants: from a bearer token to the tenant that is calling, and out again when it is disabled or its token replaced.

Everything a tenant asks is scoped to it before anything is looked up. Disabling a tenant, or rotating its token, ends
what it has running towards the caller (streams, waits): the work itself goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final

import msgspec

from covenant.exchange.access.principals import TOKEN_LENGTH_MAX, IdentityAuth, Principal, require_operator
from covenant.ledger.contract.identities import IdentityLedger, Register, RegisterChange
from covenant.ledger.machine.decisions.acceptance import LIVE_TASKS, QUEUED_BYTES
from covenant.ledger.machine.decisions.identities import unknown_tenant
from covenant.ledger.machine.identity_commands import AddTenant, ChangeTenant, RotateTenant
from covenant.model.errors import Conflict, Invalid, OverLimit, Unauthenticated
from covenant.model.ids import AgentId
from covenant.model.rate_limits import TokenBuckets
from covenant.model.settings import TenantSettings
from covenant.model.tenants import DEFAULT, Tenant, TenantLimits, check_tenant_name
from covenant.seal.certificates import KEY_PREFIX, certificate_key
from covenant.seal.keys import TENANT_TOKEN_PREFIX_LENGTH, new_tenant_token, token_hash

CERTIFICATE_PREFIX_LENGTH: Final = 24
NOT_FOR_TENANTS: Final = (
    "this is a tenant's token, and the call is for identities; enroll one (covenant identities enroll NAME@HOST)"
)
RECOGNISED_MAX: Final = 1_024
"""How many tokens' meanings are remembered: of those who were let in, so that nobody else can fill it."""
WHERE_TOKENS_ARE: Final = (
    "the operator's is in operator.token in the daemon's home, a tenant's was told when it was made"
)


class Caller(msgspec.Struct, frozen=True, gc=False):
    """A tenant that is calling. `name` says who exactly: keys that callers choose are theirs alone."""

    tenant: Tenant
    token_sha256: str
    """Empty for somebody without a token, at an agent that is published for everybody."""
    operator: bool
    name: str

    @property
    def anonymous(self) -> bool:
        return not self.token_sha256


class MintedToken(msgspec.Struct, frozen=True, gc=False):
    """`token` is told once, here, and kept nowhere."""

    tenant: Tenant
    token: str


class TenantSession:
    """A stream or wait of a caller, as a context. (Each blocking call has one: a generator would cost more.)"""

    __slots__ = ("_access", "_caller", "_end")

    def __init__(self, access: TenantAccess, caller: Caller, end: Callable[[], None]) -> None:
        self._access = access
        self._caller = caller
        self._end = end

    def __enter__(self) -> None:
        self._access.open_session(self._caller, self._end)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._access.close_session(self._caller, self._end)


class TenantAccess:
    def __init__(self, ledger: IdentityLedger, operator: AgentId, identity_auth: IdentityAuth) -> None:
        self._ledger = ledger
        self._operator = operator
        self._identity_auth = identity_auth
        self._sessions: dict[str, dict[Callable[[], None], Caller]] = {}
        """By tenant: how each is ended, and whose it is."""
        self._recognised: dict[str, Caller] = {}
        """By the hash of a token: what it means, until a register changes."""
        ledger.on_registers(self._changed)

    async def open(self) -> None:
        """See to it that the first tenant is there. It has no token of its own until one is made by rotating.

        Another daemon that opens the same ledger at this moment may add it first.
        """
        if self._ledger.tenant(DEFAULT) is None:
            try:
                await self._ledger.commit(AddTenant(by=self._operator, tenant=Tenant(name=DEFAULT)))
            except Conflict as conflict:
                if conflict.code != "tenant_exists":
                    raise

    def recognise(self, token: str) -> Caller | None:
        """The hot path: one hash, one look-up."""
        if len(token) > TOKEN_LENGTH_MAX:
            return None
        return self._recognise(token_hash(token))

    def refusal_reason(self, token: str | None) -> str:
        """What a caller is told whose token is not that of an identity, where only identities may be."""
        return NOT_FOR_TENANTS if token and self.recognise(token) is not None else "unknown or revoked token"

    def recognise_certificate(self, names: Sequence[str]) -> Caller | None:
        """Whom a certificate with these names stands for; the first name that an operator has mapped counts."""
        return next((caller for name in names if (caller := self._recognise(KEY_PREFIX + name)) is not None), None)

    def _recognise(self, token_sha256: str) -> Caller | None:
        caller = self._recognised.get(token_sha256) or self._caller(token_sha256)
        if caller is not None:
            if len(self._recognised) >= RECOGNISED_MAX:
                self._recognised.clear()
            self._recognised[token_sha256] = caller
        return caller

    def still(self, caller: Caller) -> bool:
        """Whether no register has changed since this caller was recognised."""
        return self._recognised.get(caller.token_sha256) is caller

    def now(self, caller: Caller) -> Caller | None:
        """What the caller's token means now; None if it is over."""
        return self._caller(caller.token_sha256)

    def _caller(self, token_sha256: str) -> Caller | None:
        tenant = self._ledger.tenant_of(token_sha256)
        if tenant is not None:
            if tenant.disabled_at_ms is not None:
                return None
            return Caller(tenant, token_sha256, operator=False, name=f"client@{tenant.name}")
        identity = self._ledger.identity(token_sha256)
        if identity is None or identity.revoked_at_ms is not None or not identity.operator:
            return None
        tenant = self._ledger.tenant(DEFAULT)
        if tenant is None or tenant.disabled_at_ms is not None:
            return None
        return Caller(tenant, token_sha256, operator=True, name=identity.agent.display)

    async def authenticate(self, token: str | None, *, transport: str, address: str) -> Caller:
        """One answer for all that can be wrong with a token; the audit knows which it was."""
        caller = self.recognise(token) if token else None
        if caller is None:
            reason = "no tenant has this token, or not any more" if token else "missing bearer token"
            await self._identity_auth.turned_away(reason, transport=transport, address=address)
            raise unauthenticated()
        return caller

    def session(self, caller: Caller, end: Callable[[], None]) -> TenantSession:
        """While a stream or wait of this caller is open: `end` is called when it may not go on.

        At once, if that happened between its authentication and here.
        """
        return TenantSession(self, caller, end)

    def open_session(self, caller: Caller, end: Callable[[], None]) -> None:
        self._sessions.setdefault(caller.tenant.name, {})[end] = caller
        known = self._recognised.get(caller.token_sha256) is caller or caller.anonymous
        if not known and self._caller(caller.token_sha256) is None:
            end()

    def close_session(self, caller: Caller, end: Callable[[], None]) -> None:
        sessions = self._sessions.get(caller.tenant.name)
        if sessions is not None:
            sessions.pop(end, None)
            if not sessions:
                del self._sessions[caller.tenant.name]

    def _changed(self, change: RegisterChange) -> None:
        """Whoever revoked a token, rotated it or disabled a tenant, here or elsewhere: what may not go on is ended."""
        if change.register is Register.AGENTS:
            return
        self._recognised.clear()
        of_tenant = change.register is Register.TENANTS
        found = [self._sessions.get(change.name, {})] if of_tenant else list(self._sessions.values())
        for end, caller in [each for sessions in found for each in sessions.items()]:
            tenant = self._ledger.tenant(caller.tenant.name)
            token_over = not caller.anonymous and self._caller(caller.token_sha256) is None
            if token_over or tenant is None or tenant.disabled_at_ms is not None:
                self.close_session(caller, end)  # it is ended once, however much changes
                end()

    def tenant(self, name: str) -> Tenant | None:
        return self._ledger.tenant(name)

    async def acting(self, principal: Principal, name: str) -> Caller:
        """The operator in a tenant's place."""
        await require_operator(self._ledger, principal, "acting for a tenant")
        tenant = self._ledger.tenant(name)
        if tenant is None:
            await self._ledger.durable()
            raise unknown_tenant(name)
        return Caller(tenant, principal.token_sha256, operator=True, name=principal.agent.display)

    async def add(
        self,
        principal: Principal,
        name: str,
        limits: TenantLimits | None = None,
        *,
        certificate: str | None = None,
    ) -> MintedToken:
        """`certificate`: the name of one that stands for the tenant, instead of a token."""
        await require_operator(self._ledger, principal, "adding a tenant")
        check_tenant_name(name)
        token, token_sha256, token_prefix = self._credential(certificate)
        tenant = Tenant(
            name=name,
            token_sha256=token_sha256,
            token_prefix=token_prefix,
            limits=check_limits(limits or TenantLimits()),
        )
        return MintedToken(await self._ledger.commit(AddTenant(by=principal.agent, tenant=tenant)), token)

    async def list(self, principal: Principal) -> Sequence[Tenant]:
        """The oldest first."""
        await require_operator(self._ledger, principal, "listing tenants")
        return await self._ledger.tenants()

    async def disable(self, principal: Principal, name: str) -> Tenant:
        """From now on nobody speaks for it; what it has open is ended, what it has running goes on."""
        return await self.change(principal, name, disabled=True)

    async def enable(self, principal: Principal, name: str) -> Tenant:
        return await self.change(principal, name, disabled=False)

    async def change(
        self, principal: Principal, name: str, *, disabled: bool | None = None, limits: TenantLimits | None = None
    ) -> Tenant:
        """What is None stays as it is."""
        await require_operator(self._ledger, principal, "changing a tenant")
        checked = check_limits(limits) if limits is not None else None
        command = ChangeTenant(by=principal.agent, name=name, disabled=disabled, limits=checked)
        return await self._ledger.commit(command)

    async def rotate(self, principal: Principal, name: str, *, certificate: str | None = None) -> MintedToken:
        """A new token, or a certificate that stands for the tenant; the old one ends at once."""
        await require_operator(self._ledger, principal, "rotating a tenant's token")
        token, token_sha256, token_prefix = self._credential(certificate)
        command = RotateTenant(by=principal.agent, name=name, token_sha256=token_sha256, token_prefix=token_prefix)
        return MintedToken(await self._ledger.commit(command), token)

    def _credential(self, certificate: str | None) -> tuple[str, str, str]:
        """A token, its hash and its prefix; for a certificate no token, and its name in their place."""
        if certificate is None:
            token = new_tenant_token()
            return token, token_hash(token), token[:TENANT_TOKEN_PREFIX_LENGTH]
        key = certificate_key(certificate)
        check_certificate_free(self._ledger, key)
        return "", key, key[:CERTIFICATE_PREFIX_LENGTH]


def check_certificate_free(ledger: IdentityLedger, key: str) -> None:
    """One certificate stands for one caller. Raises Conflict."""
    tenant, identity = ledger.tenant_of(key), ledger.identity(key)
    if tenant is not None:
        raise Conflict("certificate_taken", f"this certificate stands for the tenant {tenant.name} already")
    if identity is not None and identity.revoked_at_ms is None:
        raise Conflict("certificate_taken", f"this certificate stands for {identity.agent.display} already")


def unauthenticated() -> Unauthenticated:
    return Unauthenticated("unauthenticated", f"missing or invalid bearer token; {WHERE_TOKENS_ARE}")


def check_limits(limits: TenantLimits) -> TenantLimits:
    for name in TenantLimits.__struct_fields__:
        most = limits.most(name)
        if not 0 <= getattr(limits, name) <= most:
            raise Invalid("invalid_limit", f"{name} must be between 0 and {most}; 0 for the daemon's default")
    return limits


RUNNING_RETRY_MS: Final = 1_000
"""When somebody will be done is not known: soon enough not to be idle, late enough not to be a storm."""

CONCURRENT: Final = "concurrent_request_limit"
STREAMS: Final = "stream_limit"
RATE: Final = "rate_limit"
REASONS: Final = frozenset({CONCURRENT, STREAMS, RATE, LIVE_TASKS, QUEUED_BYTES})
"""The codes of a tenant's limits: a refusal says them as its `reason` too."""
MESSAGE: Final = "rate limit exceeded"
STREAMS_MESSAGE: Final = "too many streams are open; close one, or read the task instead of following it"


class LimitSlot(msgspec.Struct, gc=False, eq=False):
    """One of a tenant's places, as a context. (A generator for one costs four times as much, and each call has one.)"""

    _taken: dict[str, int]
    _name: str
    _most: int
    _code: str

    def __enter__(self) -> None:
        now = self._taken.get(self._name, 0)
        if self._most and now >= self._most:
            message = STREAMS_MESSAGE if self._code == STREAMS else MESSAGE
            raise OverLimit(self._code, message, retry_after_ms=RUNNING_RETRY_MS)
        self._taken[self._name] = now + 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        left = self._taken[self._name] - 1
        if left:
            self._taken[self._name] = left
        else:
            del self._taken[self._name]


class TenantLimiter:
    """`defaults` are for tenants whose own limits say 0; 0 there means no limit. Lives on one loop."""

    def __init__(self, now_ms: Callable[[], int], defaults: TenantSettings | None = None) -> None:
        self._now_ms = now_ms
        self._defaults = defaults or TenantSettings()
        self._buckets = TokenBuckets()
        self._connections: dict[str, int] = {}
        self._streams: dict[str, int] = {}

    def admit(self, caller: Caller) -> None:
        """Spend a request of the tenant's rate, or refuse with when to come back."""
        own, defaults = caller.tenant.limits, self._defaults
        rate = own.rate_per_min or defaults.rate_per_min
        if rate == 0:
            return
        # A burst belongs to the rate it was given with.
        burst = (own.burst if own.rate_per_min else own.burst or defaults.burst) or rate
        wait_ms = self._buckets.take(caller.tenant.name, self._now_ms(), rate, burst)
        if wait_ms is not None:
            raise OverLimit(RATE, MESSAGE, retry_after_ms=wait_ms)

    def connected(self, caller: Caller) -> LimitSlot:
        """While a request of the tenant is answered; refused if as many are already as may be."""
        most = caller.tenant.limits.connections or self._defaults.connections
        return LimitSlot(self._connections, _counted(caller), most, CONCURRENT)

    def streaming(self, caller: Caller) -> LimitSlot:
        """While a stream of the tenant is open, or somebody waits as if at one."""
        most = caller.tenant.limits.streams or self._defaults.streams
        return LimitSlot(self._streams, _counted(caller), most, STREAMS)


def _counted(caller: Caller) -> str:
    """Strangers at a published agent must not take the places of the tenant whose agent it is."""
    return caller.tenant.name if caller.token_sha256 else caller.name
