"""What the README says to type is typed here, as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.daemons import Daemon, environment, said_until
from tests.waits import BOUND_S

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
A2A = "/v1/a2a/"
URL = re.compile(r"http://[^ ]+:\d+")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def demo(short_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder like the repository's, with `covenant serve --demo` running in it, and where that listens."""
    (short_path / ".venv").symlink_to(Path(sys.executable).parent.parent)
    process = subprocess.Popen(
        [".venv/bin/covenant", "serve", "--demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=short_path,
        env=environment(COVENANT_HTTP_PORT="0"),
    )
    try:
        found = URL.search(said_until(process, b"/a2a/queue\n"))
        assert found is not None
        yield short_path, found.group()
    finally:
        process.terminate()
        process.communicate(timeout=BOUND_S)


def test_the_first_exchange_works_as_it_is_written(demo: tuple[Path, str]) -> None:
    folder, url = demo
    first = [block for block in blocks("sh") if "covenant" in block and A2A not in block]
    typed = "\n".join(first).replace("http://localhost:8421", url)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", typed],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "echo: hello" in done.stdout
    assert "worker@local" in done.stdout
    assert "a2a_result_posted" in done.stdout
    assert "done" in done.stdout


def test_the_agent_is_an_endpoint_as_it_is_written(short_path: Path) -> None:
    (program,) = [block for block in blocks("python") if "Turn" in block]
    (typed,) = [block for block in blocks("sh") if A2A in block]
    (short_path / "agents.py").write_text(program)
    daemon = Daemon(short_path / "home", str(short_path / "agents.py"))
    try:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", typed.replace("http://localhost:8421", daemon.url)],
            env=environment(COVENANT_HOME=str(daemon.home), PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}"),
            capture_output=True,
            text=True,
            timeout=BOUND_S,
            check=False,
        )
    finally:
        daemon.stop()
    assert done.returncode == 0, done.stdout + done.stderr
    called, *streamed = done.stdout.splitlines()
    assert called == "HELLO"
    assert any(line.startswith("data: ") and "TASK_STATE_COMPLETED" in line for line in streamed)


def test_the_library_works_as_it_is_written(tmp_path: Path) -> None:
    (program,) = [block for block in blocks("python") if "Mailbox" in block]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "hello" in done.stdout


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"run", "test"} <= set(targets)
    assert all(f"make {name}" in README for name in ("run", "test"))


def test_every_page_that_the_readme_links_to_exists() -> None:
    for link in re.findall(r"\]\(([^)#]+)", README):
        assert link.startswith("http") or (ROOT / link).exists(), link
