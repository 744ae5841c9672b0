"""Every durable step × everything that can go wrong there: what was acknowledged is there, and nothing twice.

A scenario that comes by every step is run once to see how often it hits each. Then once more for each point, each fault
and some of its hits: in a process that dies, loses its unsynced writes, or is told by its disk that it cannot. What is
left is opened and compared with what the scenario had been told by then.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from covenant.ledger.embedded.fault_points import POINTS
from tests.faults.fault_run import Ran, judge, make_base, run
from tests.ledger_contract.fault_injection import FAULTS, hits

pytestmark = [pytest.mark.faults, pytest.mark.matrix]

DEADLY = ("kill", "tear", "lose")
HITS_EACH = 12


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The scenario without a fault."""
    return run(base, tmp_path_factory.mktemp("whole"))


def test_the_scenario_comes_by_every_point_there_is_and_to_its_end(whole: Ran) -> None:
    assert (whole.code, whole.ended) == (0, True), whole.errors
    assert sorted(hits(whole.notes)) == sorted(POINTS)
    judge(whole)


def strike(base: Path, folder: Path, point: str, fault: str, nth: int, *, apart: bool = False) -> bool:
    """False if this run came by the point less often than the first: how writes share a sync is a matter of timing."""
    ran = run(base, folder, f"{point}:{nth}:{fault}", apart=apart)
    struck = hits(ran.notes).get(point, 0) >= nth
    if fault in DEADLY and struck:
        assert ran.code == -9, f"survived {fault}: {ran.code} {ran.errors}"
        assert len(ran.homes) == (2 if fault == "lose" else 1)
    else:
        assert (ran.code, ran.ended) == (0, True), ran.errors
        assert ran.refused or point.startswith("archive.") or not struck, "the disk failed and nobody was told"
    judge(ran)
    return struck


def spread(count: int, most: int) -> list[int]:
    """Some of `count` hits: one in the middle, or the first, the last, and others evenly between them."""
    if most == 1:
        return [(count + 1) // 2]
    if count <= most:
        return list(range(1, count + 1))
    return sorted({1 + round(step * (count - 1) / (most - 1)) for step in range(most)})


Matrix = Callable[[str, str, int], None]


@pytest.fixture
def matrix(base: Path, whole: Ran, tmp_path: Path, request: pytest.FixtureRequest) -> Matrix:
    """Strike at up to so many hits of a point; every violation is counted, and all of them are told."""

    def strikes(point: str, fault: str, most: int) -> None:
        violations: list[str] = []
        struck = 0
        for nth in spread(hits(whole.notes)[point], most):
            try:
                struck += strike(base, tmp_path / str(nth), point, fault, nth)
            except Exception as violation:  # noqa: BLE001  whatever went wrong, the other hits are tried too
                struck += 1
                violations.append(f"hit {nth}: {violation!r}")
        request.node.user_properties.append(("crash_points", (point, fault, struck, len(violations))))
        assert violations == []
        assert struck > 0, "no run came by this point as often as the first one did"

    return strikes


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("point", POINTS)
def test_what_was_acknowledged_survives_a_fault_at_every_step(matrix: Matrix, point: str, fault: str) -> None:
    matrix(point, fault, 1)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("point", [point for point in POINTS if point.startswith("archive.")])
def test_what_was_acknowledged_survives_a_fault_in_the_archives_own_process(
    base: Path, tmp_path: Path, point: str, fault: str
) -> None:
    assert strike(base, tmp_path, point, fault, 2, apart=True)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("point", POINTS)
def test_what_was_acknowledged_survives_a_fault_at_many_hits(matrix: Matrix, point: str, fault: str) -> None:
    matrix(point, fault, HITS_EACH)
