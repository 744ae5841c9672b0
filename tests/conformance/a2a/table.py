"""The table of requirements, read: which test proves what, on which bindings."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from tests.conformance.a2a.spoken import BINDINGS, GROUPS

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[2]
PAGE: Final = HERE / "requirements.toml"


@dataclass(frozen=True)
class Requirement:
    id: str
    """The section that it is from, a slash, and a word."""
    says: str
    bindings: tuple[str, ...]
    """None, if it is not about an operation."""
    tests: tuple[str, ...]
    """As pytest is given them, from the root."""

    @property
    def section(self) -> str:
        return self.id.partition("/")[0]


@cache
def requirements() -> tuple[Requirement, ...]:
    page = tomllib.loads(PAGE.read_text(encoding="utf-8"))
    return tuple(
        Requirement(
            id=f"{section}/{word}",
            says=row["says"],
            bindings=spelled_out(row.get("on", "")),
            tests=tuple(located(test) for test in row["tests"]),
        )
        for section, rows in page.items()
        for word, row in rows.items()
    )


def spelled_out(on: str) -> tuple[str, ...]:
    """Names of bindings and of groups of them."""
    named = [name for word in on.split() for name in GROUPS.get(word, (word,))]
    assert set(named) <= BINDINGS.keys(), on
    return tuple(dict.fromkeys(named))


def located(test: str) -> str:
    """Tests of this folder go by their file's name alone."""
    return test if test.startswith("tests/") else f"{HERE.relative_to(ROOT)}/{test}"


@cache
def bindings_of(test: str) -> tuple[str, ...]:
    """Where a test runs: wherever one of its requirements holds."""
    named = [name for row in requirements() if test in row.tests for name in row.bindings]
    return tuple(name for name in BINDINGS if name in named)
