"""Streams over gRPC that are cut: they go on, nothing is lost, and nothing is told twice."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from covenant.agents.api import Agent, Turn
from covenant.model.agent_card import RemoteInterface
from covenant.model.task_view import RemoteArtifact, RemoteStatus, TaskState
from covenant.outbound.outbound_settings import OutboundSettings
from covenant.outbound.remote import grpc_transport
from covenant.outbound.remote.remote_client import Remote, RemoteOptions
from covenant.outbound.remote.remote_registry import Credentials
from tests.doors.a2a.grpc_under_test import open_grpc
from tests.outbound.breakable_connection import wire_to
from tests.outbound.http_servers import HERE, fetcher
from tests.waits import BOUND_S


async def test_a_stream_goes_on_after_the_last_number_that_it_told(tmp_path: Path) -> None:
    pauses = [asyncio.Event() for _ in range(4)]
    counter = Agent("counter")

    @counter
    async def count(turn: Turn) -> AsyncIterator[Any]:
        for number, pause in enumerate(pauses):
            yield turn.status(f"beginning {number}")
            yield turn.status(f"counting {number}")
            yield f"{number} "
            await pause.wait()

    async with (
        open_grpc(tmp_path, counter) as under_test,
        wire_to(under_test.server.port) as wire,
        fetcher(HERE) as calls,
    ):
        url = f"http://127.0.0.1:{wire.port}"
        ways = [RemoteInterface(url=url, binding="GRPC", version="1.0", tenant="counter")]
        credentials = Credentials(url, token=under_test.http.token)
        remote = Remote(ways, calls, credentials, options=RemoteOptions(poll_s=0.02, timeout_s=BOUND_S))
        stream = remote.stream("go")
        told, steps = "", list[str]()
        async for news in stream:
            if isinstance(news, RemoteStatus) and news.state is TaskState.WORKING and news.text:
                steps.append(news.text)
            if isinstance(news, RemoteArtifact) and news.text:
                told += news.text
                wire.cut()
                # What is said while nobody listens is not in a later snapshot: only a number can bring it back.
                pauses[int(news.text)].set()
        assert told == stream.reply.text == "0 1 2 3 "
        assert steps == [f"{word} {number}" for number in range(4) for word in ("beginning", "counting")]
        assert wire.connections >= 5


async def test_a_quiet_stream_is_compared_with_the_task_and_followed_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_transport, "QUIET_S", 0.1)
    thinker, compared = Agent("thinker"), asyncio.Event()

    @thinker
    async def think(turn: Turn) -> AsyncIterator[Any]:
        yield "hm "
        await compared.wait()
        yield "yes"

    class Observer:
        asked = 0

        def sent(self, method: str, url: str, headers: Mapping[str, str], content: bytes) -> None:
            self.asked += url.endswith("/GetTask")
            if self.asked == 2:
                compared.set()

    async with open_grpc(tmp_path, thinker) as under_test, fetcher(HERE) as calls:
        url = f"http://127.0.0.1:{under_test.server.port}"
        ways = [RemoteInterface(url=url, binding="GRPC", version="1.0", tenant="thinker")]
        credentials = Credentials(url, token=under_test.http.token)
        observed = calls.observed(Observer(), OutboundSettings())
        remote = Remote(ways, observed, credentials, options=RemoteOptions(timeout_s=BOUND_S))
        stream = remote.stream("go")
        told = [news.text async for news in stream if isinstance(news, RemoteArtifact)]
        assert ("".join(told), stream.reply.state) == ("hm yes", TaskState.COMPLETED)
