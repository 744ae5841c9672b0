"""Signed cards: a JWS over the canonical form (RFC 8785) of a card of A2A 1.0 without its signatures.

The payload is detached: a signature is its protected header and its value, and whoever checks it makes the payload
again from the card. The specification keeps required members and those set on purpose even when they are empty; the
official SDK leaves out everything empty, all the way up. Where the two differ, a card gets a signature for each. What
the second one does not cover is empty, so nothing that a reader could act on is left unsigned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from joserfc import jws
from joserfc.jwk import OKPKey

from covenant.model.ids import PublicKey
from covenant.seal.keys import public_key

ALGORITHM: Final = "EdDSA"


class Signed(NamedTuple):
    """Protected header and signature, each in base64url."""

    protected: str
    signature: str


class CardSigner:
    """Signs with one Ed25519 key. The same card gives the same signatures, at any time."""

    def __init__(self, private_key: bytes) -> None:
        self._key = OKPKey.import_key(Ed25519PrivateKey.from_private_bytes(private_key))
        self.key_id: PublicKey = public_key(private_key)

    def sign(self, card: Mapping[str, Any], *, keys_url: str) -> tuple[Signed, ...]:
        """`card` is the 1.0 form as plain values; `keys_url` is where the public key can be had."""
        header = {"alg": ALGORITHM, "typ": "JOSE", "kid": self.key_id, "jku": keys_url}
        payloads = dict.fromkeys((canonical(card), canonical(without_empty(_unsigned(card)))))
        return tuple(self._sign(header, payload) for payload in payloads)

    def _sign(self, header: dict[str, Any], payload: bytes) -> Signed:
        protected, _, signature = jws.serialize_compact(header, payload, self._key, registry=_REGISTRY).split(".")
        return Signed(protected, signature)

    def key_set(self) -> dict[str, Any]:
        """The public key as a JSON Web Key Set."""
        key = self._key.as_dict(private=False)
        return {"keys": [{**key, "kid": self.key_id, "use": "sig", "alg": ALGORITHM}]}


def canonical(card: Mapping[str, Any]) -> bytes:
    """What is signed."""
    return rfc8785.dumps(_unsigned(card))


def without_empty(value: Any) -> Any:
    """`value` without empty texts, lists and objects, and without what is empty for lack of them."""
    if isinstance(value, Mapping):
        kept = {name: without_empty(inner) for name, inner in value.items()}
        return {name: inner for name, inner in kept.items() if not _empty(inner)}
    if isinstance(value, list | tuple):
        return [inner for inner in map(without_empty, value) if not _empty(inner)]
    return value


def _unsigned(card: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in card.items() if name != "signatures"}


def _empty(value: object) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


class _Registry(jws.JWSRegistry):
    """Without the library's bounds, which are for what strangers send, and without its preference.

    RFC 9864 has a narrower name, Ed25519, for what `EdDSA` means with such a key; verifiers know the wider one.
    """

    max_header_length = 16 * 1024
    max_payload_length = 16 * 1024 * 1024

    def get_alg(self, name: str) -> Any:  # the library does not export the type
        return self.algorithms[name] if name == ALGORITHM else super().get_alg(name)


_REGISTRY: Final = _Registry(algorithms=[ALGORITHM])
