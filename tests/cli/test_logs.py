"""`covenant logs`: what agents of each kind wrote while they worked on a task, who may read it, and for how long."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from covenant.daemon.log_capture import FILE, FOLDER
from tests.cli.daemons import COVENANT, Daemon, environment, said_until, started
from tests.places import free_port, short_folder
from tests.waits import BOUND_S, until

AGENTS = """
import asyncio
import logging
import sys
import time

from covenant import Agent

plain, looped, apart, failing, slow, flood = (
    Agent(name, isolate=name == "apart") for name in ("plain", "looped", "apart", "failing", "slow", "flood")
)
log = logging.getLogger("clerk")


def write(turn):
    print("printed for", turn.text)
    print("unended", end="")
    sys.stderr.write("complained\\n")
    log.info("informed of %s", turn.text)
    log.warning("warned")
    log.debug("not kept")


@plain
def plainly(turn):
    write(turn)
    return "done"


@looped
async def on_the_loop(turn):
    write(turn)
    for n in range(2):  # one after the other: the texts of two prints may stand in one line
        await asyncio.to_thread(print, f"thread {n}")
    return "done"


@apart
def in_a_process(turn):
    write(turn)
    return "done"


@failing
def fails(turn):
    raise ValueError("a reason")


@slow
def slowly(turn):
    print("begun")
    yield "begun"
    time.sleep(600)


@flood
def floods(turn):
    for number in range(3_000):
        print("line", number)
    print("x" * 10_000)
    return "done"
"""
PROCESS = """#!{python}
import json, sys
json.loads(sys.stdin.readline())
print("complained", file=sys.stderr, flush=True)
for event in (
    {{"type": "log", "text": "informed", "level": "warning"}},
    {{"type": "assistant", "text": "done"}},
):
    print(json.dumps(event), flush=True)
"""


@pytest.fixture(scope="module")
def serving(short_path: Path) -> Iterator[Daemon]:
    file = short_path / "agents.py"
    file.write_text(AGENTS)
    started = Daemon(short_path / "serving", str(file))
    yield started
    started.stop(signal.SIGTERM)


def run(daemon: Daemon, agent: str, text: str = "work", *, ends: bool = True, token: str | None = None) -> str:
    """A task for this agent, by A2A; its id."""
    message = {"messageId": f"m-{text}", "role": "ROLE_USER", "parts": [{"text": text}]}
    params = {"message": message, "configuration": {"returnImmediately": not ends}}
    told = httpx2.post(
        f"{daemon.url}/v1/a2a/agents/{agent}",
        json={"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": params},
        headers={"authorization": f"Bearer {token or (daemon.home / 'operator.token').read_text().strip()}"},
        timeout=BOUND_S,
    ).json()
    task_id: str = told["result"]["task"]["id"]
    return task_id


def lines_of(daemon: Daemon, task_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = daemon.json("logs", task_id)["lines"]
    return found


@pytest.mark.parametrize("agent", ["plain", "looped", "apart"])
def test_what_a_function_prints_and_logs_is_in_the_log_of_its_task(serving: Daemon, agent: str) -> None:
    first, second = run(serving, agent, "first"), run(serving, agent, "second")
    for task_id, text in ((first, "first"), (second, "second")):
        lines = lines_of(serving, task_id)
        said = {(line["stream"], line["text"].removeprefix("clerk: "), line["level"]) for line in lines}
        assert {
            ("stdout", f"printed for {text}", "info"),
            ("stderr", "complained", "info"),
            ("log", f"informed of {text}", "info"),
            ("log", "warned", "warning"),
        } <= said
        assert ("stdout", "unended", "info") in said or agent == "looped"
        assert "not kept" not in str(lines)
        assert {line["writer"] for line in lines} == {"agent"}
        assert {line["attempt"] for line in lines} == {1}
        threads = {"thread 0", "thread 1"} if agent == "looped" else set()
        assert threads <= {line["text"].removeprefix("unended") for line in lines}
    people = serving.run("logs", first)
    assert "printed for first\n" in people.out
    assert "warning [clerk] warned" in people.out or agent == "apart"


def test_a_process_agents_words_beside_its_answer_are_in_the_log(serving: Daemon) -> None:
    program = serving.home / "teller"
    program.write_text(PROCESS.format(python=sys.executable))
    program.chmod(0o700)
    serving.json("agents", "add", "teller", "--command", str(program))
    lines = lines_of(serving, run(serving, "teller"))
    assert {(line["stream"], line["level"], line["text"]) for line in lines} == {
        ("stderr", "info", "complained"),
        ("log", "warning", "informed"),
    }


def test_a_line_that_is_no_event_can_be_found_again(serving: Daemon) -> None:
    program = serving.home / "stray"
    program.write_text("#!/bin/sh\necho segmentation fault\n")
    program.chmod(0o700)
    serving.json("agents", "add", "stray", "--command", str(program))
    assert ("stdout", "segmentation fault") in {
        (line["stream"], line["text"]) for line in lines_of(serving, run(serving, "stray"))
    }


def test_why_an_agent_failed_is_told_to_the_operator_alone(serving: Daemon) -> None:
    task_id = run(serving, "failing")
    (line,) = lines_of(serving, task_id)
    assert (line["writer"], line["level"], line["text"]) == ("daemon", "warning", "agent.failed")
    assert "ValueError: a reason" in line["traceback"]
    token = serving.json("identities", "enroll", "worker@default")["token_b58"]
    (serving.home / "worker.token").write_text(token)
    (seen,) = serving.json("--token-file", str(serving.home / "worker.token"), "logs", task_id)["lines"]
    assert seen["text"] == "agent.failed"
    assert "traceback" not in seen
    assert "fields" not in seen


def test_to_others_than_the_operator_and_the_tenant_there_is_no_such_task(serving: Daemon) -> None:
    task_id = run(serving, "plain", "secret")
    token = serving.json("identities", "enroll", "mallory@elsewhere")["token_b58"]
    (serving.home / "mallory.token").write_text(token)
    told = serving.json("--token-file", str(serving.home / "mallory.token"), "logs", task_id, code=1)
    assert told["code"] == "unknown_task"


def test_a_tenants_token_reads_the_logs_of_its_own_tasks(serving: Daemon) -> None:
    task_id = run(serving, "plain", "of-default")
    tokens = {"default": "rotate", "acme": "add"}
    told = {}
    for tenant, verb in tokens.items():
        token = serving.json("tenants", verb, tenant)["token"]
        answer = httpx2.get(
            f"{serving.url}/a2a/tasks/{task_id}/log", headers={"authorization": f"Bearer {token}"}, timeout=BOUND_S
        )
        told[tenant] = answer.status_code, "printed for of-default" in answer.text
    assert told == {"default": (200, True), "acme": (404, False)}


def test_an_identity_reads_the_logs_of_the_tenant_that_its_name_ends_with(serving: Daemon) -> None:
    token = serving.json("tenants", "add", "globex")["token"]
    (program := serving.home / "globex").write_text(PROCESS.format(python=sys.executable))
    program.chmod(0o755)
    serving.json("agents", "add", "echo", "--tenant", "globex", "--command", str(program))
    task_ids = {"default": run(serving, "plain"), "globex": run(serving, "echo", token=token)}
    told = {}
    for tenant in task_ids:
        file = serving.home / f"clerk-{tenant}.token"
        file.write_text(serving.json("identities", "enroll", f"clerk@{tenant}")["token_b58"])
        for of, task_id in task_ids.items():
            given = ("--token-file", str(file), "logs", task_id)
            told[tenant, of] = serving.json(*given, code=0 if tenant == of else 1).get("code")
    assert set(told.values()) == {None, "unknown_task"}


def test_the_newest_lines_of_a_flood_are_kept_and_long_ones_are_cut_up(serving: Daemon) -> None:
    told = serving.json("logs", run(serving, "flood"), "--limit", "1000")
    lines = [line["text"] for line in told["lines"]]
    assert len(lines) == 1_000
    assert told["left_out"] > 2_000
    assert lines[-4:] == ["line 2999", "x" * 4_096, "x" * 4_096, "x" * (10_000 - 2 * 4_096)]


def test_warnings_of_agents_carry_the_task_on_the_daemons_own_log(serving: Daemon) -> None:
    task_id = run(serving, "plain", "to-stderr")
    until(lambda: f"warning warned task_id={task_id}" in serving.log)
    assert "informed of to-stderr" not in serving.log


def test_following_a_log_goes_on_after_the_daemon_was_killed() -> None:
    with short_folder() as folder, ExitStack() as stack:
        file = folder / "agents.py"
        file.write_text(AGENTS)
        port = str(free_port())
        daemon = Daemon(folder / "home", str(file), "--http-port", port)
        try:
            task_id = run(daemon, "slow", ends=False)
            words = (COVENANT, "--home", daemon.home, "logs", task_id, "--follow")
            pipe = subprocess.PIPE
            follower = stack.enter_context(started(words, stdout=pipe, stderr=pipe, env=environment()))
            assert "begun" in said_until(follower, b"begun")
            until(lambda: b"begun" in (daemon.home / FOLDER / FILE).read_bytes())
            daemon.stop(signal.SIGKILL)
            daemon = Daemon(folder / "home", str(file), "--http-port", port)
            # What was logged before the kill is still told, and then what the daemon found.
            until(lambda: [line["text"] for line in lines_of(daemon, task_id)] == ["begun", "agent.lost"])
            daemon.json("a2a", "cancel", task_id, "--reason", "enough")
            out, err = follower.communicate(timeout=BOUND_S)
            assert follower.returncode == 0
            assert (out.count(b"begun"), out.count(b"agent.lost")) == (0, 1)  # the first was told before, once
            assert b"the daemon is away" in err
            assert b"the daemon is back" in err
        finally:
            daemon.stop(signal.SIGKILL)
