"""A task that was sent under a key when ids were a plain hash is still the same task when it is sent again."""

from pathlib import Path

import msgspec
import pytest

from covenant.agents.api import Agent, Turn
from covenant.exchange.a2a_service import A2AExchange, A2ARequest
from covenant.exchange.tasks.builder import unkeyed_id
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.machine.commands import Accept
from covenant.model.a2a_requests import Message, SendMessage
from covenant.model.content import Text
from covenant.model.errors import Invalid
from covenant.model.ids import AgentId
from covenant.model.task import Task, fingerprint
from tests.exchange.test_a2a_service import place
from tests.ledger_contract.samples import CAROL

SENT = SendMessage(message=Message(message_id="m", parts=(Text("hello"),)))


def agent() -> Agent:
    made = Agent("echo")

    @made
    async def echo(turn: Turn) -> str:
        return turn.text

    return made


async def old_task(ledger: Ledger, conversations: A2AExchange, ask: A2ARequest, **changed: AgentId) -> Task:
    """As it was kept before there was a secret."""
    kept = await conversations.send(ask, msgspec.structs.replace(SENT, blocking=True))
    unkeyed = unkeyed_id(ask.caller, ask.agent.id, "order-1")
    digested = msgspec.structs.replace(kept.task, id=unkeyed, context_id=unkeyed, traceparent=None, **changed)
    await ledger.commit(Accept(task=digested, digest=fingerprint(digested)[0]))
    return digested


async def test_a_task_under_an_unkeyed_id_is_recognised_by_its_key(tmp_path: Path) -> None:
    async with place(tmp_path, agent()) as (ledger, conversations, ask):
        old = await old_task(ledger, conversations, ask)
        again = msgspec.structs.replace(ask, idempotency_key="order-1")
        view = await conversations.send(again, msgspec.structs.replace(SENT, blocking=False))
        assert view.task.id == old.id


async def test_a_task_of_somebody_else_under_that_id_is_not(tmp_path: Path) -> None:
    async with place(tmp_path, agent()) as (ledger, conversations, ask):
        old = await old_task(ledger, conversations, ask, sender=CAROL)
        again = msgspec.structs.replace(ask, idempotency_key="order-1")
        view = await conversations.send(again, SENT)
        assert view.task.id != old.id
        assert (await conversations.send(again, SENT)).task.id == view.task.id


async def test_a_short_key_is_refused_of_a_caller_without_a_token(tmp_path: Path) -> None:
    async with place(tmp_path, agent()) as (_, conversations, ask):
        nobody = msgspec.structs.replace(ask.caller, token_sha256="", name="anonymous@default")
        with pytest.raises(Invalid) as refused:
            await conversations.send(msgspec.structs.replace(ask, caller=nobody, idempotency_key="order-1"), SENT)
        assert refused.value.code == "guessable_key"
