"""Hypothesis profiles: `dev` explores, `ci` repeats itself, `quick` is for `make test`, `thorough` for `make test-all`.

None has a deadline: on a busy machine one example may wait for the disk, and every test has a timeout anyway.
"""

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Before anything imports it, so that a failing suite explains itself.
pytest.register_assert_rewrite("tests.ledger_contract")

# A fixture that several modules import is made once for each of them: this one starts a server.
from tests.ledger_contract.postgres_server import databases  # noqa: E402
from tests.places import short_folder  # noqa: E402

__all__ = ["databases"]

# A shell starts what runs in its background with SIGINT ignored, and so would everything be that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# So does `nohup` with SIGHUP.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Tests call nobody outside. Each client would read the authorities of the system, which takes 20 ms.
os.environ.setdefault("SSL_CERT_FILE", str(Path(__file__).with_name("authority.pem")))

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("quick", deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=1_000, print_blob=True)
settings.load_profile("dev")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays to the end: the garbage collector need not look through it, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def short_path() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """After the fixtures of the session: the servers that tests here have started and share."""
    if (engine := sys.modules.get("tests.engine_under_test")) is not None:
        engine.stop_server()
    if (forks := sys.modules.get("tests.cli.fork_server")) is not None:
        forks.stop_fork_servers()


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
