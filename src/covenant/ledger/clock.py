"""The ledger's clock, its source of ids, and the timer of long waits.

The wall clock is watched by one that nobody sets.
`now_ms` is the wall clock, for stamps. Whoever waits uses `monotonic_ms`. Whoever acts on the age of something asks
`ages`: after a step of the wall clock they are paused, and afterwards they are counted without the step.

A step is a difference of more than a minute between the two clocks since they were read last; what is less is drift.
A pause ends when the wall clock was steady for `pause_ms`. Used on one loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from struct import Struct
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
    chance = bytearray(os.urandom(16 * BATCH))
    # The byte that has the version of each, and the byte that has the variant.
    chance[6::16] = chance[6::16].translate(_VERSION)
    chance[8::16] = chance[8::16].translate(_VARIANT)
    return [b"-".join(groups).decode() for groups in _GROUPS.iter_unpack(chance.hex().encode())]


_VERSION: Final = bytes(0x40 | byte & 0x0F for byte in range(256))
_VARIANT: Final = bytes(0x80 | byte & 0x3F for byte in range(256))
_GROUPS: Final = Struct("8s4s4s4s12s")


LONG_S: Final = 5.0
"""Waits of so long, or longer, share one timer, which ends them at its next tick."""
TICK_S: Final = 0.25


class LongWaits:
    """Ends long waits, up to a tick late: to make a timer for each, and to cancel it, would cost each of them more."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ticking = False
        self.ends_s: dict[asyncio.Future[None], float] = {}
        """When each ends, by the clock of the loop. Whoever was woken leaves."""

    def add(self, woken: asyncio.Future[None], timeout_s: float) -> None:
        self.ends_s[woken] = self._loop.time() + timeout_s
        if not self._ticking:
            self._ticking = True
            self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = bool(self.ends_s)
        if self._ticking:
            self._loop.call_later(TICK_S, self._tick)
            now_s = self._loop.time()
            for woken, end_s in self.ends_s.items():
                if end_s <= now_s and not woken.done():
                    woken.set_result(None)
