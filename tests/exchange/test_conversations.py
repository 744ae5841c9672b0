"""Conversations: tasks that wait for as long as a conversation is open."""

from covenant.exchange.native import NativeRun, context_of
from covenant.model.content import Text
from covenant.model.ids import TaskId
from tests.exchange.services import AGENT, Services, open_services
from tests.ledger_contract.driver import refused


async def begin(services: Services) -> str:
    agent = services.runs.agent(services.mine, AGENT)
    return (await services.conversations.create(services.mine, agent, "a title")).conversation_id


async def say(services: Services, conversation_id: str, text: str) -> str:
    task = await services.runs.task(
        services.mine,
        NativeRun(parts=(Text(text),), agent=AGENT),
        None,
        parent=TaskId(conversation_id),
        context_id=context_of(conversation_id),
    )
    with await services.runs.follow(services.mine, task):
        return task.id


async def test_a_conversation_is_listed_until_it_is_deleted() -> None:
    async with open_services() as services:
        first, second = await begin(services), await begin(services)
        found, _ = await services.conversations.list(services.mine, 10)
        assert {each.conversation_id for each in found} == {first, second}
        await services.conversations.delete(services.mine, first)
        found, _ = await services.conversations.list(services.mine, 10)
        assert [(each.conversation_id, each.title, each.agent) for each in found] == [(second, "a title", AGENT)]
        with refused("unknown_conversation", 404):
            await services.conversations.get(services.mine, first)


async def test_another_tenants_conversation_is_not_there() -> None:
    async with open_services() as services:
        conversation_id = await begin(services)
        with refused("unknown_conversation", 404):
            await services.conversations.get(services.other, conversation_id)


async def test_its_messages_are_told_the_oldest_first_and_one_is_answered_at_a_time() -> None:
    async with open_services() as services:
        conversation_id = await begin(services)
        asked = await say(services, conversation_id, "one")
        with refused("conversation_busy", 409):
            await services.conversations.waiting(services.mine, conversation_id, TaskId("another"))
        assert await services.conversations.waiting(services.mine, conversation_id, TaskId(asked)) is None
        await services.tasks.cancel(services.mine, asked)
        later = await say(services, conversation_id, "two")
        messages = await services.conversations.messages(services.mine, conversation_id, 10)
        assert [view.task.id for view in messages] == [asked, later]
