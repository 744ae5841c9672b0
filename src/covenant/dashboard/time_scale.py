"""Places moments on a line from 0 to 1. A stretch of mere waiting that would fill most of the line is folded."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

FOLD_SHARE: Final = 0.35
"""A wait that takes a larger share of the time is folded."""
FOLD_WIDTH: Final = 0.06
TICKS: Final = 5
TICK_GAP: Final = 0.14
"""Ticks nearer to each other would overlap."""
LAST_TICK_GAP: Final = 0.16


class Stretch(NamedTuple):
    begins_ms: int
    ends_ms: int


class PlacedSpan(msgspec.Struct, frozen=True, gc=False):
    """Where a span begins, and how wide it is."""

    x: float
    w: float


class Fold(PlacedSpan, frozen=True, gc=False):
    ms: int
    """The duration that the fold hides."""


class Tick(msgspec.Struct, frozen=True, gc=False):
    x: float
    at_ms: int


class _Part(NamedTuple):
    begins_ms: int
    ends_ms: int
    x: float
    w: float
    folded: bool


class TimeScale:
    def __init__(self, whole: Stretch, stretches: Iterable[Stretch], busy: Iterable[Stretch]) -> None:
        """`stretches` cut the line into parts. A part without any stretch of `busy` may be folded."""
        self._whole = whole
        marks = {*whole, *(self._within(at) for stretch in stretches for at in stretch)}
        self._parts = self._lay_out(sorted(marks), busy)
        self._ends = [part.ends_ms for part in self._parts]

    def _within(self, at_ms: int) -> int:
        return min(max(at_ms, self._whole.begins_ms), self._whole.ends_ms)

    def _lay_out(self, marks: list[int], busy: Iterable[Stretch]) -> list[_Part]:
        changes = Counter[int]()
        for stretch in busy:
            begins_ms = self._within(stretch.begins_ms)
            changes[begins_ms] += 1
            changes[max(begins_ms, self._within(stretch.ends_ms))] -= 1
        under_way, idle = 0, list[bool]()
        for begins_ms in marks[:-1]:
            under_way += changes[begins_ms]
            idle.append(under_way == 0)
        long_ms = (self._whole.ends_ms - self._whole.begins_ms) * FOLD_SHARE
        lengths = [ends_ms - begins_ms for begins_ms, ends_ms in pairwise(marks)]
        folded = [all_idle and ms > long_ms and not all(idle) for all_idle, ms in zip(idle, lengths, strict=True)]
        open_ms = sum(ms for ms, is_folded in zip(lengths, folded, strict=True) if not is_folded)
        room = (1 - FOLD_WIDTH * sum(folded)) / (open_ms or 1)
        parts, x = list[_Part](), 0.0
        for begins_ms, ms, is_folded in zip(marks, lengths, folded, strict=False):
            w = FOLD_WIDTH if is_folded else ms * room
            parts.append(_Part(begins_ms, begins_ms + ms, x, w, is_folded))
            x += w
        return parts

    def place(self, at_ms: int) -> float:
        at_ms = self._within(at_ms)
        part = self._parts[bisect_left(self._ends, at_ms)]
        return part.x + part.w * (at_ms - part.begins_ms) / (part.ends_ms - part.begins_ms)

    def span(self, stretch: Stretch) -> PlacedSpan:
        x = self.place(stretch.begins_ms)
        return PlacedSpan(round(x, 5), round(max(0.0, self.place(stretch.ends_ms) - x), 5))

    def folds(self) -> tuple[Fold, ...]:
        return tuple(
            Fold(round(part.x, 5), round(part.w, 5), part.ends_ms - part.begins_ms)
            for part in self._parts
            if part.folded
        )

    def ticks(self) -> tuple[Tick, ...]:
        """Ticks at even distances; if there are folds, at the edges of the folds."""
        begins_ms, ends_ms = self._whole
        edges = [at for part in self._parts if part.folded for at in (part.begins_ms, part.ends_ms)]
        even = [begins_ms + (ends_ms - begins_ms) * tick // TICKS for tick in range(TICKS + 1)]
        ticks = [Tick(0.0, begins_ms)]
        for at_ms in [*edges, ends_ms] if edges else even:
            x = self.place(at_ms)
            if x - ticks[-1].x >= TICK_GAP and (at_ms == ends_ms or 1 - x >= LAST_TICK_GAP):
                ticks.append(Tick(round(x, 5), at_ms))
        return tuple(ticks)
