"""Tenants and their stored agents: added once, changed on record, each tenant's apart from every other's."""

from __future__ import annotations

import asyncio

from covenant.ledger.machine.commands import Enroll
from covenant.ledger.machine.tenant_commands import AddTenant, ChangeTenant, PutAgent, RemoveAgent, RotateTenant
from covenant.ledger.machine.view import Limits
from covenant.model.constitution import Advisor, CatalogueAgent, Constitution, Skill
from covenant.model.tenant import Tenant, TenantLimits
from covenant.testing.cast import OPERATOR, agent, make_identity
from covenant.testing.desk import Desk, refused
from covenant.testing.engine import Engine
from covenant.testing.suite import Suite
from covenant.testing.surviving import Restart, RestartSuite

PREFIX = "atr_123456"
LIMITS = TenantLimits(concurrency=2, rate_per_min=60, burst=5)


async def add_tenant(desk: Desk, name: str, *, token: str | None = None) -> Tenant:
    sha256 = token if token is not None else f"hash of {name}'s token"
    tenant = Tenant(name=name, token_sha256=sha256, token_prefix=PREFIX, limits=LIMITS)
    return await desk.ledger.commit(AddTenant(by=OPERATOR, tenant=tenant))


async def rotate_tenant(desk: Desk, name: str, token: str) -> Tenant:
    return await desk.ledger.commit(RotateTenant(by=OPERATOR, name=name, token_sha256=token, token_prefix=token))


async def put_agent(
    desk: Desk, tenant: str, constitution: Constitution | str, *, replace: bool = False
) -> CatalogueAgent:
    made = Constitution(id=constitution) if isinstance(constitution, str) else constitution
    identity = agent(f"{made.id}@{tenant}")
    return await desk.ledger.commit(
        PutAgent(by=OPERATOR, tenant=tenant, constitution=made, identity=identity, replace=replace)
    )


async def rows(desk: Desk) -> list[str]:
    """The types of the audit's rows, in order."""
    return [row["kind"]["type"] for row in await desk.audit_rows()]


class TenantingSuite(Suite):
    async def test_a_tenant_is_found_by_name_and_by_token_and_its_making_is_on_record(self, desk: Desk) -> None:
        acme = await add_tenant(desk, "acme")
        assert acme.created_at_ms == desk.clock()
        assert desk.ledger.tenant("acme") == desk.ledger.tenant_of(acme.token_sha256) == acme
        assert desk.ledger.tenant("other") is None
        assert desk.ledger.tenant_of("") is None
        (row,) = await desk.audit_rows()
        assert row["kind"] == {"type": "tenant_added", "tenant": "acme", "token_prefix": PREFIX}

    async def test_a_tenant_without_a_token_is_nobodys_to_speak_for(self, desk: Desk) -> None:
        await add_tenant(desk, "default", token="")
        assert desk.ledger.tenant("default") is not None
        assert desk.ledger.tenant_of("") is None

    async def test_a_name_is_given_once_also_to_two_at_a_time(self, desk: Desk) -> None:
        both = await asyncio.gather(*(add_tenant(desk, "acme", token=t) for t in "12"), return_exceptions=True)
        assert sum(isinstance(each, Tenant) for each in both) == 1
        with refused("tenant_exists", 409):
            await add_tenant(desk, "acme")
        assert [tenant.name for tenant in await desk.ledger.tenants()] == ["acme"]
        assert await rows(desk) == ["tenant_added"]

    async def test_tenants_are_listed_oldest_first(self, desk: Desk) -> None:
        for name in ("b", "c", "a"):
            await add_tenant(desk, name)
        await desk.ledger.commit(ChangeTenant(by=OPERATOR, name="b", disabled=True))
        assert [tenant.name for tenant in await desk.ledger.tenants()] == ["b", "c", "a"]

    async def test_disabling_and_enabling_are_on_record_and_repeating_them_is_not(self, desk: Desk) -> None:
        await add_tenant(desk, "acme")
        for disabled in (True, True, False, False):
            changed = await desk.ledger.commit(ChangeTenant(by=OPERATOR, name="acme", disabled=disabled))
            assert (changed.disabled_at_ms is not None) == disabled
            assert desk.ledger.tenant("acme") == changed
        assert await rows(desk) == ["tenant_added", "tenant_changed", "tenant_changed"]

    async def test_limits_change_and_leave_the_rest(self, desk: Desk) -> None:
        acme = await add_tenant(desk, "acme")
        changed = await desk.ledger.commit(ChangeTenant(by=OPERATOR, name="acme", limits=TenantLimits(burst=9)))
        assert changed.limits == TenantLimits(burst=9)
        assert changed.token_sha256 == acme.token_sha256

    async def test_a_new_token_ends_the_old_one_in_the_same_step(self, desk: Desk) -> None:
        acme = await add_tenant(desk, "acme")
        await rotate_tenant(desk, "acme", "new")
        assert desk.ledger.tenant_of(acme.token_sha256) is None
        assert desk.ledger.tenant_of("new") == desk.ledger.tenant("acme")
        kind = (await desk.audit_rows())[-1]["kind"]
        assert (kind["old_token_prefix"], kind["new_token_prefix"]) == (PREFIX, "new")

    async def test_a_tenant_that_is_not_there_is_unknown(self, desk: Desk) -> None:
        with refused("unknown_tenant", 404):
            await desk.ledger.commit(ChangeTenant(by=OPERATOR, name="acme", disabled=True))
        with refused("unknown_tenant", 404):
            await rotate_tenant(desk, "acme", "new")
        with refused("unknown_tenant", 404):
            await put_agent(desk, "acme", "writer")
        assert await rows(desk) == []

    async def test_an_agent_belongs_to_its_tenant_alone(self, desk: Desk) -> None:
        await add_tenant(desk, "acme")
        await add_tenant(desk, "other")
        stored = await put_agent(desk, "acme", Constitution(id="writer", goal="write"))
        assert desk.ledger.agent("acme", "writer") == stored
        assert desk.ledger.agent("other", "writer") is None
        assert desk.ledger.agents("other") == ()
        await put_agent(desk, "other", "writer")
        with refused("unknown_agent", 404):
            await put_agent(desk, "other", "reader", replace=True)
        await desk.ledger.commit(RemoveAgent(by=OPERATOR, tenant="other", agent_id="writer"))
        assert desk.ledger.agent("acme", "writer") == stored

    async def test_a_replaced_agent_keeps_its_age_and_its_place(self, desk: Desk) -> None:
        await add_tenant(desk, "acme")
        first = await put_agent(desk, "acme", "writer")
        desk.clock.advance(1_000)
        await put_agent(desk, "acme", "reader")
        with refused("agent_exists", 409):
            await put_agent(desk, "acme", Constitution(id="writer", goal="other"))
        replaced = await put_agent(desk, "acme", Constitution(id="writer", goal="other"), replace=True)
        assert replaced.constitution.goal == "other"
        assert replaced.created_at_ms == first.created_at_ms
        assert replaced.updated_at_ms == desk.clock()
        assert [each.id for each in desk.ledger.agents("acme")] == ["writer", "reader"]
        assert (await desk.audit_rows())[-1]["kind"] == {
            "type": "agent_stored",
            "tenant": "acme",
            "agent": "writer",
            "kind": "model",
            "replaced": True,
        }

    async def test_a_removed_agent_is_unknown_and_may_come_again(self, desk: Desk) -> None:
        await add_tenant(desk, "acme")
        await put_agent(desk, "acme", "writer")
        await desk.ledger.commit(RemoveAgent(by=OPERATOR, tenant="acme", agent_id="writer"))
        assert desk.ledger.agent("acme", "writer") is None
        with refused("unknown_agent", 404):
            await desk.ledger.commit(RemoveAgent(by=OPERATOR, tenant="acme", agent_id="writer"))
        await put_agent(desk, "acme", "writer")
        assert await rows(desk) == ["tenant_added", "agent_stored", "agent_removed", "agent_stored"]

    async def test_an_agent_takes_nobodys_name(self, desk: Desk) -> None:
        await add_tenant(desk, "acme")
        stranger = agent("a stranger's key")
        enrolled = make_identity(type(stranger)("writer@acme", stranger.pubkey))
        await desk.ledger.commit(Enroll(by=OPERATOR, identity=enrolled))
        with refused("display_taken", 409):
            await put_agent(desk, "acme", "writer")

    async def test_tenants_and_their_agents_are_bounded(self, engine: Engine) -> None:
        desk = Desk(await engine.open(Limits(tenants_max=1, agents_per_tenant_max=1)), engine.clock)
        await add_tenant(desk, "acme")
        with refused("too_many_tenants", 429):
            await add_tenant(desk, "other")
        await put_agent(desk, "acme", "writer")
        await put_agent(desk, "acme", "writer", replace=True)
        with refused("too_many_agents", 429):
            await put_agent(desk, "acme", "reader")


class TenantKeepingSuite(RestartSuite):
    async def test_tenants_and_agents_survive_whole_and_in_order_compacted_or_not(
        self, desk: Desk, restart: Restart
    ) -> None:
        for name in ("acme", "other"):
            await add_tenant(desk, name)
        await desk.ledger.commit(ChangeTenant(by=OPERATOR, name="other", disabled=True))
        await rotate_tenant(desk, "acme", "new")
        constitution = Constitution(
            id="writer",
            kind="process",
            command=("write", "--all"),
            advisor=Advisor(model="m", mode="gate"),
            skills=(Skill(id="write", tags=("text",)),),
            mcp_tool_permissions=(),
            timeout_ms=1_000,
        )
        await put_agent(desk, "acme", constitution)
        await put_agent(desk, "acme", "reader")
        await put_agent(desk, "acme", "gone")
        await desk.ledger.commit(RemoveAgent(by=OPERATOR, tenant="acme", agent_id="gone"))
        await put_agent(desk, "acme", Constitution(id="writer", goal="write"), replace=True)
        await put_agent(desk, "acme", constitution, replace=True)
        tenants, agents = await desk.ledger.tenants(), desk.ledger.agents("acme")
        for again in range(3):
            if again:
                await desk.ledger.compact()
            desk = await restart(desk)
            assert await desk.ledger.tenants() == tenants
            assert desk.ledger.agents("acme") == agents
            assert desk.ledger.tenant_of("new") == desk.ledger.tenant("acme")
            assert desk.ledger.tenant_of("hash of acme's token") is None
            assert desk.ledger.agent("acme", "gone") is None
        assert [each.id for each in agents] == ["writer", "reader"]
        assert (await desk.ledger.audit_verify()).valid
