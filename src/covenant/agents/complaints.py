"""What a program says on standard error: for our log alone, and within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

COMPLAINTS_MAX: Final = 200
COMPLAINT_LENGTH_MAX: Final = 1_000


async def note_complaints(process: asyncio.subprocess.Process, note: Callable[[str], None]) -> None:
    """Each line, up to so many; the rest is read and dropped, or the program would wait for us."""
    assert process.stderr is not None
    noted = 0
    while True:
        try:
            line = await process.stderr.readline()
        except ValueError:
            continue
        if not line:
            return
        noted += 1
        if noted <= COMPLAINTS_MAX:
            note(line[:COMPLAINT_LENGTH_MAX].decode(errors="replace").rstrip())
