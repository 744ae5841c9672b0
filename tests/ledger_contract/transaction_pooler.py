"""A pooler before a PostgreSQL: few connections for many clients, each handed out for one transaction.

It is as strict as the poolers that are in use: a session's settings are refused at the start, and each transaction of a
client gets another connection, so that whoever relies on a session is found out.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import parse_qs, urlsplit, urlunsplit

PORT: Final = 5432
VERSION: Final = 196_608
TAKEN: Final = frozenset({"user", "database", "client_encoding", "application_name"})
"""What a client may say of its session."""


class Frame(NamedTuple):
    kind: bytes
    body: bytes

    def encode(self) -> bytes:
        return self.kind + struct.pack("!i", len(self.body) + 4) + self.body


READY: Final = Frame(b"Z", b"I")
"""The server waits, and there is no transaction."""


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    kind = await reader.readexactly(1)
    (size,) = struct.unpack("!i", await reader.readexactly(4))
    return Frame(kind, await reader.readexactly(size - 4))


class Backend:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.hello: list[Frame] = []
        """What it said of itself at its start."""


class TransactionPooler:
    def __init__(self, target: str, size: int) -> None:
        self._target = urlsplit(target)
        self._size = size
        self._free: asyncio.Queue[Backend] = asyncio.Queue()
        self._backends: set[Backend] = set()
        self._clients: set[asyncio.Task[None]] = set()
        self.url = ""
        self.handed_out = 0
        """How often a connection was given to a client."""

    async def open(self) -> None:
        for _ in range(self._size):
            self._free.put_nowait(await self._connect())

    async def close(self) -> None:
        for client in self._clients:
            client.cancel()
        if self._clients:
            await asyncio.wait(self._clients)
        for backend in self._backends:
            backend.writer.transport.abort()

    async def _connect(self) -> Backend:
        folder = parse_qs(self._target.query).get("host", [""])[0]
        if folder:
            reader, writer = await asyncio.open_unix_connection(str(Path(folder) / f".s.PGSQL.{PORT}"))
        else:
            reader, writer = await asyncio.open_connection(self._target.hostname, self._target.port or PORT)
        backend = Backend(reader, writer)
        said = {"user": self._target.username or "", "database": self._target.path[1:], "client_encoding": "UTF8"}
        body = b"".join(word.encode() + b"\0" for pair in said.items() for word in pair) + b"\0"
        writer.write(struct.pack("!ii", len(body) + 8, VERSION) + body)
        while True:
            backend.hello.append(await read_frame(reader))
            assert backend.hello[-1].kind != b"E", backend.hello[-1]
            if backend.hello[-1] == READY:
                self._backends.add(backend)
                return backend

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                if await self._greet(reader, writer):
                    await self._relay(reader, writer)
        finally:
            self._clients.discard(task)
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        size, version = struct.unpack("!ii", await reader.readexactly(8))
        words = (await reader.readexactly(size - 8)).split(b"\0")
        if version != VERSION:
            return False  # somebody asks that a query is cancelled: nobody need do so
        refused = {word.decode() for word in words[::2] if word} - TAKEN
        if refused:
            words = [b"SFATAL", b"C08P01", f"Munsupported startup parameter: {sorted(refused)}".encode(), b"", b""]
            writer.write(Frame(b"E", b"\0".join(words)).encode())
            await writer.drain()
            return False
        (backend, *_) = self._backends
        writer.write(b"".join(frame.encode() for frame in backend.hello))
        return True

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked: asyncio.Future[Frame] = asyncio.ensure_future(read_frame(reader))
        try:
            while True:
                await asyncio.wait((asked,))
                if asked.result().kind == b"X":
                    return
                backend = await self._free.get()
                self.handed_out += 1
                try:
                    asked = await self._transact(asked, reader, writer, backend)
                except BaseException:
                    # In the middle of a transaction: the server undoes it when it sees this.
                    self._backends.discard(backend)
                    backend.writer.transport.abort()
                    self._free.put_nowait(await self._connect())
                    raise
                self._free.put_nowait(backend)
        finally:
            asked.cancel()

    async def _transact(
        self, asked: asyncio.Future[Frame], reader: asyncio.StreamReader, writer: asyncio.StreamWriter, backend: Backend
    ) -> asyncio.Future[Frame]:
        """Carry frames both ways until the transaction is over. The next frame of the client is left."""
        told = asyncio.ensure_future(read_frame(backend.reader))
        try:
            while True:
                await asyncio.wait((asked, told), return_when=asyncio.FIRST_COMPLETED)
                if told.done():
                    frame = told.result()
                    writer.write(frame.encode())
                    if frame == READY:
                        await writer.drain()
                        return asked
                    told = asyncio.ensure_future(read_frame(backend.reader))
                elif asked.done():
                    backend.writer.write(asked.result().encode())
                    await backend.writer.drain()
                    asked = asyncio.ensure_future(read_frame(reader))
        finally:
            told.cancel()


@asynccontextmanager
async def pooler_before(target: str, size: int) -> AsyncIterator[TransactionPooler]:
    pooler = TransactionPooler(target, size)
    await pooler.open()
    server = await asyncio.start_server(pooler.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    parts = urlsplit(target)
    user = f"{parts.username}@" if parts.username else ""
    pooler.url = urlunsplit(("postgres", f"{user}127.0.0.1:{port}", parts.path, "sslmode=disable", ""))
    try:
        yield pooler
    finally:
        server.close()
        await pooler.close()
        await server.wait_closed()
