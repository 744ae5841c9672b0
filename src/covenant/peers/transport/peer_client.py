"""Sending one envelope to one peer over HTTP, and how that can fail.

`EnvelopeSender` seals the body anew for each try, since an envelope lives for minutes and keys change. If the peer does
not know the key that was used, it is asked once for its present keys and the same message is sent again at once. The
same happens when a kept connection turns out to be closed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

from covenant.model.errors import Invalid, Refusal
from covenant.model.peers.delegation import Peer
from covenant.model.peers.instance import InstanceId
from covenant.model.rate_limits import Backoff
from covenant.peers.peer_settings import PeerContext, PeerService
from covenant.peers.transport.peer_http import PeerCallFailed, PeerConflict, PeerResponse
from covenant.seal.envelope import Code
from covenant.wire.peers import EnvelopeRefusal, decode_refused

if TYPE_CHECKING:
    from covenant.peers.directory.peer_directory import PeerDirectory


def address(peer: Peer) -> str:
    if peer.url is None:
        raise PeerConflict("no_address", f"{peer.name} has no address: it fetches its messages")
    return peer.url


TRIES: Final = 2
JITTER: Final = 0.2
ASIDE_BYTES: Final = 64 * 1024
DELIVERY_S: Final = 30.0
RETRY_AFTER_S_MAX: Final = 3_600
FAILURE_CHARS_MAX: Final = 300

OTHER_KEYS: Final = frozenset({"unknown_prekey", "prekey_expired", "wrong_recipient", "refused"})
"""Said where the peer's keys are not those that we know, or where somebody else is at its address: ask who is there."""
# What may be said of one message or delegation; everything else concerns all that the peer could be sent.
OF_ONE: Final = frozenset({400, 403, 404, 409, 413})
OF_ALL: Final = frozenset({"refused", "unknown_route", "host_not_allowed", *Code} - {Code.REPLAYED, Code.TOO_LARGE})


class DeliveryFailure(NamedTuple):
    """`whole`: it is the peer that cannot be reached or takes nothing, and not this message alone."""

    code: str
    reason: str
    whole: bool
    retry_after_ms: int = 0

    def __str__(self) -> str:
        return f"{self.code}: {self.reason}"[:FAILURE_CHARS_MAX]


class DeliveryTrouble(NamedTuple):
    """What does not get through. `offer_id` is None if nothing does.

    `next_ms`: when it is tried again, for people. `due_ms`: the same by the clock that nobody sets, by which we wait.
    """

    peer: InstanceId
    offer_id: str | None
    failure: str
    code: str
    attempts: int
    next_ms: int
    due_ms: int


class DeliveryAnswer(NamedTuple):
    envelope: bytes
    body: bytes


class EnvelopeSender(PeerService):
    def __init__(self, context: PeerContext, directory: PeerDirectory) -> None:
        super().__init__(context)
        self._directory = directory

    async def hand(
        self,
        peer: Peer,
        path: str,
        body: bytes,
        *,
        typ: str,
        seq: int | None = None,
        timeout_s: float = DELIVERY_S,
    ) -> DeliveryAnswer | DeliveryFailure:
        fresh = False
        failed = DeliveryFailure("", "", whole=True)
        for _ in range(TRIES):
            try:
                envelope = await self._seal(peer, body, typ=typ, seq=seq, fresh=fresh)
                response = await self._connections.to(address(peer)).post(path, envelope, timeout_s=timeout_s)
            except PeerCallFailed as line:
                if fresh:
                    return failed  # what the peer said of it is more than that nobody says who is there
                failed = DeliveryFailure(line.code, line.message, whole=True)
                if line.code == "connection_lost":
                    continue
                return failed
            except Refusal as refusal:
                return DeliveryFailure(refusal.code, refusal.message, whole=True)
            if response.status == 200:
                return DeliveryAnswer(envelope, response.body)
            failed = _failed(response)
            if failed.code not in OTHER_KEYS:
                return failed
            fresh = True
        return failed

    async def post(self, peer: Peer, path: str, envelope: bytes) -> bytes | DeliveryFailure:
        try:
            response = await self._connections.to(address(peer)).post(path, envelope, timeout_s=DELIVERY_S)
        except PeerCallFailed as line:
            return DeliveryFailure(line.code, line.message, whole=True)
        return response.body if response.status == 200 else _failed(response)

    def trouble(
        self, peer: InstanceId, failed: DeliveryFailure, attempts: int, offer_id: str | None = None
    ) -> DeliveryTrouble:
        """When it is tried again after so many failures in a row."""
        backoff = Backoff(self._settings.retry_first_ms, self._settings.retry_max_ms, jitter=JITTER)
        pause_ms = max(1, int(backoff.pause(attempts, self._context.chance())), failed.retry_after_ms)
        next_ms, due_ms = self._now_ms() + pause_ms, self._monotonic_ms() + pause_ms
        return DeliveryTrouble(peer, offer_id, str(failed), failed.code, attempts, next_ms, due_ms)

    async def _seal(self, peer: Peer, body: bytes, *, typ: str, seq: int | None, fresh: bool) -> bytes:
        prekey = await self._directory.prekey_for(peer, fresh=fresh)
        now_ms, seal, epoch = self._now_ms(), self._keyring.seal, self._epoch_for(self._ledger.peer(peer.id) or peer)

        def sealing() -> bytes:
            return seal(body, typ=typ, to=peer.id, prekey=prekey, now_ms=now_ms, seq=seq, epoch=epoch)

        try:
            return sealing() if len(body) <= ASIDE_BYTES else await asyncio.to_thread(sealing)
        except ValueError as wrong:
            raise Invalid("cannot_seal", str(wrong)) from wrong


def _failed(response: PeerResponse) -> DeliveryFailure:
    try:
        refused = decode_refused(response.body)
    except Invalid:
        refused = EnvelopeRefusal()
    status = response.status
    code = refused.code or f"http_{status}"
    whole = status not in OF_ONE or not refused.code or code in OF_ALL
    return DeliveryFailure(code, refused.error or f"HTTP {status}", whole, _retry_after_ms(response))


def _retry_after_ms(response: PeerResponse) -> int:
    said = response.headers.get("retry-after", "").strip()
    if response.status not in (429, 503) or not (said.isascii() and said.isdigit() and len(said) <= 9):
        return 0
    return min(int(said), RETRY_AFTER_S_MAX) * 1_000
