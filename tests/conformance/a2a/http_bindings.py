"""The bindings over HTTP: JSON-RPC in both dialects, and REST."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import quote, urlencode

from covenant.wire.sse import EventReader
from tests.conformance.a2a.bindings import Ask, Binding, New, Reply, some
from tests.conformance.a2a.client_answers import Frame, Part


class Rpc(Binding):
    """JSON-RPC, in either dialect."""

    METHODS: ClassVar[dict[str, str]]

    def envelope(self, operation: str, params: Any) -> bytes:
        call = {"jsonrpc": "2.0", "id": "call-1", "method": self.METHODS[operation], "params": params}
        return json.dumps(call).encode()

    async def ask(self, operation: str, params: dict[str, Any]) -> Reply:
        return await self.raw(self.envelope(operation, params))

    async def raw(self, body: bytes, operation: str = "send", **headers: str) -> Reply:
        kind = {"content-type": "application/json"}
        return await self.http.post(self.url, content=body, headers={**kind, **self._headers(**headers)})

    def read(self, reply: Reply) -> Any:
        if reply.status_code != 200:
            raise self._plainly(reply)
        if self.old and is_stream(reply):
            # A refusal, as the only event of a stream.
            (event,) = EventReader(1 << 20).feed(reply.content)
            return self._result(json.loads(event.data))
        answer = reply.json()
        assert reply.headers["content-type"] == "application/json"
        return self._result(answer)

    def _result(self, answer: Any) -> Any:
        assert answer["jsonrpc"] == "2.0"
        assert ("result" in answer) != ("error" in answer)
        if "error" in answer:
            raise self._refused(200, answer["error"], answer["error"]["data"])
        assert answer["id"] == "call-1"
        return answer["result"]

    @asynccontextmanager
    async def frames(self, operation: str, params: dict[str, Any]) -> AsyncIterator[AsyncIterator[Frame]]:
        body = self.envelope(operation, params)
        kind = {"content-type": "application/json", "accept": "text/event-stream"}
        async with self.http.stream("POST", self.url, content=body, headers={**kind, **self._headers()}) as reply:
            if not is_stream(reply) or "content-length" in reply.headers:
                await reply.aread()
                self.read(reply)
            yield self._frames(reply)

    async def _frames(self, reply: Reply) -> AsyncIterator[Frame]:
        async for number, payload in events_of(reply):
            yield self._frame(number, self._result(payload))


@dataclass(frozen=True, kw_only=True)
class NewRpc(New, Rpc):
    """JSON-RPC, 1.0."""


@dataclass(frozen=True, kw_only=True)
class SlashRpc(Rpc):
    """JSON-RPC, the slash methods."""

    old = True
    METHODS: ClassVar = {
        "send": "message/send",
        "stream": "message/stream",
        "get": "tasks/get",
        "list": "tasks/list",
        "cancel": "tasks/cancel",
        "subscribe": "tasks/resubscribe",
        "push.create": "tasks/pushNotificationConfig/set",
        "push.get": "tasks/pushNotificationConfig/get",
        "push.list": "tasks/pushNotificationConfig/list",
        "push.delete": "tasks/pushNotificationConfig/delete",
        "card": "agent/getAuthenticatedExtendedCard",
    }

    def params_send(self, ask: Ask) -> dict[str, Any]:
        message = ask.message
        configuration = some(
            blocking=ask.blocking,
            historyLength=ask.history,
            acceptedOutputModes=list(ask.modes),
            pushNotificationConfig=ask.push,
        )
        body = {
            "kind": "message",
            "messageId": message.message_id,
            "role": message.role,
            "parts": [part_v03(part) for part in message.all_parts],
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
        if verb == "create":
            return {"taskId": task_id, "pushNotificationConfig": {"id": config_id, "url": url}}
        return {"id": task_id} if verb == "list" else {"id": task_id, "pushNotificationConfigId": config_id}

    def state(self, name: str) -> str:
        return name


@dataclass(frozen=True, kw_only=True)
class Rest(New):
    """Plain HTTP, 1.0."""

    ROUTES: ClassVar = {
        "send": ("POST", "/message:send"),
        "stream": ("POST", "/message:stream"),
        "get": ("GET", "/tasks/{id}"),
        "list": ("GET", "/tasks"),
        "cancel": ("POST", "/tasks/{id}:cancel"),
        "subscribe": ("GET", "/tasks/{id}:subscribe"),
        "push.create": ("POST", "/tasks/{taskId}/pushNotificationConfigs"),
        "push.get": ("GET", "/tasks/{taskId}/pushNotificationConfigs/{id}"),
        "push.list": ("GET", "/tasks/{taskId}/pushNotificationConfigs"),
        "push.delete": ("DELETE", "/tasks/{taskId}/pushNotificationConfigs/{id}"),
        "card": ("GET", "/extendedAgentCard"),
    }

    def envelope(self, operation: str, params: Any) -> bytes:
        return json.dumps(params).encode()

    def _request(self, operation: str, params: dict[str, Any]) -> tuple[str, str, bytes | None]:
        method, path = self.ROUTES[operation]
        left = {name: value for name, value in params.items() if f"{{{name}}}" not in path}
        path = path.format_map({name: quote(str(params.get(name, "")), safe="") for name in ("id", "taskId")})
        if method == "POST":
            return method, self.url + path, json.dumps(left).encode()
        query = {name: str(value).lower() if isinstance(value, bool) else value for name, value in left.items()}
        return method, self.url + path + (f"?{urlencode(query)}" if query else ""), None

    async def ask(self, operation: str, params: dict[str, Any]) -> Reply:
        method, url, body = self._request(operation, params)
        kind = {"content-type": "application/a2a+json"} if body is not None else {}
        return await self.http.request(method, url, content=body, headers={**kind, **self._headers()})

    async def raw(self, body: bytes, operation: str = "send", **headers: str) -> Reply:
        method, path = self.ROUTES[operation]
        kind = {"content-type": "application/a2a+json"}
        return await self.http.request(
            method, self.url + path, content=body, headers={**kind, **self._headers(**headers)}
        )

    def read(self, reply: Reply) -> Any:
        answer = reply.json()
        assert reply.headers["content-type"] == f"application/{'a2a+json' if reply.status_code == 200 else 'json'}"
        if reply.status_code == 200:
            return answer
        error = answer["error"]
        raise self._refused(reply.status_code, error, error["details"])

    @asynccontextmanager
    async def frames(self, operation: str, params: dict[str, Any]) -> AsyncIterator[AsyncIterator[Frame]]:
        method, url, body = self._request(operation, params)
        kind = {"content-type": "application/a2a+json", "accept": "text/event-stream"}
        async with self.http.stream(method, url, content=body, headers={**kind, **self._headers()}) as reply:
            if not is_stream(reply):
                await reply.aread()
                self.read(reply)
            yield self._frames(reply)

    async def _frames(self, reply: Reply) -> AsyncIterator[Frame]:
        async for number, payload in events_of(reply):
            yield self._frame(number, payload)


def is_stream(reply: Reply) -> bool:
    return reply.headers.get("content-type", "").startswith("text/event-stream")


async def events_of(reply: Reply) -> AsyncIterator[tuple[int, Any]]:
    """The numbered events of a stream. One without a number would be a fault."""
    number: int | None = None
    async for line in reply.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            number = int(value)
        elif name == "data":
            assert number is not None, line
            yield number, json.loads(value)
            number = None


def part_v03(part: Part) -> dict[str, Any]:
    if part.kind in ("text", "data"):
        return {"kind": part.kind, part.kind: part.value, **some(metadata=part.metadata)}
    place, value = ("bytes", base64.b64encode(part.value).decode()) if part.kind == "raw" else ("uri", part.value)
    file = {place: value, **some(mimeType=part.media_type, name=part.filename)}
    return {"kind": "file", "file": file, **some(metadata=part.metadata)}
