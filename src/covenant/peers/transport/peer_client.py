"""Sending one envelope to one peer over HTTP, and how that can fail.

`EnvelopeSender` seals the body anew for each try, since an envelope lives for minutes and keys change. If the peer does
not know the key that was used, it is asked once for its present keys and the same message is sent again at once. The
same happens when a kept connection turns out to be closed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol

from covenant.model.errors import CovenantError, Invalid, Refusal
from covenant.model.peers.instance import InstanceId, Prekey
from covenant.model.peers.peer_record import Peer
from covenant.peers.directory.instance_keys import InstanceKeys
from covenant.seal.envelope import Code
from covenant.wire.peers import EnvelopeRefusal, decode_refused

MINUTE_MS: Final = 60_000
JITTER: Final = 0.2
DOUBLINGS_MAX: Final = 30


class MessageRate:
    """A bucket for each peer, that holds what it may say in a minute and fills at that rate. In memory: a restart
    gives everybody a full one."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._buckets: dict[InstanceId, tuple[float, int]] = {}

    def take(self, peer: InstanceId, per_min: int) -> int | None:
        """Spend one. None, or in how many milliseconds there will be one to spend."""
        now_ms = self._now_ms()
        left, at_ms = self._buckets.get(peer, (float(per_min), now_ms))
        # A clock that was set back gives nothing, and takes nothing.
        left = min(float(per_min), left + max(0, now_ms - at_ms) * per_min / MINUTE_MS)
        taken = left >= 1
        self._buckets[peer] = (left - 1 if taken else left, now_ms)
        return None if taken else math.ceil((1 - left) * MINUTE_MS / per_min)


def backoff_ms(attempts: int, first_ms: int, max_ms: int, chance: float) -> int:
    """The pause after so many failures in a row: twice as long each time, a fifth more or less by `chance` (0 to 1)."""
    pause_ms = min(max_ms, first_ms * 2 ** min(max(0, attempts - 1), DOUBLINGS_MAX))
    return max(1, int(pause_ms * (1 + JITTER * (2 * chance - 1))))


IDENTITY: Final = "/api/v1/a2a/identity"
RECEIVE: Final = "/api/v1/a2a/receive"
POLL: Final = "/api/v1/a2a/poll"


class PeerResponse(NamedTuple):
    status: int
    headers: Mapping[str, str]
    """By names in lower case."""
    body: bytes


class PeerCallFailed(CovenantError):
    """Nobody answered, or nobody may be asked there. `passing`: it may be otherwise in a while."""

    def __init__(self, code: str, message: str, *, passing: bool) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.passing = passing


class PeerConnection(Protocol):
    """To one address. Follows no redirects; bounded in size and time. `PeerCallFailed` is all that it raises."""

    async def get(self, path: str) -> PeerResponse: ...
    async def post(self, path: str, body: bytes, *, timeout_s: float) -> PeerResponse: ...


class PeerConnections(Protocol):
    """Connections by address, kept open as long as they are used. A private address is only called for a peer that an
    operator or a setting has given there."""

    def to(self, url: str) -> PeerConnection: ...


def address(peer: Peer) -> str:
    if peer.url is None:
        raise PeerCallFailed(
            "no_address", f"{peer.name} has no address; it fetches what there is for it", passing=False
        )
    return peer.url


TRIES: Final = 2
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


class DeliveryAnswer(NamedTuple):
    """What the other side said to this envelope."""

    envelope: bytes
    body: bytes


class PrekeySource(Protocol):
    async def prekey_for(self, peer: Peer, *, fresh: bool = False) -> Prekey:
        """What to seal to. Raises PeerCallFailed, or a Refusal if there is none."""


class EnvelopeSender:
    def __init__(
        self, keyring: InstanceKeys, prekeys: PrekeySource, lines: PeerConnections, *, now_ms: Callable[[], int]
    ) -> None:
        self._keyring = keyring
        self._prekeys = prekeys
        self._lines = lines
        self._now_ms = now_ms

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
        """The peer's answer, if it took it."""
        fresh = False
        failed = DeliveryFailure("", "", whole=True)
        for _ in range(TRIES):
            try:
                envelope = await self._seal(peer, body, typ=typ, seq=seq, fresh=fresh)
                response = await self._lines.to(address(peer)).post(path, envelope, timeout_s=timeout_s)
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
        """What is sealed already."""
        try:
            response = await self._lines.to(address(peer)).post(path, envelope, timeout_s=DELIVERY_S)
        except PeerCallFailed as line:
            return DeliveryFailure(line.code, line.message, whole=True)
        return response.body if response.status == 200 else _failed(response)

    async def _seal(self, peer: Peer, body: bytes, *, typ: str, seq: int | None, fresh: bool) -> bytes:
        prekey = await self._prekeys.prekey_for(peer, fresh=fresh)
        now_ms, seal = self._now_ms(), self._keyring.seal

        def sealing() -> bytes:
            return seal(body, typ=typ, to=peer.id, prekey=prekey, now_ms=now_ms, seq=seq)

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
