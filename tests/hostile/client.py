"""Clients for attacks: a raw connection that sends any bytes, and plain requests beside it."""

import http.client
import io
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from tests.waits import BOUND_S


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class _Received(io.BufferedReader):
    """What a connection has received. One answer that is read to its end leaves the next one readable."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(socket.SocketIO(connection, "r"))

    def makefile(self, _: str) -> "_Received":
        return self

    def close(self) -> None:
        """Called at the end of each answer."""


class RawConnection:
    """One TCP connection to a daemon, on which a test writes whatever it likes."""

    def __init__(self, url: str, *, bound_s: float = BOUND_S, source: str = "127.0.0.1") -> None:
        """`source` is the address that it comes from: all of 127.0.0.0/8 is this machine."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.socket = socket.create_connection((parts.hostname, parts.port), bound_s, (source, 0))
        self._received = _Received(self.socket)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read_answer(self) -> Answer:
        """The next answer on this connection."""
        response = http.client.HTTPResponse(self._received)  # type: ignore[arg-type]  # has what is used of a socket
        response.begin()
        body = response.read()
        return Answer(response.status, dict(response.headers), body)

    def read_to_end(self) -> bytes:
        """Everything until the daemon closes; a reset counts as closing."""
        received = b""
        while True:
            try:
                more = self._received.read1(65_536)
            except ConnectionResetError:
                return received
            if not more:
                return received
            received += more

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def request(
    url: str,
    method: str,
    path: str,
    *,
    token: str | None = None,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    bound_s: float = BOUND_S,
) -> Answer:
    """One request on a connection of its own. A `body` that is not bytes is sent as JSON."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=bound_s)
    sent = dict(headers or {})
    if token is not None:
        sent["Authorization"] = f"Bearer {token}"
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    if data is not None:
        sent.setdefault("Content-Type", "application/json")
    try:
        connection.request(method, path, data, sent)
        response = connection.getresponse()
        return Answer(response.status, dict(response.headers), response.read())
    finally:
        connection.close()


def operator_token(home: Path) -> str:
    return (home / "operator.token").read_text().strip()


def resident_bytes(pid: int) -> int:
    """How much memory a process holds now."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} shows no memory")
