"""Priorities within one recipient's queue, bounded so that nothing starves.

A task's rank is its place in the queue, less a head start for each step of its priority. The lowest rank begins first.
So a task goes before tasks of a lower priority that were queued up to `HEAD_START` places before it, for each step of
difference, and before none that has waited longer. Tasks of one priority begin in the order of their places.
"""

from __future__ import annotations

from typing import Final

PRIORITY_MAX: Final = 9
HEAD_START: Final = 100
"""Places for each step of priority."""


def rank(place: int, priority: int) -> int:
    return place - priority * HEAD_START
