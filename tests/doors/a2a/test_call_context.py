"""What a caller says of the calls before its own is checked on arrival, by whichever door and dialect it comes."""

from pathlib import Path
from typing import Any, NamedTuple

import grpc  # type: ignore[import-untyped]
import pytest
from google.protobuf.struct_pb2 import Struct

from covenant.agents.api import Agent, Turn
from covenant.model.ids import TaskId
from covenant.model.task import Task
from covenant.model.task_view import fold
from tests.doors.a2a.a2a_under_test import A2AUnderTest
from tests.doors.a2a.grpc_under_test import GrpcUnderTest, asks, open_grpc, told_by

agent = Agent("echo")
HEADERS = {"depth": "covenant-depth", "chain": "covenant-chain", "deadline_ms": "covenant-deadline-ms"}


@agent
async def echo(turn: Turn) -> str:
    return f"depth {turn.task.depth}"


class Outcome(NamedTuple):
    code: str
    task_id: str = ""


async def called(
    s: GrpcUnderTest, door: str, hop: dict[str, Any], *, by: str, key: str = "", trace: str = ""
) -> Outcome:
    """Send a message through a door, with its hop in the metadata or in headers; the machine code, or the task."""
    metadata = {f"covenant.{name}": value for name, value in hop.items()} if by == "metadata" else {}
    if trace:
        metadata["traceparent"] = trace
    headers = {
        HEADERS[name]: ",".join(value) if isinstance(value, list) else str(value)
        for name, value in (hop if by == "headers" else {}).items()
    }
    if key:
        headers["idempotency-key"] = key
    if door == "grpc":
        return await _grpc(s, metadata, headers)
    message: dict[str, Any] = {
        "messageId": "m",
        "parts": [{"text": "x"}],
        **({"metadata": metadata} if metadata else {}),
    }
    if door == "rest":
        return await _rest(s.http, {**message, "role": "ROLE_USER"}, headers)
    method, role = ("SendMessage", "ROLE_USER") if door == "rpc" else ("message/send", "user")
    if door == "slash":
        message |= {"kind": "message", "parts": [{"kind": "text", "text": "x"}]}
    named = {name.replace("-", "_"): value for name, value in headers.items()}
    answer = await s.http.rpc("echo", method, {"message": {**message, "role": role}}, **named)
    if "error" in answer:
        return Outcome(answer["error"]["data"][0]["metadata"]["code"])
    result = answer["result"]
    return Outcome("ok", result.get("task", result)["id"])


async def _rest(http: A2AUnderTest, message: dict[str, Any], headers: dict[str, str]) -> Outcome:
    bearer = {"authorization": f"Bearer {http.token}", "a2a-version": "1.0"}
    answer = await http.http.post(
        f"{http.url('echo')}/message:send", json={"message": message}, headers={**bearer, **headers}
    )
    body = answer.json()
    if answer.status_code != 200:
        return Outcome(body["error"]["details"][0]["metadata"]["code"])
    return Outcome("ok", body["task"]["id"])


async def _grpc(s: GrpcUnderTest, metadata: dict[str, Any], headers: dict[str, str]) -> Outcome:
    said = Struct()
    said.update(metadata)
    request = asks("x", "echo", metadata=said)
    named = {name.replace("-", "_"): value for name, value in headers.items()}
    try:
        answer = await s.call("SendMessage", request, **named)
    except grpc.aio.AioRpcError as error:
        return Outcome(told_by(error).machine_code)
    return Outcome("ok", answer.task.id)


async def task_of(s: GrpcUnderTest, task_id: str) -> Task:
    view = fold(await s.http.ledger.steps(TaskId(task_id), 0, 100))
    assert view is not None
    return view.task


@pytest.mark.parametrize("by", ["metadata", "headers"])
@pytest.mark.parametrize("door", ["rpc", "slash", "rest", "grpc"])
async def test_what_is_too_deep_or_comes_back_is_refused_and_the_rest_is_kept(
    tmp_path: Path, door: str, by: str
) -> None:
    async with open_grpc(tmp_path, agent) as s:
        me = s.http.catalogue.identity("default", "echo").pubkey
        deadline_ms = s.http.ledger.now_ms() + 60_000
        hop = {"depth": 3, "chain": ["somebody", "else", "before"], "deadline_ms": deadline_ms}
        outcome = await called(s, door, hop, by=by)
        assert outcome.code == "ok"
        task = await task_of(s, outcome.task_id)
        assert (task.depth, task.chain, task.deadline_ms) == (3, ("somebody", "else", "before"), deadline_ms)
        assert 0 < (task.timeout_ms or 0) <= 60_000
        assert (await called(s, door, {"depth": 4, "chain": ["somebody"]}, by=by)).code == "depth_exceeded"
        assert (await called(s, door, {"depth": 1, "chain": ["x", me]}, by=by)).code == "loop_detected"
        assert (await called(s, door, {"depth": 1, "deadline_ms": 1}, by=by)).code == "deadline_past"


async def test_the_same_message_by_another_way_is_the_same_and_at_another_depth_it_is_not(tmp_path: Path) -> None:
    async with open_grpc(tmp_path, agent) as s:
        first = await called(s, "rpc", {"depth": 1}, by="metadata", key="k", trace="00-" + "1" * 32 + "-2-01")
        again = await called(s, "rpc", {"depth": 1}, by="metadata", key="k", trace="00-" + "3" * 32 + "-4-01")
        by_headers = await called(s, "rpc", {"depth": 1}, by="headers", key="k")
        deeper = await called(s, "rpc", {"depth": 2}, by="headers", key="k")
        assert (again, by_headers) == (first, first)
        assert deeper.code == "idempotency_key_reused"
