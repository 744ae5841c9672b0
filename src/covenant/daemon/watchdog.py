"""A watchdog: a thread that notices when the loop is held, logs what held it, and answers `/healthz` meanwhile.

Ten times a second it schedules a callback on the loop. If none runs for `HELD_S`, it logs the agent whose code runs,
if any, and the stack of the loop's thread: once a hold, at most `LOGS_MAX` a minute. Code that also holds the
interpreter's lock, such as a long regular expression, is logged when it is over, without a stack.
"""

from __future__ import annotations

import asyncio
import json
import re
import selectors
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final, NamedTuple, Protocol

from covenant.daemon.telemetry import Log

_METHODS: Final = (b"GET ", b"HEAD ")
_HEALTH_REQUEST: Final = re.compile(rb"(?:GET|HEAD) /healthz?(?:\?[!-~]*)? HTTP/1\.[01]\r\n")
HEAD_END: Final = b"\r\n\r\n"
HEAD_BYTES_MAX: Final = 4_096
"""A request with a longer head is left to the loop."""
HEAD_S: Final = 1.0
"""How long a connection may take to send its request line, before it is handed to the loop."""
ACCEPTED_AT_ONCE_MAX: Final = 64
POLL_S: Final = 0.05
UNHEALTHY_S: Final = 30.0
"""A loop that is held for longer is not called healthy any more."""
HELD_S: Final = 0.25
BEAT_S: Final = 0.1
LOGS_MAX: Final = 10
LOGS_S: Final = 60.0
FRAMES_MAX: Final = 12
"""The most frames of a stack in a log line, the innermost ones."""


class Hold(NamedTuple):
    """`since_s`: by the monotonic clock. `agent`: None if none of an agent's code was running."""

    since_s: float
    agent: str | None


class HealthResponder:
    """Answers `/healthz` from the watchdog's thread. `hand_over` takes every other connection.

    `connections_max`: accepted in one hold; further ones wait in the system's queue.
    """

    def __init__(
        self, listeners: Sequence[socket.socket], hand_over: Callable[[socket.socket], object], *, connections_max: int
    ) -> None:
        self._listeners = tuple(listeners)
        self._hand_over = hand_over
        self._connections_max = connections_max

    def serve(self, hold: Hold, over: Callable[[], bool]) -> None:
        """Serves until the hold is over. Connections that are not answered by then are handed over."""
        waiting: dict[socket.socket, float] = {}
        room = self._connections_max
        with selectors.DefaultSelector() as selector:
            for listener in self._listeners:
                if listener.fileno() >= 0:  # a server that stops has closed it
                    selector.register(listener, selectors.EVENT_READ)
            try:
                while not over():
                    for key, _ in selector.select(POLL_S):
                        if over():
                            return
                        assert isinstance(key.fileobj, socket.socket)
                        made = _accept(key.fileobj, min(room, ACCEPTED_AT_ONCE_MAX))
                        waiting |= dict.fromkeys(made, time.monotonic() + HEAD_S)
                        room -= len(made)
                    if room <= 0 and selector.get_map():
                        for listener in self._listeners:
                            selector.unregister(listener)
                    self._sort_connections(waiting, hold)
            finally:
                for connection in waiting:
                    self._hand_over(connection)

    def _sort_connections(self, waiting: dict[socket.socket, float], hold: Hold) -> None:
        for connection, until_s in list(waiting.items()):
            try:
                head = connection.recv(HEAD_BYTES_MAX, socket.MSG_PEEK)
            except BlockingIOError:
                head = b""
            except OSError:
                del waiting[connection]
                connection.close()
                continue
            asks_for_health = _HEALTH_REQUEST.match(head) is not None
            if asks_for_health and HEAD_END in head:
                del waiting[connection]
                _answer(connection, head, hold)
            elif not (asks_for_health or _may_ask_for_health(head)) or time.monotonic() > until_s:
                del waiting[connection]
                self._hand_over(connection)


def _accept(listener: socket.socket, most: int) -> list[socket.socket]:
    accepted: list[socket.socket] = []
    try:
        while len(accepted) < most:
            made, _ = listener.accept()
            made.setblocking(False)
            accepted.append(made)
    except (BlockingIOError, ConnectionError):
        pass  # no more connections wait, or the one that did has left
    except OSError:
        time.sleep(POLL_S)  # no more files can be opened now
    return accepted


def _may_ask_for_health(head: bytes) -> bool:
    """Whether an incomplete request line could still become a request for `/healthz`."""
    return b"\n" not in head and any(method.startswith(head) or head.startswith(method) for method in _METHODS)


def _answer(connection: socket.socket, request: bytes, hold: Hold) -> None:
    # A client with a full buffer, or one that is gone, gets no answer.
    with suppress(OSError):
        connection.recv(len(request))  # unread bytes would reset the connection
        answer = answer_of(hold, time.monotonic())
        connection.send(answer.partition(HEAD_END)[0] + HEAD_END if request.startswith(b"HEAD") else answer)
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def answer_of(hold: Hold, now_s: float) -> bytes:
    """Says that an agent holds the loop, but not which one, since `/healthz` is public."""
    held_s = now_s - hold.since_s
    healthy = held_s < UNHEALTHY_S
    answer = {
        "status": "ok" if healthy else "held",
        "loop": "held",
        "held_by": "the daemon" if hold.agent is None else "an agent",
        "held_ms": int(held_s * 1000),
    }
    body = json.dumps(answer, separators=(",", ":")).encode()
    status = b"200 OK" if healthy else b"503 Service Unavailable"
    return (
        b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncache-control: no-store\r\ncontent-length: %d\r\n"
        b"connection: close\r\n\r\n%b" % (status, len(body), body)
    )


class HoldResponder(Protocol):
    def serve(self, hold: Hold, over: Callable[[], bool]) -> None:
        """Waits until the hold is over."""


class _Beat:
    """A callback that the watchdog schedules on the loop."""

    def __init__(self) -> None:
        self.scheduled_s = time.monotonic()
        self.ran_s = self.scheduled_s
        self.ran = threading.Event()

    @property
    def held_s(self) -> float:
        return self.ran_s - self.scheduled_s

    def run(self) -> None:
        self.ran_s = time.monotonic()
        self.ran.set()


class Watchdog:
    """`agent_at`: the agent whose code runs at a frame, if any. `on_hold` gets the seconds of each hold."""

    def __init__(
        self,
        *,
        responder: HoldResponder,
        agent_at: Callable[[FrameType], str | None],
        log: Log,
        on_hold: Callable[[float], None],
        held_s: float = HELD_S,
        beat_s: float = BEAT_S,
    ) -> None:
        self._responder = responder
        self._agent_at = agent_at
        self._log = log
        self._on_hold = on_hold
        self._held_s = held_s
        self._beat_s = beat_s
        self._stopping = threading.Event()
        self._beat = _Beat()
        self._logged_s: deque[float] = deque(maxlen=LOGS_MAX)
        self._unlogged = 0

    @contextmanager
    def watching(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Entered on the thread of the loop, which is watched until it is left."""
        thread = threading.Thread(
            target=self._watch, args=(loop, threading.get_ident()), name="loop watchdog", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            self._beat.run()  # the loop cannot run it, since its thread waits here
            thread.join()

    def _watch(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> None:
        rested_s = time.monotonic()
        while not self._stopping.wait(self._beat_s):
            try:
                self._note_pause(time.monotonic() - rested_s - self._beat_s)
                self._check_loop(loop, thread_id)
            except Exception:  # noqa: BLE001  (a fault in it must not leave the loop unwatched)
                self._log.exception("watchdog.failed")
            rested_s = time.monotonic()

    def _check_loop(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> None:
        self._beat = beat = _Beat()
        loop.call_soon_threadsafe(beat.run)
        in_time = beat.ran.wait(self._held_s)
        if self._stopping.is_set():
            return
        if in_time:
            self._note_pause(beat.held_s)
        else:
            self._report_hold(beat, sys._current_frames().get(thread_id))  # noqa: SLF001  (documented)

    def _note_pause(self, paused_s: float) -> None:
        """Notes a time in which neither the loop nor this thread could run."""
        if paused_s > self._held_s:
            self._on_hold(paused_s)
            self._report(None, paused_s, "", "the interpreter itself was held, or the process paused")

    def _report_hold(self, beat: _Beat, frame: FrameType | None) -> None:
        agent = self._agent_at(frame) if frame is not None else None
        logged = self._report(agent, time.monotonic() - beat.scheduled_s, stack_of(frame), "")
        del frame  # a frame keeps everything in its function alive
        self._responder.serve(Hold(beat.scheduled_s, agent), beat.ran.is_set)
        if self._stopping.is_set():
            return
        self._on_hold(beat.held_s)
        if logged:
            self._log.info("loop.freed", held_ms=int(beat.held_s * 1000), **({"agent": agent} if agent else {}))

    def _report(self, agent: str | None, held_s: float, stack: str, why: str) -> bool:
        """Returns whether the hold was logged. Holds that are not logged are counted in the next line."""
        now_s = time.monotonic()
        if len(self._logged_s) == LOGS_MAX and now_s - self._logged_s[0] < LOGS_S:
            self._unlogged += 1
            return False
        self._logged_s.append(now_s)
        fields = {"agent": agent, "stack": stack, "why": why, "unlogged": self._unlogged}
        self._log.warning("loop.held", held_ms=int(held_s * 1000), **{name: it for name, it in fields.items() if it})
        self._unlogged = 0
        return True


def stack_of(frame: FrameType | None) -> str:
    """In one line, the innermost call first."""
    if frame is None:
        return ""
    calls = reversed(traceback.extract_stack(frame, limit=FRAMES_MAX))
    return " < ".join(f"{call.name} ({call.filename}:{call.lineno}) {call.line or ''}".rstrip() for call in calls)
