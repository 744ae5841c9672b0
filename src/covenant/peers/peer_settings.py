"""What the services of peers share: the settings of `[peers]`, the ledger, the keys and the connections."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from covenant.model.settings_field import Kind, choice, line, peer_places, setting, several, switch, whole, words
from covenant.outbound.outbound_settings import name_servers
from covenant.outbound.urls import InvalidUrl, read_host, read_url

if TYPE_CHECKING:
    from covenant.exchange.stored_files import StoredFiles
    from covenant.ledger.contract.ledger import DelegationLedger
    from covenant.model.ids import AgentId
    from covenant.model.peers.delegation import DelegationKey, Peer
    from covenant.model.peers.instance import InstanceId
    from covenant.peers.directory.instance_keys import InstanceKeys
    from covenant.peers.transport.peer_http import PeerConnections

HOUR_MS: Final = 3_600_000

_INTERFACE: Final = re.compile(r"[0-9A-Za-z_.:@-]{1,64}").fullmatch


def _is_domain(text: str) -> bool:
    """Names under `local` are for mDNS, and an address is no domain."""
    return isinstance(read_host(text), str) and not f".{text}".rstrip(".").endswith(".local")


interfaces: Final = Kind(
    several(lambda text: _INTERFACE(text) is not None, 50),
    "at most 50 names and addresses, separated by commas (a list in the file)",
)
domains: Final = Kind(
    several(_is_domain, 10), "at most 10 domains, none under local, separated by commas (a list in the file)"
)


def _read_listener(raw: object) -> str:
    text = raw.strip() if isinstance(raw, str) else ""
    if isinstance(raw, str) and not text:
        return ""
    host, colon, port = text.rpartition(":")
    if (
        not colon
        or not port.isdecimal()
        or len(port) > 5
        or int(port) > 65_535
        or (":" in host) != host.startswith("[")
    ):
        raise ValueError
    at = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    return f"[{at}]:{int(port)}" if at.version == 6 else f"{at}:{int(port)}"


listener_place: Final = Kind(
    _read_listener, "an IP address and a port, such as 0.0.0.0:8443 or [::]:8443; empty for none"
)

_AMOUNT: Final = re.compile(r"[A-Za-z0-9_.\-]{1,64}=[0-9]{1,9}").fullmatch
amounts: Final = Kind(
    several(lambda text: _AMOUNT(text) is not None, 100),
    "at most 100 amounts such as researcher=50000, separated by commas (a list in the file)",
)


def amounts_of(entries: tuple[str, ...]) -> dict[str, int]:
    """By the name of a profile; the last one counts."""
    return {name: int(amount) for name, _, amount in (each.partition("=") for each in entries)}


Redaction = Literal["redact", "block", "warn", "off"]
Transcripts = Literal["full", "root"]
SuiteChoice = Literal["hybrid", "classic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """Other instances: who they are, what they may have of us and we of them, how messages travel."""

    enabled: bool = setting(False, switch, "Whether this instance and other instances can delegate to each other.")
    name: str = setting("", line, "The name that this instance gives itself to others; empty: the end of its id.")
    static: tuple[str, ...] = setting(
        (), peer_places, "Instances that are peers: https://host, frd1_…@https://host or name=https://host."
    )
    listen: str = setting(
        "",
        listener_place,
        "Where another listener serves the three routes for peers, and nothing else; empty: HTTP alone serves them.",
    )
    mdns: bool = setting(
        False,
        switch,
        "Whether this instance announces itself on the local network and hears the announcements of others.",
    )
    mdns_interfaces: tuple[str, ...] = setting(
        (), interfaces, "Names or addresses of the network interfaces for mDNS; none: all but the loopback."
    )
    dns_domains: tuple[str, ...] = setting((), domains, "Domains whose DNS lists instances under _friday-a2a._tcp.")
    dns_servers: tuple[str, ...] = setting(
        (), name_servers, "Name servers for these domains, as address or address:port; none: the system's."
    )
    allow: tuple[str, ...] = setting(
        (), words, "Ids or names of the peers that may delegate to this instance; none: all that are trusted enough."
    )
    deny: tuple[str, ...] = setting((), words, "Ids or names of peers that may not delegate to this instance.")
    require_token: bool = setting(True, switch, "Whether an offer must carry a token that this instance gave.")
    profiles: tuple[str, ...] = setting(
        (), words, "The agents that peers may delegate to; none: all that work here, but `index`."
    )
    slots: int = setting(5, whole(0, 10_000), "Most delegations from peers at work at once.")
    slots_per_peer: int = setting(5, whole(0, 10_000), "Most delegations from one peer at work at once.")
    offers_per_min: int = setting(
        600, whole(1, 1_000_000), "Most offers from one peer in a minute; ten times as many from a trusted peer."
    )
    offers_per_day: int = setting(
        0, whole(0, 1_000_000_000), "Most offers of one peer that are accepted in a day (UTC); 0: as many as come."
    )
    tokens_per_day: int = setting(
        0,
        whole(0, 1_000_000_000_000),
        "Most tokens that the delegations of one peer may use in a day (UTC); 0: as many as they use.",
    )
    messages_per_min: int = setting(
        1_200,
        whole(10, 1_000_000),
        "Most messages from one peer in a minute (429 above it); ten times as many from a trusted peer.",
    )
    budget_default: int = setting(50_000, whole(1, 500_000), "Tokens of a delegation that names no number.")
    budget_max: int = setting(200_000, whole(1, 500_000), "Most tokens of one delegation.")
    profile_budgets: tuple[str, ...] = setting(
        (), amounts, "Most tokens of one delegation to a profile, as profile=tokens; others have `budget_max`."
    )
    prices: tuple[str, ...] = setting(
        (),
        amounts,
        "What 1,000 tokens of a profile cost, as profile=price, in a unit that you and your peers agree on. "
        "Peers that have a choice take the cheaper one.",
    )
    budget_min: int = setting(1, whole(1, 500_000), "An offer of fewer tokens is rejected.")
    depth_max: int = setting(3, whole(0, 10), "How often a peer's delegation may be delegated further.")
    timeout_ms_max: int = setting(600_000, whole(1_000, 600_000), "Longest work on a delegation from a peer.")
    status_interval_ms: int = setting(
        5_000, whole(100, 600_000), "Pause between two status messages to a peer about its delegation."
    )
    token_life_ms: int = setting(
        24 * HOUR_MS,
        whole(1_000, 30 * 24 * HOUR_MS),
        "How long a token that this instance issues is valid. An offer that waits longer for this "
        "instance is rejected.",
    )
    capabilities_life_ms: int = setting(
        300_000,
        whole(1_000, 24 * HOUR_MS),
        "How long peers may rely on this instance's answer about its load and agents.",
    )
    timeout_ms: int = setting(300_000, whole(1_000, 600_000), "Longest wait for a delegation that names no time.")
    silence_ms: int = setting(60_000, whole(100, 24 * HOUR_MS), "Silence after which a provider counts as lost.")
    force_lost: bool = setting(
        False,
        switch,
        "Whether the daemon gives up the delegations of a lost provider by itself (`provider_lost`); "
        "otherwise the operator does.",
    )
    lost_after_ms: int = setting(
        600_000,
        whole(100, 24 * HOUR_MS),
        "How long the daemon waits for a lost provider before it gives up its delegations.",
    )
    poll: tuple[str, ...] = setting(
        (), words, "Ids or names of peers to fetch messages from, because they cannot call here; `*`: all."
    )
    poll_wait_ms: int = setting(25_000, whole(0, 30_000), "How long a fetch waits for a message.")
    deliveries_per_peer: int = setting(4, whole(1, 64), "Delegations whose messages go to one peer at once.")
    retry_first_ms: int = setting(
        500, whole(10, HOUR_MS), "Pause after a failed delivery to a peer; twice as long after each further one."
    )
    retry_max_ms: int = setting(60_000, whole(10, HOUR_MS), "Longest pause after a failed delivery.")
    suite: SuiteChoice = setting(  # noqa: RUF009  (makes a dataclass field)
        "hybrid",
        choice("hybrid", "classic"),
        "What messages are sealed with: X25519 and ML-KEM-768 together where the peer has both, or X25519 alone. "
        "Without ML-KEM in the crypto library it is X25519 alone.",
    )
    redaction: Redaction = setting(  # noqa: RUF009  (makes a dataclass field)
        "redact",
        choice("redact", "block", "warn", "off"),
        "What the daemon does with secrets in a message to a peer: takes them out, sends nothing, only "
        "reports them, or does not search.",
    )
    transcripts: Transcripts = setting(  # noqa: RUF009  (makes a dataclass field)
        "full", choice("full", "root"), "Whether a result carries the conversation, or only the root that proves it."
    )


@dataclass(slots=True, kw_only=True)
class PeerContext:
    ledger: DelegationLedger
    keyring: InstanceKeys
    connections: PeerConnections
    settings: PeerSettings
    us: AgentId
    """Who is in the audit for what this instance does by itself."""
    depth_max: int
    """Of calls in this instance."""
    chance: Callable[[], float]
    files: StoredFiles | None = None
    """None: bytes stay in the ledger."""
    epoch: str | None = None
    """Which life of our ledger this is; None: the first one. A restore from a backup begins another."""
    ledger_end: Callable[[], int | None] = lambda: None
    """How many records of our ledger are durable; None if nobody can tell."""
    begin_life: Callable[[], str] | None = None
    """Begin another life of our ledger, durably: it turned out to be an older copy. Blocks."""
    in_flight: list[Callable[[DelegationKey], int]] = field(default_factory=list)
    """Each says up to which number a peer may have the messages of a delegation; the transport adds them."""
    introducing: list[Callable[[], bool]] = field(default_factory=list)
    """Each says whether a peer of the settings could not be asked yet who it is; the maintenance adds itself."""
    unreachable: list[Callable[[InstanceId], bool]] = field(default_factory=list)
    """Each says whether a peer is known not to take anything just now; the transport and the directory add them."""


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

    def _epoch_for(self, peer: Peer | None) -> str | None:
        """What an envelope to this peer says of our ledger's life. Only a peer that knows epochs is told."""
        return self._context.epoch if peer is not None and peer.keys is not None and peer.keys.has_epochs else None

    def _in_flight(self, key: DelegationKey) -> int:
        """Up to which number the peer may have the messages of this delegation."""
        return max((through(key) for through in self._context.in_flight), default=0)


def root_of(url: str) -> str:
    """The one spelling of where an instance is, without a final slash. Raises InvalidUrl."""
    location = read_url(url)
    if "?" in location.target:
        raise InvalidUrl("it has a query")
    return location.url.rstrip("/")
