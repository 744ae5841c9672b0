"""A daemon killed in the middle of a model's answer and of a tool: what became of it is told, and nothing is repeated.

The model and the tool are processes of their own, which note each use before they do anything.
"""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.agents.mcp_http_server import served
from tests.cli.daemons import Daemon
from tests.e2e.model_server import model_server
from tests.matrices import first_rows_of
from tests.places import free_port
from tests.waits import BOUND_S, until


class Killed:
    """A home with the agents `bot`, which is held when its work is lost, and `again`, which is begun anew."""

    def __init__(self, home: Path, model: str, mcp_port: int) -> None:
        self.home = home
        self._env = {
            "COVENANT_MODEL_NAME": "openai:m",
            "COVENANT_MODEL_BASE_URL": model,
            "ELSEWHERE_TOKEN": "s3cret",
            "COVENANT_DAEMON_GRACE_MS": "0",
        }
        home.mkdir(mode=0o700)
        (home / "agents").mkdir()
        for name, more in (("bot", {}), ("again", {"idempotent": True, "on_lost": "requeue"})):
            (home / "agents" / f"{name}.json").write_text(json.dumps({"id": name, "kind": "model", **more}))
        far = {"url": f"http://127.0.0.1:{mcp_port}/mcp", "auth": {"token_env": "ELSEWHERE_TOKEN"}}
        (home / "mcp_servers.json").write_text(json.dumps({"servers": {"far": far}}))
        self.daemon = Daemon(home, env=self._env)

    def kill(self) -> None:
        """In the middle of it, and a new start."""
        assert self.daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        self.daemon = Daemon(self.home, env=self._env)

    def call(self, agent: str, method: str, **params: Any) -> dict[str, Any]:
        token = (self.home / "operator.token").read_text().strip()
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        headers = {"authorization": f"Bearer {token}", "a2a-version": "1.0"}
        url = f"{self.daemon.url}/v1/a2a/agents/{agent}"
        answer = httpx2.post(url, json=body, headers=headers, trust_env=False, timeout=BOUND_S).json()
        found: dict[str, Any] = answer["result"]
        return found

    def send(self, agent: str, text: str) -> str:
        message = {"messageId": text, "role": "ROLE_USER", "parts": [{"text": text}]}
        sent = self.call(agent, "SendMessage", message=message, configuration={"returnImmediately": True})
        task_id: str = sent["task"]["id"]
        return task_id

    def get(self, agent: str, task_id: str) -> dict[str, Any]:
        return self.call(agent, "GetTask", id=task_id)


def uses(log: Path, what: str) -> int:
    return log.read_text().splitlines().count(what) if log.exists() else 0


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def site(short_path: Path, port: int) -> Iterator[Killed]:
    with model_server(short_path / "model") as url, served(port, short_path / "tools"):
        killed = Killed(short_path / "home", url, port)
        try:
            yield killed
        finally:
            killed.daemon.stop()


SLOW_TOOL = 'use mcp_call {"server": "far", "tool": "slow"}'


@pytest.mark.parametrize(
    ("words", "log", "used"), first_rows_of([("slow", "model", "slow"), (SLOW_TOOL, "tools", "slow")])
)
def test_a_turn_that_was_cut_short_is_held_and_asks_the_model_and_the_tool_nothing_again(
    site: Killed, short_path: Path, words: str, log: str, used: str
) -> None:
    task_id = site.send("bot", words)
    until(lambda: uses(short_path / log, used) == 1)
    site.kill()
    until(lambda: "covenant.holder_lost" in (site.get("bot", task_id).get("metadata") or {}))
    task = site.get("bot", task_id)
    assert task["status"]["state"] == "TASK_STATE_WORKING"
    assert task["metadata"]["covenant.holder_lost"] == "worker lost, awaiting repair"
    # Another task is served by now. Nobody has asked the model, or used the tool, for the lost one.
    other = site.send("bot", "hello")
    until(lambda: site.get("bot", other)["status"]["state"] == "TASK_STATE_COMPLETED")
    assert (uses(short_path / "model", words), uses(short_path / log, used)) == (1, 1)
    # Only when an operator says so it is begun again, as a second attempt.
    site.daemon.json("capabilities", "grant", "a2a.repair.requeue")
    site.daemon.json("a2a", "requeue", task_id, "--reason", "tried", "--duplicate-risk", "operator-accepted")
    until(lambda: uses(short_path / log, used) == 2)
    assert uses(short_path / "model", words) == 2
    assert site.daemon.json("a2a", "show", task_id)["attempt"] == 2


def test_a_turn_that_may_be_repeated_is_begun_again_by_itself_once(site: Killed, short_path: Path) -> None:
    task_id = site.send("again", "slow")
    until(lambda: uses(short_path / "model", "slow") == 1)
    site.kill()
    until(lambda: uses(short_path / "model", "slow") == 2)
    detail = site.daemon.json("a2a", "show", task_id)
    assert detail["attempt"] == 2
    assert site.get("again", task_id)["status"]["state"] == "TASK_STATE_WORKING"
    assert uses(short_path / "model", "slow") == 2


def test_a_server_that_comes_into_the_file_is_used_without_a_restart_and_a_bad_file_takes_none_away(
    site: Killed, short_path: Path, port: int
) -> None:
    file = site.home / "mcp_servers.json"
    servers = json.loads(file.read_text())["servers"]

    def answered(number: int, server: str) -> str:
        words = f'use mcp_call {{"server": "{server}", "tool": "add", "arguments": {{"a": {number}, "b": 1}}}}'
        task_id = site.send("bot", words)
        until(lambda: site.get("bot", task_id)["status"]["state"] == "TASK_STATE_COMPLETED")
        (tool,) = [each for each in site.get("bot", task_id)["artifacts"] if each["name"] == "tool_call"]
        return str(tool["parts"][0]["data"]["ok"])

    assert (answered(1, "far"), answered(2, "new")) == ("True", "False")
    file.write_text(json.dumps({"servers": {**servers, "new": servers["far"]}}))
    until(lambda: site.daemon.log.count("home.file_read") == 1)
    assert (answered(3, "far"), answered(4, "new")) == ("True", "True")
    file.write_text('{"servers": {"new": {}}}')
    ready = f"{site.daemon.url}/readyz"
    until(lambda: httpx2.get(ready, trust_env=False).json()["status"] == "degraded")
    assert (answered(5, "far"), answered(6, "new")) == ("True", "True")
    doctor = site.daemon.run("doctor")
    assert doctor.code != 0
    assert "/servers/new: give either `command` or `url`" in doctor.out
    file.write_text(json.dumps({"servers": servers}))
    until(lambda: httpx2.get(ready, trust_env=False).json()["status"] == "ready")
    assert (answered(7, "far"), answered(8, "new")) == ("True", "False")
    assert uses(short_path / "tools", "add") == 6
