"""The peers that this instance knows: adding, renaming, trusting and removing them, and refreshing their keys.

An id is derived from its key, so an address is believed only by a valid signature. If another identity answers at a
peer's address, the peer's record does not change, unless the peer's own key has named the new identity as its
successor. Trust grows by itself in one way only: a peer that answers our challenge is verified. An operator decides
everything else. A peer without an address is challenged when it polls (`pending_query`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import msgspec

from covenant.exchange.id_prefixes import choose
from covenant.ledger.machine.peer_commands import (
    AddPeer,
    ChangePeer,
    LearnPeer,
    ReceiveFromPeer,
    RemovePeer,
    SucceedPeer,
)
from covenant.model.errors import Conflict, Forbidden, Invalid, Refusal, Unavailable
from covenant.model.ids import AgentId, PublicKey
from covenant.model.peers.delegation import ID_TAIL, NAME_CHARS_MAX, Peer, PeerLimits, PeerSource, ReceivedEnvelope
from covenant.model.peers.delegation_messages import CapabilityQuery, CapabilityResponse
from covenant.model.peers.instance import (
    HYBRID_SUITE,
    SUPPORTED_VERSIONS,
    FormerKey,
    InstanceId,
    KeyBundle,
    Prekey,
    Trust,
    Versions,
    negotiate,
    parse_instance_id,
)
from covenant.model.tenants import DEFAULT
from covenant.outbound.concurrency import SingleFlight
from covenant.outbound.urls import InvalidUrl, read_url
from covenant.peers.directory.handshake import Handshake, TokenIssuer, capability_response, keys_worth_keeping
from covenant.peers.directory.succession import Succession
from covenant.peers.peer_settings import PeerContext, PeerService, relay_address
from covenant.peers.provider.offer_admission import OfferedProfiles
from covenant.peers.transport.peer_client import PeerCallFailed, PeerUnavailable, fetch_introduction, required_address
from covenant.seal.identity import bundle_holds, is_key_of, prekey_holds, prekey_to_use
from covenant.wire.peers import Introduction, encode, type_of

PATH_CHARS_MAX: Final = 200

_NAME = re.compile(r"[A-Za-z0-9_.\-]+").fullmatch
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.\-]+")
_PATH = re.compile(r"(?:/[A-Za-z0-9_~-][A-Za-z0-9_.~-]*)*").fullmatch
IDENTITY_CHANGED: Final = "identity_changed"
UNVERIFIED_KEYS: Final = "unverified_keys"
VERSION_REFUSED: Final = "version"
HYBRID_KEPT_MAX: Final = 4_096
log = logging.getLogger(__name__)


class PeerEntry(NamedTuple):
    url: str | None
    peer_id: str | None
    name: str | None


def check_name(name: str) -> str:
    """Checks a peer's name, as it is used in `name/profile` and as `name@peer` in the audit."""
    if len(name) > NAME_CHARS_MAX or _NAME(name) is None or name.startswith("frd1_"):
        raise Invalid(
            "invalid_name",
            f"a peer's name is 1 to {NAME_CHARS_MAX} of A-Z a-z 0-9 _ . - and does not begin like an id",
        )
    return name


def name_from(shown_name: str, peer_id: InstanceId) -> str:
    """A peer's own name as far as it can be a name here; otherwise the end of its id."""
    name = _NOT_IN_NAMES.sub("-", shown_name).strip("-")[:NAME_CHARS_MAX]
    return name if name and not name.startswith("frd1_") else peer_id[-ID_TAIL:]


def distinct_name(name: str, peer_id: InstanceId) -> str:
    """The name with the end of the peer's id, for a name that another peer has."""
    tail = peer_id[-ID_TAIL:]
    return tail if name == tail else f"{name[: NAME_CHARS_MAX - ID_TAIL - 1]}-{tail}"


def read_peer_url(text: str) -> str:
    """The address in its canonical spelling, without a final slash. All paths of the peer are below it."""
    try:
        location = read_url(text.strip())
    except InvalidUrl as wrong:
        raise Invalid("invalid_url", f"{text[:80]!r} cannot be a peer's address: {wrong}") from None
    path = location.target.rstrip("/")
    if len(path) > PATH_CHARS_MAX or "#" in text or _PATH(path) is None:
        raise Invalid(
            "invalid_url",
            f"{text[:80]!r} cannot be a peer's address: write https://host, https://host:port or https://host/base",
        )
    return f"{location.scheme}://{location.authority}{path}"


def read_peer_entry(text: str) -> PeerEntry:
    """Reads `https://host`, `<id>@https://host`, `name=https://host`, `name=<id>@https://host` or `name=<id>`."""
    head, equals, rest = text.strip().partition("=")
    name, given = (check_name(head), rest) if equals and "/" not in head else (None, text.strip())
    before, at, after = given.partition("@")
    if at and before.startswith("frd1_"):
        return PeerEntry(read_peer_url(after), parse_instance_id(before), name)
    if given.startswith("frd1_"):
        return PeerEntry(None, parse_instance_id(given), name)
    return PeerEntry(read_peer_url(given), None, name)


def check_bundle(address: str, keys: KeyBundle, now_ms: int, ours: Versions = SUPPORTED_VERSIONS) -> None:
    """Raises Conflict if the keys that an address shows are of no version that we speak, or do not hold."""
    if negotiate(keys.versions) is None:
        spoken, versions = (", ".join(map(str, each)) for each in (keys.versions, ours))
        why = f"{address} speaks the protocol's versions {spoken or 'none'}, and we {versions}; upgrade one of the two"
        raise Conflict(VERSION_REFUSED, why)
    if not bundle_holds(keys, InstanceId(keys.id), now_ms):
        raise Conflict(
            UNVERIFIED_KEYS,
            f"the keys that {address} shows are not signed by its identity key, or have expired; check its clock",
        )


class PeerDirectory(PeerService):
    """Must be used on one event loop. Every answer to a peer or an operator is durable first."""

    def __init__(self, context: PeerContext, offering: Callable[[Peer], Awaitable[OfferedProfiles]]) -> None:
        super().__init__(context)
        self._offering = offering
        self._handshake = Handshake(context, self.prekey_for)
        self.capabilities = self._handshake.capabilities
        self.pending_query = self._handshake.pending_query
        self.note_forgotten = self._handshake.note_forgotten
        self.has_shown_keys = self._handshake.has_shown_keys
        self._tokens = TokenIssuer(context)
        self._succession = Succession(context)
        self.announce = self._succession.announce
        self.receive_introduction = self._succession.receive
        self._refreshing: SingleFlight[Peer] = SingleFlight()
        self._hybrid: dict[str, Prekey] = {}
        """Hybrid prekeys that peers have shown beside their bundles.

        In memory only: a missing one is asked for again.
        """

    async def stop(self) -> None:
        await self._handshake.stop()
        await self._refreshing.stop()

    def find(self, named: str) -> Peer:
        """Finds a peer by its id, its name, or the beginning of either."""
        if peer := (self._ledger.peer(InstanceId(named)) or self._ledger.peer_named(named)):
            return peer
        if peer := self._succession.find_former(named):
            return peer
        known = self._ledger.peers() if named else ()
        found = [each for each in known if each.id.startswith(named) or each.name.startswith(named)]
        return choose(named, found, "peer", lambda each: f"{each.id}  {each.name}", code="ambiguous_peer")

    # Records of peers

    async def add(
        self,
        by: AgentId,
        *,
        url: str | None,
        peer_id: str | None,
        name: str | None,
        source: PeerSource = "operator",
        tenant: str = DEFAULT,
    ) -> Peer:
        """Adds a peer, and tries to verify it. If it cannot be verified now, it is added all the same, unverified."""
        wanted = parse_instance_id(peer_id) if peer_id is not None else None
        self._check_not_self(wanted)
        if wanted is not None and (known := self._succession.find_former(wanted)) is not None:
            raise Conflict("peer_exists", f"{known.name} had this id, and goes by {known.id} now")
        checked_name = check_name(name) if name is not None else None
        if url is None:
            if wanted is None or checked_name is None:
                raise Invalid("address_needed", "give the peer's address; or, if it has none, its id and a name for it")
            peer = Peer(id=wanted, name=checked_name, source=source)
        else:
            peer = await self._peer_at(read_peer_url(url), wanted, checked_name, source)
        peer = msgspec.structs.replace(peer, tenant=tenant)
        added = await self._ledger.commit(AddPeer(by=by, peer=peer))
        if self._is_relayed(added):
            return added  # its answer may take long, so the maintenance asks it later
        return await self._try_to_verify(added)

    async def _try_to_verify(self, peer: Peer) -> Peer:
        """A peer that cannot be verified now stays unverified; the maintenance tries again."""
        try:
            return await self.verify(peer)
        except Refusal as failed:
            log.info("peer.not_verified", extra={"peer": peer.id, "reason": str(failed)})
            return self._ledger.peer(peer.id) or peer

    async def _peer_at(self, address: str, wanted: InstanceId | None, name: str | None, source: PeerSource) -> Peer:
        keys, shown_name = None, ""
        try:
            introduction = await self._fetch_introduction(address)
            keys, shown_name = introduction.keys, introduction.name
        except PeerUnavailable as failed:
            if wanted is None:
                hint = "start it, or give its id too, to add it unverified"
                raise PeerUnavailable(failed.code, f"{failed.message}; {hint}") from failed
        if keys is not None:
            self._check_keys(address, keys, wanted)
        peer_id = wanted or InstanceId(keys.id if keys is not None else "")
        return Peer(
            id=peer_id, name=name or self._free_name(shown_name, peer_id), url=address, source=source, keys=keys
        )

    def _check_keys(self, address: str, keys: KeyBundle, wanted: InstanceId | None) -> None:
        if wanted is not None and keys.id != wanted:
            raise Conflict(
                IDENTITY_CHANGED, f"at {address} there is {keys.id}, not {wanted}; check the address and the id"
            )
        self._check_not_self(InstanceId(keys.id))
        check_bundle(address, keys, self._now_ms(), self._keyring.versions)

    def _check_not_self(self, peer_id: InstanceId | None) -> None:
        if peer_id in self._keyring.ids:
            raise Invalid("self_peer", "that is this instance itself; give the address or id of another one")

    def _free_name(self, shown_name: str, peer_id: InstanceId) -> str:
        known = self._ledger.peer(peer_id)
        if known is not None:
            return known.name
        name = name_from(shown_name, peer_id)
        return name if self._ledger.peer_named(name) is None else distinct_name(name, peer_id)

    async def remove(self, by: AgentId, named: str) -> Peer:
        return await self._ledger.commit(RemovePeer(id=self.find(named).id, by=by))

    async def change(
        self,
        by: AgentId,
        named: str,
        *,
        name: str | None = None,
        url: str | None = None,
        trust: Trust | None = None,
        denied: bool | None = None,
        limits: PeerLimits | None = None,
    ) -> Peer:
        """A change by an operator. `verified` cannot be given: a peer that was never challenged is challenged now."""
        peer = self.find(named)
        address = read_peer_url(url) if url else url
        if trust is Trust.VERIFIED and peer.verified_at_ms is None:
            peer = await self._verified(peer)
        changed = await self._ledger.commit(
            ChangePeer(
                id=peer.id,
                by=by,
                name=check_name(name) if name is not None else None,
                url=address,
                trust=trust,
                denied=denied,
                limits=limits,
            )
        )
        if address and address != peer.url:
            try:
                changed = await self.refresh(changed)
            except Refusal as failed:
                log.info("peer.no_answer", extra={"peer": changed.id, "url": address, "reason": str(failed)})
        return changed

    async def _verified(self, peer: Peer) -> Peer:
        try:
            peer = await self.verify(peer)
        except PeerCallFailed as failed:
            raise Conflict("not_verified", f"{peer.name} could not be challenged: {failed.message}") from failed
        if peer.verified_at_ms is None:
            raise Conflict(
                "not_verified", f"{peer.name} has not answered our challenge yet; it answers when it next fetches"
            )
        return peer

    # Keys of peers

    async def refresh(self, peer: Peer) -> Peer:
        """Fetches the identity at the peer's address. Raises `PeerCallFailed` if nobody answers."""
        return await self._refreshing.join(peer.id, lambda: self._refresh(peer))

    async def _refresh(self, peer: Peer) -> Peer:
        shown = await self._fetch_introduction(required_address(self._address(peer), peer))
        keys = shown.keys
        if keys.id == peer.id:
            holds = bundle_holds(keys, InstanceId(keys.id), self._now_ms())
            return await (self._record_keys(peer, keys) if holds else self._record_conflict(peer, UNVERIFIED_KEYS))
        try:
            followed = await self._succession.follow(shown)
        except Conflict:  # the successor is known as another peer already: an operator decides which of the two stays
            followed = None
        if followed is None or peer.id not in followed.ids:
            return await self._record_conflict(peer, IDENTITY_CHANGED)
        return followed

    async def follow_at_relay(self, sender: InstanceId) -> bool:
        """Whether the introduction that our relay has of this sender is that of a peer under a new identity."""
        if self._relay_root is None:
            return False
        shown = await self._fetch_introduction(relay_address(self._relay_root, sender))
        return shown.keys.id == sender and await self._succession.follow(shown) is not None

    async def _record_keys(self, peer: Peer, keys: KeyBundle) -> Peer:
        """Records valid keys. Keys older than the known ones are ignored: somebody may replay them."""
        known = self._ledger.peer(peer.id)
        if known is not None and known.keys is not None and keys.issued_at_ms < known.keys.issued_at_ms:
            return known
        return await self._ledger.commit(LearnPeer(id=peer.id, by=self._us, keys_shown=keys, conflict=""))

    async def _record_conflict(self, peer: Peer, conflict: str) -> Peer:
        log.warning("peer.conflict", extra={"peer": peer.id, "code": conflict})
        return await self._ledger.commit(LearnPeer(id=peer.id, by=self._us, conflict=conflict))

    async def succeed(self, by: AgentId, named: str, new_id: str) -> Peer:
        """The operator gives a peer another id. The peer is unverified until it has answered a challenge."""
        peer, wanted = self.find(named), parse_instance_id(new_id)
        self._check_not_self(wanted)
        if peer.url is None:
            raise Conflict("no_address", f"{peer.name} has no address to ask at; remove it, and add the new id")
        keys = (await self._fetch_introduction(peer.url)).keys
        self._check_keys(peer.url, keys, wanted)
        vouched = keys.change is not None and keys.change.old_id == peer.id
        former = FormerKey(id=peer.id, key=peer.agent.pubkey, dead=not vouched)
        changed = await self._ledger.commit(
            SucceedPeer(by=by, old=peer.id, keys_shown=keys, vouched=vouched, former=(former,))
        )
        return await self._try_to_verify(changed)

    async def prekey_for(self, peer: Peer, *, fresh: bool = False) -> Prekey:
        """The prekey to seal to. Asks the peer for its keys if they have expired, or if `fresh` ones are wanted."""
        known = self._ledger.peer(peer.id) or peer
        prekey = self._usable(known)
        if prekey is not None and not fresh:
            return prekey
        if self._address(known) is None:
            if prekey is not None:
                return prekey
            raise Unavailable(
                "no_keys", f"{known.name} has not shown its keys lately; it shows them when it next fetches"
            )
        known = await self.refresh(known)
        if known.id != peer.id:
            raise Conflict(IDENTITY_CHANGED, f"{known.name} goes by the id {known.id} now; look it up again")
        if known.conflict == IDENTITY_CHANGED:
            raise Conflict(IDENTITY_CHANGED, f"another instance answers at the address of {known.name}, {known.url}")
        prekey = self._usable(known)
        if prekey is None and self._seals_hybrid(known.keys):
            why = f"{known.name} has signed that it has the hybrid suite, and shows no valid key for it"
            raise Unavailable("no_hybrid_keys", f"{why}; a message without that key would be weaker, so none is sent")
        if prekey is None:
            raise Unavailable("no_keys", f"{known.name} shows no keys that can be used now; is its clock right?")
        return prekey

    def _usable(self, peer: Peer) -> Prekey | None:
        return self.prekey_of(peer.keys) if peer.keys is not None else None

    def prekey_of(self, keys: KeyBundle, hybrid: Prekey | None = None) -> Prekey | None:
        """The prekey to seal to for the owner of these keys, which hold. `hybrid`: the one that it shows beside them.

        No classic prekey is used if the bundle lists the hybrid version, so that nobody in between can downgrade by
        removing the hybrid prekey.
        """
        if not self._seals_hybrid(keys):
            return prekey_to_use(keys.prekeys, self._now_ms())
        self._keep_hybrid(keys, hybrid)
        known = self._hybrid.get(keys.id)
        return prekey_to_use((known,), self._now_ms()) if known is not None else None

    def _seals_hybrid(self, keys: KeyBundle | None) -> bool:
        return keys is not None and keys.has_hybrid and self._keyring.hybrid

    def _keep_hybrid(self, keys: KeyBundle, shown: Prekey | None) -> None:
        if shown is None or shown == self._hybrid.get(keys.id) or shown.suite != HYBRID_SUITE:
            return
        key = PublicKey(keys.identity_key)
        if not is_key_of(key, keys.id) or not prekey_holds(key, shown) or not prekey_to_use((shown,), self._now_ms()):
            log.warning("peer.hybrid_key_refused", extra={"peer": keys.id, "kid": shown.kid})
            return
        while len(self._hybrid) >= HYBRID_KEPT_MAX:
            del self._hybrid[next(iter(self._hybrid))]
        self._hybrid[keys.id] = shown

    async def _fetch_introduction(self, address: str) -> Introduction:
        shown = await fetch_introduction(self._connections, address)
        self._keep_hybrid(shown.keys, shown.hybrid_prekey)
        return shown

    # Capabilities

    async def verify(self, peer: Peer) -> Peer:
        """Challenges a peer. A peer without an address is challenged at its next poll; until then its record stays."""
        if self._address(peer) is None:
            return await self._handshake.challenge(peer)
        return await self._handshake.ask(peer)

    async def receive_response(self, peer: Peer, envelope: ReceivedEnvelope, response: CapabilityResponse) -> None:
        await self._ledger.commit(ReceiveFromPeer(envelope=envelope))
        await self._handshake.learn(peer.id, response, envelope.epoch)

    async def receive_query(self, peer: Peer, envelope: ReceivedEnvelope, query: CapabilityQuery) -> bytes:
        await self._ledger.commit(ReceiveFromPeer(envelope=envelope))
        asker = self._ledger.peer(peer.id) or peer
        if asker.denied:
            raise Forbidden("denied", "this peer is denied here")
        now_ms = self._now_ms()
        prekey = None
        if query.keys is not None:
            if query.keys != asker.keys and not bundle_holds(query.keys, asker.id, now_ms):
                raise Invalid(UNVERIFIED_KEYS, "the keys in the query are not yours, or are over; check your clock")
            prekey = self.prekey_of(query.keys, query.hybrid_prekey)
            if keys_worth_keeping(asker.keys, query.keys):
                asker = await self._record_keys(asker, query.keys)
        known_end = await self._reported_end(asker, query)
        prekey = prekey or await self.prekey_for(asker)
        offering = await self._offering(asker)
        response = capability_response(
            query,
            asker,
            offering,
            self._keyring,
            token=await self._tokens.token_for(asker, offering),
            life_ms=self._settings.capabilities_life_ms,
            now_ms=self._now_ms(),
            known_end=known_end,
        )
        return self._sealer(asker, prekey)(encode(response), typ=type_of(response))

    async def _reported_end(self, asker: Peer, query: CapabilityQuery) -> int | None:
        """How many records the peer's ledger had by its last report; None if it does not report.

        Never falls within an epoch.
        """
        if query.ledger_end is None:
            return None
        epoch, known = asker.end
        if epoch != asker.epoch or query.ledger_end > known:
            end = (asker.epoch, query.ledger_end)
            await self._ledger.commit(LearnPeer(id=asker.id, by=self._us, end=end))
        return known
