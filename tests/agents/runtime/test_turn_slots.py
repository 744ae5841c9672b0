"""A tenant's places: how many of its turns are worked on at once, whichever of its agents they are for."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from covenant.agents.agent_loader import load_agent
from covenant.agents.api import Agent, Turn
from covenant.agents.runtime.turn_limits import TenantSlots, TurnSlot
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.machine.identity_commands import AddTenant, ChangeTenant
from covenant.model.errors import OverLimit
from covenant.model.task_view import TaskState
from covenant.model.tenants import DEFAULT, Tenant, TenantLimits
from tests.agents.runtime.test_agent_calls import House, a_house
from tests.agents.stage import told
from tests.ledger_contract.samples import OPERATOR

BOUND_S = 20.0


@pytest.fixture
async def house(ledger: EmbeddedLedger) -> AsyncIterator[House]:
    async with a_house(ledger) as opened:
        yield opened


async def limit(ledger: EmbeddedLedger, concurrency: int, tenant: str = DEFAULT) -> None:
    await ledger.commit(ChangeTenant(by=OPERATOR, name=tenant, limits=TenantLimits(concurrency=concurrency)))


class Gauge:
    """Counts who works at once, and holds them until told to go on."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.go = asyncio.Event()
        self.changed = asyncio.Event()

    async def work(self, turn: Turn) -> str:
        self.now += 1
        self.most = max(self.most, self.now)
        self.changed.set()
        try:
            await self.go.wait()
            await asyncio.sleep(0)
        finally:
            self.now -= 1
        return f"did {turn.text}"

    async def reaches(self, count: int) -> None:
        async with asyncio.timeout(BOUND_S):
            while self.now < count:
                self.changed.clear()
                await self.changed.wait()


async def test_concurrency_bounds_the_turns_of_all_agents_together_and_the_rest_wait(house: House) -> None:
    await limit(house.ledger, 2)
    gauge = Gauge()
    house.hire("a", gauge.work)
    house.hire("b", gauge.work)
    begun = [await house.begin("ab"[n % 2], str(n)) for n in range(12)]
    await gauge.reaches(2)
    assert house.workers.jobs == 2
    gauge.go.set()
    for n, task_id in enumerate(begun):
        assert told(await house.ended(task_id)) == f"did {n}"
    assert gauge.most == 2


async def test_a_tenant_with_one_place_can_delegate_at_any_depth(house: House) -> None:
    await limit(house.ledger, 1)
    gauge = Gauge()
    gauge.go.set()

    async def middle(turn: Turn) -> str:
        first, second = await turn.call_all([("leaf", "1"), ("leaf", "2")])
        return f"{first.text} {second.text}"

    async def top(turn: Turn) -> str:
        return (await turn.call("middle", "go")).text

    house.hire("leaf", gauge.work)
    house.hire("middle", middle)
    house.hire("top", top)
    tops = [await house.begin("top", str(n)) for n in range(3)]
    for task_id in tops:
        assert told(await house.ended(task_id)) == "did 1 did 2"
    assert gauge.most == 1


async def test_a_turn_that_waited_for_others_goes_on_only_in_a_place(house: House) -> None:
    await limit(house.ledger, 1)
    leaf, blocker, resumed = Gauge(), Gauge(), asyncio.Event()

    async def top(turn: Turn) -> str:
        answer = await turn.call("leaf", "go")
        resumed.set()
        return answer.text

    house.hire("leaf", leaf.work)
    house.hire("block", blocker.work)
    house.hire("top", top)
    parent = await house.begin("top", "x")
    await leaf.reaches(1)
    blocking = await house.begin("block", "y")
    leaf.go.set()
    await house.ended(await house.child(parent))
    await blocker.reaches(1)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not resumed.is_set()
    blocker.go.set()
    assert (await house.ended(blocking)).state is TaskState.COMPLETED
    assert (await house.ended(parent)).state is TaskState.COMPLETED
    assert resumed.is_set()


async def test_one_tenants_full_places_hold_up_nobody_else(house: House) -> None:
    await house.ledger.commit(AddTenant(by=OPERATOR, tenant=Tenant(name="acme", limits=TenantLimits(concurrency=1))))
    slow, quick = Gauge(), Gauge()
    quick.go.set()
    house.hire("quick", quick.work)
    identity = house.catalogue.identity("acme", "slow")
    agent = Agent("slow")
    agent(slow.work)
    house.workers.register(identity, load_agent(agent)[1])
    sent = [await house.begin("quick", str(n), recipient=identity, tenant="acme") for n in range(3)]
    await slow.reaches(1)
    assert (await house.done("quick")).state is TaskState.COMPLETED
    slow.go.set()
    for task_id in sent:
        await house.ended(task_id)
    assert slow.most == 1


async def test_a_raised_limit_is_noticed_by_those_who_wait(house: House) -> None:
    await limit(house.ledger, 1)
    gauge = Gauge()
    house.hire("a", gauge.work)
    begun = [await house.begin("a", str(n)) for n in range(2)]
    await gauge.reaches(1)
    await limit(house.ledger, 2)
    await gauge.reaches(2)
    gauge.go.set()
    for task_id in begun:
        await house.ended(task_id)


async def test_a_turn_that_is_canceled_while_it_waits_for_its_place_keeps_none() -> None:
    places = TenantSlots(lambda: 1)
    assert places.take()
    turn, lent, goes_on = TurnSlot(places), asyncio.Event(), asyncio.Event()

    async def lends() -> None:
        async with turn.lent():
            lent.set()
            await goes_on.wait()

    lending = asyncio.create_task(lends())
    await lent.wait()
    await places.wait()
    goes_on.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (lending.done(), places.used, places.free) == (False, 1, 0)
    lending.cancel()
    await asyncio.wait((lending,))
    turn.leave()
    assert places.used == 1
    places.give_back()
    assert (places.used, places.free) == (0, 1)


@pytest.mark.parametrize(
    ("limits", "code"),
    [(TenantLimits(live_tasks=1), "live_task_limit"), (TenantLimits(queued_bytes=3), "queued_bytes_limit")],
)
async def test_what_a_tenants_agents_delegate_counts_against_its_limits(
    house: House, limits: TenantLimits, code: str
) -> None:
    async def top(turn: Turn) -> str:
        try:
            return (await turn.call("leaf", "go")).text
        except OverLimit as refusal:
            return refusal.code

    gauge = Gauge()
    gauge.go.set()
    house.hire("leaf", gauge.work)
    house.hire("top", top)
    await house.ledger.commit(ChangeTenant(by=OPERATOR, name=DEFAULT, limits=limits))
    assert told(await house.done("top", "go")) == code
    assert gauge.most == 0
