"""The push configurations in memory: by task, those given up, and those that nobody needs any more."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from covenant.ledger.machine.events import PushDropped, PushEvent, PushMoved, PushPut
from covenant.ledger.machine.view import Limits
from covenant.model.clock_steps import Ages
from covenant.model.ids import TaskId
from covenant.model.push import Push, tenant_of

replace = msgspec.structs.replace

LINGER_MS: Final = 600_000
"""How long a configuration of an ended task that owes nothing can still be read by whoever made it."""


class Outbox:
    limits: Limits

    def __init__(self) -> None:
        self.pushes_by_task: dict[TaskId, dict[str, Push]] = {}
        """By task and id, the oldest of a task first."""
        self.pushes_dead: dict[tuple[TaskId, str], None] = {}
        """Given up, the longest first."""
        self._push_count = 0
        self._push_counts: dict[str, int] = {}
        """By tenant."""
        self._idle: list[tuple[int, TaskId, str]] = []
        """One place for each configuration of an ended task, at a time before which it need not be looked at."""

    def apply_push(self, event: PushEvent, ts_ms: int) -> None:
        match event:
            case PushPut(push):
                self.put_push(push)
            case PushMoved(move):
                push = self.pushes_by_task[move.task_id][move.id]
                self.put_push(
                    replace(
                        push,
                        moved_at_ms=ts_ms,
                        delivered=max(push.delivered, move.delivered),
                        attempts=move.attempts,
                        next_ms=move.next_ms,
                        failure=move.failure,
                        dead_at_ms=ts_ms if move.dead else None,
                    )
                )
            case PushDropped(task_id, push_id):
                of_task = self.pushes_by_task[task_id]
                self._count(of_task.pop(push_id), -1)
                if not of_task:
                    del self.pushes_by_task[task_id]
                self.pushes_dead.pop((task_id, push_id), None)
            case _:
                raise AssertionError(f"no outbox takes {event}")

    def put_push(self, push: Push) -> None:
        """As an event says, or a snapshot."""
        of_task = self.pushes_by_task.setdefault(push.task_id, {})
        old = of_task.get(push.id)
        of_task[push.id] = push
        if old is None:
            self._count(push, 1)
        if push.dead_at_ms is None:
            self.pushes_dead.pop((push.task_id, push.id), None)
        else:
            self.pushes_dead[push.task_id, push.id] = None
        if push.ended is not None and (old is None or old.ended is None):
            heapq.heappush(self._idle, (self._idle_at_ms(push, push.moved_at_ms), push.task_id, push.id))

    def end_pushes(self, task_id: TaskId, generation: int) -> None:
        """The task has ended: there will be no later generation."""
        for push in tuple(self.pushes_by_task[task_id].values()):
            self.put_push(replace(push, ended=generation))

    def pushes(self, task_id: TaskId) -> Sequence[Push]:
        return tuple(self.pushes_by_task.get(task_id, {}).values())

    def push(self, task_id: TaskId, push_id: str) -> Push | None:
        of_task = self.pushes_by_task.get(task_id)
        return of_task.get(push_id) if of_task is not None else None

    def push_count(self) -> int:
        return self._push_count

    def push_count_of(self, tenant: str) -> int:
        return self._push_counts.get(tenant, 0)

    def _count(self, push: Push, change: int) -> None:
        tenant = tenant_of(push.recipient)
        self._push_count += change
        left = self._push_counts.pop(tenant, 0) + change
        if left:
            self._push_counts[tenant] = left

    def all_pushes(self) -> Iterator[Push]:
        return (push for of_task in self.pushes_by_task.values() for push in of_task.values())

    def pushes_idle(self, now_ms: int, count: int, ages: Ages) -> Sequence[Push]:
        found: dict[tuple[TaskId, str], Push] = {}
        back: dict[tuple[TaskId, str], int] = {}
        while self._idle and self._idle[0][0] <= now_ms and len(found) < count:
            _, task_id, push_id = heapq.heappop(self._idle)
            push = self.push(task_id, push_id)
            if push is None or push.ended is None:
                continue
            # It may have moved since, or the clock: then it is looked at again later. Dropping it is another event.
            moved_at_ms = ages.moment_ms(push.moved_at_ms, now_ms)
            back[task_id, push_id] = idle_at_ms = self._idle_at_ms(push, moved_at_ms)
            if idle_at_ms <= now_ms:
                found[task_id, push_id] = push
        for (task_id, push_id), idle_at_ms in back.items():
            heapq.heappush(self._idle, (idle_at_ms, task_id, push_id))
        return tuple(found.values())

    def _idle_at_ms(self, push: Push, moved_at_ms: int) -> int:
        return moved_at_ms + (LINGER_MS if push.done else self.limits.retention_ms)
