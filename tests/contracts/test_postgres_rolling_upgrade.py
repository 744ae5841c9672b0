"""A node of the version before the last level goes on while one of today raises the level, and both work."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from covenant.ledger.postgres.migrations import LEVEL
from tests.ledger_contract.postgres_server import Databases

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("upgrade_process.py")
ROUNDS = 20


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def version_before(folder: Path) -> Path:
    """The tree as it was before the last level, out of the history."""
    module = "src/covenant/ledger/postgres/migrations.py"
    raised = git("log", "--format=%H", f"-SLEVEL: Final = {LEVEL}", "--", module).split()
    assert raised, "this test needs the history of the repository"
    packed = folder / "before.tar"
    git("archive", "-o", str(packed), f"{raised[-1]}^", "src", "tests")
    (folder / "before").mkdir()
    subprocess.run(["tar", "-xf", str(packed), "-C", str(folder / "before")], check=True)
    return folder / "before"


def start(tree: Path, url: str, name: str, number: int) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
    words = [sys.executable, str(PROGRAM), url, name, str(number)]
    return subprocess.Popen(words, cwd=tree, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def work(tree: Path, url: str) -> list[dict[str, Any]]:
    before = start(tree, url, "before", 1)
    assert before.stdout is not None
    assert json.loads(before.stdout.readline()) == {"level": LEVEL - 1}
    for _ in range(ROUNDS):
        before.stdout.readline()
    today = start(ROOT, url, "today", 1_000_001)
    assert today.stdout is not None
    assert json.loads(today.stdout.readline()) == {"level": LEVEL}
    for _ in range(ROUNDS):
        before.stdout.readline()
        today.stdout.readline()
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in (before, today)]


@pytest.mark.slow
async def test_a_node_of_the_version_before_goes_on_while_the_level_is_raised(
    databases: Databases, tmp_path: Path
) -> None:
    url = await databases.make()
    tree = await asyncio.to_thread(version_before, tmp_path)
    before, today = await asyncio.to_thread(work, tree, url)
    assert (before["refused"], today["refused"]) == ([], [])
    assert sorted(before["drained"] + today["drained"]) == sorted(before["sent"] + today["sent"])
    await databases.drop(url)
