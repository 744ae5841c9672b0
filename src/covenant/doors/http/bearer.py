"""Who is calling, by `Authorization: Bearer <token>`. A caller that is turned away is audited before it is told."""

from __future__ import annotations

from typing import Final

from starlette.types import Scope

from covenant.exchange.access.principals import IdentityAuth, Principal

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
