"""Signed documents: a detached JWS (RFC 7515, appendix F) over the canonical form (RFC 8785) of some JSON.

A signature is the text `<header>..<value>`. Its header is fixed by the key and the kind of document, byte for byte, and
compared as bytes: there is no algorithm to choose, and a signature of one kind never passes for one of another.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from collections.abc import Mapping
from typing import Any, Final

import rfc8785
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from covenant.model.errors import CovenantError
from covenant.model.grant import Grant
from covenant.model.ids import PublicKey, from_base58
from covenant.seal.keys import public_key, sign, verify

ALGORITHM: Final = "Ed25519"
PREFIX: Final = "covenant-"


class Uncanonical(CovenantError, ValueError):
    """Not JSON that has a canonical form: a whole number beyond 2^53 - 1, NaN, or half of a character."""


def canonical(document: Any) -> bytes:
    try:
        return rfc8785.dumps(document)
    except (ValueError, RecursionError, TypeError) as wrong:
        raise Uncanonical(str(wrong)) from None


def digest(document: Any) -> str:
    return hashlib.sha256(canonical(document)).hexdigest()


def sign_document(private_key: bytes, kind: str, document: Mapping[str, Any]) -> str:
    header = _header(public_key(private_key), kind)
    value = Ed25519PrivateKey.from_private_bytes(private_key).sign(_signed_bytes(header, document))
    return f"{header}..{base64url(value)}"


def document_holds(key: PublicKey, kind: str, document: Mapping[str, Any], signature: str) -> bool:
    header, dots, value = signature.partition("..")
    try:
        if not dots or header != _header(key, kind):
            return False
        checked_key(key).verify(from_base64url(value), _signed_bytes(header, document))
    except (InvalidSignature, ValueError):
        return False
    return True


def _header(key: PublicKey, kind: str) -> str:
    return base64url(canonical({"alg": ALGORITHM, "kid": key, "typ": PREFIX + kind}))


def _signed_bytes(header: str, document: Mapping[str, Any]) -> bytes:
    return f"{header}.{base64url(canonical(document))}".encode()


# With a key of small order a signature can be made that holds for every message: whoever shows one could say afterwards
# that anybody signed. These are all their encodings, those that are not canonical too, without the sign bit.
_SMALL_ORDER: Final = frozenset(
    bytes.fromhex(text)
    for text in (
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000000",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    )
)


def checked_key(key: PublicKey) -> Ed25519PublicKey:
    """The key to verify with; `ValueError` if it is none, is written in another way than ours, or proves nothing."""
    raw = from_base58(key)
    if len(raw) != 32 or raw[:31] + bytes([raw[31] & 0x7F]) in _SMALL_ORDER:
        raise ValueError("not a usable Ed25519 key")
    return Ed25519PublicKey.from_public_bytes(raw)


def base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def from_base64url(text: str) -> bytes:
    """Strictly: one text for each sequence of bytes, so that nothing can be changed without a trace."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as wrong:
        raise ValueError(str(wrong)) from None
    if base64url(data) != text:
        raise ValueError("not base64url in its one form")
    return data


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


_CONTEXT = b"covenant.grant.v1\n"


def grant_bytes(grant: Grant) -> bytes:
    return b"".join(
        (
            _CONTEXT,
            from_base58(grant.subject.pubkey),
            _sized(grant.action.encode()),
            _sized(grant.scope_json.encode()),
            from_base58(grant.granted_by.pubkey),
            struct.pack(">?QQ", grant.expires_at is not None, grant.expires_at or 0, grant.granted_at_ms),
            _sized(grant.nonce.encode()),
        )
    )


def sign_grant(private_key: bytes, grant: Grant) -> str:
    return sign(private_key, grant_bytes(grant))


def verify_grant(grant: Grant) -> bool:
    return verify(grant.granted_by.pubkey, grant_bytes(grant), grant.signature_b58)


def _sized(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data
