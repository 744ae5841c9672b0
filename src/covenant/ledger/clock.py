"""The ledger's clock, its source of ids, and the timer of long waits.

A monotonic clock watches the wall clock. `now_ms` is the wall clock, for timestamps. Waits use `monotonic_ms`.
Decisions by age use `ages`: after a step of the wall clock they are paused, and then the step is subtracted.

A step is a change of more than a minute in the difference of the two clocks between two readings; a smaller one is
drift. A pause ends when the wall clock was steady for `pause_ms`. Must be used on one event loop.

Steps and a pause outlive the process if `keep` writes them down, and the next process gives them to `opened`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Final

import msgspec

from covenant.model.clock_steps import STEADY, STEP_MS, Ages, ClockStep

PAUSE_MS: Final = 60_000
"""How long decisions by age pause after a step: time to set the clock right, or for an operator to look."""
COMPARE_MS: Final = 1_000
"""How often both clocks are compared at most, unless the wall clock went back or a pause is on."""
STEPS_KEPT: Final = 16
NEVER_MS: Final = -(1 << 62)

log = logging.getLogger(__name__)
UUIDS_AT_ONCE: Final = 64
_VERSION: Final = bytes(0x40 | byte & 0x0F for byte in range(256))
_VARIANT: Final = bytes(0x80 | byte & 0x3F for byte in range(256))
UUID_CHARS: Final = 36
_DIGITS: Final = tuple(place for place in range(UUID_CHARS) if place not in (8, 13, 18, 23))
"""The places of the 32 digits in the text of a UUID."""
LONG_WAIT_S: Final = 5.0
"""Waits of this length or longer share one timer, which ends them at its next tick."""
TICK_S: Final = 0.25


def keep_nothing(_ages: Ages) -> None:
    """For a clock without a file: its steps end with the process."""


class Clock:
    """`keep`: called with the ages after each step and after each pause."""

    def __init__(
        self,
        wall_ms: Callable[[], int],
        monotonic_ms: Callable[[], int],
        *,
        pause_ms: int = PAUSE_MS,
        keep: Callable[[Ages], None] = keep_nothing,
    ) -> None:
        self.monotonic_ms = monotonic_ms
        self.ages: Ages = STEADY
        self.steps_total = 0
        self._wall_ms = wall_ms
        self.pause_ms = pause_ms
        self._keep = keep
        self._ahead_ms = wall_ms() - monotonic_ms()
        """How far the wall clock was ahead of the monotonic one at the last comparison."""
        self._compared_ms = NEVER_MS
        """The wall clock's reading at the last comparison."""
        self._paused_until_ms = 0

    def now_ms(self) -> int:
        """The wall clock, in epoch milliseconds. Notices a step."""
        wall_ms = self._wall_ms()
        if 0 <= wall_ms - self._compared_ms < COMPARE_MS:
            return wall_ms
        self._compare(wall_ms)
        return wall_ms

    def _compare(self, wall_ms: int) -> None:
        """Compares both clocks. The second one doubles the cost: once a second must do, or if the first looks odd."""
        monotonic_ms = self.monotonic_ms()
        step_ms = wall_ms - monotonic_ms - self._ahead_ms
        if step_ms:
            self._ahead_ms += step_ms
            if not -STEP_MS <= step_ms <= STEP_MS:
                self._note(ClockStep(wall_ms - step_ms, wall_ms), monotonic_ms)
        if self.ages.paused and monotonic_ms >= self._paused_until_ms:
            self._resume()
        self._compared_ms = NEVER_MS if self.ages.paused else wall_ms

    def opened(self, last_record_ms: int, kept: Ages = STEADY) -> None:
        """Called when the ledger was opened. A last record from the future shows that the clock was set back meanwhile.

        A record from long ago shows nothing: the machine may have been off, and that time has really passed. `kept`:
        the ages of the process before. If they were paused, the pause begins again.
        """
        now_ms = self.now_ms()
        if kept.steps:
            self.ages = kept
            self._paused_until_ms = self.monotonic_ms() + self.pause_ms
            self._compared_ms = NEVER_MS
            last_record_ms = max(last_record_ms, kept.steps[-1].after_ms)
        if last_record_ms > now_ms + STEP_MS:
            self._note(ClockStep(last_record_ms, now_ms, seen=False), self.monotonic_ms())
            self._compared_ms = NEVER_MS

    @property
    def paused_ms_left(self) -> int:
        """How long decisions by age stay paused if the clock stays steady; 0 if they are not paused."""
        self.now_ms()
        return max(1, self._paused_until_ms - self.monotonic_ms()) if self.ages.paused else 0

    def is_paused(self) -> bool:
        """Whether decisions by age are paused now."""
        self.now_ms()
        return self.ages.paused

    def left_ms(self, deadline_ms: int) -> int | None:
        """The time until a deadline, 0 or less if it has passed.

        None: it has passed by a clock that was set just now, so this is not decided yet.
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
        steps, forgotten = (*self.ages.steps, step), self.ages.forgotten
        self.ages = Ages(True, steps[-STEPS_KEPT:], latest_ms, forgotten=forgotten or len(steps) > STEPS_KEPT)
        self._keep(self.ages)
        log.warning("clock.stepped", extra={"step_ms": step.step_ms, "paused_ms": self.pause_ms, "seen": step.seen})

    def _resume(self) -> None:
        self.ages = msgspec.structs.replace(self.ages, paused=False, latest_ms=0)
        self._keep(self.ages)
        log.info("clock.resumed", extra={"steps": self.steps_total})


def uuid_source() -> Callable[[], str]:
    """Returns a function that makes a UUID at each call. They are made many at once, so most calls cost no Python."""
    return partial(next, chain.from_iterable(iter(_uuids, None)))


def _uuids() -> list[str]:
    random_bytes = bytearray(os.urandom(16 * UUIDS_AT_ONCE))
    # The byte with each UUID's version, and the byte with its variant.
    random_bytes[6::16] = random_bytes[6::16].translate(_VERSION)
    random_bytes[8::16] = random_bytes[8::16].translate(_VARIANT)
    # One digit of all UUIDs at a time: joining the groups of each UUID takes three times as long.
    digits, written = random_bytes.hex().encode(), bytearray(b"-" * UUID_CHARS * UUIDS_AT_ONCE)
    for number, place in enumerate(_DIGITS):
        written[place::UUID_CHARS] = digits[number :: len(_DIGITS)]
    text = written.decode()
    return [text[at : at + UUID_CHARS] for at in range(0, UUID_CHARS * UUIDS_AT_ONCE, UUID_CHARS)]


class LongWaits:
    """Ends long waits, up to a tick late: making and cancelling a timer for each wait would cost more."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ticking = False
        self.ends_s: dict[asyncio.Future[None], float] = {}
        """When each wait ends, by the clock of the loop. A woken waiter removes its own."""

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
