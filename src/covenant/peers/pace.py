"""How often: what a peer may say in a minute, and when something that failed is tried again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from covenant.model.peers.instance import InstanceId

MINUTE_MS: Final = 60_000
JITTER: Final = 0.2
DOUBLINGS_MAX: Final = 30


class MessageRate:
    """A bucket for each peer, that holds what it may say in a minute and fills at that rate. In memory: a restart
    gives everybody a full one."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._buckets: dict[InstanceId, tuple[float, int]] = {}

    def take(self, peer: InstanceId, per_min: int) -> int | None:
        """Spend one. None, or in how many milliseconds there will be one to spend."""
        now_ms = self._now_ms()
        left, at_ms = self._buckets.get(peer, (float(per_min), now_ms))
        # A clock that was set back gives nothing, and takes nothing.
        left = min(float(per_min), left + max(0, now_ms - at_ms) * per_min / MINUTE_MS)
        taken = left >= 1
        self._buckets[peer] = (left - 1 if taken else left, now_ms)
        return None if taken else math.ceil((1 - left) * MINUTE_MS / per_min)


def backoff_ms(attempts: int, first_ms: int, max_ms: int, chance: float) -> int:
    """The pause after so many failures in a row: twice as long each time, a fifth more or less by `chance` (0 to 1)."""
    pause_ms = min(max_ms, first_ms * 2 ** min(max(0, attempts - 1), DOUBLINGS_MAX))
    return max(1, int(pause_ms * (1 + JITTER * (2 * chance - 1))))
