"""Agents elsewhere as tools: a second daemon is found, judged by what is known of it, called, and called off."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.daemons import Daemon
from tests.doors.mcp.daemon import Gate, Told, called, gate_at, over_http, start
from tests.places import short_folder
from tests.waits import BOUND_S


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with short_folder() as found:
        yield found


@pytest.fixture(scope="module")
def far(folder: Path) -> Iterator[Daemon]:
    """Whose agent `held` everybody on this machine may call."""
    (folder / "far").mkdir()
    started = start(folder / "far", "--a2a-publish", "held", "--a2a-publish-anonymous", "loopback")
    yield started
    assert started.stop() == 0


@pytest.fixture(scope="module")
def near(folder: Path, far: Daemon) -> Iterator[Daemon]:
    (folder / "near").mkdir()
    started = start(folder / "near", "--outbound-allow", far.url.removeprefix("http://"))
    yield started
    assert started.stop() == 0


@pytest.fixture
async def gate(folder: Path) -> AsyncIterator[Gate]:
    async with gate_at(folder / "far") as gate:
        yield gate


@pytest.fixture
def listed(near: Daemon, far: Daemon) -> Iterator[str]:
    path = near.home / "a2a_agents.json"
    url = held_at(far)
    path.write_text(json.dumps({"agents": {"friend": {"url": url}}}), encoding="utf-8")
    yield url
    path.unlink()


def held_at(far: Daemon) -> str:
    return f"{far.url}/v1/a2a/agents/held"


async def test_a_card_is_told_in_words(near: Daemon, far: Daemon) -> None:
    async with over_http(near) as client:
        failed, text, data = await called(client, "discover_agent", url=held_at(far))
    assert not failed, text
    lines = text.splitlines()
    assert lines[0].startswith("Agent: held v")
    assert f"URL: {held_at(far)}" in lines
    assert "Streaming: yes" in lines
    assert "Push notifications: no" in lines
    assert "- chat: Ask in plain text, and get an answer. [text]" in lines
    assert lines[-1].startswith("Protocols: JSONRPC 1.0, ")
    assert data["name"] == "held"


async def test_an_agent_without_a_card_is_no_error(near: Daemon, far: Daemon) -> None:
    async with over_http(near) as client:
        failed, text, data = await called(client, "discover_agent", url=f"{far.url}/nothing/here")
    assert (failed, data["found"]) == (False, False)
    assert text.startswith("No A2A Agent Card found")


async def test_addresses_that_may_not_be_called_are_refused_before_anybody_is_called(near: Daemon) -> None:
    reached: list[object] = []

    async def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append(writer.get_extra_info("peername"))
        writer.close()

    async with await asyncio.start_server(note, "127.0.0.1", 0) as server, over_http(near) as client:
        port = server.sockets[0].getsockname()[1]
        for url in (f"http://127.0.0.1:{port}/x", f"http://localhost:{port}/x", "http://169.254.169.254/"):
            failed, text, data = await called(client, "discover_agent", url=url)
            assert (failed, data["code"]) == (True, "address_refused"), text
            failed, text, data = await called(client, "invoke_remote_agent", agent_url=url, message="hello")
            assert (failed, data["code"]) == (True, "trust_too_low"), text
            assert "this address may not be called" in text
    assert reached == []


@pytest.mark.parametrize("url", ["ftp://h/x", "nobody"])
async def test_what_is_no_address_is_refused(near: Daemon, url: str) -> None:
    async with over_http(near) as client:
        failed, text, _ = await called(client, "discover_agent", url=url)
    assert failed, text


async def test_a_remote_agent_answers_and_the_task_is_here_too(near: Daemon, far: Daemon, gate: Gate) -> None:
    told = Told()
    async with over_http(near) as client:
        arguments = {"agent_url": held_at(far), "message": "hello", "skill": "chat"}
        calling = asyncio.create_task(called(client, "invoke_remote_agent", told, **arguments))
        await asyncio.wait_for(gate.held.wait(), BOUND_S)
        await gate.open("from afar")
        failed, text, data = await calling
        assert not failed, text
        assert text == f"Remote Agent Response (task {told.task_id}):\nfrom afar"
        _, _, found = await called(client, "get_task", task_id=told.task_id)
        assert found == data
        assert found["agent"] == held_at(far)


async def test_a_client_that_leaves_finds_the_answer_later_and_a_cancel_goes_all_the_way(
    near: Daemon, far: Daemon, gate: Gate
) -> None:
    for word in ("answer", "cancel"):
        told = Told()
        gate.held.clear()
        async with over_http(near) as client:
            arguments = {"agent_url": held_at(far), "message": "hello"}
            calling = asyncio.create_task(client.call_tool("invoke_remote_agent", arguments, None, told))
            await asyncio.wait_for(gate.held.wait(), BOUND_S)
            await asyncio.wait_for(told.first.wait(), BOUND_S)
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
        async with over_http(near) as client, over_http(far) as there:
            if word == "answer":
                await gate.open("later")
                _, _, data = await called(client, "get_task", task_id=told.task_id, wait_seconds=20)
                assert (data["state"], data["text"]) == ("completed", "later")
            else:
                failed, _, data = await called(client, "cancel_task", task_id=told.task_id)
                assert (failed, data["state"]) == (False, "canceled")
                async with asyncio.timeout(BOUND_S):
                    while (await called(there, "queue_status"))[2]["counts"]["in_flight"]:
                        pass


async def test_the_same_key_is_the_same_call(near: Daemon, far: Daemon, gate: Gate) -> None:
    arguments = {"agent_url": held_at(far), "message": "once", "idempotency_key": "remote-1"}
    async with over_http(near) as client:
        calls = [asyncio.create_task(called(client, "invoke_remote_agent", None, **arguments)) for _ in range(2)]
        await asyncio.wait_for(gate.held.wait(), BOUND_S)
        await gate.open("said once")
        (_, first, _), (_, second, _) = await asyncio.gather(*calls)
    assert first == second
    assert first.endswith("said once")


@pytest.mark.parametrize("level", ["high", "verified"])
async def test_what_is_not_known_of_an_agent_is_not_claimed(near: Daemon, far: Daemon, level: str) -> None:
    async with over_http(near) as client:
        failed, text, _ = await called(
            client, "invoke_remote_agent", agent_url=held_at(far), message="x", min_trust=level
        )
    assert failed
    assert text.startswith(f"trust_too_low: {held_at(far)} is medium, but {level} is required")


async def test_an_agent_whose_card_cannot_be_read_is_untrusted(near: Daemon, far: Daemon) -> None:
    async with over_http(near) as client:
        asked: dict[str, Any] = {"agent_url": f"{far.url}/nothing/here", "message": "x"}
        for arguments in (asked, {**asked, "min_trust": "low"}):
            failed, text, _ = await called(client, "invoke_remote_agent", **arguments)
            assert failed
            assert text.startswith("trust_too_low")
            assert "is untrusted" in text


@pytest.mark.parametrize("level", ["medium", "high", "verified"])
async def test_an_agent_that_the_operator_named_and_that_signs_its_card_is_verified(
    near: Daemon, far: Daemon, gate: Gate, listed: str, level: str
) -> None:
    async with over_http(near) as client:
        for agent in (listed, "friend"):
            arguments = {"agent_url": agent, "message": "x", "min_trust": level}
            gate.held.clear()
            calling = asyncio.create_task(called(client, "invoke_remote_agent", None, **arguments))
            await asyncio.wait_for(gate.held.wait(), BOUND_S)
            await gate.open("trusted")
            failed, text, _ = await calling
            assert not failed, text


async def test_a_skill_that_it_does_not_have_is_refused_before_anything_is_sent(near: Daemon, far: Daemon) -> None:
    async with over_http(near) as client:
        failed, text, _ = await called(
            client, "invoke_remote_agent", agent_url=held_at(far), message="x", skill="dancing"
        )
    assert failed
    assert text.startswith("unknown_skill")


async def test_a_call_that_takes_too_long_fails_here_and_ends_there(near: Daemon, far: Daemon, gate: Gate) -> None:
    async with over_http(near) as client:
        failed, text, _ = await called(
            client, "invoke_remote_agent", agent_url=held_at(far), message="x", timeout_minutes=0.02
        )
    assert failed
    assert "timed out" in text.lower()
