"""`covenant serve agents.py`: a real daemon with agents in it, asked as an A2A client asks, and killed."""

import http.client
import json
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.cli.daemons import Daemon, covenant
from tests.waits import BOUND_S, until

EXAMPLES = Path(__file__).parents[2] / "examples"
AGENTS = """
import asyncio, os, pathlib
from covenant import Agent

quick, slow, again = Agent("quick"), Agent("slow"), Agent("again", idempotent=True, on_lost="requeue")

@quick
async def answer(turn):
    return f"VERSION {turn.text}"

@slow
@again
async def dawdle(turn):
    yield f"attempt {turn.attempt}"
    if turn.attempt == 1:
        await asyncio.Event().wait()
"""


def call(daemon: Daemon, agent: str, method: str, token: str = "", **params: Any) -> dict[str, Any]:
    """As the operator, unless there is a token."""
    address = urlsplit(daemon.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=BOUND_S)
    token = token or (daemon.home / "operator.token").read_text().strip()
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", "A2A-Version": "1.0"}
    try:
        connection.request("POST", f"/v1/a2a/agents/{agent}", body, headers)
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer
    finally:
        connection.close()


def send(daemon: Daemon, agent: str, text: str, *, wait: bool = True) -> dict[str, Any]:
    message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": text}]}
    answer = call(daemon, agent, "SendMessage", message=message, configuration={"returnImmediately": not wait})
    task: dict[str, Any] = answer["result"]["task"]
    return task


def get(daemon: Daemon, agent: str, task_id: str) -> dict[str, Any]:
    task: dict[str, Any] = call(daemon, agent, "GetTask", id=task_id)["result"]
    return task


def stream(daemon: Daemon, agent: str, task_id: str) -> list[dict[str, Any]]:
    """What a subscriber is sent, to the end."""
    address = urlsplit(daemon.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=BOUND_S)
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "SubscribeToTask", "params": {"id": task_id}})
    token = (daemon.home / "operator.token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", "A2A-Version": "1.0"}
    try:
        connection.request("POST", f"/v1/a2a/agents/{agent}", body, headers)
        lines = connection.getresponse().read().decode().splitlines()
        return [json.loads(line.removeprefix("data:"))["result"] for line in lines if line.startswith("data:")]
    finally:
        connection.close()


def status_text(frame: dict[str, Any]) -> str:
    (told,) = frame.values()
    message = told.get("status", {}).get("message", {"parts": [{"text": ""}]})
    text: str = message["parts"][0].get("text", "")
    return text


def begun(daemon: Daemon, agent: str) -> str:
    """A task whose agent has said something, on disk."""
    task_id: str = send(daemon, agent, "go", wait=False)["id"]
    answer = daemon.run("a2a", "show", task_id, "--json")
    while '"artifact"' not in answer.out:
        assert answer.code == 0, answer
        answer = daemon.run("a2a", "show", task_id, "--json")
    return task_id


def text_of(task: dict[str, Any]) -> str:
    text: str = task["artifacts"][0]["parts"][0]["text"]
    return text


@pytest.fixture
def file(short_path: Path) -> Path:
    path = short_path / "agents.py"
    path.write_text(AGENTS)
    return path


def test_the_example_summarises(short_path: Path) -> None:
    daemon = Daemon(short_path / "home", str(EXAMPLES / "summarizer.py"))
    try:
        assert daemon.process.stdout is not None
        assert daemon.process.stdout.readline() == f"serving summarizer at {daemon.url}/v1/a2a/agents/summarizer\n"
        task = send(daemon, "summarizer", "One. Two. Three.")
        assert task["status"]["state"] == "TASK_STATE_COMPLETED"
        assert task["status"]["message"]["parts"] == [{"text": "One. Two."}]
        assert [artifact["name"] for artifact in task["artifacts"]] == ["response", "data", "summary.md"]
        card = daemon.run("agents", "show", "summarizer", "--json").json
        assert "summarize" in json.dumps(card)
    finally:
        assert daemon.stop() == 0


def test_a_killed_daemon_leaves_the_lease_in_flight_and_a_requeue_runs_the_second_attempt(
    short_path: Path, file: Path
) -> None:
    daemon = Daemon(short_path / "home", str(file))
    held, requeued = begun(daemon, "slow"), begun(daemon, "again")
    assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
    daemon = Daemon(short_path / "home", str(file))
    try:
        # Whoever declares itself idempotent has begun again by itself.
        task = get(daemon, "again", requeued)
        while task["status"]["state"] == "TASK_STATE_WORKING":
            task = get(daemon, "again", requeued)
        assert (task["status"]["state"], text_of(task)) == ("TASK_STATE_COMPLETED", "attempt 2")
        # The other waits for an operator, with what it had said.
        until(lambda: "message" in get(daemon, "slow", held)["status"])
        task = get(daemon, "slow", held)
        assert (task["status"]["state"], text_of(task)) == ("TASK_STATE_WORKING", "attempt 1")
        assert task["metadata"]["covenant.holder_lost"] == "worker lost, awaiting repair"
        (part,) = task["status"]["message"]["parts"]
        assert part["text"].startswith("interrupted: the daemon stopped while the agent worked; an operator decides by")
        assert daemon.json("capabilities", "grant", "a2a.repair.requeue")
        words = ("a2a", "requeue", held, "--reason", "the machine lost power", "--duplicate-risk", "operator-accepted")
        ran = daemon.run(*words)
        assert ran.code == 0, ran
        while task["status"]["state"] == "TASK_STATE_WORKING":
            task = get(daemon, "slow", held)
        assert (task["id"], text_of(task)) == (held, "attempt 2")
    finally:
        assert daemon.stop() == 0


def test_held_work_of_a_killed_daemon_is_told_in_its_stream_and_fails_when_nobody_decides(
    short_path: Path, file: Path
) -> None:
    home, hold = short_path / "home", ("--a2a-hold-ms", "6000")
    daemon = Daemon(home, str(file), *hold)
    held = begun(daemon, "slow")
    assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
    # Killed again while it holds the work: the hold goes on, and is told once.
    daemon = Daemon(home, str(file), *hold)
    until(lambda: "message" in get(daemon, "slow", held)["status"])
    assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
    daemon = Daemon(home, str(file), *hold)
    try:
        frames = stream(daemon, "slow", held)
        said = [text for frame in frames if (text := status_text(frame)).startswith("interrupted: ")]
        assert said[-1] == ("interrupted: the daemon stopped while the agent worked; no operator decided within 6 s")
        task = get(daemon, "slow", held)
        assert task["status"]["state"] == "TASK_STATE_FAILED"
        assert text_of(task) == "attempt 1"
        shown = daemon.json("a2a", "show", held)
        assert shown["cause"] == "interrupted"
        told = [update for update in shown["updates"] if update["kind"] == "status"]
        assert len(told) == 1
        assert len(shown["leases"]) == 1
    finally:
        assert daemon.stop() == 0


def test_a_stop_waits_its_grace_and_then_marks_or_releases_what_is_left(short_path: Path, file: Path) -> None:
    daemon = Daemon(short_path / "home", str(file), "--daemon-grace-ms", "100")
    held, released = begun(daemon, "slow"), begun(daemon, "again")
    assert daemon.stop() == 0
    daemon = Daemon(short_path / "home")
    try:
        tasks = {row["task"]["id"]: row for row in daemon.json("a2a", "status")["tasks"]}
        assert tasks[held]["state"] == "in_flight"
        assert tasks[held]["holder_lost"] is True
        assert tasks[released]["state"] == "queued"
    finally:
        assert daemon.stop() == 0


def test_a_process_agent_of_the_catalogue_is_started_without_our_secrets(short_path: Path) -> None:
    home = short_path / "home"
    (home / "agents").mkdir(parents=True)
    home.chmod(0o700)
    source = "import json,os;print(json.dumps({'type':'result','text':' '.join(sorted(os.environ))}))"
    made = {"kind": "process", "command": [sys.executable, "-c", source], "description": "Tells its environment"}
    (home / "agents" / "teller.json").write_text(json.dumps(made))
    daemon = Daemon(home, env={"COVENANT_TOKEN": "x", "SECRET": "y"})
    try:
        task = send(daemon, "teller", "tell me")
        assert task["status"]["state"] == "TASK_STATE_COMPLETED"
        told = set(text_of(task).split())
        assert "PATH" in told
        assert not told & {"COVENANT_TOKEN", "SECRET", "COVENANT_HOME"}
    finally:
        assert daemon.stop() == 0


def test_a_file_that_cannot_be_served_is_refused_with_its_reason(short_path: Path) -> None:
    path = short_path / "agents.py"
    path.write_text("raise ValueError('oh no')\n")
    ran = covenant("serve", "--home", str(short_path / "home"), str(path))
    assert ran.code != 0
    assert "ValueError: oh no" in ran.err
    assert "agents.py" in ran.err
    ran = covenant("serve", "--home", str(short_path / "home"), "--reload")
    assert ran.code != 0
    assert "--reload needs the files" in ran.err


RELOADED = """
import pathlib, time
from covenant import Agent
from words import VERSION

quick, gated, gone = Agent("quick"), Agent("gated"), Agent("gone")

@quick
async def answer(turn):
    return f"{VERSION} {turn.text}"

@gated
def wait(turn):
    yield "begun"
    while not pathlib.Path(turn.text).exists():
        time.sleep(0.01)
    yield f"ended by {VERSION}"

@gone
async def vanish(turn):
    return "here"
"""


class Stream:
    """A stream of a send that is open while other things happen."""

    def __init__(self, daemon: Daemon, agent: str, text: str) -> None:
        address = urlsplit(daemon.url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=BOUND_S)
        message = {"messageId": "s", "role": "ROLE_USER", "parts": [{"text": text}]}
        body = {"jsonrpc": "2.0", "id": 1, "method": "SendStreamingMessage", "params": {"message": message}}
        token = (daemon.home / "operator.token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", "A2A-Version": "1.0"}
        self._connection.request("POST", f"/v1/a2a/agents/{agent}", json.dumps(body), headers)
        self._answer = self._connection.getresponse()

    def read_until(self, text: str) -> str:
        """Up to a text; to the end, if it does not come."""
        said = ""
        while text not in said and (line := self._answer.readline()):
            said += line.decode()
        return said

    def close(self) -> None:
        self._connection.close()


def quick(daemon: Daemon) -> str:
    text: str = send(daemon, "quick", "x")["status"]["message"]["parts"][0]["text"]
    return text


def test_changed_files_are_served_in_place_and_a_mistake_changes_nothing(short_path: Path, file: Path) -> None:
    file.write_text(RELOADED)
    words, gate = short_path / "words.py", short_path / "gate"
    words.write_text("VERSION = 'first'\n")
    daemon = Daemon(short_path / "home", "--reload", str(file))
    following = Stream(daemon, "gated", str(gate))
    try:
        assert "begun" in following.read_until("begun")
        assert (quick(daemon), status_text({"task": send(daemon, "gone", "x")})) == ("first x", "here")
        words.write_text("VERSION = 'later'\n")  # as many bytes, in the same second
        until(lambda: quick(daemon) == "later x")
        file.write_text("def broken(:\n")
        until(lambda: "agents.not_reloaded" in daemon.log)
        assert "SyntaxError" in daemon.log
        assert quick(daemon) == "later x"
        file.write_text(
            RELOADED.replace(', gone = Agent("quick")', ' = Agent("quick")')
            .replace(', Agent("gone")', "")
            .partition("@gone")[0]
        )
        until(lambda: "gone" not in daemon.run("agents", "list").out)
        gate.touch()
        assert "ended by first" in following.read_until("ended by")
        assert quick(daemon) == "later x"
        assert daemon.process.poll() is None
    finally:
        following.close()
        assert daemon.stop() == 0


def answers(daemon: Daemon, wanted: str) -> bool:
    return quick(daemon) == wanted


def test_no_send_is_refused_while_files_are_reloaded(short_path: Path, file: Path) -> None:
    (short_path / "words.py").write_text("VERSION = '0'\n")
    file.write_text(RELOADED)
    daemon = Daemon(short_path / "home", "--reload", str(file))
    try:
        for version in range(1, 4):
            (short_path / "words.py").write_text(f"VERSION = '{version}'\n")
            until(partial(answers, daemon, f"{version} x"))
        assert daemon.log.count("agents.reloaded") == 3
    finally:
        assert daemon.stop() == 0


OF_TENANT = """
from covenant import Agent

quick, own = Agent("quick"), Agent("own")

@quick
@own
async def answer(turn):
    return f"for acme: {turn.text}"
"""


def said_to(daemon: Daemon, agent: str, token: str) -> str:
    """What the agent answers whoever has this token, or the words of the refusal."""
    message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "hello"}]}
    answer = call(daemon, agent, "SendMessage", token, message=message)
    if "result" not in answer:
        return str(answer.get("error"))
    text: str = answer["result"]["task"]["status"]["message"]["parts"][0]["text"]
    return text


def test_the_agents_of_a_tenants_file_are_that_tenants_and_nobody_elses(short_path: Path) -> None:
    serve_for_tenants(short_path)


def serve_for_tenants(folder: Path, *more: str) -> None:
    """On the ledger that the flags name."""
    (folder / "acme").mkdir()
    file, theirs = folder / "agents.py", folder / "acme" / "theirs.py"
    file.write_text(AGENTS)
    theirs.write_text(OF_TENANT)
    flags = (str(file), "--tenant", "acme", str(theirs), *more)
    soon = {"covenant.daemon.wiring.storage.MAINTENANCE_INTERVAL_MS": 250}
    daemon = Daemon(folder / "home", *flags, constants=soon)
    assert "agents.no_tenant" in daemon.log
    acme, beta = (daemon.json("tenants", "add", name)["token"] for name in ("acme", "beta"))
    operator = (daemon.home / "operator.token").read_text().strip()
    try:
        # The tenant has come: its agents are served from then on, without a restart.
        until(lambda: "agents.served agent=own tenant=acme" in daemon.log)
        assert said_to(daemon, "own", acme) == "for acme: hello"
        assert said_to(daemon, "quick", acme) == "for acme: hello"
        assert said_to(daemon, "quick", operator) == "VERSION hello"
        for agent, token in (("quick", beta), ("own", beta), ("own", operator), ("slow", acme)):
            assert "no agent" in said_to(daemon, agent, token)
        assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        daemon = Daemon(folder / "home", *flags, constants=soon)
        assert daemon.process.stdout is not None
        lines = [daemon.process.stdout.readline() for _ in range(5)]
        assert f"serving own of acme at {daemon.url}/v1/a2a/agents/own\n" in lines
        assert said_to(daemon, "own", acme) == "for acme: hello"
        # On a database its agents are known to other daemons: the removal goes on when that is forgotten.
        daemon.run("tenants", "remove", "acme", "--yes", "--reason", "over")
        until(lambda: {each["name"] for each in daemon.json("tenants", "list")["tenants"]} == {"default", "beta"})
        until(lambda: "agents.unregistered agent=own tenant=acme" in daemon.log)
        assert "for acme" not in said_to(daemon, "own", acme)
    finally:
        daemon.stop()


def test_an_agent_that_is_served_twice_for_one_tenant_is_refused(short_path: Path, file: Path) -> None:
    ran = covenant("serve", "--home", str(short_path / "home"), str(file), "--tenant", "default", str(file))
    assert ran.code != 0
    assert "agent 'quick' is in" in ran.err
