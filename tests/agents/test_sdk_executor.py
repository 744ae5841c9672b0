"""Agents written for the official SDK run unchanged: what they enqueue becomes their task."""

import asyncio
from typing import Any

import pytest
from a2a.helpers.proto_helpers import new_task_from_user_message, new_text_message
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.tasks import TaskUpdater
from a2a.types import a2a_pb2 as pb
from google.protobuf import json_format, struct_pb2

from covenant.agents.sdk_executor import SdkExecutorAgent
from covenant.ledger.contract.ledger import Ledger
from covenant.model.content import Embedded, Json, Resource, ResourceLink, Text
from covenant.model.task_view import TaskState
from tests.agents.pool_under_test import PoolUnderTest, chunks, endings, open_pool, statuses, told
from tests.waits import BOUND_S


class Plain(AgentExecutor):
    """As the SDK's samples have it: nothing to do on a cancel."""

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        raise NotImplementedError


class HelloWorld(Plain):
    """The smallest sample: one message."""

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        await event_queue.enqueue_event(new_text_message(f"Hello {context.get_user_input()}"))


class Streaming(Plain):
    """The usual sample: a task, work, chunks, done."""

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        assert context.message is not None
        task = context.current_task or new_task_from_user_message(context.message)
        await event_queue.enqueue_event(task)
        updater = TaskUpdater(event_queue, task.id, task.context_id)
        await updater.start_work(updater.new_agent_message([pb.Part(text="thinking")]))
        for number, word in enumerate(("a ", "b ", "c")):
            await updater.add_artifact(
                [pb.Part(text=word)], artifact_id="answer", name="answer", append=number > 0, last_chunk=number == 2
            )
            await asyncio.sleep(0)
        await updater.complete(updater.new_agent_message([pb.Part(text="done")]))
        with pytest.raises(RuntimeError):
            await updater.complete()


async def test_a_single_message_is_a_bare_reply(pool: PoolUnderTest) -> None:
    pool.serve(SdkExecutorAgent(HelloWorld()))
    view = await pool.ask("world")
    assert view.result is not None
    assert (view.state, told(view), view.result.reply) == (TaskState.COMPLETED, "Hello world", True)


async def test_a_task_with_chunks_is_told_event_by_event(pool: PoolUnderTest) -> None:
    pool.serve(SdkExecutorAgent(Streaming()))
    view = await pool.ask()
    assert (view.state, told(view)) == (TaskState.COMPLETED, "done")
    steps = await pool.steps(view.task.id)
    assert statuses(steps) == ["thinking"]
    assert [(c.artifact_id, c.name, c.append, c.last_chunk) for c in chunks(steps)] == [
        ("answer", "answer", False, False),
        ("answer", "answer", True, False),
        ("answer", "answer", True, True),
    ]
    assert [artifact.parts for artifact in view.artifacts] == [(Text("a b c"),)]


class Ends(Plain):
    def __init__(self, how: str) -> None:
        self.how = how

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        assert context.task_id
        assert context.context_id
        updater = TaskUpdater(event_queue, context.task_id, context.context_id)
        message = updater.new_agent_message([pb.Part(text=f"{self.how}, alas")])
        match self.how:
            case "raises":
                raise RuntimeError("the password is swordfish")
            case "says nothing":
                return
            case "mistakes the task":
                await event_queue.enqueue_event(pb.Task(id="another", context_id="x"))
            case "enqueues nonsense":
                await event_queue.enqueue_event({"a": 1})  # type: ignore[arg-type]
            case _:
                await getattr(updater, self.how)(message)
                await event_queue.enqueue_event(new_text_message("too late"))


@pytest.mark.parametrize(
    ("how", "state", "said"),
    [
        ("complete", TaskState.COMPLETED, "complete, alas"),
        ("failed", TaskState.FAILED, "failed, alas"),
        ("reject", TaskState.REJECTED, "reject, alas"),
        ("cancel", TaskState.CANCELED, "cancel, alas"),
        ("raises", TaskState.FAILED, "the agent failed"),
        ("says nothing", TaskState.COMPLETED, ""),
        ("mistakes the task", TaskState.FAILED, "the agent answered with another task's id"),
        ("enqueues nonsense", TaskState.FAILED, "the agent enqueued dict, which is no event of a task"),
    ],
)
async def test_each_way_to_end_is_one_end(pool: PoolUnderTest, how: str, state: TaskState, said: str) -> None:
    pool.serve(SdkExecutorAgent(Ends(how)))
    view = await pool.ask()
    assert (view.state, told(view)) == (state, said)
    assert len(endings(await pool.steps(view.task.id))) == 1


class Asks(Plain):
    """Asks for more, returns, and is called again with the task as it stands."""

    def __init__(self, what: str) -> None:
        self.what = what

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        assert context.task_id
        assert context.context_id
        updater = TaskUpdater(event_queue, context.task_id, context.context_id)
        if context.current_task is None:
            await updater.add_artifact([pb.Part(text="draft")], artifact_id="draft")
            await getattr(updater, self.what)(updater.new_agent_message([pb.Part(text="more?")]))
            return
        task = context.current_task
        said = [(message.role, message.parts[0].text) for message in task.history]
        assert said == [(pb.ROLE_USER, "go"), (pb.ROLE_AGENT, "more?"), (pb.ROLE_USER, "yes")]
        assert [artifact.artifact_id for artifact in task.artifacts] == ["draft"]
        assert task.status.state == pb.TASK_STATE_WORKING
        await updater.complete(updater.new_agent_message([pb.Part(text=context.get_user_input())]))


@pytest.mark.parametrize(
    ("what", "state"),
    [("requires_input", TaskState.INPUT_REQUIRED), ("requires_auth", TaskState.AUTH_REQUIRED)],
)
async def test_an_executor_that_asks_parks_its_task_and_is_called_again(
    pool: PoolUnderTest, what: str, state: TaskState
) -> None:
    pool.serve(SdkExecutorAgent(Asks(what)))
    task_id = await pool.send()
    view = await pool.parked(task_id)
    assert (view.state, told(view)) == (state, "more?")
    await pool.idle()
    await pool.say(task_id, "yes")
    view = await pool.ended(task_id)
    assert (view.state, told(view)) == (TaskState.COMPLETED, "yes")


class Looks(Plain):
    def __init__(self) -> None:
        self.seen: list[RequestContext] = []

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        self.seen.append(context)
        assert context.message is not None
        await event_queue.enqueue_event(pb.Message(role=pb.ROLE_AGENT, message_id="r", parts=context.message.parts))


async def test_the_request_reaches_the_executor_whole_and_parts_come_back_as_they_were(pool: PoolUnderTest) -> None:
    looks = Looks()
    pool.serve(SdkExecutorAgent(looks))
    parts = (
        Text("words", "text/markdown", "a.md", {"k": 1}),
        Json({"n": 1, "f": 1.5, "deep": [None, True]}),
        Resource(Embedded(uri="", mimeType="image/png", blob="iVBO"), "a.png"),
        ResourceLink("https://host/x", "x", "text/plain"),
    )
    fields: dict[str, Any] = {"message_id": "m-1", "context_id": "c-1", "metadata": {"lang": "en"}}
    request = {"request_metadata": {"trace": 7}, "tenant": "acme", "extensions": ("urn:x",), "output_modes": ("a/b",)}
    view = await pool.ask("words", parts=parts, **fields, **request)
    (context,) = looks.seen
    message = context.message
    assert message is not None
    assert (message.message_id, message.task_id, message.context_id) == ("m-1", view.task.id, "c-1")
    assert json_format.MessageToDict(message.metadata) == {"lang": "en"}
    assert (context.task_id, context.context_id, context.tenant) == (view.task.id, "c-1", "acme")
    assert context.requested_extensions == {"urn:x"}
    assert context.metadata == {"trace": 7}
    assert context.configuration is not None
    assert [*context.configuration.accepted_output_modes] == ["a/b"]
    assert (context.call_context.user.is_authenticated, context.call_context.user.user_name) == (True, "alice@here")
    assert view.message is not None
    assert view.message.parts == parts


class Cancelable(AgentExecutor):
    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.told = 0

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        self.started.set()
        await asyncio.Event().wait()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        self.told += 1
        assert context.task_id
        await TaskUpdater(event_queue, context.task_id, context.context_id or "").cancel()


async def test_an_executor_is_told_of_a_cancel_and_not_of_a_stop(ledger: Ledger) -> None:
    executor = Cancelable()
    async with open_pool(ledger) as pool:
        pool.serve(SdkExecutorAgent(executor))
        task_id = await pool.send()
        await asyncio.wait_for(executor.started.wait(), BOUND_S)
        await pool.cancel(task_id)
        await pool.idle()
        assert executor.told == 1
        assert len(endings(await pool.steps(task_id))) == 1
        executor.started.clear()
        task_id = await pool.send()
        await asyncio.wait_for(executor.started.wait(), BOUND_S)
        await pool.cut_short()
        assert executor.told == 1
        assert endings(await pool.steps(task_id)) == []


async def test_metadata_of_the_last_status_is_the_results(pool: PoolUnderTest) -> None:
    class Notes(Plain):
        async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
            metadata = struct_pb2.Struct()
            metadata.update({"tokens": 12})
            status = pb.TaskStatus(state=pb.TASK_STATE_COMPLETED)
            await event_queue.enqueue_event(
                pb.TaskStatusUpdateEvent(task_id=context.task_id, status=status, metadata=metadata)
            )

    pool.serve(SdkExecutorAgent(Notes()))
    view = await pool.ask()
    assert view.result is not None
    assert view.result.metadata == {"tokens": 12}
