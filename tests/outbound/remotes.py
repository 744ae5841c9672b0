"""Remote agents written by hand, to misbehave: each says over a real socket exactly what a test makes it say."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from covenant.daemon.connect import RemoteConnection, connect
from covenant.outbound.call_errors import RemoteTimedOut
from tests.outbound.http_servers import HERE, Answer, Request, Served, http_server, reply
from tests.waits import LONGER_S

TASK = "task-1"
CONTEXT = "context-1"
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


@dataclass
class Called:
    """One call of the remote, and how to answer it."""

    request: Request
    writer: asyncio.StreamWriter
    method: str
    params: dict[str, Any]
    headers: Mapping[str, str]

    def result(self, value: Any) -> None:
        self.answer({"jsonrpc": "2.0", "id": 1, "result": value})

    def error(self, code: int, message: str = "no") -> None:
        self.answer({"jsonrpc": "2.0", "id": 1, "error": {"code": code, "message": message}})

    def answer(self, value: Any, status: int = 200, **headers: str) -> None:
        self.writer.write(reply(status, json.dumps(value).encode(), content_type="application/json", **headers))

    def open(self) -> None:
        self.writer.write(EVENTS)

    def frame(self, value: Any, number: int | None = None) -> None:
        data = json.dumps({"jsonrpc": "2.0", "id": 1, "result": value})
        head = f"id: {number}\n" if number is not None else ""
        self.writer.write(f"{head}data: {data}\n\n".encode())

    async def close(self) -> None:
        await self.writer.drain()
        self.writer.close()


def task(state: str = "WORKING", text: str = "", made: str = "", **more: Any) -> dict[str, Any]:
    status: dict[str, Any] = {"state": f"TASK_STATE_{state}"}
    if text:
        status["message"] = {"messageId": "m", "role": "ROLE_AGENT", "parts": [{"text": text}]}
    said = {"id": TASK, "contextId": CONTEXT, "status": status, **more}
    if made:
        said["artifacts"] = [{"artifactId": "a", "parts": [{"text": made}]}]
    return said


def status(state: str, text: str = "") -> dict[str, Any]:
    return {"statusUpdate": {"taskId": TASK, "contextId": CONTEXT, "status": task(state, text)["status"]}}


def chunk(text: str, *, append: bool = True) -> dict[str, Any]:
    artifact = {"artifactId": "a", "parts": [{"text": text}]}
    return {"artifactUpdate": {"taskId": TASK, "contextId": CONTEXT, "artifact": artifact, "append": append}}


Behaviour = Callable[[Called], Awaitable[None] | None]


@dataclass
class HandMade:
    served: Served
    methods: list[str] = field(default_factory=list)
    calls: list[Called] = field(default_factory=list)
    canceled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return self.served.url("/rpc")

    def connect(self, **options: Any) -> RemoteConnection:
        return connect(self.served.url(""), **{"allow_private": (HERE,), "poll_s": 0.01, "timeout_s": 10.0, **options})


def card(url: str, *, streaming: bool = True, **more: Any) -> dict[str, Any]:
    way = {"url": url, "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}
    return {
        "name": "Hand",
        "version": "1",
        "supportedInterfaces": [way],
        "capabilities": {"streaming": streaming},
        **more,
    }


@asynccontextmanager
async def hand_made(
    behave: Behaviour, *, streaming: bool = True, made: Callable[[str], Any] | None = None, stops: bool = True
) -> AsyncIterator[HandMade]:
    """`behave` is asked for every call but, if it `stops`, CancelTask; `made` makes the card from the agent's URL."""
    remote: HandMade

    async def speak(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.method == "GET":
            made_card = made(remote.url) if made is not None else card(remote.url, streaming=streaming)
            body = made_card if isinstance(made_card, bytes) else json.dumps(made_card).encode()
            writer.write(reply(200, body) if request.target.endswith("agent-card.json") else reply(404))
            return
        body = json.loads(request.body)
        called = Called(request, writer, body["method"], body["params"], request.headers)
        remote.methods.append(called.method)
        remote.calls.append(called)
        if stops and called.method in ("CancelTask", "tasks/cancel"):
            remote.canceled.set()
            called.result(task("CANCELED"))
            return
        done = behave(called)
        if done is not None:
            await done

    answer: Answer = speak
    async with http_server(answer) as served:
        remote = HandMade(served)
        yield remote


async def timed_out(
    send: Callable[[float], Awaitable[object]], known: Callable[[], bool] = lambda: True
) -> RemoteTimedOut:
    """How a call fails when its time is over, once it had time enough for its task to be known."""
    for timeout_s in LONGER_S:
        with pytest.raises(RemoteTimedOut) as raised:
            await send(timeout_s)
        if raised.value.task_id is not None and known():
            return raised.value
    pytest.fail("the task was not known in all that time")
