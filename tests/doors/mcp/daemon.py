"""A daemon with agents that a test can hold and let go, and strangers that call it: the official SDK's clients."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client import session
from mcp.client.streamable_http import streamable_http_client

from tests.cli.daemons import COVENANT, Daemon, environment
from tests.waits import BOUND_S

# The SDK gives a server 10 s from its start to its first answer: a new interpreter may need longer beside a load.
session.DISCOVER_TIMEOUT_SECONDS = BOUND_S

AGENTS = """
import asyncio
from covenant import Agent, Turn

echo = Agent("echo", description="Says it back")

@echo
async def say_it_back(turn: Turn):
    yield "you said: "
    yield turn.text

asker = Agent("asker", description="Asks back")

@asker
async def ask_back(turn: Turn):
    if turn.text == "blue":
        yield "blue it is"
    else:
        yield turn.need_input("Which colour?")

failing = Agent("failing", description="Does not work")

@failing
async def fail(turn: Turn):
    raise RuntimeError("canary")

chatty = Agent("chatty", description="Says much")

@chatty
async def say_much(turn: Turn):
    for number in range(3_000):
        yield f"{number} "

held = Agent("held", description="Works until it is let go")

@held
async def hold(turn: Turn):
    reader, writer = await asyncio.open_unix_connection("{gate}")
    yield turn.status("holding")
    word = await reader.read()
    writer.close()
    yield word.decode()
"""


class Gate:
    """Where the agent `held` waits: `held` is set while it does, and `open` lets it go."""

    def __init__(self) -> None:
        self.held = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []

    async def arrive(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self.held.set()

    async def open(self, word: str) -> None:
        for writer in self._writers:
            writer.write(word.encode())
            writer.close()
            await writer.wait_closed()
        self._writers.clear()


@asynccontextmanager
async def gate_at(folder: Path) -> AsyncIterator[Gate]:
    gate, path = Gate(), folder / "gate"
    path.unlink(missing_ok=True)
    async with await asyncio.start_unix_server(gate.arrive, path):
        try:
            yield gate
        finally:
            await gate.open("")


def start(folder: Path, *flags: str, env: dict[str, str] | None = None) -> Daemon:
    agents = folder / "agents.py"
    agents.write_text(AGENTS.replace("{gate}", str(folder / "gate")), encoding="utf-8")
    return Daemon(folder / "home", *flags, str(agents), env=env)


def operator_token(daemon: Daemon) -> str:
    return (daemon.home / "operator.token").read_text(encoding="ascii").strip()


@asynccontextmanager
async def over_http(daemon: Daemon, token: str | None = None, mode: str = "auto") -> AsyncIterator[Client]:
    headers = {"authorization": f"Bearer {token or operator_token(daemon)}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=BOUND_S, trust_env=False) as http,
        Client(streamable_http_client(f"{daemon.url}/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


@asynccontextmanager
async def over_stdio(daemon: Daemon, *flags: str) -> AsyncIterator[Client]:
    words = ["--home", str(daemon.home), "mcp", *flags]
    async with Client(StdioServerParameters(command=str(COVENANT), args=words, env=environment())) as client:
        yield client


class Told:
    """What a client heard of a call's progress."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.first = asyncio.Event()

    async def __call__(self, progress: float, total: float | None, message: str | None) -> None:
        self.messages.append(message or "")
        self.first.set()

    @property
    def task_id(self) -> str:
        """The id that the first word on progress names."""
        word, task_id, *_ = self.messages[0].replace(":", " ").split()
        assert word == "task"
        return task_id


async def called(client: Client, tool: str, told: Told | None = None, **arguments: Any) -> tuple[bool, str, Any]:
    """Whether it failed, its text and its data."""
    async with asyncio.timeout(BOUND_S):
        result = await client.call_tool(tool, arguments, progress_callback=told)
    (content,) = result.content
    return bool(result.is_error), getattr(content, "text", ""), result.structured_content
