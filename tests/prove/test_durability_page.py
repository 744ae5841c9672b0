"""docs/durability.md has what the raw results have, for servers of at least five makers."""

import json

import msgspec
import pytest

from covenant.prove.runner import ROWS, Report
from scripts.prove_servers import BEGIN, END, PAGE, RESULTS, SERVERS, readable, table

REPORTS = {path.stem: path for path in sorted(RESULTS.glob("*.json"))}
MAKERS = {"covenant-a2a", "a2a-sdk", "fasta2a", "pydantic-ai-slim", "@a2a-js/sdk"}


def test_the_page_has_what_was_found() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0] == f"\n{table()}\n", "run scripts/prove_servers.py --table"


@pytest.mark.parametrize("name", REPORTS)
def test_every_row_was_tried_on_every_server(name: str) -> None:
    report = json.loads(REPORTS[name].read_text(encoding="utf-8"))
    (few,) = (server.rows for server in SERVERS if server.name == name)
    assert [each["row"] for each in report["findings"]] == (list(few) or [row.name for row in ROWS])
    assert {each["verdict"] for each in report["findings"]} <= {"kept", "broken", "not offered"}
    assert all(each["why"] for each in report["findings"] if each["verdict"] != "kept")
    assert report["extent"]["sends"] == 1_000
    assert report["extent"]["kills"] == 10


def test_the_results_are_of_five_makers_and_of_servers_that_are_tried() -> None:
    assert set(REPORTS) <= {server.name for server in SERVERS}
    assert {server.package for server in SERVERS if server.name in REPORTS} >= MAKERS


@pytest.mark.parametrize("name", REPORTS)
def test_the_readable_results_are_those_of_the_raw_ones(name: str) -> None:
    report = msgspec.json.decode(REPORTS[name].read_bytes(), type=Report)
    assert REPORTS[name].with_suffix(".txt").read_text(encoding="utf-8") == readable(report)
