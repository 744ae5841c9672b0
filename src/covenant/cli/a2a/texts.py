"""A text argument: given in place, or `-` for all of standard input."""

from __future__ import annotations

import sys


def read_text(given: str) -> str:
    if given != "-":
        return given
    return sys.stdin.buffer.read().decode("utf-8", "replace").removesuffix("\n")
