"""The simple door of a real daemon, with a program as its agent, killed and started again."""

import json
import signal
import stat
import sys
from pathlib import Path
from typing import Any, Self

import httpx2

from tests.cli.daemons import Daemon
from tests.waits import BOUND_S

PROGRAM = """\
import json, os, sys, time
daemon = os.getppid()
given = json.loads(sys.stdin.readline())
assert given["source"] == "agent"
print(json.dumps({"type": "assistant", "text": "You said: " + given["text"]}), flush=True)
while given["text"] == "wait" and os.getppid() == daemon:
    time.sleep(0.05)  # until its daemon is gone: a program that nobody ended would outlive the test
print(json.dumps({"type": "session_exited"}), flush=True)
"""


def agent_file(home: Path) -> None:
    home.mkdir(mode=0o700)
    program = home / "program.py"
    program.write_text(PROGRAM)
    (home / "agents").mkdir(mode=0o700)
    file = home / "agents" / "answerer.json"
    definition = {"kind": "process", "command": [sys.executable, str(program)], "default_project": "work"}
    file.write_text(json.dumps(definition))
    file.chmod(stat.S_IRUSR | stat.S_IWUSR)


class Caller:
    def __init__(self, daemon: Daemon) -> None:
        token = (daemon.home / "operator.token").read_text().strip()
        self.http = httpx2.Client(base_url=daemon.url, headers={"authorization": f"Bearer {token}"}, timeout=BOUND_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def send(self, message: str, **more: Any) -> dict[str, Any]:
        response = self.http.post("/a2a/tasks/send", json={"message": message, **more})
        assert response.status_code == 200, response.text
        task: dict[str, Any] = response.json()
        return task

    def get(self, task_id: str) -> dict[str, Any]:
        task: dict[str, Any] = self.http.get(f"/a2a/tasks/{task_id}").json()
        return task

    def until(self, task_id: str, event: str) -> list[str]:
        """The names of the events of a request until this one."""
        names = []
        with self.http.stream("GET", f"/v1/requests/{task_id}/events") as response:
            for line in response.iter_lines():
                if line.startswith("event: "):
                    names.append(line.removeprefix("event: "))
                    if names[-1] == event:
                        break
        return names


def test_a_program_in_a_file_answers_and_a_killed_daemon_forgets_none_of_it(short_path: Path) -> None:
    home = short_path / "home"
    agent_file(home)
    daemon = Daemon(home)
    try:
        with Caller(daemon) as caller:
            task = caller.send("Hello")
            assert caller.until(task["id"], "done")[-1] == "done"
            done = caller.get(task["id"])
            assert done["state"] == "completed"
            assert done["messages"][-1] == {"role": "agent", "parts": [{"type": "text", "text": "You said: Hello"}]}
            waiting = caller.send("wait", timeoutMs=600_000)
            caller.until(waiting["id"], "text")
    finally:
        daemon.stop(signal.SIGKILL)
    daemon = Daemon(home)
    try:
        with Caller(daemon) as caller:
            assert caller.get(task["id"]) == done
            lost = caller.get(waiting["id"])
            assert (lost["state"], lost["messages"][-1]["parts"][0]["text"]) == ("working", "You said: wait")
            assert caller.http.post(f"/v1/requests/{waiting['id']}/cancel").json()["cancelled"] is True
            assert caller.get(waiting["id"])["state"] == "failed"
            listed = caller.http.get("/v1/requests").json()["requests"]
            assert [each["request_id"] for each in listed] == [waiting["id"], task["id"]]
            assert caller.http.get("/openapi.json").json()["paths"].keys() >= {"/a2a/tasks/send", "/v1/requests"}
    finally:
        assert daemon.stop() == 0


CALLING_BACK = """\
import json, pathlib
from covenant import Agent
from covenant.simple import invoke_remote_agent

agent = Agent("again", default_project="work")


@agent
async def call_the_other(turn):
    other = json.loads(pathlib.Path(__file__).with_name("other.json").read_text())
    task = turn.task
    result = await invoke_remote_agent(
        other["url"], turn.text, token=other["token"], poll_interval_ms=50, allow_private=("127.0.0.1",),
        depth=task.depth, chain=(*task.chain, task.recipient.pubkey),
    )
    return result.response_text or result.error
"""


def test_a_circle_through_two_simple_doors_ends_where_it_would_close(short_path: Path) -> None:
    daemons = []
    try:
        for name in ("a", "b"):
            (short_path / name).mkdir()
            (short_path / name / "agents.py").write_text(CALLING_BACK)
            daemons.append(Daemon(short_path / name / "home", str(short_path / name / "agents.py")))
        for here, there in (daemons, daemons[::-1]):
            token = (there.home / "operator.token").read_text().strip()
            (here.home.parent / "other.json").write_text(json.dumps({"url": there.url, "token": token}))
        with Caller(daemons[0]) as caller:
            task_id = caller.send("round and round")["id"]
            caller.until(task_id, "done")
            said = caller.get(task_id)["messages"][-1]["parts"][0]["text"]
        assert "again@default is in this chain of calls already, 2 calls up" in said
        for daemon in daemons:
            with Caller(daemon) as caller:
                assert caller.http.get("/v1/requests").json()["count"] == 1
    finally:
        for daemon in daemons:
            daemon.stop()


def test_the_names_that_others_use_in_the_environment_are_honoured_where_ours_are_not(short_path: Path) -> None:
    home = short_path / "home"
    agent_file(home)
    daemon = Daemon(home, env={"BIND_HOST": "127.0.0.2", "A2A_INBOUND_RATE_LIMIT_PER_MIN": "1"})
    try:
        assert daemon.url.startswith("http://127.0.0.2:")
        with Caller(daemon) as caller:
            caller.send("Hello")
            response = caller.http.post("/a2a/tasks/send", json={"message": "Hello"})
            assert response.status_code == 429
            assert 0 < int(response.headers["retry-after"]) <= 60
    finally:
        assert daemon.stop() == 0
