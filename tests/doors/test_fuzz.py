"""Any bytes, on either door: a caller gets an answer or is cut off, never a traceback, and the next one is served."""

import asyncio
import http.client
import json
import logging
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from covenant.doors.http.responses import PROBLEM, style_of
from covenant.doors.operator_api.operation_table import OPERATIONS
from tests.doors.doors_under_test import DoorsUnderTest, open_doors
from tests.places import short_folder
from tests.waits import BOUND_S


@contextmanager
def own_doors() -> Iterator[DoorsUnderTest]:
    """A world on uvloop in another thread, for clients that block."""
    opened: Future[tuple[DoorsUnderTest, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def live() -> None:
        with short_folder() as folder:
            async with open_doors(folder) as under_test:
                done = asyncio.Event()
                opened.set_result((under_test, asyncio.get_running_loop(), done))
                await done.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(live())

    thread = threading.Thread(target=run)
    thread.start()
    under_test, loop, done = opened.result(BOUND_S)
    try:
        yield under_test
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(BOUND_S)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[DoorsUnderTest]:
    with own_doors() as under_test:
        yield under_test


class Failures(logging.Handler):
    """What was logged as our own fault."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def no_fault_of_ours() -> Iterator[None]:
    failures = Failures()
    logging.getLogger().addHandler(failures)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(failures)
    assert [record.getMessage() for record in failures.records] == []


def receive(connection: socket.socket) -> bytes:
    """Everything until the other side closes or has nothing more to say."""
    heard = b""
    with suppress(ConnectionError):
        while data := connection.recv(65_536):
            heard += data
    return heard


def frames(data: bytes) -> list[Any]:
    found = []
    while data:
        (length,) = struct.unpack_from(">I", data)
        assert len(data) >= 4 + length
        found.append(json.loads(data[4 : 4 + length]))
        data = data[4 + length :]
    return found


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)
ids = st.sampled_from(["123e4567-e89b-42d3-a456-426614174000", "1", ""])
agents = st.fixed_dictionaries({"display": st.sampled_from(["bob@test", "operator@test", "x"])})
contents = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json", "image", "x"])}, optional={"text": values, "value": values}
    ),
    max_size=3,
)
bodies = st.fixed_dictionaries(
    {},
    optional={
        "id": ids | values,
        "task_id": ids | values,
        "lease_id": ids | values,
        "recipient": agents | values,
        "sender": agents | values,
        "intent_text": st.text() | values,
        "status": st.sampled_from(["ok", "error"]) | values,
        "content": contents | values,
        "parts": contents | values,
        "update": values,
        "reason": st.text() | values,
        "command": values,
        "display": st.sampled_from(["new@test", "x"]) | values,
        "action": st.text(max_size=20) | values,
        "scope": values,
        "limit": st.integers(-2, 5) | values,
        "max": st.integers(-2, 5) | values,
        "identity": st.sampled_from(["bob@test", ""]) | values,
        "deadline_ms": st.integers() | values,
        "before_ms": st.integers(0, 10) | values,
    },
)
# Compaction and verification cost a second each; they read nothing of what is made up here.
kinds = st.sampled_from(
    sorted(
        {each.kind for each in OPERATIONS}
        - {"compact_a2a", "verify_audit_integrity", "rotate_token", "revoke_identity"}
    )
)
many = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def asked(kind: str, body: dict[str, Any]) -> bytes:
    wrapped = {"send_a2a_task": "task", "post_a2a_result": "result", "repair_a2a_task": "request"}.get(kind)
    return json.dumps({"kind": kind, **({wrapped: body} if wrapped else body)}).encode()


frame_bytes = (
    st.binary(max_size=60).map(framed)
    | st.binary(max_size=60)
    | st.builds(asked, kinds, bodies).map(framed)
    | values.map(lambda value: framed(json.dumps(value).encode()))
    | st.text(max_size=10).map(lambda kind: framed(json.dumps({"kind": kind}).encode()))
)


def check_ipc(under_test: DoorsUnderTest, sent: bytes, *, authenticated: bool) -> None:
    """Say all of it, close our side, and hear the rest: whole frames that are answers, and then the end."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(BOUND_S)
        connection.connect(str(under_test.socket))
        if authenticated:
            hello = json.dumps({"kind": "authenticate", "token_b58": under_test.operator.token}).encode()
            connection.sendall(framed(hello))
        with suppress(ConnectionError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        for answer in frames(receive(connection)):
            assert isinstance(answer["kind"], str)
            assert "Traceback" not in json.dumps(answer)
            assert answer.get("code") != "internal"
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(BOUND_S)
        connection.connect(str(under_test.socket))
        connection.sendall(framed(b'{"kind":"ping"}'))
        connection.shutdown(socket.SHUT_WR)
        assert frames(receive(connection)) == [{"kind": "pong"}]


@many
@given(st.lists(frame_bytes, max_size=5), st.booleans())
def test_any_frames_are_answered_or_end_the_connection(
    fuzzed: DoorsUnderTest, sent: list[bytes], authenticated: bool
) -> None:
    with no_fault_of_ours():
        check_ipc(fuzzed, b"".join(sent), authenticated=authenticated)


@many
@given(st.sampled_from(OPERATIONS), st.binary(max_size=60) | bodies.map(lambda body: json.dumps(body).encode()))
def test_any_body_is_answered_with_a_status_and_json(fuzzed: DoorsUnderTest, operation: Any, body: bytes) -> None:
    if operation.kind in ("compact_a2a", "verify_audit_integrity", "rotate_token", "revoke_identity"):
        return
    target = operation.path.replace("{task_id}", "123e4567-e89b-42d3-a456-426614174000")
    target = target.replace("{tenant}", "default").replace("{name}", "none").replace("{agent_id}", "index")
    connection = http.client.HTTPConnection("127.0.0.1", fuzzed.port, timeout=BOUND_S)
    with no_fault_of_ours():
        connection.request(operation.method, target, body, {"Authorization": f"Bearer {fuzzed.operator.token}"})
        reply = connection.getresponse()
        answer = json.loads(reply.read())
    connection.close()
    # These doors have no part that calls agents, and a database has its own backups: whoever asks for one is told so.
    no_such_part = reply.status == 503 and answer.get("code") in ("no_inspector", "no_backup")
    assert no_such_part or reply.status in (200, 201, 400, 403, 404, 409, 413, 429), answer
    assert ("error" in answer if style_of(target) is PROBLEM else answer["kind"] == "error") == (reply.status >= 400)


@many
@given(
    st.binary(max_size=200)
    | st.builds(
        lambda method, target, headers, body: (
            f"{method} {target} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n\r\n".encode() + body
        ),
        st.sampled_from(["GET", "POST", "PUT", "OPTIONS", "BREW", ""]),
        st.sampled_from(["/a2a/tasks", "/a2a/tasks/next?max=%00", "*", "http://x/y", "/%ff%fe", "/docs#x", "//"])
        | st.text(st.characters(codec="ascii"), max_size=20),
        st.sampled_from(
            ["Content-Length: 5", "Content-Length: -1", "Content-Length: x", "Transfer-Encoding: chunked", "X: y"]
        ),
        st.binary(max_size=30),
    )
)
def test_any_bytes_on_the_port_leave_the_server_serving(fuzzed: DoorsUnderTest, sent: bytes) -> None:
    with no_fault_of_ours():
        with socket.create_connection(("127.0.0.1", fuzzed.port), BOUND_S) as connection:
            with suppress(ConnectionError):
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
            heard = receive(connection)
            assert b"Traceback" not in heard
            assert b" 500 " not in heard.split(b"\r\n")[0]
        after = http.client.HTTPConnection("127.0.0.1", fuzzed.port, timeout=BOUND_S)
        after.request("GET", "/healthz")
        assert after.getresponse().status == 200
        after.close()


def test_waiting_and_leaving_work_on_the_daemons_loop(fuzzed: DoorsUnderTest) -> None:
    """Which is not the one that the other tests run on."""
    hello = framed(json.dumps({"kind": "authenticate", "token_b58": fuzzed.operator.token}).encode())
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rb") as answers:
        connection.settimeout(BOUND_S)
        connection.connect(str(fuzzed.socket))

        def hear() -> Any:
            (length,) = struct.unpack(">I", answers.read(4))
            return json.loads(answers.read(length))

        connection.sendall(
            hello + framed(b'{"kind":"try_recv_a2a_task","wait_ms":10}') + framed(b'{"kind":"a2a_queue"}')
        )
        assert [hear()["kind"] for _ in range(3)] == ["authenticated", "a2a_task_opt", "a2a_queue"]
        connection.sendall(framed(b'{"kind":"try_recv_a2a_task","wait_ms":60000}') + framed(b'{"kind":"ping"}'))
        connection.shutdown(socket.SHUT_WR)
        assert answers.read() == b"", "nobody is waited for who has closed their side"
