"""X.509 certificates: the names that one has, and when it is good. No file and no clock.

Names are what an operator maps to an identity or a tenant. The SHA-256 of a certificate names it alone; the others are
its subject alternative names, which are the word of the authority that signed it.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from covenant.model.errors import Invalid

KEY_PREFIX: Final = "x509:"
"""How the key of a caller with a certificate begins. That of a token is a SHA-256 in hex, and never begins so."""
NAMES_MAX: Final = 32
_NAME: Final = re.compile(r"sha256:[0-9a-f]{64}|(?:dns|uri|email):[!-~]{1,200}").fullmatch


class Validity(NamedTuple):
    """In milliseconds since 1970."""

    from_ms: int
    until_ms: int


def certificate_key(name: str) -> str:
    """What takes the place of a token's hash for whoever shows a certificate of this name."""
    kind, _, rest = name.partition(":")
    checked = f"{kind}:{rest.replace(':', '').lower()}" if kind == "sha256" else name
    if _NAME(checked) is None:
        told = "sha256: and 64 hex digits, dns:HOST, uri:URI or email:ADDRESS"
        raise Invalid("invalid_certificate", f"a certificate is named by {told}")
    return KEY_PREFIX + checked


def certificate_names(der: bytes) -> tuple[str, ...]:
    """Its SHA-256 first, then its subject alternative names. Those that an operator could not write are left out."""
    certificate = x509.load_der_x509_certificate(der)
    names = [f"sha256:{certificate.fingerprint(SHA256()).hex()}"]
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):  # none, or one that nobody can read
        return tuple(names)
    names += [f"uri:{each}" for each in found.get_values_for_type(x509.UniformResourceIdentifier)]
    names += [f"dns:{each.lower()}" for each in found.get_values_for_type(x509.DNSName)]
    names += [f"email:{each}" for each in found.get_values_for_type(x509.RFC822Name)]
    return tuple(name for name in names if _NAME(name) is not None)[:NAMES_MAX]


def certificate_names_of_pem(pem: bytes) -> tuple[str, ...]:
    """The same of the first certificate in a PEM. Raises ValueError."""
    from cryptography.hazmat.primitives.serialization import Encoding  # noqa: PLC0415  (for the command line alone)

    return certificate_names(x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER))


def validity_of_pem(pem: bytes) -> Validity:
    """When the first certificate in a PEM is good. Raises ValueError."""
    certificate = x509.load_pem_x509_certificate(pem)
    moments = (certificate.not_valid_before_utc, certificate.not_valid_after_utc)
    return Validity(*(int(moment.timestamp() * 1000) for moment in moments))
