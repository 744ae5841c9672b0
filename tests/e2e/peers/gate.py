"""A line between two daemons that knows one message from another: a test stops it at a step of its choice, or loses it.

What a message is stands in its envelope's header, which anybody on the way can read; what it says does not.
"""

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self

from covenant.seal.keys import from_base64url
from tests.waits import BOUND_S

At = Literal["request", "forwarded", "answer", "answered"]
"""Before it arrives; once it has been sent on; before its answer is heard; once that has been sent on."""
CHUNK: Final = 65_536


class Passing(NamedTuple):
    """A request, and later what it was answered."""

    path: str
    header: dict[str, Any]
    carried: tuple[dict[str, Any], ...] = ()
    """The headers of what is fetched with the answer."""

    @property
    def types(self) -> tuple[str, ...]:
        """Of what is said with it, either way."""
        return tuple(str(each.get("typ")) for each in (self.header, *self.carried))


Wants = Callable[[Passing], bool]


def says(typ: str) -> Wants:
    return lambda passing: typ in passing.types


def anything(_: Passing) -> bool:
    return True


class Catch:
    """Waits for one message, and stops it there. Those after it pass."""

    def __init__(self, at: At, wants: Wants) -> None:
        self.at = at
        self.wants = wants
        self._met, self._decided = threading.Event(), threading.Event()
        self._lost = False

    def until(self) -> None:
        """Wait until it is there."""
        assert self._met.wait(BOUND_S), "it never came"

    def pass_on(self) -> None:
        self._decided.set()

    def lose(self) -> None:
        """Hang up on both."""
        self._lost = True
        self._decided.set()

    def stop(self) -> bool:
        """Whether it may go on; by the one who brings it."""
        self._met.set()
        if self.at in ("request", "answer"):
            self._decided.wait(2 * BOUND_S)
        return not self._lost


class Loss:
    """Loses all of a kind, until it is over."""

    def __init__(self, at: At, wants: Wants) -> None:
        self.at = at
        self.wants = wants
        self.lost: list[Passing] = []
        self._changed = threading.Condition()
        self._over = False

    def until(self, count: int = 1) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.lost) >= count, BOUND_S), f"only {len(self.lost)} came"

    def over(self) -> None:
        self._over = True

    def takes(self, passing: Passing) -> bool:
        if self._over or not self.wants(passing):
            return False
        with self._changed:
            self.lost.append(passing)
            self._changed.notify_all()
        return True


class Gate:
    """Forwards HTTP from a port of its own to `port`, one request after the other on each connection."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._catches: list[Catch] = []
        self._losses: list[Loss] = []
        self._open: set[socket.socket] = set()
        self._shut = False
        self.passed: list[Passing] = []
        """Everything that was answered to whoever asked."""
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    # On command

    def catch(self, at: At, wants: Wants) -> Catch:
        """The next one of which this is so."""
        made = Catch(at, wants)
        with self._lock:
            self._catches.append(made)
        return made

    def lose(self, at: At, wants: Wants = anything) -> Loss:
        made = Loss(at, wants)
        with self._lock:
            self._losses.append(made)
        return made

    def shut(self) -> None:
        """Hang up on whoever is connected, and on whoever calls."""
        self._shut = True
        with self._lock:
            found = tuple(self._open)
        for each in found:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def open(self) -> None:
        self._shut = False

    def said(self, typ: str) -> list[int]:
        """The numbers of what of this type was sent and answered, in that order."""
        headers = [header for passing in self.passed for header in (passing.header, *passing.carried)]
        return [int(header["seq"]) for header in headers if header.get("typ") == typ and "seq" in header]

    # Its life

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for catch in self._catches:
            catch.lose()
        self.shut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        with caller, suppress(OSError), socket.create_connection(self._target, timeout=BOUND_S) as callee:
            callee.settimeout(None)
            with self._lock:
                self._open |= {caller, callee}
            try:
                while not self._shut and self._exchange(caller, callee):
                    pass
            finally:
                with self._lock:
                    self._open -= {caller, callee}

    def _exchange(self, caller: socket.socket, callee: socket.socket) -> bool:
        request = _message(caller)
        if request is None:
            return False
        passing = _asked(request)
        if not self._may("request", passing):
            return False
        callee.sendall(request)
        self._may("forwarded", passing)
        answer = _message(callee)
        if answer is None:
            return False
        passing = passing._replace(carried=_fetched(answer))
        if not self._may("answer", passing):
            return False
        caller.sendall(answer)
        self.passed.append(passing)
        self._may("answered", passing)
        return True

    def _may(self, at: At, passing: Passing) -> bool:
        with self._lock:
            loses = any(loss.at == at and loss.takes(passing) for loss in self._losses)
            found = next((each for each in self._catches if each.at == at and each.wants(passing)), None)
            if found is not None:
                self._catches.remove(found)
        if loses:
            return False
        return found is None or (found.stop() and not self._shut)


def _message(source: socket.socket) -> bytes | None:
    """A whole request or answer; None if whoever sends it has gone."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = source.recv(CHUNK)
        if not more:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    names = {line.partition(b":")[0].strip().lower(): line.partition(b":")[2].strip() for line in head.split(b"\r\n")}
    left = int(names.get(b"content-length", b"0")) - len(body)
    while left > 0:
        more = source.recv(CHUNK)
        if not more:
            return None
        data, left = data + more, left - len(more)
    return data


def _asked(request: bytes) -> Passing:
    head, _, body = request.partition(b"\r\n\r\n")
    return Passing(head.split(b" ")[1].decode(), _header(_document(body)))


def _fetched(answer: bytes) -> tuple[dict[str, Any], ...]:
    found = _document(answer.partition(b"\r\n\r\n")[2]).get("envelopes", ())
    return tuple(_header(each) for each in found)


def _document(body: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        found = json.loads(body)
        if isinstance(found, dict):
            return found
    return {}


def _header(envelope: dict[str, Any]) -> dict[str, Any]:
    if "protected" not in envelope:
        return {}
    found: dict[str, Any] = json.loads(from_base64url(envelope["protected"]))
    return found
