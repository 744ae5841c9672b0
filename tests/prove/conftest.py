"""Runs of the kit against real servers."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covenant.prove.command import main
from tests.waits import BOUND_S

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "prove"
TINY = f"{sys.executable} {Path(__file__).with_name('tiny_server.py')} {{port}} {{home}}"
CARD = "http://127.0.0.1:{port}/.well-known/agent-card.json"
SMALL = ["--sends", "60", "--senders", "4", "--kills", "2"]

Prove = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture
def prove(capsys: pytest.CaptureFixture[str]) -> Prove:
    """Tries rows; the finding on each by its name."""

    def tried(command: str, *more: str, card: str = CARD, bound_s: float = BOUND_S) -> dict[str, dict[str, Any]]:
        words = ["--command", command, "--card", card, "--bound", str(bound_s), "--start-bound", str(BOUND_S), "--json"]
        code = main([*words, *SMALL, *more])
        findings = {finding["row"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
        verdicts = {finding["verdict"] for finding in findings.values()}
        assert code == (1 if "broken" in verdicts else 4 if "not checked" in verdicts else 0), findings
        return findings

    return tried


def rows(*names: str) -> list[str]:
    return [word for name in names for word in ("--row", name)]
