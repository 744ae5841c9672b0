"""The official SDK's clients, unchanged: they find an agent by its card, and all they can ask works as they expect."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc  # type: ignore[import-untyped]
import httpx
import pytest
from a2a.client import A2ACardResolver, ClientConfig, ClientFactory
from a2a.client.client import Client, ClientCallContext
from a2a.client.errors import A2AClientError, AgentCardResolutionError
from a2a.client.interceptors import AfterArgs, BeforeArgs, ClientCallInterceptor
from a2a.compat.v0_3.jsonrpc_transport import CompatJsonRpcTransport
from a2a.types import a2a_pb2 as pb
from a2a.utils import errors

from tests.conformance.a2a.agents import BYTES, EXTENSION
from tests.conformance.a2a.bindings import Binding
from tests.conformance.a2a.grpc_binding import Grpc
from tests.conformance.a2a.http_bindings import NewRpc, Rest, SlashRpc
from tests.conformance.a2a.server_under_test import ServerUnderTest, unique
from tests.waits import BOUND_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPOKEN: Final[dict[type[Binding], tuple[str, str]]] = {
    NewRpc: ("JSONRPC", "1.0"),
    SlashRpc: ("JSONRPC", "0.3"),
    Rest: ("HTTP+JSON", "1.0"),
    Grpc: ("GRPC", "1.0"),
}
"""What a card calls each of the bindings."""
WAITS: Final = pb.TASK_STATE_INPUT_REQUIRED


@asynccontextmanager
async def stranger(
    under_test: ServerUnderTest, kind: type[Binding], agent: str = "actor", *, streaming: bool = True
) -> AsyncIterator[Client]:
    """A client that was given an address and a token, and has read the card."""
    name, version = SPOKEN[kind]
    base, said = f"http://127.0.0.1:{under_test.a2a.port}", {"authorization": f"Bearer {under_test.a2a.token}"}
    async with httpx.AsyncClient(headers=said, timeout=BOUND_S) as http:
        card = await A2ACardResolver(http, base).get_agent_card(f"/v1/a2a/agents/{agent}/agent-card.json")
        ours = [
            each
            for each in card.supported_interfaces
            if (each.protocol_binding, each.protocol_version) == (name, version)
        ]
        del card.supported_interfaces[:]
        card.supported_interfaces.extend(ours)
        config = ClientConfig(
            httpx_client=http,
            streaming=streaming,
            supported_protocol_bindings=[name],
            grpc_channel_factory=grpc.aio.insecure_channel,
        )
        client = ClientFactory(config).create(card, [Bearer(under_test.a2a.token)])
        assert isinstance(client._transport, CompatJsonRpcTransport) == (version == "0.3")  # type: ignore[attr-defined]
        yield client
        await client.close()


class Bearer(ClientCallInterceptor):
    """The token on every call, unless a test says another."""

    def __init__(self, token: str) -> None:
        self._said = {"authorization": f"Bearer {token}"}

    async def before(self, args: BeforeArgs) -> None:
        args.context = args.context or ClientCallContext()
        args.context.service_parameters = {**self._said, **(args.context.service_parameters or {})}

    async def after(self, args: AfterArgs) -> None:
        pass


def says(text: str, *parts: pb.Part, **message: Any) -> pb.SendMessageRequest:
    said = pb.Message(message_id=unique("m"), role=pb.ROLE_USER, parts=[pb.Part(text=text), *parts], **message)
    return pb.SendMessageRequest(message=said)


async def heard(client: Client, request: pb.SendMessageRequest) -> list[pb.StreamResponse]:
    async with asyncio.timeout(BOUND_S):
        return [event async for event in client.send_message(request)]


async def task_of(client: Client, request: pb.SendMessageRequest) -> pb.Task:
    (event,) = await heard(client, request)
    assert event.WhichOneof("payload") == "task"
    return event.task


def state_of(event: pb.StreamResponse) -> int:
    return event.task.status.state if event.HasField("task") else event.status_update.status.state


async def test_a_stranger_sends_and_gets_the_task_and_reads_it_again(
    binding: type[Binding], under_test: ServerUnderTest
) -> None:
    async with stranger(under_test, binding, streaming=False) as client:
        task = await task_of(client, says("words a b"))
        assert task.status.state == pb.TASK_STATE_COMPLETED
        assert [part.text for part in task.artifacts[0].parts] == ["a b "]
        assert [message.role for message in task.history] == [pb.ROLE_USER, pb.ROLE_AGENT]
        again = await client.get_task(pb.GetTaskRequest(id=task.id))
        assert again == task
        short = await client.get_task(pb.GetTaskRequest(id=task.id, history_length=1))
        assert len(short.history) == 1


@pytest.mark.usefixtures("patient")
async def test_a_stranger_streams(binding: type[Binding], under_test: ServerUnderTest) -> None:
    async with stranger(under_test, binding) as client:
        first, *rest = await heard(client, says("words a b c"))
        assert first.HasField("task")
        assert state_of(rest[-1]) == pb.TASK_STATE_COMPLETED
        chunks = [event.artifact_update for event in rest if event.HasField("artifact_update")]
        assert [chunk.artifact.parts[0].text for chunk in chunks] == ["a ", "b ", "c ", ""]
        assert [chunk.last_chunk for chunk in chunks] == [False, False, False, True]
        (only,) = await heard(client, says("reply good day"))
        assert only.message.parts[0].text == "good day"


async def test_a_stranger_subscribes_to_what_runs(binding: type[Binding], under_test: ServerUnderTest) -> None:
    gate = unique()
    async with stranger(under_test, binding) as client, asyncio.timeout(BOUND_S):
        task_id = (await anext(client.send_message(says(f"gate {gate}")))).task.id
        await under_test.gates.reached(gate)
        following = client.subscribe(pb.SubscribeToTaskRequest(id=task_id))
        first = await anext(following)
        assert first.task.id == task_id
        under_test.gates.open(gate)
        rest = [event async for event in following]
        assert state_of(rest[-1]) == pb.TASK_STATE_COMPLETED


async def test_a_stranger_answers_what_it_is_asked(binding: type[Binding], under_test: ServerUnderTest) -> None:
    async with stranger(under_test, binding) as client:
        asked = await heard(client, says("ask which?"))
        assert state_of(asked[-1]) == WAITS
        assert asked[-1].status_update.status.message.parts[0].text == "which?"
        task = asked[0].task
        answered = await heard(client, says("French", task_id=task.id, context_id=task.context_id))
        assert state_of(answered[-1]) == pb.TASK_STATE_COMPLETED
        done = await client.get_task(pb.GetTaskRequest(id=task.id))
        assert [message.parts[0].text for message in done.history if message.role == pb.ROLE_USER] == [
            "ask which?",
            "French",
        ]


async def test_a_stranger_cancels(binding: type[Binding], under_test: ServerUnderTest) -> None:
    gate = unique()
    async with stranger(under_test, binding, streaming=False) as client:
        request = says(f"gate {gate}")
        request.configuration.return_immediately = True
        task = await task_of(client, request)
        await under_test.gates.reached(gate)
        canceled = await client.cancel_task(pb.CancelTaskRequest(id=task.id))
        assert canceled.status.state == pb.TASK_STATE_CANCELED


async def test_a_strangers_files_arrive_and_the_agents_come_back(
    binding: type[Binding], under_test: ServerUnderTest
) -> None:
    sent = pb.Part(raw=BYTES, media_type="image/png", filename="all.png")
    async with stranger(under_test, binding, streaming=False) as client:
        task = await task_of(client, says("mirror", sent))
        assert task.artifacts[0].parts[0] == sent
        assert task.history[0].parts[1] == sent
        made = await task_of(client, says("file"))
        assert [part.raw for artifact in made.artifacts for part in artifact.parts] == [BYTES, b"<p>"]


async def test_a_stranger_lists_page_by_page(binding: type[Binding], under_test: ServerUnderTest) -> None:
    context = unique()
    async with stranger(under_test, binding, streaming=False) as client:
        sent = [(await task_of(client, says("echo", context_id=context))).id for _ in range(3)]
        seen: list[str] = []
        request = pb.ListTasksRequest(context_id=context, page_size=2, status=pb.TASK_STATE_COMPLETED)
        while True:
            page = await client.list_tasks(request)
            seen += [task.id for task in page.tasks]
            assert page.total_size == 3
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
        assert seen == sent[::-1]


async def test_a_strangers_mistakes_are_raised_as_its_own_errors(
    binding: type[Binding], under_test: ServerUnderTest
) -> None:
    async with (
        stranger(under_test, binding, streaming=False) as client,
        stranger(under_test, binding, "plain", streaming=False) as plain,
        stranger(under_test, binding, "mannered", streaming=False) as mannered,
    ):
        done = await task_of(client, says("echo"))
        with pytest.raises(errors.TaskNotFoundError):
            await client.get_task(pb.GetTaskRequest(id="nobody"))
        with pytest.raises(errors.TaskNotCancelableError):
            await client.cancel_task(pb.CancelTaskRequest(id=done.id))
        with pytest.raises(errors.UnsupportedOperationError):
            await heard(client, says("more", task_id=done.id))
        with pytest.raises(errors.ContentTypeNotSupportedError):
            await heard(plain, says("mirror", pb.Part(raw=b"x", media_type="application/pdf")))
        with pytest.raises(errors.ExtensionSupportRequiredError):
            await heard(mannered, says("echo"))
        declared = ClientCallContext(service_parameters={"A2A-Extensions": EXTENSION})
        assert [event async for event in mannered.send_message(says("echo"), context=declared)]
        with pytest.raises(errors.InvalidParamsError):
            await heard(client, says("French", task_id=(await task_of(client, says("ask"))).id, context_id="other"))
        config = pb.TaskPushNotificationConfig(task_id=done.id, url="https://example.com")
        old = binding.old
        with pytest.raises(errors.UnsupportedOperationError if old else errors.PushNotificationNotSupportedError):
            await client.create_task_push_notification_config(config)


async def test_a_stranger_cannot_subscribe_to_what_has_ended(
    binding: type[Binding], under_test: ServerUnderTest
) -> None:
    async with stranger(under_test, binding) as client:
        done = (await heard(client, says("echo")))[0].task
        with pytest.raises(errors.UnsupportedOperationError):
            await anext(client.subscribe(pb.SubscribeToTaskRequest(id=done.id)))


async def test_a_stranger_without_a_good_token_is_turned_away(
    binding: type[Binding], under_test: ServerUnderTest
) -> None:
    async with stranger(under_test, binding, streaming=False) as client:
        refused = ClientCallContext(service_parameters={"authorization": "Bearer wrong"})
        with pytest.raises(A2AClientError, match=r"UNAUTHENTICATED|401|bearer token"):
            await client.get_task(pb.GetTaskRequest(id="x"), context=refused)


async def test_a_stranger_reads_the_extended_card(binding: type[Binding], under_test: ServerUnderTest) -> None:
    async with stranger(under_test, binding) as client:
        card = await client.get_extended_agent_card(pb.GetExtendedAgentCardRequest())
        assert card.name == "actor"
        assert "chat" in [skill.id for skill in card.skills]


async def test_a_stranger_finds_the_published_agent_and_needs_no_token_for_it(under_test: ServerUnderTest) -> None:
    base = f"http://127.0.0.1:{under_test.a2a.port}"
    async with httpx.AsyncClient(timeout=BOUND_S) as http:
        config = ClientConfig(httpx_client=http, supported_protocol_bindings=["JSONRPC", "HTTP+JSON"])
        client = await ClientFactory(config).create_from_url(base)
        events = await heard(client, says("words a b"))
        assert state_of(events[-1]) == pb.TASK_STATE_COMPLETED
        with pytest.raises(AgentCardResolutionError):
            await A2ACardResolver(http, base).get_agent_card("/v1/a2a/agents/actor/agent-card.json")
        with pytest.raises(AgentCardResolutionError):
            await A2ACardResolver(http, base).get_agent_card("/.well-known/agent.json")
