"""Running an instance's discovery as a process, perhaps in a network namespace, and listening to what it prints."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.peers.discovery.neighbours import Neighbour
from tests.waits import BOUND_S

ROOT = Path(__file__).parents[3]


class Running:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def says(self, *words: str) -> list[str]:
        """The next line that begins with these words. Others are passed over: there may be more neighbours."""
        assert self._process.stdout is not None
        async with asyncio.timeout(BOUND_S):
            while line := (await self._process.stdout.readline()).decode().split():
                if line[: len(words)] == list(words):
                    return line
        raise AssertionError(f"it ended without saying {words}")

    async def leave(self) -> None:
        """With a goodbye."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        async with asyncio.timeout(BOUND_S):
            assert await self._process.wait() == 0

    async def kill(self) -> None:
        """Without one."""
        self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def running(
    us: Neighbour, *, port: int, interface: str, namespace: str | None = None, look_again_s: float = 60.0
) -> AsyncIterator[Running]:
    inside = [] if namespace is None else ["ip", "netns", "exec", namespace]
    process = await asyncio.create_subprocess_exec(
        *inside,
        *(sys.executable, "-m", "tests.peers.discovery.neighbour_process"),
        *(us.private_key.hex(), str(port), interface, str(look_again_s)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        yield Running(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
