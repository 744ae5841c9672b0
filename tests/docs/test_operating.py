"""What the operating guide says to type, in some of its parts, is typed here as it stands."""

import asyncio
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

from covenant.ledger.embedded.journal.shipped_segments import read_status
from tests.cli.daemons import COVENANT, Daemon, environment
from tests.waits import BOUND_S, until

GUIDE = (Path(__file__).parents[2] / "docs" / "operating.md").read_text(encoding="utf-8")
BACKUP, FINDING, REPAIRING, DEPLOYS, RETENTION, LISTING, FOLLOWING, STUCK, COMPLETION, REMOVING = (
    GUIDE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    for title in (
        "Backup and restore",
        "Find tasks from a program",
        "Repair many tasks from a program",
        "Deploys",
        "Retention",
        "Find tasks",
        "Why did this task fail?",
        "A task is stuck in flight",
        "Completion",
        "Removing a tenant",
    )
)
MOUNTED = "/mnt/segments"


def blocks(language: str, section: str = BACKUP) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def lines(section: str) -> list[str]:
    """The commands that stand indented in a section."""
    return re.findall(r"^    (covenant .*)$", section, re.MULTILINE)


def at(daemon: Daemon, text: str) -> str:
    assert "url=http://localhost:8421\n" in text
    return text.replace("http://localhost:8421", daemon.url)


def typed(text: str, folder: Path, home: Path, **more: str) -> str:
    env = environment(COVENANT_HOME=str(home), **more)
    env["PATH"] = f"{COVENANT.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/sh", "-e", "-c", text], cwd=folder, env=env, capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_backup_guide_does_what_it_says(short_path: Path) -> None:
    home, segments = short_path / "home", short_path / "segments"
    home.mkdir(mode=0o700)
    (setting,) = blocks("toml")
    assert MOUNTED in setting
    (home / "settings.toml").write_text(setting.replace(MOUNTED, str(segments)) + "seal_ms = 1000\n")
    first, later = (text.replace(MOUNTED, str(segments)) for text in blocks("sh"))
    moment = re.search(r"--until (\S+)", later)
    assert moment is not None
    daemon = Daemon(home)
    try:
        assert "restored restored at position" not in typed(first, short_path, home)
        assert (short_path / "restored" / "journal").is_dir()
        daemon.json("agents", "add", "helper", "--kind", "worker")
        position = daemon.json("backup", str(short_path / "after"))["position"]
        until(lambda: read_status(home).shipped_seq >= position)
        status = daemon.json("a2a", "status")
    finally:
        assert daemon.stop() == 0
    assert "warnings" not in status
    said = typed(later.replace(moment[1], "2999-01-01T00:00:00Z"), short_path, home)
    assert len(said.splitlines()) == 2
    for name in ("restored", "later", "earlier"):
        again = Daemon(short_path / name)
        assert ("helper" in str(again.json("agents", "list"))) is (name != "restored")
        again.stop()


def test_tasks_are_found_counted_and_repaired_as_the_guide_says_also_after_a_kill(short_path: Path) -> None:
    home = short_path / "home"
    daemon = Daemon(home)
    try:
        daemon.json("agents", "add", "helper", "--kind", "worker")
        daemon.json("capabilities", "grant", "a2a.send.helper@default")
        for text in ("look it up", "look again"):
            daemon.json("a2a", "send", "--to", "helper@default", text)
        (queries,), (repair,) = blocks("sh", FINDING), blocks("sh", REPAIRING)
        before = found(typed(at(daemon, queries), short_path, home))
    finally:
        daemon.stop(signal.SIGKILL)
    daemon = Daemon(home)
    try:
        queries = at(daemon, queries)
        named = "\n".join(queries.splitlines()[:2])
        after = found(typed(queries, short_path, home))
        assert [answer["kind"] for answer in after] == ["a2a_found", "a2a_found", "a2a_counts"]
        assert (after[0]["total"], after[1]["tasks"], after[2]["lanes"]["queued"]) == (2, [], 2)
        assert [answer.get("tasks") for answer in after] == [answer.get("tasks") for answer in before]
        repaired = typed(f"{named}\n{repair}", short_path, home)
        (report,) = found(repaired)
        assert (report["dry_run"], [each["outcome"] for each in report["outcomes"]]) == (True, ["would_apply"] * 2)
        earnest = repair.replace('{"filter"', '{"dry_run": false, "filter"')
        typed(f"{named}\n{earnest}", short_path, home)
        (snippet,) = blocks("python", FINDING)
        names: dict[str, Any] = {}
        exec(snippet, names)
        token = (home / "operator.token").read_text().strip()
        assert asyncio.run(names["failures"](daemon.url, token)) == []
        assert found(typed(queries, short_path, home))[0]["total"] == 0
    finally:
        daemon.stop()


def test_tasks_are_listed_canceled_and_followed_by_the_commands_of_the_guide(short_path: Path) -> None:
    home = short_path / "home"
    daemon = Daemon(home)
    try:
        daemon.json("agents", "add", "clerk", "--kind", "worker")
        daemon.json("capabilities", "grant", "a2a.send.clerk@default")
        ids = [daemon.json("a2a", "send", "--to", "clerk@default", f"invoice {n}")["task_id"] for n in range(2)]
        *listed, dry, earnest = lines(LISTING)
        assert [command.split()[2] for command in listed] == ["list", "list", "list", "export"]
        failed, queued, *_ = (typed(each, short_path, home) for each in listed)
        assert (failed, queued) == ("", "2\n")
        assert (short_path / "tasks.csv").read_text().startswith("task_id,")
        assert (short_path / "tasks.jsonl").read_text() == ""
        assert typed(dry, short_path, home).splitlines()[-1] == "matched 2 task(s), changed 0"
        assert typed(earnest, short_path, home).splitlines()[-1] == "matched 2 task(s), changed 2"
        log, followed, shown, audit = (each.replace("TASK_ID", ids[0][:8]) for each in lines(FOLLOWING))
        for command in (log, followed, shown):
            typed(command, short_path, home)
        assert "sent twice" in typed(audit.replace("--follow", ""), short_path, home)
    finally:
        daemon.stop()


def test_a_stuck_task_is_repaired_by_the_commands_of_the_guide(short_path: Path) -> None:
    home = short_path / "home"
    daemon = Daemon(home)
    try:
        daemon.json("identities", "enroll", "clerk@host")
        for name in ("a2a.send.clerk@host", "a2a.repair.requeue", "a2a.repair.force_error"):
            daemon.json("capabilities", "grant", name)
        task_id = daemon.json("a2a", "send", "--to", "clerk@host", "dig")["task_id"]
        show, *repairs = lines(STUCK)
        assert task_id in typed(show.replace("TASK_ID", task_id), short_path, home)
        for command, state in zip(repairs, ("queued", "result_pending"), strict=True):
            lease_id = daemon.json("a2a", "next", "--all")["lease"]["lease_id"]
            typed(command.replace("TASK_ID", task_id).replace("LEASE_ID", lease_id), short_path, home)
            assert daemon.json("a2a", "show", task_id)["state"] == state
    finally:
        daemon.stop()


def test_the_scripts_of_the_shells_are_written_where_the_guide_says(short_path: Path) -> None:
    for command in lines(COMPLETION):
        shell, _, file = command.partition(" > ")
        assert file
        assert "_COVENANT_COMPLETE" in typed(shell, short_path, short_path / "home")


def found(said: str) -> list[dict[str, Any]]:
    """One answer after the other, as they were written."""
    answers, decoder = [], json.JSONDecoder()
    while said.strip():
        answer, end = decoder.raw_decode(said.strip())
        answers.append(answer)
        said = said.strip()[end:]
    return answers


def test_the_guides_of_retention_and_deploys_do_what_they_say(short_path: Path) -> None:
    daemon = Daemon(short_path / "home")
    try:
        (limits,) = blocks("sh", RETENTION)
        shown = typed(limits, short_path, daemon.home)
        assert "720 hours kept" in shown
        assert "retention.task_hours" in shown
        (drain,) = blocks("sh", DEPLOYS)
        assert typed(drain, short_path, daemon.home).startswith("drained and stopped")
        assert daemon.process.wait(BOUND_S) == 0
    finally:
        daemon.stop()


def test_a_tenant_is_removed_by_the_commands_of_the_guide(short_path: Path) -> None:
    home = short_path / "home"
    daemon = Daemon(home)
    try:
        daemon.json("tenants", "add", "acme")
        daemon.json("agents", "add", "helper", "--tenant", "acme", "--kind", "worker")
        daemon.json("capabilities", "grant", "a2a.send.helper@acme")
        daemon.json("a2a", "send", "--to", "helper@acme", "look it up")
        (commands,) = blocks("sh", REMOVING)
        dry, earnest, search = commands.splitlines()
        assert "1 queued" in typed(dry, short_path, home)
        assert "acme" in str(daemon.json("tenants", "list"))
        assert "removed acme: 1 tasks" in typed(earnest, short_path, home)
        assert "0 traces are left" in typed(search, short_path, home)
        assert "acme" not in str(daemon.json("tenants", "list"))
    finally:
        daemon.stop()
