"""A2A over gRPC: the official client as a stranger, then what only raw calls can show."""

import asyncio
import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from a2a.types import a2a_pb2 as pb
from a2a.utils.errors import TaskNotCancelableError, TaskNotFoundError, UnsupportedOperationError

from covenant.agents.api import Agent, Turn
from covenant.doors.a2a.cards import PublishedAgent
from covenant.doors.a2a.grpc import SERVICES, parse_peer
from covenant.doors.a2a.operations import OPERATIONS
from covenant.exchange import a2a_service
from covenant.exchange.push import PushConfigs
from covenant.ledger.machine.identity_commands import ChangeTenant
from covenant.model.ids import TaskId
from covenant.model.settings import TenantSettings
from covenant.model.tenants import DEFAULT, TenantLimits
from tests.doors.a2a.grpc_under_test import GrpcUnderTest, asks, in_session, kind_of, open_grpc, told_by
from tests.ledger_contract.samples import OPERATOR
from tests.waits import BOUND_S


def echo() -> Agent:
    agent = Agent("echo", description="says it again")

    @agent
    async def work(turn: Turn) -> AsyncIterator[Any]:
        for word in turn.text.split():
            yield word

    return agent


class Slow:
    """An agent that goes on when it is told to."""

    def __init__(self, name: str = "slow") -> None:
        self.agent = Agent(name)
        self.go = asyncio.Event()
        self.begun = asyncio.Event()
        self.agent(self._work)

    async def _work(self, turn: Turn) -> AsyncIterator[Any]:
        yield turn.status("began")
        self.begun.set()
        await self.go.wait()
        yield "done"


async def sent(client: Any, request: pb.SendMessageRequest) -> list[Any]:
    return [event async for event in client.send_message(request, context=in_session())]


# The official client, which knows the card and its token.


async def test_a_stranger_sends_and_reads_lists_and_streams(tmp_path: Path) -> None:
    async with open_grpc(tmp_path, echo()) as s, await s.stranger("echo", streaming=False) as client:
        (answer,) = await sent(client, asks("hello you"))
        task = answer.task
        assert task.status.state == pb.TASK_STATE_COMPLETED
        assert [part.text for part in task.artifacts[0].parts] == ["helloyou"]
        again = await client.get_task(pb.GetTaskRequest(id=task.id), context=in_session())
        assert again == task
        page = await client.list_tasks(pb.ListTasksRequest(), context=in_session())
        assert ([each.id for each in page.tasks], page.total_size, page.page_size) == ([task.id], 1, 1)
        with pytest.raises(TaskNotCancelableError):
            await client.cancel_task(pb.CancelTaskRequest(id=task.id), context=in_session())
        with pytest.raises(TaskNotFoundError):
            await client.get_task(pb.GetTaskRequest(id="nobody-knows"), context=in_session())


async def test_a_stranger_follows_a_stream_to_its_end(tmp_path: Path) -> None:
    async with open_grpc(tmp_path, echo()) as s, await s.stranger("echo") as client:
        events = await sent(client, asks("one two"))
        assert kind_of(events[0]) == "task"
        assert kind_of(events[-1]) == "status_update"
        assert events[-1].status_update.status.state == pb.TASK_STATE_COMPLETED
        words = [e.artifact_update.artifact.parts[0].text for e in events if kind_of(e) == "artifact_update"]
        assert [word for word in words if word] == ["one", "two"]


async def test_a_stranger_subscribes_cancels_and_cannot_follow_what_has_ended(tmp_path: Path) -> None:
    slow = Slow()
    async with open_grpc(tmp_path, slow.agent) as s, await s.stranger("slow") as client:
        streaming = asyncio.create_task(sent(client, asks("go")))
        await asyncio.wait_for(slow.begun.wait(), BOUND_S)
        page = await client.list_tasks(pb.ListTasksRequest(), context=in_session())
        task_id = page.tasks[0].id
        request = pb.SubscribeToTaskRequest(id=task_id)
        following = client.subscribe(request, context=in_session())
        first = await anext(following)
        assert (kind_of(first), first.task.status.state) == ("task", pb.TASK_STATE_WORKING)
        canceled = await client.cancel_task(pb.CancelTaskRequest(id=task_id), context=in_session())
        assert canceled.status.state == pb.TASK_STATE_CANCELED
        rest = [event async for event in following]
        assert rest[-1].status_update.status.state == pb.TASK_STATE_CANCELED
        assert (await asyncio.wait_for(streaming, BOUND_S))[-1] == rest[-1]
        with pytest.raises(UnsupportedOperationError):
            await anext(client.subscribe(request, context=in_session()))


async def test_a_stranger_keeps_push_configurations_where_they_are_switched_on(tmp_path: Path) -> None:
    async with open_grpc(tmp_path, echo(), push=True) as s, await s.stranger("echo") as client:
        task_id = (await s.call("SendMessage", asks("x", "echo"))).task.id
        wanted = pb.TaskPushNotificationConfig(
            task_id=task_id,
            id="c",
            url="https://example.com/",
            token="x",
            authentication=pb.AuthenticationInfo(scheme="Bearer", credentials="secret"),
        )
        made = await client.create_task_push_notification_config(wanted, context=in_session())
        assert (made.task_id, made.id, made.url, made.token) == (task_id, "c", "https://example.com/", "x")
        assert made.authentication == wanted.authentication
        one = pb.GetTaskPushNotificationConfigRequest(task_id=task_id, id="c")
        assert await client.get_task_push_notification_config(one, context=in_session()) == made
        every = pb.ListTaskPushNotificationConfigsRequest(task_id=task_id)
        listed = await client.list_task_push_notification_configs(every, context=in_session())
        assert list(listed.configs) == [made]
        gone = pb.DeleteTaskPushNotificationConfigRequest(task_id=task_id, id="c")
        await client.delete_task_push_notification_config(gone, context=in_session())
        assert not (await client.list_task_push_notification_configs(every, context=in_session())).configs


async def test_a_stranger_reads_the_extended_card_which_names_both_ports(tmp_path: Path) -> None:
    async with open_grpc(tmp_path, echo()) as s, await s.stranger("echo") as client:
        card = await client.get_extended_agent_card(pb.GetExtendedAgentCardRequest(), context=in_session())
        url = f"http://127.0.0.1:{s.http.port}/v1/a2a/agents/echo"
        named = [(each.protocol_binding, each.url, each.tenant) for each in card.supported_interfaces]
        assert named[:3] == [
            ("JSONRPC", url, ""),
            ("HTTP+JSON", url, ""),
            ("GRPC", f"127.0.0.1:{s.server.port}", "echo"),
        ]
        assert card.security_schemes["bearer"].http_auth_security_scheme.scheme == "bearer"


# One table: every method of the service, and no other operation.


def test_every_method_of_the_service_has_a_row_and_every_row_a_method() -> None:
    assert {method.name: method.server_streaming for method in SERVICES[0][0].methods} == {
        operation.name: operation.open_stream is not None for operation in OPERATIONS
    }


async def test_what_was_sent_over_grpc_is_the_same_task_over_http(tmp_path: Path) -> None:
    async with open_grpc(tmp_path, echo()) as s:
        parts = [
            pb.Part(text="hi", media_type="text/x", metadata={"n": 3}),
            pb.Part(raw=b"\x00\xff", filename="f", media_type="application/x"),
            pb.Part(url="https://example.com/x", media_type="image/png"),
        ]
        request = asks("hi", "echo")
        request.message.parts.extend(parts)
        data = request.message.parts.add().data
        data.struct_value.update({"a": [1, 2.5, None, True, {"b": "c"}]})
        request.message.metadata.update({"deep": {"er": [1]}})
        task = (await s.call("SendMessage", request)).task
        told = await s.http.result("echo", "GetTask", {"id": task.id})
        assert told["history"][0]["parts"] == [
            {"text": "hi"},
            {"text": "hi", "mediaType": "text/x", "metadata": {"n": 3}},
            {"raw": "AP8=", "filename": "f", "mediaType": "application/x"},
            {"url": "https://example.com/x", "mediaType": "image/png"},
            {"data": {"a": [1, 2.5, None, True, {"b": "c"}]}},
        ]
        assert told["history"][0]["metadata"] == {"deep": {"er": [1]}}
        assert list(task.history[0].parts) == list(request.message.parts)
        assert task.metadata["covenant.generation"] == told["metadata"]["covenant.generation"]


async def test_a_bare_message_is_the_whole_answer_and_the_whole_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(a2a_service, "REPLY_S", BOUND_S)
    agent = Agent("brief")

    @agent
    async def work(turn: Turn) -> Any:
        return turn.reply("no task needed")

    async with open_grpc(tmp_path, agent) as s:
        answer = await s.call("SendMessage", asks("x", "brief"))
        assert answer.message.parts[0].text == "no task needed"
        (event,) = await s.streamed("SendStreamingMessage", asks("x", "brief"))
        assert (kind_of(event), event.message.parts[0].text) == ("message", "no task needed")


# Refusals: status, reason and details.


def message(**fields: Any) -> pb.SendMessageRequest:
    given = {"message_id": "m", "role": pb.ROLE_USER, "parts": [pb.Part(text="x")], **fields}
    return pb.SendMessageRequest(tenant="echo", message=pb.Message(**given))


def not_a_number() -> pb.SendMessageRequest:
    request = message()
    request.message.parts.add().data.number_value = float("nan")
    return request


def nameless_state() -> pb.ListTasksRequest:
    return pb.ListTasksRequest.FromString(b"\n\x04echo\x18\x63")


def out_of_time() -> pb.ListTasksRequest:
    request = pb.ListTasksRequest(tenant="echo")
    request.status_timestamp_after.seconds = 10**15
    return request


CREATE_PUSH = pb.TaskPushNotificationConfig(tenant="echo", task_id="t", url="https://example.com/")

REFUSED = [
    ("GetTask", pb.GetTaskRequest(tenant="echo", id="x"), "NOT_FOUND", "TASK_NOT_FOUND", ""),
    ("GetTask", pb.GetTaskRequest(tenant="echo"), "INVALID_ARGUMENT", "INVALID_PARAMS", "id"),
    ("GetTask", pb.GetTaskRequest(tenant="nobody", id="x"), "NOT_FOUND", "TASK_NOT_FOUND", ""),
    ("GetTask", pb.GetTaskRequest(id="x"), "NOT_FOUND", "TASK_NOT_FOUND", ""),
    ("CancelTask", pb.CancelTaskRequest(tenant="echo", id="x"), "NOT_FOUND", "TASK_NOT_FOUND", ""),
    ("SubscribeToTask", pb.SubscribeToTaskRequest(tenant="echo", id="x"), "NOT_FOUND", "TASK_NOT_FOUND", ""),
    ("SendMessage", pb.SendMessageRequest(tenant="echo"), "INVALID_ARGUMENT", "INVALID_PARAMS", "message"),
    ("SendMessage", message(message_id=""), "INVALID_ARGUMENT", "INVALID_PARAMS", "message.messageId"),
    ("SendMessage", message(role=0), "INVALID_ARGUMENT", "INVALID_PARAMS", "message.role"),
    ("SendMessage", message(role=77), "INVALID_ARGUMENT", "INVALID_PARAMS", "message.role"),
    ("SendMessage", message(parts=[]), "INVALID_ARGUMENT", "INVALID_PARAMS", "message.parts"),
    ("SendMessage", message(parts=[pb.Part()]), "INVALID_ARGUMENT", "INVALID_PARAMS", "message.parts[0]"),
    ("SendStreamingMessage", message(parts=[]), "INVALID_ARGUMENT", "INVALID_PARAMS", "message.parts"),
    ("SendMessage", not_a_number(), "INVALID_ARGUMENT", "INVALID_PARAMS", "params"),
    ("SendMessage", message(task_id="x"), "NOT_FOUND", "TASK_NOT_FOUND", ""),
    ("ListTasks", pb.ListTasksRequest(tenant="echo", page_size=0), "INVALID_ARGUMENT", "INVALID_PARAMS", "pageSize"),
    ("ListTasks", nameless_state(), "INVALID_ARGUMENT", "INVALID_PARAMS", "status"),
    ("ListTasks", out_of_time(), "INVALID_ARGUMENT", "INVALID_PARAMS", "params"),
    (
        "CreateTaskPushNotificationConfig",
        CREATE_PUSH,
        "FAILED_PRECONDITION",
        "PUSH_NOTIFICATION_NOT_SUPPORTED",
        "",
    ),
]


@pytest.mark.parametrize("row", REFUSED, ids=range(len(REFUSED)))
async def test_a_refusal_has_its_status_its_reason_and_the_field(
    tmp_path: Path, row: tuple[str, Any, str, str, str]
) -> None:
    method, request, code, reason, field = row
    async with open_grpc(tmp_path, echo()) as s:
        told = await s.refused(method, request)
        assert (told.code, told.reason, told.domain) == (code, reason, "a2a-protocol.org")
        assert [where for where, _ in told.violations] == ([field] if field else [])


@pytest.mark.parametrize(
    ("version", "allowed"), [("1.0", True), ("1.0.7", True), ("", True), ("0.3", False), ("2.0", False)]
)
async def test_the_version_is_that_of_the_service(tmp_path: Path, version: str, allowed: bool) -> None:
    async with open_grpc(tmp_path, echo()) as s:
        if allowed:
            assert (await s.call("ListTasks", pb.ListTasksRequest(tenant="echo"), a2a_version=version)).total_size == 0
        else:
            told = await s.refused("ListTasks", pb.ListTasksRequest(tenant="echo"), a2a_version=version)
            assert (told.code, told.reason) == ("FAILED_PRECONDITION", "VERSION_NOT_SUPPORTED")


async def test_whole_numbers_of_ours_in_metadata_are_taken_and_others_refused(tmp_path: Path) -> None:
    async with open_grpc(tmp_path, echo()) as s:
        request = asks("later", "echo")
        request.metadata.update({"covenant.priority": 5, "covenant.not_before_ms": 1_794_859_345_638})
        request.configuration.return_immediately = True
        task = (await s.call("SendMessage", request)).task
        shown = await s.http.ledger.show(TaskId(task.id), None, 0)
        assert shown is not None
        assert (shown.task.priority, shown.task.not_before_ms) == (5, 1_794_859_345_638)
        request = asks("never", "echo")
        request.metadata.update({"covenant.priority": 5.5})
        told = await s.refused("SendMessage", request)
        assert told.code == "INVALID_ARGUMENT"
        assert "whole number from 0 to 9" in told.message


async def test_required_extensions_are_read_from_metadata_said_once_or_twice(tmp_path: Path) -> None:
    agent = Agent("strict", extensions=["urn:a", "urn:b"])

    @agent
    async def work(turn: Turn) -> str:
        return turn.text

    async with open_grpc(tmp_path, agent) as s:
        told = await s.refused("SendMessage", asks("x", "strict"), a2a_extensions="urn:a")
        assert (told.code, told.reason) == ("FAILED_PRECONDITION", "EXTENSION_SUPPORT_REQUIRED")
        assert (await s.call("SendMessage", asks("x", "strict"), a2a_extensions="urn:a, urn:b")).task.id
        twice = [*s.metadata(), ("a2a-extensions", "urn:a"), ("a2a-extensions", "urn:b")]
        assert (await s.stub.SendMessage(asks("x", "strict"), metadata=twice)).task.id


async def test_an_idempotency_key_gives_the_same_task_and_refuses_another_message(tmp_path: Path) -> None:
    async with open_grpc(tmp_path, echo()) as s:
        first = await s.call("SendMessage", asks("x", "echo"), idempotency_key="k")
        again = await s.call("SendMessage", asks("x", "echo"), idempotency_key="k")
        assert first.task.id == again.task.id
        told = await s.refused("SendMessage", asks("y", "echo"), idempotency_key="k")
        assert (told.code, told.reason) == ("ALREADY_EXISTS", "IDEMPOTENCY_KEY_REUSED")


async def test_a_fault_of_ours_tells_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(PushConfigs):
        def __init__(self) -> None: ...

        async def run(self, call: Any, request: Any) -> Any:
            raise RuntimeError("the secret of the house")

    async with open_grpc(tmp_path, echo(), pushes=Broken()) as s:
        told = await s.refused("CreateTaskPushNotificationConfig", CREATE_PUSH)
        assert (told.code, told.message, told.reason) == ("INTERNAL", "Internal error", "INTERNAL_ERROR")
        assert "secret" not in repr(told)
        assert "the secret of the house" in caplog.text


async def raw(s: GrpcUnderTest, method: str, data: bytes, **options: Any) -> Any:
    call = s.channel.unary_unary(f"/{SERVICES[0][0].full_name}/{method}")
    try:
        return await call(data, timeout=BOUND_S, **options)
    except grpc.aio.AioRpcError as error:
        return told_by(error)


async def test_bytes_that_are_no_message_are_refused_after_their_sender(tmp_path: Path) -> None:
    async with open_grpc(tmp_path, echo()) as s:
        garbage = b"\xff\xff\xff"
        assert (await raw(s, "GetTask", garbage)).code == "UNAUTHENTICATED"
        assert (await raw(s, "GetTask", garbage, metadata=s.metadata())).code == "INVALID_ARGUMENT"


async def test_what_is_too_large_compressed_or_unknown_is_refused_by_the_server(tmp_path: Path) -> None:
    async with open_grpc(tmp_path, echo(), message_bytes_max=10_000) as s:
        told = await s.refused("SendMessage", asks("x" * 20_000, "echo"))
        assert told.code == "RESOURCE_EXHAUSTED"
        zeros = asks("0" * 5_000, "echo").SerializeToString()
        options = {"metadata": s.metadata(), "compression": grpc.Compression.Gzip}
        assert (await raw(s, "SendMessage", zeros, **options)).code == "UNIMPLEMENTED"
        assert (await raw(s, "Nonsense", b"", metadata=s.metadata())).code == "UNIMPLEMENTED"
        assert (await s.call("SendMessage", asks("still there", "echo"))).task.id


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:5", ("127.0.0.1", 5)),
        ("ipv6:%5B::1%5D:5", ("::1", 5)),
        ("ipv6:[::1]:5", ("::1", 5)),
        ("unix:", None),
        ("", None),
    ],
)
def test_the_address_of_a_caller_is_read(peer: str, address: Any) -> None:
    assert parse_peer(peer) == address


# Who may call.


@pytest.mark.parametrize("authorization", [None, "Bearer nobody", "Basic abc", "Bearer", "Bearer " + "x" * 5_000])
async def test_a_caller_without_a_good_token_is_refused_and_audited(tmp_path: Path, authorization: str | None) -> None:
    async with open_grpc(tmp_path, echo()) as s:
        said = {} if authorization is None else {"authorization": authorization}
        for method in ("SendMessage", "SendStreamingMessage"):
            told = await s.refused(method, asks("x", "echo"), "", **said)
            assert (told.code, told.reason) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
        # One row tells of all from the same address within a minute.
        (row,) = await s.audited("authentication_failed")
        assert (row["kind"]["transport"], row["kind"]["address"]) == ("grpc", "127.0.0.1")


async def test_another_tenant_finds_neither_agent_nor_task(tmp_path: Path) -> None:
    async with open_grpc(tmp_path, echo()) as s:
        task = (await s.call("SendMessage", asks("mine", "echo"))).task
        other = (await s.http.tenancy.add(s.http.operator, "other")).token
        every: tuple[tuple[str, Any], ...] = (
            ("SendMessage", asks("x", "echo")),
            ("SendStreamingMessage", asks("x", "echo")),
            ("GetTask", pb.GetTaskRequest(tenant="echo", id=task.id)),
            ("ListTasks", pb.ListTasksRequest(tenant="echo")),
            ("CancelTask", pb.CancelTaskRequest(tenant="echo", id=task.id)),
            ("SubscribeToTask", pb.SubscribeToTaskRequest(tenant="echo", id=task.id)),
            ("CreateTaskPushNotificationConfig", CREATE_PUSH),
            ("GetExtendedAgentCard", pb.GetExtendedAgentCardRequest(tenant="echo")),
        )
        for method, request in every:
            told = await s.refused(method, request, other)
            unknown = copy.deepcopy(request)
            unknown.tenant = "nobody"
            never = await s.refused(method, unknown, other)
            assert (told.code, told.machine_code) == ("NOT_FOUND", "unknown_agent")
            assert told.message.replace("echo", "nobody") == never.message
        own = await s.refused("GetTask", pb.GetTaskRequest(tenant="index", id=task.id), other)
        assert (own.code, own.machine_code) == ("NOT_FOUND", "unknown_task")


async def test_the_published_agent_is_meant_where_none_is_named(tmp_path: Path) -> None:
    async with open_grpc(tmp_path, echo(), publishing=PublishedAgent("echo")) as s:
        assert (await s.call("SendMessage", asks("x"))).task.status.state == pb.TASK_STATE_COMPLETED
        assert (await s.refused("SendMessage", asks("x"), "")).code == "UNAUTHENTICATED"
        other = (await s.http.tenancy.add(s.http.operator, "other")).token
        told = await s.refused("SendMessage", asks("x"), other)
        assert (told.code, told.machine_code) == ("NOT_FOUND", "unknown_agent")


async def test_strangers_may_use_an_open_agent_and_no_other(tmp_path: Path) -> None:
    publishing = PublishedAgent("echo", "loopback")
    other = Agent("other")

    @other
    async def work(turn: Turn) -> str:
        return turn.text

    async with open_grpc(tmp_path, echo(), other, publishing=publishing) as s:
        for agent in ("", "echo"):
            assert (await s.call("SendMessage", asks("x", agent), "")).task.status.state == pb.TASK_STATE_COMPLETED
            events = await s.streamed("SendStreamingMessage", asks("x", agent), "")
            assert events[-1].status_update.status.state == pb.TASK_STATE_COMPLETED
        assert (await s.refused("SendMessage", asks("x", "other"), "")).code == "UNAUTHENTICATED"
        assert (await s.refused("SendMessage", asks("x", "nobody"), "")).code == "UNAUTHENTICATED"
        assert (await s.refused("SendMessage", asks("x"), "", x_forwarded_for="10.0.0.1")).code == "UNAUTHENTICATED"
        assert (await s.refused("SendMessage", asks("x"), "wrong")).code == "UNAUTHENTICATED"


async def test_a_tenant_over_its_rate_hears_when_to_come_back(tmp_path: Path) -> None:
    async with open_grpc(tmp_path, echo(), limits=TenantSettings(rate_per_min=2)) as s:
        for _ in range(2):
            await s.call("ListTasks", pb.ListTasksRequest(tenant="echo"))
        told = await s.refused("ListTasks", pb.ListTasksRequest(tenant="echo"))
        assert (told.code, told.machine_code) == ("RESOURCE_EXHAUSTED", "rate_limit")
        assert told.retry_s is not None
        assert 0 < told.retry_s <= 30


@pytest.mark.parametrize(
    ("limits", "code"),
    [(TenantLimits(live_tasks=1), "live_task_limit"), (TenantLimits(queued_bytes=2), "queued_bytes_limit")],
)
async def test_a_tenant_with_all_that_may_wait_is_refused_more(tmp_path: Path, limits: TenantLimits, code: str) -> None:
    slow = Slow()
    async with open_grpc(tmp_path, slow.agent) as s:
        await s.http.ledger.commit(ChangeTenant(by=OPERATOR, name=DEFAULT, limits=limits))
        stream = s.stream("SendStreamingMessage", asks("x", "slow"))
        await stream.read()
        for method in ("SendMessage", "SendStreamingMessage"):
            told = await s.refused(method, asks("xx", "slow"))
            assert (told.code, told.machine_code, told.retry_s) == ("RESOURCE_EXHAUSTED", code, 1.0)
        slow.go.set()


async def test_a_call_whose_message_does_not_come_takes_a_place(tmp_path: Path) -> None:
    async with open_grpc(tmp_path, limits=TenantSettings(connections=1)) as s:
        begin = s.channel.stream_unary(f"/{SERVICES[0][0].full_name}/GetTask")
        empty = begin(metadata=s.metadata())
        async with asyncio.timeout(BOUND_S):
            while (await s.refused("GetTask", pb.GetTaskRequest(id="x"))).machine_code != "concurrent_request_limit":
                if empty.done():  # refused itself, since the other call had the place
                    empty = begin(metadata=s.metadata())
        empty.cancel()


@pytest.mark.parametrize(
    ("limits", "code"),
    [(TenantSettings(streams=1), "stream_limit"), (TenantSettings(connections=1), "concurrent_request_limit")],
)
async def test_a_stream_takes_a_place_until_it_ends_or_its_caller_leaves(
    tmp_path: Path, limits: TenantSettings, code: str
) -> None:
    slow = Slow()
    async with open_grpc(tmp_path, slow.agent, limits=limits) as s:
        stream = s.stream("SendStreamingMessage", asks("x", "slow"))
        first = await stream.read()
        told = await s.refused("SubscribeToTask", pb.SubscribeToTaskRequest(tenant="slow", id=first.task.id))
        assert (told.code, told.machine_code, told.retry_s) == ("RESOURCE_EXHAUSTED", code, 1.0)
        if limits.streams == 1:
            assert (await s.call("ListTasks", pb.ListTasksRequest(tenant="slow"))).total_size == 1
        stream.cancel()
        slow.go.set()
        async with asyncio.timeout(BOUND_S):
            while True:
                try:
                    await s.call("SendMessage", asks("x", "slow"))
                    break
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # noqa: PT017  until its leaving is noticed
