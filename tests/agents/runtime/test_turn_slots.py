"""A tenant's places: how many of its turns are worked on at once, whichever of its agents they are for."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from covenant.agents.agent_loader import load_agent
from covenant.agents.api import Agent, Turn
from covenant.agents.runtime.turn_limits import TenantSlots, TurnSlot
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.machine.identity_commands import AddTenant, ChangeTenant
from covenant.model.errors import OverLimit
from covenant.model.task_view import TaskState
from covenant.model.tenants import DEFAULT, Tenant, TenantLimits
from tests.agents.pool_under_test import told
from tests.agents.runtime.test_agent_calls import CallingAgents, open_agents
from tests.ledger_contract.samples import OPERATOR
from tests.waits import BOUND_S


@pytest.fixture
async def under_test(ledger: Ledger) -> AsyncIterator[CallingAgents]:
    async with open_agents(ledger) as opened:
        yield opened


async def limit(ledger: Ledger, concurrency: int, tenant: str = DEFAULT) -> None:
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


async def test_concurrency_bounds_the_turns_of_all_agents_together_and_the_rest_wait(
    under_test: CallingAgents,
) -> None:
    await limit(under_test.ledger, 2)
    gauge = Gauge()
    under_test.serve_named("a", gauge.work)
    under_test.serve_named("b", gauge.work)
    begun = [await under_test.begin("ab"[n % 2], str(n)) for n in range(12)]
    await gauge.reaches(2)
    assert under_test.workers.jobs == 2
    gauge.go.set()
    for n, task_id in enumerate(begun):
        assert told(await under_test.ended(task_id)) == f"did {n}"
    assert gauge.most == 2


async def test_a_tenant_with_one_place_can_delegate_at_any_depth(under_test: CallingAgents) -> None:
    await limit(under_test.ledger, 1)
    gauge = Gauge()
    gauge.go.set()

    async def middle(turn: Turn) -> str:
        first, second = await turn.call_all([("leaf", "1"), ("leaf", "2")])
        return f"{first.text} {second.text}"

    async def top(turn: Turn) -> str:
        return (await turn.call("middle", "go")).text

    under_test.serve_named("leaf", gauge.work)
    under_test.serve_named("middle", middle)
    under_test.serve_named("top", top)
    tops = [await under_test.begin("top", str(n)) for n in range(3)]
    for task_id in tops:
        assert told(await under_test.ended(task_id)) == "did 1 did 2"
    assert gauge.most == 1


async def test_a_turn_that_waited_for_others_goes_on_only_in_a_place(under_test: CallingAgents) -> None:
    await limit(under_test.ledger, 1)
    leaf, blocker, resumed = Gauge(), Gauge(), asyncio.Event()

    async def top(turn: Turn) -> str:
        answer = await turn.call("leaf", "go")
        resumed.set()
        return answer.text

    under_test.serve_named("leaf", leaf.work)
    under_test.serve_named("block", blocker.work)
    under_test.serve_named("top", top)
    parent = await under_test.begin("top", "x")
    await leaf.reaches(1)
    blocking = await under_test.begin("block", "y")
    leaf.go.set()
    await under_test.ended(await under_test.child(parent))
    await blocker.reaches(1)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not resumed.is_set()
    blocker.go.set()
    assert (await under_test.ended(blocking)).state is TaskState.COMPLETED
    assert (await under_test.ended(parent)).state is TaskState.COMPLETED
    assert resumed.is_set()


async def test_one_tenants_full_places_hold_up_nobody_else(under_test: CallingAgents) -> None:
    await under_test.ledger.commit(
        AddTenant(by=OPERATOR, tenant=Tenant(name="acme", limits=TenantLimits(concurrency=1)))
    )
    slow, quick = Gauge(), Gauge()
    quick.go.set()
    under_test.serve_named("quick", quick.work)
    identity = under_test.catalogue.identity("acme", "slow")
    agent = Agent("slow")
    agent(slow.work)
    under_test.workers.register(identity, load_agent(agent)[1])
    sent = [await under_test.begin("quick", str(n), recipient=identity, tenant="acme") for n in range(3)]
    await slow.reaches(1)
    assert (await under_test.done("quick")).state is TaskState.COMPLETED
    slow.go.set()
    for task_id in sent:
        await under_test.ended(task_id)
    assert slow.most == 1


async def test_a_raised_limit_is_noticed_by_those_who_wait(under_test: CallingAgents) -> None:
    await limit(under_test.ledger, 1)
    gauge = Gauge()
    under_test.serve_named("a", gauge.work)
    begun = [await under_test.begin("a", str(n)) for n in range(2)]
    await gauge.reaches(1)
    await limit(under_test.ledger, 2)
    await gauge.reaches(2)
    gauge.go.set()
    for task_id in begun:
        await under_test.ended(task_id)


async def test_a_turn_that_is_canceled_while_it_waits_for_its_place_keeps_none() -> None:
    places = TenantSlots(1, lambda: 1)
    assert places.try_acquire()
    turn, lent, goes_on = TurnSlot(places), asyncio.Event(), asyncio.Event()

    async def lends() -> None:
        async with turn.released():
            lent.set()
            await goes_on.wait()

    lending = asyncio.create_task(lends())
    await lent.wait()
    await places.acquire()
    goes_on.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (lending.done(), places.used, places.free) == (False, 1, 0)
    lending.cancel()
    await asyncio.wait((lending,))
    turn.end()
    assert places.used == 1
    places.release()
    assert (places.used, places.free) == (0, 1)


async def test_places_that_are_given_back_together_serve_as_many_waiters() -> None:
    places = TenantSlots(3, lambda: 1)
    assert places.try_acquire(3)
    waiting = [asyncio.create_task(places.acquire()) for _ in range(3)]
    await asyncio.sleep(0)
    places.release(2)
    assert places.used == 3
    await asyncio.wait_for(asyncio.gather(*waiting[:2]), BOUND_S)
    assert not waiting[2].done()
    places.release()
    await asyncio.wait_for(waiting[2], BOUND_S)
    assert (places.used, places.free) == (3, 0)


@pytest.mark.parametrize(
    ("limits", "code"),
    [(TenantLimits(live_tasks=1), "live_task_limit"), (TenantLimits(queued_bytes=3), "queued_bytes_limit")],
)
async def test_what_a_tenants_agents_delegate_counts_against_its_limits(
    under_test: CallingAgents, limits: TenantLimits, code: str
) -> None:
    async def top(turn: Turn) -> str:
        try:
            return (await turn.call("leaf", "go")).text
        except OverLimit as refusal:
            return refusal.code

    gauge = Gauge()
    gauge.go.set()
    under_test.serve_named("leaf", gauge.work)
    under_test.serve_named("top", top)
    await under_test.ledger.commit(ChangeTenant(by=OPERATOR, name=DEFAULT, limits=limits))
    assert told(await under_test.done("top", "go")) == code
    assert gauge.most == 0
