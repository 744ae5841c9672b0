"""The suites of envelopes: the form of prekeys, and how a body is sealed to one. Both are HPKE (RFC 9180) in base mode.

Opening the hybrid suite takes both halves of a prekey, X25519 and ML-KEM-768. Its private key is a seed of 32 bytes,
from which SHAKE256 derives both keys, as X-Wing specifies. So an attacker who computes the X25519 private key from its
public key learns nothing about the other.

`SUITES` has the hybrid suite only where the crypto library and its backend support ML-KEM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from covenant.model.ids import base58, from_base58
from covenant.model.peers.instance import HYBRID_SUITE, SUITE
from covenant.seal.keys import base64url, from_base64url

TAG_BYTES: Final = 16
HYBRID_ENC_BYTES: Final = 1_088 + 32
_MLKEM_PUBLIC_BYTES: Final = 1_184
_MLKEM_SEED_BYTES: Final = 64


class SealingSuite(NamedTuple):
    """`read` and the functions on its result raise `ValueError` for anything that is not a key of this suite."""

    hpke: hpke.Suite
    enc_bytes: int
    """The length of the encapsulated key before the sealed body."""
    read: Callable[[str], bytes]
    """Decodes a public key from its text."""
    write: Callable[[bytes], str]
    public: Callable[[bytes], bytes]
    """Computes the public half from the private one."""
    recipient: Callable[[bytes], Any]
    """Makes HPKE's recipient from a public key."""
    opener: Callable[[bytes], Any]
    """Makes HPKE's private key from a private half."""

    @property
    def overhead(self) -> int:
        """The number of bytes that sealing adds to a body."""
        return self.enc_bytes + TAG_BYTES

    def seal(self, body: bytes, public_key: str, info: bytes) -> bytes:
        return self.hpke.encrypt(body, self.recipient(self.read(public_key)), info=info)

    def open(self, ciphertext: bytes, private_key: bytes, info: bytes) -> bytes:
        """Opens a body. Raises `InvalidTag` or `ValueError`."""
        return self.hpke.decrypt(ciphertext, self.opener(private_key), info=info)


def new_prekey_secret() -> bytes:
    """A private half for a prekey of either suite."""
    return AESGCM.generate_key(bit_length=256)


def _x25519_public(private_key: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private_key).public_key().public_bytes_raw()


def _hybrid() -> SealingSuite | None:
    try:
        from cryptography.hazmat.primitives.asymmetric import mlkem  # noqa: PLC0415  (not in every release)

        suite = hpke.Suite(hpke.KEM.MLKEM768_X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)
        mlkem.MLKEM768PrivateKey.generate()
    except (ImportError, AttributeError, UnsupportedAlgorithm):
        return None

    def halves(seed: bytes) -> tuple[mlkem.MLKEM768PrivateKey, X25519PrivateKey]:
        if len(seed) != 32:
            raise ValueError("the seed of a hybrid key has 32 bytes")
        expanded = hashlib.shake_256(seed).digest(_MLKEM_SEED_BYTES + 32)
        return (
            mlkem.MLKEM768PrivateKey.from_seed_bytes(expanded[:_MLKEM_SEED_BYTES]),
            X25519PrivateKey.from_private_bytes(expanded[_MLKEM_SEED_BYTES:]),
        )

    def public(seed: bytes) -> bytes:
        mlkem_key, x25519_key = halves(seed)
        return mlkem_key.public_key().public_bytes_raw() + x25519_key.public_key().public_bytes_raw()

    def recipient(raw: bytes) -> hpke.MLKEM768X25519PublicKey:
        return hpke.MLKEM768X25519PublicKey(
            mlkem.MLKEM768PublicKey.from_public_bytes(raw[:_MLKEM_PUBLIC_BYTES]),
            X25519PublicKey.from_public_bytes(raw[_MLKEM_PUBLIC_BYTES:]),
        )

    return SealingSuite(
        hpke=suite,
        enc_bytes=HYBRID_ENC_BYTES,
        read=from_base64url,
        write=base64url,
        public=public,
        recipient=recipient,
        opener=lambda seed: hpke.MLKEM768X25519PrivateKey(*halves(seed)),
    )


_CLASSIC: Final = SealingSuite(
    hpke=hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM),
    enc_bytes=32,
    read=from_base58,
    write=base58,
    public=_x25519_public,
    recipient=X25519PublicKey.from_public_bytes,
    opener=X25519PrivateKey.from_private_bytes,
)

_HYBRID = _hybrid()
SUITES: Final[dict[str, SealingSuite]] = {
    SUITE: _CLASSIC,
    **({HYBRID_SUITE: _HYBRID} if _HYBRID is not None else {}),
}


def suites_spoken(*, hybrid: bool) -> tuple[str, ...]:
    """The suites of an instance that uses the hybrid suite, or does not."""
    return tuple(SUITES) if hybrid else (SUITE,)
