"""`covenant call` and `covenant card get`, against a real daemon: answers, questions, Ctrl-C, and exit codes."""

import json
import re
import signal
import subprocess
from pathlib import Path
from uuid import uuid4

import pytest

from covenant.cli.a2a_servers import _ChunkedText
from tests.cli.daemons import COVENANT, Daemon, Ran, covenant, environment, said_until, started
from tests.waits import BOUND_S, LONGER_S

SAYS = """printf '%s\\n' '{"type":"status","text":"looking"}' '{"type":"assistant","text":"hello "}' \
'{"type":"assistant","text":"there"}'"""
ASKS = """printf '%s\\n' '{"type":"approval_request","text":"may I?"}'"""
FAILS = """printf '%s\\n' '{"type":"error","message":"no luck"}'"""
STAYS = """printf '%s\\n' '{"type":"assistant","text":"begun\\n"}'; exec sleep 600"""


def agent(daemon: Daemon, script: str) -> str:
    """The URL of an agent that runs this script for each turn."""
    path = daemon.home / f"{uuid4().hex}.sh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    agent_id = f"a-{uuid4().hex[:8]}"
    daemon.json("agents", "add", agent_id, "--command", str(path))
    return f"{daemon.url}/v1/a2a/agents/{agent_id}"


def call(daemon: Daemon, url: str, *words: str, env: dict[str, str] | None = None) -> Ran:
    token = str(daemon.home / "operator.token")
    return covenant("call", url, "go", "--home", str(daemon.home), "--token-file", token, *words, env=env)


@pytest.mark.parametrize("how", [[], ["--stream"], ["--poll"]], ids=" ".join)
def test_the_answer_is_written_and_nothing_else(daemon: Daemon, how: list[str]) -> None:
    ran = call(daemon, agent(daemon, SAYS), *how)
    assert (ran.code, ran.out, ran.err) == (0, "hello there\n", "")


@pytest.mark.parametrize("how", [[], ["--stream"]], ids=" ".join)
def test_what_is_piped_keeps_every_byte(daemon: Daemon, how: list[str]) -> None:
    colourful = """printf '%s\\n' '{"type":"assistant","text":"\\u001b[31mred\\u001b[0m"}'"""
    assert call(daemon, agent(daemon, colourful), *how).out == "\x1b[31mred\x1b[0m\n"


def test_json_is_one_object_with_the_answer_and_what_was_made(daemon: Daemon) -> None:
    answer = call(daemon, agent(daemon, SAYS), "--json").json
    assert (answer["kind"], answer["state"], answer["text"]) == ("remote_reply", "completed", "hello there")
    assert answer["way"] == "JSONRPC 1.0"
    assert answer["artifacts"][0]["parts"] == [{"type": "text", "text": "hello there"}]


def test_the_question_of_an_agent_of_this_home_is_answered_by_the_beginning_of_the_tasks_id(daemon: Daemon) -> None:
    name = agent(daemon, ASKS).rpartition("/")[2]
    asked = daemon.run("call", name, "go", "--json").json
    again = daemon.run("call", name, "yes", "--task", asked["task_id"][:9], "--json").json
    assert (again["state"], again["task_id"]) == ("input-required", asked["task_id"])
    unknown = daemon.run("call", name, "yes", "--task", "ffffffff-ffff")
    assert (unknown.code, "no task begins with" in unknown.err) == (1, True)


def test_a_task_that_failed_exits_with_1_and_says_why(daemon: Daemon) -> None:
    ran = call(daemon, agent(daemon, FAILS))
    assert (ran.code, ran.err) == (1, "covenant: the task was not completed: failed\n")
    assert "no luck" in ran.out


def test_a_question_is_written_with_how_to_answer_it(daemon: Daemon) -> None:
    ran = call(daemon, agent(daemon, ASKS))
    assert (ran.code, ran.out) == (1, "may I?\n")
    assert "input-required" in ran.err
    assert "--task " in ran.err


def test_nobody_there_exits_with_3(daemon: Daemon) -> None:
    ran = call(daemon, "http://127.0.0.1:9/agent", "--json")
    assert (ran.code, ran.json["code"]) == (3, "connect_failed")


def test_who_calls_an_agent_of_a_home_without_a_daemon_is_told_to_start_one(short_path: Path) -> None:
    (home := short_path / "empty").mkdir(mode=0o700)
    (home / "operator.token").touch(mode=0o600)
    (home / "operator.token").write_text("token")
    for code in ("unknown_remote", "connect_failed"):
        ran = covenant("--home", str(home), "call", "echo", "hello", "--json")
        assert (ran.json["code"], f"covenant serve --home {home}" in ran.json["message"]) == (code, True)
        (home / "http.url").write_text("http://127.0.0.1:9")  # a killed daemon leaves it


@pytest.mark.parametrize("words", [["call", "ftp://x", "go"], ["call", "http://x"], ["card", "get"]], ids=" ".join)
def test_wrong_usage_exits_with_2(daemon: Daemon, words: list[str]) -> None:
    assert daemon.run(*words).code == 2


def test_without_its_token_an_agent_refuses(daemon: Daemon) -> None:
    ran = covenant("call", agent(daemon, SAYS), "go", "--home", str(daemon.home), "--json")
    assert (ran.code, ran.json["code"]) == (1, "unauthenticated")
    assert "--token-file FILE or --token-env NAME" in ran.err


def test_a_timeout_ends_it_at_both_ends(daemon: Daemon) -> None:
    url, told = agent(daemon, STAYS), []
    for seconds in LONGER_S:
        before = in_flight(daemon)
        ran = call(daemon, url, "--timeout", f"{seconds:g}s", "--json")
        assert (ran.code, ran.json["code"]) == (1, "timed_out")
        told.append(ran.json["message"])
        if "was told to stop" in told[-1]:
            assert in_flight(daemon) == before
            return
    pytest.fail(f"{told}")


def test_ctrl_c_ends_it_at_both_ends(daemon: Daemon) -> None:
    before = in_flight(daemon)
    words = ["call", agent(daemon, STAYS), "go", "--stream", "--home", str(daemon.home)]
    with started(
        [COVENANT, *words, "--token-file", daemon.home / "operator.token"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(PYTHONUNBUFFERED="1"),
    ) as process:
        assert said_until(process, b"begun\n") == "begun\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=BOUND_S)
        assert process.returncode == 1
    assert re.fullmatch(r"covenant: canceled; task [0-9a-f-]{36} was told to stop\n", err.decode())
    assert in_flight(daemon) == before


def in_flight(daemon: Daemon) -> int:
    count = daemon.json("a2a", "status", "--counts")["counts"]["in_flight"]
    assert isinstance(count, int)
    return count


def test_the_tree_tells_how_long_it_took(daemon: Daemon) -> None:
    task_id = call(daemon, agent(daemon, SAYS), "--json").json["task_id"]
    (shown,) = filter(None, daemon.run("a2a", "tree", task_id).out.splitlines())
    assert re.search(r"^ok \S+ a-\w+@default \((\d+ms|\d+\.\ds)\) go$", shown), shown


def test_a_name_in_the_home_is_as_good_as_a_url(daemon: Daemon) -> None:
    entry = {"url": agent(daemon, SAYS), "auth": {"token_env": "ECHO_TOKEN"}}
    (daemon.home / "a2a_agents.json").write_text(json.dumps({"agents": {"echo": entry, "bad": {}}}))
    token = (daemon.home / "operator.token").read_text().strip()
    assert daemon.run("call", "echo", "go", env={"ECHO_TOKEN": token}).out == "hello there\n"
    assert daemon.run("card", "get", "echo", env={"ECHO_TOKEN": token}).code == 0
    for name, said in (
        ("bad", "the entry 'bad' cannot be used"),
        ("nobody", "no agent 'nobody' for this tenant"),
        ("echo", "has its token in the variable ECHO_TOKEN, which is not set"),
    ):
        ran = daemon.run("call", name, "go")
        assert (ran.code, said in ran.err) == (1, True)


def test_an_agent_of_the_homes_own_daemon_is_called_by_its_name(daemon: Daemon) -> None:
    name = agent(daemon, SAYS).rpartition("/")[2]
    (daemon.home / "a2a_agents.json").unlink(missing_ok=True)
    assert daemon.run("call", name, "go").out == "hello there\n"
    assert f"called by: JSONRPC 1.0 at {daemon.url}/v1/a2a/agents/{name}" in daemon.run("card", "get", name).out
    entry = {"url": f"{daemon.url}/v1/a2a/agents/nobody", "auth": {"token_env": "NOBODYS_TOKEN"}}
    (daemon.home / "a2a_agents.json").write_text(json.dumps({"agents": {name: entry}}))
    try:
        said = daemon.run("call", name, "go")
        assert (said.code, "NOBODYS_TOKEN" in said.err) == (1, True), "the file's names come first"
    finally:
        (daemon.home / "a2a_agents.json").unlink()


def test_a_card_is_shown_and_its_signature_checked(daemon: Daemon) -> None:
    url, token = agent(daemon, SAYS), str(daemon.home / "operator.token")
    shown = covenant("card", "get", url, "--token-file", token, "--verify", "--home", str(daemon.home))
    assert shown.code == 0
    assert f"called by: JSONRPC 1.0 at {url}" in shown.out
    assert "signed by: " in shown.out
    answer = covenant("card", "get", url, "--token-file", token, "--json", "--home", str(daemon.home)).json
    assert (answer["signed_by"], answer["ways"][0]["url"]) == (None, url)


def test_a_message_can_come_by_standard_input(daemon: Daemon, tmp_path: Path) -> None:
    url = agent(daemon, "cat >/dev/null; " + SAYS)
    token = str(daemon.home / "operator.token")
    ran = covenant("call", url, "-", "--token-file", token, "--home", str(daemon.home), stdin="a long text\n")
    assert (ran.code, ran.out) == (0, "hello there\n")


@pytest.mark.parametrize(
    ("second", "written"),
    [
        pytest.param("one two three", "one two three", id="the same and more"),
        pytest.param("one two ", "one two ", id="the same"),
        pytest.param("one", "one two \none", id="less"),
        pytest.param("one more", "one two \none more", id="something else"),
        pytest.param("three", "one two \nthree", id="something else at once"),
    ],
)
def test_a_second_attempt_is_written_where_it_says_something_new(second: str, written: str) -> None:
    chunks = [("one ", False), ("two ", True), (second[:1], False), *((each, True) for each in second[1:])]
    shown = _ChunkedText()
    assert "".join([*(shown.add(text, append=append) for text, append in chunks), shown.end()]) == written


def test_an_identity_of_the_mailbox_that_is_called_as_an_agent_is_told_with_the_command_for_it(daemon: Daemon) -> None:
    name = f"clerk-{uuid4().hex[:8]}"
    daemon.json("identities", "enroll", f"{name}@host")
    refused = daemon.run("call", name, "go")
    assert refused.code == 1
    assert f"{name}@host is an identity of the mailbox" in refused.err
    assert f"covenant a2a send --to {name}@host --wait MESSAGE" in refused.err
    assert "no agent 'nobody'" in daemon.run("call", "nobody", "go").err
