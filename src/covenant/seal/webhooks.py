"""Signed deliveries: Ed25519 over the delivery's id, the moment and the body, in the form of Standard Webhooks.

What is signed is `<id>.<timestamp>.<body>`; the header has `v1a,` and the signature in base64. An id has no dot, so
each signature is of one id, one moment and one body only; and since it begins with neither a context line of ours nor
the header of a JWS, none of them can be taken for anything else that this key signs.
"""

from __future__ import annotations

import base64
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from covenant.model.ids import PublicKey, from_base58
from covenant.seal.keys import public_key

VERSION: Final = "v1a"


class WebhookSigner:
    """Signs with one Ed25519 key, whose public half is in our JSON Web Key Set under `key_id`."""

    def __init__(self, private_key: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(private_key)
        self.key_id: PublicKey = public_key(private_key)

    def sign(self, delivery_id: str, timestamp_s: int, body: bytes) -> str:
        signature = self._key.sign(signed_bytes(delivery_id, timestamp_s, body))
        return f"{VERSION},{base64.b64encode(signature).decode()}"


def signed_bytes(delivery_id: str, timestamp_s: int, body: bytes) -> bytes:
    assert "." not in delivery_id
    return f"{delivery_id}.{timestamp_s}.".encode() + body


def verify_webhook(key: PublicKey, delivery_id: str, timestamp_s: int, body: bytes, signature: str) -> bool:
    version, _, value = signature.partition(",")
    try:
        Ed25519PublicKey.from_public_bytes(from_base58(key)).verify(
            base64.b64decode(value, validate=True), signed_bytes(delivery_id, timestamp_s, body)
        )
    except (InvalidSignature, ValueError):
        return False
    return version == VERSION
