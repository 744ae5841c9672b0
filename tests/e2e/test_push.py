"""A real daemon, killed between a delivery and the record of it: started again, it repeats that one and skips none."""

import asyncio
import http.client
import json
import signal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.agents.test_served_files import call, send
from tests.cli.daemons import Daemon
from tests.outbound.http_servers import reply
from tests.outbound.receivers import receiver
from tests.waits import BOUND_S

AGENTS = """
import asyncio

from covenant import Agent

teller = Agent("teller")

@teller
async def tell(turn):
    for number in range(4):
        yield turn.status(f"part {number}")
    yield turn.text

stuck = Agent("stuck")

@stuck
async def work(turn):
    yield turn.status("at work")
    await asyncio.Event().wait()
"""
CANARIES = ("canary-token", "canary-credentials", "canary-path", "canary-query")
PUSH_ON = {
    "COVENANT_A2A_PUSH_NOTIFICATIONS": "true",
    "COVENANT_OUTBOUND_ALLOW": "127.0.0.1",
    "COVENANT_PUSH_ATTEMPTS_MAX": "2",
    "COVENANT_PUSH_PAUSE_MS": "1",
    "COVENANT_LOG_LEVEL": "debug",
}


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    path = tmp_path / "agents.py"
    path.write_text(AGENTS)
    return path


def started(tmp_path: Path, agents: Path, **env: str) -> Daemon:
    return Daemon(tmp_path / "home", str(agents), env={**PUSH_ON, **env})


def ask(daemon: Daemon, url: str, *, agent: str = "teller", wait: bool = True, **config: Any) -> dict[str, Any]:
    message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "hello"}]}
    configuration = {"taskPushNotificationConfig": {"url": url, "id": "p", **config}, "returnImmediately": not wait}
    answer = call(daemon, agent, "SendMessage", message=message, configuration=configuration)
    task: dict[str, Any] = answer["result"]["task"]
    return task


async def settled(daemon: Daemon, **wanted: int) -> dict[str, Any]:
    """The outbox, once its numbers are these; each look is a process of its own."""
    async with asyncio.timeout(BOUND_S):
        while True:
            listed = await asyncio.to_thread(daemon.json, "a2a", "push", "list")
            if all(listed[name] == number for name, number in wanted.items()):
                return listed


async def test_a_kill_between_a_delivery_and_its_record_repeats_it_and_loses_nothing(
    tmp_path: Path, agents: Path
) -> None:
    async with receiver() as hook:
        daemon = await asyncio.to_thread(started, tmp_path, agents)
        hook.held = asyncio.Event()
        task = await asyncio.to_thread(ask, daemon, hook.url())
        await hook.asked(1)
        assert task["status"]["state"] == "TASK_STATE_COMPLETED"
        daemon.stop(signal.SIGKILL)
        hook.held = None
        daemon = await asyncio.to_thread(started, tmp_path, agents)
        await settled(daemon, count=0)
        seen = [int(request.headers["covenant-generation"]) for request in hook.served.requests]
        last = task["metadata"]["covenant.generation"]
        assert seen == [1, *range(1, last + 1)]
        repeated = [request.headers["webhook-id"] for request in hook.served.requests[:2]]
        assert len(set(repeated)) == 1, "whoever has it already can tell"
        assert daemon.stop() == 0


async def test_a_webhook_is_told_that_work_is_held_and_then_that_nobody_decided(tmp_path: Path, agents: Path) -> None:
    async with receiver() as hook:
        daemon = await asyncio.to_thread(started, tmp_path, agents)
        task = await asyncio.to_thread(ask, daemon, hook.url(), agent="stuck", wait=False)
        await hook.until(lambda: any("at work" in json.dumps(body) for body in hook.bodies))
        daemon.stop(signal.SIGKILL)
        daemon = await asyncio.to_thread(started, tmp_path, agents, COVENANT_A2A_HOLD_MS="1000")
        await settled(daemon, count=0)
        steps = {int(generation): body for generation, body in zip(hook.generations, hook.bodies, strict=True)}
        assert sorted(steps) == list(range(1, len(steps) + 1)), "none is left out"
        held, failed = (steps[number]["statusUpdate"]["status"] for number in sorted(steps)[-2:])
        assert held["state"] == "TASK_STATE_WORKING"
        assert held["message"]["parts"][0]["text"].startswith("interrupted: the daemon stopped while the agent worked")
        assert "or else the task fails" in held["message"]["parts"][0]["text"]
        assert failed["state"] == "TASK_STATE_FAILED"
        assert "no operator decided within 1 s" in failed["message"]["parts"][0]["text"]
        told = await asyncio.to_thread(call, daemon, "stuck", "GetTask", id=task["id"])
        assert told["result"]["status"]["state"] == "TASK_STATE_FAILED"
        assert daemon.stop() == 0


async def test_what_was_given_up_is_seen_and_tried_again_by_the_operator_and_nobody_reads_its_secrets(
    tmp_path: Path, agents: Path
) -> None:
    async with receiver(reply(500)) as hook:
        daemon = await asyncio.to_thread(started, tmp_path, agents)
        url = hook.url("/canary-path?key=canary-query")
        known = {"scheme": "Bearer", "credentials": "canary-credentials"}
        task = await asyncio.to_thread(ask, daemon, url, token="canary-token", authentication=known)
        (push,) = (await settled(daemon, dead=1))["pushes"]
        assert (push["state"], push["failure"], push["attempts"]) == ("dead", "HTTP 500", 2)
        assert push["host"] == f"127.0.0.1:{hook.served.port}"
        (need,) = (await asyncio.to_thread(daemon.json, "attention"))["items"]
        assert (need["what"], need["task_id"], need["push_id"]) == ("push_dead", task["id"], "p")
        assert need["command"] == f"covenant a2a push retry {task['id']} p"
        assert need["act"]["href"] == f"/ui/act/push?task={task['id']}&push=p"
        table = await asyncio.to_thread(daemon.run, "a2a", "push", "list", "--dead")
        shown = await asyncio.to_thread(daemon.run, "a2a", "show", task["id"], "--json")
        audit = await asyncio.to_thread(daemon.run, "audit", "recent", "--json")
        metrics = await asyncio.to_thread(_metrics, daemon)
        assert 'covenant_push_attempts_total{outcome="dead"} 1.0' in metrics
        assert "covenant_pushes_dead 1.0" in metrics
        hook.script = [reply(200)]
        await asyncio.to_thread(daemon.json, "a2a", "push", "retry", task["id"], "p")
        await settled(daemon, count=0)
        assert hook.taken[0].headers["authorization"] == "Bearer canary-credentials"
        assert hook.generations == list(range(1, task["metadata"]["covenant.generation"] + 1))
        assert "push.dead" in daemon.log
        for canary in CANARIES:
            for where in (daemon.log, table.out, shown.out, audit.out, metrics, json.dumps(push)):
                assert canary not in where
        assert daemon.stop() == 0
        for path in (tmp_path / "home").rglob("*"):
            if path.is_file() and any(canary.encode() in path.read_bytes() for canary in CANARIES):
                assert path.parent.name == "journal", path
                assert path.stat().st_mode & 0o077 == 0, path


async def test_without_the_operators_leave_nothing_inside_is_called_and_the_client_hears_nothing_of_it(
    tmp_path: Path, agents: Path
) -> None:
    async with receiver() as hook:
        daemon = await asyncio.to_thread(started, tmp_path, agents, COVENANT_OUTBOUND_ALLOW="")
        task = await asyncio.to_thread(ask, daemon, hook.url())
        (push,) = (await settled(daemon, dead=1))["pushes"]
        assert "loopback" in push["failure"]
        assert "outbound.allow" in push["failure"]
        told = await asyncio.to_thread(call, daemon, "teller", "GetTask", id=task["id"])
        assert "loopback" not in json.dumps(told)
        which = {"taskId": task["id"], "id": "p"}
        told = await asyncio.to_thread(call, daemon, "teller", "GetTaskPushNotificationConfig", **which)
        assert set(told["result"]) == {"taskId", "id", "url"}
        assert not hook.served.connections
        assert daemon.stop() == 0


async def test_switched_off_it_is_refused_and_no_card_offers_it(tmp_path: Path, agents: Path) -> None:
    daemon = await asyncio.to_thread(started, tmp_path, agents, COVENANT_A2A_PUSH_NOTIFICATIONS="false")
    task = await asyncio.to_thread(send, daemon, "teller", "hi")
    told = await asyncio.to_thread(call, daemon, "teller", "ListTaskPushNotificationConfigs", taskId=task["id"])
    assert told["error"]["code"] == -32003
    assert daemon.stop() == 0


def _metrics(daemon: Daemon) -> str:
    address = urlsplit(daemon.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=BOUND_S)
    token = (daemon.home / "operator.token").read_text().strip()
    try:
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
        return connection.getresponse().read().decode()
    finally:
        connection.close()
