"""The address guard: whether a URL may be called, and at which addresses.

Only http and https are called, on ports that speak it. A name is looked up once for each connection, and every address
that it leads to is checked: if one is not public, the name is refused, unless the operator allows it. The caller
connects to the addresses returned and never looks the name up again, so nothing changes between check and call.

The result of `vet` is good for one connection of `guarded_transport`, and that of `check` for one channel of
`grpc_transport`. To the caller all refused and unknown hosts look alike; `AddressRefused.detail` and the log tell the
operator which it was.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING, Final, Self

from covenant.outbound.call_errors import ALLOW_SETTING, AddressRefused, not_callable
from covenant.outbound.urls import (
    Address,
    Host,
    InvalidUrl,
    Location,
    Network,
    SpecialUse,
    host_text,
    read_authority,
    read_entry,
    read_url,
    special_use,
)

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver as Stub


# Ports registered for HTTP, and ports above 1024, where people put it. Below 1024 are the system's own services.
ORDINARY_PORTS: Final = (80, 443)
HIGH_PORT_MIN: Final = 1_024
# Ports above 1024 of other protocols, which a request could make run commands: those that web browsers
# refuse to call (the Fetch standard's list), Redis and Memcached.
CLOSED_PORTS: Final = frozenset(
    {
        1719,
        1720,
        1723,
        2049,
        3659,
        4045,
        4190,
        5060,
        5061,
        6000,
        6379,
        6566,
        *range(6665, 6670),
        6679,
        6697,
        10080,
        11211,
    }
)
THREADS_MAX: Final = 16
"""The most look-ups that run at once. Further ones wait, until their callers' time is up."""
_NO_SUCH_NAME: Final = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})
log = logging.getLogger(__name__)
ADDRESSES_TRIED_MAX: Final = 8
"""How many addresses are tried for one connection. All addresses of a name are checked."""
LOGGED_MAX: Final = 1_000
"""How many refused places are remembered, so that repeated calls do not fill the log."""
LOOPBACK: Final = (IPv4Address("127.0.0.1"), IPv6Address("::1"))


def port_is_open(port: int) -> bool:
    return port in ORDINARY_PORTS or (port >= HIGH_PORT_MIN and port not in CLOSED_PORTS)


class AllowList:
    """The places that the operator allows although they are not public: the setting `outbound.allow`.

    | entry                        | allows                                                                    |
    |------------------------------|---------------------------------------------------------------------------|
    | `hooks.corp.example`         | this name, at private and loopback addresses, on the ports that are open  |
    | `hooks.corp.example:25`      | the same on this port alone, which need not be an open one                |
    | `10.1.2.3`, `10.0.0.0/8`     | these addresses, under whatever name, on the ports that are open          |
    | `127.0.0.1:25`, `[::1]:25`   | this address, under whatever name, on this port alone                     |

    A name trusts its name servers with every private and loopback address, so only names that the operator's own name
    servers answer for belong here. Link-local addresses (a cloud's metadata) and the like need their address.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        """Raises ValueError, naming the entry that cannot be read."""
        self._names: set[tuple[Host, int | None]] = set()
        self._networks: list[tuple[Network, int | None]] = []
        for text in entries:
            try:
                entry = read_entry(text)
            except ValueError as error:
                raise ValueError(f"{text!r} is no host, host:port, address or network") from error
            if isinstance(entry.name_or_network, str):
                self._names.add((entry.name_or_network, entry.port))
            else:
                self._networks.append((entry.name_or_network, entry.port))

    def allowing(self, places: Iterable[str]) -> Self:
        """A copy that also allows these places (`host:port`), which the caller named on purpose."""
        wider = copy(self)
        wider._names = self._names.union(map(read_authority, places))  # noqa: SLF001  (one of us)
        return wider

    def opens(self, host: Host, port: int) -> bool:
        """Whether this port may be called at all, whatever the address."""
        if port_is_open(port) or (host, port) in self._names:
            return True
        return any(allowed == port for _, allowed in self._networks)

    def allows(self, host: Host, address: Address, port: int, use: SpecialUse | None) -> bool:
        """Whether this address, which `host` resolved to, may be called on this port."""
        if any(address in network and _fits(port, allowed) for network, allowed in self._networks):
            return True
        named = (host, port) in self._names or (port_is_open(port) and (host, None) in self._names)
        if use is None:
            return named or port_is_open(port)
        return named and use.by_name


def _fits(port: int, allowed: int | None) -> bool:
    return port_is_open(port) if allowed is None else port == allowed


Resolver = Callable[[str], Awaitable[Sequence[Address]]]


class Unresolved(Exception):
    """No address for this name. `transient` if a name server might answer otherwise soon."""

    def __init__(self, reason: str, *, transient: bool) -> None:
        super().__init__(reason)
        self.transient = transient


class SystemResolver:
    """The system's resolver, with its hosts file and search domains. Blocks a thread."""

    def __init__(self) -> None:
        # Threads of its own: the loop's threads are for the disk, and a slow name must not hold them up.
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="resolve")

    async def __call__(self, name: str) -> Sequence[Address]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, _ask_system, name)
        except socket.gaierror as error:
            raise Unresolved(str(error.strerror), transient=error.errno not in _NO_SUCH_NAME) from error
        except (OSError, UnicodeError) as error:
            raise Unresolved(str(error), transient=True) from error
        if not found:
            raise Unresolved("no address", transient=False)
        return found

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _ask_system(name: str) -> Sequence[Address]:
    rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(ip_address(address[0]) for *_, address in rows))


class NameServerResolver:
    def __init__(self, servers: Sequence[tuple[Address, int]], *, timeout_s: float) -> None:
        self._servers = servers
        self._timeout_s = timeout_s
        self._stub: Stub | None = None

    async def __call__(self, name: str) -> Sequence[Address]:
        stub = self._stub = self._stub or self._open()
        answers = await asyncio.gather(*(self._ask(stub, name, kind) for kind in ("AAAA", "A")))
        found = [address for answer in answers if not isinstance(answer, Unresolved) for address in answer]
        if found:
            return tuple(dict.fromkeys(found))
        failed = [answer for answer in answers if isinstance(answer, Unresolved)]
        transient = any(failure.transient for failure in failed)
        raise Unresolved("; ".join(dict.fromkeys(map(str, failed))) or "no address", transient=transient)

    async def _ask(self, stub: Stub, name: str, kind: str) -> Sequence[Address] | Unresolved:
        from dns.exception import DNSException  # noqa: PLC0415  (loaded with the first look-up)
        from dns.resolver import NXDOMAIN, NoAnswer  # noqa: PLC0415

        try:
            answer = await stub.resolve(f"{name}.", kind, search=False, lifetime=self._timeout_s)
            return tuple(ip_address(record.address) for record in answer)
        except (NXDOMAIN, NoAnswer) as error:
            return Unresolved(str(error), transient=False)
        except (DNSException, OSError, EOFError, ValueError) as error:
            return Unresolved(f"{type(error).__name__}: {error}", transient=True)

    def _open(self) -> Stub:
        from dns.asyncresolver import Resolver as Stub  # noqa: PLC0415  (loaded with the first look-up)
        from dns.nameserver import Do53Nameserver  # noqa: PLC0415

        # Not configured from files, so that the machine's name servers and search domains are not used.
        stub = Stub(configure=False)
        stub.nameservers = [Do53Nameserver(str(address), port) for address, port in self._servers]
        return stub

    def close(self) -> None:
        """Nothing is kept open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedTarget:
    """Where a call would go. `host` is for the Host header and TLS; `addresses` are where to connect, in this order."""

    scheme: str
    host: str
    port: int
    addresses: tuple[Address, ...]
    url: str


class AddressGuard:
    def __init__(self, allow: Sequence[str], *, resolver: Resolver, resolve_s: float = 5.0) -> None:
        """Raises ValueError if an entry of `allow` cannot be read."""
        self._allow = AllowList(allow)
        self._resolver = resolver
        self._resolve_s = resolve_s
        self._logged: dict[tuple[Host, int], None] = {}

    def allowing(self, places: Iterable[str]) -> AddressGuard:
        """A copy that also allows private addresses of these places (`host:port`), which the caller named."""
        wider = AddressGuard((), resolver=self._resolver, resolve_s=self._resolve_s)
        wider._allow = self._allow.allowing(places)
        return wider

    def read(self, url: str) -> Location:
        """The URL's parts, if its text alone does not refuse it."""
        try:
            location = read_url(url)
        except InvalidUrl as error:
            raise AddressRefused(f"this URL cannot be called: {error}") from error
        self._check_port(location.host, location.port)
        return location

    async def check(self, url: str) -> CheckedTarget:
        location = self.read(url)
        return CheckedTarget(
            scheme=location.scheme,
            host=host_text(location.host),
            port=location.port,
            addresses=await self.vet(location.host, location.port),
            url=location.url,
        )

    async def vet(self, host: Host, port: int) -> tuple[Address, ...]:
        """Where to connect for this host, now. Raises AddressRefused."""
        self._check_port(host, port)
        try:
            return await self._checked_addresses(host, port)
        except AddressRefused as refused:
            self._log(host, port, refused)
            raise

    async def _checked_addresses(self, host: Host, port: int) -> tuple[Address, ...]:
        addresses = await self._addresses(host)
        for address in addresses:
            use = special_use(address)
            if not self._allow.allows(host, address, port, use):
                raise _refused(host, port, address, use)
        return addresses[:ADDRESSES_TRIED_MAX]

    def _log(self, host: Host, port: int, refused: AddressRefused) -> None:
        if (host, port) in self._logged:
            return
        if len(self._logged) >= LOGGED_MAX:
            del self._logged[next(iter(self._logged))]
        self._logged[host, port] = None
        log.warning("outbound.refused", extra={"host": str(host), "port": port, "reason": refused.detail})

    def _check_port(self, host: Host, port: int) -> None:
        if not self._allow.opens(host, port):
            raise AddressRefused(
                f"calls to port {port} are not allowed; to allow them, the operator can add "
                f"{host_text(host)}:{port} to the setting {ALLOW_SETTING}"
            )

    async def _addresses(self, host: Host) -> tuple[Address, ...]:
        if not isinstance(host, str):
            return (host,)
        # RFC 6761: these names are the loopback, and no name server is asked about them.
        if host == "localhost" or host.endswith(".localhost"):
            return LOOPBACK
        try:
            async with asyncio.timeout(self._resolve_s):
                found = tuple(await self._resolver(host))
        except TimeoutError as error:
            detail = f"{host}: no answer from a name server within {self._resolve_s:g} s"
            raise not_callable(detail, transient=True) from error
        except Unresolved as error:
            raise not_callable(f"{host}: {error}", transient=error.transient) from error
        if not found:
            raise not_callable(f"{host}: no address")
        return found


def _refused(host: Host, port: int, address: Address, use: SpecialUse | None) -> AddressRefused:
    words = "public" if use is None else use.words
    leads = f"{host} leads to {address}" if isinstance(host, str) else str(address)
    name = host if isinstance(host, str) and (use is None or use.by_name) else host_text(address)
    entry = name if port_is_open(port) else f"{name}:{port}"
    return not_callable(f"{leads} ({words}), port {port}; to allow it, add {entry} to the setting {ALLOW_SETTING}")
