"""Watches over many nodes: what happens to a reader whose steps cannot be read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from covenant.ledger.postgres.step_follower import StepFollower
from covenant.model.ids import TaskId
from covenant.model.task_event import Step
from tests.waits import BOUND_S

TASK = TaskId("00000000-0000-4000-8000-000000000001")


async def unreadable(_task: TaskId, _after: int, _limit: int) -> Sequence[Step]:
    raise ValueError("a step of a newer version")


async def first_generation(_task: TaskId) -> int:
    return 1


async def test_a_reader_is_cut_off_when_its_steps_cannot_be_decoded() -> None:
    follower = StepFollower(unreadable, first_generation)
    with follower.watch(TASK) as watch:
        await follower.wait_for_start(TASK)
        follower.heard(TASK, 2, 2)
        assert not await asyncio.wait_for(watch.next(10 * BOUND_S), BOUND_S / 10)
        assert watch.cut
