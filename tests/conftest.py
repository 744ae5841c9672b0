"""Hypothesis profiles: `dev` explores, `ci` repeats itself, `thorough` is for `make test-all`.

None has a deadline: on a busy machine one example may wait for the disk, and every test has a timeout anyway.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Before anything imports it, so that a failing suite explains itself.
pytest.register_assert_rewrite("tests.ledger_contract")

from tests.places import short_folder  # noqa: E402

# A shell starts what runs in its background with SIGINT ignored, and so would everything be that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("thorough", deadline=None, max_examples=1_000, print_blob=True)
settings.load_profile("dev")


@pytest.fixture
def short_path() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many crash points were struck, with what, and how often a rule was broken. Here, for every worker's tests."""
    struck = [
        value
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        for name, value in report.user_properties
        if name == "crash_points"
    ]
    if struck:
        points, kinds = {point for point, *_ in struck}, {fault for _, fault, *_ in struck}
        runs, violations = sum(runs for *_, runs, _ in struck), sum(broken for *_, broken in struck)
        terminalreporter.write_line(
            f"crash points: {len(points)} points × {len(kinds)} faults, {runs} runs, {violations} violations"
        )
