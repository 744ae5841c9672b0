"""TLS of HTTP and gRPC: what it greets with, whom a client's certificate stands for, and what is refused."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import httpx2
import pytest
import uvloop
from a2a.client import ClientConfig, create_client
from a2a.types import Message, Part, Role, SendMessageRequest, a2a_pb2
from a2a.types.a2a_pb2_grpc import A2AServiceStub

from covenant import Agent, Turn
from covenant.daemon.doctor.home_check import check
from covenant.daemon.environment import now_ms
from covenant.daemon.settings import HttpSettings
from covenant.daemon.tls_files import open_tls
from covenant.model.errors import SettingsError
from tests.certificates import Authority, Pair
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.waits import BOUND_S, eventually, until

HOSTS = ("127.0.0.1", "localhost")
NEVER_MS = int(BOUND_S * 10_000)
"""Longer than any test waits."""


echo = Agent("echo", description="Says it again.")


@echo
async def answer(turn: Turn) -> str:
    return f"echo: {turn.text}"


def served(pair: Pair, authority: Authority | None = None, **more: Any) -> dict[str, Any]:
    """Settings of HTTP."""
    named = {"tls_cert": str(pair.cert), "tls_key": str(pair.key), **more}
    return named if authority is None else {**named, "tls_client_ca": str(authority.file)}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@asynccontextmanager
async def caller(daemon: DaemonUnderTest, context: ssl.SSLContext) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=daemon.url, verify=context, timeout=BOUND_S, trust_env=False) as http:
        yield http


def message(text: str) -> dict[str, Any]:
    return {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "SendMessage",
        "params": {"message": {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": text}]}},
    }


async def ask_operator(daemon: DaemonUnderTest, method: str, path: str, body: object, authority: Authority) -> Any:
    """What the operator is told, over HTTPS."""
    async with caller(daemon, authority.client()) as http:
        bearer = {"authorization": f"Bearer {daemon.token}"}
        return (await http.request(method, path, json=body, headers=bearer)).json()


async def greeted_with(port: int, context: ssl.SSLContext) -> bytes:
    """The certificate that the daemon shows."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    del reader
    return shown


async def test_https_serves_and_says_https_in_cards_and_the_url(short_path: Path, authority: Authority) -> None:
    pair = authority.issue(*HOSTS)
    async with open_daemon_under_test(short_path / "home", echo, http=served(pair)) as daemon:
        assert daemon.url.startswith("https://127.0.0.1:")
        async with caller(daemon, authority.client()) as http:
            assert (await http.get("/healthz")).status_code == 200
            bearer = {"authorization": f"Bearer {daemon.token}"}
            answer = await http.post("/v1/a2a/agents/echo", json=message("hello"), headers=bearer)
            assert "echo: hello" in answer.text
            card = (await http.get("/v1/a2a/agents/echo/.well-known/agent-card.json", headers=bearer)).json()
            assert {each["url"].partition("://")[0] for each in card["supportedInterfaces"]} == {"https"}
            assert (await http.get("/v1/a2a/agents/echo", headers={"x": "y" * 70_000})).status_code == 431


async def test_plain_http_old_tls_and_strangers_certificates_are_refused(
    short_path: Path, authority: Authority
) -> None:
    pair = authority.issue(*HOSTS)
    async with open_daemon_under_test(short_path / "home", http=served(pair, authority)) as daemon:
        with pytest.raises(httpx2.HTTPError):
            async with httpx2.AsyncClient(trust_env=False) as http:
                await http.get(daemon.url.replace("https", "http"))
        old = authority.client()
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert await greeted_with(daemon.port, old)
        for bound in ("minimum_version", "maximum_version"):
            with pytest.warns(DeprecationWarning, match="TLSv1_1"):
                setattr(old, bound, ssl.TLSVersion.TLSv1_1)
        with pytest.raises(ssl.SSLError):
            await greeted_with(daemon.port, old)
        other = Authority(short_path / "other", "other")
        shown = authority.client()
        forged = other.issue("client.example")
        shown.load_cert_chain(forged.cert, forged.key)
        with pytest.raises((ssl.SSLError, httpx2.HTTPError)):
            async with caller(daemon, shown) as http:
                await http.get("/healthz")
        async with caller(daemon, authority.client()) as http:
            assert (await http.get("/healthz")).status_code == 200, "nobody else is harmed"


async def test_a_new_pair_is_shown_to_new_connections_and_open_ones_go_on(
    short_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    pair, newer = authority.issue(*HOSTS), authority.issue(*HOSTS)
    async with open_daemon_under_test(short_path / "home", http=served(pair)) as daemon:
        reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port, ssl=authority.client())
        first = await greeted_with(daemon.port, authority.client())
        pair.key.write_bytes(newer.key.read_bytes())
        await asyncio.to_thread(until, lambda: "tls.not_reloaded" in caplog.text)
        assert await greeted_with(daemon.port, authority.client()) == first, "a pair that does not fit changes nothing"
        pair.cert.write_bytes(newer.cert.read_bytes())
        await asyncio.to_thread(until, lambda: "tls.reloaded" in caplog.text)
        assert await greeted_with(daemon.port, authority.client()) != first
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        async with asyncio.timeout(BOUND_S):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_certificate_stands_for_whom_the_operator_says_and_for_nobody_else(
    short_path: Path, authority: Authority
) -> None:
    pair, acme = authority.issue(*HOSTS), authority.issue("client.acme.example", "spiffe://acme/worker")
    ann, nobody = authority.issue("ann.example"), authority.issue("nobody.example")
    async with open_daemon_under_test(short_path / "home", echo, http=served(pair, authority)) as daemon:
        added = await ask_operator(
            daemon, "POST", "/v1/admin/tenants", {"name": "acme", "certificate": "uri:spiffe://acme/worker"}, authority
        )
        assert (added["token"], added["tenant"]["token_prefix"]) == ("", "x509:uri:spiffe://acme/w")
        enrolled = await ask_operator(
            daemon, "POST", "/identities/enroll", {"display": "ann@host", "certificate": ann.fingerprint}, authority
        )
        assert enrolled["token_b58"] == ""
        async with caller(daemon, authority.client(acme)) as http:
            assert (await http.get("/v1/agents")).status_code == 200
            assert (await http.get("/a2a/queue")).status_code == 401, "a tenant is no identity"
            # A token that is said counts, and a wrong one is not made good by a certificate.
            assert (await http.get("/v1/agents", headers={"authorization": "Bearer wrong"})).status_code == 401
            said = f"Bearer {daemon.token}"
            assert (await http.get("/a2a/queue", headers={"authorization": said})).status_code == 200
        async with caller(daemon, authority.client(ann)) as http:
            assert (await http.get("/a2a/queue")).status_code == 200
            assert (await http.get("/v1/agents")).status_code == 401
        async with caller(daemon, authority.client(nobody)) as http:
            assert (await http.get("/healthz")).status_code == 200
            assert (await http.get("/v1/agents")).status_code == 401
            for forged in (
                "certificate uri:spiffe://acme/worker",
                "Bearer x509:uri:spiffe://acme/worker",
                f"Bearer x509:{ann.fingerprint}",
                f"certificate {'1' * 43} {ann.fingerprint}",
            ):
                assert (await http.get("/v1/agents", headers={"authorization": forged})).status_code == 401
                assert (await http.get("/a2a/queue", headers={"authorization": forged})).status_code == 401
        taken = await ask_operator(
            daemon, "POST", "/identities/enroll", {"display": "bob@host", "certificate": ann.fingerprint}, authority
        )
        assert taken["code"] == "certificate_taken"
        wrong = await ask_operator(
            daemon, "POST", "/identities/enroll", {"display": "bob@host", "certificate": "me"}, authority
        )
        assert wrong["code"] == "invalid_certificate"
        await ask_operator(daemon, "PATCH", "/v1/admin/tenants/acme", {"disabled": True}, authority)
        async with caller(daemon, authority.client(acme)) as http:
            assert (await http.get("/v1/agents")).status_code == 401


async def test_a_client_without_a_certificate_is_not_greeted_where_one_is_required(
    short_path: Path, authority: Authority
) -> None:
    pair = authority.issue(*HOSTS)
    http = served(pair, authority, tls_client_auth="required")
    async with open_daemon_under_test(short_path / "home", http=http) as daemon:
        async with caller(daemon, authority.client(authority.issue("any.example"))) as asking:
            assert (await asking.get("/healthz")).status_code == 200
        with pytest.raises((ssl.SSLError, httpx2.HTTPError)):
            async with caller(daemon, authority.client()) as asking:
                await asking.get("/healthz")


async def test_grpc_has_the_same_pair_and_knows_the_same_certificates(short_path: Path, authority: Authority) -> None:
    pair, acme = authority.issue(*HOSTS), authority.issue("client.acme.example")
    http = served(pair, authority, tls_client_auth="required")
    async with open_daemon_under_test(short_path / "home", http=http, grpc={"enabled": True}) as daemon:
        await daemon.add_tenant("acme", echo)
        await daemon.tenants.rotate(daemon.operator, "acme", certificate="dns:client.acme.example")
        shown = grpc.ssl_channel_credentials(authority.file.read_bytes(), acme.key.read_bytes(), acme.cert.read_bytes())
        asked = a2a_pb2.SendMessageRequest(
            tenant="echo", message=a2a_pb2.Message(message_id="m", role="ROLE_USER", parts=[Part(text="hello")])
        )
        async with grpc.aio.secure_channel(f"localhost:{daemon.grpc_port}", shown) as channel:
            told = await A2AServiceStub(channel).SendMessage(asked, timeout=BOUND_S)  # type: ignore[no-untyped-call]
            assert "echo: hello" in str(told)
            # The callers that are known are forgotten while the message arrives.
            daemon.tenants.by_credential.clear()
            slow = channel.stream_unary("/lf.a2a.v1.A2AService/SendMessage")(timeout=BOUND_S)
            await eventually(partial(asyncio.sleep, 0, daemon.tenants.by_credential))
            daemon.tenants.by_credential.clear()
            await slow.write(asked.SerializeToString())
            await slow.done_writing()
            assert b"echo: hello" in await slow
        bare = grpc.ssl_channel_credentials(authority.file.read_bytes())
        async with grpc.aio.secure_channel(f"localhost:{daemon.grpc_port}", bare) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await A2AServiceStub(channel).SendMessage(asked, timeout=BOUND_S)  # type: ignore[no-untyped-call]
        newer = authority.issue(*HOSTS)
        pair.cert.write_bytes(newer.cert.read_bytes())
        pair.key.write_bytes(newer.key.read_bytes())
        tls = daemon.daemon.base.listeners.tls
        assert tls is not None
        await tls.step()
        async with grpc.aio.secure_channel(f"localhost:{daemon.grpc_port}", shown) as channel:
            assert await A2AServiceStub(channel).SendMessage(asked, timeout=BOUND_S)  # type: ignore[no-untyped-call]


async def test_the_official_client_calls_over_https(short_path: Path, authority: Authority) -> None:
    pair = authority.issue(*HOSTS)
    a2a = {"publish": "echo", "publish_anonymous": "loopback"}
    async with open_daemon_under_test(short_path / "home", echo, http=served(pair), a2a=a2a) as daemon:
        import httpx  # noqa: PLC0415  (what the SDK takes)

        async with httpx.AsyncClient(verify=authority.client(), timeout=BOUND_S, trust_env=False) as http:
            client = await create_client(daemon.url, client_config=ClientConfig(httpx_client=http, streaming=False))
            asked = SendMessageRequest(message=Message(message_id="m", role=Role.ROLE_USER, parts=[Part(text="hello")]))
            told = [str(each) async for each in client.send_message(asked)]
        assert "echo: hello" in told[-1]


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_hello_that_comes_with_its_connection_is_answered(
    short_path: Path, authority: Authority, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    pair, sent = authority.issue(*HOSTS), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        authority.client().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost").do_handshake()
    hello = sent.read()

    async def greet() -> None:
        loop = asyncio.get_running_loop()
        async with open_daemon_under_test(short_path / "home", http=served(pair, authority)) as daemon:
            port = int(daemon.url.rsplit(":", 1)[1])
            for _ in range(20):
                # The loop stands still meanwhile: it finds the connection and the hello at once.
                with socket.create_connection(("127.0.0.1", port)) as client:
                    client.sendall(hello)
                    client.setblocking(False)
                    async with asyncio.timeout(BOUND_S):
                        assert (await loop.sock_recv(client, 2)) == b"\x16\x03"

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(greet())


async def test_handshakes_that_do_not_go_on_are_bounded(short_path: Path, authority: Authority) -> None:
    pair = authority.issue(*HOSTS)
    async with open_daemon_under_test(short_path / "home", http=served(pair, head_ms=NEVER_MS)) as daemon:
        most = daemon.daemon.doors.http.bounds.handshakes_per_address_max
        silent = [socket.create_connection(("127.0.0.1", daemon.port)) for _ in range(most + 5)]
        try:
            async with caller(daemon, authority.client()) as http:
                assert (await http.get("/healthz")).status_code == 200
            ended = await asyncio.to_thread(lambda: [_is_ended(each) for each in silent[:6]])
            assert ended == [True] * 6
        finally:
            for each in silent:
                each.close()


def _is_ended(connection: socket.socket) -> bool:
    connection.settimeout(BOUND_S)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("missing", "cannot be read: No such file"),
        ("unreadable", "cannot be read"),
        ("mismatched", "does not belong to"),
        ("expired", "has expired"),
        ("no key", "holds no key"),
        ("no certificate", "holds no certificate"),
        ("locked", "passphrase"),
        ("half", "belong together"),
        ("no authority", "holds no certificate of an authority"),
    ],
)
def test_a_pair_that_cannot_be_used_says_why(tmp_path: Path, authority: Authority, wrong: str, told: str) -> None:
    pair, other = authority.issue(*HOSTS), authority.issue(*HOSTS)
    folder = tmp_path / "folder"
    folder.mkdir()
    empty = tmp_path / "empty"
    empty.write_text("nothing")
    expired, locked = authority.issue(*HOSTS, days=-1), authority.issue(*HOSTS, passphrase=b"secret")
    settings: dict[str, Any] = {
        "missing": {"tls_cert": str(tmp_path / "nowhere"), "tls_key": str(pair.key)},
        "unreadable": {"tls_cert": str(folder), "tls_key": str(pair.key)},
        "mismatched": {"tls_cert": str(pair.cert), "tls_key": str(other.key)},
        "expired": {"tls_cert": str(expired.cert), "tls_key": str(expired.key)},
        "no key": {"tls_cert": str(pair.cert), "tls_key": str(empty)},
        "no certificate": {"tls_cert": str(empty), "tls_key": str(pair.key)},
        "locked": {"tls_cert": str(locked.cert), "tls_key": str(locked.key)},
        "half": {"tls_cert": str(pair.cert)},
        "no authority": {"tls_cert": str(pair.cert), "tls_key": str(pair.key), "tls_client_ca": str(empty)},
    }[wrong]
    with pytest.raises(SettingsError, match=told):
        open_tls(HttpSettings(**settings), now_ms)


def test_the_doctor_warns_of_a_key_that_others_can_read(tmp_path: Path, authority: Authority) -> None:
    pair = authority.issue(*HOSTS, days=5)
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "settings.toml").write_text(f'[http]\ntls_cert = "{pair.cert}"\ntls_key = "{pair.key}"\n')
    assert not [each for each in check(home, {}).findings if "others can read" in each.what]
    pair.key.chmod(0o640)
    findings = check(home, {}).findings
    assert [each.way_out for each in findings if "others can read" in each.what] == [f"chmod 600 {pair.key}"]
    assert [each.way_out for each in findings if "is good for" in each.what] == ["renew it soon"]
    pair.cert.unlink()
    assert [each for each in check(home, {}).findings if not each.well and "http.tls_cert" in each.what]


async def test_a_pair_that_breaks_while_it_runs_is_logged_and_changes_nothing(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:

    pair = authority.issue(*HOSTS)
    files = open_tls(HttpSettings(**served(pair)), now_ms)
    assert files is not None
    before = files.context.current
    await files.step()
    assert files.context.current is before
    pair.cert.write_text("half of a cert")
    await files.step()
    assert files.context.current is before
    assert "tls.not_reloaded" in caplog.text
