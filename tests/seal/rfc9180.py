"""HPKE written a second time, from RFC 9180 and plain primitives: base mode, X25519, HKDF-SHA256, AES-256-GCM.
The hybrid KEM is written from X-Wing.

Only to be checked against the RFC's own numbers, and then to check with it the library that seals our envelopes, which
shows none of what lies between.
"""

import hashlib
import hmac
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEM_SUITE = b"KEM" + (0x0020).to_bytes(2, "big")
HPKE_SUITE = b"HPKE" + b"".join(number.to_bytes(2, "big") for number in (0x0020, 0x0001, 0x0002))
HYBRID_SUITE = b"HPKE" + b"".join(number.to_bytes(2, "big") for number in (0x647A, 0x0001, 0x0002))
X_WING = bytes.fromhex("5c2e2f2f5e5c")


class Context(NamedTuple):
    shared_secret: bytes
    key_schedule_context: bytes
    secret: bytes
    key: bytes
    base_nonce: bytes

    def nonce(self, seq: int) -> bytes:
        return (int.from_bytes(self.base_nonce, "big") ^ seq).to_bytes(12, "big")

    def seal(self, seq: int, aad: bytes, plaintext: bytes) -> bytes:
        return AESGCM(self.key).encrypt(self.nonce(seq), plaintext, aad)

    def open(self, seq: int, aad: bytes, ciphertext: bytes) -> bytes:
        return AESGCM(self.key).decrypt(self.nonce(seq), ciphertext, aad)


def sender_context(ephemeral: X25519PrivateKey, recipient: X25519PublicKey, info: bytes) -> Context:
    enc, pk_r = ephemeral.public_key().public_bytes_raw(), recipient.public_bytes_raw()
    return _schedule(_shared(ephemeral.exchange(recipient), enc + pk_r), info)


def recipient_context(enc: bytes, private: X25519PrivateKey, info: bytes) -> Context:
    dh = private.exchange(X25519PublicKey.from_public_bytes(enc))
    return _schedule(_shared(dh, enc + private.public_key().public_bytes_raw()), info)


def hybrid_context(enc: bytes, seed: bytes, info: bytes) -> Context:
    expanded = hashlib.shake_256(seed).digest(96)
    lattice = MLKEM768PrivateKey.from_seed_bytes(expanded[:64])
    curve = X25519PrivateKey.from_private_bytes(expanded[64:])
    enc_curve = enc[1088:]
    secrets = lattice.decapsulate(enc[:1088]) + curve.exchange(X25519PublicKey.from_public_bytes(enc_curve))
    shared = hashlib.sha3_256(secrets + enc_curve + curve.public_key().public_bytes_raw() + X_WING).digest()
    return _schedule(shared, info, HYBRID_SUITE)


def _shared(dh: bytes, kem_context: bytes) -> bytes:
    eae_prk = _extract(KEM_SUITE, b"", b"eae_prk", dh)
    return _expand(KEM_SUITE, eae_prk, b"shared_secret", kem_context, 32)


def _schedule(shared_secret: bytes, info: bytes, suite: bytes = HPKE_SUITE) -> Context:
    psk_id_hash = _extract(suite, b"", b"psk_id_hash", b"")
    context = b"\0" + psk_id_hash + _extract(suite, b"", b"info_hash", info)
    secret = _extract(suite, shared_secret, b"secret", b"")
    key = _expand(suite, secret, b"key", context, 32)
    return Context(shared_secret, context, secret, key, _expand(suite, secret, b"base_nonce", context, 12))


def _extract(suite: bytes, salt: bytes, label: bytes, ikm: bytes) -> bytes:
    return hmac.digest(salt or bytes(32), b"HPKE-v1" + suite + label + ikm, hashlib.sha256)


def _expand(suite: bytes, prk: bytes, label: bytes, info: bytes, length: int) -> bytes:
    assert length <= 32
    labeled = length.to_bytes(2, "big") + b"HPKE-v1" + suite + label + info
    return hmac.digest(prk, labeled + b"\x01", hashlib.sha256)[:length]
