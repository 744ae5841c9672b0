"""Calling a real daemon from outside: by the simple functions, and through a kill in the middle of an answer."""

import asyncio
import signal
from pathlib import Path

from covenant import connect, simple
from covenant.model.task_view import RemoteArtifact, TaskState
from tests.cli.daemons import Daemon
from tests.e2e.test_simple import agent_file
from tests.places import free_port
from tests.waits import BOUND_S

HERE = ("127.0.0.1",)


def token_of(daemon: Daemon) -> str:
    return (daemon.home / "operator.token").read_text().strip()


async def test_a_daemon_is_discovered_and_invoked_by_the_simple_functions(short_path: Path) -> None:
    home = short_path / "home"
    agent_file(home)
    daemon = Daemon(home)
    try:
        simple.clear_agent_card_cache()
        card = await simple.discover_agent(daemon.url, allow_private=HERE)
        assert card is not None
        token = token_of(daemon)
        done = await simple.invoke_remote_agent(
            daemon.url, "Hello", token=token, allow_private=HERE, poll_interval_ms=50, source_agent="me@here"
        )
        assert (done.success, done.response_text, done.error) == (True, "You said: Hello", None)
        assert done.task_id is not None
        strange = await simple.invoke_remote_agent(daemon.url, "Hello", allow_private=HERE)
        assert strange.error is not None
        assert strange.error.startswith("Submit failed: HTTP 401 — ")
        deep = await simple.invoke_remote_agent(daemon.url, "Hello", token=token, allow_private=HERE, depth=9)
        assert deep.error is not None
        assert deep.error.startswith("Submit failed: HTTP 400 — ")
    finally:
        daemon.stop()


async def test_a_callee_that_is_killed_in_the_middle_is_followed_to_its_end_and_asked_nothing_twice(
    short_path: Path,
) -> None:
    home = short_path / "home"
    agent_file(home)
    port = free_port()
    daemon = Daemon(home, "--http-port", str(port))
    url = f"{daemon.url}/v1/a2a/agents/answerer"
    try:
        async with connect(url, token=token_of(daemon), allow_private=HERE, timeout_s=BOUND_S) as remote:
            stream = remote.stream("wait")
            told = []
            async for news in stream:
                if isinstance(news, RemoteArtifact) and news.text:
                    told.append(news.text)
                    break
            await asyncio.to_thread(daemon.stop, signal.SIGKILL)
            daemon = await asyncio.to_thread(Daemon, home, "--http-port", str(port))
            assert stream.task_id is not None
            await asyncio.to_thread(daemon.json, "capabilities", "grant", "a2a.repair.force_error")
            # Its program is gone with the old daemon: an operator says what becomes of it.
            repair = ("a2a", "force-error", stream.task_id, "--reason", "it was killed", "--message", "killed")
            await asyncio.to_thread(daemon.json, *repair)
            told += [news.text async for news in stream if isinstance(news, RemoteArtifact)]
            assert "".join(told) == "You said: wait"
            assert (stream.reply.state, stream.reply.text) == (TaskState.FAILED, "killed")
            assert daemon.json("a2a", "status", "--counts")["counts"]["in_flight"] == 0
    finally:
        daemon.stop()
