"""No private part of a dependency is leaned on, so a new release of one breaks nothing that it has not promised."""

import re
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "covenant"
OF_PYTHON = {"agents/process_agent.py", "daemon/watchdog.py"}
"""`Process._transport` of asyncio, which alone lets go of a process's pipes, and `sys._current_frames`, documented."""
OF_OURS = {"outbound/address_guard.py"}
PRIVATE_IMPORT = re.compile(r"^\s*(?:from|import) (?!covenant|__future__)[\w.]*\b_\w+", re.MULTILINE)


def test_private_parts_are_those_of_python_and_our_own() -> None:
    """The linter refuses every other use of a private attribute."""
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"noqa:.*\bSLF001\b", path.read_text(encoding="utf-8"))
    }
    assert found == OF_PYTHON | OF_OURS
    assert not [path for path in SOURCE.rglob("*.py") if PRIVATE_IMPORT.search(path.read_text(encoding="utf-8"))]
