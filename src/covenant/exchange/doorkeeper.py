"""The doorkeeper: from a bearer token to a principal, and out again when the token is revoked.

A refused token is audited before the refusal is told. One address that keeps failing costs one row a window, with a
count, and all addresses together cost a bounded number of rows: an attacker cannot fill the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from covenant.exchange.audit_budget import AuditBudget
from covenant.exchange.principal import Principal
from covenant.ledger.contract import Ledger
from covenant.ledger.machine.commands import Note
from covenant.model.errors import Unauthenticated
from covenant.model.ids import AgentId
from covenant.seal.keys import token_hash

TOKEN_LENGTH_MAX: Final = 256


class Doorkeeper:
    def __init__(self, ledger: Ledger, operator: AgentId) -> None:
        self._ledger = ledger
        self._operator = operator
        self._sessions: dict[str, set[Callable[[], None]]] = {}
        self._budget = AuditBudget()

    def recognise(self, token: str) -> Principal | None:
        """The hot path: one hash, one look-up."""
        if len(token) > TOKEN_LENGTH_MAX:
            return None
        identity = self._ledger.identity(token_hash(token))
        if identity is None or identity.revoked_at_ms is not None:
            return None
        return Principal(identity.agent, identity.operator, identity.token_sha256)

    async def authenticate(self, token: str | None, *, transport: str, address: str) -> Principal:
        principal = self.recognise(token) if token else None
        if principal is None:
            raise await self.turned_away("unknown or revoked token", transport=transport, address=address)
        return principal

    async def turned_away(self, reason: str, *, transport: str, address: str) -> Unauthenticated:
        """Audit a refused caller; the refusal to answer with."""
        left_out = self._budget.spend((transport, address), self._ledger.clock.monotonic_ms(), stranger=True)
        if left_out is not None:
            row = {
                "type": "authentication_failed",
                "transport": transport,
                "reason": reason,
                "address": address,
                "suppressed_before": left_out,
            }
            await self._ledger.commit(Note(by=self._operator, row=row))
        return Unauthenticated("unknown_token", reason)

    @contextmanager
    def session(self, principal: Principal, end: Callable[[], None]) -> Iterator[None]:
        """While a connection or wait of this caller is open: `end` is called if its token is revoked."""
        ends = self._sessions.setdefault(principal.token_sha256, set())
        ends.add(end)
        try:
            yield
        finally:
            ends.discard(end)
            if not ends:
                self._sessions.pop(principal.token_sha256, None)

    def end_sessions(self, token_sha256: str) -> None:
        for end in tuple(self._sessions.get(token_sha256, ())):
            end()
