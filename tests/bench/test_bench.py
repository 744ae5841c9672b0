"""Each part of `make bench` runs, at a size that says nothing about speed."""

import subprocess
import sys
from io import StringIO
from math import isfinite
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from bench.__main__ import PARTS, main, measure
from bench.report import Row, Table, at_least, at_most, fact, ratio, show, summary
from bench.workload import Measured
from tests.matrices import first_of
from tests.waits import BOUND_S

FIRST = ("queues", "search", "steps", "feed", "pauses")
"""Parts that start few processes."""
PEERS = Path(__file__).parents[2] / "bench" / "peers"


@pytest.mark.parametrize("part", first_of([*FIRST, *(part for part in PARTS if part not in FIRST)], len(FIRST)))
def test_a_part_measures_and_ends(part: str, tmp_path: Path) -> None:
    table = PARTS[part]("smoke", tmp_path)
    assert table.part == part
    assert all(isfinite(row.value) for row in table.rows)
    assert msgspec.json.decode(msgspec.json.encode(table), type=Table) == table


def test_every_promise_has_a_row(tmp_path: Path) -> None:
    table = PARTS["pauses"]("smoke", tmp_path)
    assert [row.target for row in table.rows if row.target] == ["≤ 50", "≤ 50"]


def test_a_run_leaves_nothing_behind(tmp_path: Path) -> None:
    printed = StringIO()
    tables = measure(["pauses"], "smoke", Console(file=printed, width=118), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert f"of {len([row for row in tables[0].rows if row.target])} targets met" in printed.getvalue()


def test_a_part_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["queues", "colour"])
    assert stopped.value.code == 2
    assert "no such part: colour" in capsys.readouterr().err


def run_round(script: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", script, str(folder / "queue"), "4", "0.05"],
        cwd=PEERS,
        capture_output=True,
        timeout=BOUND_S,
        check=False,
    )


def test_a_peers_round_counts_what_its_threads_did(tmp_path: Path) -> None:
    script = "from rounds import run; from time import sleep; run(lambda file: lambda: sleep(0.001))"
    done = run_round(script, tmp_path)
    assert done.returncode == 0, done.stderr
    measured = msgspec.json.decode(done.stdout, type=Measured)
    assert measured.cycles > 0
    assert measured.seconds >= 0.05


def test_a_peers_round_that_fails_says_so(tmp_path: Path) -> None:
    script = "from rounds import run; left = iter(range(5)); run(lambda file: lambda: next(left))"
    done = run_round(script, tmp_path)
    assert done.returncode != 0
    assert b"StopIteration" in done.stderr


def test_the_summary_names_what_was_missed() -> None:
    rows = [at_least("speed", 2.5, 3, "×"), at_most("pause", 12, 50, "ms"), fact("rate", 1234, "cycles/s")]
    sentence, missed = summary([Table(part="queues", title="", rows=rows)])
    assert sentence == "1 of 2 targets met"
    assert missed == ["queues: speed: 2.5 ×, target ≥ 3"]


def test_a_table_shows_value_target_and_whether_it_was_met() -> None:
    printed = StringIO()
    rows: list[Row] = [
        at_least("speed", 2.5, 3, "×"),
        at_most("pause", 12, 50, "ms"),
        fact("rate", 12345.6, "cycles/s"),
    ]
    show(Console(file=printed, width=118), Table(part="queues", title="a title", rows=rows, notes=["a note"]))
    text = printed.getvalue()
    for expected in ("queues: a title", "2.5 ×", "≥ 3", "NO", "12 ms", "≤ 50", "yes", "12,346 cycles/s", "a note"):
        assert expected in text


def test_whoever_has_done_nothing_is_not_outrun() -> None:
    assert (ratio(6.0, 2.0), ratio(6.0, 0.0)) == (3.0, 0.0)
