"""TLS: connections that are not greeted yet are bounded too, in number, for each address and in time.

A connection counts as one of the server's when its handshake is done. Before that it is one of the handshakes: of too
many, the oldest is cut off.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Network
from typing import TYPE_CHECKING, Final, cast

from covenant.doors.http.server.http_connection import HttpConnection

if TYPE_CHECKING:
    from covenant.doors.http.server.http_server import HttpServer

SHUTDOWN_S: Final = 2.0
"""How long a client has to answer the end of TLS."""

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ServerTls:
    """`names_of` reads a client's certificate; `credential_of` is who these names are, as an `Authorization` header
    would say it, and None for somebody unknown."""

    context: ssl.SSLContext
    names_of: Callable[[bytes], Names]
    credential_of: Callable[[Names], bytes | None]


class TlsHandshakes:
    def __init__(self, server: HttpServer, tls: ServerTls) -> None:
        self._server = server
        self._tls = tls
        self._under_way: dict[asyncio.Transport, str] = {}
        """Each with its address, in the order in which they came."""

    def protocol(self) -> asyncio.Protocol:
        return _Hello(self)

    def begin(self, transport: asyncio.Transport, hello: _Hello) -> None:
        server, under_way = self._server, self._under_way
        peer = transport.get_extra_info("peername")
        host: str = peer[0] if peer else ""
        address = counted_as(host)
        under_way[transport] = address
        neighbours = [each for each, of in under_way.items() if of == address]
        if len(neighbours) > server.bounds.handshakes_per_address_max and not server.is_proxy(host):
            neighbours[0].abort()
        elif len(under_way) > server.bounds.handshakes_max:
            next(iter(under_way)).abort()
        task = server.loop.create_task(self._greet(transport, hello))
        server.tasks.add(task)
        task.add_done_callback(server.tasks.discard)

    def abort_all(self) -> None:
        for transport in tuple(self._under_way):
            transport.abort()

    async def _greet(self, transport: asyncio.Transport, hello: _Hello) -> None:
        server, early = self._server, _EarlyData()
        if hello.data:
            # TLS takes the transport over in the next line, and reads from it only after this call.
            server.loop.call_soon(_feed, transport, hello.data)
        greeted: asyncio.Transport | None = None
        try:
            greeted = await server.loop.start_tls(
                transport,
                early,
                self._tls.context,
                server_side=True,
                ssl_handshake_timeout=server.bounds.head_s_max,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except (OSError, asyncio.CancelledError):
            # Whatever a client does wrong here, there is nobody to tell; and a server that stops waits for nobody.
            transport.abort()
        finally:
            self._under_way.pop(transport, None)
        if greeted is None or early.lost:
            return
        if server.stopping:
            greeted.abort()
            return
        connection = HttpConnection(server, self._tls)
        greeted.set_protocol(connection)
        connection.connection_made(greeted)
        if early.data:
            connection.data_received(early.data)
        if early.ended:
            connection.eof_received()


class _EarlyData(asyncio.Protocol):
    """What a client sends right behind its handshake, before the connection is one of the server's."""

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


class _Hello(asyncio.Protocol):
    """What a client sends before TLS has taken its connection over: a loop may read before it is told not to."""

    def __init__(self, handshakes: TlsHandshakes) -> None:
        self.data = b""
        self._handshakes = handshakes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._handshakes.begin(cast("asyncio.Transport", transport), self)

    def data_received(self, data: bytes) -> None:
        self.data += data


def _feed(transport: asyncio.Transport, data: bytes) -> None:
    """Give TLS, which is the transport's protocol now, what was read before."""
    tls = cast("asyncio.BufferedProtocol", transport.get_protocol())
    unread = memoryview(data)
    while unread:
        buffer = memoryview(tls.get_buffer(len(unread)))
        taken = min(len(buffer), len(unread))
        buffer[:taken] = unread[:taken]
        tls.buffer_updated(taken)
        unread = unread[taken:]


def counted_as(host: str) -> str:
    """An IPv4 address is itself. Of an IPv6 address, one caller has a whole network of 64 bits."""
    if ":" not in host:
        return host
    address = IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Network((int(address) >> 64 << 64, 64)))
