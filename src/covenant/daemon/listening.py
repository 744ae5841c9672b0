"""Where HTTP listens: the socket, bound before anything is promised, and uvicorn on top of it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from covenant.daemon.gathering import GatheringProtocol
from covenant.daemon.settings import HttpSettings
from covenant.model.errors import CovenantError

BACKLOG: Final = 2_048
KEEP_ALIVE_S: Final = 75


class CannotListen(CovenantError):
    """The address cannot be listened on; the message says what to change."""


@contextmanager
def bound(settings: HttpSettings) -> Iterator[socket.socket]:
    """A socket bound to the address of the settings."""
    family = socket.AF_INET6 if ":" in settings.bind_addr else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((settings.bind_addr, settings.port))
        except OSError as error:
            raise CannotListen(
                f"HTTP cannot listen on {settings.bind_addr} port {settings.port}: {error.strerror}; "
                "stop what uses it, or choose another with --http-port or --http-bind-addr"
            ) from error
        yield made


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """Uvicorn on a socket that is bound already. Signals are the daemon's business; `listening` says when it is up."""

    def __init__(self, door: ASGIApp, listener: socket.socket, settings: HttpSettings, *, grace_s: int) -> None:
        super().__init__(
            uvicorn.Config(
                door,
                http=GatheringProtocol,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=settings.connections_max,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=grace_s,
            )
        )
        self._listener = listener
        self._adopting: set[asyncio.Task[None]] = set()
        self.listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    def adopt(self, connection: socket.socket) -> None:
        """Serve a connection that was accepted elsewhere, as if it had been accepted here. On the loop."""
        if self.should_exit:
            connection.close()
            return
        adopting = asyncio.get_running_loop().create_task(self._adopt(connection))
        self._adopting.add(adopting)
        adopting.add_done_callback(self._adopting.discard)

    async def _adopt(self, connection: socket.socket) -> None:
        def protocol() -> GatheringProtocol:
            return GatheringProtocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

        with suppress(OSError):  # it is gone again
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)

    async def run_until_told(self) -> None:
        await self.serve(sockets=[self._listener])
