"""Ages of timestamps by a wall clock that may have been set, and whether ages may be acted on at all.

A stamp is the wall clock's reading when something happened. Once the clock has been set, earlier stamps cannot be
compared with it. `Ages` knows the clock steps that this process saw and converts a stamp into today's reading. It never
makes a stamp older than it is: where two readings are possible, the younger one counts.
"""

from __future__ import annotations

from typing import Final

import msgspec

STEP_MS: Final = 60_000
"""Two clocks may drift apart by this much between two readings. A larger difference is a step of one of them."""


class ClockStep(msgspec.Struct, frozen=True, gc=False):
    """One step of the wall clock: the reading that was expected, and the reading that came instead."""

    before_ms: int
    after_ms: int
    seen: bool = True
    """False: the step was not seen but inferred from a journal whose last record is from the future."""

    @property
    def step_ms(self) -> int:
        return self.after_ms - self.before_ms


class Ages(msgspec.Struct, frozen=True):
    """`steps` are oldest first. While `paused`, nothing expires, times out, is retried or is forgotten for its age."""

    paused: bool = False
    steps: tuple[ClockStep, ...] = ()
    latest_ms: int = 0
    """While paused after a step back: the clock's reading before it. Whatever had expired by then stays expired."""
    forgotten: bool = False
    """Earlier steps were dropped. A stamp from before `steps` counts as made at the first of them."""

    def moment_ms(self, stamp_ms: int, now_ms: int) -> int:
        """The stamp as today's clock would have written it.

        Between two steps the clock is continuous. The stamp is attributed to the last such stretch that it fits into.
        """
        shift_ms, until_ms = 0, now_ms
        for step in reversed(self.steps):
            begins = step.after_ms - STEP_MS <= stamp_ms or not step.seen
            if begins and stamp_ms <= until_ms + STEP_MS:
                # A stamp that drift puts before the step counts as made at the step: nothing in this stretch is older.
                return (max(stamp_ms, step.after_ms) if step.seen else stamp_ms) + shift_ms
            shift_ms, until_ms = shift_ms + step.step_ms, step.before_ms
        return (until_ms if self.forgotten else stamp_ms) + shift_ms

    def age_ms(self, stamp_ms: int, now_ms: int) -> int:
        return max(0, now_ms - (self.moment_ms(stamp_ms, now_ms) if self.steps else stamp_ms))

    def expiry_ms(self, now_ms: int) -> int:
        """The time to compare expiries of grants and tokens with. A clock that was set back does not revive them."""
        return max(now_ms, self.latest_ms)


STEADY: Final = Ages()
"""The ages of a clock that was never set."""
