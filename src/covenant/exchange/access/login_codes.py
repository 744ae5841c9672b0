"""Codes that are traded for a session of the dashboard: single use, short lived, kept as hashes in memory alone.

Whoever has a token and a way to the daemon asks for a code and hands it to a browser, so that the token never stands in
a URL, in a browser's history or in its storage.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from covenant.exchange.access.principals import IdentityAuth, Principal
from covenant.ledger.contract.identities import IdentityLedger
from covenant.model.errors import Forbidden, OverLimit
from covenant.model.grant import VIEW_ACTION
from covenant.seal.keys import new_token, token_hash

CODE_MS: Final = 60_000
CODES_MAX: Final = 64
"""Codes that are still good, of all callers."""


class LoginCode(NamedTuple):
    """`url` opens the dashboard with the code in its fragment, which no server and no log sees."""

    code: str
    url: str
    lasts_ms: int


class LoginCodes:
    """Lives on one loop. `base_url`: where a browser on this machine finds the daemon."""

    def __init__(self, ledger: IdentityLedger, identity_auth: IdentityAuth, base_url: str) -> None:
        self._ledger = ledger
        self._identity_auth = identity_auth
        self._base_url = base_url
        self._codes: dict[str, tuple[int, Principal]] = {}
        """By hash: until when each is good, and for whom."""

    async def make(self, principal: Principal) -> LoginCode:
        await require_view(self._ledger, principal)
        now_ms = self._ledger.clock.monotonic_ms()
        self._codes = {code: made for code, made in self._codes.items() if made[0] > now_ms}
        if len(self._codes) >= CODES_MAX:
            raise OverLimit("too_many_codes", "too many login codes are unused; use one", retry_after_ms=CODE_MS)
        code = new_token()
        self._codes[token_hash(code)] = now_ms + CODE_MS, principal
        return LoginCode(code, f"{self._base_url}/ui/code#{code}", CODE_MS)

    def trade(self, code: str) -> Principal | None:
        """Whoever asked for the code. It is used up by this, whatever comes of it."""
        until_ms, principal = self._codes.pop(token_hash(code), (0, None))
        if principal is None or self._ledger.clock.monotonic_ms() >= until_ms:
            return None
        return principal if self._identity_auth.still(principal) else None


async def may_view(ledger: IdentityLedger, principal: Principal) -> bool:
    if principal.operator:
        return True
    now_ms = ledger.now_ms()
    return any(
        grant.action == VIEW_ACTION and grant.subject.pubkey == principal.agent.pubkey and grant.live(now_ms)
        for grant in await ledger.grants()
    )


async def require_view(ledger: IdentityLedger, principal: Principal) -> None:
    if not await may_view(ledger, principal):
        name = principal.agent.display
        raise Forbidden(
            "ui_not_granted",
            f"{name} may not see the dashboard; the operator can allow it: "
            f"covenant capabilities grant {VIEW_ACTION} --to {name}",
        )
