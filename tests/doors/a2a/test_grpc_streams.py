"""Streams over gRPC: numbered, resumed by their number, ended without ending the task; and callers that leave."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from a2a.types import a2a_pb2 as pb

from covenant.agents.api import Agent, Turn
from covenant.model.ids import TaskId
from covenant.model.tenants import DEFAULT
from tests.doors.a2a.grpc_under_test import UNLIMITED, GrpcUnderTest, asks, generation_of, kind_of, open_grpc, told_by
from tests.waits import BOUND_S


class Counting:
    """An agent that says as many numbers as it is asked for, and waits for `go` before the last."""

    def __init__(self, size: int = 1, *, waits: bool = True) -> None:
        self.agent = Agent("count")
        self.go = asyncio.Event()
        self.said = asyncio.Event()
        self.size = size
        if not waits:
            self.go.set()
        self.agent(self._work)

    async def _work(self, turn: Turn) -> AsyncIterator[Any]:
        for number in range(int(turn.text)):
            yield f"{number} ".ljust(self.size, ".")
        self.said.set()
        await self.go.wait()
        yield "end"


def subscribe(task_id: str) -> pb.SubscribeToTaskRequest:
    return pb.SubscribeToTaskRequest(tenant="count", id=task_id)


async def state_of(s: GrpcUnderTest, task_id: str) -> int:
    page = await s.call("ListTasks", pb.ListTasksRequest(tenant="count", page_size=100, history_length=0))
    (state,) = (task.status.state for task in page.tasks if task.id == task_id)
    return int(state)


async def completed(s: GrpcUnderTest, task_id: str) -> None:
    """Wait until the task has ended."""
    with s.http.ledger.watch(TaskId(task_id)) as watch:
        async with asyncio.timeout(BOUND_S):
            while await state_of(s, task_id) != pb.TASK_STATE_COMPLETED:
                await watch.next(BOUND_S)


async def rest_of(stream: Any) -> tuple[list[Any], Any]:
    """What a stream still tells, and how it was refused in the end, if it was."""
    events: list[Any] = []
    try:
        async with asyncio.timeout(BOUND_S):
            while (event := await stream.read()) is not grpc.aio.EOF:
                events.append(event)
    except grpc.aio.AioRpcError as error:
        return events, told_by(error)
    return events, None


async def cursor_of(stream: Any) -> str:
    trailers = dict(await stream.trailing_metadata())
    cursor: str = trailers["last-event-id"]
    return cursor


async def test_every_event_has_its_number_and_the_trailer_has_the_last(tmp_path: Path) -> None:
    async with open_grpc(tmp_path, Counting(waits=False).agent) as s:
        stream = s.stream("SendStreamingMessage", asks("5", "count"))
        events, refused = await rest_of(stream)
        assert refused is None
        numbers = [generation_of(event) for event in events]
        assert numbers == list(range(numbers[0], numbers[0] + len(events)))
        assert await cursor_of(stream) == str(numbers[-1])


async def test_a_stream_is_resumed_after_any_of_its_numbers_without_gap_or_repeat(tmp_path: Path) -> None:
    async with open_grpc(tmp_path, Counting(waits=False).agent) as s:
        whole = await s.streamed("SendStreamingMessage", asks("5", "count"))
        task_id = whole[0].task.id
        resumed: list[Any] = []
        for event in whole:
            number = generation_of(event)
            resumed = await s.streamed("SubscribeToTask", subscribe(task_id), last_event_id=str(number))
            assert kind_of(resumed[0]) == "task"
            assert generation_of(resumed[0]) == number
            assert resumed[1:] == [each for each in whole if generation_of(each) > number]
        assert resumed[0].task == await s.call("GetTask", pb.GetTaskRequest(tenant="count", id=task_id))


@pytest.mark.parametrize("cursor", ["x", "-1", "1.5", "99999", "9" * 19])
async def test_a_cursor_that_is_none_of_the_stream_s_is_refused(tmp_path: Path, cursor: str) -> None:
    async with open_grpc(tmp_path, Counting(waits=False).agent) as s:
        task_id = (await s.call("SendMessage", asks("1", "count"))).task.id
        told = await s.refused("SubscribeToTask", subscribe(task_id), last_event_id=cursor)
        assert (told.code, told.reason) == ("INVALID_ARGUMENT", "INVALID_PARAMS")


async def test_a_caller_that_leaves_ends_its_stream_and_not_the_task(tmp_path: Path) -> None:
    agent = Counting()
    async with open_grpc(tmp_path, agent.agent) as s:
        stream = s.stream("SendStreamingMessage", asks("3", "count"))
        task_id = (await stream.read()).task.id
        await asyncio.wait_for(agent.said.wait(), BOUND_S)
        stream.cancel()
        assert await state_of(s, task_id) == pb.TASK_STATE_WORKING
        agent.go.set()
        await completed(s, task_id)


async def test_sends_whose_callers_leave_at_once_are_done_all_the_same(tmp_path: Path) -> None:
    async with open_grpc(tmp_path, Counting(waits=False).agent) as s:
        for turn in range(30):
            call = s.stub.SendMessage(asks(str(turn % 3), "count"), metadata=s.metadata())
            # Somewhere between being sent and being answered.
            for _ in range(turn):
                await asyncio.sleep(0)
            call.cancel()
        for timeout_s in (0.001, 0.002, 0.004, 0.008):
            call = s.stub.SendMessage(asks("1", "count"), metadata=s.metadata(), timeout=timeout_s)
            await _perhaps(call)
        await s.call("SendMessage", asks("1", "count"))
        page = await s.call("ListTasks", pb.ListTasksRequest(tenant="count", page_size=100))
        for task in page.tasks:
            await completed(s, task.id)
        counts = await s.http.ledger.counts()
        assert (counts.queued, counts.leased) == (0, 0)


async def _perhaps(call: Any) -> None:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # noqa: PT017  some are quick enough


async def test_a_tenant_that_is_disabled_hears_no_more_and_its_task_goes_on(tmp_path: Path) -> None:
    agent = Counting()
    async with open_grpc(tmp_path, agent.agent) as s:
        stream = s.stream("SendStreamingMessage", asks("3", "count"))
        first = await stream.read()
        await asyncio.wait_for(agent.said.wait(), BOUND_S)
        await s.http.tenancy.change(s.http.operator, DEFAULT, disabled=True)
        events, told = await rest_of(stream)
        assert (told.code, told.reason) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
        last = ([first, *events])[-1]
        assert dict(told.trailers)["last-event-id"] == str(generation_of(last))
        assert (await s.refused("SubscribeToTask", subscribe(first.task.id))).code == "UNAUTHENTICATED"
        await s.http.tenancy.change(s.http.operator, DEFAULT, disabled=False)
        agent.go.set()
        cursor = dict(told.trailers)["last-event-id"]
        rest = await s.streamed("SubscribeToTask", subscribe(first.task.id), last_event_id=cursor)
        assert rest[-1].status_update.status.state == pb.TASK_STATE_COMPLETED


async def test_a_caller_that_reads_nothing_is_ended_all_the_same_and_knows_how_far_it_came(tmp_path: Path) -> None:
    agent = Agent("count")
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16_384), *UNLIMITED]

    @agent
    async def work(turn: Turn) -> AsyncIterator[Any]:
        for _ in range(20):
            yield "x" * 100_000

    async with open_grpc(tmp_path, agent) as s:
        task_id = (await s.call("SendMessage", asks("go", "count"))).task.id
        async with grpc.aio.insecure_channel(f"127.0.0.1:{s.server.port}", options=narrow) as channel:
            method = channel.unary_stream(
                "/lf.a2a.v1.A2AService/SubscribeToTask",
                request_serializer=pb.SubscribeToTaskRequest.SerializeToString,
                response_deserializer=pb.StreamResponse.FromString,
            )
            stream = method(subscribe(task_id), metadata=s.metadata(last_event_id="1"))
            await stream.initial_metadata()
            await s.http.tenancy.change(s.http.operator, DEFAULT, disabled=True)
            events, told = await rest_of(stream)
        assert told.code == "UNAUTHENTICATED"
        cursors = [str(generation_of(event)) for event in events[-1:]]
        assert [value for name, value in told.trailers if name == "last-event-id"] == cursors


async def test_a_rotated_token_ends_the_streams_that_it_opened(tmp_path: Path) -> None:
    agent = Counting()
    async with open_grpc(tmp_path, agent.agent) as s:
        token = (await s.http.tenancy.rotate(s.http.operator, DEFAULT)).token
        stream = s.stream("SendStreamingMessage", asks("1", "count"), token)
        await stream.read()
        await asyncio.wait_for(agent.said.wait(), BOUND_S)
        new = (await s.http.tenancy.rotate(s.http.operator, DEFAULT)).token
        _, told = await rest_of(stream)
        assert told.code == "UNAUTHENTICATED"
        assert (await s.refused("ListTasks", pb.ListTasksRequest(tenant="count"), token)).code == "UNAUTHENTICATED"
        assert (await s.call("ListTasks", pb.ListTasksRequest(tenant="count"), new)).total_size == 1


async def test_a_reader_that_is_too_slow_is_cut_off_and_goes_on_where_it_was(tmp_path: Path) -> None:
    agent = Counting(size=200)
    numbers = 4_000
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16_384), *UNLIMITED]
    async with open_grpc(tmp_path, agent.agent) as s:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{s.server.port}", options=narrow) as channel:
            method = channel.unary_stream(
                "/lf.a2a.v1.A2AService/SendStreamingMessage",
                request_serializer=pb.SendMessageRequest.SerializeToString,
                response_deserializer=pb.StreamResponse.FromString,
            )
            stream = method(asks(str(numbers), "count"), metadata=s.metadata())
            first = await stream.read()
            await asyncio.wait_for(agent.said.wait(), BOUND_S)
            agent.go.set()
            await completed(s, first.task.id)
            events, told = await rest_of(stream)
        assert (told.code, told.machine_code, told.retry_s) == ("UNAVAILABLE", "stream_cut", 1.0)
        cursor = dict(told.trailers)["last-event-id"]
        assert cursor == str(generation_of(events[-1]))
        _, *rest = await s.streamed("SubscribeToTask", subscribe(first.task.id), last_event_id=cursor)
        heard = [generation_of(event) for event in (first, *events, *rest)]
        assert heard == list(range(heard[0], heard[0] + len(heard)))
        assert rest[-1].status_update.status.state == pb.TASK_STATE_COMPLETED


async def test_stopping_ends_streams_with_their_cursor_and_lets_sends_be_answered(tmp_path: Path) -> None:
    agent = Counting()
    async with open_grpc(tmp_path, agent.agent) as s:
        stream = s.stream("SendStreamingMessage", asks("2", "count"))
        await stream.read()
        await asyncio.wait_for(agent.said.wait(), BOUND_S)
        sending = asyncio.ensure_future(s.call("SendMessage", asks("1", "count")))
        while (await s.call("ListTasks", pb.ListTasksRequest(tenant="count"))).total_size < 2:
            pass
        stopping = asyncio.create_task(s.server.stop(BOUND_S))
        events, told = await rest_of(stream)
        assert (told.code, told.machine_code) == ("UNAVAILABLE", "stopping")
        assert dict(told.trailers)["last-event-id"] == str(generation_of(events[-1]))
        agent.go.set()
        assert (await asyncio.wait_for(sending, BOUND_S)).task.status.state == pb.TASK_STATE_COMPLETED
        await asyncio.wait_for(stopping, BOUND_S)


async def test_a_server_that_has_stopped_leaves_its_port_to_others(tmp_path: Path) -> None:
    async with open_grpc(tmp_path / "one", Counting().agent) as s:
        port = s.server.port
        with pytest.raises(OSError, match=str(port)):
            type(s.server)(bind_addr="127.0.0.1", port=port, message_bytes_max=1 << 20, calls_max=1)
