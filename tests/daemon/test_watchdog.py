"""The watchdog: what held the loop is logged once, counted, and bounded; a responder answers `/healthz` meanwhile."""

import asyncio
import json
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from covenant.daemon.telemetry import Log
from covenant.daemon.watchdog import LOGS_MAX, UNHEALTHY_S, HealthResponder, Hold, Watchdog, answer_of
from tests.waits import BOUND_S, until

HELD_S = 0.05
ASK = b"GET /healthz HTTP/1.1\r\nhost: h\r\n\r\n"


class Notes(Log):
    """A log and a metric that remember."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.held: list[float] = []

    def info(self, event: str, **fields: object) -> None:
        self.said.append((event, fields))

    warning = exception = info

    def of(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.said if name == event]


class Nobody:
    """A responder that only waits."""

    def serve(self, hold: Hold, over: Callable[[], bool]) -> None:
        while not over():
            time.sleep(0.005)


def watchdog(notes: Notes, agent: str | None = None, held_s: float = HELD_S) -> Watchdog:
    return Watchdog(
        responder=Nobody(),
        agent_at=lambda _: agent,
        log=notes,
        on_hold=notes.held.append,
        held_s=held_s,
        beat_s=0.01,
    )


async def noticed(notes: Notes, count: int) -> None:
    async with asyncio.timeout(BOUND_S):
        while len(notes.held) < count:  # noqa: ASYNC110  (what is waited for happens in a thread)
            await asyncio.sleep(0.005)


def hold_the_loop(noted: Callable[[], object] = lambda: True) -> None:
    time.sleep(3 * HELD_S)
    until(noted)


async def test_a_hold_is_logged_once_with_the_agent_and_the_stack() -> None:
    notes = Notes()
    with watchdog(notes, "g@default").watching(asyncio.get_running_loop()):
        while not any("hold_the_loop" in each.get("stack", "") for each in notes.of("loop.held")):
            before = len(notes.of("loop.held"))
            hold_the_loop(lambda: len(notes.of("loop.held")) > before)  # noqa: B023  (called in this round)
            await noticed(notes, before + 1)
    # A busy machine may hold the loop besides.
    (held,) = (each for each in notes.of("loop.held") if "hold_the_loop" in each.get("stack", ""))
    assert held["agent"] == "g@default"
    assert held["held_ms"] >= HELD_S * 1000
    assert f"hold_the_loop ({__file__}:" in held["stack"]
    assert max(freed["held_ms"] for freed in notes.of("loop.freed")) >= 2 * HELD_S * 1000
    assert max(notes.held) >= 2 * HELD_S


async def test_a_hold_that_keeps_the_interpreter_is_noticed_when_it_is_over() -> None:
    notes = Notes()
    size = 22
    pattern = re.compile("(a+)+b")
    with watchdog(notes).watching(asyncio.get_running_loop()):
        while not notes.held:  # twice the work until it took long enough on this machine
            pattern.match("a" * size)
            size += 1
            await asyncio.sleep(0.05)
    held = notes.of("loop.held")[0]
    assert held["held_ms"] >= HELD_S * 1000
    assert held.get("stack") or held["why"].startswith("the interpreter itself was held")


async def test_many_holds_are_all_counted_and_few_of_them_logged() -> None:
    notes = Notes()
    with watchdog(notes).watching(asyncio.get_running_loop()):
        for number in range(LOGS_MAX + 5):
            hold_the_loop()
            await noticed(notes, number + 1)
    assert len(notes.held) >= LOGS_MAX + 5
    assert len(notes.of("loop.held")) == LOGS_MAX


@pytest.mark.timeout(BOUND_S)
async def test_a_stop_is_no_hold_and_does_not_wait_for_one() -> None:
    notes = Notes()
    watching = watchdog(notes, held_s=10 * BOUND_S)
    before = watching._beat
    with watching.watching(asyncio.get_running_loop()):
        until(lambda: watching._beat is not before)  # it waits for the loop, which waits here
    assert notes.said == []


# The stand-in


class StandInUnderTest:
    """A stand-in at work on a listening socket. `handed` is what it gave to the loop."""

    def __init__(self, listener: socket.socket, connections_max: int = 8) -> None:
        self._listener = listener
        self._address = listener.getsockname()
        self.handed: list[socket.socket] = []
        self._over = threading.Event()
        responder = HealthResponder((listener,), self.handed.append, connections_max=connections_max)
        hold = Hold(time.monotonic() - 1.0, "g@default")
        self._thread = threading.Thread(target=responder.serve, args=(hold, self._over.is_set))
        self._thread.start()

    def connect(self, said: bytes = b"") -> socket.socket:
        made = socket.create_connection(self._address, timeout=BOUND_S)
        made.sendall(said)
        return made

    def until_handed(self, count: int) -> None:
        until_s = time.monotonic() + BOUND_S
        while len(self.handed) < count:
            assert time.monotonic() < until_s
            time.sleep(0.005)

    def until_accepted(self) -> None:
        """Nobody waits in the system's queue any more: the stand-in has accepted them."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            until_s = time.monotonic() + BOUND_S
            while selector.select(0):
                assert time.monotonic() < until_s

    def end(self) -> None:
        self._over.set()
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.end()
        for each in self.handed:
            each.close()


@contextmanager
def open_stand_in(connections_max: int = 8) -> Iterator[StandInUnderTest]:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.setblocking(False)
        made = StandInUnderTest(listener, connections_max)
        stack.callback(made.close)
        yield made


def read_all(connection: socket.socket) -> bytes:
    said = b""
    while more := connection.recv(65_536):
        said += more
    return said


def test_a_probe_that_asks_for_the_head_alone_gets_no_body() -> None:
    with open_stand_in() as at, at.connect(ASK.replace(b"GET", b"HEAD")) as connection:
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
        assert (head.startswith(b"HTTP/1.1 200 OK\r\n"), body) == (True, b"")


@pytest.mark.parametrize("ask", [ASK, ASK.replace(b"healthz", b"health"), ASK.replace(b"healthz", b"healthz?x=1")])
def test_health_is_answered_in_place_of_the_loop(ask: bytes) -> None:
    with open_stand_in() as at, at.connect(ask) as connection:
        head, body = read_all(connection).split(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        told = json.loads(body)
        assert (told["status"], told["loop"], told["held_by"]) == ("ok", "held", "an agent")
        assert told["held_ms"] >= 1000
        assert b"g@default" not in body
        assert at.handed == []


def test_a_head_that_comes_in_pieces_is_answered_too() -> None:
    with open_stand_in() as at, at.connect() as connection:
        for byte in ASK:
            connection.sendall(bytes((byte,)))
        assert read_all(connection).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    "said", [b"POST /v1/simple HTTP/1.1\r\n\r\n", b"GET /healthzz HTTP/1.1\r\n\r\n", b"GET /readyz HTTP/1.1\r\n\r\n"]
)
def test_everything_else_is_handed_over_unread(said: bytes) -> None:
    with open_stand_in() as at, at.connect(said):
        at.until_handed(1)
        assert at.handed[0].recv(1024) == said


def test_a_silent_connection_is_handed_over_and_health_is_answered_beside_it() -> None:
    with open_stand_in() as at, at.connect(), at.connect(b"GET /hea"), at.connect(ASK) as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 200 OK\r\n")
        at.until_handed(2)


def test_what_was_accepted_is_handed_over_when_the_hold_ends() -> None:
    with open_stand_in() as at, at.connect(b"GET /hea"):
        at.until_accepted()
        at.end()
        assert len(at.handed) == 1


def test_no_more_than_so_many_connections_are_accepted_in_one_hold() -> None:
    with open_stand_in(connections_max=3) as at, ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(at.connect(b"GET /readyz HTTP/1.1\r\n\r\n"))
        at.until_handed(3)
        at.end()
        assert len(at.handed) == 3


def test_a_loop_that_is_held_for_long_is_not_healthy() -> None:
    assert answer_of(Hold(0.0, None), UNHEALTHY_S - 0.1).startswith(b"HTTP/1.1 200 ")
    late = answer_of(Hold(0.0, None), UNHEALTHY_S)
    assert late.startswith(b"HTTP/1.1 503 ")
    assert json.loads(late.split(b"\r\n\r\n")[1]) == {
        "status": "held",
        "loop": "held",
        "held_by": "the daemon",
        "held_ms": 30_000,
    }
