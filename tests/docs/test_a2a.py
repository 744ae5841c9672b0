"""What the first pages on A2A say to type is typed here, as it stands: also what is said about a kill."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from covenant.wire.a2a import error_codes as a2a_errors
from tests.cli.daemons import Daemon, environment
from tests.waits import BOUND_S

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "a2a.md"
TEXT = PAGE.read_text(encoding="utf-8")
FORMAT = ROOT / "docs" / "formats" / "a2a.md"
HERE = "http://localhost:8421"

PATHS, START, VARIABLES, CARD, REST, RPC, OLD, STREAM, ASKING, KEY, SDK, LONG, REPAIR = re.findall(
    r"```sh\n(.*?)```", TEXT, re.DOTALL
)
AGENTS, CLIENT = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


class Terminal:
    """The reader's second one, in the folder with `agents.py`."""

    def __init__(self, folder: Path, daemon: Daemon) -> None:
        self.folder = folder
        self.daemon = daemon

    def type(self, block: str) -> str:
        typed = f"{VARIABLES}\n{block}".replace(HERE, self.daemon.url)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", typed],
            cwd=self.folder,
            env=environment(
                COVENANT_HOME=str(self.daemon.home), PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            ),
            capture_output=True,
            text=True,
            timeout=BOUND_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def test_the_first_exchange_over_a2a_works_as_it_is_written(short_path: Path) -> None:
    assert "covenant serve agents.py" in START
    typed = [f'{name}="' for name in ("PATH", "COVENANT_HOME", "AGENTS", "AUTH", "TASK")]
    known = {word for word in typed if word.removesuffix('"') in TEXT}
    used = set(re.findall(r"\$\{?([A-Z_]+)", "".join(re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL))))
    assert used - {"PWD"} <= {word.partition("=")[0] for word in known}
    assert "/.venv/bin" in PATHS
    (short_path / "agents.py").write_text(AGENTS)
    (short_path / "client.py").write_text(CLIENT)
    program = str(short_path / "agents.py")
    daemon = Daemon(short_path / "home", program)
    try:
        terminal = Terminal(short_path, daemon)
        assert '"supportedInterfaces"' in terminal.type(CARD)
        assert "GOOD MORNING" in terminal.type(REST)
        said = terminal.type(RPC)
        assert "GOOD DAY" in said
        assert "GOOD EVENING" in said
        assert "GOOD NIGHT" in terminal.type(OLD)
        streamed = terminal.type(STREAM)
        numbers = [int(number) for number in re.findall(r"^id: (\d+)$", streamed, re.MULTILINE)]
        assert numbers == [*range(1, 9), *range(4, 9)]
        assert "A table for four." in terminal.type(ASKING)
        assert len(set(re.findall(r'\{"task":\{"id":"([^"]+)"', terminal.type(KEY)))) == 1
        assert terminal.type(SDK).split() == ["HELLO", "FROM", "THE", "SDK"]
        assert "TASK_STATE_COMPLETED" not in terminal.type(LONG)
        daemon.stop(9)
        daemon = Daemon(short_path / "home", program)
        told = Terminal(short_path, daemon).type(REPAIR)
        assert "holder lost" in told
        assert "TASK_STATE_COMPLETED" in told
        assert "TO BE SAID SO THAT ONE CAN STOP IT" in told
    finally:
        daemon.stop()


def test_every_page_that_is_linked_to_exists() -> None:
    for page in (PAGE, FORMAT):
        for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), link


def test_the_table_of_errors_is_that_of_the_code() -> None:
    rows = re.findall(
        r"^\| `([A-Z_]+)` \|([^|]*)\|([^|]*)\| (\d+) \| `([A-Z_]+)` \|$", FORMAT.read_text(), re.MULTILINE
    )
    table = (*a2a_errors.BY_CODE.values(), *a2a_errors.BY_CLASS.values(), a2a_errors.INTERNAL)
    faults = {each.reason: each for each in table}
    # Nobody is told these over A2A: agents' nonsense is a task that failed, and no operation is for some alone.
    unsaid = {"INVALID_AGENT_RESPONSE", "PERMISSION_DENIED", "METHOD_NOT_ALLOWED"}
    assert {reason for reason, *_ in rows} == faults.keys() - unsaid
    for reason, new, old, status, grpc in rows:
        fault = faults[reason]
        assert (int(status), grpc) == (fault.http, fault.grpc)
        if new.strip():
            assert (int(new), int(old)) == (fault.v1, fault.v03)
