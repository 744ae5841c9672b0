"""Callers that leave: what was accepted for them goes on."""

import asyncio
from pathlib import Path

from covenant.agents.authoring import Agent, Turn
from covenant.agents.crew import Crew
from covenant.agents.function import FunctionBody
from covenant.daemon.environment import now_ms
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.conversation import Ask, ConversationLimits, Conversations
from covenant.exchange.doorkeeper import Doorkeeper
from covenant.exchange.registry import operator_agent
from covenant.exchange.tenancy import Caller, Tenancy
from covenant.ledger.log.homes import open_ledger
from covenant.ledger.log.uuids import Uuids
from covenant.model.asking import ListTasks, Message, SendMessage
from covenant.model.constitution import Constitution
from covenant.model.content import Text
from covenant.model.folding import TaskState
from covenant.model.tenant import DEFAULT
from covenant.seal.keys import new_private_key

BOUND_S = 20.0
TURNS = 12


async def test_a_task_whose_caller_left_while_it_was_being_accepted_is_started_all_the_same(tmp_path: Path) -> None:
    ledger, key = await open_ledger(tmp_path, clock=now_ms), new_private_key()
    operator = operator_agent("operator@test", key)
    tenancy, catalogue = Tenancy(ledger, operator, Doorkeeper(ledger, operator)), Catalogue(ledger, key)
    await tenancy.open()
    agent, crew = Agent("echo"), Crew(ledger)

    @agent
    async def echo(turn: Turn) -> str:
        return turn.text

    entry = catalogue.add_resident(DEFAULT, Constitution(id="echo", kind="function"), "code")
    crew.employ(catalogue.identity(DEFAULT, "echo"), FunctionBody(agent))
    conversations = Conversations(ledger, catalogue, crew, Uuids(), ConversationLimits())
    tenant = tenancy.tenant(DEFAULT)
    assert tenant is not None
    ask = Ask(caller=Caller(tenant, "token", operator=False, name="client@default"), agent=entry)
    said = SendMessage(message=Message(message_id="m", parts=(Text("hello"),)))
    working = asyncio.ensure_future(crew.run())
    try:
        # One caller leaves after one turn of the loop, the next after two, …: some of them while the disk has it.
        for turns in range(TURNS):
            sending = asyncio.ensure_future(conversations.send(ask, said))
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
    finally:
        crew.stop()
        working.cancel()
        await asyncio.wait((working,))
        await ledger.close()
