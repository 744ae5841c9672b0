"""The table of A2A operations: one row each, with its name in either dialect and what it asks of the exchange.

Bindings only differ in where they find the request and how they put the answer; there is no second list of operations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from starlette.types import Scope

from covenant.doors.a2a.late_timer import LateTimer
from covenant.exchange.a2a_service import A2AExchange, A2ARequest
from covenant.exchange.access.tenants import unauthenticated
from covenant.exchange.tasks.task_stream import TaskStream
from covenant.model.a2a_requests import TaskPage
from covenant.model.errors import Conflict, Invalid
from covenant.model.task_view import TaskView
from covenant.wire.a2a import v03 as a2a_v03
from covenant.wire.a2a import v1 as a2a_v1
from covenant.wire.a2a.error_codes import Dialect

KEPT_MAX: Final = 256


class TaskCache:
    """The last few finished tasks, whole, in each dialect."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], tuple[TaskView, bytes]] = OrderedDict()

    def task(self, wire: ModuleType, view: TaskView, history_length: int | None) -> bytes:
        if history_length is not None:
            told: bytes = wire.encode_task(view, history_length)
            return told
        key = (view.task.id, wire.__name__)
        kept = self._kept.get(key)
        # Not what is equal but what is the same: comparing would cost as much as encoding.
        if kept is not None and kept[0] is view:
            self._kept.move_to_end(key)
            return kept[1]
        encoded: bytes = wire.encode_task(view, None)
        if not view.state.terminal:
            return encoded
        self._kept[key] = (view, encoded)
        if len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)
        return encoded


class CachedTask(msgspec.Struct, frozen=True):
    """A task to be told, and where it may have been told before."""

    view: TaskView
    encoded: TaskCache


ExtendedCard = Callable[[A2ARequest, Dialect, str], bytes]
"""The extended card of an agent, as JSON: who asks, in which dialect, and the base of our own address."""


class PushService(Protocol):
    """Push notifications, where they are switched on."""

    async def ask(self, ask: A2ARequest, request: Any) -> Any:
        """Create, get, list or delete, by the kind of the request."""


@dataclass(frozen=True, slots=True)
class A2AServices:
    """What is behind the A2A door."""

    conversations: A2AExchange
    extended_card: ExtendedCard | None = None
    pushes: PushService | None = None
    encoded: TaskCache = field(default_factory=TaskCache)
    noticing: LateTimer = field(default_factory=LateTimer)


class A2ACall(msgspec.Struct, frozen=True):
    """One request, as its binding read it."""

    ask: A2ARequest
    request: Any
    dialect: Dialect
    reached: Callable[[Scope], str]
    scope: Scope

    def base_url(self) -> str:
        """Where we were called."""
        return self.reached(self.scope)


DialectModule = ModuleType
"""`wire.a2a_v1` or `wire.a2a_v03`: the same names, in two dialects."""

V1, V03 = Dialect.V1, Dialect.V03
WIRES: Final[dict[Dialect, DialectModule]] = {V1: a2a_v1, V03: a2a_v03}


@dataclass(frozen=True, slots=True, kw_only=True)
class A2AOperation:
    name: str
    """Its method in A2A 1.0, which is also its name on gRPC."""
    slash: str
    """Its method in 0.3."""
    run: Callable[[A2AServices, A2ACall], Awaitable[Any]]
    decode: Callable[[DialectModule, bytes | msgspec.Raw, int | None], Any]
    """From the params and the cursor to the request."""
    encode: Callable[[DialectModule, Any, Any], bytes]
    """From the answer and the request to JSON. What streams encodes its frames."""
    streams: bool = False
    works: bool = False
    """Whether it starts work, and so may take long."""


def _send(office: A2AServices, asked: A2ACall) -> Awaitable[TaskView]:
    return office.conversations.send(asked.ask, asked.request)


def _stream(office: A2AServices, asked: A2ACall) -> Awaitable[TaskStream]:
    return office.conversations.stream(asked.ask, asked.request)


async def _get(office: A2AServices, asked: A2ACall) -> CachedTask:
    return CachedTask(await office.conversations.get(asked.ask, asked.request), office.encoded)


def _list(office: A2AServices, asked: A2ACall) -> Awaitable[TaskPage]:
    return office.conversations.list_tasks(asked.ask, asked.request)


def _cancel(office: A2AServices, asked: A2ACall) -> Awaitable[TaskView]:
    return office.conversations.cancel(asked.ask, asked.request)


def _subscribe(office: A2AServices, asked: A2ACall) -> Awaitable[TaskStream]:
    # A client of 0.3 follows a task from its beginning, also one that has ended; one of 1.0 from where it is.
    old = asked.dialect is V03
    return office.conversations.subscribe(asked.ask, asked.request, from_start=old, finished=old)


async def _push(office: A2AServices, asked: A2ACall) -> Any:
    if office.pushes is None:
        raise Conflict("push_not_supported", "push notifications are switched off here")
    return await office.pushes.ask(asked.ask, asked.request)


async def _extended_card(office: A2AServices, asked: A2ACall) -> bytes:
    if office.extended_card is None:
        raise Conflict("extended_card_not_configured", "there is no extended card")
    if asked.ask.caller.anonymous:
        # What it says beyond the public card is for those who say who they are, also where an agent is open.
        raise unauthenticated()
    return office.extended_card(asked.ask, asked.dialect, asked.base_url())


def _no_frames(_: DialectModule, __: object, ___: object) -> bytes:
    raise AssertionError("a stream has frames, and no single answer")


OPERATIONS: Final = (
    A2AOperation(
        name="SendMessage",
        slash="message/send",
        run=_send,
        decode=lambda wire, params, _: wire.decode_send(params),
        encode=lambda wire, view, asked: wire.encode_sent(view, asked.history_length),
        works=True,
    ),
    A2AOperation(
        name="SendStreamingMessage",
        slash="message/stream",
        run=_stream,
        decode=lambda wire, params, _: wire.decode_send(params),
        encode=_no_frames,
        streams=True,
        works=True,
    ),
    A2AOperation(
        name="GetTask",
        slash="tasks/get",
        run=_get,
        decode=lambda wire, params, _: wire.decode_get_task(params),
        encode=lambda wire, told, asked: told.encoded.task(wire, told.view, asked.history_length),
    ),
    A2AOperation(
        name="ListTasks",
        slash="tasks/list",
        run=_list,
        decode=lambda wire, params, _: wire.decode_list_tasks(params),
        encode=lambda wire, page, asked: wire.encode_page(page, asked),
    ),
    A2AOperation(
        name="CancelTask",
        slash="tasks/cancel",
        run=_cancel,
        decode=lambda wire, params, _: wire.decode_cancel(params),
        encode=lambda wire, view, _: wire.encode_task(view),
    ),
    A2AOperation(
        name="SubscribeToTask",
        slash="tasks/resubscribe",
        run=_subscribe,
        decode=lambda wire, params, cursor: wire.decode_subscribe(params, cursor),
        encode=_no_frames,
        streams=True,
    ),
    A2AOperation(
        name="CreateTaskPushNotificationConfig",
        slash="tasks/pushNotificationConfig/set",
        run=_push,
        decode=lambda wire, params, _: wire.decode_create_push(params),
        encode=lambda wire, config, asked: wire.encode_push(asked.task_id, config),
    ),
    A2AOperation(
        name="GetTaskPushNotificationConfig",
        slash="tasks/pushNotificationConfig/get",
        run=_push,
        decode=lambda wire, params, _: wire.decode_get_push(params),
        encode=lambda wire, config, asked: wire.encode_push(asked.task_id, config),
    ),
    A2AOperation(
        name="ListTaskPushNotificationConfigs",
        slash="tasks/pushNotificationConfig/list",
        run=_push,
        decode=lambda wire, params, _: wire.decode_list_push(params),
        encode=lambda wire, page, asked: wire.encode_pushes(asked.task_id, page.configs, page.next_page_token),
    ),
    A2AOperation(
        name="DeleteTaskPushNotificationConfig",
        slash="tasks/pushNotificationConfig/delete",
        run=_push,
        decode=lambda wire, params, _: wire.decode_delete_push(params),
        encode=lambda wire, _, __: wire.DELETED,
    ),
    A2AOperation(
        name="GetExtendedAgentCard",
        slash="agent/getAuthenticatedExtendedCard",
        run=_extended_card,
        decode=lambda wire, params, _: wire.decode_nothing(params),
        encode=lambda _, card, __: card,
    ),
)

BY_NAME: Final = {operation.name: operation for operation in OPERATIONS}


class RpcMethod(NamedTuple):
    """An operation as JSON-RPC names it, in one dialect."""

    operation: A2AOperation
    dialect: Dialect
    wire: DialectModule
    decode: Callable[[bytes, int | None], Any]


def _method(operation: A2AOperation, dialect: Dialect) -> RpcMethod:
    return RpcMethod(operation, dialect, WIRES[dialect], partial(operation.decode, WIRES[dialect]))


METHODS: Final[dict[str, RpcMethod]] = {
    **{operation.name: _method(operation, V1) for operation in OPERATIONS},
    **{operation.slash: _method(operation, V03) for operation in OPERATIONS},
}

_ALWAYS: Final = ("1.0", "")
_VERSIONS: Final = {V1: frozenset(_ALWAYS), V03: frozenset({*_ALWAYS, "1", "0.3"})}


def check_version(version: str, dialect: Dialect) -> None:
    """`A2A-Version` as it was said: Major.Minor, and any patch after it is no matter."""
    if version in _ALWAYS:
        return
    said = version.strip()
    if said in _VERSIONS[dialect]:
        return
    numbers = said.split(".")
    if len(numbers) == 3 and numbers[2].isdigit() and ".".join(numbers[:2]) in _VERSIONS[dialect]:
        return
    raise Invalid("version_not_supported", f"version {said[:20]!r} is not spoken here; ask for 1.0")
