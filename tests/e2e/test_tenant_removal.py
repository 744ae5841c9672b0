"""A removal that is killed at a durable step goes on where it can, to the same end, and takes nothing from others."""

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from covenant.ledger.contract.task_query import TaskQuery
from covenant.ledger.embedded.fault_points import POINTS
from tests.e2e.removal_process import NAME, TASKS, opened, removals_of, remove
from tests.faults.fault_run import ROOT
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.fake_clock import FakeClock
from tests.matrices import first_of
from tests.waits import BOUND_S

ELSEWHERE = ("opening", "snapshot")
"""Steps of an opening, and of the process that merges the journal."""
STEPS = [point for point in POINTS if point.partition(".")[0] not in ELSEWHERE and point != "archive.pack_commit"]
ALWAYS = ("archive.erase_commit", "compaction.drop")


def run(home: Path, *what: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.e2e.removal_process", str(home), *what]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S, check=False)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("filled") / "home"
    ran = run(home, "fill")
    assert ran.returncode == 0, ran.stderr
    return home


@pytest.fixture(scope="module")
def hits(filled: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How often a removal that nobody stops comes by each step."""
    home = tmp_path_factory.mktemp("whole") / "home"
    shutil.copytree(filled, home)
    ran = run(home, "remove")
    assert ran.returncode == 0, ran.stderr
    counted: dict[str, int] = json.loads(ran.stdout)
    return counted


async def check(home: Path) -> None:
    """It goes on, ends, and leaves nothing of the tenant and everything of the others."""
    clock = FakeClock()
    ledger = await opened(home, clock)
    over = ledger.tenant(NAME) is None
    await ledger.close()
    if not over:
        report = await remove(home)
        assert report.done, report.problem
        assert (report.removal.tasks, report.removal.reason) == (TASKS + 2, "it is over")
    ledger = await opened(home, clock)
    removals, operator, _ = await removals_of(ledger, home)
    places = await removals.search(operator, NAME)
    assert [place for place in places if place.left] == []
    assert not (home / "memory" / NAME).exists()
    found = await ledger.find(TaskQuery(limit=100))
    assert sorted({task.tenant for task in found.tasks if task.tenant}) == ["default"]
    assert len(found.tasks) == TASKS + 2
    driver = LedgerDriver(ledger, clock)
    rows = [row["kind"] for row in await driver.audit_rows() if row["kind"]["type"] == "tenant_removed"]
    assert [(row["tenant"], row["tasks"], len(row["digest"])) for row in rows] == [(NAME, TASKS + 2, 64)]
    assert (await ledger.audit_verify()).valid
    await ledger.close()


def strike(filled: Path, hits: dict[str, int], folder: Path, point: str) -> None:
    for nth in sorted({1, (hits[point] + 1) // 2, hits[point]}):
        home = folder / f"{nth}"
        shutil.copytree(filled, home)
        ran = run(home, "remove", point, str(nth))
        # How writes share a sync is a matter of timing: a run may come by less often than the first.
        assert ran.returncode in (-9, 0), ran.stderr
        asyncio.run(check(home))


@pytest.mark.parametrize("point", first_of(ALWAYS))
def test_a_removal_that_is_killed_goes_on_and_leaves_nothing(
    filled: Path, hits: dict[str, int], tmp_path: Path, point: str
) -> None:
    strike(filled, hits, tmp_path, point)


@pytest.mark.matrix
@pytest.mark.parametrize("point", [point for point in STEPS if point not in ALWAYS])
def test_a_removal_that_is_killed_at_any_step_goes_on(
    filled: Path, hits: dict[str, int], tmp_path: Path, point: str
) -> None:
    strike(filled, hits, tmp_path, point)
