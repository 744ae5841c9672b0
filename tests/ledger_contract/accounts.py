"""Limits of an account: how many tasks that have not ended, and how many bytes in them, whoever races and restarts."""

from __future__ import annotations

import asyncio

from covenant.ledger.contract.retention import EraseTasks
from covenant.ledger.machine.identity_commands import AddTenant, ChangeTenant
from covenant.model.errors import Refusal
from covenant.model.settings import Limits
from covenant.model.task import Task
from covenant.model.tenants import Tenant, TenantLimits
from tests.ledger_contract.driver import LedgerDriver, refused
from tests.ledger_contract.durability import Restart, RestartSuite
from tests.ledger_contract.engine import Engine
from tests.ledger_contract.samples import ALICE, CAROL, OPERATOR, make_task, ok, same_work, task_id
from tests.ledger_contract.suite import Suite

KIB = 1024


def task_of(number: int, *, size: int = 10, tenant: str = "acme") -> Task:
    """A task of a tenant, with a body of so many bytes."""
    return make_task(number, intent_text="x" * size, tenant=tenant, origin="a2a")


async def add(driver: LedgerDriver, name: str, **limits: int) -> None:
    await driver.ledger.commit(AddTenant(by=OPERATOR, tenant=Tenant(name=name, limits=TenantLimits(**limits))))


class AccountSuite(Suite):
    async def test_a_tenant_has_as_many_live_tasks_as_it_may_and_no_more(self, driver: LedgerDriver) -> None:
        await add(driver, "acme", live_tasks=2)
        await driver.send_all([task_of(1), task_of(2)])
        with refused("live_task_limit", 429):
            await driver.send(task_of(3))
        assert await driver.ledger.entry(task_id(3)) is None
        leased = await driver.take_one()
        with refused("live_task_limit", 429):
            await driver.send(task_of(3))
        await driver.finish(leased, ok(leased.task.id))
        await driver.send(task_of(3))

    async def test_a_tenants_tasks_have_as_many_bytes_as_they_may_and_no_more(self, driver: LedgerDriver) -> None:
        await add(driver, "acme", queued_bytes=1_000)
        await driver.send(task_of(1, size=600))
        with refused("queued_bytes_limit", 429):
            await driver.send(task_of(2, size=401))
        await driver.send(task_of(2, size=400))
        await driver.cancel(task_id(1))
        await driver.send(task_of(3, size=600))

    async def test_what_each_tenant_holds_is_told_as_its_limits_count_it(self, driver: LedgerDriver) -> None:
        await add(driver, "acme")
        await add(driver, "other")
        await driver.send(task_of(1, size=600))
        await driver.send(task_of(2, size=50))
        await driver.send(task_of(3, tenant="other"))
        acme, other, nobody = await driver.ledger.tenant_sizes(["acme", "other", "nobody"])
        assert (acme.live_tasks, acme.queued_bytes, acme.kept_bytes) == (2, 650, 0)
        assert (other.live_tasks, other.queued_bytes) == (1, 10)
        assert (nobody.live_tasks, nobody.queued_bytes, nobody.kept_bytes) == (0, 0, 0)
        leased = await driver.take_one()
        await driver.finish(leased, ok(leased.task.id))
        await driver.drain()
        (acme,) = await driver.ledger.tenant_sizes(["acme"])
        assert (acme.live_tasks, acme.queued_bytes) == (1, 50)
        assert acme.kept_bytes
        await driver.ledger.erase_tasks(EraseTasks(tenant="acme", before_ms=0, bytes_max=1))
        assert [each.kept_bytes for each in await driver.ledger.tenant_sizes(["acme", "other"])] == [0, 0]

    async def test_one_tenants_limits_are_not_anothers(self, driver: LedgerDriver) -> None:
        await add(driver, "acme", live_tasks=1, queued_bytes=100)
        await add(driver, "other")
        await driver.send(task_of(1))
        with refused("live_task_limit", 429):
            await driver.send(task_of(2))
        await driver.send(task_of(3, size=1_000, tenant="other"))
        await driver.send(make_task(4))

    async def test_of_many_who_send_at_once_no_more_get_in_than_may(self, driver: LedgerDriver) -> None:
        await add(driver, "acme", live_tasks=5, queued_bytes=100_000)
        sent = await asyncio.gather(*(driver.send(task_of(n)) for n in range(1, 21)), return_exceptions=True)
        refusals = [each.code for each in sent if isinstance(each, Refusal)]
        assert refusals == ["live_task_limit"] * 15
        assert len(await driver.queued_ids()) == 5

    async def test_a_task_sent_again_is_acknowledged_though_its_tenant_is_at_its_limit(
        self, driver: LedgerDriver
    ) -> None:
        await add(driver, "acme", live_tasks=1)
        await driver.send(task_of(1))
        assert (await driver.send(task_of(1))).duplicate

    async def test_a_changed_limit_counts_from_the_next_task_on(self, driver: LedgerDriver) -> None:
        await add(driver, "acme", live_tasks=1)
        await driver.send(task_of(1))
        await driver.ledger.commit(ChangeTenant(by=OPERATOR, name="acme", limits=TenantLimits(live_tasks=2)))
        await driver.send(task_of(2))
        with refused("live_task_limit", 429):
            await driver.send(task_of(3))

    async def test_messages_that_wait_for_a_task_count_and_are_gone_when_it_has_ended(
        self, driver: LedgerDriver
    ) -> None:
        await add(driver, "acme", queued_bytes=2_000)
        leased = await driver.taken(task_of(1))
        await driver.say(task_id(1), "y" * 1_500)
        with refused("queued_bytes_limit", 429):
            await driver.say(task_id(1), "z" * 500)
        with refused("queued_bytes_limit", 429):
            await driver.send(task_of(2, size=500))
        await driver.finish(leased, ok(task_id(1)))  # ends the turn: the message is what the next one is about
        with refused("queued_bytes_limit", 429):
            await driver.send(task_of(2, size=500))
        await driver.finish(await driver.take_one(), ok(task_id(1)))
        await driver.send(task_of(2, size=1_900))

    async def test_tasks_that_follow_count_and_replays_do_not(self, driver: LedgerDriver) -> None:
        await add(driver, "acme", live_tasks=2)
        await driver.send(same_work(1, tenant="acme"))
        assert (await driver.send(same_work(2, tenant="acme"))).following == task_id(1)
        with refused("live_task_limit", 429):
            await driver.send(same_work(3, tenant="acme"))
        await driver.finish(await driver.take_one(), ok(task_id(1)))
        await driver.send_all([task_of(4), task_of(5)])
        assert (await driver.send(same_work(3, tenant="acme"))).replayed

    async def test_a_sender_without_a_tenant_has_the_ledgers_own_limits(self, engine: Engine) -> None:
        driver = LedgerDriver(await engine.open(Limits(live_tasks_max=2, queued_bytes_max=10 * KIB)), engine.clock)
        with refused("queued_bytes_limit", 429):
            await driver.send(make_task(1, intent_text="x" * 10 * KIB + "y"))
        await driver.send_all([make_task(1), make_task(2)])
        with refused("live_task_limit", 429):
            await driver.send(make_task(3))
        await driver.send(make_task(4, sender=CAROL, recipient=ALICE))

    async def test_a_sender_that_does_not_come_for_its_results_sends_no_more_than_they_are_large(
        self, engine: Engine
    ) -> None:
        driver = LedgerDriver(await engine.open(Limits(undrained_bytes_per_sender_max=1_000)), engine.clock)
        for number, text in ((1, "x" * 900), (2, "y" * 100)):
            await driver.finish(await driver.taken(make_task(number)), ok(task_id(number), text))
        with refused("results_undrained", 429):
            await driver.send(make_task(3))
        await driver.send(make_task(4, sender=CAROL, recipient=ALICE))
        assert [result.task_id for result in await driver.drain()] == [task_id(1)]
        await driver.send(make_task(3))

    async def test_results_kept_for_replay_are_bounded_in_size_and_the_oldest_go_first(self, engine: Engine) -> None:
        driver = LedgerDriver(await engine.open(Limits(cache_bytes_max=2_000)), engine.clock)
        for number in (1, 2, 3):
            await driver.finish(await driver.taken(same_work(number, f"key-{number}")), ok(task_id(number), "x" * 900))
        assert (await driver.sweep()).uncached == 1
        assert [(await driver.send(same_work(number + 10, f"key-{number}"))).replayed for number in (1, 2, 3)] == [
            False,
            True,
            True,
        ]

    async def test_without_a_number_there_is_no_limit(self, engine: Engine) -> None:
        driver = LedgerDriver(await engine.open(Limits(live_tasks_max=0, queued_bytes_max=0)), engine.clock)
        await driver.send_all([make_task(number, intent_text="x" * KIB) for number in range(1, 4)])


class AccountDurabilitySuite(RestartSuite):
    async def test_what_an_account_has_is_the_same_after_a_restart_and_a_compaction(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        await add(driver, "acme", live_tasks=4, queued_bytes=4_000)
        await driver.finish(await driver.taken(task_of(1, size=900)), ok(task_id(1)))
        await driver.send_all([task_of(2, size=1_000), task_of(3, size=1_000)])
        await driver.park(await driver.take_one())
        await driver.say(task_id(2), "y" * 900)
        for compacts in (False, True, False):
            if compacts:
                await driver.ledger.compact()
            driver = await restart(driver)
            with refused("queued_bytes_limit", 429):
                await driver.send(task_of(4, size=1_100))
        await driver.send_all([task_of(4, size=500), task_of(5, size=1)])
        with refused("live_task_limit", 429):
            await driver.send(task_of(6, size=1))
