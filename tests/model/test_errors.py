"""The tree of errors: what leaves a package is in it, and each code has one status."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from covenant.model import errors
from covenant.model.errors import CovenantError, Refusal

SOURCE: Final = Path(__file__).parents[2] / "src" / "covenant"
STATUS: Final = {
    name: kind.status
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, Refusal) and kind is not Refusal
}


class Found(NamedTuple):
    classes: list[tuple[str, str, set[str]]]
    """The package, the name and the names of the bases of each."""
    codes: list[tuple[str, str]]
    """The refusal that is made, and the code that it is made with."""
    words: dict[Path, set[str]]


@cache
def found() -> Found:
    """What both tests look for: to read the whole package takes seconds."""
    classes, codes, words = list[tuple[str, str, set[str]]](), list[tuple[str, str]](), dict[Path, set[str]]()
    for path in sorted(SOURCE.rglob("*.py")):
        text, at = path.read_text(encoding="utf-8"), path.relative_to(SOURCE)
        words[at] = set(re.findall(r"\w+", text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                classes.append((at.parts[0], node.name, bases))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in STATUS:
                code = node.args[0] if node.args else None
                if isinstance(code, ast.Constant) and isinstance(code.value, str):
                    codes.append((node.func.id, code.value))
    return Found(classes, codes, words)


def test_an_error_that_leaves_its_package_is_in_the_tree() -> None:
    in_tree = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, CovenantError)
    }
    outside: dict[str, str] = {}
    for home, name, bases in found().classes:
        if bases & in_tree:
            in_tree.add(name)
        elif any(re.fullmatch(r"Exception|\w+(Error|Exception)", base) for base in bases):
            outside[name] = home
    leaks = [
        f"{name} of {home} in {path}"
        for name, home in outside.items()
        if name not in in_tree
        for path, words in found().words.items()
        # The dashboard is a door in a package of its own.
        if path.parts[0] not in (home, "dashboard" if home == "doors" else home) and name in words
    ]
    assert leaks == []


def test_each_code_has_one_status() -> None:
    statuses: dict[str, set[int]] = defaultdict(set)
    for refusal, code in found().codes:
        statuses[code].add(STATUS[refusal])
    assert statuses
    assert {code: seen for code, seen in statuses.items() if len(seen) > 1} == {}
