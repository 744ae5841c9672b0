"""SECURITY.md promises, and names for each promise the test that holds it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_promise_names_tests_that_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    rows = re.findall(r"^\| [^|]*\| ([^|]+[.:]) \| ([^|]+) \|$", text, re.MULTILINE)
    assert len(rows) >= 25
    for promise, tests in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)`", tests)
        assert named, f"no test holds: {promise}"
        for path in named:
            assert "def test_" in (ROOT / path).read_text(), path
