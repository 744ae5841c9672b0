"""Approvals in a real daemon: asked before a kill, given after it, once, and by nobody else's tenant."""

import json
import signal
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.agents.test_served_files import call, get, send
from tests.cli.daemons import Daemon
from tests.waits import BOUND_S, until

AGENTS: Final = """
import pathlib
from covenant import Agent, SyncTurn

HERE = pathlib.Path(__file__).parent
shop = Agent("shop", idempotent=True, on_lost="requeue")
plain = Agent("plain", isolate=True)

def note(text):
    with open(HERE / "notes", "a") as lines:
        lines.write(text + "\\n")

@shop
async def buy(turn):
    price = await turn.step("price", lambda: note("price") or 40)
    decision = await turn.approve(f"buy {turn.text} for {price}?")
    if not decision:
        return f"not bought: {decision.reason}, says {decision.by}"
    await turn.step("pay", lambda: note("pay"))
    colour = await turn.ask("which colour?")
    return f"bought in {colour}, attempt {turn.attempt}, turn {turn.turn}"

@plain
def sell(turn: SyncTurn):
    return "sold" if turn.approve("sell?") else "kept"
"""


@pytest.fixture
def file(short_path: Path) -> Path:
    path = short_path / "agents.py"
    path.write_text(AGENTS)
    return path


def state(daemon: Daemon, agent: str, task_id: str) -> str:
    return str(get(daemon, agent, task_id)["status"]["state"])


def text(daemon: Daemon, agent: str, task_id: str) -> str:
    message = get(daemon, agent, task_id)["status"].get("message")
    return str(message["parts"][0]["text"]) if message is not None else ""


def say(daemon: Daemon, agent: str, task_id: str, *parts: dict[str, Any], key: str = "") -> dict[str, Any]:
    message = {"messageId": f"m{key}", "role": "ROLE_USER", "taskId": task_id, "parts": list(parts)}
    return call(daemon, agent, "SendMessage", message=message)


def killed(daemon: Daemon, file: Path) -> Daemon:
    assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
    return Daemon(daemon.home, str(file))


def notes(file: Path) -> list[str]:
    path = file.parent / "notes"
    return path.read_text().splitlines() if path.exists() else []


def test_an_approval_that_was_asked_before_a_kill_is_given_after_it_and_once(short_path: Path, file: Path) -> None:
    daemon = Daemon(short_path / "home", str(file))
    asked = send(daemon, "shop", "a chair")
    task_id = asked["id"]
    assert asked["status"]["state"] == "TASK_STATE_INPUT_REQUIRED"
    assert asked["status"]["message"]["metadata"]["covenant.question"] == {"id": "1-2", "kind": "approval"}
    daemon = killed(daemon, file)
    assert (state(daemon, "shop", task_id), text(daemon, "shop", task_id)) == (
        "TASK_STATE_INPUT_REQUIRED",
        "buy a chair for 40?",
    )
    wrong = daemon.run("a2a", "approve", task_id, "--question-id", "1-9")
    assert wrong.code != 0
    assert "asks 1-2 now" in wrong.err
    approved = daemon.run("a2a", "approve", task_id, "--question-id", "1-2", "--answer-id", "a1", "--json")
    assert approved.code == 0, approved
    again = daemon.run("a2a", "approve", task_id, "--question-id", "1-2", "--answer-id", "a1", "--json")
    assert json.loads(again.out)["duplicate"] is True
    until(lambda: text(daemon, "shop", task_id) == "which colour?")
    assert daemon.run("a2a", "approve", task_id).code != 0, "it asks for words now"
    daemon = killed(daemon, file)
    try:
        done = say(daemon, "shop", task_id, {"text": "blue"})
        assert done["result"]["task"]["status"]["message"]["parts"] == [
            {"text": "bought in blue, attempt 1, turn 1"}
        ], done
        assert notes(file) == ["price", "pay"]
        late = daemon.run("a2a", "deny", task_id, "too late")
        assert late.code != 0
    finally:
        assert daemon.stop() == 0


def test_a_message_that_decides_nothing_is_refused_and_a_denial_is_told_to_the_agent(
    short_path: Path, file: Path
) -> None:
    daemon = Daemon(short_path / "home", str(file))
    try:
        task_id = send(daemon, "shop", "a car")["id"]
        for part in ({"text": "yes, but cheaper"}, {"data": {"covenant.approval": {"approved": 1}}}):
            refused = say(daemon, "shop", task_id, part)
            assert "approve" in refused["error"]["message"], refused
            assert state(daemon, "shop", task_id) == "TASK_STATE_INPUT_REQUIRED"
        denied = say(daemon, "shop", task_id, {"data": {"covenant.approval": {"approved": False, "reason": "dear"}}})
        status = denied["result"]["task"]["status"]
        assert status["message"]["parts"] == [{"text": "not bought: dear, says client@default"}]
        assert notes(file) == ["price"]
        rows = json.loads(daemon.run("audit", "recent", "--type", "a2a_approval", "--json").out)
        assert '"approved": false' in json.dumps(rows)
        # A plain function in a process of its own, answered by the mailbox's HTTP door in words.
        task_id = send(daemon, "plain", "it")["id"]
        token = (daemon.home / "operator.token").read_text().strip()
        body = json.dumps({"text": "Approve"}).encode()
        request = Request(f"{daemon.url}/a2a/tasks/{task_id}/answer", body)
        request.add_header("Authorization", f"Bearer {token}")
        request.add_header("Content-Type", "application/json")
        with urlopen(request, timeout=BOUND_S) as answered:
            assert json.loads(answered.read())["task_id"] == task_id
        until(lambda: state(daemon, "plain", task_id) == "TASK_STATE_COMPLETED")
        assert text(daemon, "plain", task_id) == "sold"
    finally:
        assert daemon.stop() == 0


def post(daemon: Daemon, path: str, token: str, given: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = Request(daemon.url + path, json.dumps(given).encode())
    request.add_header("Authorization", f"Bearer {token}")
    request.add_header("Content-Type", "application/json")
    try:
        with urlopen(request, timeout=BOUND_S) as answered:
            return answered.status, json.loads(answered.read())
    except HTTPError as refused:
        with refused:
            return refused.code, json.loads(refused.read())


def test_a_tenant_signals_and_answers_its_own_tasks(short_path: Path) -> None:
    daemon = Daemon(short_path / "home")
    try:
        token = json.loads(daemon.run("tenants", "add", "ours", "--json").out)["token"]
        asks = json.dumps({"type": "approval_request", "text": "may I?"})
        command = f"printf '%s\\n' '{asks}'"
        added = daemon.run("agents", "add", "asker", "--tenant", "ours", "--command", command)
        assert added.code == 0, added
        message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "go"}]}
        _, sent = post(daemon, "/v1/a2a/agents/asker/message:send", token, {"message": message})
        task_id = sent["task"]["id"]
        assert sent["task"]["status"]["state"] == "TASK_STATE_INPUT_REQUIRED"
        status, told = post(daemon, f"/a2a/tasks/{task_id}/signal", token, {"name": "x", "signal_id": "s"})
        assert (status, told["kind"]) == (200, "a2a_signaled")
        status, told = post(daemon, f"/a2a/tasks/{task_id}/answer", token, {"approved": True})
        assert (status, told["kind"]) == (200, "a2a_answered")
    finally:
        assert daemon.stop() == 0


def test_another_tenant_cannot_answer_nor_see_what_is_asked(short_path: Path, file: Path) -> None:
    daemon = Daemon(short_path / "home", str(file))
    try:
        task_id = send(daemon, "shop", "a chair")["id"]
        token = json.loads(daemon.run("tenants", "add", "strangers", "--json").out)["token"]
        message = {"messageId": "x", "role": "ROLE_USER", "taskId": task_id, "parts": [{"text": "approve"}]}
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message}}).encode()
        request = Request(f"{daemon.url}/v1/a2a/agents/index", body)
        for name, value in (("Authorization", f"Bearer {token}"), ("Content-Type", "application/json")):
            request.add_header(name, value)
        request.add_header("A2A-Version", "1.0")
        with urlopen(request, timeout=BOUND_S) as answered:
            refused = json.loads(answered.read())
        assert "error" in refused, refused
        assert "buy" not in json.dumps(refused)
        for verb, given in (("answer", {"approved": True}), ("signal", {"name": "x"})):
            status, told = post(daemon, f"/a2a/tasks/{task_id}/{verb}", token, given)
            assert (status, told["code"]) == (404, "unknown_task")
        assert state(daemon, "shop", task_id) == "TASK_STATE_INPUT_REQUIRED"
        assert notes(file) == ["price"]
    finally:
        assert daemon.stop() == 0
