"""Which IP addresses lead out into the public internet, and what the others are.

`special_use` is None for a public address. The tables are our own, after IANA's registries: the standard library's
differ between releases of Python. For IPv6 only what is handed out as global unicast (2000::/3) can be public at all.

Everything that carries an IPv4 address inside is refused as what it is, whatever it carries: nothing on today's
internet needs it. The exception is NAT64's well-known prefix, by which hosts without IPv4 reach all of it: there the
address inside is judged.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from typing import Final, NamedTuple

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


class SpecialUse(NamedTuple):
    """What an address is for, and whether allowing a name is enough to call it there.

    A name is only as trustworthy as whoever answers for it, so the addresses that are never meant when somebody names a
    host (a cloud's metadata above all) have to be allowed as addresses.
    """

    network: Network
    words: str
    by_name: bool = False


def _table(*rows: tuple[str, str, bool]) -> tuple[SpecialUse, ...]:
    return tuple(SpecialUse(ip_network(network), words, by_name) for network, words, by_name in rows)


# The first row that holds an address names it, so single addresses stand before the networks around them.
_SPECIAL_V4: Final = _table(
    ("100.100.100.200/32", "a cloud's metadata", False),
    ("168.63.129.16/32", "a cloud's metadata", False),
    ("0.0.0.0/8", "this host", False),
    ("10.0.0.0/8", "private", True),
    ("100.64.0.0/10", "shared by carriers", True),
    ("127.0.0.0/8", "loopback", True),
    ("169.254.0.0/16", "link-local, a cloud's metadata", False),
    ("172.16.0.0/12", "private", True),
    ("192.0.0.0/24", "reserved for protocols", False),
    ("192.0.2.0/24", "documentation", False),
    ("192.88.99.0/24", "6to4 relays", False),
    ("192.168.0.0/16", "private", True),
    ("198.18.0.0/15", "benchmarks", False),
    ("198.51.100.0/24", "documentation", False),
    ("203.0.113.0/24", "documentation", False),
    ("224.0.0.0/4", "multicast", False),
    ("255.255.255.255/32", "broadcast", False),
    ("240.0.0.0/4", "reserved", False),
)
_SPECIAL_V6: Final = _table(
    ("fd00:ec2::/32", "a cloud's metadata", False),
    ("::/128", "unspecified", False),
    ("::1/128", "loopback", True),
    ("::ffff:0:0/96", "IPv4 inside IPv6 (mapped)", False),
    ("::/96", "IPv4 inside IPv6 (compatible)", False),
    ("64:ff9b:1::/48", "IPv4 inside IPv6 (local NAT64)", False),
    ("fc00::/7", "private (unique local)", True),
    ("fe80::/10", "link-local", False),
    ("fec0::/10", "site-local", False),
    ("ff00::/8", "multicast", False),
    ("2001::/32", "IPv4 inside IPv6 (Teredo)", False),
    ("2001::/23", "reserved for protocols", False),
    ("2001:db8::/32", "documentation", False),
    ("2002::/16", "IPv4 inside IPv6 (6to4)", False),
    ("3fff::/20", "documentation", False),
)
_GLOBAL_V6: Final = IPv6Network("2000::/3")
_NAT64: Final = IPv6Network("64:ff9b::/96")
_NOT_GLOBAL: Final = SpecialUse(IPv6Network("::/0"), "not global unicast")


def special_use(address: Address) -> SpecialUse | None:
    """What this address is for, or None if it is public."""
    if isinstance(address, IPv4Address):
        return _first(_SPECIAL_V4, address)
    if address in _NAT64:
        inside = special_use(IPv4Address(int(address) & 0xFFFF_FFFF))
        return inside and SpecialUse(_NAT64, f"NAT64 of {inside.words}")
    return _first(_SPECIAL_V6, address) or (None if address in _GLOBAL_V6 else _NOT_GLOBAL)


def _first(table: tuple[SpecialUse, ...], address: Address) -> SpecialUse | None:
    return next((row for row in table if address in row.network), None)
