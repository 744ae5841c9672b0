"""Asking peers what they can do. The question is a challenge too: whoever answers it is verified.

Each peer is asked one question at a time, and the last challenge is the one that counts. An answer is opened with the
same checks as anything else that comes in. What it said is believed until it is over; that a peer does not answer, for
a few seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, Protocol

import msgspec

from covenant.ledger.contract import Ledger
from covenant.ledger.machine.peer_commands import Hear, LearnPeer
from covenant.ledger.machine.peering import unknown_peer
from covenant.model.peers.peer_record import PeerCapabilities, Challenge, Peer
from covenant.model.peers.delegation import ReceivedEnvelope
from covenant.model.peers.delegation_messages import CapabilityQuery, CapabilityResponse
from covenant.model.errors import Conflict, CovenantError, Invalid, Refusal, Unavailable
from covenant.model.ids import AgentId
from covenant.model.peers.instance import SUPPORTED_VERSIONS, InstanceId, Prekey, Trust, negotiate
from covenant.peers.answering import learned
from covenant.peers.delivery import OTHER_KEYS
from covenant.peers.flights import Flights
from covenant.peers.keyring import Keyring
from covenant.peers.line import RECEIVE, LineFailed, Lines, Response, address
from covenant.seal.assertions import capabilities_hold, new_challenge
from covenant.seal.envelope import EnvelopeRefused, Opened, open_, remember_until_ms
from covenant.wire.peers import decode, encode, type_of
from covenant.wire.peers import decode_received

TIMEOUT_S: Final = 15.0
FAILURE_MS: Final = 5_000
"""How long a peer that does not answer is not asked again for somebody who only wants to know."""
STRANGER_MS: Final = 2_000
"""How long it is believed that we are a mere peer to it: that is what changes while two are being introduced."""
HANDED_MS: Final = 10_000
"""How long one that fetches has to answer before it is handed the same question again."""
FETCHED_S: Final = 30.0
CLOCKS: Final = frozenset({"from_future", "stale"})


class PrekeyFor(Protocol):
    def __call__(self, peer: Peer, *, fresh: bool = False) -> Awaitable[Prekey]: ...


class Asking:
    def __init__(
        self,
        ledger: Ledger,
        keyring: Keyring,
        lines: Lines,
        *,
        us: AgentId,
        prekey_for: PrekeyFor,
        now_ms: Callable[[], int],
    ) -> None:
        self._ledger = ledger
        self._keyring = keyring
        self._lines = lines
        self._us = us
        self._prekey_for = prekey_for
        self._now_ms = now_ms
        self._monotonic_ms = ledger.clock.monotonic_ms
        self._flights: Flights[Peer] = Flights()
        self._failures: dict[InstanceId, tuple[int, CovenantError]] = {}
        self._handed: dict[InstanceId, tuple[str, int]] = {}
        self._answered: dict[InstanceId, asyncio.Event] = {}

    async def stop(self) -> None:
        await self._flights.stop()

    async def capabilities(self, peer: Peer, *, fresh: bool = False) -> PeerCapabilities:
        known = self._known(peer.id)
        if not fresh:
            if (kept := self._kept(known)) is not None:
                return kept
            until_ms, failure = self._failures.get(peer.id, (0, None))
            if failure is not None and self._monotonic_ms() < until_ms:
                raise failure.with_traceback(None)
        try:
            asked = await self.ask(known)
        except (LineFailed, Refusal) as failed:
            self._failures[peer.id] = (self._monotonic_ms() + FAILURE_MS, failed)
            raise
        self._failures.pop(peer.id, None)
        if asked.capabilities is None:
            raise Unavailable("no_capabilities", f"{asked.name} has not said what it can do")
        return asked.capabilities

    def _kept(self, peer: Peer) -> PeerCapabilities | None:
        kept, now_ms = peer.capabilities, self._now_ms()
        if kept is None or not kept.issued_at_ms <= now_ms + FAILURE_MS or now_ms >= kept.expires_at_ms:
            return None
        if kept.trust_level is Trust.PEER and now_ms >= kept.issued_at_ms + STRANGER_MS:
            return None
        return kept

    async def ask(self, peer: Peer) -> Peer:
        """The peer as it is once it has answered, and is verified. One without an address may take its time."""
        asking = self._ask if peer.url is not None else self._ask_when_it_fetches
        return await self._flights.join(peer.id, lambda: asking(peer))

    async def challenge(self, peer: Peer) -> Peer:
        """For one that fetches: it stays asked until it answers."""
        known = self._known(peer.id)
        if known.challenge is not None:
            return known
        return await self._challenge(known)

    async def _challenge(self, peer: Peer) -> Peer:
        made = Challenge(new_challenge(), self._now_ms())
        return await self._ledger.commit(LearnPeer(id=peer.id, by=self._us, challenge=made))

    async def _ask(self, peer: Peer) -> Peer:
        asked = await self._challenge(peer)
        response = await self._post(asked, await self._prekey_for(asked))
        if _code(response) in OTHER_KEYS:
            response = await self._post(asked, await self._prekey_for(asked, fresh=True))
        if response.status != 200:
            raise _declined(asked, response, self._keyring.id)
        try:
            opened = self._open(asked, decode_received(response.body).envelope)
            said = decode(opened.header.typ, opened.body)
        except (Invalid, EnvelopeRefused) as wrong:
            raise LineFailed(
                "bad_answer", f"{asked.name} did not answer the question: {wrong}", passing=False
            ) from wrong
        if not isinstance(said, CapabilityResponse):
            raise LineFailed("bad_answer", f"{asked.name} answered with {opened.header.typ}", passing=False)
        await self._ledger.commit(Hear(envelope=envelope_of(opened)))
        return await self.learn(asked.id, said)

    def _open(self, peer: Peer, sealed: msgspec.Raw | msgspec.UnsetType) -> Opened:
        if isinstance(sealed, msgspec.UnsetType):
            raise Invalid("no_answer", "there is no envelope in its answer")
        return open_(
            bytes(sealed),
            us=self._keyring.id,
            now_ms=self._now_ms(),
            known=lambda sender: sender == peer.id,
            seen=self._ledger.envelope_taken,
            prekey=self._keyring.prekey,
        )

    async def _post(self, peer: Peer, prekey: Prekey) -> Response:
        query = self._query(peer)
        sealed = self._keyring.seal(encode(query), typ=type_of(query), to=peer.id, prekey=prekey, now_ms=self._now_ms())
        return await self._lines.to(address(peer)).post(RECEIVE, sealed, timeout_s=TIMEOUT_S)

    def _query(self, peer: Peer) -> CapabilityQuery:
        assert peer.challenge is not None
        return CapabilityQuery(
            nonce=peer.challenge.nonce, versions=SUPPORTED_VERSIONS, keys=self._keyring.bundle(self._now_ms())
        )

    async def learn(self, peer_id: InstanceId, response: CapabilityResponse) -> Peer:
        """What a peer said. `challenge_over` if we have not asked that, or have asked anew since."""
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
            raise Invalid("unproven", "the answer is not signed by the peer, not for us, or over")
        if negotiate(response.versions) is None:
            raise Conflict("version", f"{peer.name} speaks none of our versions of the protocol; one must be renewed")
        changed = await self._ledger.commit(
            LearnPeer(
                id=peer.id,
                by=self._us,
                keys_shown=response.keys,
                challenge=peer.challenge,
                capabilities=learned(response, now_ms),
                verified=True,
                conflict="",
            )
        )
        self._handed.pop(peer.id, None)
        if (answered := self._answered.get(peer.id)) is not None:
            answered.set()
        return changed

    def pending_query(self, peer: Peer) -> CapabilityQuery | None:
        known = self._known(peer.id)
        if known.challenge is None or known.denied:
            return None
        nonce, at_ms = self._handed.get(peer.id, ("", 0))
        now_ms = self._monotonic_ms()
        if nonce == known.challenge.nonce and now_ms - at_ms < HANDED_MS:
            return None
        self._handed[peer.id] = (known.challenge.nonce, now_ms)
        return self._query(known)

    async def _ask_when_it_fetches(self, peer: Peer) -> Peer:
        answered = self._answered[peer.id] = asyncio.Event()
        try:
            await self.challenge(peer)
            async with asyncio.timeout(FETCHED_S):
                await answered.wait()
        except TimeoutError:
            raise Unavailable(
                "not_fetched", f"{peer.name} has no address, and has not come to fetch our question; try again"
            ) from None
        finally:
            del self._answered[peer.id]
        return self._known(peer.id)

    def _known(self, peer_id: InstanceId) -> Peer:
        peer = self._ledger.peer(peer_id)
        if peer is None:
            raise unknown_peer(peer_id)
        return peer


def envelope_of(opened: Opened) -> ReceivedEnvelope:
    """What the ledger keeps of an envelope that was opened."""
    header = opened.header
    return ReceivedEnvelope(
        sender=InstanceId(header.sender),
        jti=header.jti,
        typ=header.typ,
        until_ms=remember_until_ms(header),
        seq=header.seq,
    )


def _code(response: Response) -> str:
    with suppress(ValueError):
        told: Any = msgspec.json.decode(response.body)
        if isinstance(told, dict) and isinstance(told.get("code"), str):
            return str(told["code"])
    return ""


def _declined(peer: Peer, response: Response, us: InstanceId) -> LineFailed:
    code = _code(response)
    if code == "refused":
        return LineFailed(
            "refused", f"{peer.name} takes nothing from us; have its operator add this instance: {us}", passing=True
        )
    passing = response.status >= 500 or response.status == 429
    if code in CLOCKS:
        return LineFailed(code, f"{peer.name} answered {code}: its clock and ours are apart; set them", passing=True)
    said = f" ({code[:64]})" if code else ""
    return LineFailed(code[:64] or "declined", f"{peer.name} answered {response.status}{said}", passing=passing)
