"""Results kept to answer the same idempotent work again: the oldest go first, by age, by number and by size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from covenant.ledger.machine.view import Cached, Limits
from covenant.model.clock_steps import Ages
from covenant.model.result import weigh_result
from covenant.model.task import CacheKey


class ResultCache:
    def __init__(self) -> None:
        self._cached: OrderedDict[CacheKey, tuple[Cached, int]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._cached)

    def get(self, key: CacheKey) -> Cached | None:
        found = self._cached.get(key)
        return None if found is None else found[0]

    def items(self) -> Iterator[tuple[CacheKey, Cached]]:
        return ((key, cached) for key, (cached, _) in self._cached.items())

    def put(self, key: CacheKey, cached: Cached) -> None:
        """As the newest."""
        before = self._cached.pop(key, None)
        size = weigh_result(cached.result)
        self._size += size - (before[1] if before is not None else 0)
        self._cached[key] = (cached, size)

    def drop_oldest(self, count: int) -> None:
        for _ in range(min(count, len(self._cached))):
            _, (_, size) = self._cached.popitem(last=False)
            self._size -= size

    def overflow(self, limits: Limits, now_ms: int, ages: Ages) -> int:
        """How many of the oldest are over the limits."""
        over, size = max(0, len(self._cached) - limits.cache_entries_max), self._size
        for index, (cached, its_size) in enumerate(self._cached.values()):
            young = ages.age_ms(cached.cached_at_ms, now_ms) <= limits.cache_age_ms_max
            if index >= over and young and size <= limits.cache_bytes_max:
                return index
            size -= its_size
        return len(self._cached)
