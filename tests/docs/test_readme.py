"""What the README says to type is typed here, as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.daemons import environment, said_until
from tests.waits import BOUND_S

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
OWN_HOME = "--home my-home"
URL = re.compile(r"http://[^ ]+:\d+")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def pattern(line: str) -> re.Pattern[str]:
    """A line of output as the README shows it: ids and ages differ, and so does what `…` stands for."""
    shown = re.sub(r"\b[0-9a-f]{8}\b", "[0-9a-f]{8}", re.escape(" ".join(line.split())))
    return re.compile(re.sub(r"\b0s\b", r"\\d+[a-z]+.*", shown).replace("…", ".*"))


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
    first = [block for block in blocks("sh") if "covenant" in block and OWN_HOME not in block]
    typed = "\n".join(first).replace("http://localhost:8421", url)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", typed],
        cwd=folder,
        env=environment(COLUMNS="100"),
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = iter(done.stdout.splitlines())
    for line in "".join(blocks("text")).splitlines():
        shown = pattern(line)
        assert any(shown.fullmatch(" ".join(each.split())) for each in printed), (
            f"{line!r} is not next in {done.stdout}"
        )
    assert "echo: hello" in done.stdout
    assert "worker@local" in done.stdout
    assert "a2a_result_posted" in done.stdout
    assert "done" in done.stdout
    assert "The counter found 4 words." in done.stdout
    for name in ("worker.json", "leased.json"):
        assert (folder / name).stat().st_mode & 0o077 == 0, f"{name} is for its owner alone"


def test_the_agent_is_an_endpoint_as_it_is_written_beside_the_demo(demo: tuple[Path, str]) -> None:
    folder, _ = demo
    (program,) = [block for block in blocks("python") if "Turn" in block]
    served, typed = (block for block in blocks("sh") if OWN_HOME in block)
    (folder / "agents.py").write_text(program)
    env = environment(COVENANT_HOME=".demo", PATH=f"{folder / '.venv/bin'}:{os.environ['PATH']}")
    daemon = subprocess.Popen(
        ["bash", "-c", f"exec {served.replace('--http-port 8500', '--http-port 0')}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env=env,
    )
    try:
        found = URL.search(said_until(daemon, b"/agents/shout\n"))
        assert found is not None
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", typed.replace("http://localhost:8500", found.group())],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=BOUND_S,
            check=False,
        )
    finally:
        daemon.terminate()
        daemon.communicate(timeout=BOUND_S)
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
