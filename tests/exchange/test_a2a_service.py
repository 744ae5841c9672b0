"""Callers that leave, and disks that fail under those who wait."""

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from covenant.agents.api import Agent, Turn
from covenant.agents.function_agent import FunctionAgent
from covenant.agents.runtime.worker_pool import WorkerPool
from covenant.daemon.environment import now_ms
from covenant.exchange.a2a_service import A2AExchange, A2ARequest
from covenant.exchange.access.identities import operator_agent
from covenant.exchange.access.principals import IdentityAuth
from covenant.exchange.access.tenants import Caller, TenantAccess
from covenant.exchange.catalogue import Catalogue
from covenant.ledger.clock import uuid_source
from covenant.ledger.contract.ledger import Ledger
from covenant.model.a2a_requests import ListTasks, Message, SendMessage
from covenant.model.agent_definition import AgentDefinition
from covenant.model.content import Text
from covenant.model.settings import A2aSettings
from covenant.model.task_view import TaskState
from covenant.model.tenants import DEFAULT
from covenant.seal.keys import new_private_key
from tests.engine_under_test import open_ledger
from tests.ledger_contract import fault_plans
from tests.waits import BOUND_S

TURNS = 12


class Place(NamedTuple):
    ledger: Ledger
    conversations: A2AExchange
    ask: A2ARequest


@asynccontextmanager
async def place(home: Path, agent: Agent) -> AsyncIterator[Place]:
    """Where a client can talk to one agent."""
    ledger, key = await open_ledger(home, clock=now_ms), new_private_key()
    operator = operator_agent("operator@test", key)
    tenancy, catalogue = TenantAccess(ledger, operator, IdentityAuth(ledger, operator)), Catalogue(ledger, key)
    await tenancy.open()
    workers = WorkerPool(ledger)
    entry = catalogue.add_resident(DEFAULT, AgentDefinition(id=agent.name, kind="function"), "code")
    workers.register(catalogue.identity(DEFAULT, agent.name), FunctionAgent(agent))
    tenant = tenancy.tenant(DEFAULT)
    assert tenant is not None
    ask = A2ARequest(caller=Caller(tenant, "token", operator=False, name="client@default"), agent=entry)
    working = asyncio.ensure_future(workers.run())
    try:
        yield Place(ledger, A2AExchange(ledger, catalogue, workers, uuid_source(), A2aSettings()), ask)
    finally:
        workers.stop()
        working.cancel()
        await asyncio.wait((working,))
        await ledger.close()


def said(text: str) -> SendMessage:
    return SendMessage(message=Message(message_id="m", parts=(Text(text),)))


async def test_a_task_whose_caller_left_while_it_was_being_accepted_is_started_all_the_same(tmp_path: Path) -> None:
    agent = Agent("echo")

    @agent
    async def echo(turn: Turn) -> str:
        return turn.text

    async with place(tmp_path, agent) as (ledger, conversations, ask):
        # One caller leaves after one turn of the loop, the next after two, …: some of them while the disk has it.
        for turns in range(TURNS):
            sending = asyncio.ensure_future(conversations.send(ask, said("hello")))
            for _ in range(turns):
                await asyncio.sleep(0)
            sending.cancel()
            await asyncio.wait((sending,))
        async with asyncio.timeout(BOUND_S):
            while True:
                counts = await ledger.counts()
                if counts.leased == counts.queued == 0:
                    break
                await asyncio.sleep(0)
        page = await conversations.list_tasks(ask, ListTasks())
        assert {view.state for view in page.tasks} == {TaskState.COMPLETED}
        assert page.total_size >= TURNS - 1, "all but those who left before they had said anything"


async def test_a_blocked_caller_hears_at_once_that_nothing_more_can_be_written(tmp_path: Path) -> None:
    agent, begun, go_on = Agent("slow"), asyncio.Event(), asyncio.Event()

    @agent
    async def slow(turn: Turn) -> str:
        begun.set()
        await go_on.wait()
        return turn.text

    async with place(tmp_path, agent) as (_, conversations, ask):
        sending = asyncio.ensure_future(conversations.send(ask, said("hello")))
        await asyncio.wait_for(begun.wait(), BOUND_S)
        with fault_plans.armed(fault_plans.Plan("journal.sync", fault_plans.fail(errno.EIO))):
            go_on.set()
            view = await asyncio.wait_for(sending, BOUND_S)
        assert view.state is TaskState.WORKING, "as it is on the disk: its result never came there"
