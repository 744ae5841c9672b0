"""Authentication: from a bearer token to a principal. A principal's sessions end when its token is revoked.

A refused token is audited before the caller is answered. An address that keeps failing gets one audit row a window,
with a count, and all addresses together get a bounded number of rows: an attacker cannot fill the disk.

A login code is traded for a session of the dashboard, so that no token is in a URL, or in a browser's history or
storage. A code works once, within a minute, and is kept as a hash in memory only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import msgspec

from covenant.ledger.contract.identities import IdentityLedger, Register, RegisterChange
from covenant.ledger.machine.identity_commands import WriteAuditRow
from covenant.model.errors import Forbidden, OverLimit, Unauthenticated
from covenant.model.grant import VIEW_ACTION
from covenant.model.ids import AgentId, PublicKey
from covenant.seal.certificates import KEY_PREFIX
from covenant.seal.keys import new_token, token_hash

WINDOW_MS: Final = 60_000
STRANGERS_MAX: Final = 100
"""The most audit rows a window for all callers without a known token together."""
SOURCES_MAX: Final = 10_000
TOKEN_LENGTH_MAX: Final = 256
CODE_MS: Final = 60_000
CODES_MAX: Final = 64
"""The most unexpired codes of all callers."""


class AuditBudget:
    """Bounds the audit rows about refused callers: one a window for each source, a few for all unknown callers."""

    def __init__(self) -> None:
        self._sources: dict[Hashable, tuple[int, int]] = {}
        """For each source: when its window began, and how many rows were left out in it."""
        self._strangers = (0, 0, 0)
        """For all unknown callers: when their window began, how many rows they had, and how many were left out."""

    def spend(self, source: Hashable, now_ms: int, *, stranger: bool) -> int | None:
        """Counts one row. Returns how many rows were left out before it; None: this row is left out, too."""
        since_ms, left_out = self._sources.get(source, (None, 0))
        if since_ms is not None and 0 <= now_ms - since_ms < WINDOW_MS:
            self._sources[source] = (since_ms, left_out + 1)
            return None
        if stranger:
            unreported = self._spend_for_stranger(now_ms)
            if unreported is None:
                return None
            left_out += unreported
        if len(self._sources) >= SOURCES_MAX:
            self._sources.clear()
        self._sources[source] = (now_ms, 0)
        return left_out

    def unreported(self, now_ms: int, within_ms: int) -> int:
        """The number of rows left out in windows of the last `within_ms` that no later row reports yet."""
        windows = [*self._sources.values(), (self._strangers[0], self._strangers[2])]
        return sum(left_out for since_ms, left_out in windows if 0 <= now_ms - since_ms < within_ms)

    def _spend_for_stranger(self, now_ms: int) -> int | None:
        since_ms, rows, left_out = self._strangers
        if not 0 <= now_ms - since_ms < WINDOW_MS:
            since_ms, rows = now_ms, 0
        if rows >= STRANGERS_MAX:
            self._strangers = (since_ms, rows, left_out + 1)
            return None
        self._strangers = (since_ms, rows + 1, 0)
        return left_out


class Principal(msgspec.Struct, frozen=True, gc=False):
    agent: AgentId
    operator: bool
    token_sha256: str
    tenant: str | None = None
    """The tenant, for an operation that tenants may use, too."""

    @property
    def viewer(self) -> PublicKey | None:
        """The key whose tasks are visible; None for the operator, who sees all."""
        return None if self.operator else self.agent.pubkey


class IdentityAuth:
    def __init__(self, ledger: IdentityLedger, operator: AgentId) -> None:
        self._ledger = ledger
        self._operator = operator
        self._sessions: dict[str, set[Callable[[], None]]] = {}
        self._budget = AuditBudget()
        ledger.on_registers(self._changed)

    def recognise(self, token: str) -> Principal | None:
        """The principal of a token. A hot path: one hash, one look-up."""
        if len(token) > TOKEN_LENGTH_MAX:
            return None
        return self._principal(token_hash(token))

    def recognise_certificate(self, names: Sequence[str]) -> Principal | None:
        """The principal of a certificate; the first of these names that an operator has mapped counts."""
        return next((found for name in names if (found := self._principal(KEY_PREFIX + name)) is not None), None)

    def _principal(self, token_sha256: str) -> Principal | None:
        identity = self._ledger.identity(token_sha256)
        if identity is None or identity.revoked_at_ms is not None:
            return None
        return Principal(identity.agent, identity.operator, identity.token_sha256)

    def is_valid(self, principal: Principal) -> bool:
        """Whether the principal's token is still valid with the same role."""
        identity = self._ledger.identity(principal.token_sha256)
        return identity is not None and identity.revoked_at_ms is None and identity.operator == principal.operator

    async def authenticate(self, token: str | None, *, transport: str, address: str) -> Principal:
        principal = self.recognise(token) if token else None
        if principal is None:
            raise await self.audit_refused_caller("unknown or revoked token", transport=transport, address=address)
        return principal

    async def audit_refused_caller(self, reason: str, *, transport: str, address: str) -> Unauthenticated:
        left_out = self._budget.spend((transport, address), self._ledger.clock.monotonic_ms(), stranger=True)
        if left_out is not None:
            row = {
                "type": "authentication_failed",
                "transport": transport,
                "reason": reason,
                "address": address,
                "suppressed_before": left_out,
            }
            await self._ledger.commit(WriteAuditRow(by=self._operator, row=row))
        return Unauthenticated("unknown_token", reason)

    def refusals_unreported(self, within_ms: int) -> int:
        """The number of callers refused lately that no audit row reports yet."""
        return self._budget.unreported(self._ledger.clock.monotonic_ms(), within_ms)

    @contextmanager
    def session(self, principal: Principal, end: Callable[[], None]) -> Iterator[None]:
        """Calls `end` if the principal's token is revoked while this context is open."""
        ends = self._sessions.setdefault(principal.token_sha256, set())
        ends.add(end)
        try:
            yield
        finally:
            ends.discard(end)
            if not ends:
                self._sessions.pop(principal.token_sha256, None)

    def _changed(self, change: RegisterChange) -> None:
        """Ends the sessions of a revoked token, whichever daemon revoked it."""
        identity = self._ledger.identity(change.name) if change.register is Register.IDENTITIES else None
        if identity is not None and identity.revoked_at_ms is not None:
            for end in tuple(self._sessions.get(change.name, ())):
                end()


async def require_operator(
    ledger: IdentityLedger, principal: Principal, what: str, *, action: str | None = None
) -> None:
    if principal.operator:
        return
    await ledger.commit(
        WriteAuditRow(
            by=principal.agent,
            row={
                "type": "operator_required",
                "peer_display": principal.agent.display,
                "peer_pubkey_b58": principal.agent.pubkey,
                "what": what,
                "action": action,
            },
        )
    )
    raise Forbidden("operator_required", f"{what} requires the operator's token")


class LoginCode(NamedTuple):
    """`url` opens the dashboard with the code in its fragment, which no server and no log sees."""

    code: str
    url: str
    lasts_ms: int


class LoginCodes:
    """Must be used on one event loop. `base_url`: the daemon's address for a browser on this machine."""

    def __init__(self, ledger: IdentityLedger, identity_auth: IdentityAuth, base_url: str) -> None:
        self._ledger = ledger
        self._identity_auth = identity_auth
        self._base_url = base_url
        self._codes: dict[str, tuple[int, Principal]] = {}
        """For each code's hash: its expiry, and its principal."""

    async def make(self, principal: Principal) -> LoginCode:
        require_view(self._ledger, principal)
        now_ms = self._ledger.clock.monotonic_ms()
        self._codes = {code: made for code, made in self._codes.items() if made[0] > now_ms}
        if len(self._codes) >= CODES_MAX:
            raise OverLimit(
                "too_many_codes",
                "too many login codes are unused; use one, or wait a minute until they expire",
                retry_after_ms=CODE_MS,
            )
        code = new_token()
        self._codes[token_hash(code)] = now_ms + CODE_MS, principal
        return LoginCode(code, f"{self._base_url}/ui/code#{code}", CODE_MS)

    def trade(self, code: str) -> Principal | None:
        """The principal that asked for the code; None if the code is invalid. A code is used up by any trade."""
        until_ms, principal = self._codes.pop(token_hash(code), (0, None))
        if principal is None or self._ledger.clock.monotonic_ms() >= until_ms:
            return None
        return principal if self._identity_auth.is_valid(principal) else None


def may_view(ledger: IdentityLedger, principal: Principal) -> bool:
    if principal.operator:
        return True
    now_ms = ledger.now_ms()
    return any(grant.live(now_ms) for grant in ledger.grants_of(principal.agent.pubkey, VIEW_ACTION))


def require_view(ledger: IdentityLedger, principal: Principal) -> None:
    if not may_view(ledger, principal):
        name = principal.agent.display
        raise Forbidden(
            "ui_not_granted",
            f"{name} may not see the dashboard; the operator can allow it: "
            f"covenant capabilities grant {VIEW_ACTION} --to {name}",
        )
