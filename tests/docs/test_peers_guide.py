"""What the page on peers says to type is typed here, with two daemons."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.cli.daemons import Daemon, environment
from tests.waits import BOUND_S

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "peers.md"
TEXT = PAGE.read_text(encoding="utf-8")

LAB, OFFICE, MEET, DELEGATE, _, ROTATE, PROOF = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
(AGENTS,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_two_daemons_delegate_and_prove_as_it_is_written(short_path: Path) -> None:
    (short_path / "agents.py").write_text(AGENTS)
    assert "serve agents.py --home lab --http-port 9102" in LAB
    assert "serve --home office --http-port 9101" in OFFICE
    lab = Daemon(short_path / "lab", str(short_path / "agents.py"), env={"COVENANT_PEERS_ENABLED": "1"})
    try:
        office = Daemon(short_path / "office", env={"COVENANT_PEERS_ENABLED": "1"})
        try:

            def typed(block: str) -> str:
                here = block.replace("http://127.0.0.1:9101", office.url).replace("http://127.0.0.1:9102", lab.url)
                done = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", here],
                    cwd=short_path,
                    env=environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}"),
                    capture_output=True,
                    text=True,
                    timeout=BOUND_S,
                    check=False,
                )
                assert done.returncode == 0, done.stdout + done.stderr
                return done.stdout

            met = typed(MEET)
            assert re.search(r"lab +verified +online", met), met
            did = typed(DELEGATE)
            assert "researcher" in did
            assert "All there is about the tides." in did
            proven = typed(PROOF)
            assert "BROKEN" not in proven
            assert "every line as it was proven" in proven
            lab.stop()
            typed(ROTATE)
            assert (short_path / "lab.backup").exists()
        finally:
            office.stop()
    finally:
        lab.stop()


def test_every_page_that_is_linked_to_exists() -> None:
    for link in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (PAGE.parent / link).exists(), link
