"""One delivery: a body sealed for a peer as it is now, handed over its line, and what came of it.

Each try seals anew: an envelope lives for minutes, and keys change. If the peer does not know the key that
was used, it is asked for those that it has, once, and the same is tried again at once. So it is when a kept connection
turns out to be closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from covenant.model.peers.peer_record import Peer
from covenant.model.errors import Invalid, Refusal
from covenant.model.peers.instance import Prekey
from covenant.peers.keyring import Keyring
from covenant.peers.line import LineFailed, Lines, Response, address
from covenant.seal.envelope import Code
from covenant.wire.peers import EnvelopeRefused, decode_refused

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


class Failed(NamedTuple):
    """`whole`: it is the peer that cannot be reached or takes nothing, and not this message alone."""

    code: str
    reason: str
    whole: bool
    retry_after_ms: int = 0

    def __str__(self) -> str:
        return f"{self.code}: {self.reason}"[:FAILURE_CHARS_MAX]


class Answer(NamedTuple):
    """What the other side said to this envelope."""

    envelope: bytes
    body: bytes


class Prekeys(Protocol):
    async def prekey_for(self, peer: Peer, *, fresh: bool = False) -> Prekey:
        """What to seal to. Raises LineFailed, or a Refusal if there is none."""


class Delivery:
    def __init__(self, keyring: Keyring, prekeys: Prekeys, lines: Lines, *, now_ms: Callable[[], int]) -> None:
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
    ) -> Answer | Failed:
        """The peer's answer, if it took it."""
        fresh = False
        failed = Failed("", "", whole=True)
        for _ in range(TRIES):
            try:
                envelope = await self._seal(peer, body, typ=typ, seq=seq, fresh=fresh)
                response = await self._lines.to(address(peer)).post(path, envelope, timeout_s=timeout_s)
            except LineFailed as line:
                if fresh:
                    return failed  # what the peer said of it is more than that nobody says who is there
                failed = Failed(line.code, line.message, whole=True)
                if line.code == "connection_lost":
                    continue
                return failed
            except Refusal as refusal:
                return Failed(refusal.code, refusal.message, whole=True)
            if response.status == 200:
                return Answer(envelope, response.body)
            failed = _failed(response)
            if failed.code not in OTHER_KEYS:
                return failed
            fresh = True
        return failed

    async def post(self, peer: Peer, path: str, envelope: bytes) -> bytes | Failed:
        """What is sealed already."""
        try:
            response = await self._lines.to(address(peer)).post(path, envelope, timeout_s=DELIVERY_S)
        except LineFailed as line:
            return Failed(line.code, line.message, whole=True)
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


def _failed(response: Response) -> Failed:
    try:
        refused = decode_refused(response.body)
    except Invalid:
        refused = EnvelopeRefused()
    status = response.status
    code = refused.code or f"http_{status}"
    whole = status not in OF_ONE or not refused.code or code in OF_ALL
    return Failed(code, refused.error or f"HTTP {status}", whole, _retry_after_ms(response))


def _retry_after_ms(response: Response) -> int:
    said = response.headers.get("retry-after", "").strip()
    if response.status not in (429, 503) or not (said.isascii() and said.isdigit() and len(said) <= 9):
        return 0
    return min(int(said), RETRY_AFTER_S_MAX) * 1_000
