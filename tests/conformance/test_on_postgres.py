"""The suites of A2A, of the mailbox and of the simple door once more, on a ledger in PostgreSQL."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.matrix
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("suite", ["tests/conformance/a2a", "tests/doors/native", "tests/doors/simple"])
def test_a_suite_passes_on_postgres(suite: str) -> None:
    marks = "not slow and not root and not matrix and not browser and not embedded"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", marks, "-p", "no:cacheprovider", suite],
        cwd=ROOT,
        env={**os.environ, "COVENANT_TEST_LEDGER": "postgres"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6_000:]
