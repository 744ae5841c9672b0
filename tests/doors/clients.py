"""Small clients of both doors that say exactly what a test wants said, right or wrong."""

import asyncio
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.waits import BOUND_S


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class HttpConnection:
    """One connection to a port; as many requests as the server lets it have."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.close()

    async def say(self, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        given = {"Host": f"127.0.0.1:{self._port}", "Content-Length": str(len(body)), **headers}
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items() if value)]
        self.writer.write("\r\n".join((*lines, "", "")).encode("latin-1") + body)
        await self.writer.drain()

    async def hear(self, *, bodiless: bool = False) -> Reply:
        async with asyncio.timeout(BOUND_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)
            }
            length = 0 if bodiless else int(headers.get("content-length", 0))
            body = await self.reader.readexactly(length)
        return Reply(int(head[0].split()[1]), headers, body)

    async def ended(self) -> bool:
        """Whether the server has closed its side, with nothing more said."""
        async with asyncio.timeout(BOUND_S):
            return not await self.reader.read(1)


@dataclass(frozen=True, slots=True)
class Http:
    """Requests over HTTP, one connection each, in the name of a token."""

    port: int
    token: str | None = None

    async def ask(self, method: str, target: str, body: Any = b"", headers: dict[str, str] | None = None) -> Reply:
        """`body` is sent as it is if it is bytes, else as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"Authorization": f"Bearer {self.token}"} if self.token is not None else {}
        async with HttpConnection(self.port) as connection:
            await connection.say(method, target, {**named, **(headers or {})}, data)
            return await connection.hear(bodiless=method == "HEAD")

    async def get(self, target: str) -> Any:
        return self._good(await self.ask("GET", target))

    async def post(self, target: str, body: Any = b"") -> Any:
        return self._good(await self.ask("POST", target, body))

    def _good(self, reply: Reply) -> Any:
        assert reply.status == 200, reply
        return reply.json


class Ipc:
    """One connection to the socket."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_unix_connection(self._path)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.close()

    async def send_bytes(self, body: bytes) -> None:
        self.writer.write(struct.pack(">I", len(body)) + body)
        await self.writer.drain()

    async def hear(self) -> Any:
        """The next answer; None once the server has closed its side."""
        async with asyncio.timeout(BOUND_S):
            try:
                (length,) = struct.unpack(">I", await self.reader.readexactly(4))
                return json.loads(await self.reader.readexactly(length))
            except (asyncio.IncompleteReadError, ConnectionResetError):
                return None

    async def ask(self, kind: str, **fields: Any) -> Any:
        await self.send_bytes(json.dumps({"kind": kind, **fields}).encode())
        return await self.hear()

    async def authenticate(self, token: str) -> Self:
        assert (await self.ask("authenticate", token_b58=token))["kind"] == "authenticated"
        return self
