"""How commands fail: the exit code, the words on stderr, and one JSON object where that was asked for."""

import socket
import struct
import subprocess
import threading
from pathlib import Path
from uuid import uuid4

import pytest

from covenant.cli.daemon_client import LISTED_BY
from tests.cli.daemons import COVENANT, Daemon, covenant, environment
from tests.waits import BOUND_S


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["a2a", "show", str(uuid4())], "unknown_task", "was not found"),
        (["a2a", "show", "zz"], "unknown_task", "no task begins with 'zz'; `covenant a2a list` lists"),
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
        (["identities", "revoke", "nobody@host"], "unknown_identity", "`covenant identities list` lists"),
        (["identities", "revoke", "operator@local"], "self_revoke_forbidden", "--force"),
        (["tenants", "add", "default"], "tenant_exists", "already"),
        (["tenants", "add", "no@name"], "invalid_tenant", "letters"),
        (["tenants", "disable", "nobody"], "unknown_tenant", "`covenant tenants list` lists"),
        (["tenants", "rotate", "nobody"], "unknown_tenant", "no tenant"),
        (["agents", "list", "--tenant", "nobody"], "unknown_tenant", "no tenant"),
        (["agents", "show", "nobody"], "unknown_agent", "no agent"),
        (["agents", "remove", "index"], "agent_immutable", "built in"),
        (["agents", "add", "index"], "invalid_agent", "/id: "),
        (["agents", "add", "a b"], "invalid_agent", "/id: must have 1 to 64 letters"),
        (["agents", "add", "x", "--kind", "process"], "invalid_agent", "/command: "),
        (["agents", "add", "x", "--file", "/nowhere/x.json"], "invalid_agent", "cannot be read"),
        (["identities", "enroll", "client@default"], "display_reserved", "is an agent of this daemon"),
        (["identities", "enroll", "index@default"], "display_reserved", "is an agent of this daemon"),
        (["capabilities", "revoke", "nothing"], "unknown_grant", "`covenant capabilities recent` lists"),
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
        ["agents", "add", "x", "--kind", "process", "--command", "'open"],
        ["a2a", "push", "list", "--limit", "-1"],
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
    ran = daemon.run(*words, "--json")
    assert (ran.code, ran.json["kind"], ran.json["code"]) == (2, "error", "wrong_usage")
    assert ran.json["message"] in ran.err


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


@pytest.mark.parametrize(
    "words", [["settings", "show"], ["a2a", "export"], ["audit", "recent", "--json"]], ids=" ".join
)
def test_a_full_disk_under_standard_output_is_told_in_a_sentence(daemon: Daemon, words: list[str]) -> None:
    daemon.run("a2a", "send", "--to", "bob@host", "x")
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [str(COVENANT), "--home", str(daemon.home), *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            timeout=BOUND_S,
            check=False,
        )
    assert ran.returncode == 1
    assert ran.stderr.startswith("covenant: standard output cannot be written: No space left")
    assert "Traceback" not in ran.stderr


def test_a_closed_standard_output_is_no_fault(daemon: Daemon) -> None:
    ran = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" >&-', str(COVENANT), "--home", str(daemon.home), "a2a", "status"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=BOUND_S,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("words", [["a2a", "status"], ["mcp"], ["call", "hello", "hi"]], ids=" ".join)
def test_a_token_that_is_no_token_is_named_by_where_it_is(daemon: Daemon, words: list[str]) -> None:
    ran = covenant("--home", str(daemon.home), *words, env={"COVENANT_TOKEN": "клю́ч"})
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == "covenant: COVENANT_TOKEN holds no token; name a file with one with --token-file\n"
    file = daemon.home.parent / "no.token"
    file.write_bytes(b"\xff\xfe")
    ran = covenant("--home", str(daemon.home), "--token-file", str(file), "a2a", "status")
    assert f"{file} holds no token" in ran.err


def test_an_agent_that_refuses_a_token_says_so(daemon: Daemon) -> None:
    file = daemon.home.parent / "other.token"
    file.write_text("other")
    ran = covenant("--home", str(daemon.home), "call", "index", "hi", "--token-file", str(file))
    assert "it does not accept the token that it was given" in ran.err


def test_a_call_that_reaches_nobody_names_whom_it_called(tmp_path: Path) -> None:
    ran = covenant("--home", str(tmp_path), "call", "http://127.0.0.1:1", "hi")
    assert ran.code == 3
    assert ran.err.startswith("covenant: http://127.0.0.1:1: no connection")


@pytest.mark.parametrize("words", [["peers", "rotate-identity"], ["passphrase"]], ids=" ".join)
def test_keys_of_a_home_without_keys_are_not_changed(tmp_path: Path, words: list[str]) -> None:
    ran = covenant("--home", str(tmp_path / "nowhere"), *words, "--json")
    assert (ran.code, ran.json["code"]) == (1, "no_key")
    assert "the first start makes one" in ran.err


def test_the_home_of_a_running_daemon_keeps_its_keys_and_one_sentence_says_why(daemon: Daemon) -> None:
    for words in (["peers", "rotate-identity"], ["passphrase"]):
        ran = daemon.run(*words)
        assert ran.code == 1
        assert ran.err.count("stop it first") == 1
    found = daemon.run("doctor").out
    assert "stop it first" not in found


def test_files_that_cannot_be_written_are_named_as_they_were_given(daemon: Daemon, tmp_path: Path) -> None:
    for words in (["backup", "/nowhere/x.tar"], ["a2a", "export", "/nowhere/x.tar"]):
        ran = daemon.run(*words)
        assert (ran.code, ran.err) == (1, "covenant: /nowhere/x.tar: No such file or directory\n")
    ran = covenant("--home", str(tmp_path / "home"), "init", str(tmp_path))
    assert (ran.code, "is a directory" in ran.err) == (2, True)
    assert not (tmp_path / "home").exists()


def test_a_restore_beyond_an_empty_folder_of_segments_says_where_they_end(daemon: Daemon, tmp_path: Path) -> None:
    backup, segments = tmp_path / "b.tar", tmp_path / "segments"
    segments.mkdir()
    assert daemon.run("backup", str(backup)).code == 0
    words = ["restore", str(backup), "--segments", str(segments), "--until"]
    ran = covenant("--home", str(tmp_path / "new"), *words, str(10**9))
    assert (ran.code, "give an earlier --until" in ran.err) == (1, True)
    ran = covenant("--home", str(tmp_path / "new"), *words, "soon")
    assert (ran.code, "'soon' is neither a position nor a time such as" in ran.err) == (2, True)


def test_a_name_that_no_running_daemon_has_is_not_said_to_need_a_daemon(daemon: Daemon) -> None:
    ran = daemon.run("call", "bad name", "hi")
    assert (ran.code, "start its daemon" in ran.err) == (1, False)


def test_the_card_of_an_agent_that_the_daemon_does_not_have_is_not_looked_for_elsewhere(daemon: Daemon) -> None:
    ran = daemon.run("card", "get", "nobody")
    assert (ran.code, "has no agent 'nobody'; `covenant agents list`" in ran.err) == (1, True)


def test_every_command_that_a_refusal_names_exists() -> None:
    for words in LISTED_BY.values():
        assert covenant(*words.split(), "--help").code == 0
