"""The kit's two command lines: what they print, write and return, and that nothing lives on."""

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from covenant.prove.command import main
from covenant.prove.command_options import OPTIONS
from covenant.prove.runner import ROWS
from tests.prove.conftest import CARD, ROOT, TINY, rows
from tests.waits import BOUND_S, until

LINES = [
    [sys.executable, "-m", "covenant.prove"],
    [str(Path(sys.executable).with_name("covenant")), "prove"],
]
BOUNDS = ["--bound", str(BOUND_S), "--start-bound", str(BOUND_S)]


def ran(line: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*line, *words], capture_output=True, text=True, timeout=2 * BOUND_S, check=False)


@pytest.mark.parametrize("line", LINES, ids=["module", "command"])
def test_both_command_lines_try_the_same(line: list[str]) -> None:
    done = ran(line, "--command", TINY, "--card", CARD, "--json", *BOUNDS, *rows("acknowledged"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["kind"] == "durability"
    assert [(each["row"], each["verdict"]) for each in report["findings"]] == [("acknowledged", "kept")]
    assert report["server"] == "tiny"
    assert report["speaks"] == "A2A 1.0 over JSONRPC"


@pytest.mark.parametrize("line", LINES, ids=["module", "command"])
def test_wrong_usage_is_told_and_nothing_is_started(line: list[str]) -> None:
    missing = ran(line, "--card", CARD)
    assert (missing.returncode, "--command is missing" in missing.stderr) == (2, True)
    unknown = ran(line, "--command", "true", "--card", CARD, "--row", "no-such-row")
    assert (unknown.returncode, "no-such-row" in unknown.stderr) == (2, True)


@pytest.mark.parametrize("line", LINES, ids=["module", "command"])
@pytest.mark.parametrize(
    "wrong",
    [("--senders", "0"), ("--bound", "0"), ("--bound", "nan"), ("--kills", "-1"), ("--junit", "{folder}/no/prove.xml")],
    ids=" ".join,
)
def test_an_option_that_cannot_be_followed_is_refused_before_the_start(
    line: list[str], wrong: tuple[str, str], tmp_path: Path
) -> None:
    started = tmp_path / "started"
    option, value = wrong
    done = ran(line, "--command", f"touch {started}", "--card", CARD, option, value.format(folder=tmp_path))
    assert (done.returncode, option in done.stderr) == (2, True), done
    assert not started.exists()


@pytest.mark.parametrize("line", LINES, ids=["module", "command"])
def test_both_command_lines_know_every_option(line: list[str]) -> None:
    told = ran(line, "--help").stdout
    assert all(f"--{option.name}" in told for option in OPTIONS)


def test_the_table_is_for_people_and_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--command", f"{TINY} works-for-ever", "--card", CARD, "--evidence", "--start-bound", str(BOUND_S)]
    assert main([*words, "--bound", "2", *rows("interrupted", "terminal")]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^broken +interrupted ", out, re.MULTILINE)
    assert re.search(r"^kept +terminal ", out, re.MULTILINE)
    assert "1 kept, 1 broken" in out
    assert "kill -9 while the agent was at work" in out
    assert max(map(len, out.splitlines())) <= 80


def test_junit_has_a_case_for_each_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prove.xml"
    words = ["--command", f"{TINY} lacks-list", "--card", CARD, *BOUNDS, "--junit", str(file)]
    assert main([*words, *rows("list-pages", "acknowledged")]) == 0
    suite = ET.parse(file).getroot()
    assert suite.attrib | {"tests": "2", "failures": "0", "skipped": "1", "errors": "0"} == suite.attrib
    cases = {case.attrib["name"]: [child.tag for child in case] for case in suite}
    assert cases == {"list-pages": ["skipped", "system-out"], "acknowledged": ["system-out"]}


def test_the_rows_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    out = capsys.readouterr().out
    assert all(row.name in out and row.promise in out for row in ROWS)


def test_nothing_that_was_started_lives_on(tmp_path: Path) -> None:
    """Not even a child of the server, when the kit itself is interrupted."""
    marks = tmp_path / "pids"
    script = f"sleep 600 & echo $! >> {marks}; exec {TINY}"
    command = f"sh -c '{script}'"
    line = [*LINES[0], "--command", command, "--card", CARD, *BOUNDS, *rows("executed-once")]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as kit:
        until(lambda: marks.exists() and len(marks.read_text().split()) >= 2)
        kit.terminate()
        kit.wait(BOUND_S)
    pids = marks.read_text().split()
    until(lambda: not any(_runs(pid) for pid in pids))


def _runs(pid: str) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_the_page_lists_every_row() -> None:
    page = (ROOT / "docs" / "prove.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `([a-z-]+)` \| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    assert told == [(row.name, row.promise, row.how) for row in ROWS]
    assert all(
        f"--{option.name}" in page for option in OPTIONS if option.name in {"row", "list", "json", "junit", "bound"}
    )
