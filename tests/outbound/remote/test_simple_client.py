"""The simple functions: a card for five minutes, a text, a poll every three seconds, and the last word of the agent."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from covenant import simple
from covenant.model.agent_card import RemoteCard
from covenant.model.errors import CovenantError
from covenant.outbound.call_errors import AddressRefused
from covenant.outbound.remote.card_lookup import CardCache
from covenant.outbound.remote.simple import (
    POLL_INTERVAL_MS,
    RemoteInvocationResult,
    fetch_agent_card,
    invoke_remote_agent,
)
from tests.outbound.http_servers import HERE, Request, Served, http_server, reply
from tests.waits import BOUND_S

ALLOW = (HERE,)
CARD = {"name": "Remote", "version": "2"}
TASK = "t-1"


@dataclass
class Clock:
    now_s: float = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Simple:
    """The other end: what it answers to the card, the submission, and each poll."""

    card: Any = field(default_factory=lambda: dict(CARD))
    card_status: int = 200
    submitted: tuple[int, Any] = (200, {"id": TASK, "state": "submitted"})
    polls: list[tuple[int, Any]] = field(default_factory=list)
    gate: asyncio.Event | None = None
    served: Served = field(default_factory=Served)

    @property
    def url(self) -> str:
        return self.served.url("")

    def count(self, start: str) -> int:
        return sum(request.target.startswith(start) for request in self.served.requests)

    async def speak(self, request: Request, writer: asyncio.StreamWriter) -> None:
        if request.target == "/.well-known/agent-card.json":
            if self.gate is not None:
                await self.gate.wait()
            status, value = self.card_status, self.card
        elif request.target == "/a2a/tasks/send":
            status, value = self.submitted
        else:
            status, value = self.polls.pop(0) if len(self.polls) > 1 else self.polls[0]
        writer.write(reply(status, value if isinstance(value, bytes) else json.dumps(value).encode()))


@asynccontextmanager
async def other_end(**given: Any) -> AsyncIterator[Simple]:
    end = Simple(**given)
    async with http_server(end.speak) as served:
        end.served = served
        yield end


def task(state: str, *said: tuple[str, str]) -> dict[str, Any]:
    messages = [{"role": role, "parts": [{"type": "text", "text": text}]} for role, text in said]
    return {"id": TASK, "state": state, "messages": messages}


async def test_invariant_8_a_card_is_kept_for_five_minutes_and_not_longer() -> None:
    clock = Clock()
    cache = CardCache(clock=clock)
    async with other_end() as end:
        await fetch_agent_card(end.url, allow_private=ALLOW, cache=cache)
        clock.now_s += 120
        await fetch_agent_card(f"{end.url}/", allow_private=ALLOW, cache=cache)
        assert end.count("/.well-known") == 1
        clock.now_s += 240
        card = await fetch_agent_card(end.url, allow_private=ALLOW, cache=cache)
        assert end.count("/.well-known") == 2
        assert (card.name, card.version) == ("Remote", "2")


async def test_invariant_8_stale_cards_are_dropped_by_the_next_fetch() -> None:
    clock = Clock()
    cache = CardCache(clock=clock)
    card = RemoteCard(name="x", version="1")

    async def made() -> RemoteCard:
        return card

    await cache.get("old", made)
    clock.now_s += 301
    await cache.get("new", made)
    assert list(cache._kept) == ["new"]


@pytest.mark.parametrize(("card", "field"), [({"version": "2"}, "name"), ({"name": "Remote"}, "version")])
async def test_invariant_9_a_card_needs_a_name_and_a_version(card: Any, field: str) -> None:
    async with other_end(card=card) as end:
        with pytest.raises(simple.ValidationError, match=field) as raised:
            await simple.fetch_agent_card(end.url, allow_private=ALLOW)
        assert raised.value.field == field


async def test_invariant_10_the_task_is_asked_for_every_three_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert POLL_INTERVAL_MS == 3_000
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def counted(pause_s: float) -> None:
        pauses.append(pause_s)
        await sleep(0)

    monkeypatch.setattr("covenant.outbound.remote.simple.asyncio.sleep", counted)
    polls = [(200, task("submitted")), (200, task("working")), (200, task("completed", ("agent", "done")))]
    async with other_end(polls=polls) as end:
        result = await invoke_remote_agent(end.url, "go", allow_private=ALLOW)
    assert result.success
    assert [pause for pause in pauses if pause] == [3.0, 3.0, 3.0]


async def test_invariant_11_the_answer_is_the_last_thing_that_the_agent_said() -> None:
    said = (("user", "go"), ("agent", "first"), ("agent", "last"), ("user", "thanks"))
    async with other_end(polls=[(200, task("completed", *said))]) as end:
        result = await invoke(end)
    assert result == RemoteInvocationResult(success=True, task_id=TASK, response_text="last")


async def invoke(end: Simple, message: str = "go", **options: Any) -> RemoteInvocationResult:
    return await simple.invoke_remote_agent(end.url, message, allow_private=ALLOW, poll_interval_ms=1, **options)


async def test_a_task_that_failed_says_so_in_its_own_words_or_in_ours() -> None:
    async with other_end(polls=[(200, task("failed", ("agent", "no luck")))]) as end:
        assert (await invoke(end)).error == "no luck"
    async with other_end(polls=[(200, task("failed"))]) as end:
        result = await invoke(end)
        assert (result.success, result.error, result.task_id) == (False, "Task failed", TASK)


async def test_a_submission_that_is_refused_is_told_with_its_status() -> None:
    async with other_end(submitted=(429, b'{"error":"slow down"}')) as end:
        result = await invoke(end)
        assert result.error == 'Submit failed: HTTP 429 — {"error":"slow down"}'
        assert (result.success, result.task_id) == (False, None)


async def test_time_that_is_over_is_told_in_milliseconds() -> None:
    async with other_end(polls=[(200, task("working"))]) as end:
        result = await invoke(end, timeout_ms=1_000)
        assert (result.error, result.task_id) == ("Timed out after 1000ms", TASK)


async def test_a_404_while_polling_ends_the_wait_at_once() -> None:
    async with other_end(polls=[(404, {"error": "Task not found"})]) as end:
        result = await invoke(end)
        assert result.error == 'Poll failed: HTTP 404 — {"error": "Task not found"}'
        assert end.count(f"/a2a/tasks/{TASK}") == 1


async def test_passing_troubles_of_a_poll_are_outlived() -> None:
    polls = [(503, b""), (200, b"<html>"), (200, task("completed", ("agent", "done")))]
    async with other_end(polls=polls) as end:
        assert (await invoke(end)).response_text == "done"


async def test_credential_identity_and_a_deeper_depth_go_along() -> None:
    async with other_end(polls=[(200, task("completed"))]) as end:
        await invoke(end, token="secret", depth=1, source_agent="me@here", skill="sums", timeout_ms=60_000)
        sent = next(request for request in end.served.requests if request.method == "POST")
        assert json.loads(sent.body) == {
            "params": {"message": "go", "skill": "sums", "timeoutMs": 60_000, "depth": 2},
            "sourceAgent": "me@here",
        }
        assert {request.headers["authorization"] for request in end.served.requests} == {"Bearer secret"}
        assert (sent.headers["covenant-depth"], sent.headers["covenant-chain"]) == ("2", "me@here")


async def test_a_chain_goes_along_as_it_is_given() -> None:
    async with other_end(polls=[(200, task("completed"))]) as end:
        await invoke(end, depth=2, chain=("first", "me"), source_agent="a name for people")
        sent = next(request for request in end.served.requests if request.method == "POST")
        assert (sent.headers["covenant-depth"], sent.headers["covenant-chain"]) == ("3", "first,me")


async def test_a_card_that_cannot_be_had_is_an_error_with_its_status_and_no_discovery() -> None:
    async with other_end(card_status=503) as end:
        with pytest.raises(simple.ExternalServiceError, match="HTTP 503") as raised:
            await simple.fetch_agent_card(end.url, allow_private=ALLOW)
        assert raised.value.status == 503
        assert await simple.discover_agent(end.url, allow_private=ALLOW) is None
    assert await simple.discover_agent("http://10.0.0.1") is None


async def test_the_guard_s_refusal_of_an_invocation_is_raised() -> None:
    async with other_end() as end:
        with pytest.raises(AddressRefused):
            await simple.invoke_remote_agent(end.url, "go")
        assert end.served.connections == 0


async def test_clearing_the_cache_asks_again() -> None:
    async with other_end() as end:
        for _ in range(2):
            await simple.fetch_agent_card(end.url, allow_private=ALLOW)
        simple.clear_agent_card_cache()
        await simple.fetch_agent_card(end.url, allow_private=ALLOW)
        assert end.count("/.well-known") == 2


async def test_many_who_ask_at_once_are_one_question() -> None:
    gate = asyncio.Event()
    async with other_end(gate=gate) as end:
        cache = CardCache()
        asking = [asyncio.create_task(fetch_agent_card(end.url, allow_private=ALLOW, cache=cache)) for _ in range(20)]
        await asyncio.wait_for(end.served.asked.wait(), BOUND_S)
        asking[0].cancel()
        gate.set()
        cards = await asyncio.gather(*asking[1:])
        assert {card.name for card in cards} == {"Remote"}
        assert end.count("/.well-known") == 1


async def test_a_failure_is_remembered_for_half_a_minute() -> None:
    clock = Clock()
    cache = CardCache(clock=clock)
    async with other_end(card_status=500) as end:
        for _ in range(3):
            with pytest.raises(simple.ExternalServiceError):
                await fetch_agent_card(end.url, allow_private=ALLOW, cache=cache)
        assert end.count("/.well-known") == 1
        clock.now_s += 31
        end.card_status = 200
        assert (await fetch_agent_card(end.url, allow_private=ALLOW, cache=cache)).name == "Remote"


async def test_one_caller_s_card_is_not_told_to_another() -> None:
    cache = CardCache()
    async with other_end() as end:
        await fetch_agent_card(end.url, token="a", allow_private=ALLOW, cache=cache)
        await fetch_agent_card(end.url, token="b", allow_private=ALLOW, cache=cache)
        assert end.count("/.well-known") == 2
        with pytest.raises(CovenantError):
            await fetch_agent_card(end.url, token="a", cache=cache)


async def test_the_cache_has_an_end() -> None:
    cache = CardCache(cards_max=2)

    async def made() -> RemoteCard:
        return RemoteCard(name="x", version="1")

    for key in "abc":
        await cache.get(key, made)
    assert list(cache._kept) == ["b", "c"]
