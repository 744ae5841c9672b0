"""How this program, and the files it names, are best written from where it was called."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def program() -> str:
    """How to call this program again from here."""
    called = Path(sys.argv[0])
    found = shutil.which("covenant")
    if found is not None and Path(found).resolve() == called.resolve():
        return "covenant"
    return shlex.quote(near(called.absolute()))


def near(path: Path) -> str:
    """A path as it is shortest from here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def again(home: str | None, token_file: str | None) -> str:
    """How to call as the same caller once more, up to the command."""
    given = (("--home", home), ("--token-file", token_file))
    return " ".join([program(), *(f"{name} {shlex.quote(value)}" for name, value in given if value is not None)])
