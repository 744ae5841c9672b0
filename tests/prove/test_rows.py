"""Each row of the kit sees its promise kept by a server that keeps it, and broken by one that breaks it."""

import json
import sys
from pathlib import Path

import pytest

from covenant.prove.command import main
from covenant.prove.runner import ROWS
from tests.waits import BOUND_S

SERVER = Path(__file__).with_name("tiny_server.py")
FLAWS = {
    "acknowledged": "writes-late",
    "interrupted": "works-for-ever",
    "executed-once": "runs-again",
    "queued": "forgets-its-queue",
    "input-required": "forgets-questions",
    "canceled": "revives-canceled",
    "terminal": "reopens-ended",
    "graceful-stop": "stops-at-once",
    "stream-resumed": "repeats-events",
    "artifacts": "loses-chunks",
    "slow-reader": "waits-for-readers",
    "push": "forgets-pushes",
    "push-signed": "forgets-its-key",
    "duplicate": "repeats-at-once",
    "list-pages": "turns-pages-around",
    "version-skew": "splits-versions",
    "many-sends": "writes-late",
}


def tried(capsys: pytest.CaptureFixture[str], row: str, flaw: str, bound_s: float, *more: str) -> dict[str, object]:
    """The kit's finding on one row."""
    command = f"{sys.executable} {SERVER} {{port}} {{home}} {flaw}"
    arguments = ["--command", command, "--card", "http://127.0.0.1:{port}/card", "--row", row, "--json"]
    arguments += [
        "--bound",
        str(bound_s),
        "--start-bound",
        str(BOUND_S),
        "--sends",
        "60",
        "--senders",
        "4",
        "--kills",
        "2",
    ]
    code = main([*arguments, *more])
    report = json.loads(capsys.readouterr().out)
    (finding,) = report["findings"]
    assert code == (1 if finding["verdict"] == "broken" else 0), finding
    assert isinstance(finding, dict)
    return finding


def test_every_row_has_a_server_that_breaks_it() -> None:
    assert [row.name for row in ROWS] == list(FLAWS)


@pytest.mark.parametrize("row", FLAWS)
def test_a_promise_that_is_kept_is_seen_as_kept(capsys: pytest.CaptureFixture[str], row: str) -> None:
    finding = tried(capsys, row, "", BOUND_S)
    assert finding["verdict"] == "kept", finding


@pytest.mark.parametrize("row", FLAWS)
def test_a_promise_that_is_broken_is_seen_as_broken(capsys: pytest.CaptureFixture[str], row: str) -> None:
    finding = tried(capsys, row, FLAWS[row], 5.0)
    assert finding["verdict"] == "broken", finding
    assert finding["why"]


def test_work_that_is_declared_as_safe_to_repeat_may_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    finding = tried(capsys, "executed-once", "runs-again", BOUND_S, "--at-least-once")
    assert finding["verdict"] == "not offered", finding
