"""Ages by a wall clock that may have been set: how old a stamp is, and whether ages may be acted on at all.

A stamp is what the wall clock said when something happened. After the clock was set, stamps from before cannot be
compared with it any more. `Ages` knows the steps of this process and says what today's clock would have written. It
never makes a stamp older than it is: where two readings are possible, the younger one counts.
"""

from __future__ import annotations

from typing import Final

import msgspec


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

    def moment_ms(self, stamp_ms: int, now_ms: int) -> int:
        """The stamp as today's clock would have written it."""
        steps = self.steps
        for index, step in enumerate(steps):
            # The latest reading between this step and the next one.
            until_ms = steps[index + 1].before_ms if index + 1 < len(steps) else now_ms
            if _is_from_before(step, stamp_ms, until_ms):
                stamp_ms += step.step_ms
        return stamp_ms

    def age_ms(self, stamp_ms: int, now_ms: int) -> int:
        return max(0, now_ms - (self.moment_ms(stamp_ms, now_ms) if self.steps else stamp_ms))

    def expiry_ms(self, now_ms: int) -> int:
        """The moment by which expiries are judged: grants and tokens."""
        return max(now_ms, self.latest_ms)


STEADY: Final = Ages()
"""No step was seen."""


def _is_from_before(step: ClockStep, stamp_ms: int, until_ms: int) -> bool:
    """Whether a stamp can only be from before the step. `until_ms`: the latest reading after it."""
    if step.after_ms > step.before_ms:
        return stamp_ms <= step.before_ms
    return stamp_ms > until_ms or (step.seen and stamp_ms < step.after_ms)
