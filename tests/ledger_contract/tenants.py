"""Tenants and their stored agents: added once, changed on record, each tenant's apart from every other's."""

from __future__ import annotations

import asyncio

from covenant.ledger.contract.identities import Register, RegisterChange
from covenant.ledger.machine.decisions.identities import PAUSES_MAX
from covenant.ledger.machine.identity_commands import (
    AddTenant,
    ChangeTenant,
    Enroll,
    PauseSchedule,
    PutAgent,
    RemoveAgent,
    RevokeIdentity,
    RotateTenant,
)
from covenant.model.agent_definition import CATCH_UP_S_MAX, Advisor, AgentDefinition, CatalogueAgent, Schedule, Skill
from covenant.model.settings import Limits
from covenant.model.tenants import Tenant, TenantLimits
from tests.ledger_contract.driver import LedgerDriver, refused
from tests.ledger_contract.durability import Restart, RestartSuite
from tests.ledger_contract.engine import Engine
from tests.ledger_contract.samples import OPERATOR, agent, make_identity
from tests.ledger_contract.suite import Suite

PREFIX = "atr_123456"
LIMITS = TenantLimits(concurrency=2, rate_per_min=60, burst=5)


async def add_tenant(driver: LedgerDriver, name: str, *, token: str | None = None) -> Tenant:
    sha256 = token if token is not None else f"hash of {name}'s token"
    tenant = Tenant(name=name, token_sha256=sha256, token_prefix=PREFIX, limits=LIMITS)
    return await driver.ledger.commit(AddTenant(by=OPERATOR, tenant=tenant))


async def rotate_tenant(driver: LedgerDriver, name: str, token: str) -> Tenant:
    return await driver.ledger.commit(RotateTenant(by=OPERATOR, name=name, token_sha256=token, token_prefix=token))


async def put_agent(
    driver: LedgerDriver,
    tenant: str,
    definition: AgentDefinition | str,
    *,
    replace: bool = False,
    expected: AgentDefinition | None = None,
) -> CatalogueAgent:
    made = AgentDefinition(id=definition) if isinstance(definition, str) else definition
    identity = agent(f"{made.id}@{tenant}")
    return await driver.ledger.commit(
        PutAgent(by=OPERATOR, tenant=tenant, definition=made, identity=identity, replace=replace, expected=expected)
    )


async def pause(
    driver: LedgerDriver, tenant: str = "acme", *, schedule_id: str = "hourly", paused: bool = True
) -> Tenant:
    return await driver.ledger.commit(
        PauseSchedule(by=OPERATOR, name=tenant, agent_id="writer", schedule_id=schedule_id, paused=paused)
    )


def paused(driver: LedgerDriver) -> set[str]:
    tenant = driver.ledger.tenant("acme")
    assert tenant is not None
    return set(tenant.schedule_pauses)


async def rows(driver: LedgerDriver) -> list[str]:
    """The types of the audit's rows, in order."""
    return [row["kind"]["type"] for row in await driver.audit_rows()]


class TenantSuite(Suite):
    async def test_whoever_listens_hears_of_every_change_to_a_register_once_it_is_durable(
        self, driver: LedgerDriver
    ) -> None:
        heard: list[RegisterChange] = []
        driver.ledger.on_registers(heard.append)
        first = make_identity(agent("carol@here"))
        await driver.ledger.commit(Enroll(by=OPERATOR, identity=first))
        await driver.ledger.commit(RevokeIdentity(by=OPERATOR, token_sha256=first.token_sha256))
        await add_tenant(driver, "acme")
        await rotate_tenant(driver, "acme", "another token")
        await put_agent(driver, "acme", "writer")
        await driver.ledger.commit(RemoveAgent(by=OPERATOR, tenant="acme", agent_id="writer"))
        await driver.note("nothing that is in a register")
        await asyncio.sleep(0)
        assert heard == [
            *[RegisterChange(Register.IDENTITIES, first.token_sha256)] * 2,
            *[RegisterChange(Register.TENANTS, "acme")] * 2,
            *[RegisterChange(Register.AGENTS, "acme")] * 2,
        ]

    async def test_a_tenant_is_found_by_name_and_by_token_and_its_making_is_on_record(
        self, driver: LedgerDriver
    ) -> None:
        acme = await add_tenant(driver, "acme")
        assert acme.created_at_ms == driver.clock()
        assert driver.ledger.tenant("acme") == driver.ledger.tenant_of(acme.token_sha256) == acme
        assert driver.ledger.tenant("other") is None
        assert driver.ledger.tenant_of("") is None
        (row,) = await driver.audit_rows()
        assert row["kind"] == {"type": "tenant_added", "tenant": "acme", "token_prefix": PREFIX}

    async def test_a_tenant_without_a_token_is_nobodys_to_speak_for(self, driver: LedgerDriver) -> None:
        await add_tenant(driver, "default", token="")
        assert driver.ledger.tenant("default") is not None
        assert driver.ledger.tenant_of("") is None

    async def test_a_name_is_given_once_also_to_two_at_a_time(self, driver: LedgerDriver) -> None:
        both = await asyncio.gather(*(add_tenant(driver, "acme", token=t) for t in "12"), return_exceptions=True)
        assert sum(isinstance(each, Tenant) for each in both) == 1
        with refused("tenant_exists", 409):
            await add_tenant(driver, "acme")
        assert [tenant.name for tenant in await driver.ledger.tenants()] == ["acme"]
        assert await rows(driver) == ["tenant_added"]

    async def test_tenants_are_listed_oldest_first(self, driver: LedgerDriver) -> None:
        for name in ("b", "c", "a"):
            await add_tenant(driver, name)
        await driver.ledger.commit(ChangeTenant(by=OPERATOR, name="b", disabled=True))
        assert [tenant.name for tenant in await driver.ledger.tenants()] == ["b", "c", "a"]

    async def test_disabling_and_enabling_are_on_record_and_repeating_them_is_not(self, driver: LedgerDriver) -> None:
        await add_tenant(driver, "acme")
        for disabled in (True, True, False, False):
            changed = await driver.ledger.commit(ChangeTenant(by=OPERATOR, name="acme", disabled=disabled))
            assert (changed.disabled_at_ms is not None) == disabled
            assert driver.ledger.tenant("acme") == changed
        assert await rows(driver) == ["tenant_added", "tenant_changed", "tenant_changed"]

    async def test_limits_change_and_leave_the_rest(self, driver: LedgerDriver) -> None:
        acme = await add_tenant(driver, "acme")
        changed = await driver.ledger.commit(ChangeTenant(by=OPERATOR, name="acme", limits=TenantLimits(burst=9)))
        assert changed.limits == TenantLimits(burst=9)
        assert changed.token_sha256 == acme.token_sha256

    async def test_a_new_token_ends_the_old_one_in_the_same_step(self, driver: LedgerDriver) -> None:
        acme = await add_tenant(driver, "acme")
        await rotate_tenant(driver, "acme", "new")
        assert driver.ledger.tenant_of(acme.token_sha256) is None
        assert driver.ledger.tenant_of("new") == driver.ledger.tenant("acme")
        kind = (await driver.audit_rows())[-1]["kind"]
        assert (kind["old_token_prefix"], kind["new_token_prefix"]) == (PREFIX, "new")

    async def test_a_tenant_that_is_not_there_is_unknown(self, driver: LedgerDriver) -> None:
        with refused("unknown_tenant", 404):
            await driver.ledger.commit(ChangeTenant(by=OPERATOR, name="acme", disabled=True))
        with refused("unknown_tenant", 404):
            await rotate_tenant(driver, "acme", "new")
        with refused("unknown_tenant", 404):
            await put_agent(driver, "acme", "writer")
        assert await rows(driver) == []

    async def test_an_agent_belongs_to_its_tenant_alone(self, driver: LedgerDriver) -> None:
        await add_tenant(driver, "acme")
        await add_tenant(driver, "other")
        stored = await put_agent(driver, "acme", AgentDefinition(id="writer", goal="write"))
        assert driver.ledger.agent("acme", "writer") == stored
        assert driver.ledger.agent("other", "writer") is None
        assert driver.ledger.agents("other") == ()
        await put_agent(driver, "other", "writer")
        with refused("unknown_agent", 404):
            await put_agent(driver, "other", "reader", replace=True)
        await driver.ledger.commit(RemoveAgent(by=OPERATOR, tenant="other", agent_id="writer"))
        assert driver.ledger.agent("acme", "writer") == stored

    async def test_a_replaced_agent_keeps_its_age_and_its_place(self, driver: LedgerDriver) -> None:
        await add_tenant(driver, "acme")
        first = await put_agent(driver, "acme", "writer")
        driver.clock.advance(1_000)
        await put_agent(driver, "acme", "reader")
        with refused("agent_exists", 409):
            await put_agent(driver, "acme", AgentDefinition(id="writer", goal="other"))
        replaced = await put_agent(driver, "acme", AgentDefinition(id="writer", goal="other"), replace=True)
        assert replaced.definition.goal == "other"
        assert replaced.created_at_ms == first.created_at_ms
        assert replaced.updated_at_ms == driver.clock()
        assert [each.id for each in driver.ledger.agents("acme")] == ["writer", "reader"]
        assert (await driver.audit_rows())[-1]["kind"] == {
            "type": "agent_stored",
            "tenant": "acme",
            "agent": "writer",
            "kind": "model",
            "replaced": True,
        }

    async def test_a_removed_agent_is_unknown_and_may_come_again(self, driver: LedgerDriver) -> None:
        await add_tenant(driver, "acme")
        await put_agent(driver, "acme", "writer")
        await driver.ledger.commit(RemoveAgent(by=OPERATOR, tenant="acme", agent_id="writer"))
        assert driver.ledger.agent("acme", "writer") is None
        with refused("unknown_agent", 404):
            await driver.ledger.commit(RemoveAgent(by=OPERATOR, tenant="acme", agent_id="writer"))
        await put_agent(driver, "acme", "writer")
        assert await rows(driver) == ["tenant_added", "agent_stored", "agent_removed", "agent_stored"]

    async def test_a_schedule_is_paused_and_resumed_once_each(self, driver: LedgerDriver) -> None:
        await add_tenant(driver, "acme")
        for paused in (False, True, True, False, False):
            await pause(driver, paused=paused)
            driver.clock.advance(1_000)
        tenant = driver.ledger.tenant("acme")
        assert tenant is not None
        (pause_of,) = tenant.schedule_pauses.values()
        assert pause_of.until_ms == pause_of.since_ms + 2_000
        assert await rows(driver) == ["tenant_added", "schedule_paused", "schedule_resumed"]
        with refused("unknown_tenant", 404):
            await pause(driver, "nobody")

    async def test_a_pause_is_forgotten_with_its_schedule_and_a_while_after_its_end(self, driver: LedgerDriver) -> None:
        await add_tenant(driver, "acme")
        made = AgentDefinition(id="writer", schedules=(Schedule(id="s", every_s=1), Schedule(id="t", every_s=1)))
        await put_agent(driver, "acme", made)
        for schedule_id in ("s", "t", "elsewhere"):
            await pause(driver, schedule_id=schedule_id)
        await put_agent(driver, "acme", AgentDefinition(id="writer", schedules=made.schedules[1:]), replace=True)
        assert paused(driver) == {"writer/t", "writer/elsewhere"}
        await driver.ledger.commit(RemoveAgent(by=OPERATOR, tenant="acme", agent_id="writer"))
        assert paused(driver) == {"writer/elsewhere"}
        await pause(driver, schedule_id="elsewhere", paused=False)
        driver.clock.advance(CATCH_UP_S_MAX * 1000)
        await pause(driver, schedule_id="s")
        assert paused(driver) == {"writer/s"}

    async def test_pauses_of_a_tenant_are_bounded(self, driver: LedgerDriver) -> None:
        await add_tenant(driver, "acme")
        for number in range(PAUSES_MAX):
            await pause(driver, schedule_id=str(number))
        with refused("too_many_pauses", 429):
            await pause(driver)
        await pause(driver, schedule_id="0")

    async def test_an_agent_that_somebody_else_has_changed_is_not_replaced(self, driver: LedgerDriver) -> None:
        await add_tenant(driver, "acme")
        await put_agent(driver, "acme", AgentDefinition(id="writer", goal="one"))
        with refused("agent_changed", 409):
            await put_agent(driver, "acme", "writer", replace=True, expected=AgentDefinition(id="writer", goal="two"))
        await put_agent(driver, "acme", "writer", replace=True, expected=AgentDefinition(id="writer", goal="one"))

    async def test_an_agent_takes_nobodys_name(self, driver: LedgerDriver) -> None:
        await add_tenant(driver, "acme")
        stranger = agent("a stranger's key")
        enrolled = make_identity(type(stranger)("writer@acme", stranger.pubkey))
        await driver.ledger.commit(Enroll(by=OPERATOR, identity=enrolled))
        with refused("display_taken", 409):
            await put_agent(driver, "acme", "writer")

    async def test_tenants_and_their_agents_are_bounded(self, engine: Engine) -> None:
        driver = LedgerDriver(await engine.open(Limits(tenants_max=1, agents_per_tenant_max=1)), engine.clock)
        await add_tenant(driver, "acme")
        with refused("too_many_tenants", 429):
            await add_tenant(driver, "other")
        await put_agent(driver, "acme", "writer")
        await put_agent(driver, "acme", "writer", replace=True)
        with refused("too_many_agents", 429):
            await put_agent(driver, "acme", "reader")


class TenantDurabilitySuite(RestartSuite):
    async def test_tenants_and_agents_survive_whole_and_in_order_compacted_or_not(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        for name in ("acme", "other"):
            await add_tenant(driver, name)
        await driver.ledger.commit(ChangeTenant(by=OPERATOR, name="other", disabled=True))
        await rotate_tenant(driver, "acme", "new")
        definition = AgentDefinition(
            id="writer",
            kind="process",
            command=("write", "--all"),
            advisor=Advisor(model="m", mode="gate"),
            skills=(Skill(id="write", tags=("text",)),),
            mcp_tool_permissions=(),
            timeout_ms=1_000,
        )
        await put_agent(driver, "acme", definition)
        await put_agent(driver, "acme", "reader")
        await put_agent(driver, "acme", "gone")
        await driver.ledger.commit(RemoveAgent(by=OPERATOR, tenant="acme", agent_id="gone"))
        await put_agent(driver, "acme", AgentDefinition(id="writer", goal="write"), replace=True)
        await put_agent(driver, "acme", definition, replace=True)
        await pause(driver, schedule_id="one")
        await pause(driver, schedule_id="one", paused=False)
        await pause(driver, schedule_id="two")
        tenants, agents = await driver.ledger.tenants(), driver.ledger.agents("acme")
        for again in range(3):
            if again:
                await driver.ledger.compact()
            driver = await restart(driver)
            assert await driver.ledger.tenants() == tenants
            assert driver.ledger.agents("acme") == agents
            assert driver.ledger.tenant_of("new") == driver.ledger.tenant("acme")
            assert driver.ledger.tenant_of("hash of acme's token") is None
            assert driver.ledger.agent("acme", "gone") is None
        assert [each.id for each in agents] == ["writer", "reader"]
        assert (await driver.ledger.audit_verify()).valid
