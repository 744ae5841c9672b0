"""Checking a card's signatures: a JWS over the canonical form of the card, made again from what was read.

Only algorithms with a public key are taken, each with a key of its own kind; the key comes from the set that the caller
trusts, by its id. A card has several forms that a signer may have meant; a signature that holds for one of them holds.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from joserfc import jws
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from covenant.seal.cards import canonical, without_empty

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


class _Registry(jws.JWSRegistry):
    max_header_length = _PART_CHARS_MAX
    max_payload_length = 16 * 1024 * 1024

    def get_alg(self, name: str) -> Any:  # the library does not export the type
        # It knows more than it recommends; the list above is ours.
        return self.algorithms[name] if name in ALGORITHMS else super().get_alg(name)


_REGISTRY: Final = _Registry(algorithms=list(ALGORITHMS))


def header_of(signature: Mapping[str, Any]) -> dict[str, Any]:
    """The protected header, unproven; empty if it cannot be read."""
    protected = signature.get("protected")
    if not isinstance(protected, str) or len(protected) > _PART_CHARS_MAX:
        return {}
    try:
        read = json.loads(base64.urlsafe_b64decode(protected + "=" * (-len(protected) % 4)))
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def signer_of(forms: Sequence[Mapping[str, Any]], signature: Mapping[str, Any], keys: Mapping[str, Any]) -> str | None:
    """The id of the key that signed one of these forms of a card; None if the signature does not hold."""
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
    unsigned = [{name: value for name, value in form.items() if name != "signatures"} for form in forms]
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
