"""A2A 0.3 over HTTP+JSON and gRPC: the official SDK's clients of 0.3, unchanged, against a whole daemon."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import httpx
import pytest
from a2a.client.client import ClientCallContext
from a2a.compat.v0_3.grpc_transport import CompatGrpcTransport
from a2a.compat.v0_3.rest_transport import CompatRestTransport
from a2a.compat.v0_3.types import AgentCard
from a2a.types import a2a_pb2 as pb
from a2a.utils.errors import TaskNotCancelableError, TaskNotFoundError

from covenant import Agent, Turn
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.outbound.receivers import receiver
from tests.waits import BOUND_S

ECHO = "/v1/a2a/agents/echo"
PUBLISHED = {"publish": "echo", "publish_anonymous": "loopback", "push_notifications": True}
Old = CompatRestTransport | CompatGrpcTransport
both = pytest.mark.parametrize("binding", ["HTTP+JSON", "GRPC"])


def echo() -> Agent:
    agent = Agent("echo", description="Says it again")

    @agent
    async def answer(turn: Turn) -> AsyncIterator[Any]:
        if turn.text == "ask":
            yield turn.need_input("which one?")
        elif turn.text == "stay":
            await asyncio.Event().wait()
        elif turn.text == "give":
            yield turn.file("a.bin", b"bytes", media_type="application/x-bin")
            yield turn.data({"n": 1})
        else:
            for word in turn.text.split():
                yield f"{word} "

    return agent


@asynccontextmanager
async def calling(home: Path, binding: str) -> AsyncIterator[tuple[DaemonUnderTest, Old]]:
    async with (
        open_daemon_under_test(
            home, echo(), a2a=PUBLISHED, grpc={"enabled": True}, outbound={"allow": ("127.0.0.1",)}
        ) as daemon,
        httpx.AsyncClient(timeout=BOUND_S) as http,
        grpc.aio.insecure_channel(f"127.0.0.1:{daemon.grpc_port}") as channel,
    ):
        rest = CompatRestTransport(http, None, f"{daemon.url}{ECHO}")
        yield daemon, rest if binding == "HTTP+JSON" else CompatGrpcTransport(channel, None)


def asking(text: str, *, waits: bool = True, **message: Any) -> pb.SendMessageRequest:
    said = pb.Message(message_id=f"m-{text}", role=pb.ROLE_USER, parts=[pb.Part(text=text)], **message)
    return pb.SendMessageRequest(message=said, configuration={"return_immediately": not waits})


@both
async def test_a_message_is_answered_by_its_task_which_can_be_read_again(short_path: Path, binding: str) -> None:
    async with calling(short_path / "home", binding) as (_, client):
        task = (await client.send_message(asking("good day"))).task
        assert task.status.state == pb.TASK_STATE_COMPLETED
        assert [part.text for part in task.artifacts[0].parts] == ["good day "]
        assert [message.role for message in task.history] == [pb.ROLE_USER, pb.ROLE_AGENT]
        again = await client.get_task(pb.GetTaskRequest(id=task.id))
        assert (again.id, again.status, again.history) == (task.id, task.status, task.history)
        short = await client.get_task(pb.GetTaskRequest(id=task.id, history_length=1))
        assert len(short.history) == 1


@both
async def test_a_stream_tells_each_step(short_path: Path, binding: str) -> None:
    async with calling(short_path / "home", binding) as (_, client):
        events = [event async for event in client.send_message_streaming(asking("a b"))]
        assert events[0].HasField("task")
        chunks = [event.artifact_update for event in events if event.HasField("artifact_update")]
        assert "".join(part.text for chunk in chunks for part in chunk.artifact.parts) == "a b "
        assert events[-1].status_update.status.state == pb.TASK_STATE_COMPLETED


@both
async def test_files_and_data_come_and_go(short_path: Path, binding: str) -> None:
    async with calling(short_path / "home", binding) as (daemon, client):
        request = asking("give")
        request.message.parts.add(raw=b"mine", media_type="text/x-mine", filename="mine.txt")
        request.message.parts.add(data={"struct_value": {"k": "v"}})
        request.message.parts.add(url="https://files.example/x", filename="x")
        task = (await client.send_message(request)).task
        parts = [part for artifact in task.artifacts for part in artifact.parts]
        assert [(part.raw, part.filename, part.media_type) for part in parts if part.raw] == [
            (b"bytes", "a.bin", "application/x-bin")
        ]
        assert [part.data.struct_value["n"] for part in parts if part.HasField("data")] == [1]
        kept = (await daemon.ask("GET", f"{ECHO}/tasks/{task.id}", token="")).json()["history"][0]["parts"]
        assert kept[1:] == [
            {"raw": "bWluZQ==", "mediaType": "text/x-mine", "filename": "mine.txt"},
            {"data": {"k": "v"}},
            {"url": "https://files.example/x", "filename": "x"},
        ]


@both
async def test_a_question_is_answered_in_the_same_task(short_path: Path, binding: str) -> None:
    async with calling(short_path / "home", binding) as (_, client):
        asked = (await client.send_message(asking("ask"))).task
        assert asked.status.state == pb.TASK_STATE_INPUT_REQUIRED
        assert asked.status.message.parts[0].text == "which one?"
        request = asking("the blue one", task_id=asked.id, context_id=asked.context_id)
        answered = (await client.send_message(request)).task
        assert (answered.id, answered.status.state) == (asked.id, pb.TASK_STATE_COMPLETED)


@both
async def test_a_task_that_runs_is_followed_and_canceled(short_path: Path, binding: str) -> None:
    async with calling(short_path / "home", binding) as (_, client), asyncio.timeout(BOUND_S):
        running = (await client.send_message(asking("stay", waits=False))).task
        assert running.status.state in (pb.TASK_STATE_SUBMITTED, pb.TASK_STATE_WORKING)
        following = client.subscribe(pb.SubscribeToTaskRequest(id=running.id))
        assert (await anext(following)).task.id == running.id
        canceled = await client.cancel_task(pb.CancelTaskRequest(id=running.id))
        assert canceled.status.state == pb.TASK_STATE_CANCELED
        rest = [event async for event in following]
        assert rest[-1].status_update.status.state == pb.TASK_STATE_CANCELED
        with pytest.raises(TaskNotCancelableError):
            await client.cancel_task(pb.CancelTaskRequest(id=running.id))


@both
async def test_what_is_not_there_is_refused_as_the_client_expects(short_path: Path, binding: str) -> None:
    async with calling(short_path / "home", binding) as (_, client):
        for call in (
            client.get_task(pb.GetTaskRequest(id="nobody")),
            client.cancel_task(pb.CancelTaskRequest(id="nobody")),
            client.send_message(asking("x", task_id="nobody")),
        ):
            with pytest.raises(TaskNotFoundError):
                await call


@both
async def test_push_configurations_are_kept_and_pushed_in_the_form_of_0_3(short_path: Path, binding: str) -> None:
    async with receiver() as hook, calling(short_path / "home", binding) as (_, client):
        asked = (await client.send_message(asking("ask"))).task
        made = await client.create_task_push_notification_config(
            pb.TaskPushNotificationConfig(task_id=asked.id, id="mine", url=hook.url(), token="tok")
        )
        assert (made.task_id, made.id, made.url) == (asked.id, "mine", hook.url())
        got = await client.get_task_push_notification_config(
            pb.GetTaskPushNotificationConfigRequest(task_id=asked.id, id="mine")
        )
        assert got == made
        await client.send_message(asking("this one", task_id=asked.id, context_id=asked.context_id))
        await hook.until(lambda: bool(hook.taken) and json.loads(hook.taken[-1].body)["status"]["state"] == "completed")
        assert hook.taken[-1].headers["x-a2a-notification-token"] == "tok"


async def test_push_configurations_are_listed_and_deleted(short_path: Path) -> None:
    """The official client cannot ask for this over HTTP+JSON."""
    async with calling(short_path / "home", "HTTP+JSON") as (daemon, client):
        asked = (await client.send_message(asking("ask"))).task
        place = f"{ECHO}/v1/tasks/{asked.id}/pushNotificationConfigs"
        config = {"pushNotificationConfig": {"id": "one", "url": "https://hooks.example/"}}
        assert (await daemon.ask("POST", place, token="", json=config)).status_code == 200
        (kept,) = (await daemon.ask("GET", place, token="")).json()["configs"]
        assert kept == {"name": f"tasks/{asked.id}/pushNotificationConfigs/one", **config}
        assert (await daemon.ask("DELETE", f"{place}/one", token="")).json() == {}
        assert (await daemon.ask("GET", place, token="")).json() == {"configs": []}


@both
async def test_the_card_for_callers_with_a_token_is_read_by_official_clients(short_path: Path, binding: str) -> None:
    """The client of the SDK 0.3 reads the answer of HTTP+JSON as `AgentCard`, the one of 1.0 as protocol buffers."""
    async with calling(short_path / "home", binding) as (daemon, client):
        card = AgentCard.model_validate((await daemon.ask("GET", f"{ECHO}/v1/card")).json())
        assert (card.name, card.preferred_transport, card.security) == ("echo", "JSONRPC", [{"bearer": []}])
        assert [each.transport for each in card.additional_interfaces or ()] == ["JSONRPC", "HTTP+JSON", "GRPC"]
        said = ClientCallContext(service_parameters={"authorization": f"Bearer {daemon.token}"})
        told = await client.get_extended_agent_card(pb.GetExtendedAgentCardRequest(), context=said)
        assert (told.name, set(told.security_schemes)) == ("echo", {"bearer"})


@pytest.mark.parametrize("address", ["https://grpc.example.com", "grpc.example.com:443"])
async def test_cards_say_where_grpc_is_reached_behind_a_proxy(short_path: Path, address: str) -> None:
    settings = {"enabled": True, "public_address": address}
    async with open_daemon_under_test(short_path / "home", echo(), a2a=PUBLISHED, grpc=settings) as daemon:
        card = (await daemon.ask("GET", f"{ECHO}/.well-known/agent-card.json")).json()
        told = [each["url"] for each in card["supportedInterfaces"] if each["protocolBinding"] == "GRPC"]
        old_form = (await daemon.ask("GET", f"{ECHO}/v1/card")).json()
        told += [each["url"] for each in old_form["additionalInterfaces"] if each["transport"] == "GRPC"]
        assert set(told) == {address}


async def test_what_misfits_is_refused_with_its_place(short_path: Path) -> None:
    async with calling(short_path / "home", "HTTP+JSON") as (daemon, _):
        for content, field in (
            ([{"text": "a", "data": {"data": {}}}], "message.parts[0]"),
            ([{}], "message.parts[0]"),
            ([{"file": {"fileWithUri": "", "fileWithBytes": "eA=="}}], "message.parts[0].file"),
            ([], "message.parts"),
        ):
            message: dict[str, Any] = {"messageId": "m", "role": "ROLE_USER", "content": content}
            refused = await daemon.ask("POST", f"{ECHO}/v1/message:send", token="", json={"message": message})
            assert (refused.status_code, refused.headers["content-type"]) == (400, "application/json")
            assert field in refused.text
        for method, path, status in (("GET", "tasks", 404), ("PUT", "message:send", 405), ("GET", "nothing", 404)):
            assert (await daemon.ask(method, f"{ECHO}/v1/{path}", token="")).status_code == status


async def test_names_in_snake_case_are_read_too(short_path: Path) -> None:
    async with calling(short_path / "home", "HTTP+JSON") as (daemon, _):
        message = {"message_id": "m", "role": 1, "content": [{"text": "hi"}]}
        body = {"message": message, "configuration": {"blocking": True, "history_length": 1}}
        told = (await daemon.ask("POST", f"{ECHO}/v1/message:send", token="", json=body)).json()["task"]
        assert told["status"]["state"] == "TASK_STATE_COMPLETED"
        assert [message["content"] for message in told["history"]] == [[{"text": "hi "}]]


@pytest.mark.parametrize(
    ("given", "kept"), [(b"bWluZQ==", "bWluZQ=="), (b"mine!", "bWluZSE=")], ids=["base64 text", "plain bytes"]
)
async def test_a_files_bytes_may_be_base64_text_as_official_clients_send_them(
    short_path: Path, given: bytes, kept: str
) -> None:
    async with calling(short_path / "home", "HTTP+JSON") as (daemon, _):
        file = {"fileWithBytes": base64.b64encode(given).decode(), "name": "a"}
        message = {"messageId": "m", "role": "ROLE_USER", "content": [{"file": file}]}
        body = {"message": message, "configuration": {"blocking": True}}
        told = (await daemon.ask("POST", f"{ECHO}/v1/message:send", token="", json=body)).json()["task"]
        newer = (await daemon.ask("GET", f"{ECHO}/tasks/{told['id']}", token="")).json()
        assert newer["history"][0]["parts"] == [{"raw": kept, "filename": "a"}]
