"""Homes that earlier versions wrote open, and hold what they held.

`homes/*.tar.gz` were recorded on the day in their name, and their daemons killed with SIGKILL. A home holds no secret:
its key is derived here, and its tokens are made anew.
"""

import hashlib
import tarfile
from pathlib import Path

import pytest

from tests.cli.daemons import Daemon, covenant

HOMES = sorted((Path(__file__).parent / "homes").glob("*.tar.gz"))
SECOND, FOURTH, PARKED = (
    "1252b9fa-4146-4616-b9f8-9714c8225ae4",
    "0f036baa-e472-4ce5-88e3-acf557f9fcbf",
    "132714fe-4ce8-4f0d-8ba8-d770227f1158",
)
FINISHED = "73edcd8f-5923-490f-9e93-0716139127db"
AUDIT_ROWS = 22
ECHO = """
from covenant import Agent

echo = Agent("echo")


@echo
async def say(turn):
    if turn.text == "ask":
        yield turn.need_input("which one?")
    else:
        yield turn.text
"""


def unpack(recorded: Path, folder: Path) -> Path:
    with tarfile.open(recorded) as archive:
        archive.extractall(folder, filter="data")
    home = folder / "h"
    home.chmod(0o700)
    key = home / "identity" / "local.key"
    key.write_text(hashlib.sha256(b"a home of the version before").hexdigest() + "\n")
    key.chmod(0o600)
    return home


@pytest.mark.parametrize("recorded", HOMES, ids=lambda path: path.name)
def test_a_home_of_an_earlier_version_opens_and_holds_what_it_held(recorded: Path, short_path: Path) -> None:
    home = unpack(recorded, short_path)
    agents = short_path / "agents.py"
    agents.write_text(ECHO)
    assert covenant("doctor", "--home", str(home)).code == 0
    for _ in range(2):  # moved forward once, and read again
        daemon = Daemon(home, str(agents), env={"COVENANT_PEERS_ENABLED": "1", "COVENANT_A2A_PUSH_NOTIFICATIONS": "1"})
        status = daemon.json("a2a", "status")
        assert {task["task"]["id"]: task["state"] for task in status["tasks"]} == {
            SECOND: "in_flight",
            FOURTH: "queued",
            PARKED: "parked",
        }
        said = sorted(part["text"] for result in status["results"] for part in result["content"])
        assert said == ["done first", "done third"]
        assert daemon.json("a2a", "show", FINISHED)["state"] == "resolved"
        verified = daemon.json("audit", "verify")["report"]
        assert (verified["valid"], verified["events"] >= AUDIT_ROWS) == (True, True), verified
        assert [peer["name"] for peer in daemon.json("peers", "list")["peers"]] == ["lab"]
        assert [tenant["name"] for tenant in daemon.json("tenants", "list")["tenants"]] == [
            "default",
            "acme",
        ]
        assert [push["push_id"] for push in daemon.json("a2a", "push", "list")["pushes"]] == ["c1"]
        daemon.stop()
