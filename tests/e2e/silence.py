"""A line between two daemons that can fall silent: what is sent arrives, and the answer to a POST does not."""

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self


class Silence:
    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._closed = False
        self.silent = False
        self.swallowed = threading.Event()
        """A POST has gone through, and its answer was kept back."""
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closed = True
        # On Linux, closing alone does not wake whoever accepts.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()

    def hang_up(self) -> None:
        with self._lock:
            found, self._open = self._open, []
        for each in found:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                try:
                    callee = socket.create_connection(self._target)
                except OSError:  # the daemon is away: the caller sees the line break
                    caller.close()
                    continue
                with self._lock:
                    self._open += [caller, callee]
                if self._closed:
                    self.hang_up()
                posted = threading.Event()
                threading.Thread(target=self._there, args=(caller, callee, posted), daemon=True).start()
                threading.Thread(target=self._back, args=(callee, caller, posted), daemon=True).start()

    def _there(self, caller: socket.socket, callee: socket.socket, posted: threading.Event) -> None:
        with suppress(OSError):
            while data := caller.recv(65_536):
                if data.startswith(b"POST "):
                    posted.set()
                callee.sendall(data)
            callee.shutdown(socket.SHUT_WR)

    def _back(self, callee: socket.socket, caller: socket.socket, posted: threading.Event) -> None:
        with suppress(OSError):
            while data := callee.recv(65_536):
                if self.silent and posted.is_set():
                    self.swallowed.set()
                else:
                    caller.sendall(data)
            caller.shutdown(socket.SHUT_WR)
