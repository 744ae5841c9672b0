"""The page on approvals: its agent asks, is approved and answered from another terminal, and ends as the page says."""

import re
from pathlib import Path

from tests.cli.daemons import Daemon
from tests.docs.test_steps import begin
from tests.waits import BOUND_S, until

TEXT = (Path(__file__).parents[2] / "docs" / "approvals.md").read_text(encoding="utf-8")
(AGENTS,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
CALL, OTHER = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)


def asked(daemon: Daemon, words: str) -> list[str]:
    found = daemon.run("a2a", "list", "--state", "parked", "--json").json["tasks"]
    shown = [daemon.run("a2a", "show", task["task_id"], "--json").json for task in found]
    return [each["task"]["id"] for each in shown if words in str(each["updates"][-1])]


def test_the_refund_of_the_page_is_approved_and_paid(short_path: Path) -> None:
    (short_path / "refunds.py").write_text(AGENTS)
    daemon = Daemon(short_path / "home", str(short_path / "refunds.py"))
    try:
        with begin(daemon, CALL) as calling:
            until(lambda: bool(asked(daemon, "Refund 40 EUR")))
            (task_id,) = asked(daemon, "Refund 40 EUR")
            looked, named, approve, answer = OTHER.strip().splitlines()
            for line in (looked, approve):
                with begin(daemon, f"{named}\n{line}") as typed:
                    assert typed.wait(BOUND_S) == 0
            until(lambda: bool(asked(daemon, "Which account")))
            with begin(daemon, f"{named}\n{answer}") as typed:
                assert typed.wait(BOUND_S) == 0
            calling.communicate(timeout=BOUND_S)
        until(lambda: "40 EUR go to DE12 3456" in daemon.run("a2a", "show", task_id, "--json").out)
    finally:
        assert daemon.stop() == 0
