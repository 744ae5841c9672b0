"""A line between two daemons on which a test sits: it sees every byte, and can hold them back, lose them or cut it."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, Literal, Self

from tests.waits import BOUND_S

Way = Literal["there", "back"]
"""`there`: from whoever called. `back`: what it is answered."""
CHUNK: Final = 65_536


class Proxy:
    """Forwards from a port of its own to `port`. Everything that went through, or was kept from it, is recorded.

    While `hold` is on for a way, what comes is kept in order and goes on with `release`; while `drop` is, it is lost.
    `cut` closes what is open; while `refuse` is on, whoever calls is hung up on.
    """

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._changed = threading.Condition()
        self._open: list[socket.socket] = []
        self._recorded: dict[Way, list[bytes]] = {"there": [], "back": []}
        self._held: set[Way] = set()
        self._dropped: set[Way] = set()
        self._refused = False
        self._closed = False
        self.kept: dict[Way, int] = {"there": 0, "back": 0}
        """How many bytes were held or lost on each way."""
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def there(self) -> bytes:
        """All that callers have sent."""
        with self._changed:
            return b"".join(self._recorded["there"])

    @property
    def back(self) -> bytes:
        with self._changed:
            return b"".join(self._recorded["back"])

    # On command

    def hold(self, *ways: Way) -> None:
        """Keep what comes from now on; without a way, on both."""
        with self._changed:
            self._held |= set(ways or ("there", "back"))

    def release(self) -> None:
        """Let go on what was held, and whatever comes; nothing is lost or refused any more."""
        with self._changed:
            self._held.clear()
            self._dropped.clear()
            self._refused = False
            self._changed.notify_all()

    def drop(self, *ways: Way) -> None:
        """Lose what comes from now on; without a way, on both."""
        with self._changed:
            self._dropped |= set(ways or ("there", "back"))

    def refuse(self) -> None:
        """Hang up on whoever is connected, and on whoever calls."""
        with self._changed:
            self._refused = True
        self.cut()

    def lead_to(self, port: int) -> None:
        """Lead to another port from now on, as a balancer does when a daemon is gone."""
        self._target = ("127.0.0.1", port)
        self.cut()

    def cut(self) -> None:
        """Close every connection that is open, whatever is under way on it."""
        with self._changed:
            found, self._open = self._open, []
            for each in found:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
            self._changed.notify_all()

    def until(self, holds: Callable[["Proxy"], bool], bound_s: float = BOUND_S) -> None:
        """Wait until this is so of what was recorded or kept."""
        with self._changed:
            assert self._changed.wait_for(lambda: holds(self), bound_s), f"never came; kept {self.kept}"

    def until_kept(self, way: Way) -> None:
        """Wait until something is held, or was lost, on this way."""
        self.until(lambda proxy: proxy.kept[way] > 0)

    # Its life

    def close(self) -> None:
        self._closed = True
        # On Linux, closing alone does not wake whoever accepts.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _refuses(self) -> bool:
        return self._refused or self._closed

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                if self._refuses():
                    caller.close()
                    continue
                try:
                    callee = socket.create_connection(self._target, timeout=BOUND_S)
                except OSError:  # the daemon is away: the caller sees the line break
                    caller.close()
                    continue
                callee.settimeout(None)
                with self._changed:
                    self._open += [caller, callee]
                if self._refuses():  # since it was accepted
                    self.cut()
                ways: tuple[tuple[socket.socket, socket.socket, Way], ...] = (
                    (caller, callee, "there"),
                    (callee, caller, "back"),
                )
                for source, target, way in ways:
                    threading.Thread(target=self._pump, args=(source, target, way), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, way: Way) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK):
                if self._pass(data, way, source):
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _pass(self, data: bytes, way: Way, source: socket.socket) -> bool:
        """Whether it goes on; not before it may."""
        with self._changed:
            self._recorded[way].append(data)
            lost, held = way in self._dropped, way in self._held
            if lost or held:
                self.kept[way] += len(data)
            self._changed.notify_all()
            self._changed.wait_for(lambda: way not in self._held or source.fileno() == -1)
            return not lost
