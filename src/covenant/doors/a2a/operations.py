"""The table of A2A operations: one row each, with its name in either dialect and its call of the exchange.

Bindings differ only in how they read the request and write the answer; there is no second list of operations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
from starlette.types import Scope

from covenant.exchange.a2a_service import A2AExchange, A2ARequest
from covenant.exchange.file_links import FileLinks
from covenant.exchange.push import PushConfigs
from covenant.exchange.tasks.reader import TaskStream
from covenant.model.content import File
from covenant.model.errors import Conflict
from covenant.model.task_view import TaskView
from covenant.wire.a2a.dialects import V03, V1, Dialect
from covenant.wire.a2a.error_codes import agent_error
from covenant.wire.a2a.parts_v1 import Link, unlinked
from covenant.wire.a2a.request_decoder import Params, RequestDecoder
from covenant.wire.a2a.response_encoder import ResponseEncoder

CACHED_TASKS_MAX: Final = 256


class TaskCache:
    """The last few finished tasks as JSON. The ledger returns the same object for a finished task while it holds it."""

    def __init__(self) -> None:
        self._encoded: OrderedDict[tuple[str, ResponseEncoder], tuple[TaskView, bytes]] = OrderedDict()

    def encode(self, dialect: Dialect, view: TaskView, history_length: int | None, link: Link) -> bytes:
        if history_length is not None or not view.state.terminal:
            return dialect.responses.encode_task(view, history_length, link)
        key = (view.task.id, dialect.responses)
        cached = self._encoded.get(key)
        # By identity: comparing two views would cost as much as encoding one.
        if cached is not None and cached[0] is view:
            self._encoded.move_to_end(key)
            return cached[1]
        encoded = dialect.responses.encode_task(view, None, link)
        self._encoded[key] = (view, encoded)
        if len(self._encoded) > CACHED_TASKS_MAX:
            self._encoded.popitem(last=False)
        return encoded


ExtendedCard = Callable[[A2ARequest, Dialect, str], bytes]
"""Makes an agent's extended card as JSON, for a request, a dialect and the daemon's base URL."""


@dataclass(frozen=True, slots=True)
class A2AServices:
    exchange: A2AExchange
    extended_card: ExtendedCard | None = None
    pushes: PushConfigs | None = None
    task_cache: TaskCache = field(default_factory=TaskCache)


class A2ACall(msgspec.Struct, frozen=True):
    """One request, as its binding decoded it."""

    ask: A2ARequest
    request: Any
    dialect: Dialect
    cursor: int | None
    """The last generation that the client of a stream has seen."""
    base_url_of: Callable[[Scope], str]
    scope: Scope

    files: FileLinks | None = None
    """None: there is no blob store here."""

    def base_url(self) -> str:
        """The base URL by which the caller reached the daemon."""
        return self.base_url_of(self.scope)

    def link(self, file: File) -> str:
        return unlinked(file) if self.files is None else self.files.url_of(file, self.base_url())


@dataclass(frozen=True, slots=True, kw_only=True)
class A2AOperation:
    """An operation either runs to one answer, as JSON, or opens a stream."""

    name: str
    """The operation's method in A2A 1.0, which is also its name on gRPC."""
    method_v03: str
    """The operation's method in 0.3."""
    decode: Callable[[RequestDecoder], Callable[[Params], Any]]
    """The method of a decoder that reads the operation's params."""
    run: Callable[[A2AServices, A2ACall], Awaitable[Any]] | None = None
    encode: Callable[[A2AServices, A2ACall, Any], bytes] = lambda _, __, answer: answer
    """Encodes the result as JSON. Separate from `run`: a coroutine around both would cost time at each suspension."""
    open_stream: Callable[[A2AServices, A2ACall], Awaitable[TaskStream]] | None = None
    may_block: bool = False
    """Whether the operation may wait for an agent, and so take long."""
    pushes: bool = False
    """Whether the operation is about push notifications. If those are switched off, its params are not read."""


def _send(services: A2AServices, call: A2ACall) -> Awaitable[TaskView]:
    return services.exchange.send(call.ask, call.request)


def _encode_sent(_: A2AServices, call: A2ACall, view: TaskView) -> bytes:
    if view.result is not None and view.result.metadata and (refusal := agent_error(view.result)) is not None:
        raise refusal
    return call.dialect.responses.encode_sent(view, call.request.history_length, call.link)


def _get(services: A2AServices, call: A2ACall) -> Awaitable[TaskView]:
    return services.exchange.get(call.ask, call.request)


def _encode_got(services: A2AServices, call: A2ACall, view: TaskView) -> bytes:
    return services.task_cache.encode(call.dialect, view, call.request.history_length, call.link)


async def _list(services: A2AServices, call: A2ACall) -> bytes:
    page = await services.exchange.list_tasks(call.ask, call.request)
    return call.dialect.responses.encode_page(page, call.request, call.link)


async def _cancel(services: A2AServices, call: A2ACall) -> bytes:
    canceled = await services.exchange.cancel(call.ask, call.request)
    return call.dialect.responses.encode_task(canceled, None, call.link)


def _stream(services: A2AServices, call: A2ACall) -> Awaitable[TaskStream]:
    return services.exchange.stream(call.ask, call.request)


def _subscribe(services: A2AServices, call: A2ACall) -> Awaitable[TaskStream]:
    # A client of 0.3 follows a task from its beginning, also an ended one; a client of 1.0 from its present state.
    old, request = call.dialect is not V1, msgspec.structs.replace(call.request, after=call.cursor)
    return services.exchange.subscribe(call.ask, request, from_start=old, finished=old)


def skip_params(_: Any) -> None:
    """Decodes no params: an operation that is switched off is refused whatever its params are."""


async def _call_push_service(services: A2AServices, call: A2ACall) -> Any:
    if services.pushes is None:
        raise Conflict(
            "push_not_supported",
            "push notifications are switched off; the operator turns them on with a2a.push_notifications",
        )
    return await services.pushes.run(call.ask, call.request)


async def _put_or_get_push(services: A2AServices, call: A2ACall) -> bytes:
    config = await _call_push_service(services, call)
    return call.dialect.responses.encode_push(call.request.task_id, config)


async def _list_pushes(services: A2AServices, call: A2ACall) -> bytes:
    page = await _call_push_service(services, call)
    return call.dialect.responses.encode_pushes(call.request.task_id, page.configs, page.next_page_token)


async def _delete_push(services: A2AServices, call: A2ACall) -> bytes:
    await _call_push_service(services, call)
    return call.dialect.responses.deleted


async def _extended_card(services: A2AServices, call: A2ACall) -> bytes:
    if services.extended_card is None:
        raise Conflict("extended_card_not_configured", "this agent has no extended card; read its public card")
    if call.ask.caller.anonymous:
        # The extended card is for authenticated callers; the card of an open agent announces none.
        raise Conflict(
            "unsupported_operation", "the extended card is for callers with a token; send `Authorization: Bearer TOKEN`"
        )
    return services.extended_card(call.ask, call.dialect, call.base_url())


OPERATIONS: Final = (
    A2AOperation(
        name="SendMessage",
        method_v03="message/send",
        decode=lambda params: params.decode_send,
        run=_send,
        encode=_encode_sent,
        may_block=True,
    ),
    A2AOperation(
        name="SendStreamingMessage",
        method_v03="message/stream",
        decode=lambda params: params.decode_send,
        open_stream=_stream,
        may_block=True,
    ),
    A2AOperation(
        name="GetTask",
        method_v03="tasks/get",
        decode=lambda params: params.decode_get_task,
        run=_get,
        encode=_encode_got,
    ),
    A2AOperation(name="ListTasks", method_v03="tasks/list", decode=lambda params: params.decode_list_tasks, run=_list),
    A2AOperation(name="CancelTask", method_v03="tasks/cancel", decode=lambda params: params.decode_cancel, run=_cancel),
    A2AOperation(
        name="SubscribeToTask",
        method_v03="tasks/resubscribe",
        decode=lambda params: params.decode_subscribe,
        open_stream=_subscribe,
    ),
    A2AOperation(
        name="CreateTaskPushNotificationConfig",
        method_v03="tasks/pushNotificationConfig/set",
        decode=lambda params: params.decode_create_push,
        run=_put_or_get_push,
        pushes=True,
    ),
    A2AOperation(
        name="GetTaskPushNotificationConfig",
        method_v03="tasks/pushNotificationConfig/get",
        decode=lambda params: params.decode_get_push,
        run=_put_or_get_push,
        pushes=True,
    ),
    A2AOperation(
        name="ListTaskPushNotificationConfigs",
        method_v03="tasks/pushNotificationConfig/list",
        decode=lambda params: params.decode_list_push,
        run=_list_pushes,
        pushes=True,
    ),
    A2AOperation(
        name="DeleteTaskPushNotificationConfig",
        method_v03="tasks/pushNotificationConfig/delete",
        decode=lambda params: params.decode_delete_push,
        run=_delete_push,
        pushes=True,
    ),
    A2AOperation(
        name="GetExtendedAgentCard",
        method_v03="agent/getAuthenticatedExtendedCard",
        decode=lambda params: params.decode_nothing,
        run=_extended_card,
    ),
)

BY_NAME: Final = {operation.name: operation for operation in OPERATIONS}


class RpcMethod(NamedTuple):
    """An operation as JSON-RPC names it, in one dialect."""

    operation: A2AOperation
    dialect: Dialect
    decode: Callable[[Params], Any]


METHODS: Final[dict[str, RpcMethod]] = {
    **{each.name: RpcMethod(each, V1, each.decode(V1.requests)) for each in OPERATIONS},
    **{each.method_v03: RpcMethod(each, V03, each.decode(V03.requests)) for each in OPERATIONS},
}
