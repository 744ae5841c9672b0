"""Signed cards: the canonical form against its RFC, and signatures that others can check."""

import base64
import json
import struct
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from covenant.model.ids import from_base58
from covenant.seal.cards import CardSigner, Signed, canonical, without_empty
from covenant.seal.keys import new_private_key, public_key

KEYS_URL = "https://agents.example/.well-known/jwks.json"


def unpacked(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def packed(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def holds(signer: CardSigner, signed: Signed, payload: bytes) -> bool:
    """Checked by hand, as RFC 7515 says."""
    key = Ed25519PublicKey.from_public_bytes(from_base58(signer.key_id))
    try:
        key.verify(unpacked(signed.signature), f"{signed.protected}.{packed(payload)}".encode())
    except InvalidSignature:
        return False
    return True


# RFC 8785, appendix B: the bits of a double, and how it is written.
NUMBERS = {
    "0000000000000000": "0",
    "8000000000000000": "0",
    "0000000000000001": "5e-324",
    "8000000000000001": "-5e-324",
    "7fefffffffffffff": "1.7976931348623157e+308",
    "ffefffffffffffff": "-1.7976931348623157e+308",
    "4340000000000000": "9007199254740992",
    "c340000000000000": "-9007199254740992",
    "4430000000000000": "295147905179352830000",
    "44b52d02c7e14af5": "9.999999999999997e+22",
    "44b52d02c7e14af6": "1e+23",
    "44b52d02c7e14af7": "1.0000000000000001e+23",
    "444b1ae4d6e2ef4e": "999999999999999700000",
    "444b1ae4d6e2ef4f": "999999999999999900000",
    "444b1ae4d6e2ef50": "1e+21",
    "3eb0c6f7a0b5ed8c": "9.999999999999997e-7",
    "3eb0c6f7a0b5ed8d": "0.000001",
    "41b3de4355555553": "333333333.3333332",
    "41b3de4355555554": "333333333.33333325",
    "41b3de4355555555": "333333333.3333333",
    "41b3de4355555556": "333333333.3333334",
    "41b3de4355555557": "333333333.33333343",
    "becbf647612f3696": "-0.0000033333333333333333",
    "43143ff3c1cb0959": "1424953923781206.2",
}


@pytest.mark.parametrize(("bits", "text"), NUMBERS.items())
def test_numbers_are_written_as_the_rfc_lists_them(bits: str, text: str) -> None:
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical({"n": number}) == f'{{"n":{text}}}'.encode()


def test_the_example_of_the_rfc_is_written_byte_for_byte() -> None:
    """Section 3.2.4, whose input has numbers, escapes and a literal of each kind."""
    given = {
        "numbers": [333333333.33333329, 1e30, 4.50, 2e-3, 0.000000000000000000000000001],
        "string": "€$\u000f\u000aA'\u0042\u0022\u005c\\\"\u002f",
        "literals": [None, True, False],
    }
    assert (
        canonical(given)
        == (
            '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
            '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
        ).encode()
    )


def test_members_are_sorted_by_their_utf_16_code_units() -> None:
    """Section 3.2.3: the emoji's surrogates come before the Hebrew ligature."""
    given = {"\u20ac": 1, "\r": 2, "\ufb33": 3, "1": 4, "\U0001f600": 5, "\u0080": 6, "\u00f6": 7}
    assert list(json.loads(canonical(given)).values()) == [2, 4, 6, 7, 1, 5, 3]


CARD: dict[str, Any] = {
    "name": "Summarizer",
    "description": "reader — says what matters",
    "capabilities": {"streaming": True, "pushNotifications": False},
    "securityRequirements": [{"schemes": {"bearer": {}}}],
    "skills": [{"id": "chat", "tags": ["text"]}],
}


def test_a_signature_holds_for_the_canonical_form_without_signatures() -> None:
    signer = CardSigner(new_private_key())
    first, *_ = signer.sign({**CARD, "signatures": [{"protected": "x", "signature": "y"}]}, keys_url=KEYS_URL)
    assert holds(signer, first, canonical(CARD))
    assert not holds(signer, first, canonical({**CARD, "name": "Somebody"}))


def test_the_protected_header_says_how_and_with_which_key() -> None:
    key = new_private_key()
    for signed in CardSigner(key).sign(CARD, keys_url=KEYS_URL):
        assert json.loads(unpacked(signed.protected)) == {
            "alg": "EdDSA",
            "typ": "JOSE",
            "kid": public_key(key),
            "jku": KEYS_URL,
        }


def test_a_card_with_something_empty_has_a_second_signature_for_readers_that_drop_it() -> None:
    signer = CardSigner(new_private_key())
    _, second = signer.sign(CARD, keys_url=KEYS_URL)
    assert holds(signer, second, canonical({name: CARD[name] for name in CARD if name != "securityRequirements"}))


def test_a_card_with_nothing_empty_has_one_signature() -> None:
    assert len(CardSigner(new_private_key()).sign({"name": "x", "flag": False, "n": 0}, keys_url=KEYS_URL)) == 1


def test_dropping_what_is_empty_keeps_false_and_zero() -> None:
    given = {"a": "", "b": [], "c": {"d": [{"e": {}}]}, "f": False, "n": 0, "l": ["", "x"], "t": ({}, 1)}
    assert without_empty(given) == {"f": False, "n": 0, "l": ["x"], "t": [1]}


def test_the_same_card_is_signed_alike_and_a_long_one_is_signed_too() -> None:
    key = new_private_key()
    long_card = {**CARD, "skills": [{"id": f"tool-{n}", "description": "x" * 1_000} for n in range(1_000)]}
    for card in (CARD, long_card):
        assert CardSigner(key).sign(card, keys_url=KEYS_URL) == CardSigner(key).sign(card, keys_url=KEYS_URL)


def test_the_key_set_has_the_public_key_and_not_the_private_one() -> None:
    key = new_private_key()
    signer = CardSigner(key)
    (published,) = signer.key_set()["keys"]
    assert published == {
        "kty": "OKP",
        "crv": "Ed25519",
        "x": packed(from_base58(signer.key_id)),
        "kid": signer.key_id,
        "use": "sig",
        "alg": "EdDSA",
    }
