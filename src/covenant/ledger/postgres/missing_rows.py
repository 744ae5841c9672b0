"""Rows that a decision asks for, and those that were loaded for it. One statement loads many of a kind."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from covenant.ledger.machine.view import Remembered
from covenant.model.ids import PublicKey, TaskId
from covenant.model.peers.delegation import DelegationKey
from covenant.model.peers.instance import InstanceId
from covenant.model.push import Push
from covenant.model.task import CacheKey, Task

T = TypeVar("T")


class Want(msgspec.Struct, Generic[T], frozen=True, gc=False):
    """`T` is what `LoadedRows` keeps of the rows; None if they are kept elsewhere."""

    @property
    def key(self) -> object:
        return self


class WantOfBatch(Want[T], frozen=True, gc=False):
    """Rows that are loaded once for a batch. The fields only bound them, and may be others when it is decided anew."""

    @property
    def key(self) -> object:
        return type(self)


class WantTask(Want[None], frozen=True, gc=False):
    """A task, live or ended, or the fact that there is none."""

    task_id: TaskId


class WantBody(Want[Task], frozen=True, gc=False):
    task_id: TaskId


class WantQueue(Want[None], frozen=True, gc=False):
    recipient: PublicKey
    count: int


class WantRecipients(WantOfBatch[dict[str, int]], frozen=True, gc=False):
    """All recipients with queued tasks, and the first place of each."""


class WantResults(Want[None], frozen=True, gc=False):
    """The results of one sender, or of all."""

    sender: PublicKey | None
    count: int


class WantLeases(WantOfBatch[list[TaskId]], frozen=True, gc=False):
    count: int


class WantDue(WantOfBatch[list[TaskId]], frozen=True, gc=False):
    by_ms: int
    count: int


class WantOrphans(WantOfBatch[list[TaskId]], frozen=True, gc=False):
    count: int


class WantShared(Want[None], frozen=True, gc=False):
    """The leader, the followers and the cached result of a cache key."""

    cache_key: CacheKey


class OldResult(msgspec.Struct, frozen=True, gc=False):
    """One of the oldest cached results, with its age and size."""

    key: CacheKey
    cached_at_ms: int
    size: int


class WantCached(WantOfBatch[list[OldResult]], frozen=True, gc=False):
    """The oldest cached results."""

    count: int


class WantRequest(Want[Remembered | None], frozen=True, gc=False):
    verb: str
    holder: PublicKey
    request_id: str


class WantUses(Want[int], frozen=True, gc=False):
    signature: str


class WantPushes(Want[None], frozen=True, gc=False):
    task_id: TaskId


class WantIdlePushes(WantOfBatch[list[Push]], frozen=True, gc=False):
    by_ms: int
    count: int


class WantDelegation(Want[None], frozen=True, gc=False):
    delegation: DelegationKey


class WantPeer(Want[None], frozen=True, gc=False):
    """Every delegation with a peer, and its waiting messages: for a peer that is removed or gets another id."""

    peer: InstanceId


class WantLiveDelegations(Want[int], frozen=True, gc=False):
    """The number of live delegations."""

    peer: InstanceId


class WantEndedFirst(WantOfBatch[DelegationKey | None], frozen=True, gc=False):
    """The delegation that ended first."""


class WantOutbox(Want[None], frozen=True, gc=False):
    delegation: DelegationKey


class WantEnvelope(Want[bool], frozen=True, gc=False):
    """Whether an envelope was received before."""

    sender: InstanceId
    jti: str


class WantEnvelopeCount(Want[int], frozen=True, gc=False):
    sender: InstanceId


class Missing(Exception):
    """A decision lacks rows: the engine loads them, and decides anew."""

    def __init__(self, *wants: Want[Any]) -> None:
        super().__init__(f"{wants} was not loaded")
        self.wants = wants


class LoadedRows:
    """What was loaded for a batch, with the changes of the batch."""

    def __init__(self) -> None:
        self._loaded: dict[object, Any] = {}

    def load(self, want: Want[T], rows: T) -> None:
        self._loaded[want.key] = rows

    def loaded(self, want: Want[T]) -> T:
        """Raises `Missing` if it was not loaded."""
        key = want.key
        if key not in self._loaded:
            raise Missing(want)
        rows: T = self._loaded[key]
        return rows

    def if_loaded(self, want: Want[T]) -> T | None:
        return self._loaded.get(want.key)
