"""Browser sessions, each known by the secret in a cookie.

A session is kept in memory only, under the hash of its secret. A session ends after `idle_ms` without use, after
`session_ms`, by logging out, when its token or a viewer's grant ends, and with the process. Each request checks this.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final

from covenant.exchange.access.principals import IdentityAuth, LoginCodes, Principal, may_view, require_view
from covenant.exchange.access.tenants import Caller, TenantAccess
from covenant.exchange.catalogue import Catalogue
from covenant.ledger.contract.identities import IdentityLedger
from covenant.model.errors import Forbidden, Refusal, Unauthenticated
from covenant.model.settings import UiSettings
from covenant.seal.keys import new_token, token_hash

TRANSPORT: Final = "ui"
"""The name of this door in the audit."""
SECRET_LENGTH_MAX: Final = 64
PER_CALLER_MAX: Final = 32
"""The most sessions of one token. A further login ends the session that was idle longest."""


class Role(enum.Enum):
    OPERATOR = "operator"
    VIEWER = "viewer"
    """Sees everything that the operator sees, and changes nothing."""
    TENANT = "tenant"
    """Sees, cancels and answers the tenant's own tasks."""


class UiSession:
    """`principal` acts in the audit and in the ledger; for a tenant it is the tenant's client."""

    __slots__ = ("began_ms", "caller", "ended", "on_end", "principal", "role", "secret_sha256", "used_ms")

    def __init__(self, secret: str, role: Role, principal: Principal, caller: Caller | None, now_ms: int) -> None:
        self.secret_sha256: Final = token_hash(secret)
        self.role: Final = role
        self.principal: Final = principal
        self.caller: Final = caller
        """The tenant; None for an operator or a viewer."""
        self.began_ms: Final = now_ms
        self.used_ms = now_ms
        self.on_end: set[Callable[[], None]] = set()
        """Callbacks, each called once if the session ends before the stream that added it."""
        self.ended = False

    @property
    def name(self) -> str:
        return self.principal.agent.display

    @property
    def tenant(self) -> str | None:
        return self.caller.tenant.name if self.caller is not None else None


class Sessions:
    """Must be used on one event loop."""

    def __init__(
        self,
        ledger: IdentityLedger,
        identity_auth: IdentityAuth,
        tenancy: TenantAccess,
        catalogue: Catalogue,
        *,
        codes: LoginCodes,
        settings: UiSettings,
    ) -> None:
        self._ledger = ledger
        self._identity_auth = identity_auth
        self._tenancy = tenancy
        self._catalogue = catalogue
        self._codes = codes
        self.settings: Final = settings
        self.open: dict[str, UiSession] = {}
        """Sessions by the hash of their secret."""
        ledger.on_registers(lambda _: self._end_expired())

    async def login(self, token: str, address: str) -> tuple[UiSession, str]:
        """Opens a session for the holder of this token; returns it with its secret. A refusal is audited first."""
        principal = self._identity_auth.recognise(token)
        if principal is not None:
            return await self._open_for(principal, address)
        caller = self._tenancy.recognise(token)
        if caller is None:
            raise await self._audit_refusal("unknown or revoked token", address)
        tenant = caller.tenant.name
        agent = self._catalogue.client(tenant)
        client = Principal(agent, operator=False, token_sha256=caller.token_sha256, tenant=tenant)
        return self._begin(Role.TENANT, client, caller)

    async def trade(self, code: str, address: str) -> tuple[UiSession, str]:
        """Opens a session for the principal that asked for this login code."""
        principal = self._codes.trade(code)
        if principal is None:
            raise await self._audit_refusal("unknown, used or expired login code", address)
        return await self._open_for(principal, address)

    async def _open_for(self, principal: Principal, address: str) -> tuple[UiSession, str]:
        try:
            require_view(self._ledger, principal)
        except Forbidden:
            await self._audit_refusal(f"{principal.agent.display} has no grant for the dashboard", address)
            raise
        return self._begin(Role.OPERATOR if principal.operator else Role.VIEWER, principal, None)

    async def _audit_refusal(self, reason: str, address: str) -> Refusal:
        return await self._identity_auth.audit_refused_caller(reason, transport=TRANSPORT, address=address)

    def _begin(self, role: Role, principal: Principal, caller: Caller | None) -> tuple[UiSession, str]:
        now_ms = self._now_ms()
        same_token = [each for each in self.open.values() if each.principal.token_sha256 == principal.token_sha256]
        if len(same_token) >= PER_CALLER_MAX:
            self.end(min(same_token, key=_used_ms))
        if len(self.open) >= self.settings.sessions_max:
            self.end(min(self.open.values(), key=_used_ms))
        secret = new_token()
        session = UiSession(secret, role, principal, caller, now_ms)
        self.open[session.secret_sha256] = session
        return session, secret

    def find(self, secret: str, *, used: bool = True) -> UiSession:
        """The session with this secret. `used` restarts its idle time; a page that reloads by itself passes False."""
        session = self.open.get(token_hash(secret)) if len(secret) <= SECRET_LENGTH_MAX else None
        if session is None:
            raise no_session()
        self.check(session)
        if used:
            session.used_ms = self._now_ms()
        return session

    def check(self, session: UiSession) -> None:
        """Refuses a session that has ended, without restarting its idle time."""
        if session.ended or self._has_expired(session):
            self.end(session)
            raise no_session()

    def end(self, session: UiSession) -> None:
        session.ended = True
        self.open.pop(session.secret_sha256, None)
        on_end, session.on_end = session.on_end, set()
        for call in on_end:
            call()

    def expires_in_ms(self, session: UiSession) -> int:
        """The time until the session ends if it is not used again."""
        now_ms, settings = self._now_ms(), self.settings
        return max(0, min(session.used_ms + settings.idle_ms, session.began_ms + settings.session_ms) - now_ms)

    def _has_expired(self, session: UiSession) -> bool:
        if self.expires_in_ms(session) == 0:
            return True
        if session.caller is not None:
            return self._tenancy.now(session.caller) is None
        principal = session.principal
        return not self._identity_auth.is_valid(principal) or not may_view(self._ledger, principal)

    def _end_expired(self) -> None:
        """Ends every session whose token or grant has ended, with its streams. Called when a register changes."""
        for session in [each for each in self.open.values() if self._has_expired(each)]:
            self.end(session)

    def _now_ms(self) -> int:
        return self._ledger.clock.monotonic_ms()


def _used_ms(session: UiSession) -> int:
    return session.used_ms


def no_session() -> Unauthenticated:
    return Unauthenticated("no_session", "log in at /ui/login first")
