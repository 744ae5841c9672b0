"""The tree of errors: what leaves a package is in it, and each code has one status."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from covenant.model import errors
from covenant.model.errors import CovenantError, Refusal

SOURCE: Final = Path(__file__).parents[2] / "src" / "covenant"
STATUS: Final = {
    name: kind.status
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, Refusal) and kind is not Refusal
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield str(path.relative_to(SOURCE)), ast.parse(path.read_text(encoding="utf-8"))


def test_an_error_that_leaves_its_package_is_in_the_tree() -> None:
    in_tree = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, CovenantError)
    }
    outside: dict[str, str] = {}
    for path, tree in modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            if bases & in_tree:
                in_tree.add(node.name)
            elif any(re.fullmatch(r"Exception|\w+(Error|Exception)", base) for base in bases):
                outside[node.name] = path.partition("/")[0]
    texts = {path.relative_to(SOURCE): path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    leaks = [
        f"{name} of {home} in {path}"
        for name, home in outside.items()
        if name not in in_tree
        for path, text in texts.items()
        # The dashboard is a door in a package of its own.
        if path.parts[0] not in (home, "dashboard" if home == "doors" else home) and re.search(rf"\b{name}\b", text)
    ]
    assert leaks == []


def test_each_code_has_one_status() -> None:
    statuses: dict[str, set[int]] = defaultdict(set)
    for _, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in STATUS and node.args:
                code = node.args[0]
                if isinstance(code, ast.Constant) and isinstance(code.value, str):
                    statuses[code.value].add(STATUS[node.func.id])
    assert {code: found for code, found in statuses.items() if len(found) > 1} == {}
