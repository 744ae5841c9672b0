"""TLS knows the other side by its name, wherever the guard let the connection go."""

import datetime as dt
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from covenant.outbound.call_errors import CallFailed
from covenant.outbound.http_fetcher import Fetcher
from tests.outbound.dns_server import name_server
from tests.outbound.http_servers import Answer, Served, always, fetcher, http_server, redirect, reply

NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "good.example")])
DAY = dt.timedelta(days=1)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For good.example and 127.0.0.1, signed by itself, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = dt.datetime.now(dt.UTC)
    names: list[x509.GeneralName] = [x509.DNSName("good.example"), x509.IPAddress(ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder(NAME, NAME, key.public_key(), x509.random_serial_number(), now - DAY, now + DAY)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(secret + made.public_bytes(serialization.Encoding.PEM))
    return path


class Opened:
    def __init__(self, server: Served, calls: Fetcher, asked_names: list[str | None]) -> None:
        self.server = server
        self.calls = calls
        self.asked_names = asked_names

    def url(self, host: str) -> str:
        return f"https://{host}:{self.server.port}/"


@asynccontextmanager
async def tls_server(certificate: Path, answer: Answer, *, trusted: bool = True) -> AsyncIterator[Opened]:
    """Two names lead to it, and its certificate holds one of them."""
    asked: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.sni_callback = lambda _socket, name, _context: asked.append(name)
    trust = ssl.create_default_context(cafile=certificate if trusted else None)
    async with (
        name_server({"good.example": ["127.0.0.1"], "bad.example": ["127.0.0.1"]}) as names,
        http_server(answer, tls=context) as server,
        fetcher("127.0.0.1", resolver=names.resolver(), tls=trust) as calls,
    ):
        yield Opened(server, calls, asked)


async def test_the_name_is_what_is_asked_for_and_checked(certificate: Path) -> None:
    async with tls_server(certificate, always(reply(body=b"safe"))) as opened:
        assert (await opened.calls.fetch("GET", opened.url("good.example"))).body == b"safe"
        assert opened.asked_names == ["good.example"]
        assert opened.server.requests[0].headers["host"] == f"good.example:{opened.server.port}"


async def test_another_name_at_the_same_address_gets_no_connection_of_the_first(certificate: Path) -> None:
    async with tls_server(certificate, always(reply())) as opened:
        await opened.calls.fetch("GET", opened.url("good.example"))
        with pytest.raises(CallFailed) as failed:
            await opened.calls.fetch("GET", opened.url("bad.example"))
        assert failed.value.code == "connect_failed"
        assert "ertificate" in failed.value.detail
        assert len(opened.server.requests) == 1


async def test_an_address_is_checked_as_an_address(certificate: Path) -> None:
    async with tls_server(certificate, always(reply(body=b"safe"))) as opened:
        assert (await opened.calls.fetch("GET", opened.url("127.0.0.1"))).body == b"safe"


async def test_a_certificate_that_nobody_vouches_for_is_refused(certificate: Path) -> None:
    async with tls_server(certificate, always(reply()), trusted=False) as opened:
        with pytest.raises(CallFailed):
            await opened.calls.fetch("GET", opened.url("good.example"))
        assert opened.server.requests == []


async def test_a_redirect_does_not_leave_tls(certificate: Path) -> None:
    async with http_server(always(reply())) as plain:
        async with tls_server(certificate, redirect(plain.url())) as opened:
            with pytest.raises(CallFailed) as failed:
                await opened.calls.fetch("GET", opened.url("good.example"))
        assert (failed.value.code, plain.connections) == ("bad_redirect", 0)
