"""Calls between agents beside durable steps: within one, after one, and while the task waits."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from covenant.agents.api import SyncTurn, Turn
from covenant.exchange.delegation import digest_of
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.machine.commands import SignalTask
from covenant.model.content import Text
from covenant.model.ids import derived_task_id
from covenant.model.task_event import Signal
from tests.agents.pool_under_test import told
from tests.agents.runtime.steps_under_test import waiting
from tests.agents.runtime.test_agent_calls import CallingAgents, open_agents


@pytest.fixture
async def under_test(ledger: Ledger) -> AsyncIterator[CallingAgents]:
    async with open_agents(ledger) as opened:
        yield opened


async def test_nobody_is_called_while_the_task_waits(under_test: CallingAgents) -> None:
    called = list[str]()

    async def charge(turn: Turn) -> str:
        called.append(turn.text)
        return "charged"

    async def work(turn: Turn) -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await turn.wait_for("approved")
        return (await turn.call("charge", "100")).text

    under_test.serve_named("charge", charge)
    under_test.serve_named("shop", work)
    task_id = await under_test.begin("shop")
    await waiting(under_test, task_id)
    assert called == []
    assert (await under_test.ledger.tree(task_id, None)).children == ()
    await under_test.ledger.commit(SignalTask(task_id=task_id, signal=Signal("approved", "s1", None)))
    assert told(await under_test.ended(task_id)) == "charged"
    assert called == ["100"]


async def test_an_agent_that_is_called_within_a_step_has_steps_of_its_own(under_test: CallingAgents) -> None:
    async def charge(turn: Turn) -> str:
        return await turn.step("charge", lambda: "charged")

    async def work(turn: Turn) -> str:
        async def call() -> str:
            return (await turn.call("charge", "100")).text

        return await turn.step("call", call)

    under_test.serve_named("charge", charge)
    under_test.serve_named("shop", work)
    assert told(await under_test.ended(await under_test.begin("shop"))) == "charged"


@pytest.mark.parametrize("plain", [False, True])
async def test_a_call_within_a_step_is_counted_apart(under_test: CallingAgents, *, plain: bool) -> None:
    """A replay does not do the step again: what the function calls after it is still the same call."""
    runs = list[tuple[str, str, str]]()

    async def roll(turn: Turn) -> str:
        return turn.task_id

    async def work(turn: Turn) -> str:
        async def call() -> str:
            return (await turn.call_first([("roll", "dice")])).text

        first, second = await turn.step("one", call), await turn.step("two", call)
        runs.append((first, second, (await turn.call("roll", "dice")).text))
        await turn.wait_for("go")
        return "done"

    def plain_work(turn: SyncTurn) -> str:
        def call() -> str:
            return turn.call("roll", "dice").text

        first, second = turn.step("one", call), turn.step("two", call)
        runs.append((first, second, turn.call("roll", "dice").text))
        turn.wait_for("go")
        return "done"

    under_test.serve_named("roll", roll)
    under_test.serve_named("game", plain_work if plain else work)
    task_id = await under_test.begin("game")
    await waiting(under_test, task_id)
    await under_test.ledger.commit(SignalTask(task_id=task_id, signal=Signal("go", "s1", None)))
    assert told(await under_test.ended(task_id)) == "done"
    assert len(runs) == 2
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 3
    callee = under_test.catalogue.identity("default", "roll").pubkey
    outside = derived_task_id(derived_task_id(task_id, "1", callee, digest_of((Text("dice"),))), "1")
    assert runs[0][2] == outside, "a task that was begun by an earlier version finds its calls"
