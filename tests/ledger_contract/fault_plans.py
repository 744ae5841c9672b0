"""What happens at a fault point: the process is killed, a write torn, unsynced data lost, or the disk fails.

A plan counts the hits of every point and, at the n-th hit of the point that it names, performs its action.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from covenant.ledger.embedded import fault_points
from covenant.ledger.embedded.fault_points import BLOB_POINTS, MOVE_POINTS, POINTS, FaultPoint

_KNOWN: Final = frozenset((*POINTS, *BLOB_POINTS, *MOVE_POINTS))

Action = Callable[[FaultPoint], None]


def kill(_step: FaultPoint) -> None:
    """`kill -9`: written bytes stay, later steps never happen."""
    os.kill(os.getpid(), signal.SIGKILL)


def tear(length: int) -> Action:
    """The process dies with only the first bytes of this write in the file."""

    def action(step: FaultPoint) -> None:
        if step.fd >= 0 and step.data:
            os.write(step.fd, step.data[:length])
        kill(step)

    return action


def lose(step: FaultPoint) -> None:
    """The power fails: unsynced bytes and names are gone."""
    if step.fd >= 0:
        os.ftruncate(step.fd, step.kept)
    elif step.path is not None:
        step.path.unlink(missing_ok=True)
    kill(step)


def fail(errno: int, *, written: int = 0) -> Action:
    """The disk refuses this step (EIO, ENOSPC), after taking the first `written` bytes of it."""

    def action(step: FaultPoint) -> None:
        if written and step.fd >= 0 and step.data:
            os.write(step.fd, step.data[:written])
        raise OSError(errno, os.strerror(errno))

    return action


class Plan:
    """The action at the n-th hit of one point; without an action it only counts. Any thread may hit it.

    `lasting`: at each later hit, too.
    """

    def __init__(
        self, name: str | None = None, action: Action | None = None, *, nth: int = 1, lasting: bool = False
    ) -> None:
        if name is not None and name not in _KNOWN:
            raise ValueError(f"{name!r} is not a crash point; the points are {', '.join(sorted(_KNOWN))}")
        self.hits: Counter[str] = Counter()
        self.fired = False
        self._name = name
        self._action = action
        self._nth = nth
        self._lasting = lasting
        self._lock = threading.Lock()

    def hit(self, step: FaultPoint) -> None:
        assert step.name in _KNOWN, f"the point {step.name!r} is missing from POINTS"
        with self._lock:
            self.hits[step.name] += 1
            hits = self.hits[step.name]
            due = step.name == self._name and (hits == self._nth or (self._lasting and hits > self._nth))
            self.fired = self.fired or due
        if due and self._action is not None:
            self._action(step)


def arm(plan: Plan | None) -> None:
    """One plan for the whole process; None disarms."""
    fault_points.arm(plan.hit if plan is not None else None)


@contextmanager
def armed(plan: Plan) -> Iterator[Plan]:
    arm(plan)
    try:
        yield plan
    finally:
        arm(None)
