"""The agents of this daemon as an operator calls them in a tenant's place: through the A2A door, without its token.

A request that brings a token is judged by that token alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from covenant.doors.a2a.http_bindings import PREFIX, A2ADoor
from covenant.doors.http.bearer_auth import TenantGate, credential_of
from covenant.exchange.access.tenants import Caller

if TYPE_CHECKING:
    import httpx2

    from covenant.doors.a2a.in_process_grpc import ActingCalls, InProcessChannel

ACTING: Final = "covenant.acting"
"""Where the scope of such a request has its caller."""


class ActingGate(TenantGate):
    async def enter(self, scope: Scope) -> Caller:
        """To look at a card spends nothing of the tenant's rate; a call of the agent does."""
        return await self.caller(scope)

    async def caller(self, scope: Scope) -> Caller:
        acting: Caller | None = scope.get(ACTING)
        return await super().caller(scope) if acting is None or credential_of(scope) is not None else acting


class OwnAgents:
    """The agents of this daemon, and the pages beside them, such as the keys of their cards."""

    def __init__(self, door: A2ADoor, pages: Sequence[BaseRoute], grpc: ActingCalls | None = None) -> None:
        """The gate of all is an `ActingGate`. Without `grpc`, the daemon serves none."""
        self._door = door
        self._grpc = grpc
        self._pages = Router(pages, redirect_slashes=False)

    def transport(self, caller: Caller) -> httpx2.AsyncBaseTransport:
        """What carries requests of this caller to them."""
        from covenant.doors.a2a.in_process_client import InProcessTransport  # noqa: PLC0415  (needs the HTTP library)

        return InProcessTransport(self, {ACTING: caller})

    def channel(self, caller: Caller) -> InProcessChannel | None:
        """What carries calls of gRPC of this caller to them."""
        if self._grpc is None:
            return None
        from covenant.doors.a2a.in_process_grpc import InProcessChannel  # noqa: PLC0415  an extra

        return InProcessChannel(self._grpc, caller)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        serve: ASGIApp = self._door if scope["path"].startswith(PREFIX) else self._pages
        await serve(scope, receive, send)
