"""Whole instances for tests: agents at work, peers known by real keys, envelopes over real sockets on loopback.

An estate can be left and entered again: its folder, keys and port stay.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, cast
from uuid import uuid4

from covenant.agents.agent_loader import load_agent
from covenant.agents.api import Agent
from covenant.agents.peer_agent import PeerAgent
from covenant.agents.runtime.worker_pool import PoolRegister, WorkerPool
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.delegation import Delegations
from covenant.exchange.tasks.reader import TaskReader
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.embedded.open import open_ledger
from covenant.ledger.machine.commands import Accept, Cancel
from covenant.ledger.machine.identity_commands import AddTenant
from covenant.ledger.machine.peer_commands import AddPeer
from covenant.model.content import Content
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import PROOF, Delegation, DelegationRole, DelegationState, Peer
from covenant.model.peers.instance import Trust
from covenant.model.settings import DelegationSettings, Limits
from covenant.model.task import NATIVE, PEER_RECIPIENT, Target, Task, fingerprint
from covenant.model.task_event import StatusUpdate, Step
from covenant.model.task_view import TaskView
from covenant.model.tenants import DEFAULT, Tenant
from covenant.outbound.address_guard import AddressGuard
from covenant.peers.directory.instance_keys import InstanceKeys
from covenant.peers.peer_services import PeerServices
from covenant.peers.peer_settings import PeerContext, PeerSettings
from covenant.peers.transport.peer_client import PeerConnections
from tests.ledger_contract.samples import ALICE, OPERATOR
from tests.peers.transport_under_test import (
    DEPTH_MAX,
    Clock,
    InstanceUnderTest,
    Keys,
    delivering,
    listening,
    nobody,
    peer_context,
)
from tests.waits import BOUND_S

QUICK: Final = PeerSettings(
    retry_first_ms=10, retry_max_ms=50, poll_wait_ms=1_000, status_interval_ms=300, timeout_ms=200_000
)


class PeerUnderTest(PeerServices, InstanceUnderTest):
    """The services of a daemon's peers, a pool of its agents, and the ledger, folder, keys and port under them."""

    def __init__(self, name: str, clock: Clock, keys: Keys, context: PeerContext, register: PoolRegister) -> None:
        ledger = cast("EmbeddedLedger", context.ledger)
        catalogue = Catalogue(ledger, keys.private_key)

        def delegations(pool: WorkerPool) -> Delegations:
            limits = DelegationSettings(cooldown_ms=0, depth_max=DEPTH_MAX)
            return Delegations(ledger, catalogue, pool, limits, peers=self.callee)

        self.workers = WorkerPool(ledger, stop_s=0.2, delegations=delegations, register=register)
        super().__init__(context, catalogue, register.usage_of)
        self.name = name
        self.clock = clock
        self.keys = keys
        self.ledger = ledger
        self.keyring = context.keyring
        self.bells: list[asyncio.Event] = []

    def callee(self, tenant: str, named: str) -> Target | None:
        return self.requester.callee(tenant, named)

    async def knows(self, *others: "PeerUnderTest", trust: Trust = Trust.VERIFIED, **more: Any) -> None:
        for other in others:
            keys = other.keyring.bundle(self.clock())
            peer = Peer(id=other.id, name=other.name, url=other.url, trust=trust, keys=keys, **more)
            await self.ledger.commit(AddPeer(by=OPERATOR, peer=peer))

    async def delegate(
        self,
        to: "PeerUnderTest",
        text: str = "go",
        *,
        profile: str = "worker",
        parts: tuple[Content, ...] = (),
        **more: Any,
    ) -> TaskId:
        """As an operator does: a task whose target is named."""
        fields = {name: more.pop(name) for name in ("timeout_ms", "deadline_ms") if name in more}
        task = Task(
            id=TaskId(str(uuid4())),
            sender=ALICE,
            recipient=self.catalogue.identity(DEFAULT, PEER_RECIPIENT),
            intent_text=text,
            parts=parts,
            tenant=DEFAULT,
            origin=NATIVE,
            target=Target(peer=to.id, profile=profile, **more),
            **fields,
        )
        await self.ledger.commit(Accept(task=task, digest=fingerprint(task)[0]))
        return task.id

    async def ask(self, agent: str, text: str = "go") -> TaskId:
        """A task for an agent here."""
        task = Task(
            id=TaskId(str(uuid4())),
            sender=ALICE,
            recipient=self.catalogue.identity(DEFAULT, agent),
            intent_text=text,
            tenant=DEFAULT,
            origin=NATIVE,
        )
        await self.ledger.commit(Accept(task=task, digest=fingerprint(task)[0]))
        return task.id

    async def cancel(self, task_id: TaskId) -> None:
        await self.ledger.commit(Cancel(task_id=task_id, by=ALICE, reason="no longer wanted"))

    async def steps(self, task_id: TaskId) -> Sequence[Step]:
        return await self.ledger.steps(task_id, 0, 100_000)

    async def ended(self, task_id: TaskId) -> TaskView:
        return await self.seen(task_id, lambda view: view.state.terminal)

    async def seen(self, task_id: TaskId, met: Callable[[TaskView], bool]) -> TaskView:
        async with asyncio.timeout(BOUND_S):
            with self.ledger.watch(task_id) as watch:
                while True:
                    view = (await TaskReader(self.ledger).past(task_id)).view()
                    if view is not None and met(view):
                        return view
                    await watch.next(BOUND_S)

    async def delegation(self, task_id: TaskId) -> Delegation:
        found = await self.ledger.delegation_of(task_id)
        assert found is not None
        return found

    async def works(self) -> list[Delegation]:
        """What it does or did for others, the latest first."""
        return [each for each in await self.ledger.delegations() if each.role is DelegationRole.PROVIDER]

    async def stands(self, task_id: TaskId, *states: DelegationState) -> Delegation:
        await self.until_delegation(task_id, lambda found: found.state in states)
        return await self.delegation(task_id)

    async def until_works(self, holds: Callable[[list[Delegation]], Any]) -> None:
        async def look() -> Any:
            return holds(await self.works())

        await self.until(look)

    async def noted(self, task_id: TaskId, name: str) -> list[Any]:
        """What was said under this name in the metadata of the task's updates."""
        updates = [step.what for step in await self.steps(task_id) if isinstance(step.what, StatusUpdate)]
        return [update.metadata[name] for update in updates if update.metadata and name in update.metadata]

    async def evidence(self, task_id: TaskId) -> dict[str, Any]:
        (found,) = await self.noted(task_id, PROOF)
        return cast("dict[str, Any]", found)


def said(view: TaskView) -> str:
    assert view.message is not None, view.state
    return "".join(part.text for part in view.message.parts if hasattr(part, "text"))


@asynccontextmanager
async def peer_under_test(
    home: Path,
    *agents: Agent,
    keys: Keys | None = None,
    settings: PeerSettings = QUICK,
    clock: Clock | None = None,
    listens: bool = True,
    delivers: bool = True,
    works: bool = True,
    limits: Limits | None = None,
) -> AsyncIterator[PeerUnderTest]:
    """`works`: its agents do, those of its peers with them. Without, whatever is accepted stays in the queue."""
    keys, clock = keys or Keys(), clock or Clock()
    ledger = await open_ledger(home / "ledger", clock=clock, monotonic_ms=clock.monotonic_ms, limits=limits)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(ledger.close)
        if ledger.tenant(DEFAULT) is None:
            await ledger.commit(AddTenant(by=OPERATOR, tenant=Tenant(name=DEFAULT, created_at_ms=clock())))
        changes = (keys.change,) if keys.change is not None else ()
        keyring = InstanceKeys(keys.private_key, keys.prekeys, keys.save, changes=changes)
        keyring.rotate(clock())
        connections = PeerConnections(AddressGuard((), resolver=nobody))
        stack.push_async_callback(connections.close)
        register = PoolRegister()
        context = peer_context(ledger, keyring, connections, settings, register)
        made = PeerUnderTest(home.name, clock, keys, context, register)
        catalogue, workers = made.catalogue, made.workers
        stack.push_async_callback(made.directory.stop)
        stack.callback(made.inbox.close)
        for agent in agents:
            definition, body = load_agent(agent)
            catalogue.add_resident(DEFAULT, definition, "code")
            if works:
                workers.register(
                    catalogue.identity(DEFAULT, definition.id),
                    body,
                    concurrency=definition.concurrency,
                    idempotent=definition.idempotent,
                    on_lost=definition.on_lost,
                )
        if works:
            workers.register(
                catalogue.identity(DEFAULT, PEER_RECIPIENT),
                PeerAgent(made.requester),
                idempotent=True,
                on_lost="requeue",
                follows=True,
            )
        ledger.on_peer(made.ring)
        if listens:
            await stack.enter_async_context(listening(made))
        if delivers:
            await stack.enter_async_context(delivering(made))
        running = [asyncio.create_task(each) for each in (workers.run(), made.provider.run(), made.sweep.run())]
        await asyncio.sleep(0)
        try:
            yield made
        finally:
            await made.provider.stop()
            await made.sweep.stop()
            workers.stop()
            running[0].cancel()
            await asyncio.gather(*running, return_exceptions=True)


@asynccontextmanager
async def two_peers(
    home: Path, *agents: Agent, ours: PeerSettings = QUICK, theirs: PeerSettings = QUICK
) -> AsyncIterator[tuple[PeerUnderTest, PeerUnderTest]]:
    """Two that know each other; the second has the agents."""
    async with (
        peer_under_test(home / "rita", settings=ours) as rita,
        peer_under_test(home / "paul", *agents, settings=theirs) as paul,
    ):
        await rita.knows(paul)
        await paul.knows(rita)
        yield rita, paul


def worker(function: Callable[..., Any], name: str = "worker", **declared: Any) -> Agent:
    agent = Agent(name, **declared)
    agent(function)
    return agent


def changed(settings: PeerSettings = QUICK, **more: Any) -> PeerSettings:
    return dataclasses.replace(settings, **more)
