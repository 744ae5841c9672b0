"""Tenants and agents with a real daemon: by command, over HTTP, from files, and all of it again after a restart."""

import json
import signal
import sqlite3
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.cli.daemons import Daemon, Ran, covenant
from tests.places import short_folder
from tests.waits import BOUND_S


def ask(daemon: Daemon, token: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    request = urllib.request.Request(
        daemon.url + path,
        method=method,
        data=json.dumps(body).encode() if body is not None else None,
        headers={"Authorization": f"Bearer {token}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=BOUND_S) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.load(refused)


def ids(daemon: Daemon, token: str) -> list[str]:
    status, listed = ask(daemon, token, "GET", "/v1/agents")
    assert status == 200
    return [agent["id"] for agent in listed["agents"]]


def until(condition: Callable[[], bool]) -> None:
    """What another process does by itself, once a second: looked for, with a bound."""
    ends_s = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < ends_s, "it did not come about"


def add_tenant(daemon: Daemon, *more: str) -> tuple[str, str]:
    """A new tenant's name and token."""
    name = f"t-{uuid4().hex[:8]}"
    token = daemon.json("tenants", "add", name, *more)["token"]
    assert isinstance(token, str)
    return name, token


@pytest.fixture
def home() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder / "home"


def test_a_token_is_printed_once_alone_and_kept_nowhere(daemon: Daemon) -> None:
    ran = daemon.run("tenants", "add", "printed")
    token = ran.out.strip()
    assert (len(token), token[:4], ran.out) == (68, "atr_", f"{token}\n")
    assert "client@printed" in ran.err
    listed = daemon.run("tenants", "list").out
    assert token[:10] in listed
    assert token not in listed
    for path in daemon.home.rglob("*"):
        if path.is_file():
            assert token.encode() not in path.read_bytes(), path


def test_the_operators_token_speaks_for_the_first_tenant(daemon: Daemon) -> None:
    operator = (daemon.home / "operator.token").read_text().strip()
    agent_id = f"a-{uuid4().hex[:8]}"
    assert ask(daemon, operator, "POST", "/v1/agents", {"id": agent_id})[0] == 201
    assert agent_id in daemon.run("agents", "list").out
    assert daemon.json("agents", "show", agent_id)["identity"]["display"] == f"{agent_id}@default"


def test_a_disabled_tenant_and_a_replaced_token_are_refused_at_once(daemon: Daemon) -> None:
    name, token = add_tenant(daemon)
    assert ids(daemon, token) == ["index"]
    assert daemon.run("tenants", "disable", name).out == f"disabled {name}\n"
    assert ask(daemon, token, "GET", "/v1/agents")[0] == 401
    assert "disabled" in daemon.run("tenants", "list").out
    assert daemon.run("tenants", "enable", name).out == f"enabled {name}\n"
    assert ids(daemon, token) == ["index"]
    rotated = daemon.run("tenants", "rotate", name).out.strip()
    assert ask(daemon, token, "GET", "/v1/agents")[0] == 401
    assert ids(daemon, rotated) == ["index"]


def test_a_tenant_over_its_rate_is_told_so_until_its_limits_change(daemon: Daemon) -> None:
    name, token = add_tenant(daemon, "--rate-per-min", "1")
    assert ask(daemon, token, "GET", "/v1/agents")[0] == 200
    status, told = ask(daemon, token, "GET", "/v1/agents")
    assert (status, told["reason"]) == (429, "rate_limit")
    assert "9 a minute" in daemon.run("tenants", "limit", name, "--rate-per-min", "9").out
    assert daemon.run("tenants", "limit", name).out == f"{name}: the daemon's\n"
    assert ask(daemon, token, "GET", "/v1/agents")[0] == 200


def test_the_list_says_what_each_tenant_uses_of_its_limits_in_80_columns(daemon: Daemon) -> None:
    name, token = add_tenant(daemon, "--rate-per-min", "600", "--live-tasks", "3", "--kept-hours", "24")
    assert ask(daemon, token, "POST", "/v1/agents", {"id": "idle", "kind": "worker"})[0] == 201
    message = {"messageId": uuid4().hex, "role": "ROLE_USER", "parts": [{"text": "x" * 100}]}
    sent = {"message": message, "configuration": {"returnImmediately": True}}
    assert ask(daemon, token, "POST", "/v1/a2a/agents/idle/message:send", sent)[0] == 200
    (use,) = [each["use"] for each in daemon.json("tenants", "list")["tenants"] if each["name"] == name]
    assert (use["live_tasks"], use["concurrency"], use["streams"]["used"]) == (
        {"used": 1, "most": 3},
        {"used": 0, "most": 256},
        0,
    )
    assert use["requests"]["most"] == 600
    assert use["queued_bytes"]["used"] >= 100
    lines = daemon.run("tenants", "list", env={"COLUMNS": "80"}).out.splitlines()
    assert max(map(len, lines)) <= 80
    (wide,) = [line for line in daemon.run("tenants", "list").out.splitlines() if line.startswith(name)]
    assert "1/3 live tasks" in wide
    assert "24 hours kept" in wide


def test_an_agent_is_added_from_a_file_and_shown_to_people(daemon: Daemon, tmp_path: Path) -> None:
    name, token = add_tenant(daemon)
    file = tmp_path / "writer.toml"
    file.write_text('id = "writer"\nkind = "worker"\ndescription = "Writes \\u001b[31mthings"\n')
    ran = daemon.run("agents", "add", "--file", str(file), "--tenant", name)
    assert ran.out == f"added writer@{name} (worker)\n"
    assert f"identities enroll writer@{name}" in ran.err
    assert ids(daemon, token) == ["index", "writer"]
    shown = daemon.run("agents", "show", "writer", "--tenant", name).out
    assert f"writer@{name}  " in shown
    assert json.loads(shown[shown.index("{") :])["kind"] == "worker"
    listed = daemon.run("agents", "list", "--tenant", name).out
    assert "Writes" in listed
    assert "\x1b" not in listed
    assert daemon.run("agents", "remove", "writer", "--tenant", name).out == f"removed writer@{name}\n"
    file.write_text("colour = 1")
    refused = daemon.run("agents", "add", "x", "--file", str(file), "--tenant", name)
    assert (refused.code, refused.err) == (1, "covenant: unknown key /colour\n")


def test_a_worker_that_enrols_under_its_agents_name_leases_the_agents_tasks(daemon: Daemon) -> None:
    name, _ = add_tenant(daemon)
    daemon.json("agents", "add", "writer", "--tenant", name)
    who = daemon.json("agents", "show", "writer", "--tenant", name)["identity"]
    enrolled = daemon.json("identities", "enroll", f"writer@{name}")
    assert enrolled["pubkey_b58"] == who["pubkey"]
    daemon.json("capabilities", "grant", f"a2a.send.writer@{name}")
    task_id = daemon.json("a2a", "send", "--to", f"writer@{name}", "write")["task_id"]
    leased = daemon.run("a2a", "next", "--json", env={"COVENANT_TOKEN": enrolled["token_b58"]}).json
    assert leased["task"]["id"] == task_id
    assert leased["task"]["recipient"] == who


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_keeps_tenants_agents_tokens_and_keys(home: Path, number: int) -> None:
    daemon = Daemon(home)
    name, token = add_tenant(daemon, "--concurrency", "3")
    gone, old = add_tenant(daemon)
    daemon.json("tenants", "disable", gone)
    assert ask(daemon, token, "POST", "/v1/agents", {"id": "writer", "kind": "worker", "goal": "write"})[0] == 201
    assert ask(daemon, token, "POST", "/v1/agents", {"id": "another"})[0] == 201
    daemon.json("a2a", "compact", code=1)
    before = (daemon.json("tenants", "list"), daemon.json("agents", "list", "--tenant", name))
    shown = daemon.json("agents", "show", "writer", "--tenant", name)
    assert daemon.stop(number) in (0, -signal.SIGKILL)

    daemon = Daemon(home)
    assert (daemon.json("tenants", "list"), daemon.json("agents", "list", "--tenant", name)) == before
    assert daemon.json("agents", "show", "writer", "--tenant", name) == shown
    assert ids(daemon, token) == ["index", "writer", "another"]
    assert ask(daemon, old, "GET", "/v1/agents")[0] == 401
    assert daemon.json("audit", "verify")["report"]["valid"] is True
    assert daemon.stop() == 0


def test_files_are_read_at_the_start_and_when_they_change(home: Path) -> None:
    folder = home / "agents"
    folder.mkdir(parents=True)
    home.chmod(0o700)
    (folder / "writer.json").write_text('{"kind": "worker", "goal": "write"}')
    (folder / "bad.json").write_text('{"advisor": {"model": "m", "mode": "loud"}}')
    daemon = Daemon(home)
    assert "agents/bad.json" in daemon.log
    assert "/advisor/mode: " in daemon.log
    agents = daemon.json("agents", "list")["agents"]
    assert [(agent["id"], agent["source"]) for agent in agents] == [("index", "builtin"), ("writer", "file")]
    refused = daemon.run("agents", "remove", "writer")
    assert (refused.code, "change it there" in refused.err) == (1, True)
    checked = covenant("doctor", "--home", str(home))
    assert checked.code == 1
    assert "agents/bad.json: /advisor/mode: " in checked.out

    (folder / "bad.json").write_text('{"advisor": "m"}')
    (folder / "writer.json").unlink()
    until(lambda: [agent["id"] for agent in daemon.json("agents", "list")["agents"]] == ["index", "bad"])
    daemon.json("tenants", "add", "acme")
    (folder / "acme").mkdir()
    (folder / "acme" / "theirs.toml").write_text('kind = "worker"\n')
    until(lambda: daemon.json("agents", "list", "--tenant", "acme")["count"] == 2)
    assert daemon.stop() == 0
    assert covenant("doctor", "--home", str(home)).code == 0


SEND = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage"}


def send(daemon: Daemon, token: str, agent: str, text: str, key: str) -> tuple[int, Any]:
    params = {
        "message": {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": text}]},
        "metadata": {"covenant.idempotency": {"key": key}},
        "configuration": {"returnImmediately": True},
    }
    return ask(daemon, token, "POST", f"/v1/a2a/agents/{agent}", {**SEND, "params": params})


def refused(daemon: Daemon, *words: str) -> Ran:
    ran = daemon.run(*words)
    assert ran.code == 1, ran
    return ran


def left_bytes(home: Path, *words: str) -> list[str]:
    """The files, but for the archive with its audit, that have one of the words."""
    found = (path for path in home.rglob("*") if path.is_file() and not path.name.startswith("archive.db"))
    return [path.name for path in found if any(word.encode() in path.read_bytes() for word in words)]


def test_a_removed_tenant_leaves_nothing_and_its_name_is_free(home: Path) -> None:
    daemon = Daemon(home)
    try:
        token = daemon.json("tenants", "add", "acme")["token"]
        other = daemon.json("tenants", "add", "acme-2")["token"]
        for name in ("acme", "acme-2"):
            daemon.json("agents", "add", "helper", "--tenant", name)
        daemon.json("identities", "enroll", "helper@acme")
        secret = f"secret-{uuid4().hex}"
        old = send(daemon, token, "helper", secret, "same key")[1]["result"]["task"]["id"]
        kept = send(daemon, other, "helper", "of another", "same key")[1]["result"]["task"]["id"]
        memory = home / "memory" / "acme"
        memory.mkdir(parents=True)
        (memory / "helper.json").write_text(secret)
        assert daemon.json("tenants", "traces", "acme", code=1)["left"] > 0
        assert daemon.json("tenants", "remove", "acme", "--dry-run")["holdings"]["live"] == {"queued": 1}
        at_work = refused(daemon, "tenants", "remove", "acme", "--reason", "over", "--yes")
        assert "1 queued at helper@acme" in at_work.err
        assert send(daemon, token, "helper", "still", "2")[0] == 200
        removed = daemon.json("tenants", "remove", "acme", "--reason", "over", "--yes", "--cancel-live")
        assert (removed["done"], removed["left"], removed["tasks"], removed["canceled"]) == (True, 0, 2, 2)
        assert len(removed["places"]) > 10
        assert send(daemon, token, "helper", "again", "3")[0] == 401
        assert daemon.json("tenants", "traces", "acme")["left"] == 0
        assert left_bytes(home, secret, '@acme"') == []
        with sqlite3.connect(f"file:{home}/archive.db?mode=ro", uri=True) as archive:
            assert secret not in "\n".join(archive.iterdump())
        assert daemon.run("audit", "verify").code == 0
        assert refused(daemon, "a2a", "show", old).err
        anew = daemon.json("tenants", "add", "acme")["token"]
        assert ids(daemon, anew) == ["index"]
        daemon.json("agents", "add", "helper", "--tenant", "acme")
        status, answer = send(daemon, anew, "helper", "something else", "same key")
        assert (status, answer["result"]["task"]["status"]["state"]) == (200, "TASK_STATE_SUBMITTED")
        assert answer["result"]["task"]["id"] != old
        assert ask(daemon, anew, "GET", f"/a2a/tasks/{old}")[0] in (403, 404)
        assert daemon.json("a2a", "show", kept)["state"] == "queued"
    finally:
        daemon.stop()


def test_only_the_operator_removes_a_tenant_and_never_the_first_one(daemon: Daemon) -> None:
    name, token = add_tenant(daemon)
    path = f"/v1/admin/tenants/{name}/removal"
    body = {"dry_run": False, "reason": "mine", "cancel_live": True}
    assert ask(daemon, token, "POST", path, body)[0] == 401
    assert ask(daemon, token, "GET", f"/v1/admin/tenants/{name}/traces")[0] == 401
    operator = (daemon.home / "operator.token").read_text().strip()
    assert ask(daemon, operator, "POST", path, {**body, "reason": " "})[1]["code"] == "invalid_reason"
    assert ask(daemon, operator, "POST", path, {**body, "wait_ms": -1})[1]["code"] == "invalid_wait"
    assert ask(daemon, operator, "GET", path)[1]["code"] == "no_removal"
    assert "cannot be removed" in refused(daemon, "tenants", "remove", "default", "--reason", "x", "--yes").err
    assert "no tenant" in refused(daemon, "tenants", "remove", "nobody", "--reason", "x", "--yes").err
    assert name in daemon.run("tenants", "list").out


def test_a_file_with_a_trace_stops_a_removal_until_it_is_gone(home: Path) -> None:
    daemon = Daemon(home)
    try:
        daemon.json("tenants", "add", "acme")
        found = home / "journal.damaged-1"
        found.write_text('{"display":"client@acme"}')
        stopped = refused(daemon, "tenants", "remove", "acme", "--reason", "over", "--yes")
        assert "journal.damaged-1" in stopped.err
        assert daemon.json("tenants", "list")["tenants"][-1]["name"] == "acme"
        assert "is being removed" in refused(daemon, "tenants", "enable", "acme").err
        found.unlink()
        assert daemon.json("tenants", "remove", "acme", "--reason", "over", "--yes")["done"] is True
    finally:
        daemon.stop()
