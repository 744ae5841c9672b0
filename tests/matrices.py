"""Parameters with many values: `make test` takes the first of them, `make check` all."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_rows_of(rows: Iterable[tuple[Any, ...]], kept: int = 1) -> list[Any]:
    """As `first_of`, of values for several parameters at once."""
    listed = list(rows)
    return listed[:kept] + [pytest.param(*row, marks=pytest.mark.matrix) for row in listed[kept:]]


def first_of(values: Iterable[Any], kept: int = 1) -> list[Any]:
    """These values, of which all but the first are marked `matrix`."""
    listed = list(values)
    return listed[:kept] + [pytest.param(value, marks=pytest.mark.matrix) for value in listed[kept:]]
