"""News: what each batch touched, for the other nodes. Each node follows the rows of each writer, in their order.

A row is written with its batch, so nothing is told that did not happen, and nothing that happened is lost: a
notification only says that it is worth looking now. A node that fell too far behind begins anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from covenant.ledger.machine.events import (
    AnyEvent,
    Audited,
    PeerEvent,
    PushDropped,
    PushPut,
    TaskEvent,
    peer_of,
)
from covenant.ledger.postgres.counters import Count
from covenant.ledger.postgres.working_set import WorkingSet
from covenant.ledger.watchers import LEASE_ENDS, step_of
from covenant.model.ids import TaskId

CHANNEL: Final = "covenant_news"
KEPT_S: Final = 120.0


class Steps(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The generations of a task that a batch brought."""

    task_id: TaskId
    first: int
    last: int


class LostLease(msgspec.Struct, frozen=True, gc=False, array_like=True):
    node: str
    boot: str
    task_id: TaskId


class Topics(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    counts: tuple[Count, ...] = ()
    queued: tuple[str, ...] = ()
    """Recipients, once for each task that was queued."""
    settled: tuple[str, ...] = ()
    """Senders, once for each result that waits."""
    ended: tuple[TaskId, ...] = ()
    steps: tuple[Steps, ...] = ()
    lost: tuple[LostLease, ...] = ()
    """Leases of the agents in a node, which somebody has ended."""
    peers: tuple[str, ...] = ()
    heard: tuple[tuple[str, int], ...] = ()
    pushed: tuple[TaskId, ...] = ()
    """Tasks with push configurations that moved, or whose configurations were changed."""
    audited: bool = False
    moved: tuple[TaskId, ...] = ()
    """Tasks that moved without a step of their own, such as those that were requeued."""


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Topics).decode


def encode_topics(topics: Topics) -> str:
    return _encode(topics).decode()


def decode_topics(text: str) -> Topics:
    return _decode(text)


def topics_of(work: WorkingSet, records: Iterable[tuple[Sequence[AnyEvent], int]]) -> Topics:
    """What a batch touched; `records` are its commands' events, with their times."""
    ended: dict[TaskId, None] = {}
    steps: dict[TaskId, tuple[int, int]] = {}
    lost: list[LostLease] = []
    peers: dict[str, None] = {}
    pushed: dict[TaskId, None] = {}
    moved: dict[TaskId, None] = {}
    audited = False
    for events, ts_ms in records:
        for event in events:
            if isinstance(event, PeerEvent):
                peer = peer_of(event)
                if peer is not None:
                    peers[peer] = None
            elif isinstance(event, (PushPut, PushDropped)):
                pushed[event.task_id] = None
            elif isinstance(event, Audited):
                audited = True
            if not isinstance(event, TaskEvent):
                continue
            task_id = event.task_id
            entry = work.entries[task_id]
            assert entry is not None
            step = step_of(event, ts_ms)
            if work.slots[task_id].pushed:
                pushed[task_id] = None
            if step is not None:
                first, _ = steps.get(task_id, (step.generation, 0))
                steps[task_id] = (first, step.generation)
            else:
                moved[task_id] = None
            if type(event) in LEASE_ENDS:
                lease = entry.lease
                if lease is not None and lease.node is not None and lease.boot is not None:
                    lost.append(LostLease(lease.node, lease.boot, task_id))
            if entry.finished:
                ended[task_id] = None
    return Topics(
        counts=tuple(work.counts),
        queued=tuple(recipient for recipient, _ in work.queue_in),
        settled=tuple(sender for sender, _ in work.results_in),
        ended=tuple(ended),
        steps=tuple(Steps(task_id, first, last) for task_id, (first, last) in steps.items()),
        lost=tuple(lost),
        peers=tuple(peers),
        heard=tuple((peer, at_ms) for peer, at_ms in work.heard.items()),
        pushed=tuple(pushed),
        audited=audited,
        moved=tuple(task_id for task_id in moved if task_id not in steps),
    )
