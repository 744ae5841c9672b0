"""Finding tasks at the command line: filters, pages, formats, ids by their beginnings, and completion."""

import csv
import io
import json
import os
import pty
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from covenant import Client
from covenant.cli.task_tables import outcome_row
from covenant.model.errors import NotFound
from covenant.model.ids import TaskId
from tests.cli.daemons import COVENANT, Daemon, environment
from tests.places import short_folder
from tests.waits import BOUND_S

COUNT = 7
BOBS = ("--agent", "bob@host")


class Ledger:
    """A daemon with some tasks: some are queued, one is leased, one failed, one canceled, one completed and drained."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        daemon.json("capabilities", "grant", "a2a.send.bob@host")
        daemon.json("capabilities", "grant", "a2a.send.carol@host")
        daemon.json("identities", "enroll", "carol@host")
        token = daemon.json("identities", "enroll", "bob@host", "--grant", "a2a.respond.operator@local")["token_b58"]
        self.bob = daemon.home / "bob.token"
        self.bob.write_text(token)
        ids = [self.send(f"Number {number}") for number in range(COUNT)]
        self.failed, self.completed, self.leased, self.canceled, *self.queued = ids
        for task_id, words in ((self.failed, ("--error", "no paint")), (self.completed, ("done",))):
            assert daemon.json(*self.as_bob, "a2a", "next")["task"]["id"] == task_id
            daemon.json(*self.as_bob, "a2a", "respond", task_id, *words)
        daemon.json("a2a", "results", "--next", "--max", "2")
        assert daemon.json(*self.as_bob, "a2a", "next")["task"]["id"] == self.leased
        daemon.json("a2a", "cancel", self.canceled, "--reason", "not needed")

    @property
    def as_bob(self) -> tuple[str, str]:
        return "--token-file", str(self.bob)

    def send(self, text: str, *more: str, to: str = "bob@host") -> str:
        task_id: str = self.daemon.json("a2a", "send", "--to", to, text, *more)["task_id"]
        return task_id

    def listed(self, *words: str) -> list[str]:
        """Of bob's tasks, which no test adds to, unless they say otherwise."""
        return [task["task_id"] for task in self.daemon.json("a2a", "list", *BOBS, *words)["tasks"]]


@pytest.fixture(scope="module")
def ledger() -> Iterator[Ledger]:
    with short_folder() as folder:
        daemon = Daemon(folder / "home")
        yield Ledger(daemon)
        daemon.stop()


def test_tasks_are_listed_by_every_word_that_a_person_would_try(ledger: Ledger) -> None:
    everything = ledger.listed()
    assert len(everything) == COUNT
    assert everything[-1] == ledger.failed  # the newest first
    assert ledger.listed("--oldest-first")[0] == ledger.failed
    for words, expected in {
        ("--state", "failed"): [ledger.failed],
        ("--outcome", "failed"): [ledger.failed],
        ("--state", "done"): [ledger.completed, ledger.failed],
        ("--state", "done", "--outcome", "completed"): [ledger.completed],
        ("--state", "completed"): [ledger.completed],
        ("--state", "canceled"): [ledger.canceled],
        ("--state", "cancelled"): [ledger.canceled],
        ("--state", "in-flight"): [ledger.leased],
        ("--state", "drained", "--outcome", "completed"): [ledger.completed],
        ("--state", "failed,completed"): [ledger.completed, ledger.failed],
        ("--state", "queued"): ledger.queued[::-1],
        ("--text", "number 2"): [ledger.leased],
        ("--attempt-min", "1", "--state", "in_flight"): [ledger.leased],
        ("--agent", "clerk"): [],
        ("--agent", "bob@host", "--state", "failed", "--since", "2h"): [ledger.failed],
        ("--until", "1h"): [],
        ("--sender", "operator@local", "--text", "Number 3"): [ledger.canceled],
        ("--moved-since", "1h", "--order", "moved", "--limit", "1"): [ledger.canceled],
        ("--tenant", "acme"): [],
    }.items():
        assert ledger.listed(*words) == expected, words


def test_pages_follow_each_other_without_a_gap(ledger: Ledger) -> None:
    first = ledger.daemon.json("a2a", "list", *BOBS, "--limit", "3")
    rest = ledger.daemon.json("a2a", "list", *BOBS, "--limit", "500", "--after", first["next"])
    ids = [task["task_id"] for task in (*first["tasks"], *rest["tasks"])]
    assert ids == ledger.listed()
    assert rest["next"] is None
    said = ledger.daemon.run("a2a", "list", *BOBS, "--limit", "3")
    assert f"--after {first['next']}" in said.err


def test_a_list_is_counted_and_written_as_csv_and_as_lines(ledger: Ledger) -> None:
    assert ledger.daemon.run("a2a", "list", *BOBS, "--state", "queued", "--count").out == f"{len(ledger.queued)}\n"
    assert ledger.daemon.json("a2a", "list", *BOBS, "--count")["total"] == COUNT
    ledger_csv = ledger.daemon.run("a2a", "list", *BOBS, "--csv").out
    rows = list(csv.DictReader(io.StringIO(ledger_csv)))
    assert [row["task_id"] for row in rows] == ledger.listed()
    assert {row["error_message"] for row in rows if row["task_id"] == ledger.failed} == {"no paint"}
    lines = [json.loads(line) for line in ledger.daemon.run("a2a", "export", *BOBS).out.splitlines()]
    assert [task["task_id"] for task in lines] == ledger.listed("--oldest-first")


def test_an_export_goes_over_all_pages(short_path: Path) -> None:
    daemon = Daemon(short_path / "many")
    try:
        daemon.json("identities", "enroll", "bob@host")
        daemon.json("capabilities", "grant", "a2a.send.bob@host")
        sent = [daemon.json("a2a", "send", "--to", "bob@host", f"{n}")["task_id"] for n in range(203)]
        file = short_path / "tasks.jsonl"
        assert daemon.json("a2a", "export", str(file))["count"] == len(sent)
        assert [json.loads(line)["task_id"] for line in file.read_text().splitlines()] == sent
        assert len(daemon.json("a2a", "list", "--limit", "202")["tasks"]) == 202
    finally:
        daemon.stop()


def test_values_on_a_terminal_have_no_control_characters_and_in_a_pipe_they_keep_them(ledger: Ledger) -> None:
    task_id = ledger.send("red \x1b[31malert", to="carol@host")
    words = [str(COVENANT), "--home", str(ledger.daemon.home), "a2a", "list", "--csv", "--text", "alert"]
    assert "\x1b" in subprocess.run(words, env=environment(), stdout=subprocess.PIPE, text=True, check=True).stdout
    ours, theirs = pty.openpty()
    try:
        subprocess.run(words, env=environment(TERM="xterm"), stdout=theirs, stderr=theirs, check=True, timeout=BOUND_S)
        shown = os.read(ours, 65_536)
    finally:
        os.close(ours)
        os.close(theirs)
    assert (b"malert" in shown, b"\x1b" in shown) == (True, False)
    ledger.daemon.json("a2a", "cancel", task_id, "--reason", "tried")


@pytest.mark.parametrize("noun", ["a2a", "audit"])
def test_an_export_writes_to_standard_output_for_a_dash_and_over_a_file_only_if_told(
    ledger: Ledger, tmp_path: Path, noun: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [json.loads(line) for line in ledger.daemon.run(noun, "export", "-").out.splitlines()]
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "rows.jsonl"
    file.write_text("mine")
    file.chmod(0o644)
    assert ledger.daemon.json(noun, "export", str(file), code=1)["code"] == "file_exists"
    assert file.read_text() == "mine"
    for option in ("--replace", "--force"):
        assert ledger.daemon.json(noun, "export", str(file), option)["count"] == len(file.read_text().splitlines()) > 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]
    assert ledger.daemon.json(noun, "export", "/dev/null")["count"] > 0


def test_a_cell_is_never_a_formula(ledger: Ledger) -> None:
    task_id = ledger.send("=1+1", to="carol@host")
    rows = csv.DictReader(io.StringIO(ledger.daemon.run("a2a", "list", "--csv", "--text", "=1+1").out))
    assert [row["intent"] for row in rows] == ["'=1+1"]
    ledger.daemon.json("a2a", "cancel", task_id, "--reason", "tried")


def test_a_table_of_tasks_fits_80_columns_with_one_line_a_task(ledger: Ledger) -> None:
    wide = "x" * 300
    task_id = ledger.send(wide, to="carol@host")
    said = ledger.daemon.run("a2a", "list", env={"COLUMNS": "80"})
    lines = said.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if task_id[:8] in line]) == 1
    assert "no paint" in next(line for line in lines if ledger.failed[:8] in line)
    ledger.daemon.json("a2a", "cancel", task_id, "--reason", "tried")


def test_a_wrong_word_names_the_right_one(ledger: Ledger) -> None:
    ran = ledger.daemon.run("a2a", "list", "--state", "faild")
    assert ran.code == 2
    assert "did you mean failed?" in ran.err
    for words in (("--state", "queued,failed"), ("--state", "failed", "--outcome", "completed")):
        assert ledger.daemon.json("a2a", "list", *words, code=1)["code"] == "invalid_filter", words


def test_a_finished_task_is_found_by_the_beginning_of_its_id(ledger: Ledger) -> None:
    assert ledger.daemon.json("a2a", "show", ledger.completed[:9].upper())["task"]["id"] == ledger.completed
    assert ledger.daemon.json("a2a", "tree", ledger.failed[:9])["tree"]["task_id"] == ledger.failed
    assert ledger.daemon.json("logs", ledger.failed[:9])["task_id"] == ledger.failed
    unknown = ledger.daemon.json("a2a", "show", "ffffffff-ffff", code=1)
    assert unknown["code"] == "unknown_task"


def test_the_parent_of_a_new_task_is_named_by_the_beginning_of_its_id(ledger: Ledger) -> None:
    task_id = ledger.send("a part", "--parent", ledger.completed[:9], to="carol@host")
    assert ledger.daemon.json("a2a", "show", task_id)["task"]["parent"] == ledger.completed
    ledger.daemon.json("a2a", "cancel", task_id, "--reason", "tried")


def test_an_id_that_several_tasks_begin_with_lists_them(ledger: Ledger) -> None:
    both = [f"abcdef00-0000-4000-8000-{number:012d}" for number in range(2)]
    for task_id in both:
        ledger.send("twin", "--id", task_id, to="carol@host")
    told = ledger.daemon.json("a2a", "show", "abcdef", code=1)
    assert told["code"] == "ambiguous_id"
    assert all(task_id in told["message"] for task_id in both)
    for task_id in both:
        ledger.daemon.json("a2a", "cancel", task_id, "--reason", "tried")


@pytest.fixture
def held(ledger: Ledger) -> Iterator[list[str]]:
    """Two tasks of carol's that are leased, and one that is queued."""
    ledger.daemon.json("capabilities", "grant", "a2a.repair.requeue")
    ledger.daemon.json("capabilities", "grant", "a2a.repair.force_error")
    token = ledger.daemon.json("identities", "rotate", "carol@host")["token_b58"]
    carol = ledger.daemon.home / "carol.token"
    carol.write_text(token)
    ids = [ledger.send(f"carry {number}", to="carol@host") for number in range(3)]
    ledger.daemon.json("--token-file", str(carol), "a2a", "next", "--max", "2")
    yield ids
    for task_id in ids:
        ledger.daemon.run("a2a", "cancel", task_id, "--reason", "tried")


def test_a_repair_of_many_fits_80_columns_with_one_line_a_task(ledger: Ledger, held: list[str]) -> None:
    chosen = ("--agent", "carol@host", "--text", "carry", "--reason", "host went down")
    said = ledger.daemon.run("a2a", "cancel", *chosen, env={"COLUMNS": "80"})
    _, *rows, last = said.out.splitlines()
    assert sorted(row[:8] for row in rows) == sorted(task_id[:8] for task_id in held)
    assert all("would apply" in row and len(row) <= 80 for row in rows)
    assert last == "matched 3 task(s), changed 0"


def test_a_refused_repair_has_its_code_where_its_reason_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    task_id = "abcdef00-0000-4000-8000-000000000000"
    outcome = {"task_id": task_id, "state": "result_pending", "outcome": "refused", "code": "already_over"}
    outcome["reason"] = f"task {task_id} has ended: failed"
    monkeypatch.setenv("COLUMNS", "80")
    assert outcome_row(outcome) == ("red", "abcdef00", "result_pending", "refused", "already over")
    monkeypatch.setenv("COLUMNS", "200")
    assert outcome_row(outcome)[1::3] == (task_id, outcome["reason"])
    outcome["reason"] = "x" * 130
    assert outcome_row(outcome)[-1] == outcome["reason"]


def test_many_tasks_are_requeued_by_filters_after_a_dry_run(ledger: Ledger, held: list[str]) -> None:
    first, second, queued = held
    words = ("a2a", "requeue", "--agent", "carol@host", "--text", "carry", "--reason", "host went down")
    risk = ("--duplicate-risk", "operator-accepted")
    dry = ledger.daemon.run(*words, *risk)
    assert dry.code == 0, dry
    assert dry.out.splitlines()[-1].endswith("changed 0")
    assert "add --apply" in dry.err
    assert sorted(ledger.listed("--agent", "carol@host", "--state", "in-flight")) == sorted([first, second])
    done = ledger.daemon.json(*words, *risk, "--state", "in-flight", "--apply")
    assert (done["dry_run"], done["matched"], done["applied"]) == (False, 2, 2)
    assert {each["task_id"] for each in done["outcomes"]} == {first, second}
    assert set(ledger.listed("--agent", "carol@host", "--state", "queued", "--text", "carry")) == {
        first,
        second,
        queued,
    }
    rows = [row["kind"] for row in ledger.daemon.json("audit", "recent", "--limit", "50")["events"]]
    assert {first, second} <= {row.get("task_id") for row in rows if "host went down" in str(row)}


def test_tasks_that_ended_are_named_and_refused_by_a_repair_in_bulk(ledger: Ledger) -> None:
    tried = ledger.daemon.json("a2a", "cancel", *BOBS, "--state", "failed", "--reason", "tried")
    assert [(each["task_id"], each["code"]) for each in tried["outcomes"]] == [(ledger.failed, "already_over")]


def test_many_tasks_are_ended_or_canceled_by_filters(ledger: Ledger, held: list[str]) -> None:
    chosen = ("--agent", "carol@host", "--text", "carry", "--reason", "enough", "--apply")
    failed = ledger.daemon.json(
        "a2a", "force-error", *chosen, "--message", "the worker was lost", "--state", "in-flight"
    )
    assert failed["applied"] == 2
    canceled = ledger.daemon.run("a2a", "cancel", *chosen, "--state", "queued")
    assert canceled.out.splitlines()[-1] == "matched 1 task(s), changed 1"
    assert ledger.listed("--agent", "carol@host", "--outcome", "canceled", "--limit", "1") == held[2:]
    shown = ledger.daemon.json("a2a", "show", held[0])
    assert shown["result"]["error_message"] == "the worker was lost"


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--apply",),
        ("abcdef12", "--apply"),
        ("abcdef12", "--agent", "bob@host"),
    ],
    ids=" ".join,
)
def test_what_is_repaired_is_said_in_one_way(ledger: Ledger, words: tuple[str, ...]) -> None:
    assert ledger.daemon.run("a2a", "cancel", *words, "--reason", "x").code == 2


async def test_the_library_shows_a_task_and_its_tree(ledger: Ledger) -> None:
    token = (ledger.daemon.home / "operator.token").read_text().strip()
    async with Client(ledger.daemon.url, token) as client:
        shown = await client.show(TaskId(ledger.failed))
        assert (shown.task.id, shown.state) == (ledger.failed, "resolved")
        assert shown.result is not None
        assert shown.result.error_message == "no paint"
        tree = await client.tree(TaskId(ledger.failed))
        assert (tree.task_id, tree.children) == (ledger.failed, ())
        with pytest.raises(NotFound):
            await client.show(TaskId(str(uuid4())))


def test_a_remote_agent_is_added_by_its_address(ledger: Ledger) -> None:
    url = "https://weather.example/a2a"
    ledger.daemon.json("agents", "add", "weather", "--kind", "remote", "--url", url)
    agent = ledger.daemon.json("agents", "show", "weather")["agent"]
    assert (agent["kind"], agent["agent_def"]["url"]) == ("remote", url)
    assert ledger.daemon.json("agents", "add", "storms", "--url", url)["agent"]["kind"] == "remote"
    refused = ledger.daemon.json("agents", "add", "calm", "--kind", "worker", "--url", url, code=1)
    assert "url" in refused["message"]


def completed(ledger: Ledger, shell: str, *words: str) -> str:
    """What a shell is told for the last of these words."""
    typed = ("covenant", "--home", str(ledger.daemon.home), *words)
    asked = {
        "_COVENANT_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": " ".join(typed),
        "COMP_CWORD": words[-1] if shell == "fish" else str(len(typed) - 1),
    }
    ran = subprocess.run(
        [str(COVENANT)], capture_output=True, text=True, env=environment(**asked), timeout=BOUND_S, check=True
    )
    return ran.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_ids_agents_and_identities(ledger: Ledger, shell: str) -> None:
    assert "logs" in completed(ledger, shell, "lo")
    assert "force-error" in completed(ledger, shell, "a2a", "force")
    assert ledger.completed in completed(ledger, shell, "a2a", "show", ledger.completed[:4])
    assert ledger.leased in completed(ledger, shell, "logs", ledger.leased[:4])
    assert "bob@host" in completed(ledger, shell, "a2a", "send", "--to", "bo")
    assert "index" in completed(ledger, shell, "agents", "show", "ind")
    assert "failed" in completed(ledger, shell, "a2a", "list", "--state", "fai")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_calls_the_program_back(ledger: Ledger, shell: str) -> None:
    script = ledger.daemon.run("completion", shell).out
    assert f"_COVENANT_COMPLETE={shell}_complete" in script


def test_without_a_daemon_nothing_is_proposed(short_path: Path) -> None:
    asked = {
        "_COVENANT_COMPLETE": "bash_complete",
        "COMP_WORDS": f"covenant --home {short_path / uuid4().hex} logs a",
        "COMP_CWORD": "4",
    }
    ran = subprocess.run(
        [str(COVENANT)], capture_output=True, text=True, env=environment(**asked), timeout=BOUND_S, check=True
    )
    assert (ran.stdout.strip(), ran.stderr) == ("", "")
