"""The section `[outbound]` of the settings: the addresses that the daemon may call, and the limits of calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from covenant.model.settings import HOUR_MS, MIB
from covenant.model.settings_field import Kind, setting, several, whole
from covenant.outbound.urls import DNS_PORT, read_address, read_entry

callees: Final = Kind(
    several(lambda item: bool(read_entry(item))),
    "host names and addresses, each with :port or without, and networks such as 10.0.0.0/8, separated by commas "
    "(a list in the file)",
)
name_servers: Final = Kind(
    several(lambda item: bool(read_address(item, DNS_PORT))),
    "addresses such as 192.0.2.1, 192.0.2.1:5353 or 2001:db8::1, separated by commas (a list in the file)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboundSettings:
    """Calls that the daemon makes itself. Only public addresses are called, on the ports that speak HTTP."""

    allow: tuple[str, ...] = setting(
        (),
        callees,
        "Further addresses that may be called: names (private and loopback addresses only), addresses or networks, "
        "with a port to open a closed port.",
    )
    name_servers: tuple[str, ...] = setting(
        (), name_servers, "Name servers to ask for addresses; none: the system's resolver, with its hosts file."
    )
    body_bytes_max: int = setting(4 * MIB, whole(1024, 1024 * MIB), "Largest answer, also after decompression.")
    total_ms: int = setting(30_000, whole(1, HOUR_MS), "Longest call, redirects included.")
    connect_ms: int = setting(5_000, whole(1, HOUR_MS), "Longest look-up and connection.")
    idle_ms: int = setting(15_000, whole(1, HOUR_MS), "Longest time without a byte from the other side.")
    redirects_max: int = setting(
        3, whole(0, 20), "Most redirects followed in one call, each checked like the first URL."
    )
    connections_max: int = setting(1_000, whole(1, 10_000), "Most calls at once; further calls wait.")
