"""Every command once for people: what it says, on which stream, and that nothing an agent wrote can do harm there."""

import json
import os
import pty
import re
import select
import signal
import subprocess
from pathlib import Path
from uuid import uuid4

import pytest

from covenant.cli.terminal import age, brief, clean, distance
from covenant.daemon.environment import now_ms
from covenant.model.settings import Limits
from tests.cli.daemons import COVENANT, Daemon, covenant, environment
from tests.places import short_folder
from tests.waits import BOUND_S


def answered(daemon: Daemon, *words: str) -> str:
    ran = daemon.run(*words)
    assert ran.code == 0, ran
    return ran.out


def bob(daemon: Daemon, *words: str) -> str:
    return answered(daemon, "--token-file", str(daemon.home / "bob.token"), *words)


def test_a_task_from_send_to_drain(daemon: Daemon) -> None:
    task_id = str(uuid4())
    root = str(uuid4())
    assert (
        answered(daemon, "a2a", "send", "--to", "bob@host", "--id", task_id, "--parent", root, "dig").strip() == task_id
    )
    assert "dig" in answered(daemon, "a2a", "status", "--limit", "100")
    assert bob(daemon, "a2a", "next") == "dig\n"
    shown = answered(daemon, "a2a", "status", "--state", "in_flight")
    assert "in flight" in shown
    assert "0s by bob@host" in shown
    assert bob(daemon, "a2a", "respond", task_id, "done\nand dusted").strip() == task_id
    assert "done and dusted" in answered(daemon, "a2a", "results")
    assert "done and dusted" in answered(daemon, "a2a", "watch", "--once")
    tree = answered(daemon, "a2a", "tree", root)
    assert tree.splitlines()[0] == f"{root} (not sent here)"
    assert re.fullmatch(rf"└── ok {task_id} bob@host \((\d+ms|\d+\.\ds)\) dig", tree.splitlines()[1])
    whole = answered(daemon, "a2a", "show", task_id)
    for part in ("settled", "operator@local", "ok: done", "leases", "submitted"):
        assert part in whole
    assert answered(daemon, "a2a", "results", "--next") == "done\nand dusted\n"
    assert daemon.run("a2a", "results").err == "no result is waiting\n"


def test_send_waits_for_the_result_and_tells_it(daemon: Daemon) -> None:
    key = str(uuid4())
    task_id = answered(daemon, "a2a", "send", "--to", "bob@host", "--key", key, "--idempotent", "add").strip()
    bob(daemon, "a2a", "next")
    bob(daemon, "a2a", "respond", task_id, "3")
    ran = daemon.run("a2a", "send", "--to", "bob@host", "--key", key, "--idempotent", "--wait", "add")
    assert (ran.code, ran.out) == (0, "3\n")
    assert ran.err == "the same work was done before; its result is replayed\n"
    answered(daemon, "a2a", "results", "--next", "--max", "2")


def test_a_wait_that_is_over_fails_and_says_where_to_look(daemon: Daemon) -> None:
    ran = daemon.run("a2a", "send", "--to", "bob@host", "--wait", "--timeout", "1ms", "never mind")
    assert ran.code == 1
    assert "a2a show " in ran.err
    task = daemon.json("a2a", "next", "--all")["task"]["id"]
    assert "forced_error" in answered(daemon, "a2a", "force-error", task, "--reason", "test", "--message", "no")
    ran = daemon.run("a2a", "send", "--to", "bob@host", "--id", task, "--wait", "never mind")
    assert (ran.code, ran.out) == (1, "")
    assert "the task failed: no" in ran.err
    answered(daemon, "a2a", "results", "--next")


def test_text_may_come_from_standard_input(daemon: Daemon) -> None:
    ran = daemon.run("a2a", "send", "--to", "bob@host", "-", stdin="from a pipe: ÄÖ\n")
    assert ran.code == 0
    assert bob(daemon, "a2a", "next") == "from a pipe: ÄÖ\n"
    piped = daemon.run(
        "--token-file", str(daemon.home / "bob.token"), "a2a", "respond", ran.out.strip(), "-", stdin="answer\n"
    )
    assert piped.code == 0
    assert answered(daemon, "a2a", "results", "--next") == "answer\n"


def test_a_result_as_large_as_they_come_is_told_whole(daemon: Daemon) -> None:
    large = "x" * (Limits().result_bytes_max - 1_000)
    task_id = answered(daemon, "a2a", "send", "--to", "bob@host", "shout").strip()
    bob(daemon, "a2a", "next")
    posted = daemon.run("--token-file", str(daemon.home / "bob.token"), "a2a", "respond", task_id, "-", stdin=large)
    assert posted.code == 0, posted
    assert answered(daemon, "a2a", "results", "--next") == large + "\n"


def test_repairs_are_told_in_words(daemon: Daemon) -> None:
    task_id = answered(daemon, "a2a", "send", "--to", "bob@host", "walk").strip()
    bob(daemon, "a2a", "next")
    report = answered(daemon, "a2a", "retry-stale", "--min-lease-age-ms", "0")
    assert report.startswith("considered 1 task(s), requeued 0, skipped 1\n")
    assert "missing idempotency" in report
    said = daemon.run("a2a", "requeue", task_id, "--reason", "lost", "--duplicate-risk", "operator-accepted")
    assert (said.code, said.out) == (0, f"requeued {task_id}\n")
    assert said.err == "it is queued now, after 1 attempt(s)\n"
    bob(daemon, "a2a", "next")
    bob(
        daemon,
        "a2a",
        "respond",
        task_id,
        "--error",
        "tired",
        "--lease-id",
        daemon.json("a2a", "status")["tasks"][0]["lease_id"],
    )
    assert answered(daemon, "a2a", "results", "--next") == "tired\n"


def test_identities_capabilities_and_audit_are_told_in_words(daemon: Daemon) -> None:
    name = f"eve-{uuid4().hex[:6]}@host"
    enrolled = daemon.run("identities", "enroll", name, "--grant", "a2a.send.bob@host")
    assert enrolled.code == 0
    assert len(enrolled.out.strip()) > 40
    assert "granted a2a.send.bob@host" in enrolled.err
    assert name in answered(daemon, "identities", "list")
    assert len(answered(daemon, "identities", "rotate", name).strip()) > 40
    assert answered(daemon, "identities", "revoke", name).startswith(f"revoked {name}")
    assert name in answered(daemon, "identities", "list", "--revoked-only")
    assert answered(daemon, "identities", "purge", "--before-ms", "1") == "purged 0 revoked token(s)\n"
    granted = answered(daemon, "capabilities", "grant", "a2a.send.x@y", "--expires-at", "9" * 13)
    assert granted.startswith("granted: operator@local → a2a.send.x@y\nsignature: ")
    signature = granted.split()[-1]
    assert signature in answered(daemon, "capabilities", "recent")
    assert answered(daemon, "capabilities", "revoke", signature) == f"revoked {signature}\n"
    assert answered(daemon, "capabilities", "revoke", signature) == f"there is no live grant {signature}\n"
    assert answered(daemon, "capabilities", "purge", "--before-ms", "1") == "purged 0 revoked grant(s)\n"
    assert "capability granted" in answered(daemon, "audit", "recent")
    assert answered(daemon, "audit", "verify").startswith("valid: ")
    assert answered(daemon, "audit", "purge", "--before-ms", "1") == "purged 0 audit row(s)\n"
    assert answered(daemon, "a2a", "compact").startswith("dropped ")


def test_watch_keeps_its_table_up_to_date_until_it_is_interrupted(daemon: Daemon) -> None:
    ours, theirs = pty.openpty()
    watching = subprocess.Popen(
        [str(COVENANT), "--home", str(daemon.home), "a2a", "watch", "--every", "100ms"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(TERM="xterm"),
        close_fds=True,
    )
    os.close(theirs)
    try:
        wait_for(ours, b"nothing is queued")
        answered(daemon, "a2a", "send", "--to", "bob@host", "wind the clock")
        wait_for(ours, b"wind the clock")
        watching.send_signal(signal.SIGINT)
        wait_for(ours, b"\x1b[?1049l")  # the terminal's own screen is back
        assert watching.wait(BOUND_S) == 0
    finally:
        watching.kill()
        watching.wait()
        os.close(ours)
    task = daemon.json("a2a", "next", "--all")["task"]["id"]
    answered(daemon, "a2a", "force-error", task, "--reason", "test", "--message", "no")
    answered(daemon, "a2a", "results", "--next")


def wait_for(terminal: int, said: bytes) -> None:
    seen = b""
    while said not in seen:
        ready, _, _ = select.select([terminal], [], [], BOUND_S)
        assert ready, seen
        seen += os.read(terminal, 65_536)


def test_settings_and_version_are_told_in_words(daemon: Daemon) -> None:
    assert "http.port" in answered(daemon, "settings", "show")
    assert answered(daemon, "version") == answered(daemon, "--version")


def test_help_is_given_at_every_level(daemon: Daemon) -> None:
    assert "identities" in answered(daemon, "--help")
    assert "retry-stale" in answered(daemon, "a2a", "--help")


@pytest.mark.parametrize(
    ("ms", "word"),
    [(-5, "0s"), (0, "0s"), (59_999, "59s"), (60_000, "1m"), (3_599_999, "59m"), (3_600_000, "1h"), (90_000_000, "1d")],
)
def test_an_age_is_its_largest_whole_unit(ms: int, word: str) -> None:
    assert age(ms) == word


def test_a_distance_says_whether_it_lies_ahead() -> None:
    now = now_ms()
    assert (distance(now + 330_000), distance(now - 330_000)) == ("in 5m", "5m ago")


@pytest.mark.parametrize("text", ["\x1b[2Jgone", "a\rb", "\x9b31m", "bell\a", "\u202egnp.exe"])
def test_what_agents_wrote_cannot_steer_the_terminal(text: str) -> None:
    assert all(character.isprintable() or character in "\n\t" for character in clean(text))
    assert brief(text).isprintable()


def test_a_long_text_is_cut_to_one_line() -> None:
    assert brief("a\nb  c", 10) == "a b c"
    assert brief("x" * 100, 10) == "x" * 9 + "…"


def test_a_lease_is_renewed_and_given_back_and_the_task_canceled(daemon: Daemon) -> None:
    task_id = answered(daemon, "a2a", "send", "--to", "bob@host", "to be canceled").strip()
    taken = json.loads(bob(daemon, "a2a", "next", "--json"))
    assert taken["task"]["id"] == task_id
    lease_id = taken["lease"]["lease_id"]
    assert bob(daemon, "a2a", "renew", task_id, "--lease-id", lease_id) == f"renewed {task_id}\n"
    released = bob(daemon, "a2a", "release", task_id, "--lease-id", lease_id, "--reason", "not mine")
    assert released == f"released {task_id}\n"
    assert daemon.json("a2a", "show", task_id)["state"] == "queued"
    assert answered(daemon, "a2a", "cancel", task_id, "--reason", "not needed") == f"canceled {task_id}\n"
    assert answered(daemon, "a2a", "cancel", task_id, "--reason", "not needed") == f"canceled {task_id}\n"
    assert answered(daemon, "a2a", "results", "--next") == "canceled: not needed\n"


def test_the_beginning_of_an_id_is_enough_where_it_is_unique(daemon: Daemon) -> None:
    one, other = "abcdef01-1111-4111-8111-111111111111", "abcdef02-2222-4222-8222-222222222222"
    for task_id in (one, other):
        answered(daemon, "a2a", "send", "--to", "bob@host", "--id", task_id, "short")
    try:
        assert daemon.json("a2a", "show", "abcdef01")["task"]["id"] == one
        assert other in answered(daemon, "a2a", "tree", "ABCDEF02")
        for given, code in (("abcdef", "ambiguous_id"), ("abcdef03", "unknown_task")):
            assert daemon.json("a2a", "show", given, code=1)["code"] == code
    finally:
        assert answered(daemon, "a2a", "cancel", "abcdef01", "--reason", "over") == f"canceled {one}\n"
        assert answered(daemon, "a2a", "cancel", "abcdef02", "--reason", "over") == f"canceled {other}\n"
        answered(daemon, "a2a", "results", "--next", "--max", "2")


def test_status_has_one_line_a_task_in_80_columns_with_the_lease_that_repair_wants(daemon: Daemon) -> None:
    task_id = answered(daemon, "a2a", "send", "--to", "bob@host", "a task with many words " * 20).strip()
    taken = json.loads(bob(daemon, "a2a", "next", "--json"))
    assert taken["task"]["id"] == task_id
    lease_id = taken["lease"]["lease_id"]
    ran = daemon.run("a2a", "status", "--limit", "1000", env={"COLUMNS": "80"})
    assert max(map(len, ran.out.splitlines())) <= 80
    (line,) = [line for line in ran.out.splitlines() if task_id[:8] in line]
    assert lease_id[:8] in line
    wide = answered(daemon, "a2a", "status", "--limit", "1000")
    (line,) = [line for line in wide.splitlines() if task_id in line]
    assert lease_id in line
    answered(daemon, "a2a", "cancel", task_id, "--reason", "over")
    answered(daemon, "a2a", "results", "--next")


def test_status_cuts_a_long_name_and_keeps_the_lease_id_whole() -> None:
    name = "n" * 72 + "@host"
    with short_folder() as folder:
        daemon = Daemon(folder / "home")
        try:
            token_file = folder / "long.token"
            token_file.write_text(daemon.json("identities", "enroll", name)["token_b58"])
            answered(daemon, "capabilities", "grant", f"a2a.send.{name}")
            task_id = answered(daemon, "a2a", "send", "--to", name, "日本" * 40).strip()
            lease_id = daemon.json("--token-file", str(token_file), "a2a", "next")["lease"]["lease_id"]
            words = [str(COVENANT), "--home", str(daemon.home), "a2a", "status"]
            for columns in ("160", "175", None):  # without a number: as in a pipe
                given = {**environment(), "COLUMNS": columns}
                env = {variable: value for variable, value in given.items() if value is not None}
                told = subprocess.run(words, env=env, capture_output=True, text=True, timeout=BOUND_S, check=True)
                (row,) = [line for line in told.stdout.splitlines() if task_id in line]
                assert lease_id in row, columns
                assert " by nnn" in row, columns
                assert len(told.stdout.splitlines()) == 4, told.stdout  # title, head, the task, the counts
        finally:
            daemon.stop()


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("a2a", "stauts"), "status"),
        (("setings",), "settings"),
        (("status",), "a2a status"),
        (("send", "hello"), "a2a send"),
        (("enroll",), "identities enroll"),
    ],
)
def test_a_misspelt_command_names_the_nearest(words: tuple[str, ...], meant: str) -> None:
    ran = covenant(*words)
    assert (ran.code, f"did you mean {meant}?" in ran.err) == (2, True)
    assert "did you mean" not in covenant("a2a", "xyzzy").err


def test_a_shell_completes_commands_as_the_documents_say(tmp_path: Path) -> None:
    """The line that is documented prints a script; the words that the script asks for are the commands."""
    operating = (Path(__file__).parents[2] / "docs" / "operating.md").read_text(encoding="utf-8")
    assert 'eval "$(covenant completion bash)"' in operating
    script = subprocess.run([str(COVENANT), "completion", "bash"], capture_output=True, check=True)
    assert b"_COVENANT_COMPLETE=bash_complete" in script.stdout
    asked = {"_COVENANT_COMPLETE": "bash_complete", "COMP_WORDS": "covenant a2a re", "COMP_CWORD": "2"}
    words = subprocess.run([str(COVENANT)], env=asked, capture_output=True, check=True, cwd=tmp_path)
    found = {line.partition(",")[2] for line in words.stdout.decode().splitlines()}
    assert found == {"requeue", "retry-stale", "respond", "results", "release", "renew"}
