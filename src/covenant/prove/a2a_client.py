"""A small A2A client that uses only the specification: an outsider's view of the server under test."""

from __future__ import annotations

import asyncio
import itertools
import socket
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, Self

import httpx2

from covenant.prove.protocol import (
    EventSeen,
    Interface,
    ServerRefused,
    TaskSeen,
    Unreadable,
    build_configuration,
    build_message,
    build_request,
    read_answer,
    read_event,
    read_object,
    read_objects,
    read_task,
)

EVENT_BYTES_MAX: Final = 64 * 1024 * 1024


class ServerUnreachable(Exception):
    """The connection was refused or broke, or no answer came in time."""


class Client:
    """`headers` go with every call. `wait_s`: the longest wait for any answer of the server."""

    def __init__(
        self, interface: Interface, headers: Mapping[str, str], wait_s: float, receive_bytes: int | None = None
    ) -> None:
        self.interface = interface
        self.headers = dict(headers)
        self._wait_s = wait_s
        self._options = [] if receive_bytes is None else [(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)]
        self._numbers = itertools.count(1)
        self._http = self._open()

    def _open(self) -> httpx2.AsyncClient:
        limits = httpx2.Limits(max_connections=64, max_keepalive_connections=32)
        transport = httpx2.AsyncHTTPTransport(limits=limits, socket_options=self._options, trust_env=False)
        return httpx2.AsyncClient(timeout=self._wait_s, transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def reset(self) -> None:
        """Drops every connection: the process at the other end is gone."""
        await self._http.aclose()
        self._http = self._open()

    def with_interface(self, interface: Interface) -> Client:
        """The same caller with another version or binding."""
        return Client(interface, self.headers, self._wait_s)

    def with_receive_buffer(self, receive_bytes: int) -> Client:
        """The same caller with a small receive buffer: the server soon notices that it does not read."""
        return Client(self.interface, self.headers, self._wait_s, receive_bytes)

    async def send(
        self,
        text: str,
        *,
        task: TaskSeen | None = None,
        waits: bool = False,
        message_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        push: dict[str, str] | None = None,
    ) -> EventSeen:
        """Sends a message and returns the answer: a task, or a bare message."""
        params = self._message(text, task=task, waits=waits, message_id=message_id, push=push)
        return read_event(await self._call("send", params, headers))

    async def begin(self, text: str, **more: Any) -> TaskSeen:
        """Sends a message and returns its task. A bare message as the answer acknowledges no task, and is refused."""
        answer = await self.send(text, **more)
        if answer.task is None:
            raise ServerRefused(-32004, "the server answered by a bare message, and has no task to ask for")
        return answer.task

    async def get(self, task_id: str) -> TaskSeen:
        return _read_task(await self._call("get", {"id": task_id}))

    async def cancel(self, task_id: str) -> TaskSeen:
        return _read_task(await self._call("cancel", {"id": task_id}))

    async def list_page(self, page_size: int, token: str = "") -> tuple[list[TaskSeen], str]:
        params: dict[str, Any] = {"pageSize": page_size}
        if token:
            params["pageToken"] = token
        result = await self._call("list", params)
        tasks = read_objects("the tasks of a page", result.get("tasks"))
        return [read_task(task) for task in tasks], str(result.get("nextPageToken") or "")

    @asynccontextmanager
    async def stream(self, text: str, *, push: dict[str, str] | None = None) -> AsyncIterator[AsyncIterator[EventSeen]]:
        params = self._message(text, task=None, waits=True, message_id=None, push=push)
        async with self._events("stream", params, {}) as events:
            yield events

    @asynccontextmanager
    async def subscribe(self, task_id: str, last_event_id: str = "") -> AsyncIterator[AsyncIterator[EventSeen]]:
        headers = {"last-event-id": last_event_id} if last_event_id else {}
        async with self._events("subscribe", {"id": task_id}, headers) as events:
            yield events

    def _message(
        self, text: str, *, task: TaskSeen | None, waits: bool, message_id: str | None, push: dict[str, str] | None
    ) -> dict[str, Any]:
        version, binding = self.interface.version, self.interface.binding
        return {
            "message": build_message(version, binding, message_id or str(uuid.uuid4()), text, task),
            "configuration": build_configuration(version, waits=waits, push=push),
        }

    async def _call(
        self, name: str, params: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        out = build_request(self.interface, name, params, {**self.headers, **(headers or {})}, next(self._numbers))
        try:
            async with asyncio.timeout(self._wait_s):
                answer = await self._http.request(
                    out.verb, out.url, content=out.body, headers=out.headers, params=out.query or None
                )
        except (httpx2.HTTPError, TimeoutError) as error:
            raise ServerUnreachable(f"{name}: {type(error).__name__} {error}".strip()) from None
        except httpx2.InvalidURL:
            raise Unreadable("the address of an interface", out.url) from None
        return read_answer(self.interface, answer.status_code, answer.content)

    @asynccontextmanager
    async def _events(
        self, name: str, params: dict[str, Any], headers: Mapping[str, str]
    ) -> AsyncIterator[AsyncIterator[EventSeen]]:
        out = build_request(self.interface, name, params, {**self.headers, **headers}, next(self._numbers))
        try:
            async with self._http.stream(
                out.verb, out.url, content=out.body, headers=out.headers, params=out.query or None
            ) as answer:
                if "text/event-stream" not in answer.headers.get("content-type", ""):
                    read_answer(self.interface, answer.status_code, await answer.aread())
                    raise ServerRefused(answer.status_code, f"{name}: the answer is no stream")
                yield self._read_events(answer)
        except httpx2.HTTPError as error:
            raise ServerUnreachable(f"{name}: {type(error).__name__} {error}".strip()) from None
        except httpx2.InvalidURL:
            raise Unreadable("the address of an interface", out.url) from None

    async def _read_events(self, answer: httpx2.Response) -> AsyncIterator[EventSeen]:
        """Yields events until the stream ends or breaks."""
        number, data, size = "", [], 0
        try:
            async for line in answer.aiter_lines():
                size += len(line)
                if size > EVENT_BYTES_MAX:
                    raise ServerRefused(0, f"an event of more than {EVENT_BYTES_MAX} bytes")
                if line.startswith("id:"):
                    number = line[3:].strip()
                elif line.startswith("data:"):
                    data.append(line[5:].removeprefix(" "))
                elif not line and data:
                    yield self._read_event("\n".join(data).encode(), number)
                    data, size = [], 0
        except httpx2.HTTPError as error:
            raise ServerUnreachable(f"the stream broke: {type(error).__name__}") from None

    def _read_event(self, data: bytes, number: str) -> EventSeen:
        try:
            return read_event(read_answer(self.interface, 200, data), number)
        except ServerRefused as refused:
            return EventSeen("error", number, text=str(refused))


def _read_task(result: dict[str, Any]) -> TaskSeen:
    """The task, which is the result itself or a field of it."""
    found = read_event({"task": result.get("task") or result}).task
    assert found is not None
    return found


async def fetch_object(what: str, url: str, headers: Mapping[str, str], wait_s: float) -> dict[str, Any]:
    """Raises `ServerUnreachable` if the server is not there, `ServerRefused` if it has no such object."""
    try:
        async with httpx2.AsyncClient(timeout=wait_s, trust_env=False) as http:
            answer = await http.get(url, headers=dict(headers))
    except httpx2.HTTPError as error:
        raise ServerUnreachable(f"{type(error).__name__} {error}".strip()) from None
    if answer.status_code != 200:
        raise ServerRefused(answer.status_code, answer.text[:200])
    return read_object(what, answer.content)
