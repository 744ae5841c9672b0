"""Push configurations in the state of a batch."""

from __future__ import annotations

from collections.abc import Sequence

from covenant.ledger.machine import effects
from covenant.ledger.machine.events import PushDropped, PushEvent, PushMoved, PushPut
from covenant.ledger.postgres.counters import Counters, count_push
from covenant.ledger.postgres.missing_rows import LoadedRows, Missing, WantIdlePushes, WantPushes
from covenant.ledger.postgres.stored_task import BIGINT_MAX
from covenant.ledger.register_index import idle_at_ms
from covenant.model.clock_steps import Ages
from covenant.model.ids import TaskId
from covenant.model.push import Push
from covenant.model.settings import Limits

IDLE_LOOK_MAX = 10_000
"""After a step of the clock it is unknown which are idle: at most this many are looked at."""


class PushRows(LoadedRows):
    limits: Limits
    counts: Counters
    base: Counters

    def __init__(self) -> None:
        self._pushes: dict[TaskId, dict[str, Push]] = {}
        self.pushes_put: dict[tuple[TaskId, str], Push] = {}
        self.pushes_gone: dict[tuple[TaskId, str], None] = {}

    def load_pushes(self, task_id: TaskId, pushes: Sequence[Push]) -> None:
        self._pushes[task_id] = {push.id: push for push in pushes}

    def pushes_loaded(self, task_id: TaskId) -> bool:
        return task_id in self._pushes

    def pushes(self, task_id: TaskId) -> Sequence[Push]:
        return tuple(self._of_task(task_id).values())

    def push(self, task_id: TaskId, push_id: str) -> Push | None:
        return self._of_task(task_id).get(push_id)

    def _of_task(self, task_id: TaskId) -> dict[str, Push]:
        if task_id not in self._pushes:
            raise Missing(WantPushes(task_id))
        return self._pushes[task_id]

    def push_count(self) -> int:
        return self.base.get("pushes") + self.counts.get("pushes")

    def push_count_of(self, tenant: str) -> int:
        return self.base.get("pushes_of", tenant) + self.counts.get("pushes_of", tenant)

    def pushes_idle(self, now_ms: int, count: int, ages: Ages) -> Sequence[Push]:
        want = WantIdlePushes(BIGINT_MAX, IDLE_LOOK_MAX) if ages.steps else WantIdlePushes(now_ms, count)
        idle = [
            push
            for push in self.loaded(want)
            if idle_at_ms(push, ages.moment_ms(push.moved_at_ms, now_ms), self.limits) <= now_ms
        ]
        return idle[:count]

    def apply_push(self, event: PushEvent, ts_ms: int) -> None:
        match event:
            case PushPut(push):
                self._put_push(push)
            case PushMoved(move):
                self._put_push(effects.moved_push(self._known_push(move.task_id, move.id), move, ts_ms))
            case PushDropped(task_id, push_id):
                push = self._known_push(task_id, push_id)
                self._pushes.get(task_id, {}).pop(push_id, None)
                self.pushes_put.pop((task_id, push_id), None)
                self.pushes_gone[task_id, push_id] = None
                self._count_push(push, None)
            case _:
                raise AssertionError(f"no push takes {event}")

    def end_pushes(self, task_id: TaskId, generation: int) -> None:
        for push in tuple(self._pushes[task_id].values()):
            self._put_push(effects.ended_push(push, generation))

    def _known_push(self, task_id: TaskId, push_id: str) -> Push:
        """The configuration. One that is dropped because it is idle was not loaded with its task."""
        if task_id in self._pushes:
            return self._pushes[task_id][push_id]
        idle = self.if_loaded(WantIdlePushes(0, 0)) or ()
        return next(push for push in idle if (push.task_id, push.id) == (task_id, push_id))

    def _put_push(self, push: Push) -> None:
        of_task = self._pushes.setdefault(push.task_id, {})
        self._count_push(of_task.get(push.id), push)
        of_task[push.id] = push
        self.pushes_gone.pop((push.task_id, push.id), None)
        self.pushes_put[push.task_id, push.id] = push

    def _count_push(self, old: Push | None, new: Push | None) -> None:
        for push, change in ((old, -1), (new, 1)):
            if push is not None:
                count_push(self.counts, push, change)
