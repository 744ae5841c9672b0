"""What an agent delegates is part of its own task: it begins under it, and ends with it, whatever happens between."""

from __future__ import annotations

from typing import Any

import pytest

from covenant.ledger.machine.commands import CancelOrphans
from covenant.model.ids import AgentId, TaskId
from covenant.model.task import DELEGATION, Ending, Task
from tests.ledger_contract.driver import WAIT_MS, LedgerDriver, check_generations, refused
from tests.ledger_contract.durability import Restart, RestartSuite
from tests.ledger_contract.samples import ALICE, BOB, CAROL, DAVE, failed, make_task, ok, task_id
from tests.ledger_contract.suite import Suite


def part(number: int, of: int, *, sender: AgentId = BOB, recipient: AgentId = CAROL, **fields: Any) -> Task:
    return make_task(
        number, sender=sender, recipient=recipient, origin=DELEGATION, parent=task_id(of), depth=1, **fields
    )


async def cancel_orphans(driver: LedgerDriver) -> list[TaskId]:
    """All of them, with what they orphan in turn."""
    ended: list[TaskId] = []
    while (orphaned := await driver.ledger.commit(CancelOrphans(count=2))).more:
        ended += orphaned.task_ids
    return ended


async def endings(driver: LedgerDriver, *numbers: int) -> list[str]:
    return [(await driver.show(task_id(number))).a2a_state for number in numbers]


class DelegationSuite(Suite):
    async def test_nothing_is_delegated_by_a_task_that_is_unknown_or_has_ended(self, driver: LedgerDriver) -> None:
        with refused("parent_ended", 409):
            await driver.send(part(2, of=1))
        await driver.finish(await driver.taken(make_task(1)), ok(task_id(1)))
        with refused("parent_ended", 409):
            await driver.send(part(2, of=1))

    async def test_what_was_delegated_before_is_found_again_although_its_parent_ended(
        self, driver: LedgerDriver
    ) -> None:
        leased = await driver.taken(make_task(1))
        await driver.send(part(2, of=1))
        await driver.finish(leased, ok(task_id(1)))
        assert (await driver.send(part(2, of=1))).duplicate

    @pytest.mark.parametrize("how", ["completed", "failed", "canceled", "forced", "timed out"])
    async def test_a_task_that_ends_takes_what_it_delegated_with_it(self, driver: LedgerDriver, how: str) -> None:
        leased = await driver.taken(make_task(1, timeout_ms=1_000))
        below = await driver.taken(part(2, of=1))
        await driver.send(part(3, of=1, recipient=DAVE))
        await driver.send(part(4, of=2, sender=CAROL, recipient=DAVE))
        await driver.finish(await driver.taken(part(5, of=1)), ok(task_id(5)))
        assert await cancel_orphans(driver) == []
        match how:
            case "completed":
                await driver.finish(leased, ok(task_id(1)))
            case "failed":
                await driver.finish(leased, failed(task_id(1)))
            case "canceled":
                await driver.cancel(task_id(1))
            case "forced":
                await driver.force_error(task_id(1))
            case _:
                driver.clock.advance(1_000)
                await driver.sweep()
        assert await driver.ledger.orphaned(WAIT_MS)
        assert await cancel_orphans(driver) == [task_id(2), task_id(3), task_id(4)]
        assert await endings(driver, 2, 3, 4, 5) == ["canceled", "canceled", "canceled", "completed"]
        assert "has ended" in str((await check_generations(driver, task_id(3))).result)
        with refused("canceled", 409):
            await driver.finish(below, ok(task_id(2)))
        assert await cancel_orphans(driver) == []
        assert not await driver.ledger.orphaned(0)

    async def test_a_parked_and_a_requeued_task_keep_what_they_delegated(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task(1))
        await driver.send(part(2, of=1))
        await driver.requeue(task_id(1))
        assert await cancel_orphans(driver) == []
        leased = await driver.take_one()
        await driver.park(leased)
        assert await cancel_orphans(driver) == []
        assert await endings(driver, 2) == ["submitted"]
        await driver.cancel(task_id(1))
        assert await cancel_orphans(driver) == [task_id(2)]

    async def test_what_was_sent_by_mail_outlives_the_task_it_names_as_its_parent(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task(1))
        await driver.send(make_task(2, sender=BOB, recipient=CAROL, parent=task_id(1)))
        await driver.finish(leased, ok(task_id(1)))
        assert await cancel_orphans(driver) == []
        assert await driver.queued_ids(CAROL) == [task_id(2)]

    async def test_nobody_comes_for_the_result_of_what_was_delegated(self, driver: LedgerDriver) -> None:
        await driver.taken(make_task(1))
        await driver.finish(await driver.taken(part(2, of=1)), ok(task_id(2)))
        assert await driver.drain(BOB) == ()
        shown = await driver.show(task_id(2))
        assert (shown.state, shown.a2a_state) == ("resolved", Ending.COMPLETED)


class DelegationDurabilitySuite(RestartSuite):
    async def test_orphans_are_found_after_a_restart_compacted_or_not(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        first, second = await driver.taken(make_task(1)), await driver.taken(make_task(2))
        for number, parent in ((3, 1), (4, 1), (5, 2)):
            await driver.send(part(number, of=parent))
        await driver.finish(first, ok(task_id(1)))
        for again in range(3):
            if again:
                await driver.ledger.compact()
            driver = await restart(driver)
        assert await driver.ledger.orphaned(WAIT_MS)
        assert sorted(await cancel_orphans(driver)) == [task_id(3), task_id(4)]
        assert await endings(driver, 5) == ["submitted"]
        await driver.cancel(second.task.id, by=ALICE)
        assert await cancel_orphans(driver) == [task_id(5)]
