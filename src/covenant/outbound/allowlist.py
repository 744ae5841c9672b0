"""What the operator allows although it is not public: the setting `outbound.allow`, read.

| entry                        | allows                                                                      |
|------------------------------|-----------------------------------------------------------------------------|
| `hooks.corp.example`         | this name, at private and loopback addresses, on the ports that are open    |
| `hooks.corp.example:25`      | the same on this port alone, which need not be an open one                  |
| `10.1.2.3`, `10.0.0.0/8`     | these addresses, under whatever name, on the ports that are open            |
| `127.0.0.1:25`, `[::1]:25`   | this address, under whatever name, on this port alone                       |

A name trusts whoever answers for it in DNS with every private and loopback address, so only names that the operator's
own name servers answer for belong here. Link-local addresses (a cloud's metadata) and the like need their address.

Besides, somebody may have named a place, on a command line or in `a2a_agents.json`: it is called where it is, at
private and loopback addresses too. Naming one of the addresses that nobody means to call is not enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Final, Self

from covenant.outbound.addresses import Address, Network, SpecialUse
from covenant.outbound.location import Host, read_authority

# What speaks HTTP by registration, and where people put it; below 1024 live the services of the system itself.
ORDINARY_PORTS: Final = (80, 443)
HIGH_PORT_MIN: Final = 1_024
# Ports above that speak something else, which can be talked into commands by a request: those that web browsers
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


@dataclass(frozen=True, slots=True)
class Allowed:
    """One entry. `port` is None for every open port."""

    what: str | Network
    port: int | None = None


def read_entry(text: str) -> Allowed:
    """Raises ValueError if it is no name, address or network."""
    if "/" in text or (text.count(":") > 1 and not text.startswith("[")):
        return Allowed(ip_network(text))
    host, port = read_authority(text)
    return Allowed(ip_network(host) if isinstance(host, IPv4Address | IPv6Address) else host, port)


def port_is_open(port: int) -> bool:
    return port in ORDINARY_PORTS or (port >= HIGH_PORT_MIN and port not in CLOSED_PORTS)


class AllowList:
    def __init__(self, entries: Iterable[str]) -> None:
        """Raises ValueError, naming the entry that cannot be read."""
        self._names: set[tuple[Host, int | None]] = set()
        self._networks: list[tuple[Network, int | None]] = []
        for text in entries:
            try:
                entry = read_entry(text)
            except ValueError as error:
                raise ValueError(f"{text!r} is no host, host:port, address or network") from error
            if isinstance(entry.what, str):
                self._names.add((entry.what, entry.port))
            else:
                self._networks.append((entry.what, entry.port))

    def meaning(self, places: Iterable[str]) -> Self:
        """The same, for whoever means these places (`host:port`), and no others."""
        wider = copy(self)
        wider._names = self._names.union(map(read_authority, places))  # noqa: SLF001  (one of us)
        return wider

    def opens(self, host: Host, port: int) -> bool:
        """Whether this port may be called at all; where it leads is another question."""
        if port_is_open(port) or (host, port) in self._names:
            return True
        return any(allowed == port for _, allowed in self._networks)

    def allows(self, host: Host, address: Address, port: int, use: SpecialUse | None) -> bool:
        """Whether this address, which `host` stands for, may be called on this port."""
        if any(address in network and _fits(port, allowed) for network, allowed in self._networks):
            return True
        named = (host, port) in self._names or (port_is_open(port) and (host, None) in self._names)
        if use is None:
            return named or port_is_open(port)
        return named and use.by_name


def _fits(port: int, allowed: int | None) -> bool:
    return port_is_open(port) if allowed is None else port == allowed
