"""Names to addresses: asking the system, or the name servers that the operator chose.

A resolver returns every address that it was told, judged by nobody, or raises `Unresolved`. It never returns nothing.
The guard bounds how long it waits.

The system's resolver knows the machine's hosts file and search domains, but blocks a thread for as long as the system
has patience. Name servers are asked without a thread, for absolute names only, and a look-up that was given up leaves
nothing behind.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from covenant.outbound.addresses import Address

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver as Stub

Resolver = Callable[[str], Awaitable[Sequence[Address]]]

THREADS_MAX: Final = 16
"""Look-ups that the system does at once. More of them wait, and are given up by whoever asked when their time is up."""
DNS_PORT: Final = 53

_NO_SUCH_NAME: Final = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})


class Unresolved(Exception):
    """No address for this name. `transient` if a name server might answer otherwise soon."""

    def __init__(self, reason: str, *, transient: bool) -> None:
        super().__init__(reason)
        self.transient = transient


class SystemResolver:
    """What every program on this machine would be told."""

    def __init__(self) -> None:
        # Threads of its own: those of the loop are for the disk, and a slow name must not keep anybody from it.
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
    """What these name servers say: `address` or `address:port`, asked in turn."""

    def __init__(self, servers: Sequence[tuple[Address, int]], *, patience_s: float) -> None:
        self._servers = servers
        self._patience_s = patience_s
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
            answer = await stub.resolve(f"{name}.", kind, search=False, lifetime=self._patience_s)
            return tuple(ip_address(record.address) for record in answer)
        except (NXDOMAIN, NoAnswer) as error:
            return Unresolved(str(error), transient=False)
        except (DNSException, OSError, EOFError, ValueError) as error:
            return Unresolved(f"{type(error).__name__}: {error}", transient=True)

    def _open(self) -> Stub:
        from dns.asyncresolver import Resolver as Stub  # noqa: PLC0415  (loaded with the first look-up)
        from dns.nameserver import Do53Nameserver  # noqa: PLC0415

        # Not configured from files: neither the machine's name servers nor its search domains are meant here.
        stub = Stub(configure=False)
        stub.nameservers = [Do53Nameserver(str(address), port) for address, port in self._servers]
        return stub

    def close(self) -> None:
        """Nothing is kept open."""
