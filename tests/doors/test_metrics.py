"""The numbers for Prometheus: what is copied on the loop, what text is made of it, and how often."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from covenant.doors.metrics import BOUNDS_S, Meter
from covenant.ledger.contract.ledger import Counts

COUNTS = Counts(
    queued=3,
    leased=2,
    parked=1,
    following=0,
    settled=4,
    cached=5,
    oldest_lease_age_ms=1500,
    holders_lost=1,
    commits=10,
    failure=None,
    behind=2,
    gauges={"durable_seq": 9, "archived_seq": 7, "syncs": 6},
)
CALLS_MAX = 1_000
"""Calls of functions, ours and the interpreter's, that the loop makes for one text: each takes about a tenth of a
microsecond, so this is a tenth of the millisecond that it may take. Making the text takes far more."""


def made_of(meter: Meter) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = meter.read(COUNTS).text().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def calls_of(work: Callable[[], Any]) -> int:
    """How many functions are called by this."""
    called = 0

    def note(_: FrameType, event: str, __: Any) -> None:
        nonlocal called
        called += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return called


def test_a_histogram_adds_up_from_bound_to_bound() -> None:
    meter = Meter()
    timer = meter.timer("http", "send")
    for seconds in (0.0001, 0.003, 0.003, 99.0):
        timer.observe(seconds)
    found = made_of(meter)
    labels = (("door", "http"), ("operation", "send"))
    assert found["covenant_request_seconds_count", labels] == 4
    assert found["covenant_request_seconds_sum", labels] == 99.0061
    buckets = [
        found["covenant_request_seconds_bucket", (labels[0], ("le", str(bound)), labels[1])]
        for bound in (*BOUNDS_S, "+Inf")
    ]
    assert buckets == [1, 1, 1, *[3] * (len(BOUNDS_S) - 3), 4]


def test_the_ledgers_numbers_are_told_under_their_names() -> None:
    found = made_of(Meter())
    assert found["covenant_tasks", (("state", "queued"),)] == found["covenant_queue_depth", ()] == 3
    assert found["covenant_oldest_lease_age_seconds", ()] == 1.5
    assert found["covenant_archive_lag_records", ()] == 2
    assert found["covenant_commits_total", ()] == 10
    assert found["covenant_holders_lost", ()] == 1


def test_refusals_and_pushes_are_counted_by_what_they_were() -> None:
    meter = Meter()
    meter.refused("a2a", "rate_limit")
    meter.refused("a2a", "rate_limit")
    meter.pushed("delivered")
    found = made_of(meter)
    assert found["covenant_refused_total", (("code", "rate_limit"), ("door", "a2a"))] == 2
    assert found["covenant_push_attempts_total", (("outcome", "delivered"),)] == 1


def test_the_loop_copies_numbers_and_makes_no_text() -> None:
    meter = Meter()
    for number in range(100):
        meter.timer("http", f"operation{number}").observe(0.01)
        meter.refused("http", f"code{number}")
    assert calls_of(lambda: meter.read(COUNTS)) < CALLS_MAX
    numbers = meter.read(COUNTS)
    assert calls_of(numbers.text) > CALLS_MAX


def test_the_longest_queues_have_labels_of_their_own_where_they_are_told() -> None:
    text = Meter().read(COUNTS, [("bob@test", 3, 1.5), ("carol@test", 1, 0.25)]).text().decode()
    found = {
        (sample.name, sample.labels.get("agent")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("covenant_recipient")
    }
    assert found == {
        ("covenant_recipient_queue_depth", "bob@test"): 3,
        ("covenant_recipient_queue_depth", "carol@test"): 1,
        ("covenant_recipient_oldest_queued_age_seconds", "bob@test"): 1.5,
        ("covenant_recipient_oldest_queued_age_seconds", "carol@test"): 0.25,
    }
    assert "covenant_recipient" not in Meter().read(COUNTS).text().decode()
