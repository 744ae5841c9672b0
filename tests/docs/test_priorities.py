"""The page on priorities: its commands are typed, and the ticket comes before the book."""

import re
from pathlib import Path

from tests.cli.daemons import Daemon
from tests.docs.test_steps import said

TEXT = (Path(__file__).parents[2] / "docs" / "priorities.md").read_text(encoding="utf-8")
(AGENTS,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
(TYPED,) = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)


def test_the_commands_and_the_agent_of_the_page_work(short_path: Path) -> None:
    (short_path / "geocoder.py").write_text(AGENTS)
    daemon = Daemon(short_path / "home", str(short_path / "geocoder.py"))
    try:
        listed = said(daemon, TYPED)
        assert "a ticket" in listed
        taken = daemon.json("a2a", "next", "--all")
        assert (taken["task"]["intent_text"], taken["task"]["priority"]) == ("a ticket", 5)
        assert "Berlin: 52.5, 13.4" in daemon.run("call", "geocoder", "Berlin").out
    finally:
        assert daemon.stop() == 0
