"""Commands that go on with what happens: `show --follow`, `audit recent --follow`, `watch`; through a killed daemon."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.request import urlopen
from uuid import uuid4

import pytest

from covenant.cli.task_queries import FOLLOW_MS
from tests.cli.daemons import COVENANT, Daemon, environment, said_until, started
from tests.waits import BOUND_S, until

Running = subprocess.Popen[bytes]


@pytest.fixture
def restarted(short_path: Path) -> Iterator[Daemon]:
    """A daemon of the test's own, which it may kill and start again."""
    daemon = Daemon(short_path / uuid4().hex[:8])
    daemon.json("identities", "enroll", "bob@host")
    daemon.json("capabilities", "grant", "a2a.send.bob@host")
    yield daemon
    if daemon.process.poll() is None:
        daemon.stop(signal.SIGKILL)


def running(home: Path, *words: str) -> AbstractContextManager[Running]:
    pipe, env = subprocess.PIPE, environment(COLUMNS="80")
    return started([COVENANT, "--home", home, *words], stdout=pipe, stderr=pipe, env=env)


def killed_and_started(daemon: Daemon) -> Daemon:
    daemon.stop(signal.SIGKILL)
    return Daemon(daemon.home)


def test_a_task_is_followed_to_its_end_through_a_kill_of_the_daemon(restarted: Daemon) -> None:
    task_id = restarted.run("a2a", "send", "--to", "bob@host", "dig").out.strip()
    with running(restarted.home, "a2a", "show", task_id[:8], "--follow") as following:
        said_until(following, b"submitted")
        daemon = killed_and_started(restarted)
        try:
            daemon.json("a2a", "next", "--all")
            said_until(following, b" working")
            daemon.json("a2a", "cancel", task_id, "--reason", "enough")
            out, err = following.communicate(timeout=BOUND_S)
        finally:
            daemon.stop()
        assert following.returncode == 0
        *_, settled, last = out.decode().splitlines()
        assert settled.endswith("settled canceled: canceled: enough")
        assert last == "error: canceled: enough"
        assert b"the daemon is back" in err


def test_a_follower_that_fell_behind_by_more_than_a_page_is_told_every_update(short_path: Path) -> None:
    daemon = Daemon(short_path / "paged", "--limits-page-max", "3")
    try:
        script, go = daemon.home / "steps.sh", daemon.home / "go"
        steps = 'for n in 1 2 3 4 5 6 7 8 9; do printf \'{"type":"status","text":"step %s"}\\n\' $n; done'
        script.write_text(f"#!/bin/sh\nwhile [ ! -e {go} ]; do sleep 0.1; done\n{steps}\n")
        script.chmod(0o700)
        daemon.json("agents", "add", "steps", "--command", str(script))
        daemon.json("capabilities", "grant", "a2a.send.steps@default")
        task_id = daemon.run("a2a", "send", "--to", "steps@default", "go").out.strip()
        with running(daemon.home, "a2a", "show", task_id, "--follow") as following:
            said_until(following, b"working")
            following.send_signal(signal.SIGSTOP)
            go.touch()
            until(lambda: daemon.json("a2a", "show", task_id)["result"] is not None)
            following.send_signal(signal.SIGCONT)
            out, _ = following.communicate(timeout=BOUND_S)
            assert following.returncode == 0
        told = [line for line in out.decode().splitlines() if "step " in line]
        assert [line.rpartition("step ")[2].strip() for line in told] == [str(number) for number in range(1, 10)]
    finally:
        daemon.stop()


def test_a_followed_task_is_one_object_a_line_in_json(restarted: Daemon) -> None:
    task_id = restarted.run("a2a", "send", "--to", "bob@host", "dig").out.strip()
    with running(restarted.home, "a2a", "show", task_id, "--follow", "--json") as following:
        first = json.loads(said_until(following, b"\n"))
        restarted.json("a2a", "cancel", task_id, "--reason", "enough")
        out, _ = following.communicate(timeout=BOUND_S)
        last = json.loads(out.splitlines()[-1])
        assert (first["task"]["id"], first["result"]) == (task_id, None)
        assert last["generation"] > first["generation"]
        assert last["result"]["status"] == "error"


def test_audit_rows_are_told_as_they_are_written_each_once_through_a_kill(restarted: Daemon) -> None:
    with running(restarted.home, "audit", "recent", "--limit", "1", "--follow") as following:
        said_until(following, b"capability")
        restarted.json("identities", "enroll", "carol@host")
        said = said_until(following, b"carol@host")
        daemon = killed_and_started(restarted)
        try:
            daemon.json("identities", "enroll", "dave@host")
            said += said_until(following, b"dave@host")
        finally:
            daemon.stop()
        assert said.count("carol@host") == 1
        following.send_signal(signal.SIGINT)
        _, err = following.communicate(timeout=BOUND_S)
        assert following.returncode == 0
        assert b"the daemon is away" in err


def test_a_watched_queue_survives_a_kill_of_the_daemon(restarted: Daemon) -> None:
    with running(restarted.home, "a2a", "watch", "--every", "100ms") as watching:
        said_until(watching, b"nothing is queued")
        daemon = killed_and_started(restarted)
        try:
            daemon.json("a2a", "send", "--to", "bob@host", "dig")
            said_until(watching, b"1 queued")
        finally:
            daemon.stop()


def test_a_watched_queue_is_told_by_the_daemon_and_not_asked_for_at_intervals(restarted: Daemon) -> None:
    with running(restarted.home, "a2a", "watch", "--every", "100ms") as watching:
        began_s = time.monotonic()
        said_until(watching, b"nothing is queued")
        for number in range(3):
            restarted.json("a2a", "send", "--to", "bob@host", f"dig {number}")
            said_until(watching, b"%d queued" % (number + 1))
        until(lambda: time.monotonic() > began_s + 1.5)
        with urlopen(f"{restarted.url}/metrics", timeout=BOUND_S) as answer:
            lines = answer.read().decode().splitlines()
        (told,) = [line for line in lines if "_seconds_count{" in line and 'operation="a2a_queue"' in line]
        # One look at first, one for each change, and one whenever a wait is over. At intervals it would be fifteen.
        waits = (time.monotonic() - began_s) * 1000 // FOLLOW_MS
        assert float(told.split()[-1]) <= 4 + waits


def test_a_daemon_that_is_not_there_at_first_is_a_failure(short_path: Path) -> None:
    home = short_path / "nobody"
    home.mkdir(mode=0o700)
    (home / "operator.token").write_text("x")
    with running(home, "audit", "recent", "--follow") as following:
        following.communicate(timeout=BOUND_S)
        assert following.returncode == 3
