"""X.509 certificates: their names and validity. No file and no clock.

An operator maps a name to an identity or a tenant. The SHA-256 of a certificate names that certificate alone; the other
names are its subject alternative names, for which the signing authority vouches.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from covenant.model.errors import Invalid

KEY_PREFIX: Final = "x509:"
"""The prefix of the key of a caller with a certificate. A token's key is a SHA-256 in hex, which never begins with it.
"""
NAMES_MAX: Final = 32
_NAME: Final = re.compile(r"sha256:[0-9a-f]{64}|(?:dns|uri|email):[!-~]{1,200}").fullmatch


class Validity(NamedTuple):
    """Times are in milliseconds since 1970."""

    from_ms: int
    until_ms: int


def certificate_key(name: str) -> str:
    """The key of a caller with a certificate of this name, in place of a token's hash."""
    kind, _, rest = name.partition(":")
    checked = f"{kind}:{rest.replace(':', '').lower()}" if kind == "sha256" else name
    if _NAME(checked) is None:
        forms = "sha256: and 64 hex digits, dns:HOST, uri:URI or email:ADDRESS"
        raise Invalid("invalid_certificate", f"a certificate is named by {forms}")
    return KEY_PREFIX + checked


def certificate_names(der: bytes) -> tuple[str, ...]:
    """The SHA-256 first, then the subject alternative names. Names that an operator could not write are left out."""
    certificate = x509.load_der_x509_certificate(der)
    names = [f"sha256:{certificate.fingerprint(SHA256()).hex()}"]
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):  # no such extension, or an unreadable one
        return tuple(names)
    names += [f"uri:{each}" for each in found.get_values_for_type(x509.UniformResourceIdentifier)]
    names += [f"dns:{each.lower()}" for each in found.get_values_for_type(x509.DNSName)]
    names += [f"email:{each}" for each in found.get_values_for_type(x509.RFC822Name)]
    return tuple(name for name in names if _NAME(name) is not None)[:NAMES_MAX]


def certificate_names_of_pem(pem: bytes) -> tuple[str, ...]:
    """The names of the first certificate in a PEM. Raises ValueError."""
    from cryptography.hazmat.primitives.serialization import Encoding  # noqa: PLC0415  (for the command line alone)

    return certificate_names(x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER))


def validity_of_pem(pem: bytes) -> Validity:
    """The validity of the first certificate in a PEM. Raises ValueError."""
    certificate = x509.load_pem_x509_certificate(pem)
    moments = (certificate.not_valid_before_utc, certificate.not_valid_after_utc)
    return Validity(*(int(moment.timestamp() * 1000) for moment in moments))
