"""A wire that can be cut: what it carries breaks off in the middle, and whoever calls again gets through."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Wire:
    port: int = 0
    connections: int = 0
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(65_536):
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def wire_to(port: int) -> AsyncIterator[Wire]:
    wire = Wire()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire.connections += 1
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        both = {writer, there_writer}
        wire.writers |= both
        await asyncio.gather(_carry(reader, there_writer), _carry(there_reader, writer), return_exceptions=True)
        wire.writers -= both

    server = await asyncio.start_server(join, "127.0.0.1", 0)
    wire.port = server.sockets[0].getsockname()[1]
    try:
        yield wire
    finally:
        server.close()
        wire.cut()
        await server.wait_closed()
