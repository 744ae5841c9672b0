"""A key for each purpose, certified by the identity key, so that the identity key signs keys and nothing else.

A certificate says which key signs for which purpose, and from when to when. It accompanies every signature of that key:
in the header of a signed document or an envelope, and beside a receipt. So a verifier needs to know the identity key
alone. The identity key's own signature is valid for every purpose, as it was before there were certificates. A
certified key cannot certify another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from covenant.model.ids import PublicKey
from covenant.model.peers.instance import Key, KeyCertificate, KeyPurpose
from covenant.seal.identity import SKEW_MS, unsigned
from covenant.seal.keys import (
    checked_key,
    document_holds,
    from_base64url,
    new_private_key,
    public_key,
    sign_document,
)

KEY_PERIOD_MS: Final = 30 * 24 * 3_600_000
"""How long a key signs before a new one replaces it."""
CERTIFICATE_LIFE_MS: Final = 2 * KEY_PERIOD_MS
"""A token that a key issues on its last day lives for up to 30 days more, and needs a valid certificate until then."""
PURPOSES: Final[Mapping[str, KeyPurpose]] = {
    "offer": KeyPurpose.PROOFS,
    "capabilities": KeyPurpose.PROOFS,
    "proof": KeyPurpose.PROOFS,
    "token-block": KeyPurpose.TOKENS,
}
"""The purpose of the key that signs each kind of document. Other kinds are signed by the identity key alone."""

_CERTIFICATE: Final = "key-certificate"
_KEPT_MAX: Final = 1_024


class PurposeKey(NamedTuple):
    """A private key and its certificate. Without a certificate it is the identity key itself."""

    private_key: bytes
    certificate: KeyCertificate | None = None

    def __repr__(self) -> str:
        return f"PurposeKey({self.certificate.purpose if self.certificate is not None else 'identity'})"

    @property
    def identity_key(self) -> PublicKey:
        return PublicKey(self.certificate.issuer) if self.certificate is not None else public_key(self.private_key)

    def sign_document(self, kind: str, document: Mapping[str, Any]) -> str:
        if self.certificate is None:
            return sign_document(self.private_key, kind, document)
        if PURPOSES.get(kind) is not self.certificate.purpose:
            raise ValueError(f"a key for {self.certificate.purpose} does not sign {kind}")
        return sign_document(self.private_key, kind, document, msgspec.to_builtins(self.certificate))


class PurposeKeySet(NamedTuple):
    """`void_before_ms`: certificates that began earlier are void; the certificates of these keys say so."""

    keys: tuple[PurposeKey, ...] = ()
    void_before_ms: int = 0


NO_PURPOSE_KEYS: Final = PurposeKeySet()


def certify(identity_private_key: bytes, purpose: KeyPurpose, now_ms: int, void_before_ms: int = 0) -> PurposeKey:
    """Creates a certified key for this purpose."""
    private_key = new_private_key()
    certificate = KeyCertificate(
        issuer=public_key(identity_private_key),
        key=public_key(private_key),
        purpose=purpose,
        not_before_ms=now_ms,
        not_after_ms=now_ms + CERTIFICATE_LIFE_MS,
        void_before_ms=void_before_ms,
    )
    signature = sign_document(identity_private_key, _CERTIFICATE, unsigned(certificate))
    return PurposeKey(private_key, msgspec.structs.replace(certificate, signature=signature))


def certificate_holds(
    certificate: KeyCertificate,
    issuer: PublicKey,
    purpose: KeyPurpose,
    *,
    at_ms: int | None = None,
    void_before_ms: int = 0,
) -> bool:
    """Whether the issuer has certified the key for this purpose. `at_ms`: the time of the signature; None: unknown."""
    return (
        certificate.issuer == issuer
        and certificate.purpose is purpose
        and 0 < certificate.not_after_ms - certificate.not_before_ms <= CERTIFICATE_LIFE_MS
        and certificate.not_before_ms >= max(void_before_ms, certificate.void_before_ms)
        and (at_ms is None or certificate.not_before_ms - SKEW_MS <= at_ms <= certificate.not_after_ms + SKEW_MS)
        and _is_signed(certificate)
    )


@lru_cache(_KEPT_MAX)
def _is_signed(certificate: KeyCertificate) -> bool:
    """Cached: one certificate comes with thousands of signatures."""
    return document_holds(PublicKey(certificate.issuer), _CERTIFICATE, unsigned(certificate), certificate.signature)


def key_due(key: PurposeKey | None, identity: PublicKey, now_ms: int) -> bool:
    """Whether a key must be replaced: it is too old, from the future, or certified by another identity."""
    certificate = key.certificate if key is not None else None
    return (
        certificate is None
        or certificate.issuer != identity
        or not certificate.not_before_ms - SKEW_MS <= now_ms < certificate.not_before_ms + KEY_PERIOD_MS
    )


class _Header(msgspec.Struct, frozen=True, gc=False):
    kid: Key
    cert: KeyCertificate | None = None


_READ_HEADER: Final = msgspec.json.Decoder(_Header)


def _header(signature: str) -> _Header | None:
    """The header of a document's signature, which is not verified; None if it is malformed."""
    try:
        header = _READ_HEADER.decode(from_base64url(signature.partition("..")[0]))
        checked_key(PublicKey(header.cert.issuer if header.cert is not None else header.kid))
    except (ValueError, RecursionError):
        return None
    return header


def signed_by_instance(
    identity_key: PublicKey,
    kind: str,
    document: Mapping[str, Any],
    signature: str,
    *,
    at_ms: int | None = None,
    void_before_ms: int = 0,
) -> bool:
    """Whether the instance with this key has signed the document: by that key, or by one that it has certified."""
    if document_holds(identity_key, kind, document, signature):
        return True
    header, purpose = _header(signature), PURPOSES.get(kind)
    certificate = header.cert if header is not None else None
    if certificate is None or purpose is None:
        return False
    return certificate_holds(
        certificate, identity_key, purpose, at_ms=at_ms, void_before_ms=void_before_ms
    ) and document_holds(PublicKey(certificate.key), kind, document, signature, msgspec.to_builtins(certificate))


def signer_of(signature: str) -> PublicKey | None:
    """The identity key in whose name a document is signed. The signature is not verified."""
    header = _header(signature)
    if header is None:
        return None
    return PublicKey(header.cert.issuer if header.cert is not None else header.kid)
