"""The numbers of RFC 9180, by way of a second implementation that must agree with the library in both directions."""

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from covenant.model.peers.instance import HYBRID_SUITE, SUITE
from covenant.seal.envelope import _SEALED
from covenant.seal.identity import new_prekey
from covenant.seal.suites import SUITES
from tests.seal.instances import NOW, Instance, parts
from tests.seal.rfc9180 import hybrid_context, recipient_context, sender_context

VECTOR: dict[str, Any] = json.loads(Path(__file__).with_name("rfc9180.json").read_text(encoding="utf-8"))


def number(name: str) -> bytes:
    return bytes.fromhex(VECTOR[name])


def test_the_numbers_are_those_of_our_suite_in_base_mode() -> None:
    assert [VECTOR[name] for name in ("mode", "kem_id", "kdf_id", "aead_id")] == [0, 0x20, 1, 2]


@pytest.mark.parametrize("side", ["sender", "recipient"])
def test_both_sides_derive_what_the_rfc_lists(side: str) -> None:
    if side == "sender":
        ephemeral = X25519PrivateKey.from_private_bytes(number("skEm"))
        assert ephemeral.public_key().public_bytes_raw() == number("enc") == number("pkEm")
        context = sender_context(ephemeral, X25519PublicKey.from_public_bytes(number("pkRm")), number("info"))
    else:
        private = X25519PrivateKey.from_private_bytes(number("skRm"))
        context = recipient_context(number("enc"), private, number("info"))
    assert {name: getattr(context, name).hex() for name in context._fields} == {
        name: VECTOR[name] for name in context._fields
    }


@pytest.mark.parametrize("seq", range(3))
def test_the_rfcs_messages_are_sealed_and_opened_byte_for_byte(seq: int) -> None:
    sent = {name: bytes.fromhex(value) for name, value in VECTOR["encryptions"][seq].items()}
    private = X25519PrivateKey.from_private_bytes(number("skRm"))
    context = recipient_context(number("enc"), private, number("info"))
    assert context.nonce(seq) == sent["nonce"]
    assert context.seal(seq, sent["aad"], sent["pt"]) == sent["ct"]
    assert context.open(seq, sent["aad"], sent["ct"]) == sent["pt"]


@given(body=st.binary(max_size=300), info=st.binary(max_size=300))
def test_what_the_library_seals_the_rfcs_steps_open_and_the_other_way_round(body: bytes, info: bytes) -> None:
    private = X25519PrivateKey.from_private_bytes(number("skRm"))
    sealed = SUITES[SUITE].hpke.encrypt(body, private.public_key(), info=info)
    assert recipient_context(sealed[:32], private, info).open(0, b"", sealed[32:]) == body
    ephemeral = X25519PrivateKey.generate()
    ciphertext = sender_context(ephemeral, private.public_key(), info).seal(0, b"", body)
    assert (
        SUITES[SUITE].hpke.decrypt(ephemeral.public_key().public_bytes_raw() + ciphertext, private, info=info) == body
    )


def test_an_envelope_is_opened_by_the_rfcs_steps_with_its_header_as_info() -> None:
    ours, theirs = Instance(), Instance()
    made = parts(ours.seal(theirs, b"hello"))
    private = X25519PrivateKey.from_private_bytes(theirs.prekey.private_key)
    context = recipient_context(made["ciphertext"][:32], private, _SEALED + made["protected"])
    assert context.open(0, b"", made["ciphertext"][32:]) == b"hello"


def test_a_hybrid_envelope_is_opened_by_the_steps_of_x_wing_and_of_the_rfc() -> None:
    ours, theirs = Instance(), Instance()
    theirs.prekey = new_prekey(theirs.private_key, NOW, HYBRID_SUITE)
    made = parts(ours.seal(theirs, b"hello"))
    enc, sealed = made["ciphertext"][:1120], made["ciphertext"][1120:]
    context = hybrid_context(enc, theirs.prekey.private_key, _SEALED + made["protected"])
    assert context.open(0, b"", sealed) == b"hello"
