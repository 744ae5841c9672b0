"""What the page on durable steps says to type is typed here."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cli.daemons import Daemon, environment
from tests.waits import BOUND_S, until

TEXT = (Path(__file__).parents[2] / "docs" / "steps.md").read_text(encoding="utf-8")
(AGENTS,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
CALL, OTHER = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)


def begin(daemon: Daemon, typed: str) -> "subprocess.Popen[str]":
    path = f"{Path(sys.executable).parent}:{environment()['PATH']}"
    env = environment(COVENANT_HOME=str(daemon.home), PATH=path)
    return subprocess.Popen(["bash", "-ec", typed], env=env, stdout=subprocess.PIPE, text=True)


def steps(daemon: Daemon, task_id: str) -> list[dict[str, Any]]:
    shown = daemon.run("a2a", "show", task_id, "--json").json
    return [update["body"] for update in shown["updates"] if update["kind"] == "step"]


def waiting(daemon: Daemon) -> list[str]:
    found = daemon.run("a2a", "list", "--state", "parked", "--json").json["tasks"]
    return [task["task_id"] for task in found if "paid" in [step["name"] for step in steps(daemon, task["task_id"])]]


def test_the_order_of_the_page_waits_for_its_payment_and_is_sent_once(short_path: Path) -> None:
    (short_path / "orders.py").write_text(AGENTS)
    daemon = Daemon(short_path / "home", str(short_path / "orders.py"))
    try:
        ordering = begin(daemon, CALL)
        until(lambda: waiting(daemon))
        (task_id,) = waiting(daemon)
        listed, _ = begin(daemon, OTHER).communicate(timeout=BOUND_S)
        assert task_id[:8] in listed
        said, _ = ordering.communicate(timeout=BOUND_S)
        assert "order 17 was paid with card and is on its way" in said
        assert "order 17 was paid with card and is on its way" in TEXT
        done = [step["name"] for step in steps(daemon, task_id) if "wait" not in step]
        assert done == ["reserve", "sleep", "paid", "send"]
    finally:
        assert daemon.stop() == 0
