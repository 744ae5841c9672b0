"""What the services of peers share: the settings of `[peers]`, the ledger, the keys and the connections."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from covenant.outbound.address_guard import DNS_PORT
from covenant.outbound.urls import InvalidUrl, read_address, read_host, read_url

if TYPE_CHECKING:
    from covenant.ledger.contract.ledger import Ledger
    from covenant.model.ids import AgentId
    from covenant.model.peers.delegation import DelegationKey
    from covenant.peers.directory.instance_keys import InstanceKeys
    from covenant.peers.transport.peer_client import PeerConnections

Redaction = Literal["redact", "block", "warn", "off"]
Transcripts = Literal["full", "root"]


class PeerSettings(msgspec.Struct, frozen=True, kw_only=True):
    name: str = ""
    """What others call us, unless they choose otherwise. Empty: the end of our id."""
    allow: tuple[str, ...] = ()
    """Ids or names of those who may delegate to us. Empty: all who are trusted enough."""
    deny: tuple[str, ...] = ()
    require_token: bool = True
    """An offer must carry a token that we gave."""
    profiles: tuple[str, ...] = ()
    """The agents that peers may delegate to. Empty: all of the first tenant's."""

    # What others may have of us
    slots: int = 5
    """Delegations from peers that may be at work at once."""
    slots_per_peer: int = 5
    offers_per_min: int = 60
    """From one peer; a trusted one may make ten times as many."""
    messages_per_min: int = 1_200
    budget_default: int = 50_000
    """Tokens, where neither the offer nor the agent says."""
    budget_max: int = 200_000
    budget_min: int = 1
    """An offer of less is not worth beginning."""
    depth_max: int = 3
    timeout_ms_max: int = 600_000
    status_interval_ms: int = 5_000
    token_life_ms: int = 24 * 3_600_000
    """An offer waits with its token for a peer that is away."""
    capabilities_life_ms: int = 300_000

    # What we ask of others
    timeout_ms: int = 300_000
    silence_ms: int = 60_000
    """A provider that has not been heard of for this long, and for three of its status intervals, is lost."""
    force_lost: bool = False
    """Give a lost delegation up by itself; otherwise it waits for an operator."""
    lost_after_ms: int = 600_000
    """How long it waits for that, with `force_lost`."""

    # How messages travel
    poll: tuple[str, ...] = ()
    """Ids or names of peers from whom we fetch, because they cannot reach us. `*`: all that have an address."""
    poll_wait_ms: int = 25_000
    deliveries_per_peer: int = 4
    retry_first_ms: int = 500
    retry_max_ms: int = 60_000

    # What leaves
    redaction: Redaction = "redact"
    transcripts: Transcripts = "full"
    """`root`: the conversation stays here, and only its root and its proof leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerContext:
    """What all services of peers are made with."""

    ledger: Ledger
    keyring: InstanceKeys
    connections: PeerConnections
    settings: PeerSettings
    us: AgentId
    """Who is in the audit for what this instance does by itself."""
    depth_max: int
    """Of calls in this instance."""
    chance: Callable[[], float]
    """For jitter: from 0 to 1."""
    in_flight: list[Callable[[DelegationKey], int]] = field(default_factory=list)
    """Each says up to which number a peer may have the messages of a delegation; the transport adds them."""


class PeerService:
    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self._ledger = context.ledger
        self._keyring = context.keyring
        self._connections = context.connections
        self._settings = context.settings
        self._us = context.us
        self._now_ms = context.ledger.now_ms
        self._monotonic_ms = context.ledger.clock.monotonic_ms


STATIC_MAX: Final = 100
DOMAINS_MAX: Final = 10
SERVERS_MAX: Final = 10
INTERFACES_MAX: Final = 50
NAME_CHARS_MAX: Final = 200

_INTERFACE: Final = re.compile(r"[0-9A-Za-z_.:@-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverySettings:
    """Raises ValueError, naming the setting, if one cannot be read. Everything is off unless it is given."""

    static: tuple[str, ...] = ()
    """Where other instances are: `https://host` or `http://host:port`, each asked for its keys."""
    mdns: bool = False
    """Say on the local network that we are here, and hear who else is."""
    mdns_interfaces: tuple[str, ...] = ()
    """Names of network interfaces, or addresses of theirs; none for all but the loopback."""
    dns_domains: tuple[str, ...] = ()
    """Domains whose DNS lists instances under `_friday-a2a._tcp`."""
    dns_servers: tuple[str, ...] = ()
    """Name servers to ask for them, `address` or `address:port`; none for those of the system."""
    name: str = ""
    """How we are called in announcements, as far as there is room; the end of our id follows."""

    def __post_init__(self) -> None:
        _check("static", self.static, STATIC_MAX, root_of)
        _check("mdns_interfaces", self.mdns_interfaces, INTERFACES_MAX, _read_interface)
        _check("dns_domains", self.dns_domains, DOMAINS_MAX, _read_domain)
        _check("dns_servers", self.dns_servers, SERVERS_MAX, lambda text: read_address(text, DNS_PORT))
        if len(self.name) > NAME_CHARS_MAX or not self.name.isprintable():
            raise ValueError(f"name has more than {NAME_CHARS_MAX} characters, or some that cannot be printed")


def root_of(url: str) -> str:
    """The one spelling of where an instance is, without a final slash. Raises InvalidUrl."""
    location = read_url(url)
    if "?" in location.target:
        raise InvalidUrl("it has a query")
    return location.url.rstrip("/")


def _check(setting: str, entries: tuple[str, ...], entries_max: int, read: Callable[[str], object]) -> None:
    if len(entries) > entries_max:
        raise ValueError(f"{setting} has more than {entries_max} entries")
    for text in entries:
        try:
            read(text)
        except ValueError as error:
            raise ValueError(f"{setting}: {text!r} cannot be used: {error}") from error


def _read_interface(text: str) -> None:
    if not _INTERFACE.fullmatch(text):
        raise InvalidUrl("it is neither the name of an interface nor an address")


def _read_domain(text: str) -> None:
    if not isinstance(read_host(text), str):
        raise InvalidUrl("it is an address, not a domain")
    if text.rstrip(".").endswith(".local") or text.rstrip(".") == "local":
        raise InvalidUrl("names under local are for mDNS")
