"""A stand-in for `/healthz` while the loop is held: it accepts connections in the loop's place, from another thread.

A new connection whose first request is `GET` or `HEAD` of `/healthz` (or `/health`) is answered here. Every other one
is handed to the loop, unread, and served as soon as the loop is free. So are those that say nothing for a second.
Requests on connections that the loop has accepted before wait for the loop: a probe should use a new connection each
time. Code that keeps the interpreter's lock keeps this thread waiting as well.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

_METHODS: Final = (b"GET ", b"HEAD ")
_ASKS: Final = re.compile(rb"(?:GET|HEAD) /healthz?(?:\?[!-~]*)? HTTP/1\.[01]\r\n")
HEAD_END: Final = b"\r\n\r\n"
HEAD_BYTES_MAX: Final = 4_096
"""A longer head is left to the loop."""
HEAD_S: Final = 1.0
"""How long a connection may take to say what it wants, before it is handed to the loop."""
ACCEPTED_AT_ONCE_MAX: Final = 64
LOOK_S: Final = 0.05
UNHEALTHY_S: Final = 30.0
"""From then on a held loop is no longer called healthy."""


class Hold(NamedTuple):
    """`since_s`: by the monotonic clock. `agent`: None if none of an agent's code was running."""

    since_s: float
    agent: str | None


class HealthStandIn:
    """`hand_over` is called in the thread that calls `serve`, with a socket that is the receiver's from then on.

    `connections_max`: accepted in one hold. Further ones wait in the system's queue.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        hand_over: Callable[[socket.socket], object],
        *,
        connections_max: int,
    ) -> None:
        self._listeners = tuple(listeners)
        self._hand_over = hand_over
        self._connections_max = connections_max

    def serve(self, hold: Hold, over: Callable[[], bool]) -> None:
        """Until the hold is over. What is not answered by then is handed over."""
        waiting: dict[socket.socket, float] = {}
        room = self._connections_max
        with selectors.DefaultSelector() as selector:
            for listener in self._listeners:
                if listener.fileno() >= 0:  # a server that stops has closed it
                    selector.register(listener, selectors.EVENT_READ)
            try:
                while not over():
                    for key, _ in selector.select(LOOK_S):
                        if over():
                            return
                        assert isinstance(key.fileobj, socket.socket)
                        made = _accept(key.fileobj, min(room, ACCEPTED_AT_ONCE_MAX))
                        waiting |= dict.fromkeys(made, time.monotonic() + HEAD_S)
                        room -= len(made)
                    if room <= 0 and selector.get_map():
                        for listener in self._listeners:
                            selector.unregister(listener)
                    self._look(waiting, hold)
            finally:
                for connection in waiting:
                    self._hand_over(connection)

    def _look(self, waiting: dict[socket.socket, float], hold: Hold) -> None:
        """At what each new connection has said so far."""
        for connection, until_s in list(waiting.items()):
            try:
                head = connection.recv(HEAD_BYTES_MAX, socket.MSG_PEEK)
            except BlockingIOError:
                head = b""
            except OSError:
                del waiting[connection]
                connection.close()
                continue
            asks = _ASKS.match(head) is not None
            if asks and HEAD_END in head:
                del waiting[connection]
                _answer(connection, head, hold)
            elif not (asks or _may_ask(head)) or time.monotonic() > until_s:
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
        pass  # there are no more, or the one that was there has left
    except OSError:
        time.sleep(LOOK_S)  # no more files can be opened now
    return accepted


def _may_ask(head: bytes) -> bool:
    """Whether a request line that has not arrived whole could still ask for health."""
    return b"\n" not in head and any(method.startswith(head) or head.startswith(method) for method in _METHODS)


def _answer(connection: socket.socket, asked: bytes, hold: Hold) -> None:
    # Whoever is refused by a full buffer, or is gone, gets no answer; there is nobody to tell.
    with suppress(OSError):
        connection.recv(len(asked))  # what is left unread would reset the connection
        answer = answer_of(hold, time.monotonic())
        connection.send(answer.partition(HEAD_END)[0] + HEAD_END if asked.startswith(b"HEAD") else answer)
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def answer_of(hold: Hold, now_s: float) -> bytes:
    """Says that an agent holds the loop, never which one: `/healthz` is for strangers too."""
    held_s = now_s - hold.since_s
    healthy = held_s < UNHEALTHY_S
    told = {
        "status": "ok" if healthy else "held",
        "loop": "held",
        "held_by": "the daemon" if hold.agent is None else "an agent",
        "held_ms": int(held_s * 1000),
    }
    body = json.dumps(told, separators=(",", ":")).encode()
    status = b"200 OK" if healthy else b"503 Service Unavailable"
    return (
        b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncache-control: no-store\r\ncontent-length: %d\r\n"
        b"connection: close\r\n\r\n%b" % (status, len(body), body)
    )
