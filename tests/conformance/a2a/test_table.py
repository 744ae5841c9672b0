"""The table itself: no row without its tests, no test without a row, none that speaks fewer bindings than was said."""

import ast
from pathlib import Path

import pytest

from tests.conformance.a2a.spoken import BINDINGS
from tests.conformance.a2a.table import HERE, ROOT, Requirement, bindings_of, requirements
from tests.conformance.test_promises import found

ROWS = requirements()
THIS = Path(__file__).name
# The sections of the specification in which something is demanded of a server.
SECTIONS = """
3.1.1 3.1.2 3.1.3 3.1.4 3.1.5 3.1.6 3.1.7 3.1.8 3.1.9 3.1.10 3.1.11 3.2.2 3.2.4 3.2.6 3.3.1 3.3.2 3.3.4 3.4.1 3.4.2
3.4.3 3.5.2 3.6.2 4.1 4.3.3 4.6 5.1 5.4 5.5 5.6 5.7 7.4 7.6 8.1 8.3 8.4 9.1 9.2 9.3 9.5
10.1 10.2 10.6 10.7 11.1 11.2 11.3 11.5 11.6 11.7 13.1 13.2 13.3 13.4 14
""".split()


def written_in(path: Path) -> dict[str, set[str]]:
    """Each test of a file, and what it takes."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return {
        node.name: {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def named(path: Path, test: str) -> str:
    return f"{path.relative_to(ROOT).as_posix()}::{test}"


OURS = {
    named(path, test): takes
    for path in sorted(HERE.glob("test_*.py"))
    if path.name != THIS
    for test, takes in written_in(path).items()
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_requirement_has_tests_that_exist_and_speak_its_bindings(row: Requirement) -> None:
    assert row.says
    assert row.tests
    assert len(set(row.tests)) == len(row.tests)
    assert [test for test in row.tests if found(ROOT, test) is None] == []
    if row.bindings:
        assert [test for test in row.tests if not OURS.get(test, set()) & {"me", "binding"}] == []


def test_every_test_is_somebodys_proof() -> None:
    proofs = {test for row in ROWS for test in row.tests}
    assert [test for test in OURS if test not in proofs] == []


def test_every_test_that_speaks_has_a_binding_to_speak() -> None:
    assert [test for test, takes in OURS.items() if takes & {"me", "binding"} and not bindings_of(test)] == []


def test_every_section_that_demands_something_of_a_server_has_a_row() -> None:
    assert [section for section in SECTIONS if section not in {row.section for row in ROWS}] == []


def test_every_binding_is_spoken() -> None:
    assert {name for row in ROWS for name in row.bindings} == set(BINDINGS)
    assert len({row.says for row in ROWS}) == len(ROWS)
