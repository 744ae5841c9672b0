"""The page of states says what the table says."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_page_of_states_is_what_the_table_draws() -> None:
    drawn = runpy.run_path(str(ROOT / "scripts" / "state_diagram.py"))["page"]()
    assert (ROOT / "docs" / "states.md").read_text(encoding="utf-8") == drawn
