"""What an agent delegates is part of its own task: it begins under it, and ends with it, whatever happens between."""

from __future__ import annotations

from typing import Any

import pytest

from covenant.ledger.machine.commands import CancelOrphans
from covenant.model.ids import AgentId, TaskId
from covenant.model.result import Ending
from covenant.model.task import DELEGATION, Task
from covenant.testing.cast import ALICE, BOB, CAROL, DAVE, failed, make_task, ok, task_id
from covenant.testing.desk import WAIT_MS, Desk, check_generations, refused
from covenant.testing.suite import Suite
from covenant.testing.surviving import Restart, RestartSuite


def part(number: int, of: int, *, sender: AgentId = BOB, recipient: AgentId = CAROL, **fields: Any) -> Task:
    return make_task(
        number, sender=sender, recipient=recipient, origin=DELEGATION, parent=task_id(of), depth=1, **fields
    )


async def cancel_orphans(desk: Desk) -> list[TaskId]:
    """All of them, with what they orphan in turn."""
    ended: list[TaskId] = []
    while (orphaned := await desk.ledger.commit(CancelOrphans(count=2))).more:
        ended += orphaned.task_ids
    return ended


async def endings(desk: Desk, *numbers: int) -> list[str]:
    return [(await desk.show(task_id(number))).a2a_state for number in numbers]


class DelegatingSuite(Suite):
    async def test_nothing_is_delegated_by_a_task_that_is_unknown_or_has_ended(self, desk: Desk) -> None:
        with refused("parent_ended", 409):
            await desk.send(part(2, of=1))
        await desk.finish(await desk.taken(make_task(1)), ok(task_id(1)))
        with refused("parent_ended", 409):
            await desk.send(part(2, of=1))

    async def test_what_was_delegated_before_is_found_again_although_its_parent_ended(self, desk: Desk) -> None:
        leased = await desk.taken(make_task(1))
        await desk.send(part(2, of=1))
        await desk.finish(leased, ok(task_id(1)))
        assert (await desk.send(part(2, of=1))).duplicate

    @pytest.mark.parametrize("how", ["completed", "failed", "canceled", "forced", "timed out"])
    async def test_a_task_that_ends_takes_what_it_delegated_with_it(self, desk: Desk, how: str) -> None:
        leased = await desk.taken(make_task(1, timeout_ms=1_000))
        below = await desk.taken(part(2, of=1))
        await desk.send(part(3, of=1, recipient=DAVE))
        await desk.send(part(4, of=2, sender=CAROL, recipient=DAVE))
        await desk.finish(await desk.taken(part(5, of=1)), ok(task_id(5)))
        assert await cancel_orphans(desk) == []
        match how:
            case "completed":
                await desk.finish(leased, ok(task_id(1)))
            case "failed":
                await desk.finish(leased, failed(task_id(1)))
            case "canceled":
                await desk.cancel(task_id(1))
            case "forced":
                await desk.force_error(task_id(1))
            case _:
                desk.clock.advance(1_000)
                await desk.sweep()
        assert await desk.ledger.orphaned(WAIT_MS)
        assert await cancel_orphans(desk) == [task_id(2), task_id(3), task_id(4)]
        assert await endings(desk, 2, 3, 4, 5) == ["canceled", "canceled", "canceled", "completed"]
        assert "has ended" in str((await check_generations(desk, task_id(3))).result)
        with refused("canceled", 409):
            await desk.finish(below, ok(task_id(2)))
        assert await cancel_orphans(desk) == []
        assert not await desk.ledger.orphaned(0)

    async def test_a_parked_and_a_requeued_task_keep_what_they_delegated(self, desk: Desk) -> None:
        leased = await desk.taken(make_task(1))
        await desk.send(part(2, of=1))
        await desk.requeue(task_id(1))
        assert await cancel_orphans(desk) == []
        leased = await desk.take_one()
        await desk.park(leased)
        assert await cancel_orphans(desk) == []
        assert await endings(desk, 2) == ["submitted"]
        await desk.cancel(task_id(1))
        assert await cancel_orphans(desk) == [task_id(2)]

    async def test_what_was_sent_by_mail_outlives_the_task_it_names_as_its_parent(self, desk: Desk) -> None:
        leased = await desk.taken(make_task(1))
        await desk.send(make_task(2, sender=BOB, recipient=CAROL, parent=task_id(1)))
        await desk.finish(leased, ok(task_id(1)))
        assert await cancel_orphans(desk) == []
        assert await desk.queued_ids(CAROL) == [task_id(2)]

    async def test_nobody_comes_for_the_result_of_what_was_delegated(self, desk: Desk) -> None:
        await desk.taken(make_task(1))
        await desk.finish(await desk.taken(part(2, of=1)), ok(task_id(2)))
        assert await desk.drain(BOB) == ()
        shown = await desk.show(task_id(2))
        assert (shown.state, shown.a2a_state) == ("resolved", Ending.COMPLETED)


class DelegationKeepingSuite(RestartSuite):
    async def test_orphans_are_found_after_a_restart_compacted_or_not(self, desk: Desk, restart: Restart) -> None:
        first, second = await desk.taken(make_task(1)), await desk.taken(make_task(2))
        for number, parent in ((3, 1), (4, 1), (5, 2)):
            await desk.send(part(number, of=parent))
        await desk.finish(first, ok(task_id(1)))
        for again in range(3):
            if again:
                await desk.ledger.compact()
            desk = await restart(desk)
        assert await desk.ledger.orphaned(WAIT_MS)
        assert sorted(await cancel_orphans(desk)) == [task_id(3), task_id(4)]
        assert await endings(desk, 5) == ["submitted"]
        await desk.cancel(second.task.id, by=ALICE)
        assert await cancel_orphans(desk) == [task_id(5)]
