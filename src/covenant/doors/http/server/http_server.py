"""The HTTP server: admits connections, closes idle ones for new ones, and stops.

One server belongs to one event loop; everything here runs on it. It keeps no more connections than its bounds allow:
for a new one, the connections that were silent longest are closed; if all of them are busy, the new one is refused.
Requests for health are answered in any case.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from email.utils import formatdate
from functools import partial
from heapq import nsmallest
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from operator import attrgetter
from typing import Final

from covenant.doors.http.server.bounds import HttpBounds
from covenant.doors.http.server.http_connection import HttpConnection
from covenant.doors.http.server.http_exchange import Door, HttpExchange, NewExchange, ResponseHeadCache
from covenant.doors.http.server.http_refusals import RefusalForm, plain_form
from covenant.doors.http.server.request_reader import Urls
from covenant.doors.http.server.tls_handshakes import ServerTls, TlsHandshakes

DEADLINE_CHECK_S: Final = 0.5
"""How often deadlines are checked; more often if a bound is short."""
STOP_TIMEOUT_S: Final = 1.0
"""How long a stop waits for written bytes to be sent, and for canceled tasks to end."""
CROWDED_LOG_S: Final = 60.0
"""The log reports at most once in this many seconds that there are too many connections."""

log = logging.getLogger(__name__)

Network = IPv4Network | IPv6Network


class HttpServer:
    def __init__(
        self,
        door: Door,
        bounds: HttpBounds,
        *,
        now_ms: Callable[[], int],
        refusal_form: RefusalForm = plain_form,
        exempt_paths: Collection[str] = (),
        proxies: Sequence[str] = (),
        tls: ServerTls | None = None,
        new_exchange: NewExchange = HttpExchange,
    ) -> None:
        """`exempt_paths` are answered even when the server is full. `proxies` are networks of proxies: many callers
        share such an address, so it has no bound of its own."""
        self.loop = asyncio.get_running_loop()
        self.door = door
        self.bounds = bounds
        self.refusal_form = refusal_form
        self.exempt_paths = frozenset(exempt_paths)
        self.heads = ResponseHeadCache()
        self.urls = Urls()
        self.new_exchange = new_exchange
        self.tasks: set[asyncio.Task[None]] = set()
        self._unsent: dict[HttpConnection, None] = {}
        """Connections with bytes that their clients do not read."""
        self._unsent_bytes = 0
        self._unsent_of_address: dict[str, int] = {}
        self.stopping = False
        self._proxies: tuple[Network, ...] = tuple(map(ip_network, proxies))
        self._now_ms = now_ms
        self._connections: dict[HttpConnection, None] = {}
        """In the order of their arrival."""
        self._of_address: dict[str, int] = {}
        self._reserved: dict[HttpConnection, None] = {}
        self._crowded_logged_s = -CROWDED_LOG_S
        self._empty = asyncio.Event()
        self._listener: asyncio.Server | None = None
        self._check_timer: asyncio.TimerHandle | None = None
        self._check_s = min(DEADLINE_CHECK_S, _shortest_s(bounds) / 4)
        self._handshakes = TlsHandshakes(self, tls) if tls is not None else None
        self._protocol: Callable[[], asyncio.BaseProtocol] = (
            partial(HttpConnection, self) if self._handshakes is None else self._handshakes.protocol
        )

    async def start(self, listener: socket.socket) -> None:
        """Listens on a bound socket."""
        self._check_deadlines()
        self._listener = await self.loop.create_server(self._protocol, sock=listener, backlog=self.bounds.backlog)

    def adopt(self, accepted: socket.socket) -> asyncio.Task[None]:
        """Serves a connection that other code has accepted from the listening socket. Called on the loop."""
        adopting = self.loop.create_task(self._adopt(accepted))
        self.tasks.add(adopting)
        adopting.add_done_callback(self.tasks.discard)
        return adopting

    async def _adopt(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        if self.stopping:
            accepted.close()
            return
        with suppress(OSError):  # the client has left
            await self.loop.connect_accepted_socket(self._protocol, accepted)

    async def stop(self, grace_s: float) -> None:
        """Stops listening, and gives running requests this much time. Requests that still run then are answered 503."""
        self.stopping = True
        if self._listener is not None:
            self._listener.close()
        if self._handshakes is not None:
            self._handshakes.abort_all()
        for connection in tuple(self._connections):
            connection.stop()
        await self._until_empty(grace_s)
        for connection in tuple(self._connections):
            connection.cut_off()
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=STOP_TIMEOUT_S)
        await self._until_empty(STOP_TIMEOUT_S)
        for connection in tuple(self._connections):
            connection.transport.abort()
        if self._check_timer is not None:
            self._check_timer.cancel()

    async def _until_empty(self, seconds: float) -> None:
        if not self._connections:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return

    # Admission.

    def admit(self, connection: HttpConnection) -> None:
        """Counts a new connection and makes room for it; without room, the connection is kept only to be refused."""
        bounds = self.bounds
        host = connection.client[0] if connection.client is not None else ""
        connection.address = address = self.counted_as(host)
        of_address = self._of_address[address] = self._of_address.get(address, 0) + 1
        self._connections[connection] = None
        if of_address > bounds.connections_per_address_max and not self.is_proxy(host):
            room = self._make_room(connection, bounds.connections_per_address_max, address)
        else:
            taken = len(self._connections) - len(self._reserved)
            room = taken <= bounds.connections_max or self._make_room(connection, bounds.connections_max)
        if not room:
            self._reserve(connection)

    def _make_room(self, newcomer: HttpConnection, most: int, address: str | None = None) -> bool:
        """Closes the connections that were silent longest, of this address or of all. False if every one is busy."""
        silent = [
            each
            for each in self._connections
            if each is not newcomer
            and (address is None or each.address == address)
            and each.waits_for_client
            and each not in self._reserved
        ]
        # Searching all of them is slow, so a few more than needed are closed at a time.
        longest = nsmallest(most // 64 + 1, silent, key=attrgetter("silent_since_s"))
        self._log_crowded(closed=len(longest))
        for each in longest:
            each.close()
            self.forget(each)
        return bool(longest)

    def _reserve(self, connection: HttpConnection) -> None:
        connection.reserved = True
        self._reserved[connection] = None
        if len(self._reserved) > self.bounds.connections_reserved_max:
            oldest = next(iter(self._reserved))
            self.forget(oldest)
            oldest.transport.abort()

    def _log_crowded(self, *, closed: int) -> None:
        if self.loop.time() - self._crowded_logged_s >= CROWDED_LOG_S:
            self._crowded_logged_s = self.loop.time()
            count = len(self._connections)
            log.warning("http.crowded", extra={"connections": count, "closed": closed, "look": "http.connections_max"})

    @staticmethod
    def counted_as(host: str) -> str:
        """The address to count under: an IPv4 address, or an IPv6 network of 64 bits, which is one caller's."""
        if ":" not in host:
            return host
        address = IPv6Address(host.partition("%")[0])
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(IPv6Network((int(address) >> 64 << 64, 64)))

    def is_proxy(self, host: str) -> bool:
        if not self._proxies or not host:  # a client that has left at once has no address any more
            return False
        address = ip_address(host)
        mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        return any((mapped or address) in network for network in self._proxies)

    def forget(self, connection: HttpConnection) -> None:
        """Does nothing for a connection that is forgotten already."""
        if connection not in self._connections:
            return
        del self._connections[connection]
        self._reserved.pop(connection, None)
        remaining = self._of_address[connection.address] - 1
        if remaining:
            self._of_address[connection.address] = remaining
        else:
            del self._of_address[connection.address]
        if self.stopping and not self._connections:
            self._empty.set()

    # Unread answers.

    def count_unsent(self, connection: HttpConnection, size: int) -> None:
        """Notes how many bytes of its answers a client has not read. Above the bounds a connection is aborted."""
        address, before = connection.address, connection.unsent_bytes
        if size == before:
            return
        connection.unsent_bytes = size
        self._unsent_bytes += size - before
        of_address = self._unsent_of_address.pop(address, 0) + size - before
        if of_address:
            self._unsent_of_address[address] = of_address
        if not size:
            self._unsent.pop(connection, None)
            return
        self._unsent[connection] = None
        host = connection.client[0] if connection.client is not None else ""
        if of_address > self.bounds.unsent_bytes_per_address_max and not self.is_proxy(host):
            neighbours = [each for each in self._unsent if each.address == address]
            if len(neighbours) > 1:  # one large answer alone may go out
                self._cut_off_unread(neighbours)
        if self._unsent_bytes > self.bounds.unsent_bytes_max:
            self._cut_off_unread(list(self._unsent))

    def _cut_off_unread(self, connections: list[HttpConnection]) -> None:
        """Aborts the connection whose client has read nothing for longest."""
        longest = min(connections, key=attrgetter("unsent_since_s"))
        log.warning("http.unread", extra={"address": longest.address, "bytes": longest.unsent_bytes})
        self.count_unsent(longest, 0)
        longest.transport.abort()

    # Deadlines.

    def _check_deadlines(self) -> None:
        now_s = self.loop.time()
        self.heads.set_date(formatdate(self._now_ms() / 1000, usegmt=True).encode())
        for connection in [each for each in self._connections if each.deadline_s < now_s]:
            connection.expire()
        for connection in tuple(self._unsent):
            connection.check_unsent(now_s)
        self._check_timer = self.loop.call_later(self._check_s, self._check_deadlines)


def _shortest_s(bounds: HttpBounds) -> float:
    return min(
        bounds.head_s_max, bounds.body_idle_s_max, bounds.keep_alive_s_max, bounds.unread_s_max, bounds.linger_s_max
    )
