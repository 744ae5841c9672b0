"""Ed25519 keys, signatures and bearer tokens, as bytes and base58. Nothing here touches a file or a clock."""

from __future__ import annotations

import hashlib
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from covenant.model.ids import PublicKey, base58, from_base58

TOKEN_PREFIX_LENGTH: Final = 6


def new_private_key() -> bytes:
    return Ed25519PrivateKey.generate().private_bytes_raw()


def public_key(private_key: bytes) -> PublicKey:
    raw = Ed25519PrivateKey.from_private_bytes(private_key).public_key().public_bytes_raw()
    return PublicKey(base58(raw))


def sign(private_key: bytes, message: bytes) -> str:
    """The signature in base58: 64 bytes."""
    return base58(Ed25519PrivateKey.from_private_bytes(private_key).sign(message))


def verify(pubkey: PublicKey, message: bytes, signature_b58: str) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(from_base58(pubkey)).verify(from_base58(signature_b58), message)
    except (InvalidSignature, ValueError):
        return False
    return True


def new_token() -> str:
    """A bearer token: 32 random bytes in base58. Shown once; only its hash is kept."""
    return base58(AESGCM.generate_key(bit_length=256))


def token_hash(token: str) -> str:
    """What is stored and looked up. A token has 256 bits of its own, so it needs no salt."""
    return hashlib.sha256(token.encode()).hexdigest()


def nonce() -> str:
    return AESGCM.generate_key(bit_length=128).hex()
