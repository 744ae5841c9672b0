"""A proxy before a PostgreSQL, which can cut connections, stay silent, lose answers, or forget connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit, urlunsplit

PORT = 5432


class PostgresProxy:
    """`url` leads through it. What is sent while it is silent goes nowhere, in either direction."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()
        self.url = ""
        self.answers_lost = False
        """What is asked arrives, and the answer does not: the connection breaks instead."""
        self._forgotten = 0

    def lead_to(self, target: str) -> None:
        """From now on, to another server."""
        self._target = urlsplit(target)
        self.mend()

    def cut(self) -> None:
        for writer in tuple(self._writers):
            writer.transport.abort()

    def silence(self) -> None:
        self._open.clear()

    def mend(self) -> None:
        self._open.set()
        self.cut()  # what was lost on the way is lost: both ends find out

    def forget(self) -> None:
        """Serve new connections. Those of before stay open at this end, and nothing is carried by them any more."""
        self._forgotten += 1
        self._open.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await self._connect()
        except OSError:
            writer.transport.abort()  # as the server itself does while it is not there
            return
        both = {writer, there[1]}
        self._writers |= both
        try:
            # When one direction breaks, both ends lose the connection: a server must not wait for a killed client.
            async with asyncio.TaskGroup() as directions:
                directions.create_task(self._carry(reader, there[1]))
                directions.create_task(self._carry(there[0], writer, answers=True))
        except* OSError:
            pass
        finally:
            self._writers -= both
            for each in both:
                each.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        folder = parse_qs(self._target.query).get("host", [""])[0]
        if folder:
            return await asyncio.open_unix_connection(str(Path(folder) / f".s.PGSQL.{PORT}"))
        return await asyncio.open_connection(self._target.hostname, self._target.port or PORT)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool = False
    ) -> None:
        begun = self._forgotten
        while piece := await reader.read(65_536):
            await self._open.wait()
            if begun < self._forgotten:
                continue
            if answers and self.answers_lost:
                writer.transport.abort()
                return
            writer.write(piece)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def proxy_before(target: str) -> AsyncIterator[PostgresProxy]:
    proxy = PostgresProxy(target)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    parts = urlsplit(target)
    user = f"{parts.username}@" if parts.username else ""
    proxy.url = urlunsplit(("postgres", f"{user}127.0.0.1:{port}", parts.path, "sslmode=disable", ""))
    try:
        yield proxy
    finally:
        server.close()
        proxy.mend()
        await server.wait_closed()
