"""A clock that stands still until a test moves it."""

from __future__ import annotations

from typing import Final

START_MS: Final = 1_700_000_000_000


class FakeClock:
    """Call it for the time in epoch milliseconds. It may be moved backwards too, as real ones are."""

    def __init__(self, now_ms: int = START_MS) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, ms: int) -> int:
        """Let time pass, or (negative) step back; the time it is then."""
        self.now_ms += ms
        return self.now_ms
