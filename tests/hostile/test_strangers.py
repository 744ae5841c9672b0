"""Strangers who send much, slowly, before anybody knows them: what they can make a daemon hold is bounded."""

import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import grpc  # type: ignore[import-untyped]
import pytest
from a2a.types import a2a_pb2

from tests.cli.daemons import Daemon
from tests.hostile.client import RawConnection, operator_token, request, resident_bytes
from tests.hostile.conftest import StartDaemon
from tests.waits import BOUND_S

StartGrpcDaemon = Callable[[dict[str, str]], tuple[Daemon, int]]

MIB: Final = 2**20
ENVELOPE: Final = 10 * MIB
CHUNK: Final = 65_536
RECEIVE: Final = "/api/v1/a2a/receive"
SEND: Final = "/lf.a2a.v1.A2AService/SendMessage"
PATIENT: Final = {"COVENANT_HTTP_STRANGER_BODY_MS": "600000", "COVENANT_HTTP_BODY_IDLE_MS": "600000"}
"""Longer than any test takes: what a stranger has sent is held until the test lets it go, on a slow machine too."""
AGENT: Final = """
from covenant import Agent

echo = Agent("echo")


@echo
async def say(turn):
    return turn.text
"""


def begun(url: str, address: str, sent: int, *, path: str = RECEIVE, size: int = ENVELOPE) -> RawConnection:
    """A request of which only so many bytes are sent, from an address of its own on loopback."""
    connection = RawConnection(url, source=address)
    connection.send(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {size}\r\n\r\n".encode())
    with suppress(OSError):  # it may have answered and closed
        connection.send(b" " * sent)
    return connection


def send_chunks(connection: RawConnection, size: int) -> None:
    """A message without a length, of which so much is sent."""
    connection.send(f"POST {RECEIVE} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
    with suppress(OSError):  # it may have answered and closed
        for _ in range(size // CHUNK):
            connection.send(b"%x\r\n%b\r\n" % (CHUNK, b" " * CHUNK))


def assert_one_is_busy(connections: list[RawConnection]) -> None:
    """None of these has sent all, so the only answer is the one to whoever came when the pool was full.

    Which one that is nobody knows: the daemon reads them side by side.
    """
    with selectors.DefaultSelector() as selector:
        for each in connections:
            selector.register(each.socket, selectors.EVENT_READ, each)
        answered = selector.select(BOUND_S)
    assert answered, "nobody was refused"
    answer = answered[0][0].data.read_answer()
    assert (answer.status, b"busy" in answer.body) == (503, True), answer


def test_slow_envelopes_hold_no_more_than_the_pool(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(env={"COVENANT_PEERS_ENABLED": "1", **PATIENT})
    before = resident_bytes(daemon.process.pid)
    with ExitStack() as open_:
        # Each has sent 10 MiB but for a byte: the pool of 64 has room for six.
        slow = [open_.enter_context(begun(daemon.url, f"127.0.1.{number}", ENVELOPE - 1)) for number in range(1, 8)]
        assert_one_is_busy(slow)
        assert request(daemon.url, "GET", "/a2a/queue", token=operator_token(daemon.home)).status == 200
        # A stranger with little to say is still heard.
        assert request(daemon.url, "POST", RECEIVE, body=b"nonsense").json["code"] == "refused"
        assert resident_bytes(daemon.process.pid) - before < 96 * MIB


def test_a_slow_envelope_has_a_deadline_and_then_holds_nothing(start_daemon: StartDaemon) -> None:
    body_ms = {"COVENANT_HTTP_STRANGER_BODY_MS": "1000"}
    daemon = start_daemon(env={"COVENANT_PEERS_ENABLED": "1", **PATIENT, **body_ms})
    with begun(daemon.url, "127.0.0.1", ENVELOPE - 1) as slow:
        assert slow.read_answer().json["code"] == "too_slow"
        # The two together are more than the share of their address. On a slow machine this one may be too slow itself.
        codes = {"too_slow"}
        while codes == {"too_slow"}:
            codes = {request(daemon.url, "POST", RECEIVE, body=b" " * ENVELOPE).json["code"]}
        assert codes == {"refused"}, "it was read"


def test_who_announces_much_and_sends_little_shuts_nobody_out(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(env={"COVENANT_PEERS_ENABLED": "1", **PATIENT})
    with ExitStack() as open_:
        for number in range(32):
            open_.enter_context(begun(daemon.url, f"127.0.1.{number // 4 + 1}", 1))
        answer = request(daemon.url, "POST", RECEIVE, body=b" " * ENVELOPE)
        assert answer.json["code"] == "refused", "it was read"


def test_one_address_cannot_have_the_whole_pool_and_chunks_are_counted_too(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(env={"COVENANT_PEERS_ENABLED": "1", **PATIENT})
    with begun(daemon.url, "127.0.0.1", ENVELOPE - 1) as slow, RawConnection(daemon.url) as chunked:
        send_chunks(chunked, ENVELOPE - 2 * CHUNK)
        assert_one_is_busy([slow, chunked])  # 10 MiB each, and the share of an address is 16


def test_a_message_in_chunks_is_held_no_longer_than_an_envelope_may_be(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(env={"COVENANT_PEERS_ENABLED": "1", **PATIENT})
    with RawConnection(daemon.url) as chunked:
        send_chunks(chunked, 2 * ENVELOPE)  # more than the share of its address, were it all held
        with suppress(OSError):
            chunked.send(b"0\r\n\r\n")
        answer = chunked.read_answer()
        assert (answer.status, answer.json["code"]) == (400, "refused"), answer


@pytest.mark.parametrize("path", ["", "/message:send"], ids=["json-rpc", "rest"])
def test_callers_of_an_open_agent_hold_no_more_than_the_pool_either(
    start_daemon: StartDaemon, short_path: Path, path: str
) -> None:
    agents = short_path / "agents.py"
    agents.write_text(AGENT)
    settings = {"COVENANT_A2A_PUBLISH": "echo", "COVENANT_A2A_PUBLISH_ANONYMOUS": "anywhere"}
    daemon = start_daemon(str(agents), env={**settings, **PATIENT})
    path, size = f"/v1/a2a/agents/echo{path}", 8 * MIB
    with ExitStack() as open_:
        # Each has sent 8 MiB but for a byte, two from an address: the pool of 64 has room for eight.
        slow = [
            open_.enter_context(begun(daemon.url, f"127.0.3.{number // 2 + 1}", size - 1, path=path, size=size))
            for number in range(9)
        ]
        assert_one_is_busy(slow)
        token = operator_token(daemon.home)
        assert request(daemon.url, "GET", "/a2a/queue", token=token).status == 200


@pytest.fixture
def start_grpc_daemon(start_daemon: StartDaemon, short_path: Path) -> StartGrpcDaemon:
    """Starts a daemon with an agent and this environment; the port is that of gRPC."""

    def start(env: dict[str, str]) -> tuple[Daemon, int]:
        agents = short_path / "agents.py"
        agents.write_text(AGENT)
        daemon = start_daemon(str(agents), "--grpc-enabled", "1", "--grpc-port", "0", env=env)
        card = request(daemon.url, "GET", "/v1/a2a/agents/echo/agent-card.json", token=operator_token(daemon.home)).json
        (url,) = {each["url"] for each in card["supportedInterfaces"] if each["protocolBinding"] == "GRPC"}
        return daemon, int(url.rpartition(":")[2])

    return start


@pytest.fixture
def silence() -> Iterator[Callable[[], Iterator[bytes]]]:
    """Messages of a caller that sends none before the test has ended."""
    ended = threading.Event()

    def send_nothing() -> Iterator[bytes]:
        ended.wait()
        yield b""

    yield send_nothing
    ended.set()


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return str(refused.value.code().name)


def test_over_grpc_the_token_comes_before_the_message(
    start_grpc_daemon: StartGrpcDaemon, silence: Callable[[], Iterator[bytes]]
) -> None:
    """A caller without a good token is refused although its message has not come, and will not for ten minutes."""
    _, port = start_grpc_daemon(PATIENT)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_unary(SEND, request_serializer=lambda data: data, response_deserializer=bytes)
        assert refusal(lambda: call(silence(), timeout=BOUND_S)) == "UNAUTHENTICATED"
        wrong = (("authorization", "Bearer atr_" + "0" * 64),)
        assert refusal(lambda: call(silence(), timeout=BOUND_S, metadata=wrong)) == "UNAUTHENTICATED"


def test_over_grpc_a_caller_with_a_token_has_a_deadline_for_its_message(
    start_grpc_daemon: StartGrpcDaemon, silence: Callable[[], Iterator[bytes]]
) -> None:
    daemon, port = start_grpc_daemon({"COVENANT_HTTP_STRANGER_BODY_MS": "500"})
    good = (("authorization", f"Bearer {operator_token(daemon.home)}"),)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_unary(SEND, request_serializer=lambda data: data, response_deserializer=bytes)
        assert refusal(lambda: call(silence(), timeout=BOUND_S, metadata=good)) == "INVALID_ARGUMENT"


def test_over_grpc_silent_callers_do_not_shut_out_their_address(
    start_grpc_daemon: StartGrpcDaemon, silence: Callable[[], Iterator[bytes]]
) -> None:
    _, port = start_grpc_daemon(
        {"COVENANT_A2A_PUBLISH": "echo", "COVENANT_A2A_PUBLISH_ANONYMOUS": "anywhere", **PATIENT}
    )
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        wait = channel.stream_unary(SEND, request_serializer=lambda data: data, response_deserializer=bytes)
        waiting = [wait.future(silence(), timeout=BOUND_S) for _ in range(2)]
        send = channel.unary_unary(SEND, request_serializer=lambda data: data, response_deserializer=bytes)
        message = a2a_pb2.SendMessageRequest()
        message.message.message_id, message.message.role = "m", a2a_pb2.ROLE_USER
        message.message.parts.add(text="hello")
        answer = send(message.SerializeToString(), timeout=BOUND_S, metadata=(("a2a-version", "1.0"),))
        assert b"hello" in answer
        assert {future.code().name for future in waiting} == {"INVALID_ARGUMENT"}, "they had no ten minutes"


def test_over_grpc_large_messages_of_strangers_are_not_held(start_grpc_daemon: StartGrpcDaemon) -> None:
    daemon, port = start_grpc_daemon(PATIENT)
    before = resident_bytes(daemon.process.pid)
    message = a2a_pb2.SendMessageRequest(tenant="echo")
    message.message.parts.add(text="x" * (7 * MIB))
    data = message.SerializeToString()
    options = [("grpc.max_send_message_length", 64 * MIB)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        call = channel.unary_unary(SEND, request_serializer=lambda given: given, response_deserializer=bytes)
        futures = [call.future(data, timeout=BOUND_S) for _ in range(24)]
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
        assert "hi" in str(call(asked, timeout=BOUND_S, metadata=metadata))


def test_the_audit_is_bounded_however_many_addresses_strangers_have(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    host, _, port = daemon.url.removeprefix("http://").partition(":")
    for number in range(150):
        with socket.create_connection((host, int(port)), source_address=(f"127.0.3.{number + 1}", 0)) as connection:
            connection.settimeout(BOUND_S)
            connection.sendall(b"GET /a2a/queue HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            assert connection.recv(100).split()[1] == b"401"
    answer = request(daemon.url, "GET", "/audit/recent?limit=500", token=operator_token(daemon.home))
    assert answer.status == 200, answer
    assert 1 <= answer.body.count(b"authentication_failed") <= 100
