"""The hybrid suite: an envelope opens only with both halves of the prekey, and only as it was sealed."""

import hashlib
import json

import msgspec
import pytest

from covenant.model.peers.instance import HYBRID_SUITE, SUITE, Prekey
from covenant.seal.envelope import BODY_BYTES_MAX, ENVELOPE_BYTES_MAX, Code, EnvelopeRefused, _signed_bytes
from covenant.seal.identity import PrivatePrekey, bundle_holds, new_prekey, prekey_holds, prekey_of, sign_bundle
from covenant.seal.keys import base64url, from_base64url
from covenant.seal.suites import SUITES
from tests.seal.instances import NOW, Instance, envelope, parts, rewritten

MLKEM_PUBLIC = 1_184
MLKEM_ENC = 1_088
OVERHEAD = 1_088 + 32 + 16


class Hybrid(Instance):
    def __init__(self) -> None:
        super().__init__()
        self.classic = self.prekey
        self.prekey = new_prekey(self.private_key, NOW - 1_000, HYBRID_SUITE)


def refused(by: Instance, data: bytes) -> Code:
    with pytest.raises(EnvelopeRefused) as caught:
        by.open(data)
    return caught.value.code


def resealed(made: bytes, sender: Instance, ciphertext: bytes) -> bytes:
    """With another ciphertext, signed by its sender: what is wrong with it only opening can tell."""
    protected = parts(made)["protected"]
    return envelope(protected, ciphertext, sender.identity.sign(_signed_bytes(protected, ciphertext)))


def with_key(prekey: Prekey, public: bytes) -> Prekey:
    return msgspec.structs.replace(prekey, public_key=base64url(public))


def test_what_is_sealed_to_a_hybrid_prekey_opens_and_says_its_suite() -> None:
    a, b = Instance(), Hybrid()
    made = a.seal(b, b"hello")
    opened = b.open(made)
    assert (opened.body, opened.header.suite, opened.header.v) == (b"hello", HYBRID_SUITE, 2)
    assert len(parts(made)["ciphertext"]) == len(b"hello") + OVERHEAD


def test_the_largest_body_fits_an_envelope() -> None:
    a, b = Instance(), Hybrid()
    made = a.seal(b, bytes(BODY_BYTES_MAX))
    assert len(made) <= ENVELOPE_BYTES_MAX
    assert len(b.open(made).body) == BODY_BYTES_MAX


@pytest.mark.parametrize("half", ["mlkem", "x25519"])
def test_with_one_half_of_another_key_it_does_not_open(half: str) -> None:
    a, b, other = Instance(), Hybrid(), Hybrid()
    ours, theirs = (from_base64url(each.prekey.prekey.public_key) for each in (b, other))
    cut = MLKEM_PUBLIC
    mixed = theirs[:cut] + ours[cut:] if half == "mlkem" else ours[:cut] + theirs[cut:]
    assert not prekey_holds(b.identity.key, with_key(b.prekey.prekey, mixed)), "nobody takes it for a key of b's"
    assert refused(b, a.seal(b, prekey=with_key(b.prekey.prekey, mixed))) is Code.CANNOT_OPEN


@pytest.mark.parametrize("half", ["mlkem", "x25519"])
def test_with_one_half_of_another_secret_in_front_it_does_not_open(half: str) -> None:
    a, b = Instance(), Hybrid()
    first, second = (a.seal(b, b"hello") for _ in range(2))
    one, two = (parts(each)["ciphertext"] for each in (first, second))
    place = slice(0, MLKEM_ENC) if half == "mlkem" else slice(MLKEM_ENC, MLKEM_ENC + 32)
    mixed = bytearray(one)
    mixed[place] = two[place]
    assert refused(b, resealed(first, a, bytes(mixed))) is Code.CANNOT_OPEN
    assert b.open(resealed(first, a, one)).body == b"hello"


def test_a_ciphertext_of_another_length_is_refused() -> None:
    a, b = Instance(), Hybrid()
    made = a.seal(b, b"hello")
    whole = parts(made)["ciphertext"]
    for length in (0, 47, 48, MLKEM_ENC, OVERHEAD - 1):
        assert refused(b, resealed(made, a, whole[:length])) is Code.MALFORMED, length
    assert refused(b, resealed(made, a, whole[1:])) is Code.CANNOT_OPEN
    assert refused(b, resealed(made, a, whole[: MLKEM_ENC - 1] + whole[MLKEM_ENC:])) is Code.CANNOT_OPEN
    assert refused(b, resealed(made, a, whole[:MLKEM_ENC] + b"\0" + whole[MLKEM_ENC:])) is Code.CANNOT_OPEN
    assert refused(b, resealed(made, a, whole + b"\0")) is Code.CANNOT_OPEN


def test_the_suite_in_the_header_is_that_of_the_key() -> None:
    a, b = Instance(), Hybrid()
    hybrid = a.seal(b)
    assert refused(b, rewritten(hybrid, a.identity, suite=SUITE)) is Code.SUITE_NOT_SUPPORTED
    b.prekey, kept = b.classic, b.prekey
    classic = a.seal(b, bytes(2_000))
    assert refused(b, rewritten(classic, a.identity, suite=HYBRID_SUITE)) is Code.SUITE_NOT_SUPPORTED
    b.prekey = kept
    assert refused(b, rewritten(hybrid, a.identity, suite=HYBRID_SUITE + "X")) is Code.SUITE_NOT_SUPPORTED


def test_a_hybrid_prekey_is_signed_named_after_itself_and_of_one_length() -> None:
    b, other = Hybrid(), Hybrid()
    prekey, public = b.prekey.prekey, from_base64url(b.prekey.prekey.public_key)
    assert len(public) == MLKEM_PUBLIC + 32
    assert len(prekey.public_key) == 1_622
    assert prekey_holds(b.identity.key, prekey)
    assert not prekey_holds(other.identity.key, prekey)
    for wrong in (public[:-1], public[:32], b"\xff" * MLKEM_PUBLIC + public[MLKEM_PUBLIC:], b""):
        assert not prekey_holds(b.identity.key, with_key(prekey, wrong))
    for changes in ({"kid": "pk_" + "a" * 16}, {"suite": SUITE}, {"not_after_ms": prekey.not_after_ms + 1}):
        assert not prekey_holds(b.identity.key, msgspec.structs.replace(prekey, **changes))


def test_a_bundle_has_no_hybrid_prekeys_for_earlier_releases_would_refuse_it() -> None:
    b = Hybrid()
    assert bundle_holds(sign_bundle(b.private_key, [b.classic.prekey], NOW), b.id, NOW)
    assert not bundle_holds(sign_bundle(b.private_key, [b.classic.prekey, b.prekey.prekey], NOW), b.id, NOW)


def test_the_same_seed_gives_the_same_key_and_its_halves_are_apart() -> None:
    b = Hybrid()
    prekey, seed = b.prekey
    again = prekey_of(seed, HYBRID_SUITE, prekey.not_before_ms, prekey.not_after_ms, prekey.signature)
    assert again == PrivatePrekey(prekey, seed)
    # The seed is not the X25519 key: who computes that one cannot make the other from it.
    assert SUITES[SUITE].public(seed) != from_base64url(prekey.public_key)[MLKEM_PUBLIC:]
    curve = hashlib.shake_256(seed).digest(96)[64:]
    assert SUITES[SUITE].public(curve) == from_base64url(prekey.public_key)[MLKEM_PUBLIC:]
    with pytest.raises(ValueError, match="32 bytes"):
        prekey_of(seed[:31], HYBRID_SUITE, 0, 1)


def test_a_letter_grows_by_what_the_documents_say() -> None:
    a, b = Instance(), Hybrid()
    hybrid = a.seal(b, bytes(1_000))
    b.prekey = b.classic
    classic = a.seal(b, bytes(1_000))
    assert len(json.loads(hybrid)["ciphertext"]) - len(json.loads(classic)["ciphertext"]) == 1_450
    assert len(hybrid) - len(classic) == 1_462
