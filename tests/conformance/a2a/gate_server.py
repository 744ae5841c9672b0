"""Gates between processes: an agent in a daemon says where it is, over a socket, and waits until a test lets it go on.

A daemon that is killed takes its waiting agents with it; what a test opened stays open for the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.waits import BOUND_S


class Gatekeeper:
    """`None` as a gate stands for all of them."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._at: set[str] = set()
        self._open: set[str | None] = set()
        self._serving = 0

    async def reached(self, *gates: str) -> None:
        async with asyncio.timeout(BOUND_S), self._changed:
            await self._changed.wait_for(lambda: self._at.issuperset(gates))

    async def open(self, *gates: str | None) -> None:
        async with self._changed:
            self._open.update(gates)
            self._changed.notify_all()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving += 1
        try:
            gate = (await reader.readline()).decode().strip()
            async with self._changed:
                self._at.add(gate)
                self._changed.notify_all()
                await self._changed.wait_for(lambda: not self._open.isdisjoint((gate, None)))
            writer.write(b"\n")
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()
            async with self._changed:
                self._serving -= 1
                self._changed.notify_all()

    async def close(self) -> None:
        """Nobody waits here any more."""
        await self.open(None)
        async with asyncio.timeout(BOUND_S), self._changed:
            await self._changed.wait_for(lambda: self._serving == 0)


@asynccontextmanager
async def open_gatekeeper(path: Path) -> AsyncIterator[Gatekeeper]:
    keeper = Gatekeeper()
    server = await asyncio.start_unix_server(keeper.serve, path)
    try:
        yield keeper
    finally:
        server.close()
        await keeper.close()


async def gate(path: str, name: str) -> None:
    """From the agent's side."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(f"{name}\n".encode())
        await reader.readline()
    finally:
        writer.close()
