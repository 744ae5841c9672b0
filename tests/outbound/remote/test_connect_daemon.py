"""Our own door as the remote: streams with numbers, hops, keys, cards that are signed."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from covenant.agents.api import Agent, Turn
from covenant.daemon.connect import Options, RemoteConnection, connect, open_card
from covenant.model.agent_card import RemoteInterface
from covenant.model.content import Json, Text
from covenant.model.task import Hop
from covenant.model.task_view import RemoteArtifact, TaskState
from covenant.outbound.call_errors import NoCard, RemoteRefused, RemoteTimedOut
from covenant.outbound.http_fetcher import Fetcher
from covenant.outbound.remote.remote_client import Remote, RemoteOptions
from covenant.outbound.remote.remote_registry import Credentials
from covenant.seal.keys import public_key
from tests.doors.a2a.a2a_under_test import A2AOptions, A2AUnderTest, open_a2a
from tests.outbound.breakable_connection import wire_to
from tests.outbound.http_servers import HERE, fetcher
from tests.outbound.remotes import card, hand_made, timed_out
from tests.waits import BOUND_S

heard: list[Turn] = []
echo = Agent("echo", description="Says it again")
asker = Agent("asker")
sleeper = Agent("sleeper")


@echo
async def say_again(turn: Turn) -> AsyncIterator[Any]:
    heard.append(turn)
    for word in turn.text.split():
        yield f"{word} "


@asker
async def ask(turn: Turn) -> AsyncIterator[Any]:
    if len(turn.history) > 1:
        yield f"so it is {turn.text}"
    else:
        yield turn.need_input("which one?")


@sleeper
async def sleep(turn: Turn) -> AsyncIterator[Any]:
    yield "begun "
    await asyncio.Event().wait()


def to(under_test: A2AUnderTest, agent: str, **options: Any) -> RemoteConnection:
    given = {"token": under_test.token, "allow_private": (HERE,), "poll_s": 0.02, "timeout_s": 20.0, **options}
    return connect(under_test.url(agent), **given)


WAYS = [("JSONRPC", "1.0"), ("HTTP+JSON", "1.0"), ("JSONRPC", "0.3")]
every_way = pytest.mark.parametrize("way", WAYS, ids=" ".join)


def by(way: tuple[str, str], fetching: Fetcher, url: str, token: str) -> Remote:
    """Called in this way, whatever its card prefers."""
    binding, version = way
    ways = [RemoteInterface(url=url, binding=binding, version=version)]
    return Remote(ways, fetching, Credentials(url, token=token), options=RemoteOptions(poll_s=0.02, timeout_s=BOUND_S))


@every_way
async def test_a_stream_that_is_cut_goes_on_where_it_was(tmp_path: Path, way: tuple[str, str]) -> None:
    pauses = [asyncio.Event() for _ in range(3)]
    counter = Agent("counter")

    @counter
    async def count(turn: Turn) -> AsyncIterator[str]:
        for number, pause in enumerate(pauses):
            yield f"{number} "
            await pause.wait()

    async with open_a2a(tmp_path, counter) as under_test, wire_to(under_test.port) as wire, fetcher(HERE) as calls:
        url = under_test.url("counter").replace(str(under_test.port), str(wire.port))
        stream = by(way, calls, url, under_test.token).stream("go")
        told = ""
        async for news in stream:
            if isinstance(news, RemoteArtifact) and news.text:
                told += news.text
                wire.cut()
                pauses[int(news.text) if news.text.strip().isdigit() else -1].set()
        assert told == stream.reply.text == "0 1 2 "
        assert wire.connections >= 4
        tasks = await under_test.result("counter", "ListTasks", {}, a2a_version="1.0")
        assert tasks["totalSize"] == 1


@every_way
async def test_every_way_to_our_own_door_works(tmp_path: Path, way: tuple[str, str]) -> None:
    async with open_a2a(tmp_path, asker, sleeper) as under_test, fetcher(HERE) as calls:
        remote = by(way, calls, under_test.url("asker"), under_test.token)
        asked = await remote.send("go")
        assert (await asked.continue_("blue")).text == "so it is blue"
        sleeping = by(way, calls, under_test.url("sleeper"), under_test.token)
        failed = await timed_out(lambda timeout_s: sleeping.send("go", timeout_s=timeout_s, stream=False))
        assert failed.task_id is not None
        assert (await sleeping.get(failed.task_id)).state is TaskState.CANCELED


@pytest.mark.parametrize("streams", [True, False])
async def test_our_own_agents_are_called_like_any_other(tmp_path: Path, streams: bool) -> None:
    async with open_a2a(tmp_path, echo) as under_test, to(under_test, "echo", stream=streams) as remote:
        assert remote.card is not None
        assert (remote.interface.binding, remote.interface.version) == ("JSONRPC", "1.0")
        reply = await remote.send("one two three")
        assert (reply.text.split(), reply.state) == (["one", "two", "three"], TaskState.COMPLETED)


async def test_a_stream_tells_every_chunk_once(tmp_path: Path) -> None:
    async with open_a2a(tmp_path, echo) as under_test, to(under_test, "echo") as remote:
        stream = remote.stream("one two three")
        told = "".join([news.text async for news in stream if isinstance(news, RemoteArtifact)])
        assert told == "one two three "


async def test_a_question_is_answered_in_its_task(tmp_path: Path) -> None:
    async with open_a2a(tmp_path, asker) as under_test, to(under_test, "asker") as remote:
        asked = await remote.send("go")
        assert (asked.state, asked.text) == (TaskState.INPUT_REQUIRED, "which one?")
        answered = await asked.continue_("the blue one")
        assert (answered.text, answered.task_id) == ("so it is the blue one", asked.task_id)


async def test_a_timeout_cancels_the_task_at_the_other_end(tmp_path: Path) -> None:
    async with open_a2a(tmp_path, sleeper) as under_test, to(under_test, "sleeper") as remote:
        failed = await timed_out(lambda timeout_s: remote.send("go", timeout_s=timeout_s))
        assert failed.task_id is not None
        assert (await remote.get(failed.task_id)).state is TaskState.CANCELED


async def test_leaving_a_stream_leaves_the_task_at_work_and_calling_it_off_ends_it(tmp_path: Path) -> None:
    async with open_a2a(tmp_path, sleeper) as under_test, to(under_test, "sleeper") as remote:
        left, off = remote.stream("go"), remote.stream("go")
        for stream in (left, off):
            await anext(stream)
        await left.aclose()
        await off.cancel()
        assert left.task_id is not None
        assert off.task_id is not None
        assert not (await remote.get(left.task_id)).state.terminal
        assert (await remote.get(off.task_id)).state is TaskState.CANCELED


async def test_parts_and_metadata_arrive_as_they_were_sent(tmp_path: Path) -> None:
    async with open_a2a(tmp_path, echo) as under_test, to(under_test, "echo") as remote:
        await remote.send([Text("look"), Json({"a": 1})], metadata={"note": "x"})
        assert heard[-1].parts == (Text("look"), Json({"a": 1}))
        assert heard[-1].metadata == {"note": "x"}


async def test_depth_and_chain_travel_in_metadata_and_headers() -> None:
    hop = Hop(depth=1, chain=("a@one",), traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01").next("b@two")

    def behave(called: Any) -> None:
        called.result({"message": {"messageId": "m", "role": "ROLE_AGENT", "parts": [{"text": "hi"}]}})

    async with hand_made(behave) as hand, hand.connect() as remote:
        await remote.send("go", hop=hop)
        metadata, headers = hand.calls[0].params["message"]["metadata"], hand.calls[0].headers
        assert (metadata["covenant.depth"], metadata["covenant.chain"]) == (2, ["a@one", "b@two"])
        assert (headers["covenant-depth"], headers["covenant-chain"]) == ("2", "a@one,b@two")
        assert headers["traceparent"] == metadata["traceparent"] == hop.traceparent


async def test_a_deadline_that_is_over_is_not_called_for() -> None:
    async with hand_made(lambda called: None) as hand, hand.connect() as remote:
        with pytest.raises(RemoteTimedOut, match="before it began"):
            await remote.send("go", hop=Hop(deadline_ms=1))
        assert hand.methods == []


async def test_one_key_is_one_task(tmp_path: Path) -> None:
    async with open_a2a(tmp_path, echo) as under_test, to(under_test, "echo") as remote:
        first = await remote.send("once", idempotency_key="k", message_id="m")
        again = await remote.send("once", idempotency_key="k", message_id="m")
        assert first.task_id == again.task_id


async def test_without_a_token_the_card_is_refused_as_what_it_is(tmp_path: Path) -> None:
    async with open_a2a(tmp_path, echo) as under_test:
        with pytest.raises(RemoteRefused) as raised:
            await to(under_test, "echo", token=None)
        assert (raised.value.code, raised.value.status) == ("unauthenticated", 401)


async def test_a_signed_card_is_checked_against_the_key_of_its_own_host(tmp_path: Path) -> None:
    options = A2AOptions()
    async with open_a2a(tmp_path, echo, options=options) as under_test, to(under_test, "echo", verify=True) as remote:
        assert remote.card is not None
        assert remote.card.signed_by == public_key(options.key)
        given = Options(token=under_test.token, allow_private=(HERE,))
        assert (await open_card(under_test.url("echo"), given, verify=True)).signed_by == remote.card.signed_by


async def test_a_signature_by_somebody_else_s_key_vouches_for_nothing(tmp_path: Path) -> None:
    async with open_a2a(tmp_path, echo) as under_test:
        options = Options(token=under_test.token, allow_private=(HERE,))
        signed = (await open_card(under_test.url("echo"), options, verify=False)).fields

        def forged(url: str) -> dict[str, Any]:
            return {**card(url), "signatures": signed["signatures"]}

        async with hand_made(lambda called: None, made=forged) as hand:
            with pytest.raises(NoCard, match="no signature"):
                await hand.connect(verify=True)


async def test_an_unsigned_card_is_refused_where_a_signature_is_demanded() -> None:
    async with hand_made(lambda called: None) as hand:
        with pytest.raises(NoCard, match="has no signature"):
            await hand.connect(verify=True)


async def test_fifty_calls_at_once_are_all_answered(tmp_path: Path) -> None:
    async with open_a2a(tmp_path, echo) as under_test, to(under_test, "echo") as remote:
        replies = await asyncio.gather(*(remote.send(f"number {n}") for n in range(50)))
        assert sorted(reply.text.split()[1] for reply in replies) == sorted(str(n) for n in range(50))
