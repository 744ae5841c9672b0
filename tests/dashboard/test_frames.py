"""The frame log: what came in and went out for a task, without secrets, within bounds, and only where it is on."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from a2a.types import a2a_pb2
from a2a.types.a2a_pb2_grpc import A2AServiceStub

from covenant.agents.api import Agent
from covenant.doors.http.frame_capture import CapturedExchange, capture_into
from covenant.doors.http.server.http_exchange import HttpExchange
from covenant.exchange import frame_log
from covenant.exchange.frame_log import CapturedCall, FrameLog
from covenant.ledger.contract.retention import EraseTasks
from covenant.model.ids import TaskId
from tests.daemon_under_test import open_daemon_under_test
from tests.dashboard.browser import asking_agent, leave_stuck, new_viewer, open_browser, send_task
from tests.doors.clients import Ipc
from tests.outbound.sdk_servers import GRPC_1, JSONRPC_1, sdk_server
from tests.waits import until

ON: Any = {"frame_bytes_max": 1024 * 1024}
TASK = TaskId("11111111-1111-4111-8111-111111111111")
OTHER = TaskId("22222222-2222-4222-8222-222222222222")


async def test_the_frames_of_a_task_are_kept_without_the_token(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home", asking_agent(), log=ON) as daemon:
        task = await send_task(daemon, "paint it with password=hunter2hunter2")
        for token in (daemon.token, await new_viewer(daemon)):
            async with open_browser(daemon, token) as browser:
                assert (await browser.read("session"))["frames"]
                shown = await browser.read(f"a2a/tasks/{task['id']}/frames")
                asked, told = shown["frames"]
                assert (shown["kind"], shown["on"]) == ("a2a_frames", True)
                assert (asked["direction"], asked["door"], asked["what"]) == ("in", "a2a", "POST /v1/a2a/agents/teller")
                assert "paint it" in asked["text"]
                assert (told["direction"], told["what"]) == ("out", "200")
                assert json.loads(told["text"])["result"]["task"]["id"] == task["id"]
                text = json.dumps(shown)
                assert daemon.token not in text
                assert "hunter2hunter2" not in text
        async with open_browser(daemon, await daemon.add_tenant("acme")) as tenant:
            answer = await tenant.api("GET", f"a2a/tasks/{task['id']}/frames")
            assert (answer.status_code, answer.json()["code"]) == (403, "role_forbidden")
            assert not (await tenant.read("session"))["frames"]


async def test_streams_the_mailbox_and_rest_are_kept_too(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home", asking_agent(), log=ON) as daemon:
        message = {"message": {"messageId": "m1", "role": "ROLE_USER", "parts": [{"text": "blue"}]}}
        streamed = await daemon.ask("POST", "/v1/a2a/agents/teller/message:stream", json=message)
        first = json.loads(next(line[6:] for line in streamed.text.splitlines() if line.startswith("data: ")))
        stuck = await leave_stuck(daemon)
        await daemon.ask("GET", f"/v1/a2a/agents/teller/tasks/{first['task']['id']}")
        async with open_browser(daemon, daemon.token) as browser:
            of_stream = (await browser.read(f"a2a/tasks/{first['task']['id']}/frames"))["frames"]
            assert [frame["what"].split()[0] for frame in of_stream] == ["POST", "200", "GET", "200"]
            assert "data: " in of_stream[1]["text"]
            of_mailbox = (await browser.read(f"a2a/tasks/{stuck.task_id}/frames"))["frames"]
            assert [frame["what"] for frame in of_mailbox] == ["POST /a2a/tasks", "200", "GET /a2a/tasks/next", "200"]
            assert {frame["door"] for frame in of_mailbox} == {"mailbox"}


async def test_what_an_agent_calls_elsewhere_is_kept_with_its_task(short_path: Path) -> None:
    async with sdk_server(JSONRPC_1) as server:
        allowed = {"allow": ("127.0.0.1",)}
        async with open_daemon_under_test(short_path / "home", log=ON, outbound=allowed) as daemon:
            definition = {"id": "far", "kind": "remote", "url": server.url("/rpc")}
            added = await daemon.ask("POST", "/v1/admin/tenants/default/agents", json={"agent_def": definition})
            assert added.status_code == 201, added.text
            task = await send_task(daemon, "hello", agent="far")
            async with open_browser(daemon, daemon.token) as browser:
                frames = (await browser.read(f"a2a/tasks/{task['id']}/frames"))["frames"]
            called = [frame for frame in frames if frame["door"] == "remote"]
            assert any("echo: hello" in frame["text"] for frame in called if frame["direction"] == "in")
            assert any(frame["what"] == f"POST {server.url('/rpc')}" for frame in called)


async def test_calls_over_grpc_are_kept_both_ways(short_path: Path) -> None:
    allowed, served = {"allow": ("127.0.0.1",)}, {"enabled": True}
    async with (
        sdk_server(GRPC_1) as server,
        open_daemon_under_test(short_path / "home", echo(), log=ON, outbound=allowed, grpc=served) as daemon,
    ):
        definition = {"id": "far", "kind": "remote", "url": server.url("/")}
        added = await daemon.ask("POST", "/v1/admin/tenants/default/agents", json={"agent_def": definition})
        assert added.status_code == 201, added.text
        async with grpc.aio.insecure_channel(f"127.0.0.1:{daemon.grpc_port}") as channel:
            call = A2AServiceStub(channel)  # type: ignore[no-untyped-call]
            message = a2a_pb2.Message(message_id="m", role="ROLE_USER", parts=[a2a_pb2.Part(text="hello")])
            metadata = (("authorization", f"Bearer {daemon.token}"), ("a2a-version", "1.0"))
            asked = a2a_pb2.SendMessageRequest(message=message, tenant="far")
            task_id = (await call.SendMessage(asked, metadata=metadata)).task.id
            asked = a2a_pb2.SendMessageRequest(message=message, tenant="echo")
            streamed = [event async for event in call.SendStreamingMessage(asked, metadata=metadata)]
        async with open_browser(daemon, daemon.token) as browser:
            frames = (await browser.read(f"a2a/tasks/{task_id}/frames"))["frames"]
            of_stream = (await browser.read(f"a2a/tasks/{streamed[0].task.id}/frames"))["frames"]
        came = [frame for frame in frames if frame["door"] == "a2a"]
        assert [(frame["direction"], frame["what"]) for frame in came] == [("in", "gRPC SendMessage"), ("out", "OK")]
        assert "hello" in came[0]["text"]
        assert json.loads(came[1]["text"])["task"]["id"] == task_id
        went = [frame for frame in frames if frame["door"] == "remote" and frame["what"].startswith("gRPC ")]
        assert went
        assert any("echo: hello" in frame["text"] for frame in frames if frame["direction"] == "in")
        assert len(of_stream[1]["text"].splitlines()) == len(streamed)
        assert daemon.token not in json.dumps([frames, of_stream])


async def test_calls_over_the_local_socket_are_kept(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home", log=ON) as daemon:
        stuck = await leave_stuck(daemon)
        async with Ipc(daemon.socket) as connection:
            await connection.authenticate(daemon.token)
            for kind in ("show_a2a_task", "cancel_a2a_task"):
                answer = await connection.ask(kind, task_id=stuck.task_id, reason="r")
                assert answer["kind"] != "error", answer
        async with open_browser(daemon, daemon.token) as browser:
            frames = (await browser.read(f"a2a/tasks/{stuck.task_id}/frames"))["frames"]
        of_socket = [frame for frame in frames if frame["door"] == "socket"]
        assert [frame["what"] for frame in of_socket] == [f"cancel_a2a_task {stuck.task_id}", "answer"]
        assert daemon.token not in json.dumps(frames)


async def test_a_task_that_retention_erases_leaves_no_frame(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home", asking_agent(), log=ON) as daemon:
        task = await send_task(daemon, "blue")
        frames, ledger = daemon.daemon.base.telemetry.frames, daemon.daemon.base.storage.ledger
        assert frames is not None
        assert len((await frames.read(task["id"])).frames) == 2
        assert await ledger.steps(task["id"], 0, 1), "it is in the archive"
        which = EraseTasks(tenant="default", before_ms=ledger.now_ms() + 60_000)
        assert (await ledger.erase_tasks(which)).tasks == 1
        assert (await frames.read(task["id"])).frames == ()
        await asyncio.to_thread(until, lambda: frames.bytes == 0)


async def test_where_it_is_off_nothing_is_kept_and_the_server_makes_plain_exchanges(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home", asking_agent()) as daemon:
        task = await send_task(daemon, "blue")
        assert daemon.daemon.doors.http.new_exchange is HttpExchange
        assert daemon.daemon.base.telemetry.frames is None
        async with open_browser(daemon, daemon.token) as browser:
            shown = await browser.read(f"a2a/tasks/{task['id']}/frames")
            assert (shown["on"], shown["frames"]) == (False, [])
            assert not (await browser.read("session"))["frames"]


async def test_a_curious_tenant_puts_nothing_into_the_frames_of_another(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home", asking_agent(), log=ON) as daemon:
        token = await daemon.add_tenant("acme", echo())
        task = await send_task(daemon, "blue")
        named = {
            "id": task["id"],
            "taskId": task["id"],
            "task_id": task["id"],
            "status": {},
            "task": {"id": task["id"]},
        }
        parts = [{"data": named}, {"text": json.dumps(named)}]
        message = {"messageId": task["id"], "role": "ROLE_USER", "parts": parts, "metadata": named}
        for params in ({"message": message}, {"message": {**message, "taskId": task["id"]}}, {"id": task["id"]}):
            for method in ("SendMessage", "GetTask", "CancelTask"):
                body = {"jsonrpc": "2.0", "id": task["id"], "method": method, "params": params}
                await daemon.ask("POST", "/v1/a2a/agents/echo", token=token, json=body, headers={"A2A-Version": "1.0"})
        await daemon.ask("GET", f"/v1/a2a/agents/echo/tasks/{task['id']}", token=token)
        async with open_browser(daemon, daemon.token) as browser:
            frames = (await browser.read(f"a2a/tasks/{task['id']}/frames"))["frames"]
        assert len(frames) == 2


async def test_a_tenant_that_is_removed_leaves_no_frame(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home", log=ON) as daemon:
        token = await daemon.add_tenant("acme", asking_agent())
        task = await send_task(daemon, "blue", token=token)
        frames = daemon.daemon.base.telemetry.frames
        assert frames is not None
        assert len((await frames.read(task["id"])).frames) == 2
        asked = {"dry_run": False, "reason": "they left", "cancel_live": True, "wait_ms": 20_000}
        removed = await daemon.ask("POST", "/v1/admin/tenants/acme/removal", json=asked)
        assert removed.json()["done"], removed.text
        assert (await frames.read(task["id"])).frames == ()


async def test_frames_of_tasks_that_are_gone_are_forgotten_and_their_room_is_free() -> None:
    there = {TASK, OTHER}

    async def belongs(task_id: TaskId) -> object | None:
        return task_id if task_id in there else None

    log = FrameLog(lambda: 1, bytes_max=10_000, find_task=belongs)
    call(log, TASK).ended()
    call(log, OTHER).ended()
    there.discard(TASK)
    await log.forget_unknown()
    there.add(TASK)
    assert (await log.read(TASK)).frames == ()
    assert len((await log.read(OTHER)).frames) == 2


def echo() -> Agent:
    agent = Agent("echo")

    @agent
    async def answer(turn: Any) -> Any:
        return turn.text

    return agent


def call(log: FrameLog, task_id: str, size: int = 10) -> CapturedCall:
    made = CapturedCall(log, "in", "a2a", "POST /v1/a2a/agents/x", {})
    made.sent(b"x" * size)
    made.answered(200, {})
    made.received(json.dumps({"task_id": task_id}).encode())
    return made


async def everything(_: TaskId) -> object:
    return True


async def test_frames_are_bounded_for_a_task_for_all_and_while_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    log = FrameLog(lambda: 1, bytes_max=300_000, find_task=everything)
    for _ in range(frame_log.TASK_FRAMES_MAX):
        call(log, TASK).ended()
    kept = await log.read(TASK)
    assert (len(kept.frames), kept.left_out) == (frame_log.TASK_FRAMES_MAX, frame_log.TASK_FRAMES_MAX)
    large = call(log, OTHER, 10 * frame_log.CAPTURED_BYTES_MAX)
    large.ended()
    frames = (await log.read(OTHER)).frames
    assert (len(frames[0].text), frames[0].truncated) == (frame_log.CAPTURED_BYTES_MAX, True)
    for _ in range(4):
        call(log, OTHER, frame_log.CAPTURED_BYTES_MAX).ended()
    assert (await log.read(TASK)).frames == (), "the task that was added to the longest time ago goes first"
    for _ in range(frame_log.WAITING_MAX + 5):
        call(log, TASK).ended()
    assert (await log.read(TASK)).lost == 5
    monkeypatch.setattr(frame_log, "TASKS_MAX", 1)
    call(log, TASK).ended()
    await log.read(TASK)
    assert (await log.read(OTHER)).frames == ()


async def test_a_call_that_names_no_task_of_ours_is_not_kept() -> None:
    async def nothing(_: TaskId) -> None:
        return None

    log = FrameLog(lambda: 1, bytes_max=300_000, find_task=nothing)
    call(log, TASK).ended()
    hostile = (b"", b"{", b"[" * 100_000, b"data: 7", json.dumps({"task_id": [TASK], "result": {"result": 7}}).encode())
    for said in hostile:
        made = call(log, TASK)
        made.answer[:] = said
        made.ended()
    assert (await log.read(TASK)).frames == ()


def test_only_doors_that_tasks_come_through_are_captured() -> None:
    new = capture_into(FrameLog(lambda: 1, bytes_max=1, find_task=everything))
    for path, captured in {"/v1/a2a/agents/x": True, "/ui/api/a2a/tasks": False, "/a2a/tasks/x/show": False}.items():
        scope: Any = {"method": "GET", "path": path, "headers": []}
        made = new(None, scope, True, False)  # type: ignore[arg-type]  # no connection is needed to be made
        assert isinstance(made, CapturedExchange) == captured
