"""What is misspelt where rights are given is refused with the word that was meant, and gives nobody anything."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.cli.daemons import Daemon, covenant
from tests.hostile.client import operator_token
from tests.hostile.conftest import StartDaemon
from tests.hostile.doors import Client, Ipc

SEND = "a2a.send.sink@here"
PEER = "friday_" + "a" * 40

SLIPS: list[tuple[str, str, str, dict[str, Any], str]] = [
    ("POST", "/capabilities/grant", "grant_capability", {"action": SEND, "scope": {"max_use": 1}}, "max_uses"),
    ("POST", "/capabilities/grant", "grant_capability", {"action": SEND, "scope": {"task": "x"}}, "task_id"),
    ("POST", "/capabilities/grant", "grant_capability", {"action": SEND, "scope": {"leaseid": "x"}}, "lease_id"),
    ("POST", "/capabilities/grant", "grant_capability", {"action": SEND, "expire_at": 1}, "expires_at"),
    ("POST", "/capabilities/grant", "grant_capability", {"action": "a2a.sned.sink@here"}, SEND),
    ("POST", "/capabilities/grant", "grant_capability", {"action": "a2a.respnd.sink@here"}, "a2a.respond.sink@here"),
    ("POST", "/capabilities/grant", "grant_capability", {"action": "a2a.repair.requeu"}, "a2a.repair.requeue"),
    ("POST", "/capabilities/grant", "grant_capability", {"action": "a2a.compct"}, "a2a.compact"),
    ("POST", "/identities/enroll", "enroll_identity", {"display": "x@here", "action": ["a2a.compact"]}, "actions"),
    (
        "POST",
        "/identities/enroll",
        "enroll_identity",
        {"display": "x@here", "actions": ["a2a.compactt"]},
        "a2a.compact",
    ),
    ("POST", "/v1/admin/tenants", "add_tenant", {"name": "acme", "limit": {"burst": 1}}, "limits"),
    ("POST", "/v1/admin/tenants", "add_tenant", {"name": "acme", "limits": {"rate_per_minute": 1}}, "rate_per_min"),
    ("PATCH", "/v1/admin/tenants/default", "change_tenant", {"name": "default", "disable": True}, "disabled"),
    (
        "POST",
        "/v1/admin/tenants/default/agents",
        "add_agent",
        {"agent_def": {"id": "x", "mcp_tool_permission": []}},
        "mcp_tool_permissions",
    ),
    ("POST", "/a2a/retry-stale", "retry_a2a_stale", {"max_requeue": 1}, "max_requeues"),
]


@pytest.mark.parametrize("door", ["http", "ipc"])
def test_a_slip_is_refused_with_the_nearest_right_word_and_gives_nothing(daemon: Daemon, door: str) -> None:
    operator = Client(daemon, operator_token(daemon.home))
    wrapped = {"retry_a2a_stale": "policy"}
    with closing(Ipc(daemon.home, operator_token(daemon.home))) as ipc:
        for method, path, kind, fields, meant in SLIPS:
            if door == "http":
                answer = operator.ask(method, path, fields)
                assert answer.status == 400, (fields, answer)
                said = answer.body.decode()
            else:
                given = {wrapped[kind]: fields} if kind in wrapped else fields
                told = ipc.ask(kind, **given)
                assert told["kind"] == "error", (fields, told)
                said = told["message"]
            assert "did you mean" in said, said
            assert f"{meant}?" in said, said
    assert operator.ask("GET", "/capabilities/recent").json["capabilities"] == []
    assert {row["name"] for row in operator.ask("GET", "/v1/admin/tenants").json["tenants"]} == {"default"}
    assert "x@here" not in operator.ask("GET", "/identities/list").body.decode()


def test_the_command_line_says_the_nearest_right_word(daemon: Daemon) -> None:
    for words, meant in (
        (("capabilities", "grant", SEND, "--scope", '{"max_use": 1}'), "max_uses"),
        (("capabilities", "grant", "a2a.repair.forceerror"), "a2a.repair.force_error"),
        (("identities", "enroll", "x@here", "--grant", "a2a.rspond.y@here"), "a2a.respond.y@here"),
    ):
        ran = daemon.run(*words)
        assert ran.code != 0
        assert f"did you mean {meant}?" in ran.err, ran
    assert daemon.json("capabilities", "recent")["capabilities"] == []


def test_peers_are_not_changed_by_a_slip(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(env={"COVENANT_PEERS_ENABLED": "1"})
    operator = Client(daemon, operator_token(daemon.home))
    for method, path, fields, meant in (
        ("POST", "/api/v1/a2a/peers", {"ur": "http://127.0.0.1:9/"}, "url"),
        ("PATCH", f"/api/v1/a2a/peers/{PEER}", {"denid": True}, "denied"),
        ("PATCH", f"/api/v1/a2a/peers/{PEER}", {"limits": {"budgetMx": 1}}, "budgetMax"),
        ("POST", "/api/v1/a2a/delegate", {"task": "go", "profile": "x", "maxTokenBudgt": 1}, "maxTokenBudget"),
    ):
        answer = operator.ask(method, path, fields)
        assert answer.status == 400, (fields, answer)
        assert f"did you mean {meant}?" in answer.body.decode(), answer


@pytest.mark.parametrize(
    ("name", "written", "meant"),
    [
        ("mcp_servers.json", {"server": {}}, "servers"),
        ("mcp_servers.json", {"servers": {"hub": {"command": "x", "tenant": ["acme"]}}}, "tenants"),
    ],
)
def test_a_file_of_the_home_with_a_slip_is_refused_at_the_start(
    short_path: Path, name: str, written: Any, meant: str
) -> None:
    home = short_path / "home"
    home.mkdir(mode=0o700)
    (home / name).write_text(json.dumps(written))
    ran = covenant("serve", "--home", str(home), "--http-port", "0")
    assert ran.code != 0
    assert f"did you mean {meant}?" in ran.err


def test_a_registry_of_remote_agents_with_a_slip_has_no_such_entry(start_daemon: StartDaemon, short_path: Path) -> None:
    home = short_path / "home"
    home.mkdir(mode=0o700)
    file = home / "a2a_agents.json"
    file.write_text(json.dumps({"agents": {"weather": {"url": "https://weather.example/", "tenant": ["acme"]}}}))
    daemon = start_daemon()
    assert "did you mean tenants?" in daemon.run("call", "weather", "hello", "--home", str(home)).err
    file.write_text(json.dumps({"agent": {"weather": {"url": "https://weather.example/"}}}))
    assert "did you mean agents?" in daemon.run("call", "weather", "hello", "--home", str(home)).err
