"""What the page on retries says to type is typed here."""

import re
from pathlib import Path

from tests.cli.daemons import Daemon
from tests.docs.test_steps import said

TEXT = (Path(__file__).parents[2] / "docs" / "retries.md").read_text(encoding="utf-8")
(AGENTS,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
(TYPED,) = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)


def test_both_agents_of_the_page_answer_after_their_pauses(short_path: Path) -> None:
    (short_path / "again.py").write_text(AGENTS)
    daemon = Daemon(short_path / "home", str(short_path / "again.py"))
    try:
        told = said(daemon, TYPED)
        assert "sunny, says attempt 2" in told
        assert "bought" in told
    finally:
        assert daemon.stop() == 0
