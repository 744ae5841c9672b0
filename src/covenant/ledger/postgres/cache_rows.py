"""Work that several tasks share under one cache key, in a batch: leader, followers, and the cached result."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from covenant.ledger.machine import effects
from covenant.ledger.machine.effects import Sharing
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.events import CacheDropped, TaskEvent
from covenant.ledger.machine.view import Cached
from covenant.ledger.postgres.counters import ALL, Counters
from covenant.ledger.postgres.missing_rows import LoadedRows, Missing, WantCached, WantShared
from covenant.model.clock_steps import Ages
from covenant.model.ids import TaskId
from covenant.model.settings import Limits
from covenant.model.task import CacheKey, weigh_result


def key_text(key: CacheKey) -> str:
    """A short hash of a cache key, however long the client's key is."""
    return hashlib.sha256(msgspec.json.encode(key)).hexdigest()


class SharedWork:
    """One row of `shared`, and its followers."""

    def __init__(self, key: CacheKey) -> None:
        self.key = key
        self.leader: TaskId | None = None
        self.cached: Cached | None = None
        self.cached_bytes = 0
        self.cached_place: int | None = None
        self.followers: dict[TaskId, None] = {}
        self.stored = False
        """Whether there is a row."""
        self.moved = False


class SharedRows(LoadedRows):
    limits: Limits
    counts: Counters
    base: Counters

    def __init__(self) -> None:
        self.shared: dict[CacheKey, SharedWork] = {}

    def load_shared(self, work: SharedWork) -> None:
        self.shared[work.key] = work

    def _work(self, key: CacheKey) -> SharedWork:
        work = self.shared.get(key)
        if work is None:
            raise Missing(WantShared(key))
        return work

    def cached(self, key: CacheKey) -> Cached | None:
        return self._work(key).cached

    def leader(self, key: CacheKey) -> TaskId | None:
        return self._work(key).leader

    def followers(self, key: CacheKey) -> Sequence[TaskId]:
        return tuple(self._work(key).followers)

    def cache_overflow(self, now_ms: int, count: int, ages: Ages) -> Sequence[CacheKey]:
        oldest = self.loaded(WantCached(count))
        over = self.base.get("cached") - self.limits.cache_entries_max
        size = self.base.get("cached_bytes")
        found: list[CacheKey] = []
        for old in oldest[:count]:
            young = ages.age_ms(old.cached_at_ms, now_ms) <= self.limits.cache_age_ms_max
            if len(found) >= over and young and size <= self.limits.cache_bytes_max:
                break
            found.append(old.key)
            size -= old.size
        return found

    def check_sharing(self, event: TaskEvent, key: CacheKey | None) -> None:
        if key is not None and effects.sharing(event) is not None:
            self._work(key)

    def check_dropped(self, event: CacheDropped) -> None:
        missing = [WantShared(key) for key in event.keys if key not in self.shared]
        if missing:
            raise Missing(*missing)

    def share(self, event: TaskEvent, entry: Entry, ts_ms: int, place: int) -> None:
        """Updates the leader and followers of a cache key, and the cached result."""
        key, sharing = entry.cache_key, effects.sharing(event)
        if key is None or sharing is None:
            return
        task_id, work = entry.task.id, self.shared[key]
        work.moved = True
        if sharing is Sharing.LEADS:
            work.leader = work.leader or task_id
        elif sharing is Sharing.TAKES_OVER:
            work.followers.pop(task_id, None)
            work.leader = task_id
        elif sharing is Sharing.FOLLOWS:
            work.followers[task_id] = None
        elif sharing is Sharing.ENDS:
            if work.leader == task_id:
                work.leader = None
            else:
                work.followers.pop(task_id, None)
            found = effects.cacheable(event, ts_ms)
            if found is not None:
                self._cache(work, found, place)

    def drop_cached(self, event: CacheDropped) -> None:
        for key in event.keys:
            work = self.shared[key]
            if work.cached is not None:
                self._uncount(work)
                work.cached, work.cached_bytes, work.cached_place, work.moved = None, 0, None, True

    def _cache(self, work: SharedWork, cached: Cached, place: int) -> None:
        if work.cached is not None:
            self._uncount(work)
        work.cached, work.cached_bytes, work.cached_place = cached, weigh_result(cached.result), place
        self.counts.count("cached", ALL, 1)
        self.counts.count("cached_bytes", ALL, work.cached_bytes)

    def _uncount(self, work: SharedWork) -> None:
        self.counts.count("cached", ALL, -1)
        self.counts.count("cached_bytes", ALL, -work.cached_bytes)
