"""A transport: one interface of a remote agent, and the five requests that are sent over it.

It encodes requests in the interface's dialect and binding, and decodes answers. A refusal of the other side becomes one
`RemoteRefused`, by its JSON-RPC code or HTTP status. Nothing here is retried.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from time import monotonic
from typing import Final, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

from covenant.model.a2a_requests import SendMessage
from covenant.model.agent_card import HTTP_JSON, RemoteCard, RemoteInterface
from covenant.model.errors import Invalid
from covenant.model.task_view import RemoteEvent, RemoteTask
from covenant.outbound.call_errors import CallFailed, RemoteRefused, has_error, refused_by_rpc, refused_by_status
from covenant.outbound.http_fetcher import Fetcher, Streamed
from covenant.outbound.remote.remote_registry import Credentials
from covenant.outbound.remote.remote_task import check_task
from covenant.wire import jsonrpc
from covenant.wire.a2a.dialects import PROTO_V03, V1, dialect_of
from covenant.wire.sse import EventReader, EventTooLarge

EVENT_BYTES_MAX: Final = 4 * 1024 * 1024
STREAM_BYTES_MAX: Final = 64 * 1024 * 1024
"""The most bytes of one stream."""
ERROR_BYTES_MAX: Final = 64 * 1024
IDLE_MS: Final = 60_000
"""A stream that is silent for this long counts as broken, and is resumed."""
QUIET_S: Final = 60.0
"""After this long without an event, a stream that still lives is reported as quiet (None), and so on."""

T = TypeVar("T")
NumberedEvent = tuple[str | None, RemoteEvent]
"""An event, and its number in the stream."""
StreamItem = NumberedEvent | None
"""An event and its number; None if the stream is quiet."""
_REST: Final = {
    (dialect.version.value, operation): (method, prefix + path)
    for prefix, dialect in (("", V1), ("v1/", PROTO_V03))
    for operation, method, path in (
        (dialect.client.send, "POST", "message:send"),
        (dialect.client.stream, "POST", "message:stream"),
        (dialect.client.get, "GET", "tasks/{}"),
        (dialect.client.cancel, "POST", "tasks/{}:cancel"),
        (dialect.client.subscribe, "GET", "tasks/{}:subscribe"),
    )
}
"""By version and operation: the method, and the path below the agent's address."""


class Request(NamedTuple):
    """One operation of the dialect. `task_id`: the task that it is about, if it is about one."""

    operation: str
    params: bytes
    task_id: str | None = None


class A2ATransport(ABC):
    """A subclass sends one request (`_ask`), or has one answered by a stream (`_stream`)."""

    def __init__(self, interface: RemoteInterface) -> None:
        self.interface = interface
        self._codec = dialect_of(interface.version, interface.binding).client

    async def send(self, ask: SendMessage, headers: Mapping[str, str], within_ms: int) -> RemoteEvent:
        request = Request(self._codec.send, self._codec.encode_send(ask, self.interface.tenant))
        return decoded(self._codec.decode_reply, await self._ask(request, headers, within_ms))

    def stream(
        self, ask: SendMessage, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamItem]]:
        return self._stream(Request(self._codec.stream, self._codec.encode_send(ask, self.interface.tenant)), headers)

    async def get(self, task_id: str) -> RemoteTask:
        return await self._task(self._codec.get, task_id)

    async def cancel(self, task_id: str) -> RemoteTask:
        return await self._task(self._codec.cancel, task_id)

    async def _task(self, operation: str, task_id: str) -> RemoteTask:
        task = decoded(self._codec.decode_task, await self._ask(self._about(operation, task_id), {}))
        check_task(task, task_id)
        return task

    def subscribe(self, task_id: str, after: str | None) -> AbstractAsyncContextManager[AsyncIterator[StreamItem]]:
        headers = {"last-event-id": after} if after is not None else {}
        return self._stream(self._about(self._codec.subscribe, task_id), headers)

    def _about(self, operation: str, task_id: str) -> Request:
        return Request(operation, self._codec.encode_task_request(task_id, self.interface.tenant), task_id)

    @abstractmethod
    async def _ask(self, request: Request, headers: Mapping[str, str], within_ms: int | None = None) -> bytes: ...

    @abstractmethod
    def _stream(
        self, request: Request, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamItem]]: ...


class HttpTransport(A2ATransport):
    """JSON-RPC or HTTP+JSON, of either version."""

    def __init__(
        self, interface: RemoteInterface, fetcher: Fetcher, credentials: Credentials, card: RemoteCard | None
    ) -> None:
        super().__init__(interface)
        self._fetcher = fetcher
        self._credentials = credentials
        self._card = card
        self._rest = interface.binding == HTTP_JSON

    def _http(self, request: Request) -> tuple[str, str, bytes]:
        """Method, URL and body."""
        if not self._rest:
            return "POST", self.interface.url, jsonrpc.encode_request(1, request.operation, request.params)
        method, path = _REST[self.interface.version, request.operation]
        if request.task_id is None:
            return method, self._rest_url(path), request.params
        url = self._rest_url(path.format(quote(request.task_id, safe="")))
        return method, url, b"{}" if method == "POST" else b""

    def _rest_url(self, path: str) -> str:
        scheme, host, before, query, _ = urlsplit(self.interface.url)
        tenant = f"{quote(self.interface.tenant, safe='')}/" if self.interface.tenant else ""
        return urlunsplit((scheme, host, f"{before.rstrip('/')}/{tenant}{path}", query, ""))

    def _headers(self, more: Mapping[str, str], accept: str) -> dict[str, str]:
        version = {"a2a-version": self._codec.version} if self._codec.version is not None else {}
        own = self._credentials.headers(self.interface.url, self._card)
        return {"content-type": "application/json", "accept": accept, **version, **more, **own}

    async def _ask(self, request: Request, headers: Mapping[str, str], within_ms: int | None = None) -> bytes:
        method, url, body = self._http(request)
        sent = self._headers(headers, "application/json")
        answer = await self._fetcher.fetch(method, url, headers=sent, content=body, total_ms=within_ms)
        return self._result(answer.status, answer.headers, answer.body)

    @asynccontextmanager
    async def _stream(self, request: Request, headers: Mapping[str, str]) -> AsyncIterator[AsyncIterator[StreamItem]]:
        method, url, content = self._http(request)
        async with self._fetcher.stream(
            method,
            url,
            headers=self._headers(headers, "text/event-stream, application/json"),
            content=content,
            idle_ms=IDLE_MS,
            bytes_max=STREAM_BYTES_MAX,
        ) as answer:
            if answer.status == 200 and answer.headers.get("content-type", "").startswith("text/event-stream"):
                yield self._frames(answer)
            else:
                bytes_max = EVENT_BYTES_MAX if answer.status == 200 else ERROR_BYTES_MAX
                body = await _read_body(answer, bytes_max)
                event = decoded(self._codec.decode_reply, self._result(answer.status, answer.headers, body))
                yield _single_event(event)

    async def _frames(self, answer: Streamed) -> AsyncIterator[StreamItem]:
        reader, last_event_s = EventReader(EVENT_BYTES_MAX), monotonic()
        try:
            async for piece in answer.pieces:
                if monotonic() - last_event_s > QUIET_S:
                    last_event_s = monotonic()
                    yield None
                for event in reader.feed(piece):
                    last_event_s = monotonic()
                    yield event.id, decoded(self._codec.decode_reply, self._result(200, answer.headers, event.data))
        except EventTooLarge as error:
            raise CallFailed("too_large", str(error), transient=False) from error

    def _result(self, status: int, headers: Mapping[str, str], body: bytes) -> bytes:
        if not self._rest:
            return self._rpc_result(status, headers, body)
        # A stream's last frame may be an error, on a response that began well.
        if not 200 <= status < 300 or has_error(body):
            raise self._with_hint(refused_by_status(status, headers, body))
        return body

    def _rpc_result(self, status: int, headers: Mapping[str, str], body: bytes) -> bytes:
        succeeded = 200 <= status < 300
        try:
            result = jsonrpc.decode_result(body)
        except jsonrpc.RpcError as error:
            # These HTTP statuses say more than the error code in the body.
            if status in (401, 403, 429, 503):
                raise self._with_hint(refused_by_status(status, headers, body)) from error
            raise refused_by_rpc(error) from error
        except jsonrpc.BadResponse as error:
            if succeeded:
                raise _unreadable(str(error), status) from error
            raise self._with_hint(refused_by_status(status, headers, body)) from error
        if not succeeded:
            raise self._with_hint(refused_by_status(status, headers, body))
        return result

    def _with_hint(self, refusal: RemoteRefused) -> RemoteRefused:
        """Adds the reason if the credential was not sent."""
        if refusal.code not in ("unauthenticated", "forbidden") or not self._credentials.has_secret:
            return refusal
        if self._credentials.covers(self.interface.url):
            return refusal
        hint = f"the card leads to {self.interface.url}, another origin, to which the credential is not sent"
        return RemoteRefused(
            "unauthenticated", f"{refusal.message}; {hint}", status=refusal.status, rpc_code=refusal.rpc_code
        )


def decoded(decode: Callable[[bytes], T], data: bytes) -> T:
    """Raises RemoteRefused for an answer that cannot be read."""
    try:
        return decode(data)
    except (Invalid, jsonrpc.BadResponse) as error:
        raise _unreadable(str(error)) from error


def _unreadable(why: str, status: int | None = None) -> RemoteRefused:
    return RemoteRefused("bad_answer", f"the answer cannot be read: {why}", status=status)


async def _read_body(answer: Streamed, bytes_max: int) -> bytes:
    body = b""
    async for piece in answer.pieces:
        body += piece
        if len(body) > bytes_max:
            raise CallFailed("too_large", f"the answer has more than {bytes_max} bytes", transient=False)
    return body


async def _single_event(event: RemoteEvent) -> AsyncIterator[NumberedEvent]:
    yield None, event
