"""Tasks by their id alone: who finds them, follows them and cancels them."""

import pytest

from covenant.exchange.native import NativeRun
from covenant.ledger.machine.commands import Take
from covenant.model.content import Text
from covenant.model.task_view import TaskState
from tests.exchange.services import AGENT, open_services
from tests.ledger_contract.driver import refused


async def test_a_tenant_finds_its_own_tasks_and_cannot_detect_others() -> None:
    async with open_services() as services:
        task_id = await services.run()
        assert (await services.tasks.get(services.mine, task_id)).task.id == task_id
        assert [row.task_id for row in await services.tasks.list(services.mine, 10)] == [task_id]
        for look in (services.tasks.get, services.tasks.follow, services.tasks.cancel):
            with refused("unknown_task", 404):
                await look(services.other, task_id)
        assert not await services.tasks.list(services.other, 10)


async def test_the_operator_sees_every_task_only_where_it_is_let() -> None:
    async with open_services() as services:
        run = NativeRun(parts=(Text("hello"),), agent=AGENT)
        with await services.runs.start(services.other, run, None) as stream:
            task_id = stream.first.task.id
        assert (await services.all_tasks.get(services.operator, task_id)).task.tenant == "other"
        assert len(await services.all_tasks.agents(services.operator)) > len(
            await services.tasks.agents(services.operator)
        )
        for lookup, caller in ((services.tasks, services.operator), (services.all_tasks, services.mine)):
            with refused("unknown_task", 404):
                await lookup.get(caller, task_id)


async def test_a_task_is_canceled_once() -> None:
    async with open_services() as services:
        task_id = await services.run()
        assert (await services.tasks.cancel(services.mine, task_id)).state is TaskState.CANCELED
        with refused("not_cancelable", 409):
            await services.tasks.cancel(services.mine, task_id)


async def test_a_stream_tells_each_step_once_from_any_generation_on() -> None:
    async with open_services() as services:
        task_id = await services.run()
        with await services.tasks.follow(services.mine, task_id, 0) as stream:
            assert stream.first.generation == 1
            await services.tasks.cancel(services.mine, task_id)
            told = [step.generation async for steps in stream for step in steps]
        assert told == [2]
        with await services.tasks.follow(services.mine, task_id, 2) as stream:
            assert [step async for steps in stream for step in steps] == []


@pytest.mark.parametrize("after", [-1, 2])
async def test_a_generation_that_the_task_has_not_come_to_is_refused(after: int) -> None:
    async with open_services() as services:
        task_id = await services.run()
        with refused("invalid_request", 400):
            await services.tasks.follow(services.mine, task_id, after)


async def test_the_queue_of_a_tenant_has_its_live_tasks() -> None:
    async with open_services() as services:
        first, second = await services.run("one"), await services.run("two")
        await services.tasks.cancel(services.mine, first)
        queue = await services.tasks.queue(services.mine, 10)
        assert [live.task_id for live in queue.waiting] == [second]
        assert (queue.counts, queue.counted) == ({"canceled": 1, "submitted": 1}, 2)
        recipient = services.catalogue.identity("default", AGENT)
        await services.ledger.commit(Take(holder=recipient, recipient=recipient.pubkey, count=1))
        whole = await services.all_tasks.queue(services.operator, 10)
        assert whole.counts["in_flight"] == 1
