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
        self._open: list[socket.socket] = []
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
        self._listener.close()
        self.hang_up()

    def hang_up(self) -> None:
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._open.clear()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                callee = socket.create_connection(self._target)
                self._open += [caller, callee]
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
