"""Tenants: from a bearer token to the tenant that is calling, and out again when it is disabled or its token replaced.

Everything a tenant asks is scoped to it before anything is looked up. Disabling a tenant, or rotating its token, ends
what it has running towards the caller (streams, waits): the work itself goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec

from covenant.exchange.doorkeeper import TOKEN_LENGTH_MAX, Doorkeeper
from covenant.exchange.operators import require_operator
from covenant.exchange.principal import Principal
from covenant.ledger.contract import Ledger
from covenant.model.errors import Conflict, Invalid, NotFound, Unauthenticated
from covenant.model.ids import AgentId
from covenant.model.tenant import DEFAULT, Tenant, TenantLimits, check_tenant_name
from covenant.seal.keys import TENANT_TOKEN_PREFIX_LENGTH, new_tenant_token, token_hash

LIMIT_MAX: Final = 1_000_000


class Caller(msgspec.Struct, frozen=True, gc=False):
    """A tenant that is calling. `name` says who exactly: keys that callers choose are theirs alone."""

    tenant: Tenant
    token_sha256: str
    operator: bool
    name: str


class Minted(msgspec.Struct, frozen=True, gc=False):
    """`token` is told once, here, and kept nowhere."""

    tenant: Tenant
    token: str


class Tenancy:
    def __init__(self, ledger: Ledger, operator: AgentId, doorkeeper: Doorkeeper) -> None:
        self._ledger = ledger
        self._operator = operator
        self._doorkeeper = doorkeeper
        self._ends: dict[str, set[Callable[[], None]]] = {}
        self._tenants: dict[str, Tenant] = {DEFAULT: Tenant(name=DEFAULT, created_at_ms=ledger.now_ms())}
        self._by_token: dict[str, Tenant] = {}

    def recognise(self, token: str) -> Caller | None:
        """The hot path: one hash, one look-up."""
        return self._caller(token_hash(token)) if len(token) <= TOKEN_LENGTH_MAX else None

    def _caller(self, token_sha256: str) -> Caller | None:
        tenant = self._by_token.get(token_sha256)
        if tenant is not None:
            found = Caller(tenant, token_sha256, operator=False, name=f"client@{tenant.name}")
            return found if tenant.disabled_at_ms is None else None
        identity = self._ledger.identity(token_sha256)
        if identity is None or identity.revoked_at_ms is not None or not identity.operator:
            return None
        tenant = self._tenants[DEFAULT]
        found = Caller(tenant, token_sha256, operator=True, name=identity.agent.display)
        return found if tenant.disabled_at_ms is None else None

    async def authenticate(self, token: str | None, *, transport: str, address: str) -> Caller:
        """One answer for all that can be wrong with a token; the audit knows which it was."""
        caller = self.recognise(token) if token else None
        if caller is None:
            reason = "no tenant has this token, or not any more" if token else "missing bearer token"
            await self._doorkeeper.turned_away(reason, transport=transport, address=address)
            raise Unauthenticated("unauthenticated", "missing or invalid bearer token")
        return caller

    @contextmanager
    def session(self, caller: Caller, end: Callable[[], None]) -> Iterator[None]:
        """While a stream or wait of this caller is open: `end` is called when it may not go on.

        At once, if that happened between its authentication and here.
        """
        ends = self._ends.setdefault(caller.tenant.name, set())
        ends.add(end)
        principal = Principal(self._operator, caller.operator, caller.token_sha256)
        try:
            with self._doorkeeper.session(principal, end):
                if self._caller(caller.token_sha256) is None:
                    end()
                yield
        finally:
            ends.discard(end)
            if not ends:
                self._ends.pop(caller.tenant.name, None)

    def tenant(self, name: str) -> Tenant | None:
        return self._tenants.get(name)

    async def add(self, principal: Principal, name: str, limits: TenantLimits | None = None) -> Minted:
        await require_operator(self._ledger, principal, "adding a tenant")
        check_tenant_name(name)
        if name in self._tenants:
            raise Conflict("tenant_exists", f"there is a tenant {name!r} already")
        token = new_tenant_token()
        tenant = Tenant(
            name=name,
            token_sha256=token_hash(token),
            token_prefix=token[:TENANT_TOKEN_PREFIX_LENGTH],
            created_at_ms=self._ledger.now_ms(),
            limits=check_limits(limits or TenantLimits()),
        )
        self._put(tenant)
        return Minted(tenant, token)

    async def list(self, principal: Principal) -> Sequence[Tenant]:
        """The oldest first."""
        await require_operator(self._ledger, principal, "listing tenants")
        return tuple(self._tenants.values())

    async def disable(self, principal: Principal, name: str) -> Tenant:
        await require_operator(self._ledger, principal, "disabling a tenant")
        tenant = msgspec.structs.replace(self._one(name), disabled_at_ms=self._ledger.now_ms())
        self._put(tenant)
        self._end_sessions(name)
        return tenant

    async def enable(self, principal: Principal, name: str) -> Tenant:
        await require_operator(self._ledger, principal, "enabling a tenant")
        tenant = msgspec.structs.replace(self._one(name), disabled_at_ms=None)
        self._put(tenant)
        return tenant

    async def rotate(self, principal: Principal, name: str) -> Minted:
        """A new token; the old one ends at once."""
        await require_operator(self._ledger, principal, "rotating a tenant's token")
        old, token = self._one(name), new_tenant_token()
        tenant = msgspec.structs.replace(
            old, token_sha256=token_hash(token), token_prefix=token[:TENANT_TOKEN_PREFIX_LENGTH]
        )
        self._by_token.pop(old.token_sha256, None)
        self._put(tenant)
        self._doorkeeper.end_sessions(old.token_sha256)
        return Minted(tenant, token)

    def _one(self, name: str) -> Tenant:
        tenant = self.tenant(name)
        if tenant is None:
            raise NotFound("unknown_tenant", f"no tenant is called {name[:80]!r}")
        return tenant

    def _put(self, tenant: Tenant) -> None:
        self._tenants[tenant.name] = tenant
        if tenant.token_sha256:
            self._by_token[tenant.token_sha256] = tenant

    def _end_sessions(self, name: str) -> None:
        for end in tuple(self._ends.get(name, ())):
            end()


def check_limits(limits: TenantLimits) -> TenantLimits:
    for name in TenantLimits.__struct_fields__:
        if not 0 <= getattr(limits, name) <= LIMIT_MAX:
            raise Invalid("invalid_limit", f"{name} must be between 0 and {LIMIT_MAX}; 0 for the daemon's default")
    return limits
