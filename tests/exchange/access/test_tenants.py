"""Tenants over a ledger: who speaks for whom, and what ends when that changes."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from covenant.exchange.access.identities import IdentityAdmin, operator_agent
from covenant.exchange.access.principals import IdentityAuth, Principal
from covenant.exchange.access.tenants import Caller, TenantAccess
from covenant.exchange.catalogue import Catalogue
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.embedded.open import memory_ledger
from covenant.ledger.machine.identity_commands import Enroll
from covenant.model.agent_definition import AgentDefinition
from covenant.model.errors import Unauthenticated
from covenant.model.grant import Identity
from covenant.model.ids import check_display
from covenant.model.tenants import DEFAULT
from covenant.seal.keys import derived_key, new_private_key, new_token, public_key, token_hash
from tests.ledger_contract.driver import refused
from tests.ledger_contract.fake_clock import FakeClock

KEY = new_private_key()


@dataclass(frozen=True, slots=True)
class TenantsUnderTest:
    ledger: Ledger
    clock: FakeClock
    principal: Principal
    token: str
    tenancy: TenantAccess
    catalogue: Catalogue
    registry: IdentityAdmin

    def caller(self, token: str) -> Caller:
        found = self.tenancy.recognise(token)
        assert found is not None
        return found


@pytest.fixture
async def under_test() -> AsyncIterator[TenantsUnderTest]:
    clock = FakeClock()
    ledger = await memory_ledger(clock=clock)
    operator, token = operator_agent("operator@local", KEY), new_token()
    identity = Identity(
        agent=operator, token_sha256=token_hash(token), token_prefix=token[:6], registered_at_ms=clock(), operator=True
    )
    await ledger.commit(Enroll(by=operator, identity=identity))
    identity_auth = IdentityAuth(ledger, operator)
    tenancy, catalogue = TenantAccess(ledger, operator, identity_auth), Catalogue(ledger, KEY)
    registry = IdentityAdmin(ledger, identity_auth, operator, KEY, lambda _: None, reserved=catalogue.reserved_identity)
    await tenancy.open()
    await tenancy.open()
    yield TenantsUnderTest(
        ledger, clock, Principal(operator, True, identity.token_sha256), token, tenancy, catalogue, registry
    )
    await ledger.close()


async def test_the_first_tenant_is_there_once_and_the_operator_speaks_for_it(under_test: TenantsUnderTest) -> None:
    assert [tenant.name for tenant in await under_test.tenancy.list(under_test.principal)] == [DEFAULT]
    caller = under_test.caller(under_test.token)
    assert (caller.tenant.name, caller.operator, caller.name) == (DEFAULT, True, "operator@local")


async def test_a_tenant_speaks_for_itself_by_a_token_that_is_stored_nowhere(under_test: TenantsUnderTest) -> None:
    minted = await under_test.tenancy.add(under_test.principal, "acme")
    assert minted.token.startswith("atr_")
    assert len(bytes.fromhex(minted.token[4:])) == 32
    assert minted.token not in str(under_test.ledger.tenant("acme"))
    caller = under_test.caller(minted.token)
    assert (caller.tenant, caller.operator, caller.name) == (minted.tenant, False, "client@acme")


@pytest.mark.parametrize("token", ["", "atr_", "atr_" + "0" * 64, "x" * 10_000, "ü"])
async def test_no_other_token_speaks_for_anybody(under_test: TenantsUnderTest, token: str) -> None:
    assert under_test.tenancy.recognise(token) is None
    enrolled = await under_test.registry.enroll(under_test.principal, "bob@host")
    assert under_test.tenancy.recognise(enrolled.token) is None


async def test_every_failure_has_one_answer_and_its_row(under_test: TenantsUnderTest) -> None:
    minted = await under_test.tenancy.add(under_test.principal, "acme")
    await under_test.tenancy.change(under_test.principal, "acme", disabled=True)
    for number, token in enumerate((None, "", "atr_wrong", minted.token)):
        with pytest.raises(Unauthenticated) as told:
            await under_test.tenancy.authenticate(token, transport="http", address=f"10.0.0.{number}")
        assert told.value.code == "unauthenticated"
        assert told.value.message.startswith("missing or invalid bearer token; the operator's is in operator.token")
    rows = [record.row for record in await under_test.ledger.audit_recent(None, 100, None)]
    assert sum('"authentication_failed"' in row for row in rows) == 4


async def test_a_disabled_tenant_is_nobody_until_it_is_enabled(under_test: TenantsUnderTest) -> None:
    minted = await under_test.tenancy.add(under_test.principal, "acme")
    await under_test.tenancy.change(under_test.principal, "acme", disabled=True)
    assert under_test.tenancy.recognise(minted.token) is None
    await under_test.tenancy.change(under_test.principal, "acme", disabled=False)
    assert under_test.caller(minted.token).tenant.name == "acme"
    await under_test.tenancy.change(under_test.principal, DEFAULT, disabled=True)
    assert under_test.tenancy.recognise(under_test.token) is None


async def test_disabling_ends_what_the_tenant_has_open_and_nothing_else(under_test: TenantsUnderTest) -> None:
    acme = await under_test.tenancy.add(under_test.principal, "acme")
    other = await under_test.tenancy.add(under_test.principal, "other")
    ended: list[str] = []
    with (
        under_test.tenancy.session(under_test.caller(acme.token), lambda: ended.append("acme 1")),
        under_test.tenancy.session(under_test.caller(acme.token), lambda: ended.append("acme 2")),
        under_test.tenancy.session(under_test.caller(other.token), lambda: ended.append("other")),
    ):
        await under_test.tenancy.change(under_test.principal, "acme", disabled=False)
        await asyncio.sleep(0)  # the ledger tells its listeners on the next turn of the loop
        assert ended == []
        await under_test.tenancy.change(under_test.principal, "acme", disabled=True)
        await asyncio.sleep(0)
        assert sorted(ended) == ["acme 1", "acme 2"]
    await under_test.tenancy.change(under_test.principal, "other", disabled=True)
    assert len(ended) == 2


async def test_a_new_token_ends_what_the_old_one_has_open(under_test: TenantsUnderTest) -> None:
    acme = await under_test.tenancy.add(under_test.principal, "acme")
    ended: list[str] = []
    with under_test.tenancy.session(under_test.caller(acme.token), lambda: ended.append("old")):
        rotated = await under_test.tenancy.rotate(under_test.principal, "acme")
        await asyncio.sleep(0)
        assert ended == ["old"]
    assert under_test.tenancy.recognise(acme.token) is None
    with under_test.tenancy.session(under_test.caller(rotated.token), lambda: ended.append("new")):
        assert ended == ["old"]


async def test_revoking_the_operators_token_ends_what_it_has_open_for_the_first_tenant(
    under_test: TenantsUnderTest,
) -> None:
    ended: list[str] = []
    with under_test.tenancy.session(under_test.caller(under_test.token), lambda: ended.append("operator")):
        await under_test.registry.revoke(under_test.principal, "operator@local", force=True)
        await asyncio.sleep(0)
        assert ended == ["operator"]


async def test_a_session_that_begins_too_late_ends_at_once(under_test: TenantsUnderTest) -> None:
    acme = await under_test.tenancy.add(under_test.principal, "acme")
    caller = under_test.caller(acme.token)
    await under_test.tenancy.change(under_test.principal, "acme", disabled=True)
    ended: list[str] = []
    with under_test.tenancy.session(caller, lambda: ended.append("late")):
        assert ended == ["late"]


async def test_an_agents_identity_follows_from_its_name_and_the_daemons_key(under_test: TenantsUnderTest) -> None:
    identity = under_test.catalogue.identity("acme", "writer")
    assert identity.display == check_display("writer@acme")
    assert identity.pubkey == public_key(derived_key(KEY, "writer@acme"))
    assert identity == Catalogue(under_test.ledger, KEY).identity("acme", "writer")
    others = {
        under_test.catalogue.identity("acme", "reader"),
        under_test.catalogue.identity("other", "writer"),
        under_test.catalogue.client("acme"),
        Catalogue(under_test.ledger, new_private_key()).identity("acme", "writer"),
    }
    assert len({other.pubkey for other in others} - {identity.pubkey}) == 4
    longest = under_test.catalogue.identity("t" * 63, "a" * 64)
    assert check_display(longest.display)


async def test_a_worker_enrols_under_its_agents_name_and_key_and_may_answer_its_tenant(
    under_test: TenantsUnderTest,
) -> None:
    acme = await under_test.tenancy.add(under_test.principal, "acme")
    await under_test.catalogue.store(under_test.caller(acme.token), AgentDefinition(id="writer", kind="worker"))
    with refused("pubkey_given", 400):
        await under_test.registry.enroll(under_test.principal, "writer@acme", pubkey=under_test.principal.agent.pubkey)
    enrolled = await under_test.registry.enroll(under_test.principal, "writer@acme", actions=("a2a.send.bob@host",))
    assert enrolled.identity.agent == under_test.catalogue.identity("acme", "writer")
    assert [grant.action for grant in enrolled.granted] == ["a2a.send.bob@host", "a2a.respond.client@acme"]
    with refused("pubkey_taken", 409):
        await under_test.registry.enroll(under_test.principal, "writer@acme")


@pytest.mark.parametrize("agent_id", ["client", "index", "thinker"])
async def test_nobody_enrols_under_a_name_that_the_daemon_holds(under_test: TenantsUnderTest, agent_id: str) -> None:
    acme = await under_test.tenancy.add(under_test.principal, "acme")
    await under_test.catalogue.store(under_test.caller(acme.token), AgentDefinition(id="thinker", kind="model"))
    with refused("display_reserved", 409):
        await under_test.registry.enroll(under_test.principal, f"{agent_id}@acme")
    await under_test.registry.enroll(under_test.principal, f"{agent_id}@elsewhere")
    with refused("display_taken", 409) if agent_id != "thinker" else refused("tenant_exists", 409):
        await under_test.tenancy.add(under_test.principal, "elsewhere" if agent_id != "thinker" else "acme")


async def test_what_is_declared_comes_first_and_hides_what_is_stored(under_test: TenantsUnderTest) -> None:
    caller = under_test.caller(under_test.token)
    for number, agent_id in enumerate(("third", "fourth", "second")):
        under_test.clock.advance(number)
        await under_test.catalogue.store(caller, AgentDefinition(id=agent_id, goal="stored"))
    under_test.catalogue.add_resident(DEFAULT, AgentDefinition(id="z"), "file")
    under_test.catalogue.add_resident(DEFAULT, AgentDefinition(id="b"), "file")
    under_test.catalogue.add_resident(DEFAULT, AgentDefinition(id="second", goal="declared"), "code")
    listed = await under_test.catalogue.list(DEFAULT)
    assert [agent.id for agent in listed] == ["index", "second", "b", "z", "third", "fourth"]
    hidden = under_test.catalogue.agent(DEFAULT, "second")
    assert hidden is not None
    assert (hidden.definition.goal, hidden.source) == ("declared", "code")
    with refused("agent_immutable", 409):
        await under_test.catalogue.remove(caller, "second")
    with refused("agent_exists", 409):
        await under_test.catalogue.store(caller, AgentDefinition(id="z"))
    under_test.catalogue.remove_resident(DEFAULT, "second")
    shown = await under_test.catalogue.show(DEFAULT, "second")
    assert shown.definition.goal == "stored"


async def test_an_agent_that_cannot_be_declared_is_refused(under_test: TenantsUnderTest) -> None:
    with refused("unknown_tenant", 404):
        under_test.catalogue.add_resident("nobody", AgentDefinition(id="a"), "file")
    with refused("invalid_agent", 400):
        under_test.catalogue.add_resident(DEFAULT, AgentDefinition(id="client"), "code")
    with refused("invalid_agent", 400):
        under_test.catalogue.add_resident(DEFAULT, AgentDefinition(id="a", kind="function"), "file")
    await under_test.registry.enroll(under_test.principal, "a@default")
    with refused("display_taken", 409):
        under_test.catalogue.add_resident(DEFAULT, AgentDefinition(id="a"), "file")


async def test_a_declared_agent_is_only_changed_when_it_changes(under_test: TenantsUnderTest) -> None:
    first = under_test.catalogue.add_resident(DEFAULT, AgentDefinition(id="a"), "code")
    under_test.clock.advance(5)
    assert under_test.catalogue.add_resident(DEFAULT, AgentDefinition(id="a"), "code") == first
    changed = under_test.catalogue.add_resident(DEFAULT, AgentDefinition(id="a", goal="new"), "code")
    assert (changed.created_at_ms, changed.updated_at_ms) == (first.created_at_ms, first.updated_at_ms + 5)
