"""Our own version of the workflow of the page is run, over a kill between its question and the answer."""

import re
import signal
from pathlib import Path

from tests.agents.test_served_files import get, send
from tests.cli.daemons import Daemon
from tests.waits import until

TEXT = (Path(__file__).parents[2] / "docs" / "workflows.md").read_text(encoding="utf-8")
(AGENTS,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_workflow_of_the_page_is_run_over_a_kill(short_path: Path) -> None:
    shorter = AGENTS.replace("PAUSE_S = 3600", "PAUSE_S = 0.2")
    assert shorter != AGENTS
    file = short_path / "parcels.py"
    file.write_text(shorter)
    daemon = Daemon(short_path / "home", str(file))
    asked = send(daemon, "parcels", "a lamp")
    assert asked["status"]["state"] == "TASK_STATE_INPUT_REQUIRED"
    assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
    daemon = Daemon(short_path / "home", str(file))
    try:
        assert daemon.run("a2a", "approve", asked["id"]).code == 0
        until(lambda: get(daemon, "parcels", asked["id"])["status"]["state"] == "TASK_STATE_COMPLETED")
        said = get(daemon, "parcels", asked["id"])["status"]["message"]["parts"]
        assert said == [{"text": "parcel 6 is on its way"}]
    finally:
        assert daemon.stop() == 0
