"""A reader that is too slow: it is cut off, its task is not, and it can go on where it was."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2

from covenant.agents.api import Agent, Turn
from covenant.doors.http.endpoint import TOO_SLOW
from tests.conformance.a2a.agents import Gates
from tests.conformance.a2a.bindings import Binding
from tests.conformance.a2a.client_answers import folded, known
from tests.conformance.a2a.http_bindings import Rest
from tests.doors.a2a.a2a_under_test import A2AOptions, open_a2a
from tests.waits import BOUND_S

# What the system buffers, what one write may hold, and what is waited for by one reader must all be exceeded.
CHUNKS = 8_000
BUFFERED = 65_536


async def test_a_slow_reader_is_cut_off_and_resumes_where_it_was(binding: type[Binding], tmp_path: Path) -> None:
    gates, agent = Gates(), Agent("talker")

    @agent
    async def talk(turn: Turn) -> AsyncIterator[str]:
        await gates.wait("begin")
        for number in range(CHUNKS):
            yield f"{number:05d}" + "x" * 200
        gates.open("said")

    async with open_a2a(tmp_path / "home", agent, options=A2AOptions(send_bytes=BUFFERED)) as opened:
        url = f"http://127.0.0.1:{opened.port}"
        me = binding(base_url=url, http=opened.http, agent="talker", token=opened.token)
        task = await me.task("talk", blocking=False)
        said = {"authorization": f"Bearer {me.token}", "last-event-id": "1"}
        rest = isinstance(me, Rest)
        target = f"{me.url}/tasks/{task.id}:subscribe" if rest else me.url
        body = None if rest else me.envelope("subscribe", {"id": task.id})
        small = httpx2.AsyncHTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFERED)])
        async with (
            asyncio.timeout(BOUND_S),
            httpx2.AsyncClient(transport=small, timeout=BOUND_S) as slow,
            slow.stream("GET" if rest else "POST", target, content=body, headers=said) as reply,
        ):
            gates.open("begin")
            await gates.wait("said")
            # Only now it begins to read.
            rough = (await reply.aread()).decode()
        assert rough.endswith(TOO_SLOW.decode())
        numbers = [int(line[4:]) for line in rough.splitlines() if line.startswith("id: ")]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) < CHUNKS
        seen = await me.followed(task.id, after=numbers[-1])
        assert [frame.number for frame in seen] == list(range(numbers[-1], CHUNKS + 5))
        assert folded(seen) == known(await me.get(task.id))
