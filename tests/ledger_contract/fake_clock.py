"""A clock that stands still until a test moves it."""

from __future__ import annotations

from typing import Final

START_MS: Final = 1_700_000_000_000


class FakeClock:
    """Call it for the time in epoch milliseconds. It may be moved backwards too, as real ones are."""

    def __init__(self, now_ms: int = START_MS) -> None:
        self.now_ms = now_ms
        self._stepped_ms = 0

    def __call__(self) -> int:
        return self.now_ms

    def monotonic_ms(self) -> int:
        """The clock beside it that nobody sets: `advance` moves it too, `step` does not."""
        return self.now_ms - self._stepped_ms

    def advance(self, ms: int) -> int:
        """Let time pass, or (negative) go back; the time it is then."""
        self.now_ms += ms
        return self.now_ms

    def step(self, ms: int) -> int:
        """Set the wall clock forward or (negative) back, without time passing; the time it shows then."""
        self._stepped_ms += ms
        return self.advance(ms)
