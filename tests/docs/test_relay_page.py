"""What the page on relays says to type is typed here, with three daemons."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.cli.daemons import Daemon, covenant, environment
from tests.docs.test_peers_guide import AGENTS
from tests.waits import BOUND_S, until

PAGE = Path(__file__).parent.parent.parent / "docs" / "relay.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)


def test_two_daemons_that_cannot_call_each_other_delegate_as_it_is_written(short_path: Path) -> None:
    (short_path / "agents.py").write_text(AGENTS)
    served = [block.partition("\n")[0] for block in BLOCKS]
    ids: dict[str, str] = {}
    with ExitStack() as stack:
        relay = ""
        for line in served:
            env = dict(re.findall(r"(COVENANT_\w+)='?([^' ]+)'?", line.partition("covenant serve")[0]))
            env = {name: value.replace("https://relay.example", relay) for name, value in env.items()}
            (home,) = re.findall(r"--home (\w+)", line)
            agents = (str(short_path / "agents.py"),) if "agents.py" in line else ()
            daemon = Daemon(short_path / home, *agents, env=env)
            stack.callback(daemon.stop)
            relay = relay or daemon.url
            ids[home.upper()] = covenant("--home", str(short_path / home), "peers", "list", "--json").json["id"]
        said = ""
        for command in [line for block in BLOCKS for line in block.splitlines()[1:]]:
            if "peers delegate" in command:
                until(lambda: _trust(short_path / "lab", "office") == "verified")
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", command],
                cwd=short_path,
                env=environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", **ids),
                capture_output=True,
                text=True,
                timeout=BOUND_S,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            said = done.stdout
        assert "All there is about the tides." in said


def _trust(home: Path, peer: str) -> str:
    peers = covenant("--home", str(home), "peers", "list", "--json").json["peers"]
    return next(str(each["trustLevel"]) for each in peers if each["name"] == peer)


def test_every_page_that_is_linked_to_exists() -> None:
    for link in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (PAGE.parent / link).exists(), link
