"""What instances say under their signature: the offer that a requester stands for, and what a provider can do.

An offer's assertion and its token (`seal.tokens`) together are what the requester claims to be allowed. A capability
response is an answer to one challenge by one requester; what was announced without one is a hint.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.constant_time import bytes_eq

from covenant.model.ids import PublicKey
from covenant.model.peers.delegation_messages import CapabilityResponse, DelegationOffer
from covenant.model.peers.instance import InstanceId
from covenant.seal.identity import SKEW_MS, bundle_holds, is_key_of, unsigned
from covenant.seal.signed_documents import base64url, document_holds, sign_document

_OFFER: Final = "offer"
_CAPABILITIES: Final = "capabilities"


def new_challenge() -> str:
    """32 random bytes, in base64url."""
    return base64url(AESGCM.generate_key(bit_length=256))


def assert_offer(private_key: bytes, offer: DelegationOffer, *, provider: InstanceId) -> DelegationOffer:
    """The offer with its assertion. It names the provider, who so cannot offer it on as if by the requester."""
    return msgspec.structs.replace(offer, assertion=sign_document(private_key, _OFFER, _asserted(offer, provider)))


def offer_holds(offer: DelegationOffer, *, requester: InstanceId, key: PublicKey, provider: InstanceId) -> bool:
    return (
        offer.assertion is not None
        and is_key_of(key, requester)
        and document_holds(key, _OFFER, _asserted(offer, provider), offer.assertion)
    )


def sign_capabilities(private_key: bytes, response: CapabilityResponse) -> CapabilityResponse:
    return msgspec.structs.replace(response, signature=sign_document(private_key, _CAPABILITIES, unsigned(response)))


def capabilities_hold(
    response: CapabilityResponse, *, provider: InstanceId, audience: InstanceId, challenge: str, now_ms: int
) -> bool:
    """Whether this is `provider`'s own answer, now, to the challenge that `audience` sent."""
    return (
        response.provider == provider
        and response.audience == audience
        and bytes_eq(response.nonce.encode(), challenge.encode())
        and response.issued_at_ms <= now_ms + SKEW_MS
        and now_ms <= response.expires_at_ms + SKEW_MS
        and bundle_holds(response.keys, provider, now_ms)
        and document_holds(PublicKey(response.keys.identity_key), _CAPABILITIES, unsigned(response), response.signature)
    )


def _asserted(offer: DelegationOffer, provider: InstanceId) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(offer)
    del document["assertion"]
    return {**document, "provider": provider}
