"""Erasing finished tasks: by tenant, age and size, in bounded batches. Live ones stay, and no id is used again."""

from __future__ import annotations

import secrets

import pytest

from covenant.ledger.contract.retention import Erased, EraseTasks
from covenant.ledger.contract.tasks import ListQuery
from covenant.model.errors import Refusal
from covenant.model.ids import TaskId
from tests.ledger_contract.driver import LedgerDriver, refused
from tests.ledger_contract.durability import Restart, RestartSuite
from tests.ledger_contract.samples import BOB, CAROL, make_task, ok, task_id
from tests.ledger_contract.suite import Suite
from tests.ledger_contract.tenants import add_tenant

LATER_MS = 60_000
LARGE_BYTES = 400_000


async def finish(driver: LedgerDriver, *numbers: int, tenant: str | None = None) -> None:
    for number in numbers:
        task = make_task(number, tenant=tenant, origin="a2a" if tenant else "mailbox", context_id=f"context-{number}")
        await driver.finish(await driver.taken(task), ok(task_id(number)))
        if tenant is None:
            await driver.drain()


async def erase(driver: LedgerDriver, tenant: str = "", *, before_ms: int | None = None, limit: int = 100) -> Erased:
    """Batch after batch, until there is nothing more."""
    moment = driver.clock.now_ms if before_ms is None else before_ms
    total = Erased(tasks=0, bytes=0, more=True)
    while total.more:
        which = EraseTasks(
            tenant=tenant, before_ms=moment, limit=limit, after_ms=total.after_ms, after_no=total.after_no
        )
        done = await driver.ledger.erase_tasks(which)
        total = Erased(
            tasks=total.tasks + done.tasks,
            bytes=total.bytes + done.bytes,
            after_ms=done.after_ms,
            after_no=done.after_no,
            more=done.more,
        )
    return total


async def known(driver: LedgerDriver, *numbers: int) -> list[int]:
    return [number for number in numbers if await driver.ledger.steps(task_id(number), 0, 10)]


class ErasureSuite(Suite):
    async def test_finished_tasks_that_are_old_enough_are_unknown_afterwards(self, driver: LedgerDriver) -> None:
        await finish(driver, 1, 2)
        driver.clock.advance(LATER_MS)
        before_ms = driver.clock.now_ms
        driver.clock.advance(1)
        await finish(driver, 3)
        erased = await erase(driver, before_ms=before_ms)
        assert erased.tasks == 2
        assert erased.bytes > 0
        assert await known(driver, 1, 2, 3) == [3]
        assert await driver.ledger.show(task_id(1), None, 10) is None
        assert await driver.ledger.parties(task_id(1)) is None

    async def test_a_task_that_has_not_ended_or_whose_result_waits_stays(self, driver: LedgerDriver) -> None:
        await driver.send(make_task(1))
        leased = await driver.taken(make_task(2, recipient=CAROL))
        await driver.finish(leased, ok(task_id(2)))
        driver.clock.advance(LATER_MS)
        assert (await erase(driver)).tasks == 0
        assert await known(driver, 1, 2) == [1, 2]
        assert [result.task_id for result in await driver.drain()] == [task_id(2)]

    async def test_each_tenant_has_its_own_tasks_erased_and_counted(self, driver: LedgerDriver) -> None:
        await add_tenant(driver, "acme")
        await finish(driver, 1, 2, tenant="acme")
        await finish(driver, 3)
        driver.clock.advance(LATER_MS)
        assert (await erase(driver, "acme")).tasks == 2
        assert await known(driver, 1, 2, 3) == [3]
        listing = await driver.ledger.listing(ListQuery(recipient=BOB.pubkey))
        assert (listing.total, listing.tasks) == (0, ())
        assert await driver.ledger.of_tenant("acme", 10) == ()

    async def test_a_batch_looks_at_a_bounded_number_and_says_where_to_go_on(self, driver: LedgerDriver) -> None:
        await finish(driver, *range(1, 8))
        driver.clock.advance(LATER_MS)
        first = await driver.ledger.erase_tasks(EraseTasks(tenant="", before_ms=driver.clock.now_ms, limit=3))
        assert (first.tasks, first.more) == (3, True)
        assert (await erase(driver, limit=3)).tasks == 4
        assert await known(driver, *range(1, 8)) == []

    async def test_the_oldest_go_while_a_tenants_tasks_take_more_than_they_may(self, driver: LedgerDriver) -> None:
        await add_tenant(driver, "acme")
        await finish(driver, *range(1, 8), tenant="acme")
        await finish(driver, 8)
        for _ in range(7):
            await driver.drain()
        which = EraseTasks(tenant="acme", before_ms=0, bytes_max=1, limit=3)
        first = await driver.ledger.erase_tasks(which)
        assert (first.tasks, first.more) == (3, True)
        one = first.bytes // 3
        room = EraseTasks(tenant="acme", before_ms=0, bytes_max=2 * one + one // 2)
        assert (await driver.ledger.erase_tasks(room)).tasks == 2
        assert await known(driver, *range(1, 9)) == [6, 7, 8]
        assert (await driver.ledger.erase_tasks(room)).tasks == 0
        aged = EraseTasks(tenant="acme", before_ms=driver.clock.now_ms + 1, bytes_max=100 * one)
        assert (await driver.ledger.erase_tasks(aged)).tasks == 2
        assert await known(driver, *range(1, 9)) == [8]

    async def test_large_tasks_count_and_go_like_others(self, driver: LedgerDriver) -> None:
        await add_tenant(driver, "acme")
        large = secrets.token_hex(LARGE_BYTES // 2)
        for number in (1, 2, 3):
            task = make_task(number, tenant="acme", origin="a2a", intent_text=large)
            await driver.finish(await driver.taken(task), ok(task_id(number)))
        assert await known(driver, 3)
        (size,) = await driver.ledger.tenant_sizes(["acme"])
        assert size.kept_bytes is not None
        assert size.kept_bytes > 3 * LARGE_BYTES // 2
        one = size.kept_bytes // 3
        which = EraseTasks(tenant="acme", before_ms=0, bytes_max=one + one // 2)
        assert (await driver.ledger.erase_tasks(which)).tasks == 2
        assert await known(driver, 1, 2, 3) == [3]
        (size,) = await driver.ledger.tenant_sizes(["acme"])
        assert size.kept_bytes == pytest.approx(one, rel=0.1)

    async def test_the_id_of_an_erased_task_is_not_used_again(self, driver: LedgerDriver) -> None:
        await finish(driver, 1)
        driver.clock.advance(LATER_MS)
        assert (await erase(driver)).tasks == 1
        with refused("duplicate_task_id", 409):
            await driver.send(make_task(1, context_id="context-1"))
        with refused("duplicate_task_id", 409):
            await driver.send(make_task(1, intent_text="something else"))
        assert await driver.queue() == ()

    async def test_a_command_for_an_erased_task_is_answered_as_for_an_unknown_one(self, driver: LedgerDriver) -> None:
        await finish(driver, 1)
        driver.clock.advance(LATER_MS)
        await erase(driver)
        codes: list[str] = []
        for which in (task_id(1), TaskId("00000000-0000-0000-0000-00000000ffff")):
            with pytest.raises(Refusal) as refusal:
                await driver.cancel(which)
            codes.append(refusal.value.code)
        assert codes[0] == codes[1]


class ErasureDurabilitySuite(RestartSuite):
    async def test_erased_tasks_stay_erased_and_their_ids_stay_taken(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        await finish(driver, 1, 2)
        driver.clock.advance(LATER_MS)
        await erase(driver)
        for _ in range(2):
            await driver.ledger.compact()
            driver = await restart(driver)
            assert await known(driver, 1, 2) == []
            with refused("duplicate_task_id", 409):
                await driver.send(make_task(2))
        await driver.finish(await driver.taken(make_task(3)), ok(task_id(3)))
