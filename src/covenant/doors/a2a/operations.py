"""The table of A2A operations: one row each, with its name in either dialect and what it asks of the exchange.

Bindings only differ in where they find the request and how they put the answer; there is no second list of operations.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from starlette.types import Scope

from covenant.doors.a2a.encoded import Encoded, Told
from covenant.doors.a2a.noticing import Noticing
from covenant.exchange.conversation import Ask, Conversations
from covenant.exchange.streams import Stream
from covenant.exchange.tenancy import unauthenticated
from covenant.model.asking import TaskPage
from covenant.model.errors import Conflict, Invalid
from covenant.model.folding import TaskView
from covenant.wire import a2a_v03, a2a_v1
from covenant.wire.a2a_errors import Dialect

Cards = Callable[[Ask, Dialect, str], bytes]
"""The extended card of an agent, as JSON: who asks, in which dialect, and the base of our own address."""


class Pushes(Protocol):
    """Push notifications, where they are switched on."""

    async def ask(self, ask: Ask, request: Any) -> Any:
        """Create, get, list or delete, by the kind of the request."""


@dataclass(frozen=True, slots=True)
class Office:
    """What is behind the A2A door."""

    conversations: Conversations
    extended_card: Cards | None = None
    pushes: Pushes | None = None
    encoded: Encoded = field(default_factory=Encoded)
    noticing: Noticing = field(default_factory=Noticing)


class Asked(msgspec.Struct, frozen=True):
    """One request, as its binding read it."""

    ask: Ask
    request: Any
    dialect: Dialect
    reached: Callable[[Scope], str]
    scope: Scope

    def base_url(self) -> str:
        """Where we were called."""
        return self.reached(self.scope)


Wire = ModuleType
"""`wire.a2a_v1` or `wire.a2a_v03`: the same names, in two dialects."""

V1, V03 = Dialect.V1, Dialect.V03
WIRES: Final[dict[Dialect, Wire]] = {V1: a2a_v1, V03: a2a_v03}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    name: str
    """Its method in A2A 1.0, which is also its name on gRPC."""
    slash: str
    """Its method in 0.3."""
    run: Callable[[Office, Asked], Awaitable[Any]]
    decode: Callable[[Wire, bytes | msgspec.Raw, int | None], Any]
    """From the params and the cursor to the request."""
    encode: Callable[[Wire, Any, Any], bytes]
    """From the answer and the request to JSON. What streams encodes its frames."""
    streams: bool = False
    works: bool = False
    """Whether it starts work, and so may take long."""


def _send(office: Office, asked: Asked) -> Awaitable[TaskView]:
    return office.conversations.send(asked.ask, asked.request)


def _stream(office: Office, asked: Asked) -> Awaitable[Stream]:
    return office.conversations.stream(asked.ask, asked.request)


async def _get(office: Office, asked: Asked) -> Told:
    return Told(await office.conversations.get(asked.ask, asked.request), office.encoded)


def _list(office: Office, asked: Asked) -> Awaitable[TaskPage]:
    return office.conversations.list_tasks(asked.ask, asked.request)


def _cancel(office: Office, asked: Asked) -> Awaitable[TaskView]:
    return office.conversations.cancel(asked.ask, asked.request)


def _subscribe(office: Office, asked: Asked) -> Awaitable[Stream]:
    # A client of 0.3 follows a task from its beginning, also one that has ended; one of 1.0 from where it is.
    old = asked.dialect is V03
    return office.conversations.subscribe(asked.ask, asked.request, from_start=old, finished=old)


async def _push(office: Office, asked: Asked) -> Any:
    if office.pushes is None:
        raise Conflict("push_not_supported", "push notifications are switched off here")
    return await office.pushes.ask(asked.ask, asked.request)


async def _extended_card(office: Office, asked: Asked) -> bytes:
    if office.extended_card is None:
        raise Conflict("extended_card_not_configured", "there is no extended card")
    if asked.ask.caller.anonymous:
        # What it says beyond the public card is for those who say who they are, also where an agent is open.
        raise unauthenticated()
    return office.extended_card(asked.ask, asked.dialect, asked.base_url())


def _no_frames(_: Wire, __: object, ___: object) -> bytes:
    raise AssertionError("a stream has frames, and no single answer")


OPERATIONS: Final = (
    Operation(
        name="SendMessage",
        slash="message/send",
        run=_send,
        decode=lambda wire, params, _: wire.decode_send(params),
        encode=lambda wire, view, asked: wire.encode_sent(view, asked.history_length),
        works=True,
    ),
    Operation(
        name="SendStreamingMessage",
        slash="message/stream",
        run=_stream,
        decode=lambda wire, params, _: wire.decode_send(params),
        encode=_no_frames,
        streams=True,
        works=True,
    ),
    Operation(
        name="GetTask",
        slash="tasks/get",
        run=_get,
        decode=lambda wire, params, _: wire.decode_get_task(params),
        encode=lambda wire, told, asked: told.encoded.task(wire, told.view, asked.history_length),
    ),
    Operation(
        name="ListTasks",
        slash="tasks/list",
        run=_list,
        decode=lambda wire, params, _: wire.decode_list_tasks(params),
        encode=lambda wire, page, asked: wire.encode_page(page, asked),
    ),
    Operation(
        name="CancelTask",
        slash="tasks/cancel",
        run=_cancel,
        decode=lambda wire, params, _: wire.decode_cancel(params),
        encode=lambda wire, view, _: wire.encode_task(view),
    ),
    Operation(
        name="SubscribeToTask",
        slash="tasks/resubscribe",
        run=_subscribe,
        decode=lambda wire, params, cursor: wire.decode_subscribe(params, cursor),
        encode=_no_frames,
        streams=True,
    ),
    Operation(
        name="CreateTaskPushNotificationConfig",
        slash="tasks/pushNotificationConfig/set",
        run=_push,
        decode=lambda wire, params, _: wire.decode_create_push(params),
        encode=lambda wire, config, asked: wire.encode_push(asked.task_id, config),
    ),
    Operation(
        name="GetTaskPushNotificationConfig",
        slash="tasks/pushNotificationConfig/get",
        run=_push,
        decode=lambda wire, params, _: wire.decode_get_push(params),
        encode=lambda wire, config, asked: wire.encode_push(asked.task_id, config),
    ),
    Operation(
        name="ListTaskPushNotificationConfigs",
        slash="tasks/pushNotificationConfig/list",
        run=_push,
        decode=lambda wire, params, _: wire.decode_list_push(params),
        encode=lambda wire, page, asked: wire.encode_pushes(asked.task_id, page.configs, page.next_page_token),
    ),
    Operation(
        name="DeleteTaskPushNotificationConfig",
        slash="tasks/pushNotificationConfig/delete",
        run=_push,
        decode=lambda wire, params, _: wire.decode_delete_push(params),
        encode=lambda wire, _, __: wire.DELETED,
    ),
    Operation(
        name="GetExtendedAgentCard",
        slash="agent/getAuthenticatedExtendedCard",
        run=_extended_card,
        decode=lambda wire, params, _: wire.decode_nothing(params),
        encode=lambda _, card, __: card,
    ),
)

BY_NAME: Final = {operation.name: operation for operation in OPERATIONS}


class Method(NamedTuple):
    """An operation as JSON-RPC names it, in one dialect."""

    operation: Operation
    dialect: Dialect
    wire: Wire
    decode: Callable[[bytes, int | None], Any]


def _method(operation: Operation, dialect: Dialect) -> Method:
    return Method(operation, dialect, WIRES[dialect], partial(operation.decode, WIRES[dialect]))


METHODS: Final[dict[str, Method]] = {
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
