"""Strangers as remote agents: the official SDK's server, in every dialect and binding that it has."""

import asyncio

import pytest

from covenant.daemon.connect import RemoteConnection, connect
from covenant.model.task_view import RemoteArtifact, RemoteTask, TaskState
from covenant.outbound.call_errors import AddressRefused
from covenant.outbound.remote.remote_client import RemoteStream
from tests.outbound.remotes import timed_out
from tests.outbound.sdk_servers import GRPC_03, GRPC_1, JSONRPC_03, JSONRPC_1, REST_03, REST_1, SdkServer, sdk_server
from tests.waits import BOUND_S

LOCAL = ("127.0.0.1",)
WAYS = [JSONRPC_1, REST_1, JSONRPC_03, GRPC_1, REST_03, GRPC_03]
every_way = pytest.mark.parametrize("way", WAYS, ids=[f"{binding} {version}" for binding, version, _ in WAYS])
streams_and_polls = pytest.mark.parametrize("streams", [True, False], ids=["by stream", "by polls"])


def to(server: SdkServer, path: str = "", **options: object) -> RemoteConnection:
    return connect(server.url(path), allow_private=LOCAL, poll_s=0.02, timeout_s=BOUND_S, **options)  # type: ignore[arg-type]


@every_way
@streams_and_polls
async def test_an_answer_is_heard(way: tuple[str, str, str], streams: bool) -> None:
    async with sdk_server(way) as server, to(server, stream=streams) as remote:
        assert remote.card is not None
        assert (remote.card.name, remote.card.version) == ("Sample", "1.2.3")
        assert (remote.interface.binding, remote.interface.version) == way[:2]
        reply = await remote.send("hello")
        assert (reply.text, reply.state, reply.ok) == ("echo: hello", TaskState.COMPLETED, True)
        assert reply.task_id
        assert server.agent.heard == ["hello"]


@every_way
@streams_and_polls
async def test_a_bare_message_is_an_answer_without_a_task(way: tuple[str, str, str], streams: bool) -> None:
    async with sdk_server(way) as server, to(server, stream=streams) as remote:
        reply = await remote.send("bare")
        assert (reply.text, reply.state, reply.task_id) == ("just this", TaskState.COMPLETED, None)


@every_way
@streams_and_polls
async def test_what_is_asked_back_can_be_answered_in_the_same_task(way: tuple[str, str, str], streams: bool) -> None:
    async with sdk_server(way) as server, to(server, stream=streams) as remote:
        asked = await remote.send("ask")
        assert (asked.text, asked.state, asked.waits) == ("which one?", TaskState.INPUT_REQUIRED, True)
        answered = await asked.continue_("the blue one")
        assert (answered.text, answered.task_id) == ("echo: the blue one", asked.task_id)


@every_way
@streams_and_polls
async def test_a_failure_is_told_as_a_failure(way: tuple[str, str, str], streams: bool) -> None:
    async with sdk_server(way) as server, to(server, stream=streams) as remote:
        reply = await remote.send("fail")
        assert (reply.text, reply.state, reply.ok) == ("it broke", TaskState.FAILED, False)


@every_way
async def test_a_stream_tells_the_text_as_it_comes(way: tuple[str, str, str]) -> None:
    async with sdk_server(way) as server, to(server) as remote:
        stream = remote.stream("words")
        news = [each async for each in stream]
        assert isinstance(news[0], RemoteTask)
        assert [each.text for each in news if isinstance(each, RemoteArtifact)] == [f"word{n} " for n in range(5)]
        assert stream.reply.text == "word0 word1 word2 word3 word4 "


@every_way
async def test_a_timeout_cancels_the_remote_task(way: tuple[str, str, str]) -> None:
    async with sdk_server(way) as server, to(server) as remote:
        await timed_out(lambda timeout_s: remote.send("stay", timeout_s=timeout_s))
        await asyncio.wait_for(server.agent.canceled.wait(), BOUND_S)


@every_way
@streams_and_polls
async def test_whoever_cancels_the_call_cancels_the_remote_task(way: tuple[str, str, str], streams: bool) -> None:
    async with sdk_server(way) as server, to(server, stream=streams) as remote:
        stream = remote.stream("stay")
        # Known by its first word: from then on there is something to cancel.
        assert isinstance(await anext(stream), RemoteTask)
        following = asyncio.Event()
        calling = asyncio.create_task(rest_of(stream, following))
        for begun in (following, server.agent.begun):
            await asyncio.wait_for(begun.wait(), BOUND_S)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await asyncio.wait_for(server.agent.canceled.wait(), BOUND_S)


async def rest_of(stream: RemoteStream, following: asyncio.Event) -> None:
    following.set()
    async for _ in stream:
        pass


async def test_a_card_that_says_0_3_while_its_server_speaks_1_0_alone_is_survived() -> None:
    async with sdk_server(JSONRPC_03, compat=False) as server, to(server) as remote:
        assert remote.interface.version == "0.3"
        assert (await remote.send("hello")).text == "echo: hello"
        assert remote.interface.version == "1.0"


async def test_an_address_without_a_card_is_called_as_it_is() -> None:
    async with sdk_server() as server, to(server, "/rpc") as remote:
        # The host's card names this address, so it is this agent's.
        assert remote.card is not None
        assert (await remote.send("hello")).text == "echo: hello"


async def test_an_agent_without_streams_is_polled() -> None:
    async with sdk_server(JSONRPC_1, streaming=False) as server, to(server) as remote:
        assert (await remote.send("words")).text == "word0 word1 word2 word3 word4 "


async def test_grpc_is_taken_only_where_nothing_else_is_offered() -> None:
    async with sdk_server(GRPC_1, JSONRPC_03) as server, to(server) as remote:
        assert (remote.interface.binding, remote.interface.version) == ("JSONRPC", "0.3")


async def test_an_address_that_may_not_be_called_is_not_called_by_grpc_either() -> None:
    async with sdk_server(GRPC_1) as server:
        card = server.url("/.well-known/agent-card.json")
        async with connect(card, allow_private=(f"127.0.0.1:{server.port}",)) as remote:
            assert remote.interface.binding == "GRPC"
            with pytest.raises(AddressRefused):
                await remote.send("hello")
            assert server.agent.heard == []


async def test_a_token_does_not_follow_a_card_to_its_grpc_port() -> None:
    async with sdk_server(GRPC_1) as server, to(server, token="canary") as remote:
        await remote.send("hello")
        assert "canary" not in repr(server.agent.told)
    async with sdk_server(GRPC_1) as server:
        async with connect(server.url(), allow_private=LOCAL) as seen:
            place = f"http://{seen.interface.url}"
        async with to(server, token="canary", trusted_origins=[place]) as remote:
            await remote.send("hello")
        assert "Bearer canary" in repr(server.agent.told)
