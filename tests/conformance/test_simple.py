"""Every promise of the simple exchange has tests that exist, and every test of it stands for a promise."""

import tomllib
from pathlib import Path

import pytest

from tests.conformance.test_promises import ROOT, definitions, found

PAGE = tomllib.loads(Path(__file__).with_name("simple.toml").read_text(encoding="utf-8"))
PROMISES: dict[str, list[str]] = {said: proofs for section in PAGE.values() for said, proofs in section.items()}
PLACES = (
    "tests/simple/test_invariants.py",
    "tests/doors/native/test_request_routes.py",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests" / "doors" / "simple").glob("test_*.py"))),
)


@pytest.mark.parametrize("said", PROMISES)
def test_a_promise_has_tests_that_exist(said: str) -> None:
    assert PROMISES[said]
    assert [test for test in PROMISES[said] if found(ROOT, test) is None] == []


def test_each_invariant_of_this_side_has_a_test_of_its_own() -> None:
    numbers = [int(said.partition(".")[0]) for said in PAGE["invariants"]]
    assert numbers == [1, 2, 3, 4, 5, 6, 7, 12, 13, 14]
    tests = [test for proofs in PAGE["invariants"].values() for test in proofs]
    assert len(tests) == len(set(tests)) == len(numbers)


@pytest.mark.parametrize("place", PLACES)
def test_every_test_stands_for_a_promise(place: str) -> None:
    proofs = {test for tests in PROMISES.values() for test in tests}
    written = {f"{place}::{name}" for name in definitions(ROOT / place) if name.startswith("test_")}
    assert written - proofs == set()
