"""TLS: connections before the end of their handshake are bounded too, in number, for each address and in time.

A connection counts as one of the server's when its handshake is done. Before that it counts as a handshake: if there
are too many, the oldest is aborted.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from covenant.doors.http.server.http_connection import HttpConnection

if TYPE_CHECKING:
    from covenant.doors.http.server.http_server import HttpServer

SHUTDOWN_S: Final = 2.0
"""How long a client has to answer the end of TLS."""

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ServerTls:
    """`names_of` reads a client's certificate; `credential_of` returns the `Authorization` value for these names, or
    None if they are unknown."""

    context: ssl.SSLContext
    names_of: Callable[[bytes], Names]
    credential_of: Callable[[Names], bytes | None]


class TlsHandshakes:
    def __init__(self, server: HttpServer, tls: ServerTls) -> None:
        self._server = server
        self._tls = tls
        self._running: dict[asyncio.Transport, str] = {}
        """The address of each connection whose handshake runs, in the order of arrival."""

    def protocol(self) -> asyncio.Protocol:
        return _EarlyHandshake(self)

    def begin(self, transport: asyncio.Transport, early_handshake: _EarlyHandshake) -> None:
        server, running = self._server, self._running
        peer = transport.get_extra_info("peername")
        host: str = peer[0] if peer else ""
        address = server.counted_as(host)
        running[transport] = address
        neighbours = [other for other, its_address in running.items() if its_address == address]
        if len(neighbours) > server.bounds.handshakes_per_address_max and not server.is_proxy(host):
            self._abort(neighbours[0])
        elif len(running) > server.bounds.handshakes_max:
            self._abort(next(iter(running)))
        task = server.loop.create_task(self._handshake(transport, early_handshake))
        server.tasks.add(task)
        task.add_done_callback(server.tasks.discard)

    def _abort(self, transport: asyncio.Transport) -> None:
        # Removed at once, not when the loop reports the loss: until then it would count against newcomers.
        del self._running[transport]
        transport.abort()

    def abort_all(self) -> None:
        for transport in tuple(self._running):
            transport.abort()

    async def _handshake(self, transport: asyncio.Transport, early_handshake: _EarlyHandshake) -> None:
        server, early = self._server, _EarlyData()
        if early_handshake.data:
            # TLS takes the transport over in the next statement, and reads from it only after this call.
            server.loop.call_soon(_feed, transport, early_handshake.data)
        encrypted: asyncio.Transport | None = None
        try:
            encrypted = await server.loop.start_tls(
                transport,
                early,
                self._tls.context,
                server_side=True,
                ssl_handshake_timeout=server.bounds.head_s_max,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except (OSError, asyncio.CancelledError):
            # A failed handshake cannot be answered, and a server that stops does not wait for one.
            transport.abort()
        finally:
            self._running.pop(transport, None)
        if encrypted is None or early.lost:
            return
        if server.stopping:
            encrypted.abort()
            return
        connection = HttpConnection(server, self._tls)
        encrypted.set_protocol(connection)
        connection.connection_made(encrypted)
        if early.data:
            connection.data_received(early.data)
        if early.ended:
            connection.eof_received()


class _EarlyData(asyncio.Protocol):
    """Receives bytes that follow the handshake, before an `HttpConnection` takes the connection over."""

    def __init__(self) -> None:
        self.data = b""
        self.ended = False
        self.lost = False

    def data_received(self, data: bytes) -> None:
        self.data += data

    def eof_received(self) -> None:
        self.ended = True

    def connection_lost(self, _: Exception | None) -> None:
        self.lost = True


class _EarlyHandshake(asyncio.Protocol):
    """Receives bytes that the loop reads before TLS takes the connection over."""

    def __init__(self, handshakes: TlsHandshakes) -> None:
        self.data = b""
        self._handshakes = handshakes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._handshakes.begin(cast("asyncio.Transport", transport), self)

    def data_received(self, data: bytes) -> None:
        self.data += data


def _feed(transport: asyncio.Transport, data: bytes) -> None:
    """Gives TLS, which is the transport's protocol now, the bytes that were read before."""
    tls = cast("asyncio.BufferedProtocol", transport.get_protocol())
    unread = memoryview(data)
    while unread:
        buffer = memoryview(tls.get_buffer(len(unread)))
        taken = min(len(buffer), len(unread))
        buffer[:taken] = unread[:taken]
        tls.buffer_updated(taken)
        unread = unread[taken:]
