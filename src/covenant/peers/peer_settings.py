"""Shared by the services of peers: the settings of `[peers]`, the ledger, the keys and the connections."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from covenant.model.settings import HOUR_MS
from covenant.model.settings_field import Kind, choice, line, peer_places, setting, several, switch, whole, words
from covenant.outbound.outbound_settings import name_servers
from covenant.outbound.urls import InvalidUrl, read_host, read_url

if TYPE_CHECKING:
    from pathlib import Path

    from covenant.exchange.stored_files import StoredFiles
    from covenant.exchange.tasks.writer import TaskWriter
    from covenant.ledger.contract.ledger import DelegationLedger
    from covenant.model.ids import AgentId
    from covenant.model.peers.delegation import DelegationKey, Peer
    from covenant.model.peers.instance import InstanceId, Prekey
    from covenant.peers.directory.instance_keys import InstanceKeys
    from covenant.peers.transport.peer_client import PeerConnections
    from covenant.seal.identity import PrivatePrekey

EVERYBODY: Final = "*"
"""An entry of `poll` and `relay_for` that names every peer."""

_INTERFACE: Final = re.compile(r"[0-9A-Za-z_.:@-]{1,64}").fullmatch


def _is_domain(text: str) -> bool:
    """Whether a text is a domain for DNS: no name under `local`, which is for mDNS, and no address."""
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
    """The amounts by profile. If a profile is named twice, the last amount counts."""
    return {name: int(amount) for name, _, amount in (each.partition("=") for each in entries)}


def _read_relay(raw: object) -> str:
    found: tuple[str, ...] = peer_places.read(raw)
    if len(found) > 1:
        raise ValueError
    return found[0] if found else ""


relay_place: Final = Kind(_read_relay, "a URL such as https://host, after frd1_…@ or name= or not; empty for none")


def relay_root(settings: PeerSettings) -> str | None:
    """The address of our relay, in a peer's canonical form; None if we have none."""
    found = re.search(r"https?://.*", settings.relay)
    return found.group().rstrip("/") if found is not None else None


Redaction = Literal["redact", "block", "warn", "off"]
Transcripts = Literal["full", "root"]
SuiteChoice = Literal["hybrid", "classic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """Other instances: which ones, their limits and ours, and how messages are delivered."""

    enabled: bool = setting(False, switch, "Whether this instance and other instances can delegate to each other.")
    name: str = setting("", line, "The name under which this instance introduces itself; empty: the end of its id.")
    static: tuple[str, ...] = setting(
        (), peer_places, "Instances that are peers: https://host, frd1_…@https://host or name=https://host."
    )
    listen: str = setting(
        "",
        listener_place,
        "Address of a second listener that serves only the routes for peers; empty: HTTP serves them.",
    )
    mdns: bool = setting(
        False,
        switch,
        "Whether this instance announces itself on the local network and listens to the announcements of others.",
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
    require_token: bool = setting(True, switch, "Whether an offer must carry a token of this instance.")
    profiles: tuple[str, ...] = setting(
        (), words, "The agents that peers may delegate to; none: all local agents except `index`."
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
    budget_default: int = setting(50_000, whole(1, 500_000), "Token budget of a delegation that names none.")
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
    depth_max: int = setting(3, whole(0, 10), "How many levels deep a peer's delegation may be delegated further.")
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
    timeout_ms: int = setting(300_000, whole(1_000, 600_000), "Timeout of a delegation that names none.")
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
    relay: str = setting(
        "",
        relay_place,
        "The relay: an instance that keeps messages for this one until it fetches them, and messages of this one to "
        "peers without an address.",
    )
    relay_for: tuple[str, ...] = setting(
        (),
        words,
        "Ids or names of verified peers whose sealed messages to each other this instance keeps until they are "
        "fetched; `*`: all; none: it is no relay.",
    )
    relay_keep_ms: int = setting(24 * HOUR_MS, whole(1_000, 24 * HOUR_MS), "Longest time that a relay keeps a message.")
    relay_envelopes_per_peer: int = setting(
        1_000, whole(1, 1_000_000), "Most messages that a relay keeps of one sender, and for one recipient."
    )
    relay_bytes_per_peer: int = setting(
        32 * 1024 * 1024,
        whole(1_024, 2**40),
        "Most bytes that a relay keeps of one sender, and for one recipient.",
    )
    relay_bytes_max: int = setting(256 * 1024 * 1024, whole(1_024, 2**40), "Most bytes that a relay keeps in all.")
    deliveries_per_peer: int = setting(4, whole(1, 64), "Delegations whose messages go to one peer at once.")
    retry_first_ms: int = setting(
        500, whole(10, HOUR_MS), "Pause after a failed delivery to a peer; twice as long after each further one."
    )
    retry_max_ms: int = setting(60_000, whole(10, HOUR_MS), "Longest pause after a failed delivery.")
    suite: SuiteChoice = setting(  # noqa: RUF009  (makes a dataclass field)
        "hybrid",
        choice("hybrid", "classic"),
        "The keys that messages are sealed with: X25519 and ML-KEM-768 together if the peer has both, or X25519 "
        "alone. Without ML-KEM in the crypto library it is X25519 alone.",
    )
    redaction: Redaction = setting(  # noqa: RUF009  (makes a dataclass field)
        "redact",
        choice("redact", "block", "warn", "off"),
        "What the daemon does with secrets in a message to a peer: removes them, sends nothing, only reports them, or "
        "does not search.",
    )
    transcripts: Transcripts = setting(  # noqa: RUF009  (makes a dataclass field)
        "full", choice("full", "root"), "Whether a result carries the conversation, or only the root that proves it."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedInstance:
    """The differences if several daemons share a ledger and are one instance."""

    ledger_epoch: Callable[[], str | None]
    """As `PeerContext.epoch`. Another daemon may begin a new one."""
    serves: Callable[[InstanceId], bool]
    """Whether this daemon is the one that delivers to a peer, reports to it and maintains its record."""
    renew_keys: Callable[[int], Awaitable[None]]
    """Replaces keys that are due at this moment."""
    refresh_keys: Callable[[], Awaitable[None]]
    """Takes the keys that another daemon made."""
    replace_keys: Callable[..., Awaitable[None]]
    """Makes new purpose keys at all daemons; `compromised`: the old ones are void."""
    on_void: list[Callable[[], None]]
    """Each is called when a daemon has declared the old keys void; the maintenance adds itself."""


@dataclass(slots=True, kw_only=True)
class PeerContext:
    ledger: DelegationLedger
    keyring: InstanceKeys
    connections: PeerConnections
    settings: PeerSettings
    writer: TaskWriter
    us: AgentId
    """The identity in the audit of what this instance does by itself."""
    depth_max: int
    """The longest chain of calls in this instance."""
    chance: Callable[[], float]
    relay_folder: Path | None = None
    """The folder of a relay; None: this instance is no relay, whatever the settings say."""
    files: StoredFiles | None = None
    """None: bytes stay in the ledger."""
    epoch: str | None = None
    """The epoch of our ledger; None: the first one. A restore from a backup begins a new one."""
    ledger_end: Callable[[], int | None] = lambda: None
    """How many records of our ledger are durable; None if that is unknown."""
    begin_epoch: Callable[[], str] | None = None
    """Begins a new epoch of our ledger, durably, since it is an older copy of itself. Blocks."""
    shared: SharedInstance | None = None
    """None: no other daemon has this ledger."""
    in_flight: list[Callable[[DelegationKey], int]] = field(default_factory=list)
    """Each gives the highest number of a delegation's messages that its peer may have; the transport adds them."""
    withdrawn: set[DelegationKey] = field(default_factory=set)
    """Offers that were fetched from a relay together with their cancels: none of them is begun."""
    introducing: list[Callable[[], bool]] = field(default_factory=list)
    """Each says whether a peer of the settings could not be asked for its id yet; the maintenance adds itself."""
    unreachable: list[Callable[[InstanceId], bool]] = field(default_factory=list)
    """Each says whether a peer is known to accept nothing now; the transport and the directory add them."""

    @property
    def ledger_epoch(self) -> str | None:
        """The present epoch of our ledger; None: the first one."""
        return self.epoch if self.shared is None else self.shared.ledger_epoch()

    def serves(self, peer: InstanceId) -> bool:
        return self.shared is None or self.shared.serves(peer)


class PeerService:
    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self._ledger = context.ledger
        self._keyring = context.keyring
        self._connections = context.connections
        self._settings = context.settings
        self._us = context.us
        self._relay_root = relay_root(context.settings)
        self._now_ms = context.ledger.now_ms
        self._monotonic_ms = context.ledger.clock.monotonic_ms

    def _epoch_for(self, peer: Peer) -> str | None:
        """The epoch of our ledger for an envelope to this peer; None for a peer that does not know epochs."""
        return self._context.ledger_epoch if peer.keys is not None and peer.keys.has_epochs else None

    def _sealer(self, peer: Peer, prekey: Prekey, *, relayed: bool = False) -> partial[bytes]:
        """Seals envelopes to this peer, as of now: `InstanceKeys.seal` with all but `body`, `typ` and `seq`.

        It may be called in a thread.
        """
        return partial(
            self._keyring.seal,
            to=peer.id,
            prekey=prekey,
            now_ms=self._now_ms(),
            epoch=self._epoch_for(peer),
            certified=peer.keys is not None and peer.keys.has_certificates,
            relayed=relayed,
        )

    def _address(self, peer: Peer) -> str | None:
        """Where envelopes for this peer are sent: to its own address, or to our relay. None: the peer polls us."""
        if peer.url is not None:
            return peer.url
        return relay_address(self._relay_root, peer.id) if self._relay_root is not None else None

    def _is_relayed(self, peer: Peer) -> bool:
        """Whether envelopes for this peer wait at a relay, so that its answers come later."""
        address = self._address(peer)
        return address is not None and address.endswith(relay_address("", peer.id))

    async def _renew_void_keys(self) -> bool:
        """A peer says that our keys are void. Returns whether another try is worth it.

        If we had declared them void, and a restore forgot that, everything that was signed before is void.
        """
        shared, keyring = self._context.shared, self._keyring
        before = keyring.purpose_keys()
        if shared is not None:
            await shared.refresh_keys()
        if keyring.purpose_keys() == before and keyring.believes_void(self._now_ms()):
            keyring.renewed_void = True  # before the wait, in which another peer may say so, too
            try:
                await self._replace_keys(compromised=True)
            except BaseException:
                keyring.renewed_void = False
                raise
            return True
        return shared is not None  # another daemon may have replaced the keys while this one used the old ones

    async def _replace_keys(self, *, compromised: bool) -> None:
        """Makes new purpose keys, at all daemons of this instance. `compromised`: the old ones are void."""
        if (shared := self._context.shared) is not None:
            await shared.replace_keys(compromised=compromised)
            return
        import asyncio  # noqa: PLC0415  (showing settings needs no loop)

        await asyncio.to_thread(self._keyring.replace_purpose_keys, self._now_ms(), compromised=compromised)

    async def _own_prekey(self, kid: str) -> PrivatePrekey | None:
        """Our prekey of this id. Another daemon of this instance may have made it just now."""
        prekey, shared = self._keyring.prekey(kid), self._context.shared
        if prekey is None and shared is not None:
            await shared.refresh_keys()
            prekey = self._keyring.prekey(kid)
        return prekey

    async def _audit(self, kind: str, **facts: object) -> None:
        """Writes a row into the audit, in the name of this instance (docs/formats/audit.md)."""
        from covenant.ledger.machine.identity_commands import (  # noqa: PLC0415  (showing settings needs no ledger)
            WriteAuditRow,
        )

        await self._ledger.commit(WriteAuditRow(by=self._us, row={"type": kind, **facts}))

    def _in_flight(self, key: DelegationKey) -> int:
        """The highest number of this delegation's messages that the peer may have."""
        return max((through(key) for through in self._context.in_flight), default=0)


def is_named(peer: Peer, entries: Container[str]) -> bool:
    """Whether these entries of a setting name the peer, by its name or by an id that it has or had."""
    return peer.name in entries or any(each in entries for each in peer.ids)


def relay_address(root: str, peer: InstanceId) -> str:
    """The address at a relay for envelopes to this instance."""
    return f"{root}/relay/{peer}"


def root_of(url: str) -> str:
    """The canonical address of an instance, without a final slash. Raises InvalidUrl."""
    location = read_url(url)
    if "?" in location.target:
        raise InvalidUrl("it has a query")
    return location.url.rstrip("/")
