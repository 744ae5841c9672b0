"""Removing a tenant: begun by one record, erased from registers, tasks and ids, and not found afterwards."""

from __future__ import annotations

from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.retention import EraseTasks
from covenant.ledger.machine.commands import Cancel
from covenant.ledger.machine.identity_commands import BeginTenantRemoval, Enroll, EraseTenant, FinishTenantRemoval
from covenant.model.grant import respond_actions
from covenant.model.ids import AgentId
from covenant.model.tenants import Tenant, TenantRemoval
from tests.ledger_contract.driver import LedgerDriver, refused
from tests.ledger_contract.durability import Restart, RestartSuite
from tests.ledger_contract.grants import give
from tests.ledger_contract.samples import (
    ALICE,
    OPERATOR,
    agent,
    idempotent,
    make_grant,
    make_identity,
    make_task,
    ok,
    task_id,
)
from tests.ledger_contract.suite import Suite
from tests.ledger_contract.tenants import add_tenant, put_agent

CLIENT, HELPER = agent("client@acme"), agent("helper@acme")
KEYS = (CLIENT.pubkey, HELPER.pubkey)
END_MS = 1 << 60


async def fill(driver: LedgerDriver, number: int, *, tenant: str = "acme", whose: AgentId = CLIENT) -> None:
    """A finished task whose result is cached, a stored agent, and a worker with a grant."""
    await add_tenant(driver, tenant)
    await put_agent(driver, tenant, "helper")
    to = HELPER if tenant == "acme" else agent(f"helper@{tenant}")
    await driver.ledger.commit(Enroll(by=OPERATOR, identity=make_identity(to, number=number)))
    await give(driver, make_grant(to, respond_actions(whose)[0]))
    task = make_task(number, sender=whose, recipient=to, tenant=tenant, origin="a2a")
    await driver.finish(await driver.taken(task), ok(task.id, f"secret of {tenant}"))
    request = make_task(number + 100, sender=ALICE, recipient=to, idempotency=idempotent(f"key of {tenant}"))
    await driver.finish(await driver.taken(request), ok(request.id))
    await driver.drain(request_id=f"of {tenant}")


async def begin(ledger: Ledger, *, cancel_live: bool = False) -> Tenant:
    return await ledger.commit(BeginTenantRemoval(by=OPERATOR, name="acme", reason="over", cancel_live=cancel_live))


async def erase(ledger: Ledger) -> None:
    removal = TenantRemoval(begun_at_ms=1, reason="over", tasks=2, digest="0" * 64, keys=KEYS)
    cached = tuple(await ledger.cached_keys(KEYS))
    await ledger.commit(EraseTenant(by=OPERATOR, name="acme", removal=removal, cached=cached))
    for tenant, parties in (("acme", ()), ("", KEYS)):
        await ledger.erase_tasks(EraseTasks(tenant=tenant, before_ms=END_MS, wholly=True, parties=parties))
    await ledger.scrub("acme", KEYS)


async def traces(ledger: Ledger, tenant: str = "acme", keys: tuple[str, ...] = KEYS) -> int:
    return sum(place.left for place in await ledger.search(tenant, keys))


class RemovalSuite(Suite):
    async def test_nothing_of_a_removed_tenant_is_found_and_all_of_another_one_is(self, driver: LedgerDriver) -> None:
        await fill(driver, 1)
        await fill(driver, 2, tenant="acme2", whose=agent("client@acme2"))
        other = (agent("client@acme2").pubkey, agent("helper@acme2").pubkey)
        before = await traces(driver.ledger, "acme2", other)
        assert await traces(driver.ledger) > 0
        await begin(driver.ledger)
        await erase(driver.ledger)
        assert [place for place in await driver.ledger.search("acme", KEYS) if place.left] == []
        await driver.ledger.commit(FinishTenantRemoval(by=OPERATOR, name="acme", places=1))
        assert driver.ledger.tenant("acme") is None
        assert driver.ledger.agents("acme") == ()
        assert driver.ledger.enrolled(HELPER) is None
        assert [each.subject.display for each in await driver.ledger.grants()] == ["helper@acme2"]
        assert await driver.ledger.cached_keys(KEYS) == ()
        assert 0 < await traces(driver.ledger, "acme2", other) <= before
        assert len(await driver.ledger.cached_keys(other)) == 1
        await driver.check_audit()

    async def test_the_ids_of_its_tasks_are_free_and_bring_nothing_back(self, driver: LedgerDriver) -> None:
        await fill(driver, 1)
        await begin(driver.ledger)
        await erase(driver.ledger)
        await driver.ledger.commit(FinishTenantRemoval(by=OPERATOR, name="acme", places=1))
        assert await driver.ledger.parties(task_id(1)) is None
        await add_tenant(driver, "acme")
        for again in (
            make_task(1, sender=CLIENT, recipient=HELPER, tenant="acme", origin="a2a"),
            make_task(101, sender=ALICE, recipient=HELPER, idempotency=idempotent("key of acme")),
        ):
            leased = await driver.taken(again)
            assert leased.task.id == again.id
            await driver.finish(leased, ok(again.id, "new"))
        assert len(await driver.ledger.cached_keys(KEYS)) == 1

    async def test_a_tenant_at_work_is_refused_and_one_being_removed_takes_nothing(self, driver: LedgerDriver) -> None:
        await fill(driver, 1)
        await driver.send(make_task(3, sender=CLIENT, recipient=HELPER, tenant="acme", origin="a2a"))
        with refused("tenant_at_work", 409):
            await begin(driver.ledger)
        tenant = await begin(driver.ledger, cancel_live=True)
        assert (tenant.token_sha256, tenant.removal is not None) == ("", True)
        assert driver.ledger.tenant_of("hash of acme's token") is None
        with refused("tenant_removing", 409):
            await driver.send(make_task(4, sender=CLIENT, recipient=HELPER, tenant="acme", origin="a2a"))
        with refused("tenant_removing", 409):
            await add_tenant(driver, "acme")
        with refused("tenant_removing", 409):
            await put_agent(driver, "acme", "another")
        with refused("tenant_at_work", 409):
            await erase(driver.ledger)
        await driver.ledger.commit(Cancel(task_id=task_id(3), by=OPERATOR, reason="over"))
        await erase(driver.ledger)

    async def test_what_was_not_begun_is_neither_erased_nor_finished(self, driver: LedgerDriver) -> None:
        await fill(driver, 1)
        with refused("not_being_removed", 409):
            await erase(driver.ledger)
        with refused("not_being_removed", 409):
            await driver.ledger.commit(FinishTenantRemoval(by=OPERATOR, name="acme", places=1))
        with refused("unknown_tenant", 404):
            await driver.ledger.commit(BeginTenantRemoval(by=OPERATOR, name="nobody", reason="over"))
        assert await traces(driver.ledger) > 0


class RemovalDurabilitySuite(RestartSuite):
    async def test_a_removal_goes_on_after_a_restart_at_each_of_its_records(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        await fill(driver, 1)
        begun = await begin(driver.ledger)
        driver = await restart(driver)
        assert driver.ledger.tenant("acme") == begun
        await erase(driver.ledger)
        driver = await restart(driver)
        assert await traces(driver.ledger) == 0
        kept = driver.ledger.tenant("acme")
        assert kept is not None
        assert kept.removal is not None
        assert kept.removal.keys == KEYS
        await driver.ledger.commit(FinishTenantRemoval(by=OPERATOR, name="acme", places=1))
        driver = await restart(driver)
        assert driver.ledger.tenant("acme") is None
        assert await driver.ledger.identities() == ()
        assert await traces(driver.ledger) == 0
        await driver.check_audit()
