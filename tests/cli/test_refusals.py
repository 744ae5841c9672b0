"""How commands fail: the exit code, the words on stderr, and one JSON object where that was asked for."""

import socket
import struct
import threading
from pathlib import Path
from uuid import uuid4

import pytest

from tests.cli.daemons import Daemon, covenant
from tests.waits import BOUND_S


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["a2a", "show", str(uuid4())], "unknown_task", "was not found"),
        (["a2a", "show", "zz"], "unknown_task", "no task begins with 'zz'"),
        (["a2a", "show", "z" * 40], "invalid_id", "must be a UUID"),
        (["a2a", "send", "--to", "nobody@host", "x"], "unknown_recipient", "enroll"),
        (["a2a", "send", "--to", "bob@host", " "], "invalid_task", "must not be empty"),
        (["a2a", "send", "--to", "bob@host", "--deadline-ms", "1", "x"], "deadline_past", "deadline"),
        (
            ["a2a", "requeue", str(uuid4()), "--reason", "r", "--duplicate-risk", "idempotent"],
            "unknown_task",
            "not found",
        ),
        (["a2a", "results", "--limit", "100000"], "invalid_limit", "between 1 and"),
        (["identities", "enroll", "no name"], "invalid_agent_id", "name@host"),
        (["identities", "enroll", "bob@host"], "display_taken", "enrolled already"),
        (["identities", "revoke", "nobody@host"], "unknown_identity", "no identity begins with"),
        (["identities", "revoke", "operator@local"], "self_revoke_forbidden", "--force"),
        (["tenants", "add", "default"], "tenant_exists", "already"),
        (["tenants", "add", "no@name"], "invalid_tenant", "letters"),
        (["tenants", "disable", "nobody"], "unknown_tenant", "no tenant"),
        (["tenants", "rotate", "nobody"], "unknown_tenant", "no tenant"),
        (["agents", "list", "--tenant", "nobody"], "unknown_tenant", "no tenant"),
        (["agents", "show", "nobody"], "unknown_agent", "no agent"),
        (["agents", "remove", "index"], "agent_immutable", "built in"),
        (["agents", "add", "index"], "invalid_agent", "/id: "),
        (["agents", "add", "a b"], "invalid_agent", "/id: "),
        (["agents", "add", "x", "--kind", "process"], "invalid_agent", "/command: "),
        (["agents", "add", "x", "--file", "/nowhere/x.json"], "invalid_agent", "cannot be read"),
        (["identities", "enroll", "client@default"], "display_reserved", "is an agent of this daemon"),
        (["identities", "enroll", "index@default"], "display_reserved", "is an agent of this daemon"),
        (["capabilities", "grant", "nonsense"], "invalid_action", "is not an action"),
        (["capabilities", "grant", "a2a.send.zzzz"], "unknown_prefix", "bob@host"),
        (["capabilities", "grant", "a2a.send.x@y", "--expires-at", "1"], "invalid_expiry", "past"),
    ],
)
def test_a_refusal_exits_with_1_and_names_its_code(daemon: Daemon, words: list[str], code: str, said: str) -> None:
    ran = daemon.run(*words, "--json")
    assert ran.code == 1, ran
    assert (ran.json["kind"], ran.json["code"]) == ("error", code)
    assert said in ran.json["message"]
    assert ran.err.startswith("covenant: ")
    plain = daemon.run(*words)
    assert (plain.code, plain.out) == (1, "")
    assert said in plain.err


@pytest.mark.parametrize(
    "words",
    [
        ["a2a", "nonsense"],
        ["nonsense"],
        ["a2a", "status", "--no-such-flag"],
        ["a2a", "status", "--state", "asleep"],
        ["a2a", "status", "--limit", "0"],
        ["a2a", "requeue", "id"],
        ["a2a", "requeue", "id", "--reason", "r", "--duplicate-risk", "unsafe"],
        ["a2a", "respond", "id"],
        ["a2a", "respond", "id", "x", "--error", "e", "--partial"],
        ["a2a", "send", "--to", "bob@host", "--idempotent", "x"],
        ["a2a", "send", "--to", "bob@host", "--deadline-in", "soon", "x"],
        ["a2a", "send", "--to", "bob@host", "--deadline-in", "1m", "--deadline-ms", "1", "x"],
        ["a2a", "results", "--next", "--recent"],
        ["agents", "add"],
        ["agents", "add", "x", "--kind", "function"],
        ["agents", "add", "x.json"],
        ["tenants", "add"],
        ["tenants", "add", "x", "--burst", "-1"],
        ["a2a", "results", "--next", "--limit", "3"],
        ["a2a", "results", "--wait-ms", "3"],
        ["capabilities", "grant", "a2a.send.x@y", "--scope", "{"],
        ["capabilities", "grant", "a2a.send.x@y", "--scope", "[]"],
        ["capabilities", "purge"],
        ["audit", "purge", "--before-ms", "1", "--older-than-ms", "1"],
        ["identities", "list", "--live-only", "--revoked-only"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(daemon: Daemon, words: list[str]) -> None:
    ran = daemon.run(*words)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("Usage: ")


def test_without_a_daemon_a_command_exits_with_3_and_names_serve(tmp_path: Path) -> None:
    for words in (["a2a", "status"], ["audit", "verify"], ["identities", "list"]):
        ran = covenant("--home", str(tmp_path), *words, "--json")
        assert ran.code == 3
        assert ran.json["code"] == "daemon_unreachable"
        assert f"covenant serve --home {tmp_path}" in ran.err


def test_a_home_whose_daemon_is_gone_exits_with_3(short_path: Path) -> None:
    home = short_path / "gone"
    daemon = Daemon(home)
    assert daemon.stop() == 0
    ran = covenant("a2a", "status", env={"COVENANT_HOME": str(home)})
    assert (ran.code, ran.out) == (3, "")
    assert f"covenant serve --home {home}" in ran.err


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        struct.pack(">I", 5) + b"{}",
        struct.pack(">I", 2**32 - 1),
        struct.pack(">I", 2) + b"[]",
        struct.pack(">I", 1) + b"x",
    ],
    ids=["closes", "closes within a frame", "announces too much", "is no object", "is no JSON"],
)
def test_something_on_the_socket_that_is_no_daemon_exits_with_3(short_path: Path, answer: bytes) -> None:
    home = short_path / uuid4().hex[:8]
    home.mkdir()
    (home / "operator.token").write_text("token")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(home / "sock"))
        listener.listen()

        def reply() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        ran = covenant("--home", str(home), "a2a", "status", "--json")
        thread.join(BOUND_S)
    assert ran.code == 3
    assert ran.json["code"] == "daemon_unreachable"


@pytest.mark.parametrize("token", ["wrong", "1" * 44, "x" * 5_000], ids=["wrong", "well formed", "long"])
def test_a_wrong_token_is_refused(daemon: Daemon, token: str) -> None:
    ran = daemon.run("a2a", "status", env={"COVENANT_TOKEN": token})
    assert ran.code == 1
    assert "unknown or revoked token" in ran.err


def test_a_token_file_that_is_not_there_is_named(daemon: Daemon) -> None:
    ran = daemon.run("a2a", "status", "--token-file", "/nowhere/token")
    assert ran.code == 1
    assert "/nowhere/token" in ran.err


def test_an_identity_is_refused_what_is_the_operators(daemon: Daemon) -> None:
    token = (daemon.home / "bob.token").read_text()
    for words in (["identities", "list"], ["capabilities", "grant", "a2a.send.x@y"], ["audit", "verify"]):
        ran = daemon.run(*words, "--json", env={"COVENANT_TOKEN": token})
        assert (ran.code, ran.json["code"]) == (1, "operator_required")
    assert daemon.run("a2a", "status", env={"COVENANT_TOKEN": token}).code == 0


def test_the_start_of_a_key_stands_for_the_key(daemon: Daemon) -> None:
    listed = daemon.json("identities", "list", "--prefix", "bob@host")["identities"]
    pubkey = listed[0]["agent_id"]["pubkey"]
    granted = daemon.json("capabilities", "grant", f"a2a.send.{pubkey[:12]}")
    assert granted["action"] == f"a2a.send.{pubkey}"
    assert daemon.json("capabilities", "grant", f"a2a.send.{pubkey}")["action"] == f"a2a.send.{pubkey}"


def test_a_revoked_identity_is_no_longer_meant_by_its_key(daemon: Daemon) -> None:
    name = f"was-{uuid4().hex[:6]}@host"
    pubkey = daemon.json("identities", "enroll", name)["pubkey_b58"]
    daemon.json("identities", "revoke", name)
    ran = daemon.run("capabilities", "grant", f"a2a.send.{pubkey[:12]}")
    assert ran.code == 1
    assert "revoked identities only" in ran.err
    assert name in ran.err


def test_an_ambiguous_start_of_a_key_lists_whom_it_may_mean(daemon: Daemon) -> None:
    starts: dict[str, int] = {}
    while not any(count > 1 for count in starts.values()):
        pubkey = daemon.json("identities", "enroll", f"n-{uuid4().hex[:8]}@host")["pubkey_b58"]
        starts[pubkey[0]] = starts.get(pubkey[0], 0) + 1
    start = next(start for start, count in starts.items() if count > 1)
    ran = daemon.run("capabilities", "grant", f"a2a.respond.{start}")
    assert ran.code == 1
    assert ran.err.count("\n  ") >= 2
