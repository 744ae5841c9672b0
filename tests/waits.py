"""How long tests wait."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

BOUND_S: Final = 100.0
"""Ends a wait for what never comes: longer than anything takes on a busy machine, shorter than the time of a test."""
LOOK_S: Final = 0.02
LONGER_S: Final = (1.0, 5.0, 25.0)
"""For a time that must pass, yet not before something else has come: it is tried again with more of it."""


def until(met: Callable[[], object]) -> None:
    """Until it is so. Other processes have no events that a test could wait for."""
    end_s = time.monotonic() + BOUND_S
    while not met():
        assert time.monotonic() < end_s, "it did not come to pass"
        time.sleep(LOOK_S)


async def eventually(met: Callable[[], Awaitable[object]]) -> None:
    """Until the answer is true; for tests that run on a loop."""
    async with asyncio.timeout(BOUND_S):
        while True:
            if await met():
                return
            await asyncio.sleep(LOOK_S)
