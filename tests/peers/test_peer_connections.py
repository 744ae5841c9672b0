"""Lines to peers: kept open, bounded, and only to places that somebody can mean."""

import asyncio
import datetime as dt
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from covenant.outbound.address_guard import AddressGuard, Unresolved
from covenant.outbound.http_fetcher import TlsTrust
from covenant.outbound.urls import Address
from covenant.peers.transport import peer_client
from covenant.peers.transport.peer_client import PeerCallFailed, PeerConnections, PeerUnavailable
from tests.outbound.http_servers import LOADED, always, by_path, endless, http_server, redirect, reply, silence
from tests.waits import BOUND_S

NAMES = {
    "here.example": "127.0.0.1",
    "metadata.example": "169.254.169.254",
    "mapped.example": "::ffff:127.0.0.1",
    "there.example": "127.0.0.1",
}


async def names(name: str) -> Sequence[Address]:
    if name not in NAMES:
        raise Unresolved(f"nobody answers for {name}", transient=name.startswith("later"))
    return [ip_address(NAMES[name])]


@asynccontextmanager
async def lines(trust: TlsTrust | None = None) -> AsyncIterator[PeerConnections]:
    guard = AddressGuard((), resolver=names)
    opened = PeerConnections(guard, user_agent="covenant/test", trust=trust or TlsTrust(LOADED[1]))
    try:
        yield opened
    finally:
        await opened.close()


async def failure(opened: PeerConnections, url: str, *, timeout_s: float = 10.0) -> PeerCallFailed:
    with pytest.raises(PeerCallFailed) as caught:
        await opened.to(url).post("/p", b"{}", timeout_s=timeout_s)
    return caught.value


async def test_many_messages_go_over_one_connection() -> None:
    async with http_server(always(reply(200, b"taken", x_said="yes"))) as served, lines() as opened:
        for _ in range(5):
            response = await opened.to(served.url("/base")).post("/p", b"{}", timeout_s=BOUND_S)
            assert (response.status, response.headers["x-said"], response.body) == (200, "yes", b"taken")
        await opened.to(served.url("/base/")).get("/who")
    assert served.connections == 2, "one for each place as it is written"
    first, last = served.requests[0], served.requests[-1]
    assert (first.method, first.target, first.body) == ("POST", "/base/p", b"{}")
    assert (last.method, last.target, last.body) == ("GET", "/base/who", b"")
    assert (first.headers["user-agent"], first.headers["content-type"]) == ("covenant/test", "application/json")
    assert first.headers["host"] == f"127.0.0.1:{served.port}"


async def test_a_private_place_is_called_by_its_name_and_a_name_that_leads_elsewhere_is_not() -> None:
    async with http_server(always(reply(200))) as served, lines() as opened:
        assert (await opened.to(f"http://here.example:{served.port}").get("/")).status == 200
        for host in ("metadata.example", "mapped.example", "169.254.169.254", "[fe80::1]", "224.0.0.1", "0.0.0.0"):
            failed = await failure(opened, f"http://{host}:{served.port}")
            assert (failed.code, isinstance(failed, PeerUnavailable)) == ("address_refused", False), host
        assert (await failure(opened, "http://unknown.example")).code == "address_refused"
        assert isinstance(await failure(opened, "http://later.example"), PeerUnavailable)
        for unreadable in ("ftp://here.example", "http://me@here.example", "http://127.1", "nothing"):
            assert (await failure(opened, unreadable)).code == "address_refused"
    assert len(served.requests) == 1


async def test_a_redirect_is_an_answer_and_leads_nowhere() -> None:
    async with http_server(by_path(p=redirect("/q", 307), q=always(reply(200)))) as served, lines() as opened:
        response = await opened.to(served.url()).post("/p", b"{}", timeout_s=BOUND_S)
    assert (response.status, response.headers["location"]) == (307, "/q")
    assert len(served.requests) == 1


async def test_an_answer_is_bounded_in_size_while_it_arrives() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    piece = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    async with http_server(endless(head, piece)) as served, lines() as opened:
        with pytest.raises(PeerCallFailed) as caught:
            await opened.to(served.url()).get("/")
        assert (caught.value.code, isinstance(caught.value, PeerUnavailable)) == ("too_large", False)
        assert (await failure(opened, served.url(), timeout_s=BOUND_S)).code == "too_large"


async def test_silence_ends_with_the_time_that_was_given() -> None:
    async with http_server(silence) as served, lines() as opened:
        failed = await failure(opened, served.url(), timeout_s=0.05)
    assert (failed.code, isinstance(failed, PeerUnavailable)) == ("timed_out", True)


async def test_nobody_there_and_one_who_hangs_up_are_told_apart() -> None:
    async with http_server(always(b"", close=True)) as served, lines() as opened:
        assert (await failure(opened, served.url())).code == "connection_lost"
    async with lines() as opened:
        failed = await failure(opened, served.url())
        assert (failed.code, isinstance(failed, PeerUnavailable)) == ("connect_failed", True)


def test_one_who_resets_each_connection_at_once_causes_failures_and_no_defect() -> None:
    """With the event loop of a daemon, which forgets a socket that was reset."""

    def reset(listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                taken, _ = listening.accept()
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                taken.close()

    async def calls(url: str) -> set[str]:
        async with lines() as opened:
            at_once = [await asyncio.gather(*(failure(opened, url) for _ in range(16))) for _ in range(30)]
            return {failed.code for each in at_once for failed in each}

    with socket.create_server(("127.0.0.1", 0)) as listening:
        resetting = threading.Thread(target=reset, args=(listening,))
        resetting.start()
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                codes = runner.run(calls(f"http://127.0.0.1:{listening.getsockname()[1]}"))
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            resetting.join()
    assert codes <= {"connect_failed", "connection_lost"}


async def test_what_comes_compressed_is_not_read() -> None:
    async with http_server(always(reply(200, b"bomb", content_encoding="gzip"))) as served, lines() as opened:
        assert (await failure(opened, served.url())).code == "bad_response"


async def test_tls_knows_a_peer_by_its_name(tmp_path: Path) -> None:
    certificate = _certificate(tmp_path / "both.pem", "here.example")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate)
    trusting = ssl.create_default_context(cafile=str(certificate))
    async with http_server(always(reply(200)), tls=server) as served:
        async with lines(TlsTrust(trusting)) as opened:
            assert (await opened.to(f"https://here.example:{served.port}").get("/")).status == 200
            failed = await failure(opened, f"https://there.example:{served.port}")
            assert (failed.code, isinstance(failed, PeerUnavailable)) == ("connect_failed", True)
        async with lines() as opened:
            failed = await failure(opened, f"https://here.example:{served.port}")
            assert failed.code == "connect_failed", "nobody vouches for it"
    assert len(served.requests) == 1


def _certificate(path: Path, name: str) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    now, day = dt.datetime.now(dt.UTC), dt.timedelta(days=1)
    who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = (
        x509.CertificateBuilder(who, who, key.public_key(), x509.random_serial_number(), now - day, now + day)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    path.write_bytes(secret + made.public_bytes(serialization.Encoding.PEM))
    return path


async def test_closing_waits_for_nobody_and_breaks_off_nothing() -> None:
    go = asyncio.Event()

    async def slow(_request: object, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        writer.write(reply(200, b"late"))

    async with http_server(slow) as served, lines() as opened:
        calling = asyncio.create_task(opened.to(served.url()).post("/p", b"{}", timeout_s=BOUND_S))
        await asyncio.wait_for(served.asked.wait(), BOUND_S)
        await opened.close()
        go.set()
        assert (await calling).body == b"late"


async def test_lines_that_nobody_uses_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_client, "PEERS_MAX", 2)
    async with http_server(always(reply(200))) as served, lines() as opened:
        for path in ("/a", "/b", "/c", "/a"):
            assert (await opened.to(served.url(path)).get("/")).status == 200
    assert served.connections == 4
