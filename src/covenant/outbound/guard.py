"""The address guard: whether a URL may be called, and at which addresses.

Promises: only http and https are called, on ports that speak it; a name is looked up once for each connection, every
address it leads to is judged, and one that is not public refuses all of them, unless the operator allows it; the caller
connects to the addresses returned and never looks the name up again, so nothing can change between judging and calling.

`check` is for whoever takes a URL from somebody, to refuse it early. It is no permission: the name may lead elsewhere
when the call is made, so `vet` judges again for every connection (see `covenant.outbound.transport`).

To the caller all refused and unknown hosts look alike; `AddressRefused.detail` tells the operator which it was, and is
logged here, once for each place while it is remembered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Final

from covenant.outbound.addresses import Address, SpecialUse, special_use
from covenant.outbound.allowlist import AllowList, port_is_open
from covenant.outbound.failures import ALLOW_SETTING, AddressRefused, not_callable
from covenant.outbound.location import Host, Location, Unreadable, host_text, read_url
from covenant.outbound.resolving import Resolver, Unresolved

log = logging.getLogger(__name__)

PINS_MAX: Final = 8
"""Addresses tried for one connection. All that a name has are judged."""
LOGGED_MAX: Final = 1_000
"""Refused places remembered, so that whoever repeats one does not fill the log."""
LOOPBACK: Final = (IPv4Address("127.0.0.1"), IPv6Address("::1"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a call would go. `host` is for the Host header and TLS; `addresses` are where to connect, in this order."""

    scheme: str
    host: str
    port: int
    addresses: tuple[Address, ...]
    url: str
    """The URL in its one spelling."""


class AddressGuard:
    def __init__(self, allow: Sequence[str], *, resolver: Resolver, resolve_s: float = 5.0) -> None:
        """Raises ValueError if an entry of `allow` cannot be read."""
        self._allow = AllowList(allow)
        self._resolver = resolver
        self._resolve_s = resolve_s
        self._logged: dict[tuple[Host, int], None] = {}

    def meaning(self, places: Iterable[str]) -> AddressGuard:
        """The same, for whoever means these places (`host:port`): they are called at private addresses too."""
        meant = AddressGuard((), resolver=self._resolver, resolve_s=self._resolve_s)
        meant._allow = self._allow.meaning(places)
        return meant

    def read(self, url: str) -> Location:
        """The URL's parts, if its text alone does not refuse it."""
        try:
            location = read_url(url)
        except Unreadable as error:
            raise AddressRefused(f"this URL cannot be called: {error}") from error
        self._check_port(location.host, location.port)
        return location

    async def check(self, url: str) -> Target:
        """Raises AddressRefused."""
        location = self.read(url)
        return Target(
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
            return await self._judged(host, port)
        except AddressRefused as refused:
            self._log(host, port, refused)
            raise

    async def _judged(self, host: Host, port: int) -> tuple[Address, ...]:
        addresses = await self._addresses(host)
        for address in addresses:
            use = special_use(address)
            if not self._allow.allows(host, address, port, use):
                raise _refused(host, port, address, use)
        return addresses[:PINS_MAX]

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
                f"port {port} is not one that is called; if it should be, the operator can add "
                f"{host_text(host)}:{port} to the setting {ALLOW_SETTING}"
            )

    async def _addresses(self, host: Host) -> tuple[Address, ...]:
        if not isinstance(host, str):
            return (host,)
        # RFC 6761: these names are the loopback, and no name server is to be asked about them.
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
