"""Checking cards: ours, and those of the official SDK; and every way to pretend."""

import base64
import json
from typing import Any

import pytest

from covenant.seal.cards import CardSigner, header_of, signer_of
from covenant.seal.keys import new_private_key

URL = "https://h.example/keys"
CARD: dict[str, Any] = {"name": "x", "version": "1", "description": "", "skills": [{"id": "s", "tags": []}]}
SIGNER = CardSigner(new_private_key())
KEYS = SIGNER.key_set()


def signatures(card: dict[str, Any] = CARD) -> list[dict[str, Any]]:
    return [signed._asdict() for signed in SIGNER.sign(card, keys_url=URL)]


def packed(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def test_a_card_is_known_by_its_signer() -> None:
    for signature in signatures():
        assert signer_of([CARD], signature, KEYS) == SIGNER.key_id
        assert signer_of([{**CARD, "signatures": signatures()}], signature, KEYS) == SIGNER.key_id


@pytest.mark.parametrize("change", [{"name": "y"}, {"version": "2"}, {"url": "https://evil.example"}])
def test_a_change_after_signing_is_noticed(change: dict[str, Any]) -> None:
    assert signer_of([{**CARD, **change}], signatures()[0], KEYS) is None


def test_one_of_several_forms_is_enough() -> None:
    assert signer_of([{**CARD, "url": "0.3's own"}, CARD], signatures()[0], KEYS) == SIGNER.key_id


def test_another_key_under_the_same_name_does_not_help() -> None:
    other = CardSigner(new_private_key()).key_set()["keys"][0]
    assert signer_of([CARD], signatures()[0], {"keys": [{**other, "kid": SIGNER.key_id}]}) is None


@pytest.mark.parametrize("keys", [{}, {"keys": []}, {"keys": [{"kid": "other"}]}, {"keys": [{"kid": SIGNER.key_id}]}])
def test_without_the_key_nothing_holds(keys: dict[str, Any]) -> None:
    assert signer_of([CARD], signatures()[0], keys) is None


@pytest.mark.parametrize("algorithm", ["none", "HS256", "", None, 5])
def test_an_algorithm_without_a_public_key_is_not_taken(algorithm: Any) -> None:
    signature = {**signatures()[0], "protected": packed({"alg": algorithm, "kid": SIGNER.key_id})}
    shared = {"keys": [{"kty": "oct", "k": packed("secret"), "kid": SIGNER.key_id}]}
    assert signer_of([CARD], signature, shared) is None
    assert signer_of([CARD], signature, KEYS) is None


@pytest.mark.parametrize(
    "signature",
    [{}, {"protected": 5}, {"protected": "!!", "signature": "x"}, {"protected": packed([]), "signature": ""}],
)
def test_what_is_no_signature_does_not_hold(signature: dict[str, Any]) -> None:
    assert signer_of([CARD], signature, KEYS) is None
    assert header_of(signature) == {}


def test_a_header_can_be_read_before_it_is_believed() -> None:
    assert header_of(signatures()[0])["jku"] == URL
