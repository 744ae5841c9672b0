"""Certificates for tests: an authority, and what it signs."""

import datetime as dt
import ssl
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

NOW = dt.datetime.now(dt.UTC)
DAY = dt.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in files."""

    cert: Path
    key: Path
    certificate: x509.Certificate

    @property
    def fingerprint(self) -> str:
        return f"sha256:{self.certificate.fingerprint(SHA256()).hex()}"


class Authority:
    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self._count = 0
        self.certificate = (
            self._builder(self._name, self._key.public_key(), 30)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, SHA256())
        )
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self.certificate.public_bytes(Encoding.PEM))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - 60 * DAY)
            .not_valid_after(NOW + days * DAY)
        )

    def issue(self, *names: str, days: int = 30, passphrase: bytes | None = None) -> Pair:
        """For these hosts, addresses and URIs."""
        self._count += 1
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"leaf {self._count}")])
        made = self._builder(subject, key.public_key(), days)
        if names:
            made = made.add_extension(x509.SubjectAlternativeName([general(name) for name in names]), critical=False)
        certificate = made.sign(self._key, SHA256())
        cert, keyed = self._folder / f"leaf{self._count}.pem", self._folder / f"leaf{self._count}.key"
        cert.write_bytes(certificate.public_bytes(Encoding.PEM))
        locked = NoEncryption() if passphrase is None else BestAvailableEncryption(passphrase)
        keyed.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))
        keyed.chmod(0o600)
        return Pair(cert, keyed, certificate)

    def client(self, shown: Pair | None = None) -> ssl.SSLContext:
        """Of a client that trusts this authority alone, and shows a certificate or none."""
        context = ssl.create_default_context(cafile=str(self.file))
        if shown is not None:
            context.load_cert_chain(shown.cert, shown.key)
        return context


def general(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)
