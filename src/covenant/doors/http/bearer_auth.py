"""What tenants ask over HTTP: who is calling, within which limits, and one way to answer.

The order of checks is authentication, limits, size; the rest is the route's own. A token that is missing, unknown,
revoked or of a disabled tenant gets one and the same 401, and is audited before it is told.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec
from starlette.types import Scope

from covenant.exchange.access.principals import IdentityAuth, Principal
from covenant.exchange.access.tenant_limits import TenantLimiter
from covenant.exchange.access.tenants import Caller, TenantAccess

TRANSPORT: Final = "http"


async def authenticate(doorkeeper: IdentityAuth, scope: Scope) -> Principal:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() != b"bearer" or not (token := token.strip()):
                reason = "expected Authorization: Bearer <token>"
                break
            principal = doorkeeper.recognise(token.decode("latin-1"))
            if principal is not None:
                return principal
            reason = "unknown or revoked token"
            break
    else:
        reason = "missing Authorization header"
    client = scope.get("client")
    address = client[0] if client else "unknown"
    raise await doorkeeper.turned_away(reason, transport=TRANSPORT, address=address)


log = logging.getLogger(__name__)

RECOGNISED_MAX: Final = 256
"""How many credentials are remembered: of those who were let in, so that nobody else can fill it."""
RECOGNISED_S: Final = 60.0
"""For how long at most. Elsewhere a token is kept as its hash, if at all."""

_encode = msgspec.json.Encoder().encode


class TenantGate:
    """Shared by every door that tenants use over HTTP."""

    def __init__(self, tenancy: TenantAccess, limiter: TenantLimiter) -> None:
        self.tenancy = tenancy
        self.limiter = limiter
        self._recognised: dict[bytes, Caller] = {}

    async def enter(self, scope: Scope) -> Caller:
        """The tenant that is calling, with one request of its rate spent."""
        caller = await self.caller(scope)
        self.limiter.admit(caller)
        return caller

    async def caller(self, scope: Scope) -> Caller:
        credential = _credential(scope)
        caller = self.recognised(credential) if credential is not None else None
        if caller is None:
            token = bearer(scope)
            return await self.tenancy.authenticate(token, transport=TRANSPORT, address=address(scope))
        return caller

    def recognised(self, credential: bytes) -> Caller | None:
        """Who has the value of this `Authorization` header.

        Most requests repeat one that came before. What it was found to mean is remembered; that it still means it is
        looked up for every request, so that who is turned out is out at once.
        """
        caller = self._recognised.get(credential)
        if caller is not None and self.tenancy.still(caller):
            return caller
        token = bearer_of(credential)
        caller = None if token is None else self.tenancy.recognise(token)
        if caller is None:
            self._recognised.pop(credential, None)
            return None
        if len(self._recognised) >= RECOGNISED_MAX:
            self._recognised.clear()
        if not self._recognised:
            asyncio.get_running_loop().call_later(RECOGNISED_S, self._recognised.clear)
        self._recognised[credential] = caller
        return caller


def bearer(scope: Scope) -> str | None:
    """The token of `Authorization: Bearer <token>`; None if there is no such header."""
    credential = _credential(scope)
    return None if credential is None else bearer_of(credential)


def _credential(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            credential: bytes = value
            return credential
    return None


def bearer_of(credential: bytes) -> str | None:
    """The token in the value of an `Authorization` header; None if it is of another kind."""
    scheme, _, token = credential.partition(b" ")
    token = token.strip()
    return token.decode("latin-1") if scheme.lower() == b"bearer" and token else None


def address(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else "unknown"
