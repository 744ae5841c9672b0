"""Each row of the kit sees its promise kept by a server that keeps it, and broken by one that breaks it."""

import pytest

from covenant.prove.runner import ROWS
from tests.matrices import first_of, first_rows_of
from tests.prove.conftest import TINY, Prove, rows

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
# Other ways to break a promise that a row must not miss.
MORE_FLAWS = [
    ("stream-resumed", "refuses-streams-again"),
    ("stream-resumed", "streams-nothing-again"),
    ("stream-resumed", "repeats-and-cuts"),
    ("stream-resumed", "works-for-ever"),
    ("push", "loses-first-pushes"),
    ("push", "loses-what-it-answered"),
    ("push", "pushes-the-end-alone"),
    ("push", "works-for-ever"),
]
# Answers that are not A2A, a row that meets each, and what of it cannot be read.
ODD = {
    "code-as-text": ("terminal", "NOT_FOUND"),
    "card-as-html": ("terminal", "<html>"),
    "keys-as-html": ("push-signed", "<html>"),
    "push-as-text": ("push", "hello"),
    "artifact-as-text": ("terminal", "artifacts"),
    "status-as-text": ("many-sends", "status"),
}
# What the small server can be told not to have, and the rows that then have nothing to try.
LACKS = {
    "lacks-cancel": ["canceled"],
    "lacks-list": ["list-pages"],
    "lacks-stream": ["stream-resumed", "slow-reader"],
    "has-no-stream-of-the-ended": ["stream-resumed"],
    "lacks-push": ["push", "push-signed"],
    "lacks-old-version": ["version-skew"],
    "lacks-repeats": ["duplicate"],
    "lacks-queue": ["queued"],
    "lacks-questions": ["input-required"],
    "lacks-signatures": ["push-signed"],
}
BROKEN_WITHIN_S = 5.0
"""How long the kit waits for what never comes."""


def test_every_row_has_a_server_that_breaks_it() -> None:
    assert [row.name for row in ROWS] == list(FLAWS)


@pytest.mark.parametrize("row", first_of(FLAWS, 3))
def test_a_promise_that_is_kept_is_seen_as_kept(prove: Prove, row: str) -> None:
    finding = prove(TINY, *rows(row))[row]
    assert finding["verdict"] == "kept", finding
    assert finding["evidence"]


@pytest.mark.parametrize(("row", "flaw"), first_rows_of([*FLAWS.items(), *MORE_FLAWS], 3))
def test_a_promise_that_is_broken_is_seen_as_broken(prove: Prove, row: str, flaw: str) -> None:
    finding = prove(f"{TINY} {flaw}", *rows(row), bound_s=BROKEN_WITHIN_S)[row]
    assert finding["verdict"] == "broken", finding
    assert finding["why"]


@pytest.mark.parametrize("flaw", first_of(ODD, 2))
def test_an_answer_that_cannot_be_read_breaks_its_row_and_the_run_goes_on(prove: Prove, flaw: str) -> None:
    row, said = ODD[flaw]
    found = prove(f"{TINY} {flaw}", *rows(row, "version-skew"), bound_s=BROKEN_WITHIN_S)
    assert set(found) == {row, "version-skew"}
    assert found[row]["verdict"] == "broken", found
    assert "cannot be read" in found[row]["why"]
    assert said in found[row]["why"]


@pytest.mark.parametrize("lack", first_of(LACKS, 3))
def test_what_a_server_does_not_have_is_not_called_broken(prove: Prove, lack: str) -> None:
    findings = prove(f"{TINY} {lack}", *rows(*LACKS[lack]))
    assert {finding["verdict"] for finding in findings.values()} == {"not offered"}, findings
    assert all(finding["why"] for finding in findings.values())


def test_a_mechanism_for_repeats_that_is_named_and_does_nothing_is_broken(prove: Prove) -> None:
    found = prove(f"{TINY} lacks-repeats", *rows("duplicate"), "--idempotency-header", "Idempotency-Key")
    assert found["duplicate"]["verdict"] == "broken"


def test_work_that_is_declared_as_safe_to_repeat_may_run_again(prove: Prove) -> None:
    found = prove(f"{TINY} runs-again", *rows("executed-once"), "--at-least-once")
    assert found["executed-once"]["verdict"] == "not offered"


def test_a_server_that_does_not_start_again_has_broken_its_promise(prove: Prove) -> None:
    found = prove(f"{TINY} starts-once", *rows("acknowledged"), bound_s=BROKEN_WITHIN_S)
    assert found["acknowledged"]["verdict"] == "broken"
    assert "did not start" in found["acknowledged"]["why"]


def test_a_server_that_never_starts_is_not_judged(prove: Prove) -> None:
    found = prove("false", *rows("acknowledged", "terminal"))
    assert {finding["verdict"] for finding in found.values()} == {"not checked"}
