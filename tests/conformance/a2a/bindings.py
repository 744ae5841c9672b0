"""A binding as a client sees it: the same verbs with the same answers, whichever of them is spoken.

A refusal is `Refused`, whose name is the same on every binding; that its code is
the one that the specification gives to this name, and that its details say so, is checked wherever one is raised.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Self

import httpx2

from tests.conformance.a2a import client_answers
from tests.conformance.a2a.client_answers import Frame, Page, Part, Said, Told

ERROR_INFO: Final = "type.googleapis.com/google.rpc.ErrorInfo"
DOMAIN: Final = "a2a-protocol.org"

CODES: Final = {
    # The name: its code to 1.0's methods, to the slash methods, its status on REST, and on gRPC.
    "TASK_NOT_FOUND": (-32001, -32001, 404, "NOT_FOUND"),
    "TASK_NOT_CANCELABLE": (-32002, -32002, 400, "FAILED_PRECONDITION"),
    "PUSH_NOTIFICATION_NOT_SUPPORTED": (-32003, -32004, 400, "FAILED_PRECONDITION"),
    "UNSUPPORTED_OPERATION": (-32004, -32004, 400, "FAILED_PRECONDITION"),
    "CONTENT_TYPE_NOT_SUPPORTED": (-32005, -32005, 400, "INVALID_ARGUMENT"),
    "EXTENDED_AGENT_CARD_NOT_CONFIGURED": (-32007, -32007, 400, "FAILED_PRECONDITION"),
    "EXTENSION_SUPPORT_REQUIRED": (-32008, -32008, 400, "FAILED_PRECONDITION"),
    "VERSION_NOT_SUPPORTED": (-32009, -32007, 400, "FAILED_PRECONDITION"),
    "INVALID_JSON": (-32700, -32700, 400, "INVALID_ARGUMENT"),
    "INVALID_REQUEST": (-32600, -32600, 400, "INVALID_ARGUMENT"),
    "METHOD_NOT_FOUND": (-32601, -32601, 404, "NOT_FOUND"),
    "INVALID_PARAMS": (-32602, -32602, 400, "INVALID_ARGUMENT"),
    "IDEMPOTENCY_KEY_REUSED": (-32602, -32602, 409, "ALREADY_EXISTS"),
    "REQUEST_TOO_LARGE": (-32600, -32600, 413, "RESOURCE_EXHAUSTED"),
    # These never ride on 200: who is refused so has not made a call yet, or must wait as every HTTP client can.
    "UNAUTHENTICATED": (None, None, 401, "UNAUTHENTICATED"),
    "RESOURCE_EXHAUSTED": (None, None, 429, "RESOURCE_EXHAUSTED"),
}
BY_STATUS: Final = {401: "UNAUTHENTICATED", 413: "REQUEST_TOO_LARGE", 429: "RESOURCE_EXHAUSTED"}


class Refused(Exception):
    def __init__(self, name: str, message: str, details: list[dict[str, Any]] | None = None) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name
        self.message = message
        self.details = details or []

    @property
    def fields(self) -> list[str]:
        return [each["field"] for detail in self.details for each in detail.get("fieldViolations", ())]


@dataclass(frozen=True, kw_only=True)
class Words:
    """A message as a test says it. A string is a part of text."""

    parts: tuple[str | Part, ...] = ("hello",)
    message_id: str = "m-1"
    role: str = "user"
    task: str | None = None
    context: str | None = None
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] = ()
    references: tuple[str, ...] = ()

    @property
    def all_parts(self) -> tuple[Part, ...]:
        return tuple(Part("text", part) if isinstance(part, str) else part for part in self.parts)


def words(*parts: str | Part, **more: Any) -> Words:
    return Words(parts=parts, **more)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What goes with a message."""

    message: Words
    blocking: bool | None = None
    history: int | None = None
    modes: tuple[str, ...] = ()
    metadata: dict[str, Any] | None = None
    push: dict[str, Any] | None = None


Reply = httpx2.Response


@dataclass(frozen=True, kw_only=True)
class Binding:
    """A client of one agent, with one token. `with_` makes another."""

    base_url: str
    http: httpx2.AsyncClient
    agent: str
    token: str | None
    headers: dict[str, str] = field(default_factory=dict)
    channel: Any = None
    """Where it is not HTTP that is spoken."""

    old = False
    """Whether it speaks the dialect before 1.0."""

    def with_(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def saying(self, **headers: str) -> Self:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return replace(self, headers={**self.headers, **named})

    @property
    def url(self) -> str:
        return f"{self.base_url}/v1/a2a/agents/{self.agent}"

    def _headers(self, **more: str) -> dict[str, str]:
        own = {} if self.token is None else {"authorization": f"Bearer {self.token}"}
        return {**own, **self.headers, **{name.replace("_", "-"): value for name, value in more.items()}}

    async def send(self, message: Words | str, **more: Any) -> Told | Said:
        return self._sent(await self.answer("send", self.params_send(ask_of(message, more))))

    async def task(self, message: Words | str, **more: Any) -> Told:
        """A send that is answered with a task."""
        told = await self.send(message, **more)
        assert isinstance(told, Told), told
        return told

    async def get(self, task_id: str, history: int | None = None) -> Told:
        params = {"id": task_id} if history is None else {"id": task_id, "historyLength": history}
        return self._task(await self.answer("get", params))

    async def page(self, **params: Any) -> Page:
        return self._page(await self.answer("list", params))

    async def cancel(self, task_id: str) -> Told:
        return self._task(await self.answer("cancel", {"id": task_id}))

    def stream(self, message: Words | str, **more: Any) -> AbstractAsyncContextManager[AsyncIterator[Frame]]:
        return self.frames("stream", self.params_send(ask_of(message, more)))

    def subscribe(
        self, task_id: str, after: int | str | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Frame]]:
        said = self if after is None else self.saying(last_event_id=str(after))
        return said.frames("subscribe", {"id": task_id})

    async def streamed(self, message: Words | str, **more: Any) -> list[Frame]:
        async with self.stream(message, **more) as frames:
            return [frame async for frame in frames]

    async def followed(self, task_id: str, after: int | str | None = None) -> list[Frame]:
        async with self.subscribe(task_id, after) as frames:
            return [frame async for frame in frames]

    async def push(self, verb: str, task_id: str, config_id: str = "p-1", url: str = "https://example.com/") -> Any:
        """`verb` is create, get, list or delete."""
        return await self.answer(f"push.{verb}", self.params_push(verb, task_id, config_id, url))

    async def card(self) -> Any:
        return await self.answer("card", {})

    async def answer(self, operation: str, params: dict[str, Any]) -> Any:
        """What it was answered with; raises `Refused`."""
        return self.read(await self.ask(operation, params))

    async def bytes_of(self, operation: str, params: dict[str, Any]) -> tuple[int, bytes]:
        """The very answer, for comparing two of them."""
        reply = await self.ask(operation, params)
        return reply.status_code, reply.content

    async def ask(self, operation: str, params: dict[str, Any]) -> Reply:
        raise NotImplementedError

    async def raw(self, body: bytes, operation: str = "send", **headers: str) -> Reply:
        """These bytes, where this operation takes its own."""
        raise NotImplementedError

    def read(self, reply: Reply) -> Any:
        raise NotImplementedError

    def envelope(self, operation: str, params: Any) -> bytes:
        """The body that asks for this."""
        raise NotImplementedError

    def frames(self, operation: str, params: dict[str, Any]) -> AbstractAsyncContextManager[AsyncIterator[Frame]]:
        raise NotImplementedError

    def params_send(self, ask: Ask) -> dict[str, Any]:
        raise NotImplementedError

    def params_push(self, verb: str, task_id: str, config_id: str, url: str) -> dict[str, Any]:
        raise NotImplementedError

    def state(self, name: str) -> str:
        """A state as this dialect spells it."""
        raise NotImplementedError

    def _refused(self, status: int, error: dict[str, Any], details: Any) -> Refused:
        """The name that an error gives itself, checked against its code."""
        assert isinstance(details, list), error
        assert all("@type" in detail for detail in details), details
        (info,) = [detail for detail in details if detail["@type"] == ERROR_INFO]
        assert info["domain"] == DOMAIN
        assert error["message"]
        name = info["reason"]
        for_new, for_old, http, _ = CODES[name]
        if status == 200:
            assert error["code"] == (for_old if self.old else for_new), error
        else:
            assert status == http == error["code"], (status, error)
        return Refused(name, error["message"], details)

    def _plainly(self, reply: Reply) -> Refused:
        """Turned away before there was a call to answer."""
        problem = reply.json()
        assert problem["jsonrpc"] == "2.0"
        return Refused(BY_STATUS[reply.status_code], problem["error"]["message"])

    def _task(self, body: Any) -> Told:
        return client_answers.task_v03(body) if self.old else client_answers.task_v1(body)

    def _sent(self, body: Any) -> Told | Said:
        return client_answers.sent_v03(body) if self.old else client_answers.sent_v1(body)

    def _page(self, body: Any) -> Page:
        return client_answers.page_v03(body) if self.old else client_answers.page_v1(body)

    def _frame(self, number: int, body: Any) -> Frame:
        return client_answers.frame_v03(number, body) if self.old else client_answers.frame_v1(number, body)


def ask_of(message: Words | str, more: dict[str, Any]) -> Ask:
    return Ask(message=words(message) if isinstance(message, str) else message, **more)


def some(**fields: Any) -> dict[str, Any]:
    """Without what is not there."""
    return {name: value for name, value in fields.items() if value not in (None, (), {}, [])}


class New(Binding):
    """1.0's words, in JSON."""

    METHODS: ClassVar = {
        "send": "SendMessage",
        "stream": "SendStreamingMessage",
        "get": "GetTask",
        "list": "ListTasks",
        "cancel": "CancelTask",
        "subscribe": "SubscribeToTask",
        "push.create": "CreateTaskPushNotificationConfig",
        "push.get": "GetTaskPushNotificationConfig",
        "push.list": "ListTaskPushNotificationConfigs",
        "push.delete": "DeleteTaskPushNotificationConfig",
        "card": "GetExtendedAgentCard",
    }

    def params_send(self, ask: Ask) -> dict[str, Any]:
        message = ask.message
        configuration = some(
            returnImmediately=None if ask.blocking is None else not ask.blocking,
            historyLength=ask.history,
            acceptedOutputModes=list(ask.modes),
            taskPushNotificationConfig=ask.push,
        )
        body = {
            "messageId": message.message_id,
            "role": {"user": "ROLE_USER", "agent": "ROLE_AGENT"}[message.role],
            "parts": [part_v1(part) for part in message.all_parts],
            **some(
                taskId=message.task,
                contextId=message.context,
                metadata=message.metadata,
                extensions=list(message.extensions),
                referenceTaskIds=list(message.references),
            ),
        }
        return {"message": body, **some(configuration=configuration, metadata=ask.metadata)}

    def params_push(self, verb: str, task_id: str, config_id: str, url: str) -> dict[str, Any]:
        whole = {"taskId": task_id, "id": config_id, "url": url}
        kept = {"create": ("taskId", "id", "url"), "list": ("taskId",)}.get(verb, ("taskId", "id"))
        return {name: whole[name] for name in kept}

    def state(self, name: str) -> str:
        return f"TASK_STATE_{name.upper().replace('-', '_')}"


def part_v1(part: Part) -> dict[str, Any]:
    value = base64.b64encode(part.value).decode() if part.kind == "raw" else part.value
    about = some(mediaType=part.media_type, filename=part.filename, metadata=part.metadata)
    return {part.kind: value, **about}
