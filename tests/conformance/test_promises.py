"""Every promise on the page beside this file has tests, and they exist. Read from source: nothing is imported."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITES = ROOT / "tests" / "ledger_contract"
CODES = re.compile(r"^[1-5]\d\d ((?:[a-z_]+, )*[a-z_]+)")

PAGE = tomllib.loads(Path(__file__).with_name("promises.toml").read_text(encoding="utf-8"))
PROMISES: dict[str, list[str]] = {said: proofs for section in PAGE.values() for said, proofs in section.items()}


@cache
def definitions(path: Path) -> dict[str, ast.AST]:
    """The functions and classes of a module, by name."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}


def suite(name: str) -> Iterator[tuple[Path, ast.AST]]:
    """The suite of the contract that is called so, and those it is made of."""
    for path in sorted(SUITES.glob("*.py")):
        if name in definitions(path):
            yield from with_bases(path, definitions(path)[name])


def with_bases(path: Path, node: ast.AST) -> Iterator[tuple[Path, ast.AST]]:
    yield path, node
    if isinstance(node, ast.ClassDef):
        for base in node.bases:
            if isinstance(base, ast.Name):
                yield from suite(base.id)


def found(root: Path, test: str) -> Path | None:
    """Where the test is written; None if it is not."""
    file, *names = test.split("::")
    path = root / file
    if not path.is_file() or not names or not names[-1].startswith("test_"):
        return None
    if len(names) == 1:
        return path if isinstance(definitions(path).get(names[0]), ast.FunctionDef | ast.AsyncFunctionDef) else None
    for where, node in with_bases(path, definitions(path).get(names[0], ast.Pass())):
        if isinstance(node, ast.ClassDef) and any(getattr(each, "name", None) == names[1] for each in node.body):
            return where
    return None


@pytest.mark.parametrize("said", PROMISES)
def test_a_promise_has_tests_that_exist(said: str) -> None:
    assert PROMISES[said]
    assert [test for test in PROMISES[said] if found(ROOT, test) is None] == []
    assert len(set(PROMISES[said])) == len(PROMISES[said])


@pytest.mark.parametrize("said", PAGE["bad input"])
def test_a_refusals_tests_name_its_codes(said: str) -> None:
    match = CODES.match(said)
    codes = match[1].split(", ") if match else []
    assert codes or said.startswith("Exit 1, ")
    text = "".join(where.read_text(encoding="utf-8") for test in PROMISES[said] if (where := found(ROOT, test)))
    assert [code for code in codes if f'"{code}"' not in text] == []


@pytest.mark.parametrize(
    "test",
    [
        "tests/test_here.py",
        "tests/test_here.py::test_gone",
        "tests/test_here.py::TestIt",
        "tests/test_here.py::TestIt::test_gone",
        "tests/test_here.py::TestIt::helper",
        "tests/test_here.py::helper",
        "tests/test_gone.py::test_it",
    ],
)
def test_a_test_that_is_not_there_is_found_out(tmp_path: Path, test: str) -> None:
    here = tmp_path / "tests" / "test_here.py"
    here.parent.mkdir()
    here.write_text("def helper(): ...\ndef test_it(): ...\nclass TestIt(LedgerContract):\n  def helper(self): ...\n")
    assert found(tmp_path, test) is None
    assert found(tmp_path, "tests/test_here.py::test_it") == here
    inherited = found(tmp_path, "tests/test_here.py::TestIt::test_a_lease_never_ends_by_itself")
    assert inherited == SUITES / "leases.py"
