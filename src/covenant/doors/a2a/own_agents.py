"""The agents of this daemon as an operator calls them for a tenant: through the A2A door, without its token.

A request that has a token is authenticated by that token alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from starlette.routing import BaseRoute, Router
from starlette.types import Scope

from covenant.doors.a2a.http_bindings import PREFIX, A2ADoor
from covenant.doors.http.bearer_auth import TenantAuth, credential_of
from covenant.doors.http.server.http_exchange import HttpExchange
from covenant.exchange.access.tenants import Caller

if TYPE_CHECKING:
    import httpx2

    from covenant.doors.a2a.in_process_grpc import ActingCalls, InProcessChannel

ACTING: Final = "covenant.acting"
"""The key of the caller in such a request's scope."""


class ActingTenantAuth(TenantAuth):
    async def enter(self, scope: Scope) -> Caller:
        """Reading a card does not count against the tenant's rate; a call of the agent does."""
        return await self.caller(scope)

    async def caller(self, scope: Scope) -> Caller:
        acting: Caller | None = scope.get(ACTING)
        return await super().caller(scope) if acting is None or credential_of(scope) is not None else acting


class OwnAgents:
    """The agents of this daemon, and the pages of their cards and keys."""

    def __init__(self, door: A2ADoor, pages: Sequence[BaseRoute], grpc: ActingCalls | None = None) -> None:
        """`door`, `pages` and `grpc` must authenticate with an `ActingTenantAuth`. Without `grpc`, there is no gRPC."""
        self._door = door
        self._grpc = grpc
        self._pages = Router(pages, redirect_slashes=False)

    def transport(self, caller: Caller) -> httpx2.AsyncBaseTransport:
        """An HTTP transport that sends this caller's requests to the agents."""
        from covenant.doors.a2a.in_process_client import InProcessTransport  # noqa: PLC0415  (needs the HTTP library)

        return InProcessTransport(self, {ACTING: caller})

    def channel(self, caller: Caller) -> InProcessChannel | None:
        """A gRPC channel that sends this caller's calls to the agents; None without gRPC."""
        if self._grpc is None:
            return None
        from covenant.doors.a2a.in_process_grpc import InProcessChannel  # noqa: PLC0415  an extra

        return InProcessChannel(self._grpc, caller)

    async def serve(self, exchange: HttpExchange) -> None:
        if exchange.scope["path"].startswith(PREFIX):
            await self._door.serve(exchange.scope, exchange)
        else:
            await self._pages(exchange.scope, exchange.receive, exchange)
