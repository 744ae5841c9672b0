"""Two instances with keys, and what passes between them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from covenant.model.peers.delegation_messages import DelegationOffer, DelegationResult, TokenUsage, TranscriptEntry
from covenant.model.peers.instance import InstanceId
from covenant.seal.envelope import Header, _signed_bytes, check, open_checked, replayed, seal
from covenant.seal.identity import InstanceIdentity, PrivatePrekey, new_prekey
from covenant.seal.keys import base64url, canonical, from_base64url, new_private_key

NOW = 1_800_000_000_000
JTI = "5e1f0a52-7a0e-4c8e-9f0c-0d6f1f0f3b11"
OFFER_ID = "0b0e3c52-4f6f-4b8e-8d0a-6a1f1d2c3b4a"
DELEGATION_ID = "1c1f4d63-5a70-4c9f-9e1b-7b2a2e3d4c5b"


class Opened(NamedTuple):
    header: Header
    body: bytes


def open_(
    data: bytes,
    *,
    us: InstanceId,
    now_ms: int,
    known: Callable[[InstanceId], bool],
    seen: Callable[[InstanceId, str], bool],
    prekey: Callable[[str], PrivatePrekey | None],
) -> Opened:
    """All that a recipient does to open an envelope. `seen`: was this `jti` of this sender taken before."""
    checked = check(data, us=us, now_ms=now_ms, known=known)
    header = checked.header
    if seen(InstanceId(header.sender), header.jti):
        raise replayed(header)
    return Opened(header, open_checked(checked, prekey(header.kid), now_ms=now_ms))


class Instance:
    def __init__(self) -> None:
        self.private_key = new_private_key()
        self.identity = InstanceIdentity(self.private_key)
        self.prekey: PrivatePrekey = new_prekey(self.private_key, NOW - 1_000)

    @property
    def id(self) -> InstanceId:
        return self.identity.id

    def seal(self, to: Instance, body: bytes = b'{"canary":1}', **changes: Any) -> bytes:
        given: dict[str, Any] = {
            "typ": "delegation_offer",
            "sender": self.identity,
            "to": to.id,
            "prekey": to.prekey.prekey,
            "jti": JTI,
            "now_ms": NOW,
        }
        return seal(body, **{**given, **changes})

    def open(
        self,
        data: bytes,
        *,
        now_ms: int = NOW,
        known: Callable[[InstanceId], bool] = lambda _: True,
        seen: Callable[[InstanceId, str], bool] = lambda _sender, _jti: False,
    ) -> Opened:
        return open_(data, us=self.id, now_ms=now_ms, known=known, seen=seen, prekey=self.prekey_by_id)

    def prekey_by_id(self, kid: str) -> PrivatePrekey | None:
        return self.prekey if kid == self.prekey.prekey.kid else None


def parts(envelope: bytes) -> dict[str, bytes]:
    return {name: from_base64url(text) for name, text in json.loads(envelope).items()}


def envelope(protected: bytes, ciphertext: bytes, signature: bytes) -> bytes:
    named = {"protected": protected, "ciphertext": ciphertext, "signature": signature}
    return json.dumps({name: base64url(data) for name, data in named.items()}).encode()


def rewritten(sealed: bytes, signer: InstanceIdentity | None = None, **changes: Any) -> bytes:
    """The envelope with another header; signed again by `signer`, or left with the signature it had."""
    was = parts(sealed)
    header = {**json.loads(was["protected"]), **changes}
    protected = canonical({name: value for name, value in header.items() if value is not None})
    signature = was["signature"] if signer is None else signer.sign(_signed_bytes(protected, was["ciphertext"]))
    return envelope(protected, was["ciphertext"], signature)


def offer(**changes: Any) -> DelegationOffer:
    given: dict[str, Any] = {
        "offer_id": OFFER_ID,
        "profile": "coder",
        "task": "write a test",
        "max_token_budget": 50_000,
        "timeout": 300_000,
    }
    return DelegationOffer(**{**given, **changes})


def transcript(lines: int = 5) -> tuple[TranscriptEntry, ...]:
    return tuple(
        TranscriptEntry(seq=n, role="assistant" if n % 2 else "user", content=f"line {n} ✓", at_ms=NOW + n)
        for n in range(1, lines + 1)
    )


def result(**changes: Any) -> DelegationResult:
    given: dict[str, Any] = {
        "offer_id": OFFER_ID,
        "delegation_id": DELEGATION_ID,
        "profile": "coder",
        "status": "completed",
        "result": "done",
        "token_usage": TokenUsage(prompt=10, completion=5, total=15),
        "duration_ms": 1_200,
    }
    return DelegationResult(**{**given, **changes})
