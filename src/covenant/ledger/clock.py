"""The ledger's clock, and its source of ids: the wall clock, watched by one that nobody sets.

`now_ms` is the wall clock, for stamps. Whoever waits uses `monotonic_ms`. Whoever acts on the age of something asks
`ages`: after a step of the wall clock they are paused, and afterwards they are counted without the step.

A step is a difference of more than a minute between the two clocks since they were read last; what is less is drift.
A pause ends when the wall clock was steady for `pause_ms`. Used on one loop.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Final

import msgspec

from covenant.model.clock_steps import STEADY, STEP_MS, Ages, ClockStep

PAUSE_MS: Final = 60_000
"""How long ages are not acted on after a step: time for the clock to be set right, or for somebody to look."""
COMPARE_MS: Final = 1_000
STEPS_KEPT: Final = 16
NEVER_MS: Final = -(1 << 62)

log = logging.getLogger(__name__)


class Clock:
    def __init__(
        self, wall_ms: Callable[[], int], monotonic_ms: Callable[[], int], *, pause_ms: int = PAUSE_MS
    ) -> None:
        self.monotonic_ms = monotonic_ms
        self.ages: Ages = STEADY
        self.steps_total = 0
        self._wall_ms = wall_ms
        self.pause_ms = pause_ms
        self._ahead_ms = wall_ms() - monotonic_ms()
        """By how much the wall clock was ahead of the other one when they were read last."""
        self._compared_ms = NEVER_MS
        """What the wall clock said when they were compared last."""
        self._paused_until_ms = 0

    def now_ms(self) -> int:
        """The wall clock, in epoch milliseconds. Notices a step."""
        wall_ms = self._wall_ms()
        if 0 <= wall_ms - self._compared_ms < COMPARE_MS:
            return wall_ms
        self._compare(wall_ms)
        return wall_ms

    def _compare(self, wall_ms: int) -> None:
        """Look at the other clock too, which costs as much again: once a second will do, or if the first looks odd."""
        monotonic_ms = self.monotonic_ms()
        step_ms = wall_ms - monotonic_ms - self._ahead_ms
        if step_ms:
            self._ahead_ms += step_ms
            if not -STEP_MS <= step_ms <= STEP_MS:
                self._note(ClockStep(wall_ms - step_ms, wall_ms), monotonic_ms)
        if self.ages.paused and monotonic_ms >= self._paused_until_ms:
            self._resume()
        self._compared_ms = NEVER_MS if self.ages.paused else wall_ms

    def opened(self, last_record_ms: int) -> None:
        """The journal was read. A last record from the future shows that the clock was set back while nobody looked.

        One from long ago shows nothing: the machine may have been off, and what passed meanwhile has passed.
        """
        now_ms = self.now_ms()
        if last_record_ms > now_ms + STEP_MS:
            self._note(ClockStep(last_record_ms, now_ms, seen=False), self.monotonic_ms())
            self._compared_ms = NEVER_MS

    @property
    def paused_ms_left(self) -> int:
        """How long ages are still not acted on, if the clock stays steady; 0 if they are."""
        self.now_ms()
        return max(1, self._paused_until_ms - self.monotonic_ms()) if self.ages.paused else 0

    def is_paused(self) -> bool:
        """Whether ages must not be acted on now."""
        self.now_ms()
        return self.ages.paused

    def left_ms(self, deadline_ms: int) -> int | None:
        """How long it is until a deadline, 0 or less if it has passed.

        None: it has passed by a clock that was set just now, so whether it has is not judged yet.
        """
        left_ms = deadline_ms - self.now_ms()
        return None if left_ms <= 0 and self.ages.paused else left_ms

    def age_ms(self, stamp_ms: int) -> int:
        now_ms = self.now_ms()
        return self.ages.age_ms(stamp_ms, now_ms)

    def expiry_ms(self) -> int:
        now_ms = self.now_ms()
        return self.ages.expiry_ms(now_ms)

    def _note(self, step: ClockStep, monotonic_ms: int) -> None:
        self.steps_total += 1
        self._paused_until_ms = monotonic_ms + self.pause_ms
        latest_ms = max(self.ages.latest_ms, step.before_ms if step.step_ms < 0 else 0)
        steps = (*self.ages.steps, step)[-STEPS_KEPT:]
        self.ages = Ages(True, steps, latest_ms, forgotten=self.steps_total > STEPS_KEPT)
        log.warning("clock.stepped", extra={"step_ms": step.step_ms, "paused_ms": self.pause_ms, "seen": step.seen})

    def _resume(self) -> None:
        self.ages = msgspec.structs.replace(self.ages, paused=False, latest_ms=0)
        log.info("clock.resumed", extra={"steps": self.steps_total})


BATCH: Final = 64


class Uuids:
    def __init__(self) -> None:
        self._ready: list[str] = []

    def __call__(self) -> str:
        if not self._ready:
            self._ready = _batch()
        return self._ready.pop()


def _batch() -> list[str]:
    chance = os.urandom(16 * BATCH).hex()
    made = [chance[at : at + 32] for at in range(0, 32 * BATCH, 32)]
    return [f"{h[:8]}-{h[8:12]}-4{h[13:16]}-{_VARIANT[h[16]]}{h[17:20]}-{h[20:]}" for h in made]


_VARIANT: Final = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}
