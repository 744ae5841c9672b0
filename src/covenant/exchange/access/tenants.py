"""Tenants: from a bearer token to the calling tenant; its sessions end when it is disabled or its token is replaced.

Every request of a tenant is scoped to it before anything is looked up. Disabling a tenant, or rotating its token, ends
its streams and waits: its tasks go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from covenant.model.tenants import DEFAULT, LimitUse, Tenant, TenantLimits, check_tenant_name
from covenant.seal.certificates import KEY_PREFIX, certificate_key
from covenant.seal.keys import TENANT_TOKEN_PREFIX_LENGTH, new_tenant_token, token_hash

CERTIFICATE_PREFIX_LENGTH: Final = 24
NOT_FOR_TENANTS: Final = (
    "this is a tenant's token, and the call is for identities; enroll one (covenant identities enroll NAME@HOST)"
)
RECOGNISED_MAX: Final = 1_024
"""The most tokens whose callers are cached: only accepted ones, so that strangers cannot fill the cache."""
WHERE_TOKENS_ARE: Final = (
    "the operator's is in operator.token in the daemon's home, a tenant's was shown when it was made"
)
RUNNING_RETRY_MS: Final = 1_000
"""When to send again, while a tenant has all its requests running: nobody knows when one of them ends."""
CONCURRENT: Final = "concurrent_request_limit"
STREAMS: Final = "stream_limit"
RATE: Final = "rate_limit"
REASONS: Final = frozenset({CONCURRENT, STREAMS, RATE, LIVE_TASKS, QUEUED_BYTES})
"""The codes of a tenant's limits; a refusal has them as its `reason`, too."""
MESSAGE: Final = "rate limit exceeded"
STREAMS_MESSAGE: Final = "too many streams are open; close one, or read the task instead of following it"


class Caller(msgspec.Struct, frozen=True, gc=False):
    """A calling tenant. `name` identifies the caller: an idempotency key belongs to one caller alone."""

    tenant: Tenant
    token_sha256: str
    """Empty for a caller without a token, at an agent that is published for everybody."""
    operator: bool
    name: str

    @property
    def anonymous(self) -> bool:
        return not self.token_sha256


class MintedToken(msgspec.Struct, frozen=True, gc=False):
    """`token` is returned once, here, and stored nowhere."""

    tenant: Tenant
    token: str


class TenantAccess:
    def __init__(self, ledger: IdentityLedger, operator: AgentId, identity_auth: IdentityAuth) -> None:
        self._ledger = ledger
        self._operator = operator
        self._identity_auth = identity_auth
        self._sessions: dict[Callable[[], None], Caller] = {}
        """The callback that ends each session, and its caller."""
        self._recognised: dict[str, Caller] = {}
        """Callers by the hash of their token, until a register changes."""
        self.by_credential: dict[bytes, Caller] = {}
        """The same by the value of an `Authorization` header, for a door that has read it."""
        ledger.on_registers(self._changed)

    async def open(self) -> None:
        """Adds the tenant `default` if it does not exist. It has no token of its own until one is made by rotating.

        Another daemon that opens the same ledger at this moment may add it first.
        """
        if self._ledger.tenant(DEFAULT) is None:
            try:
                await self._ledger.commit(AddTenant(by=self._operator, tenant=Tenant(name=DEFAULT)))
            except Conflict as conflict:
                if conflict.code != "tenant_exists":
                    raise

    def recognise(self, token: str) -> Caller | None:
        """The caller of a token. A hot path: one hash, one look-up."""
        if len(token) > TOKEN_LENGTH_MAX:
            return None
        return self._recognise(token_hash(token))

    def refusal_reason(self, token: str | None) -> str:
        """The refusal's text for a token that is no identity's, where only identities may call."""
        return NOT_FOR_TENANTS if token and self.recognise(token) is not None else "unknown or revoked token"

    def recognise_certificate(self, names: Sequence[str]) -> Caller | None:
        """The caller of a certificate; the first of these names that an operator has mapped counts."""
        return next((caller for name in names if (caller := self._recognise(KEY_PREFIX + name)) is not None), None)

    def _recognise(self, token_sha256: str) -> Caller | None:
        caller = self._recognised.get(token_sha256) or self._caller(token_sha256)
        if caller is not None:
            if len(self._recognised) >= RECOGNISED_MAX:
                self._recognised.clear()
            self._recognised[token_sha256] = caller
        return caller

    def check_valid(self, caller: Caller | Principal) -> None:
        """Refuses a caller whose token has ended since it was recognised: the body of a request may take minutes."""
        if self._caller(caller.token_sha256) is None:
            raise unauthenticated()

    def now(self, caller: Caller) -> Caller | None:
        """The caller as its token is valid now; None if it is not valid any more."""
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
        """The caller of a token. Every invalid token gets the same answer; the audit has the reason."""
        caller = self.recognise(token) if token else None
        if caller is None:
            reason = "no tenant has this token, or not any more" if token else "missing bearer token"
            await self._identity_auth.audit_refused_caller(reason, transport=transport, address=address)
            raise unauthenticated()
        return caller

    @contextmanager
    def session(self, caller: Caller, end: Callable[[], None]) -> Iterator[None]:
        """A context of a stream or wait: `end` is called when the caller may not go on.

        It is called at once if that happened since the caller was authenticated.
        """
        self.open_session(caller, end)
        try:
            yield
        finally:
            self.close_session(end)

    def open_session(self, caller: Caller, end: Callable[[], None]) -> None:
        self._sessions[end] = caller
        known = self._recognised.get(caller.token_sha256) is caller or caller.anonymous
        if not known and self._caller(caller.token_sha256) is None:
            end()

    def close_session(self, end: Callable[[], None]) -> None:
        self._sessions.pop(end, None)

    def _changed(self, change: RegisterChange) -> None:
        """Ends the sessions of revoked or rotated tokens and disabled tenants, whichever daemon changed them."""
        if change.register is Register.AGENTS:
            return
        self._recognised.clear()
        self.by_credential.clear()
        of_tenant = change.register is Register.TENANTS
        for end, caller in tuple(self._sessions.items()):
            if of_tenant and caller.tenant.name != change.name:
                continue
            tenant = self._ledger.tenant(caller.tenant.name)
            token_over = not caller.anonymous and self._caller(caller.token_sha256) is None
            if token_over or tenant is None or tenant.disabled_at_ms is not None:
                self.close_session(end)  # so that `end` is called once
                end()

    def tenant(self, name: str) -> Tenant | None:
        return self._ledger.tenant(name)

    async def acting(self, principal: Principal, name: str) -> Caller:
        """A caller for the operator who acts for a tenant."""
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
        """Adds a tenant. `certificate`: the name of a certificate that stands for it, instead of a token."""
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
        """All tenants, oldest first."""
        await require_operator(self._ledger, principal, "listing tenants")
        return await self._ledger.tenants()

    async def change(
        self, principal: Principal, name: str, *, disabled: bool | None = None, limits: TenantLimits | None = None
    ) -> Tenant:
        """Changes a tenant. Arguments that are None leave their field as it is.

        A disabled tenant's token is refused from now on; its streams end, its running tasks go on.
        """
        await require_operator(self._ledger, principal, "changing a tenant")
        checked = check_limits(limits) if limits is not None else None
        command = ChangeTenant(by=principal.agent, name=name, disabled=disabled, limits=checked)
        return await self._ledger.commit(command)

    async def rotate(self, principal: Principal, name: str, *, certificate: str | None = None) -> MintedToken:
        """A new token, or a certificate that stands for the tenant; the old credential ends at once."""
        await require_operator(self._ledger, principal, "rotating a tenant's token")
        token, token_sha256, token_prefix = self._credential(certificate)
        command = RotateTenant(by=principal.agent, name=name, token_sha256=token_sha256, token_prefix=token_prefix)
        return MintedToken(await self._ledger.commit(command), token)

    def _credential(self, certificate: str | None) -> tuple[str, str, str]:
        """A token, its hash and its prefix; for a certificate an empty token, and its name in place of the hash."""
        if certificate is None:
            token = new_tenant_token()
            return token, token_hash(token), token[:TENANT_TOKEN_PREFIX_LENGTH]
        key = certificate_key(certificate)
        check_certificate_free(self._ledger, key)
        return "", key, key[:CERTIFICATE_PREFIX_LENGTH]


def check_certificate_free(ledger: IdentityLedger, key: str) -> None:
    """Refuses a certificate that already stands for a caller. Raises Conflict."""
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


class LimitSlot(msgspec.Struct, gc=False, eq=False):
    """A slot of a tenant's limit, as a context. (A generator would cost four times as much, and each call has one.)"""

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


def share(most: int, living: int) -> int:
    """One daemon's share of a limit, for this number of daemons; 0: no limit."""
    return -(-most // living)


class TenantLimiter:
    """`defaults` apply to tenants whose own limits are 0; 0 there means no limit. Must be used on one event loop.

    `living`: how many daemons serve the tenant. Each keeps to its share, rounded up, so together they exceed a limit by
    less than one for each of them.
    """

    def __init__(
        self,
        now_ms: Callable[[], int],
        defaults: TenantSettings | None = None,
        living: Callable[[], int] = lambda: 1,
    ) -> None:
        self._now_ms = now_ms
        self._living = living
        self._defaults = defaults or TenantSettings()
        self._buckets = TokenBuckets()
        self._connections: dict[str, int] = {}
        self._streams: dict[str, int] = {}

    def admit(self, caller: Caller) -> None:
        """Spends a request of the tenant's rate, or refuses with the time to wait."""
        rate, burst = self._rate(caller.tenant)
        if rate == 0:
            return
        wait_ms = self._buckets.take(caller.tenant.name, self._now_ms(), rate, burst)
        if wait_ms is not None:
            raise OverLimit(RATE, MESSAGE, retry_after_ms=wait_ms)

    def _rate(self, tenant: Tenant) -> tuple[int, int]:
        """This daemon's share of the requests in a minute, and of those at once; 0: no limit."""
        own, defaults = tenant.limits, self._defaults
        rate = own.rate_per_min or defaults.rate_per_min
        if rate == 0:
            return 0, 0
        # The burst that belongs to the rate in force.
        burst = own.burst or own.rate_per_min or defaults.burst or rate
        living = self._living()
        return share(rate, living), share(burst, living)

    def connected(self, caller: Caller) -> LimitSlot:
        """A slot for the time of one request; refused if all of the tenant's are taken."""
        most, living = caller.tenant.limits.connections or self._defaults.connections, self._living()
        # Strangers at a published agent must not take the slots of the tenant that owns it.
        name = caller.tenant.name if caller.token_sha256 else caller.name
        return LimitSlot(self._connections, name, most if living == 1 else share(most, living), CONCURRENT)

    def streaming(self, caller: Caller) -> LimitSlot:
        """A slot for the time of one stream or long wait."""
        most = caller.tenant.limits.streams or self._defaults.streams
        name = caller.tenant.name if caller.token_sha256 else caller.name
        return LimitSlot(self._streams, name, share(most, self._living()), STREAMS)

    def requests(self, tenant: Tenant) -> LimitUse:
        """How much of its burst the tenant has spent."""
        rate, burst = self._rate(tenant)
        return LimitUse(self._buckets.spent(tenant.name, self._now_ms(), rate, burst) if rate else 0, burst)

    def connections(self, tenant: Tenant) -> LimitUse:
        most = tenant.limits.connections or self._defaults.connections
        return LimitUse(self._connections.get(tenant.name, 0), share(most, self._living()))

    def streams(self, tenant: Tenant) -> LimitUse:
        most = tenant.limits.streams or self._defaults.streams
        return LimitUse(self._streams.get(tenant.name, 0), share(most, self._living()))
