"""What the page on durable steps says to type is typed here."""

import re
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.cli.daemons import Daemon, environment, started
from tests.waits import BOUND_S, until

TEXT = (Path(__file__).parents[2] / "docs" / "steps.md").read_text(encoding="utf-8")
(AGENTS,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
CALL, OTHER = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)


def begin(daemon: Daemon, typed: str) -> "AbstractContextManager[subprocess.Popen[str]]":
    path = f"{Path(sys.executable).parent}:{environment()['PATH']}"
    env = environment(COVENANT_HOME=str(daemon.home), PATH=path)
    return started(["bash", "-ec", typed], env=env, stdout=subprocess.PIPE, text=True)


def said(daemon: Daemon, typed: str) -> str:
    """What it prints."""
    with begin(daemon, typed) as process:
        return process.communicate(timeout=BOUND_S)[0]


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
        with begin(daemon, CALL) as ordering:
            until(lambda: waiting(daemon))
            (task_id,) = waiting(daemon)
            assert task_id[:8] in said(daemon, OTHER)
            told, _ = ordering.communicate(timeout=BOUND_S)
        assert "order 17 was paid with card and is on its way" in told
        assert "order 17 was paid with card and is on its way" in TEXT
        done = [step["name"] for step in steps(daemon, task_id) if "wait" not in step]
        assert done == ["reserve", "sleep", "paid", "send"]
    finally:
        assert daemon.stop() == 0
