"""A simple command starts fast because it loads little. Modules are counted: a clock would count the machine's mood."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.daemons import COVENANT, Daemon, environment
from tests.waits import BOUND_S

HEAVY = {
    "httptools",
    "starlette",
    "rich",
    "cryptography",
    "msgspec",
    "asyncio",
    "uvloop",
    "sqlite3",
    "prometheus_client",
}
MODULES_MAX = 180
"""click and what it needs are about 100 over a bare interpreter's 30."""


def loaded(*words: str) -> set[str]:
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", str(COVENANT), *words],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=BOUND_S,
        check=False,
    )
    lines = [line for line in ran.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines[1:]}


def heavy(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules} & HEAVY


@pytest.mark.parametrize("words", [["--version"], ["version"], ["a2a", "status", "--help"]], ids=" ".join)
def test_a_command_without_a_daemon_loads_little(words: list[str]) -> None:
    modules = loaded(*words)
    assert heavy(modules) == set()
    assert len(modules) < MODULES_MAX


def test_the_settings_are_shown_without_a_loop_or_a_codec(tmp_path: Path) -> None:
    modules = loaded("--home", str(tmp_path), "settings", "show", "--json")
    assert "covenant.daemon.settings" in modules
    assert heavy(modules) == set()


@pytest.mark.parametrize(
    "words",
    [["a2a", "status"], ["a2a", "send", "--to", "bob@host", "hi"], ["audit", "recent"], ["identities", "list"]],
    ids=" ".join,
)
def test_a_command_that_answers_a_script_loads_little(daemon: Daemon, words: list[str]) -> None:
    modules = loaded("--home", str(daemon.home), *words, "--json")
    assert "covenant.cli.daemon_client" in modules
    assert heavy(modules) == set()
    assert len(modules) < MODULES_MAX


def test_a_call_loads_its_client_and_nothing_that_only_servers_or_signatures_need(tmp_path: Path) -> None:
    modules = loaded("call", "http://127.0.0.1:9999/", "hello", "--home", str(tmp_path))
    assert "httpx2" in modules
    assert heavy(modules) == {"msgspec", "asyncio"}


def test_the_count_counts(tmp_path: Path) -> None:
    """A command that draws a table does load what is heavy."""
    assert "rich" in heavy(loaded("settings", "show", "--home", str(tmp_path)))
