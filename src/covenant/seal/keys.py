"""Ed25519 keys, signatures and bearer tokens, as bytes and base58. Nothing here touches a file or a clock."""

from __future__ import annotations

import hashlib
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from covenant.model.ids import PublicKey, base58, from_base58

TOKEN_PREFIX_LENGTH: Final = 6
TENANT_TOKEN: Final = "atr_"  # noqa: S105  (how such a token begins)
TENANT_TOKEN_PREFIX_LENGTH: Final = len(TENANT_TOKEN) + TOKEN_PREFIX_LENGTH

_DERIVED: Final = b"covenant.identity.v1\n"
_SECRET: Final = b"covenant.secret.v1\n"


def new_private_key() -> bytes:
    return Ed25519PrivateKey.generate().private_bytes_raw()


def public_key(private_key: bytes) -> PublicKey:
    raw = Ed25519PrivateKey.from_private_bytes(private_key).public_key().public_bytes_raw()
    return PublicKey(base58(raw))


def derived_key(private_key: bytes, display: str) -> bytes:
    """The private key of an identity that the daemon holds: always the same for its name, so nothing is stored.

    HKDF-SHA256: whoever knows one derived key knows neither another nor the key they come from.
    """
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=_DERIVED + display.encode()).derive(private_key)


def derived_secret(private_key: bytes, purpose: str) -> bytes:
    """32 bytes for one purpose of the daemon: always the same, so nothing is stored. Made as `derived_key` is."""
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=_SECRET + purpose.encode()).derive(private_key)


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


def new_tenant_token() -> str:
    """A tenant's bearer token: `atr_` and 32 random bytes in hex."""
    return TENANT_TOKEN + AESGCM.generate_key(bit_length=256).hex()


def token_hash(token: str) -> str:
    """What is stored and looked up. A token has 256 bits of its own, so it needs no salt."""
    return hashlib.sha256(token.encode()).hexdigest()


def nonce() -> str:
    return AESGCM.generate_key(bit_length=128).hex()
