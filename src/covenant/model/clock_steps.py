"""Ages by a wall clock that may have been set: how old a stamp is, and whether ages may be acted on at all.

A stamp is what the wall clock said when something happened. After the clock was set, stamps from before cannot be
compared with it any more. `Ages` knows the steps of this process and says what today's clock would have written. It
never makes a stamp older than it is: where two readings are possible, the younger one counts.
"""

from __future__ import annotations

from typing import Final

import msgspec

STEP_MS: Final = 60_000
"""Two clocks may disagree by this much between two readings: more is a step of one of them, less is drift."""


class ClockStep(msgspec.Struct, frozen=True, gc=False):
    """One step of the wall clock: what it would have said, and what it said instead."""

    before_ms: int
    after_ms: int
    seen: bool = True
    """False: concluded from a journal whose last record is from the future, not seen to happen."""

    @property
    def step_ms(self) -> int:
        return self.after_ms - self.before_ms


class Ages(msgspec.Struct, frozen=True):
    """`steps` are the oldest first. While `paused`, nothing is expired, timed out, retried or forgotten for its age."""

    paused: bool = False
    steps: tuple[ClockStep, ...] = ()
    latest_ms: int = 0
    """While paused after a step back: what the clock had said before. What has expired by then stays expired."""
    forgotten: bool = False
    """There were earlier steps, which are not kept: a stamp from before `steps` counts as made at the first of them."""

    def moment_ms(self, stamp_ms: int, now_ms: int) -> int:
        """The stamp as today's clock would have written it.

        Between two steps the clock shows one stretch of time. The stamp is from the last stretch that it can be from.
        """
        shift_ms, until_ms = 0, now_ms
        for step in reversed(self.steps):
            begins = step.after_ms - STEP_MS <= stamp_ms or not step.seen
            if begins and stamp_ms <= until_ms + STEP_MS:
                # One that drift puts before the step counts as made at it: nothing in this stretch is older.
                return (max(stamp_ms, step.after_ms) if step.seen else stamp_ms) + shift_ms
            shift_ms, until_ms = shift_ms + step.step_ms, step.before_ms
        return (until_ms if self.forgotten else stamp_ms) + shift_ms

    def age_ms(self, stamp_ms: int, now_ms: int) -> int:
        return max(0, now_ms - (self.moment_ms(stamp_ms, now_ms) if self.steps else stamp_ms))

    def expiry_ms(self, now_ms: int) -> int:
        """The moment by which expiries are judged: grants and tokens."""
        return max(now_ms, self.latest_ms)


STEADY: Final = Ages()
"""No step was seen."""
