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
class House:
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
async def house() -> AsyncIterator[House]:
    clock = FakeClock()
    ledger = await memory_ledger(clock=clock)
    operator, token = operator_agent("operator@local", KEY), new_token()
    identity = Identity(
        agent=operator, token_sha256=token_hash(token), token_prefix=token[:6], registered_at_ms=clock(), operator=True
    )
    await ledger.commit(Enroll(by=operator, identity=identity))
    doorkeeper = IdentityAuth(ledger, operator)
    tenancy, catalogue = TenantAccess(ledger, operator, doorkeeper), Catalogue(ledger, KEY)
    registry = IdentityAdmin(ledger, doorkeeper, operator, KEY, lambda _: None, seat=catalogue.seat)
    await tenancy.open()
    await tenancy.open()
    yield House(ledger, clock, Principal(operator, True, identity.token_sha256), token, tenancy, catalogue, registry)
    await ledger.close()


async def test_the_first_tenant_is_there_once_and_the_operator_speaks_for_it(house: House) -> None:
    assert [tenant.name for tenant in await house.tenancy.list(house.principal)] == [DEFAULT]
    caller = house.caller(house.token)
    assert (caller.tenant.name, caller.operator, caller.name) == (DEFAULT, True, "operator@local")


async def test_a_tenant_speaks_for_itself_by_a_token_that_is_stored_nowhere(house: House) -> None:
    minted = await house.tenancy.add(house.principal, "acme")
    assert minted.token.startswith("atr_")
    assert len(bytes.fromhex(minted.token[4:])) == 32
    assert minted.token not in str(house.ledger.tenant("acme"))
    caller = house.caller(minted.token)
    assert (caller.tenant, caller.operator, caller.name) == (minted.tenant, False, "client@acme")


@pytest.mark.parametrize("token", ["", "atr_", "atr_" + "0" * 64, "x" * 10_000, "ü"])
async def test_no_other_token_speaks_for_anybody(house: House, token: str) -> None:
    assert house.tenancy.recognise(token) is None
    enrolled = await house.registry.enroll(house.principal, "bob@host")
    assert house.tenancy.recognise(enrolled.token) is None


async def test_every_failure_has_one_answer_and_its_row(house: House) -> None:
    minted = await house.tenancy.add(house.principal, "acme")
    await house.tenancy.disable(house.principal, "acme")
    for number, token in enumerate((None, "", "atr_wrong", minted.token)):
        with pytest.raises(Unauthenticated) as told:
            await house.tenancy.authenticate(token, transport="http", address=f"10.0.0.{number}")
        assert (told.value.code, told.value.message) == ("unauthenticated", "missing or invalid bearer token")
    rows = [record.row for record in await house.ledger.audit_recent(None, 100, None)]
    assert sum('"authentication_failed"' in row for row in rows) == 4


async def test_a_disabled_tenant_is_nobody_until_it_is_enabled(house: House) -> None:
    minted = await house.tenancy.add(house.principal, "acme")
    await house.tenancy.disable(house.principal, "acme")
    assert house.tenancy.recognise(minted.token) is None
    await house.tenancy.enable(house.principal, "acme")
    assert house.caller(minted.token).tenant.name == "acme"
    await house.tenancy.disable(house.principal, DEFAULT)
    assert house.tenancy.recognise(house.token) is None


async def test_disabling_ends_what_the_tenant_has_open_and_nothing_else(house: House) -> None:
    acme = await house.tenancy.add(house.principal, "acme")
    other = await house.tenancy.add(house.principal, "other")
    ended: list[str] = []
    with (
        house.tenancy.session(house.caller(acme.token), lambda: ended.append("acme 1")),
        house.tenancy.session(house.caller(acme.token), lambda: ended.append("acme 2")),
        house.tenancy.session(house.caller(other.token), lambda: ended.append("other")),
    ):
        await house.tenancy.change(house.principal, "acme", disabled=False)
        await asyncio.sleep(0)  # the ledger tells its listeners on the next turn of the loop
        assert ended == []
        await house.tenancy.disable(house.principal, "acme")
        await asyncio.sleep(0)
        assert sorted(ended) == ["acme 1", "acme 2"]
    await house.tenancy.disable(house.principal, "other")
    assert len(ended) == 2


async def test_a_new_token_ends_what_the_old_one_has_open(house: House) -> None:
    acme = await house.tenancy.add(house.principal, "acme")
    ended: list[str] = []
    with house.tenancy.session(house.caller(acme.token), lambda: ended.append("old")):
        rotated = await house.tenancy.rotate(house.principal, "acme")
        await asyncio.sleep(0)
        assert ended == ["old"]
    assert house.tenancy.recognise(acme.token) is None
    with house.tenancy.session(house.caller(rotated.token), lambda: ended.append("new")):
        assert ended == ["old"]


async def test_revoking_the_operators_token_ends_what_it_has_open_for_the_first_tenant(house: House) -> None:
    ended: list[str] = []
    with house.tenancy.session(house.caller(house.token), lambda: ended.append("operator")):
        await house.registry.revoke(house.principal, "operator@local", force=True)
        await asyncio.sleep(0)
        assert ended == ["operator"]


async def test_a_session_that_begins_too_late_ends_at_once(house: House) -> None:
    acme = await house.tenancy.add(house.principal, "acme")
    caller = house.caller(acme.token)
    await house.tenancy.disable(house.principal, "acme")
    ended: list[str] = []
    with house.tenancy.session(caller, lambda: ended.append("late")):
        assert ended == ["late"]


async def test_an_agents_identity_follows_from_its_name_and_the_daemons_key(house: House) -> None:
    identity = house.catalogue.identity("acme", "writer")
    assert identity.display == check_display("writer@acme")
    assert identity.pubkey == public_key(derived_key(KEY, "writer@acme"))
    assert identity == Catalogue(house.ledger, KEY).identity("acme", "writer")
    others = {
        house.catalogue.identity("acme", "reader"),
        house.catalogue.identity("other", "writer"),
        house.catalogue.client("acme"),
        Catalogue(house.ledger, new_private_key()).identity("acme", "writer"),
    }
    assert len({other.pubkey for other in others} - {identity.pubkey}) == 4
    longest = house.catalogue.identity("t" * 63, "a" * 64)
    assert check_display(longest.display)


async def test_a_worker_enrols_under_its_agents_name_and_key_and_may_answer_its_tenant(house: House) -> None:
    acme = await house.tenancy.add(house.principal, "acme")
    await house.catalogue.store(house.caller(acme.token), AgentDefinition(id="writer", kind="worker"))
    with refused("pubkey_given", 400):
        await house.registry.enroll(house.principal, "writer@acme", pubkey=house.principal.agent.pubkey)
    enrolled = await house.registry.enroll(house.principal, "writer@acme", actions=("a2a.send.bob@host",))
    assert enrolled.identity.agent == house.catalogue.identity("acme", "writer")
    assert [grant.action for grant in enrolled.granted] == ["a2a.send.bob@host", "a2a.respond.client@acme"]
    with refused("pubkey_taken", 409):
        await house.registry.enroll(house.principal, "writer@acme")


@pytest.mark.parametrize("agent_id", ["client", "index", "thinker"])
async def test_nobody_enrols_under_a_name_that_the_daemon_holds(house: House, agent_id: str) -> None:
    acme = await house.tenancy.add(house.principal, "acme")
    await house.catalogue.store(house.caller(acme.token), AgentDefinition(id="thinker", kind="model"))
    with refused("display_reserved", 409):
        await house.registry.enroll(house.principal, f"{agent_id}@acme")
    await house.registry.enroll(house.principal, f"{agent_id}@elsewhere")
    with refused("display_taken", 409) if agent_id != "thinker" else refused("tenant_exists", 409):
        await house.tenancy.add(house.principal, "elsewhere" if agent_id != "thinker" else "acme")


async def test_what_is_declared_comes_first_and_hides_what_is_stored(house: House) -> None:
    caller = house.caller(house.token)
    for number, agent_id in enumerate(("third", "fourth", "second")):
        house.clock.advance(number)
        await house.catalogue.store(caller, AgentDefinition(id=agent_id, goal="stored"))
    house.catalogue.add_resident(DEFAULT, AgentDefinition(id="z"), "file")
    house.catalogue.add_resident(DEFAULT, AgentDefinition(id="b"), "file")
    house.catalogue.add_resident(DEFAULT, AgentDefinition(id="second", goal="declared"), "code")
    listed = await house.catalogue.list(DEFAULT)
    assert [agent.id for agent in listed] == ["index", "second", "b", "z", "third", "fourth"]
    hidden = house.catalogue.agent(DEFAULT, "second")
    assert hidden is not None
    assert (hidden.definition.goal, hidden.source) == ("declared", "code")
    with refused("agent_immutable", 409):
        await house.catalogue.remove(caller, "second")
    with refused("agent_exists", 409):
        await house.catalogue.store(caller, AgentDefinition(id="z"))
    house.catalogue.remove_resident(DEFAULT, "second")
    shown = await house.catalogue.show(DEFAULT, "second")
    assert shown.definition.goal == "stored"


async def test_an_agent_that_cannot_be_declared_is_refused(house: House) -> None:
    with refused("unknown_tenant", 404):
        house.catalogue.add_resident("nobody", AgentDefinition(id="a"), "file")
    with refused("invalid_agent", 400):
        house.catalogue.add_resident(DEFAULT, AgentDefinition(id="client"), "code")
    with refused("invalid_agent", 400):
        house.catalogue.add_resident(DEFAULT, AgentDefinition(id="a", kind="function"), "file")
    await house.registry.enroll(house.principal, "a@default")
    with refused("display_taken", 409):
        house.catalogue.add_resident(DEFAULT, AgentDefinition(id="a"), "file")


async def test_a_declared_agent_is_only_changed_when_it_changes(house: House) -> None:
    first = house.catalogue.add_resident(DEFAULT, AgentDefinition(id="a"), "code")
    house.clock.advance(5)
    assert house.catalogue.add_resident(DEFAULT, AgentDefinition(id="a"), "code") == first
    changed = house.catalogue.add_resident(DEFAULT, AgentDefinition(id="a", goal="new"), "code")
    assert (changed.created_at_ms, changed.updated_at_ms) == (first.created_at_ms, first.updated_at_ms + 5)
