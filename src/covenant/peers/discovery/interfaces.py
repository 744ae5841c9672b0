"""Which addresses this machine has on the interfaces that were chosen. Importing this module imports nothing."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from covenant.outbound.addresses import Address


def addresses_of(interfaces: Sequence[str]) -> list[Address]:
    """Of those named, by name or by one of their addresses; of all but the loopback if none is. Asks the system."""
    import ifaddr  # noqa: PLC0415  (needed where mDNS is on)

    found: set[Address] = set()
    for adapter in ifaddr.get_adapters():
        addresses = {ip_address(each.ip if isinstance(each.ip, str) else each.ip[0]) for each in adapter.ips}
        if not interfaces:
            found |= {each for each in addresses if not each.is_loopback}
        elif adapter.name in interfaces:
            found |= addresses
        else:
            found |= {each for each in addresses if str(each) in interfaces}
    return sorted(found, key=lambda each: (each.version, each.packed))
