"""Receipts: that an envelope was taken in, said by the one it was for, in words that nobody else can make.

Without one, whoever sits on the way could say "taken" of what he has thrown away, and it would never be sent again.
"""

from __future__ import annotations

import hashlib
from typing import Final

from cryptography.exceptions import InvalidSignature

from covenant.model.ids import PublicKey
from covenant.seal.documents import base64url, checked_key, from_base64url
from covenant.seal.identity import Identity

_RECEIPT: Final = b"covenant.envelope.receipt.v2\n"


def receipt(recipient: Identity, envelope: bytes) -> str:
    return base64url(recipient.sign(_receipted(envelope)))


def receipt_holds(recipient: PublicKey, envelope: bytes, given: str) -> bool:
    """Whether the holder of this key has taken in this very envelope."""
    try:
        checked_key(recipient).verify(from_base64url(given), _receipted(envelope))
    except (InvalidSignature, ValueError):
        return False
    return True


def _receipted(envelope: bytes) -> bytes:
    return _RECEIPT + hashlib.sha256(envelope).digest()
