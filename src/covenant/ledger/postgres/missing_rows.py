"""Rows that a decision asks for and that were not loaded yet. One statement loads many of a kind."""

from __future__ import annotations

from typing import NamedTuple

from covenant.model.ids import PublicKey, TaskId
from covenant.model.peers.delegation import DelegationKey
from covenant.model.peers.instance import InstanceId
from covenant.model.task import CacheKey


class WantTask(NamedTuple):
    """A task, live or ended, or the fact that there is none."""

    task_id: TaskId


class WantBody(NamedTuple):
    task_id: TaskId


class WantQueue(NamedTuple):
    recipient: PublicKey
    limit: int


class WantRecipients(NamedTuple):
    """All recipients with queued tasks."""


class WantResults(NamedTuple):
    """The results of one sender, or of all."""

    sender: PublicKey | None
    limit: int


class WantLeases(NamedTuple):
    limit: int


class WantDue(NamedTuple):
    by_ms: int
    limit: int


class WantOrphans(NamedTuple):
    limit: int


class WantShared(NamedTuple):
    """The leader, the followers and the cached result of a cache key."""

    key: CacheKey


class WantCached(NamedTuple):
    """The oldest cached results."""

    limit: int


class WantRequest(NamedTuple):
    verb: str
    holder: PublicKey
    request_id: str


class WantUses(NamedTuple):
    signature: str


class WantPushes(NamedTuple):
    task_id: TaskId


class WantIdlePushes(NamedTuple):
    by_ms: int
    limit: int


class WantDelegation(NamedTuple):
    key: DelegationKey


class WantPeer(NamedTuple):
    """Every delegation with a peer, and its waiting messages: for a peer that is removed or gets another id."""

    peer: InstanceId


class WantLiveDelegations(NamedTuple):
    """The number of live delegations."""

    peer: InstanceId


class WantEndedFirst(NamedTuple):
    """The delegation that ended first."""


class WantOutbox(NamedTuple):
    key: DelegationKey


class WantEnvelope(NamedTuple):
    sender: InstanceId
    jti: str


class WantEnvelopeCount(NamedTuple):
    sender: InstanceId


Want = (
    WantTask
    | WantBody
    | WantQueue
    | WantRecipients
    | WantResults
    | WantLeases
    | WantDue
    | WantOrphans
    | WantShared
    | WantCached
    | WantRequest
    | WantUses
    | WantPushes
    | WantIdlePushes
    | WantDelegation
    | WantPeer
    | WantLiveDelegations
    | WantEndedFirst
    | WantOutbox
    | WantEnvelope
    | WantEnvelopeCount
)


class Missing(Exception):
    """A decision lacks rows: the engine loads them, and decides anew."""

    def __init__(self, *wants: Want) -> None:
        super().__init__(f"{wants} was not loaded")
        self.wants = wants
