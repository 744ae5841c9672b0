"""Strangers who send much, slowly, before anybody knows them: what they can make a daemon hold is bounded."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import grpc  # type: ignore[import-untyped]
import pytest
from a2a.types import a2a_pb2

from tests.cli.daemons import Daemon
from tests.hostile.client import RawConnection, operator_token, request, resident_bytes
from tests.hostile.conftest import StartDaemon

MIB: Final = 2**20
ENVELOPE: Final = 10 * MIB
RECEIVE: Final = "/api/v1/a2a/receive"
SEND: Final = "/lf.a2a.v1.A2AService/SendMessage"
AGENT: Final = """
from covenant import Agent

echo = Agent("echo")


@echo
async def say(turn):
    return turn.text
"""


def begun(url: str, address: str, sent: int, *, path: str = RECEIVE, size: int = ENVELOPE) -> socket.socket:
    """A request of which only so many bytes are sent, from an address of its own on loopback."""
    connection = socket.create_connection((_host(url), _port(url)), timeout=20, source_address=(address, 0))
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {size}\r\n\r\n"
    connection.sendall(head.encode() + b" " * sent)
    return connection


def refused_as_busy(url: str, path: str, size: int) -> bool:
    """Whether another message of this size is refused before all of it has arrived."""
    with RawConnection(url) as one_more:
        one_more.send(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {size}\r\n\r\n".encode())
        with suppress(OSError):  # it may have answered and closed
            one_more.send(b" " * (size - 1))
        answer = one_more.read_answer()
    return answer.status == 503 and b"busy" in answer.body


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while more := connection.recv(65_536):
        received += more
    return received


def test_slow_envelopes_hold_no_more_than_the_pool_and_not_for_long(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(env={"COVENANT_PEERS_ENABLED": "1", "COVENANT_HTTP_STRANGER_BODY_MS": "2500"})
    before = resident_bytes(daemon.process.pid)
    with ExitStack() as open_:
        # Each has sent 10 MiB but for a byte: six fill the pool of 64.
        slow = [begun(daemon.url, f"127.0.1.{number}", ENVELOPE - 1) for number in range(1, 7)]
        for each in slow:
            open_.callback(each.close)
        assert refused_as_busy(daemon.url, RECEIVE, ENVELOPE)
        assert request(daemon.url, "GET", "/a2a/queue", token=operator_token(daemon.home)).status == 200
        # A stranger with little to say is still heard.
        assert request(daemon.url, "POST", RECEIVE, body=b"nonsense").json["code"] == "refused"
        answers = [read_all(each) for each in slow]
    assert all(b"too_slow" in each for each in answers), answers
    assert request(daemon.url, "POST", RECEIVE, body=b" " * ENVELOPE).json["code"] == "refused", "all is given back"
    assert resident_bytes(daemon.process.pid) - before < 96 * MIB


def test_who_announces_much_and_sends_little_shuts_nobody_out(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(env={"COVENANT_PEERS_ENABLED": "1", "COVENANT_HTTP_STRANGER_BODY_MS": "20000"})
    with ExitStack() as open_:
        for number in range(32):
            open_.callback(begun(daemon.url, f"127.0.1.{number // 4 + 1}", 1).close)
        answer = request(daemon.url, "POST", RECEIVE, body=b" " * ENVELOPE)
        assert answer.json["code"] == "refused", "it was read"


def test_one_address_cannot_have_the_whole_pool_and_chunks_are_counted_too(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(env={"COVENANT_PEERS_ENABLED": "1", "COVENANT_HTTP_STRANGER_BODY_MS": "3000"})
    with begun(daemon.url, "127.0.0.1", ENVELOPE - 1), RawConnection(daemon.url, source="127.0.2.1") as chunked:
        assert refused_as_busy(daemon.url, RECEIVE, ENVELOPE)
        chunked.send(f"POST {RECEIVE} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        with suppress(OSError):  # it may have answered and closed
            for _ in range(200):
                chunked.send(b"10000\r\n" + b" " * 65_536 + b"\r\n")
        assert b" 400 " in chunked.read_to_end()
        assert request(daemon.url, "POST", RECEIVE, body=b"nonsense").json["code"] == "refused"


@pytest.mark.parametrize("path", ["", "/message:send"], ids=["json-rpc", "rest"])
def test_callers_of_an_open_agent_hold_no_more_than_the_pool_either(
    start_daemon: StartDaemon, short_path: Path, path: str
) -> None:
    agents = short_path / "agents.py"
    agents.write_text(AGENT)
    settings = {"COVENANT_A2A_PUBLISH": "echo", "COVENANT_A2A_PUBLISH_ANONYMOUS": "anywhere"}
    daemon = start_daemon(str(agents), env={**settings, "COVENANT_HTTP_STRANGER_BODY_MS": "2500"})
    path, size = f"/v1/a2a/agents/echo{path}", 8 * MIB
    with ExitStack() as open_:
        # Each has sent 8 MiB but for a byte, two from an address: eight fill the pool of 64.
        for number in range(8):
            slow = begun(daemon.url, f"127.0.3.{number // 2 + 1}", size - 1, path=path, size=size)
            open_.callback(slow.close)
        assert refused_as_busy(daemon.url, path, size)
        token = operator_token(daemon.home)
        assert request(daemon.url, "GET", "/a2a/queue", token=token).status == 200


def _host(url: str) -> str:
    return url.removeprefix("http://").partition(":")[0]


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


@pytest.fixture
def grpc_daemon(start_daemon: StartDaemon, short_path: Path) -> tuple[Daemon, int]:
    agents = short_path / "agents.py"
    agents.write_text(AGENT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    daemon = start_daemon(
        str(agents), "--grpc-enabled", "1", "--grpc-port", str(port), env={"COVENANT_HTTP_STRANGER_BODY_MS": "2000"}
    )
    return daemon, port


def told(call: Any) -> tuple[str, float]:
    began_s = time.monotonic()
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return refused.value.code().name, time.monotonic() - began_s


def test_over_grpc_the_token_comes_before_the_message(grpc_daemon: tuple[Daemon, int]) -> None:
    """A caller that never sends its message is refused at once without a token, and after a while with one."""
    daemon, port = grpc_daemon
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_unary(SEND, request_serializer=lambda data: data, response_deserializer=bytes)
        hold = threading.Event()

        def silent() -> Iterator[bytes]:
            hold.wait(20)
            yield b""

        code, took_s = told(lambda: call(silent(), timeout=15))
        assert (code, took_s < 1.5) == ("UNAUTHENTICATED", True)
        wrong = (("authorization", "Bearer atr_" + "0" * 64),)
        code, took_s = told(lambda: call(silent(), timeout=15, metadata=wrong))
        assert (code, took_s < 1.5) == ("UNAUTHENTICATED", True)
        good = (("authorization", f"Bearer {operator_token(daemon.home)}"),)
        code, took_s = told(lambda: call(silent(), timeout=15, metadata=good))
        assert code == "INVALID_ARGUMENT"
        assert 1 < took_s < 10
        hold.set()


def test_over_grpc_silent_callers_do_not_shut_out_their_address(start_daemon: StartDaemon, short_path: Path) -> None:
    agents = short_path / "agents.py"
    agents.write_text(AGENT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    settings = {"COVENANT_A2A_PUBLISH": "echo", "COVENANT_A2A_PUBLISH_ANONYMOUS": "anywhere"}
    start_daemon(str(agents), "--grpc-enabled", "1", "--grpc-port", str(port), env=settings)
    hold = threading.Event()

    def silent() -> Iterator[bytes]:
        hold.wait(20)
        yield b""

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        wait = channel.stream_unary(SEND, request_serializer=lambda data: data, response_deserializer=bytes)
        waiting = [wait.future(silent(), timeout=15) for _ in range(2)]
        send = channel.unary_unary(SEND, request_serializer=lambda data: data, response_deserializer=bytes)
        message = a2a_pb2.SendMessageRequest()
        message.message.message_id, message.message.role = "m", a2a_pb2.ROLE_USER
        message.message.parts.add(text="hello")
        answer = send(message.SerializeToString(), timeout=15, metadata=(("a2a-version", "1.0"),))
        assert b"hello" in answer
        hold.set()
        assert {future.code().name for future in waiting} == {"INVALID_ARGUMENT"}


def test_over_grpc_large_messages_of_strangers_are_not_held(grpc_daemon: tuple[Daemon, int]) -> None:
    daemon, port = grpc_daemon
    before = resident_bytes(daemon.process.pid)
    message = a2a_pb2.SendMessageRequest(tenant="echo")
    message.message.parts.add(text="x" * (7 * MIB))
    data = message.SerializeToString()
    options = [("grpc.max_send_message_length", 64 * MIB)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        call = channel.unary_unary(SEND, request_serializer=lambda given: given, response_deserializer=bytes)
        futures = [call.future(data, timeout=20) for _ in range(24)]
        assert {future.code().name for future in futures} == {"UNAUTHENTICATED"}
    # 168 MiB were sent; what gRPC itself reads ahead varies with the load.
    assert resident_bytes(daemon.process.pid) - before < 120 * MIB
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(
            SEND,
            request_serializer=a2a_pb2.SendMessageRequest.SerializeToString,
            response_deserializer=a2a_pb2.SendMessageResponse.FromString,
        )
        metadata = (("authorization", f"Bearer {operator_token(daemon.home)}"), ("a2a-version", "1.0"))
        asked = a2a_pb2.SendMessageRequest(tenant="echo")
        asked.message.message_id, asked.message.role = "m", a2a_pb2.ROLE_USER
        asked.message.parts.add(text="hi")
        assert "hi" in str(call(asked, timeout=20, metadata=metadata))


def test_the_audit_is_bounded_however_many_addresses_strangers_have(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    host, _, port = daemon.url.removeprefix("http://").partition(":")
    for number in range(150):
        with socket.create_connection((host, int(port)), source_address=(f"127.0.3.{number + 1}", 0)) as connection:
            connection.settimeout(20)
            connection.sendall(b"GET /a2a/queue HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            assert connection.recv(100).split()[1] == b"401"
    answer = request(daemon.url, "GET", "/audit/recent?limit=500", token=operator_token(daemon.home))
    assert answer.status == 200, answer
    assert 1 <= answer.body.count(b"authentication_failed") <= 100
