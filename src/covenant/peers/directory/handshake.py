"""The handshake with a peer: capability query and response, and the token that comes with the response.

A query is a challenge: the peer that answers it under its signature is verified. Each peer is asked one question at a
time, and the last challenge counts. A response is believed until it expires. A peer that did not answer is not asked
again for a few seconds.

Each issued token is kept with its peer while it is valid, so that it can be revoked. A peer that asks often gets the
same token for half of its life. Where a peer has too many tokens, the oldest is revoked before a new one is issued.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec

from covenant.ledger.machine.decisions.peers import ISSUED_MAX, unknown_peer
from covenant.ledger.machine.peer_commands import LearnPeer, ReceiveFromPeer, RevokeToken
from covenant.model.errors import Conflict, CovenantError, Invalid, Refusal, Unavailable
from covenant.model.peers.delegation import Challenge, IssuedToken, Peer, PeerCapabilities
from covenant.model.peers.delegation_messages import (
    CapabilityQuery,
    CapabilityResponse,
    DelegationMessage,
    Profile,
)
from covenant.model.peers.instance import (
    PRICES,
    InstanceId,
    KeyBundle,
    KeyCertificate,
    KeyPurpose,
    Prekey,
    Trust,
    negotiate,
)
from covenant.outbound.concurrency import SingleFlight, wait_at_most
from covenant.peers.directory.instance_keys import InstanceKeys
from covenant.peers.peer_settings import PeerContext, PeerService
from covenant.peers.provider.offer_admission import OfferedProfiles, token_terms
from covenant.peers.transport.peer_client import (
    OTHER_KEYS,
    PeerCallFailed,
    PeerConflict,
    PeerResponse,
    PeerUnavailable,
    call_failed,
    refusal_code,
    required_address,
)
from covenant.seal.envelope import Code, EnvelopeRefused, Header, check, envelope_record, open_checked, replayed
from covenant.seal.proofs import capabilities_hold, new_challenge, sign_capabilities
from covenant.seal.purpose_keys import PurposeKey
from covenant.seal.tokens import Narrowing, issue, token_ids
from covenant.wire.peers import RECEIVE_PATH, decode, decode_received, encode, type_of

log = logging.getLogger(__name__)

BELIEVED_MS_MAX: Final = 3_600_000
KEYS_EVERY_MS: Final = 60_000
PROFILES_BYTES_MAX: Final = 64 * 1024
"""How many bytes of a peer's profiles are kept. They are written again with each change of the peer's record."""
TIMEOUT_S: Final = 15.0
FAILURE_MS: Final = 5_000
"""How long a peer that did not answer is not asked again, unless fresh capabilities are needed."""
STRANGER_MS: Final = 2_000
"""How long we believe that a peer has not verified us: this changes soon when two instances have just met."""
HAND_OUT_AGAIN_MS: Final = 10_000
"""How long a peer that polls has to answer before it is handed the same question again."""
FETCH_WAIT_S: Final = 30.0
LOOK_AGAIN_S: Final = 0.5
QUERIES_MAX: Final = 5
"""How often a peer is asked if another daemon of this instance asks at the same time."""
CLOCK_CODES: Final = frozenset({"from_future", "stale"})


def capability_response(
    query: CapabilityQuery,
    peer: Peer,
    offering: OfferedProfiles,
    keyring: InstanceKeys,
    *,
    token: str | None,
    life_ms: int,
    now_ms: int,
    known_end: int | None = None,
) -> CapabilityResponse:
    response = CapabilityResponse(
        provider=keyring.id,
        audience=peer.id,
        nonce=query.nonce,
        versions=keyring.versions,
        profiles=offering.profiles if PRICES in query.versions else tuple(map(_without_price, offering.profiles)),
        active_delegations=offering.active,
        free_slots=offering.free,
        trust_level=peer.trust,
        keys=keyring.bundle(now_ms),
        issued_at_ms=now_ms,
        expires_at_ms=now_ms + life_ms,
        token=token,
        known_end=known_end if known_end is not None else msgspec.UNSET,
    )
    return sign_capabilities(keyring.signing(KeyPurpose.PROOFS, query.keys or peer.keys, now_ms), response)


def _without_price(profile: Profile) -> Profile:
    """For a peer that does not know prices, and could not check a signature over one."""
    return msgspec.structs.replace(profile, price=msgspec.UNSET)


def keys_worth_keeping(known: KeyBundle | None, shown: KeyBundle) -> bool:
    """Whether to keep the keys that a peer shows with a message. Not each time, since keeping them writes a record."""
    return known is None or shown.issued_at_ms >= known.issued_at_ms + KEYS_EVERY_MS


def capabilities_of(response: CapabilityResponse, now_ms: int) -> PeerCapabilities:
    fields = {name: getattr(response, name) for name in PeerCapabilities.__struct_fields__}
    sizes = accumulate(len(each.name.encode()) + len(each.description.encode()) + 64 for each in response.profiles)
    sized = zip(response.profiles, sizes, strict=True)
    fields["profiles"] = tuple(each for each, size in sized if size <= PROFILES_BYTES_MAX)
    fields["expires_at_ms"] = min(response.expires_at_ms, now_ms + BELIEVED_MS_MAX)
    return PeerCapabilities(**fields)


class Handshake(PeerService):
    def __init__(self, context: PeerContext, prekey_for: Callable[..., Awaitable[Prekey]]) -> None:
        super().__init__(context)
        self._prekey_for = prekey_for
        self._flights: SingleFlight[Peer] = SingleFlight()
        self._failures: dict[InstanceId, tuple[int, CovenantError]] = {}
        self._handed_out: dict[InstanceId, tuple[str, int]] = {}
        self._answered: dict[InstanceId, asyncio.Event] = {}
        self._certificates_shown: dict[InstanceId, tuple[KeyCertificate, ...]] = {}
        """The certificates that each peer's last answered question was asked under, or older ones."""
        self._noted_forgotten: set[InstanceId] = set()
        """Peers that know of more messages or records than our ledger has; each is noted once."""
        self._began_epoch = False
        context.unreachable.append(lambda peer: self._monotonic_ms() < self._failures.get(peer, (0, None))[0])

    async def stop(self) -> None:
        await self._flights.stop()

    async def capabilities(self, peer: Peer, *, fresh: bool = False) -> PeerCapabilities:
        """The peer's last response, until it expires; then the peer is asked again.

        Raises a `Refusal` if it does not answer.
        """
        known = self._known(peer.id)
        if not fresh:
            if (kept := self._kept(known)) is not None:
                return kept
            until_ms, failure = self._failures.get(peer.id, (0, None))
            if failure is not None and self._monotonic_ms() < until_ms:
                raise failure.with_traceback(None)
        try:
            answered = await self.ask(known)
        except Refusal as failed:
            self._failures[peer.id] = (self._monotonic_ms() + FAILURE_MS, failed)
            raise
        self._failures.pop(peer.id, None)
        if answered.capabilities is None:
            raise Unavailable("no_capabilities", f"{answered.name} has not reported its capabilities yet")
        return answered.capabilities

    def _kept(self, peer: Peer) -> PeerCapabilities | None:
        kept, now_ms = peer.capabilities, self._now_ms()
        if kept is None or not kept.issued_at_ms <= now_ms + FAILURE_MS or now_ms >= kept.expires_at_ms:
            return None
        if kept.trust_level is Trust.PEER and now_ms >= kept.issued_at_ms + STRANGER_MS:
            return None
        return kept

    async def ask(self, peer: Peer) -> Peer:
        """Asks the peer, and returns its record once it has answered and is verified.

        A peer that polls may take long.
        """
        return await self._flights.join(peer.id, lambda: self._ask_once(peer))

    async def _ask_once(self, peer: Peer) -> Peer:
        certificates = self._keyring.certificates()
        ask = self._ask_until_newest if self._address(peer) is not None else self._ask_polling_peer
        answered = await ask(peer)
        self._certificates_shown[peer.id] = certificates
        return answered

    def has_shown_keys(self, peer: InstanceId) -> bool:
        """Whether the last question that this peer answered was asked under our present keys."""
        return self._certificates_shown.get(peer) == self._keyring.certificates()

    async def _ask_until_newest(self, peer: Peer) -> Peer:
        """Asks again if another daemon of this instance has asked since: only the newest challenge counts."""
        for _ in range(QUERIES_MAX - 1 if self._context.shared is not None else 0):
            try:
                return await self._ask(peer)
            except Conflict as conflict:
                if conflict.code != "challenge_over":
                    raise
        return await self._ask(peer)

    async def challenge(self, peer: Peer) -> Peer:
        """Challenges a peer that polls. The challenge stands until the peer answers."""
        known = self._known(peer.id)
        if known.challenge is not None:
            return known
        return await self._challenge(known)

    async def _challenge(self, peer: Peer) -> Peer:
        made = Challenge(new_challenge(), self._now_ms())
        return await self._ledger.commit(LearnPeer(id=peer.id, by=self._us, challenge=made))

    async def _ask(self, peer: Peer) -> Peer:
        challenged = await self._challenge(peer)
        response = await self._post_query(challenged, await self._prekey_for(challenged))
        if refusal_code(response) in OTHER_KEYS:
            response = await self._post_query(challenged, await self._prekey_for(challenged, fresh=True))
        if refusal_code(response) == Code.KEY_VOID and await self._renew_void_keys():
            response = await self._post_query(challenged, await self._prekey_for(challenged))
        if response.status != 200:
            raise _declined(challenged, response, self._keyring.id)
        if self._is_relayed(challenged):
            why = f"{challenged.name} has not fetched our question from the relay, or has not answered it yet"
            return await self._wait_for_answer(challenged, why)
        try:
            header, opened = await self._open(challenged, decode_received(response.body).envelope)
        except (Invalid, EnvelopeRefused) as wrong:
            raise PeerConflict("bad_answer", f"{challenged.name} did not answer the question: {wrong}") from wrong
        if not isinstance(opened, CapabilityResponse):
            raise PeerConflict("bad_answer", f"{challenged.name} answered with {header.typ}")
        await self._ledger.commit(ReceiveFromPeer(envelope=envelope_record(header, self._context.ledger_epoch)))
        return await self.learn(challenged.id, opened, header.epoch)

    async def _wait_for_answer(self, peer: Peer, why_not: str) -> Peer:
        """Waits for the answer of a peer that fetches our question. It comes like any message."""
        answered = self._answered[peer.id] = asyncio.Event()
        try:
            async with asyncio.timeout(FETCH_WAIT_S):
                # The answer may be here already, or may have come to another daemon of this instance.
                while self._known(peer.id).challenge is not None:
                    answered.clear()
                    await wait_at_most(answered, LOOK_AGAIN_S)
        except TimeoutError:
            raise PeerUnavailable("not_fetched", f"{why_not}; try again") from None
        finally:
            del self._answered[peer.id]
        return self._known(peer.id)

    async def _open(self, peer: Peer, sealed: msgspec.Raw | msgspec.UnsetType) -> tuple[Header, DelegationMessage]:
        if isinstance(sealed, msgspec.UnsetType):
            raise Invalid("no_answer", "there is no envelope in its answer")
        now_ms = self._now_ms()
        checked = check(
            bytes(sealed),
            us=self._keyring.id,
            now_ms=now_ms,
            known=lambda sender: sender == peer.id,
            void_before_ms=lambda _: peer.void_before_ms,
        )
        if await self._ledger.envelope_taken(peer.id, checked.header.jti):
            raise replayed(checked.header)
        body = open_checked(checked, await self._own_prekey(checked.header.kid), now_ms=now_ms)
        return checked.header, decode(checked.header.typ, body)

    async def _post_query(self, peer: Peer, prekey: Prekey) -> PeerResponse:
        query = self._query(peer)
        sealed = self._sealer(peer, prekey, relayed=self._is_relayed(peer))(encode(query), typ=type_of(query))
        address = required_address(self._address(peer), peer)
        return await self._connections.to(address).post(RECEIVE_PATH, sealed, timeout_s=TIMEOUT_S)

    def _query(self, peer: Peer) -> CapabilityQuery:
        assert peer.challenge is not None
        return CapabilityQuery(
            nonce=peer.challenge.nonce,
            versions=self._keyring.versions,
            keys=self._keyring.bundle(self._now_ms()),
            hybrid_prekey=self._keyring.hybrid_prekey(self._now_ms()),
            ledger_end=self._context.ledger_end(),
        )

    async def learn(self, peer_id: InstanceId, response: CapabilityResponse, epoch: str | None) -> Peer:
        """Records a peer's response.

        `epoch`: that of the peer's ledger. Raises `challenge_over` if the response does not answer our last
        challenge.
        """
        peer, now_ms = self._known(peer_id), self._now_ms()
        if peer.challenge is None or peer.challenge.nonce != response.nonce:
            raise Conflict("challenge_over", "this is not the answer to the last challenge")
        holds = capabilities_hold(
            response,
            provider=peer.id,
            audience=self._keyring.id,
            challenge=peer.challenge.nonce,
            now_ms=now_ms,
        )
        if not holds:
            raise Invalid("unproven", "the answer is not signed by the peer, is not for this instance, or has expired")
        if negotiate(response.versions) is None:
            raise Conflict(
                "version", f"{peer.name} speaks none of our versions of the protocol; upgrade one of the two"
            )
        changed = await self._ledger.commit(
            LearnPeer(
                id=peer.id,
                by=self._us,
                keys_shown=response.keys,
                challenge=peer.challenge,
                capabilities=capabilities_of(response, now_ms),
                verified=True,
                conflict="",
                epoch=epoch,
                told_epoch=self._epoch_for(peer),
                told_id=self._keyring.id if self._keyring.former else msgspec.UNSET,
            )
        )
        if isinstance(response.known_end, int):
            await self._compare_ledger_ends(peer, response.known_end)
        self._handed_out.pop(peer.id, None)
        if (answered := self._answered.get(peer.id)) is not None:
            answered.set()
        return changed

    async def _compare_ledger_ends(self, peer: Peer, known_end: int) -> None:
        end = self._context.ledger_end()
        if end is not None and known_end > end and self._context.shared is not None:
            await self._ledger.durable()  # another daemon may have written since
            end = self._context.ledger_end()
        if end is not None and known_end > end:
            await self.note_forgotten(peer, known=known_end, end=end)

    async def note_forgotten(self, peer: Peer, **numbers: int | None) -> None:
        """A peer knows of more messages or records than our ledger has: the ledger is an older copy of itself.

        `numbers` are those of the audit row (docs/formats/audit.md).
        If the peer knows this epoch of the ledger, the restore was not marked: a new epoch begins, once a run, so that
        a lying peer causes no more than that.
        """
        if not peer.trust.covers(Trust.VERIFIED) or peer.id in self._noted_forgotten:
            return
        self._noted_forgotten.add(peer.id)
        log.error("peers.ledger_forgotten", extra={"peer": peer.id, **numbers})
        await self._audit("ledger_forgotten", peer=peer.id, **numbers)
        begin = self._context.begin_epoch
        if begin is not None and not self._began_epoch and self._epoch_for(peer) == peer.told_epoch:
            self._began_epoch = True
            self._context.epoch = await asyncio.to_thread(begin)

    def pending_query(self, peer: Peer) -> CapabilityQuery | None:
        """The question for a peer that polls; None if it was handed out a while ago and may still be answered."""
        known = self._known(peer.id)
        if known.challenge is None or known.denied:
            return None
        nonce, at_ms = self._handed_out.get(peer.id, ("", 0))
        now_ms = self._monotonic_ms()
        if nonce == known.challenge.nonce and now_ms - at_ms < HAND_OUT_AGAIN_MS:
            return None
        self._handed_out[peer.id] = (known.challenge.nonce, now_ms)
        return self._query(known)

    async def _ask_polling_peer(self, peer: Peer) -> Peer:
        await self.challenge(peer)
        return await self._wait_for_answer(peer, f"{peer.name} has no address, and has not fetched our question yet")

    def _known(self, peer_id: InstanceId) -> Peer:
        peer = self._ledger.peer(peer_id)
        if peer is None:
            raise unknown_peer(peer_id)
        return peer


def _declined(peer: Peer, response: PeerResponse, us: InstanceId) -> PeerCallFailed:
    code = refusal_code(response)
    if code == "refused":
        why = f"{peer.name} accepts nothing from us; have its operator add this instance: {us}"
        return PeerUnavailable("refused", why)
    if code in CLOCK_CODES:
        return PeerUnavailable(code, f"{peer.name} answered {code}: its clock and ours are apart; set them")
    shown = f" ({code})" if code else ""
    return call_failed(
        code or "declined",
        f"{peer.name} answered {response.status}{shown}",
        passing=response.status >= 500 or response.status == 429,
    )


class _CurrentToken(NamedTuple):
    token: str
    key: PurposeKey
    id: str
    terms: Narrowing
    until_ms: int


class TokenIssuer(PeerService):
    def __init__(self, context: PeerContext) -> None:
        super().__init__(context)
        self._current: dict[InstanceId, _CurrentToken] = {}

    async def token_for(self, peer: Peer, offering: OfferedProfiles) -> str | None:
        """The token for a peer; None if the peer may not delegate. Returned only after the record of it is durable."""
        terms = token_terms(peer, offering, self._settings)
        if terms is None:
            self._current.pop(peer.id, None)
            return None
        current = self._current.get(peer.id)
        key = self._keyring.signing(KeyPurpose.TOKENS, peer.keys, self._now_ms())
        if current is not None and (current.terms, current.key) == (terms, key) and self._is_current(current):
            return current.token
        until_ms = self._now_ms() + self._settings.token_life_ms
        token = issue(key, peer.id, msgspec.structs.replace(terms, expires_at_ms=until_ms))
        token_id = token_ids(token, self._keyring.key)[0]
        await self._make_room(peer)
        await self._ledger.commit(LearnPeer(id=peer.id, by=self._us, issued=IssuedToken(token_id, until_ms)))
        self._current[peer.id] = _CurrentToken(token, key, token_id, terms, until_ms)
        return token

    def _is_current(self, current: _CurrentToken) -> bool:
        left_ms = current.until_ms - self._now_ms()
        life_ms = self._settings.token_life_ms
        return life_ms // 2 <= left_ms <= life_ms and not self._ledger.token_revoked(current.id)

    async def _make_room(self, peer: Peer) -> None:
        now_ms = self._now_ms()
        valid = [each for each in peer.issued if each.until_ms > now_ms]
        for each in valid[: max(0, len(valid) - ISSUED_MAX + 1)]:
            await self._ledger.commit(RevokeToken(by=self._us, token_id=each.id, until_ms=each.until_ms))
