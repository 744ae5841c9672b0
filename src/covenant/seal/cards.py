"""Signed cards: a JWS over the canonical form (RFC 8785) of a card of A2A 1.0 without its signatures.

The payload is detached: the verifier rebuilds it from the card. The specification keeps some empty members, and the
official SDK leaves out all of them. Where the two differ, a card gets a signature for each form; the second leaves only
empty members unsigned. A verifier accepts only algorithms with a public key, each with a key of its own type, from the
set that the caller trusts. A signature is valid if it is valid for one of the forms that a signer may have used.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from joserfc import jws
from joserfc.errors import JoseError
from joserfc.jwk import KeySet, OKPKey

from covenant.model.ids import PublicKey
from covenant.seal.keys import public_key

ALGORITHM: Final = "EdDSA"
ALGORITHMS: Final = (
    "EdDSA",
    "Ed25519",
    "ES256",
    "ES384",
    "ES512",
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
)
SIGNATURES_MAX: Final = 16
_PART_CHARS_MAX: Final = 16 * 1024


class Signed(NamedTuple):
    """Protected header and signature, each in base64url."""

    protected: str
    signature: str


class CardSigner:
    """Signs with one Ed25519 key. The same card always gets the same signatures."""

    def __init__(self, private_key: bytes) -> None:
        self._key = OKPKey.import_key(Ed25519PrivateKey.from_private_bytes(private_key))
        self.key_id: PublicKey = public_key(private_key)

    def sign(self, card: Mapping[str, Any], *, keys_url: str) -> tuple[Signed, ...]:
        """`card` is the 1.0 form as plain values; `keys_url` is the address of the public key."""
        header = {"alg": ALGORITHM, "typ": "JOSE", "kid": self.key_id, "jku": keys_url}
        payloads = dict.fromkeys((canonical(card), canonical(without_empty(_unsigned(card)))))
        return tuple(self._sign(header, payload) for payload in payloads)

    def _sign(self, header: dict[str, Any], payload: bytes) -> Signed:
        protected, _, signature = jws.serialize_compact(header, payload, self._key, registry=_REGISTRY).split(".")
        return Signed(protected, signature)

    def key_set(self) -> dict[str, Any]:
        key = self._key.as_dict(private=False)
        return {"keys": [{**key, "kid": self.key_id, "use": "sig", "alg": ALGORITHM}]}


def canonical(card: Mapping[str, Any]) -> bytes:
    return rfc8785.dumps(_unsigned(card))


def without_empty(value: Any) -> Any:
    """`value` without empty texts, lists and objects, and without members that become empty by this."""
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
    """Our own bounds, and the algorithms above, of which the library recommends only some.

    RFC 9864 has a narrower name, Ed25519, for `EdDSA` with such a key; verifiers know the wider name.
    """

    max_header_length = _PART_CHARS_MAX
    max_payload_length = 16 * 1024 * 1024

    def get_alg(self, name: str) -> Any:  # the library does not export the type
        return self.algorithms[name] if name in ALGORITHMS else super().get_alg(name)


_REGISTRY: Final = _Registry(algorithms=list(ALGORITHMS))


def header_of(signature: Mapping[str, Any]) -> dict[str, Any]:
    """The protected header, unverified; empty if it cannot be decoded."""
    protected = signature.get("protected")
    if not isinstance(protected, str) or len(protected) > _PART_CHARS_MAX:
        return {}
    try:
        read = json.loads(base64.urlsafe_b64decode(protected + "=" * (-len(protected) % 4)))
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def signer_of(forms: Sequence[Mapping[str, Any]], signature: Mapping[str, Any], keys: Mapping[str, Any]) -> str | None:
    """The id of the key that signed one of these forms of a card; None if the signature is invalid."""
    protected, value = signature.get("protected"), signature.get("signature")
    if not isinstance(protected, str) or not isinstance(value, str) or len(protected) + len(value) > _PART_CHARS_MAX:
        return None
    header = header_of(signature)
    key_id = header.get("kid")
    if header.get("alg") not in ALGORITHMS or not isinstance(key_id, str):
        return None
    try:
        trusted = KeySet.import_key_set({"keys": [key for key in keys.get("keys", ()) if key.get("kid") == key_id]})
    except (JoseError, ValueError, TypeError, AttributeError, KeyError):
        return None
    if not trusted.keys:
        return None
    return key_id if any(_holds(protected, payload, value, trusted) for payload in _payloads(forms)) else None


def _payloads(forms: Sequence[Mapping[str, Any]]) -> Iterable[bytes]:
    unsigned = list(map(_unsigned, forms))
    try:
        return dict.fromkeys([canonical(form) for each in unsigned for form in (each, without_empty(each))])
    except (ValueError, RecursionError):
        return ()


def _holds(protected: str, payload: bytes, signature: str, keys: KeySet) -> bool:
    encoded = base64.urlsafe_b64encode(payload).rstrip(b"=").decode()
    try:
        jws.deserialize_compact(f"{protected}.{encoded}.{signature}", keys, registry=_REGISTRY)
    except (JoseError, ValueError, TypeError):
        return False
    return True
