"""The suites of A2A, of the mailbox, of the simple door and of webhooks once more, on a ledger in PostgreSQL."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.matrix
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize(
    "suites",
    [
        ("tests/conformance/a2a",),
        ("tests/doors/native",),
        ("tests/doors/simple", "tests/simple"),
        ("tests/outbound/test_push_sender.py", "tests/conformance/test_extension.py"),
    ],
    ids=lambda suites: suites[0].removeprefix("tests/"),
)
def test_a_suite_passes_on_postgres(suites: tuple[str, ...]) -> None:
    marks = "not slow and not root and not matrix and not browser and not embedded"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", marks, "-p", "no:cacheprovider", *suites],
        cwd=ROOT,
        env={**os.environ, "COVENANT_TEST_LEDGER": "postgres"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6_000:]
