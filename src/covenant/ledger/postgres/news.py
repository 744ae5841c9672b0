"""News: a row for each batch, with its changes, for the other nodes. Each node reads the rows of each writer in order.

A row is written with its batch, so news never report a change that did not happen, and never miss one: a notification
only says that it is worth looking now. A node that fell too far behind begins anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

import asyncpg
import msgspec

from covenant.ledger.machine.events import (
    AnyEvent,
    Audited,
    PeerEvent,
    PushDropped,
    PushPut,
    TaskSuspended,
    peer_of,
)
from covenant.ledger.postgres.batch_state import BatchState
from covenant.ledger.postgres.connections import execute, fetch_value
from covenant.ledger.postgres.counters import Count
from covenant.ledger.postgres.stored_task import is_task_event
from covenant.ledger.watchers import LEASE_ENDS, step_of
from covenant.model.ids import TaskId

CHANNEL: Final = "covenant_news"
KEPT_S: Final = 120.0
"""How long news are kept. A node that was away for longer reads counts and registers anew."""
NOTHING: Final = "{}"
"""The news of a batch that the gate refused."""
AFTER_ALL: Final = 1 << 62
BEFORE_ALL: Final = -AFTER_ALL
_encode: Final = msgspec.json.Encoder().encode


class Steps(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The generations of a task that a batch wrote."""

    task_id: TaskId
    first: int
    last: int


class LostLease(msgspec.Struct, frozen=True, gc=False, array_like=True):
    node: str
    boot: str
    task_id: TaskId


class Topics(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The changes of a batch that other nodes must hear of."""

    counts: tuple[Count, ...] = ()
    queued: tuple[str, ...] = ()
    """Recipients, once for each task that was queued."""
    settled: tuple[str, ...] = ()
    """Senders, once for each result that waits."""
    ended: tuple[TaskId, ...] = ()
    steps: tuple[Steps, ...] = ()
    lost: tuple[LostLease, ...] = ()
    """Ended leases of agents inside another node."""
    peers: tuple[str, ...] = ()
    """Peers that changed, or whose messages or delegations did."""
    heard: tuple[tuple[str, int], ...] = ()
    """Peers that proved to be reachable, and when."""
    pushed: tuple[TaskId, ...] = ()
    """Tasks with push configurations that changed, or whose configurations changed."""
    audited: bool = False
    moved: tuple[TaskId, ...] = ()
    """Tasks that changed without a step of their own, such as requeued ones."""
    due_ms: int | None = None
    """When the first wait that began in the batch is over."""


decode_topics: Final = msgspec.json.Decoder(Topics).decode


def encode_topics(topics: Topics) -> str:
    return _encode(topics).decode()


def topics_of(work: BatchState, records: Iterable[tuple[Sequence[AnyEvent], int]], writer: tuple[str, str]) -> Topics:
    """The news of a batch; `records` are its commands' events, with their times.

    `writer`: the node and the boot that write it, which need no news of their own leases.
    """
    ended: dict[TaskId, None] = {}
    steps: dict[TaskId, tuple[int, int]] = {}
    lost: list[LostLease] = []
    peers: dict[str, None] = {}
    pushed: dict[TaskId, None] = {}
    moved: dict[TaskId, None] = {}
    audited, due_ms = False, None
    for events, ts_ms in records:
        for event in events:
            if not is_task_event(event):
                if isinstance(event, PeerEvent):
                    peer = peer_of(event)
                    if peer is not None:
                        peers[peer] = None
                elif isinstance(event, (PushPut, PushDropped)):
                    pushed[event.task_id] = None
                elif isinstance(event, Audited):
                    audited = True
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
            if type(event) is TaskSuspended and (at_ms := entry.due_at_ms(ts_ms)) is not None:
                due_ms = at_ms if due_ms is None else min(due_ms, at_ms)
            if type(event) in LEASE_ENDS:
                lease = entry.lease
                if (
                    lease is not None
                    and lease.node is not None
                    and lease.boot is not None
                    and (lease.node, lease.boot) != writer
                ):
                    lost.append(LostLease(lease.node, lease.boot, task_id))
            if entry.finished:
                ended[task_id] = None
    return Topics(
        counts=tuple(work.counts),
        queued=tuple(recipient for recipient, _ in work.queue.added),
        settled=tuple(sender for sender, _ in work.results.added),
        ended=tuple(ended),
        steps=tuple(Steps(task_id, first, last) for task_id, (first, last) in steps.items()),
        lost=tuple(lost),
        peers=tuple(peers),
        heard=tuple((peer, at_ms) for peer, at_ms in work.heard.items()),
        pushed=tuple(pushed),
        audited=audited,
        moved=tuple(task_id for task_id in moved if task_id not in steps),
        due_ms=due_ms,
    )


class FirstDue:
    """Waits for the task that is due first; news report an earlier one. For a single waiter."""

    def __init__(self, next_due: Callable[[], Awaitable[int | None]], now_ms: Callable[[], int]) -> None:
        self._next_due = next_due
        self._now_ms = now_ms
        self._earlier = asyncio.Event()
        self._awaited_ms = BEFORE_ALL
        """Tasks that are due before this time wake the waiter."""

    def note(self, topics: Topics) -> None:
        if topics.due_ms is not None and topics.due_ms < self._awaited_ms:
            self._earlier.set()

    async def wait(self, timeout_ms: int) -> bool:
        """Whether a task is due. False also if an earlier one has come: then look again."""
        self._earlier.clear()
        self._awaited_ms = AFTER_ALL  # for news that arrive during the query
        due_ms, now_ms = await self._next_due(), self._now_ms()
        wait_ms = timeout_ms if due_ms is None else max(0, min(timeout_ms, due_ms - now_ms))
        self._awaited_ms = now_ms + wait_ms
        if wait_ms and not self._earlier.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_ms / 1000):
                    await self._earlier.wait()
        self._awaited_ms = BEFORE_ALL
        return due_ms is not None and due_ms <= self._now_ms()


async def was_written(
    connection: asyncpg.Connection[Any], writer: int, boot: str, seq: int, *, give_up: bool = False
) -> bool | None:
    """Whether this batch was written. `give_up`: if not, it never will be; None if this run is fenced."""
    values = {"writer": writer, "boot": boot, "seq": seq, "topics": NOTHING}
    if give_up and await fetch_value("nodes", connection, "writer_seq", **values) is None:
        return None
    topics = await fetch_value("nodes", connection, "news_of", **values)
    if topics is None and give_up:
        # The batch may still be in flight: its number is used up, so that it comes too late.
        await execute("nodes", connection, "skip", **values)
    return topics is not None and topics != NOTHING
