"""The master in real daemons: for every tenant, over agents here and in another daemon, and with native clients."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx

from tests.cli.daemons import Daemon
from tests.e2e.linked_daemons import until
from tests.waits import BOUND_S

HERE = """
from covenant import Agent

poet = Agent("poet", description="Writes poems", skills=["verse"])

@poet
async def write(turn):
    return f"a poem: {turn.text}"
"""
THERE = """
from covenant import Agent

gardener = Agent("gardener", description="Knows plants and gardens", skills=["pruning"])

@gardener
async def tend(turn):
    return f"prune in March ({len(turn.parts)} part, {sorted(turn.metadata)})"
"""


@contextmanager
def daemon(folder: Path, name: str, code: str, *flags: str) -> Iterator[Daemon]:
    path = folder / f"{name}.py"
    path.write_text(code)
    started = Daemon(folder / name, str(path), *flags)
    try:
        yield started
    finally:
        assert started.stop() == 0


def token_of(home: Path) -> str:
    return (home / "operator.token").read_text().strip()


def asked(url: str, token: str, text: str, agent: str = "index") -> dict[str, Any]:
    message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": text}]}
    body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message}}
    headers = {"Authorization": f"Bearer {token}", "A2A-Version": "1.0"}
    answer = httpx.post(f"{url}/v1/a2a/agents/{agent}", json=body, headers=headers, timeout=BOUND_S).json()
    task: dict[str, Any] = answer["result"]["task"]
    return task


def words(task: dict[str, Any]) -> str:
    return "".join(part.get("text", "") for part in task["status"]["message"]["parts"])


def test_every_tenant_has_a_master_also_one_that_was_added_while_the_daemon_runs(short_path: Path) -> None:
    with daemon(short_path, "here", HERE) as here:
        task = asked(here.url, token_of(here.home), "Write some verse")
        assert words(task) == "a poem: Write some verse"
        added = here.json("tenants", "add", "acme")
        task = asked(here.url, added["token"], "Write some verse")
        # The poet is the first tenant's, and nobody else's.
        assert "There are no agents yet" in words(task)


def test_an_agent_of_another_daemon_is_found_by_its_card_and_sent_the_words_alone(short_path: Path) -> None:
    with daemon(short_path, "there", THERE) as there, daemon(short_path, "here", HERE) as here:
        agents = {"garden": {"url": f"{there.url}/v1/a2a/agents/gardener", "auth": {"token": token_of(there.home)}}}
        agents |= {f"dead{number}": {"url": f"http://127.0.0.1:9/{number}"} for number in range(20)}
        (here.home / "a2a_agents.json").write_text(json.dumps({"agents": agents}))
        token = token_of(here.home)
        task = until(
            lambda: asked(here.url, token, "When does pruning begin in gardens?"),
            lambda task: words(task).startswith("prune in March"),
        )
        assert words(task).startswith("prune in March (1 part")
        (sub,) = [artifact for artifact in task["artifacts"] if artifact["name"] == "sub_agent_response"]
        assert sub["parts"][0]["data"]["agent"] == "garden"


def test_a_model_by_its_settings_plays_agents_and_what_comes_with_a_request(short_path: Path) -> None:
    with daemon(short_path, "here", HERE, "--model-name", "test") as here:
        token = token_of(here.home)
        headers = {"Authorization": f"Bearer {token}"}
        bot = {"id": "bot", "goal": "Help", "capabilities": ["/mem", "/write"]}
        assert httpx.post(f"{here.url}/v1/agents", json=bot, headers=headers, timeout=BOUND_S).status_code == 201
        task = asked(here.url, token, "Hello", "bot")
        assert task["status"]["state"] == "TASK_STATE_COMPLETED"
        names = {artifact["name"] for artifact in task["artifacts"]}
        assert {"tool_call", "response"} <= names
        assert (here.home / "memory" / "default" / "bot.json").exists()
        body = {"message": "Ahoy", "agent_def": {"id": "pirate", "capabilities": ["/write"]}}
        run = httpx.post(f"{here.url}/v1/orchestrate", json=body, headers=headers, timeout=BOUND_S)
        events = [line.removeprefix("event: ") for line in run.text.splitlines() if line.startswith("event: ")]
        assert events[:3] == ["request_received", "stream_start", "agent_start"]
        assert events[-1] == "done"
        assert {"file", "tool_call", "text", "token_usage"} <= set(events)
        # What comes with a request remembers nothing.
        assert not (here.home / "memory" / "default" / "pirate.json").exists()


GATED = """
import asyncio, pathlib
from covenant import Agent

gate = pathlib.Path(__file__).parent / "gate"
runs = pathlib.Path(__file__).parent / "runs"
digger = Agent("digger", description="Digs holes", skills=["digging"], idempotent=True, on_lost="requeue")

@digger
async def dig(turn):
    with runs.open("a") as file:
        file.write(f"{turn.task_id}\\n")
    while not gate.exists():
        await asyncio.sleep(0.02)
    return "dug"
"""


def test_a_route_that_a_crash_cut_short_is_found_again_with_its_child(short_path: Path) -> None:
    path = short_path / "agents.py"
    path.write_text(GATED)
    runs, home = short_path / "runs", short_path / "home"
    killed = Daemon(home, str(path))
    headers = {"Authorization": f"Bearer {token_of(home)}", "A2A-Version": "1.0"}
    message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "Start digging"}]}
    params = {"message": message, "configuration": {"returnImmediately": True}}
    body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": params}
    sent = httpx.post(f"{killed.url}/v1/a2a/agents/index", json=body, headers=headers, timeout=BOUND_S).json()
    task_id = sent["result"]["task"]["id"]
    until(runs.exists, bool)
    assert killed.stop(signal.SIGKILL) == -signal.SIGKILL
    (short_path / "gate").touch()
    again = Daemon(home, str(path))
    try:

        def state() -> dict[str, Any]:
            url = f"{again.url}/v1/requests/{task_id}"
            found: dict[str, Any] = httpx.get(url, headers=headers, timeout=BOUND_S).json()["request"]
            return found

        assert until(state, lambda found: found["state"] != "running")["state"] == "completed"
        tree = httpx.get(f"{again.url}/a2a/tasks/{task_id}/tree", headers=headers, timeout=BOUND_S).json()["tree"]
        (child,) = tree["children"]
        # The same child, in its second attempt: nobody was handed the work twice.
        assert set(runs.read_text().split()) == {child["task_id"]}
    finally:
        assert again.stop() == 0
