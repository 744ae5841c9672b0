"""`/v1/requests`: a tenant's tasks by id, what happens to them, and an end to them. The request id is the task id.

The events are told from the beginning, or from where `Last-Event-ID` or `since` says that the caller stopped listening:
first what has happened, then what happens, each once and under its number.
"""

from __future__ import annotations

from time import perf_counter
from typing import Annotated, Final

import msgspec
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from covenant.doors.a2a.sse_stream import TOO_SLOW, run_stream
from covenant.doors.http.bearer_auth import TRANSPORT, TenantGate
from covenant.doors.http.endpoint import TenantEndpoint, TenantRequest, described_routes
from covenant.doors.http.openapi import Described
from covenant.doors.http.responses import reply_problem
from covenant.doors.metrics import Meter
from covenant.exchange.access.tenants import Caller
from covenant.exchange.native import TenantTasks
from covenant.exchange.tasks.task_stream import TaskStream
from covenant.ledger.contract.tasks import TaskRow
from covenant.model.errors import NotFound, Refusal
from covenant.model.task_view import TaskState
from covenant.wire.json_input import decode_query
from covenant.wire.native import RequestEvent, RequestEvents, RequestShown, conversation_of, request_state, show_request
from covenant.wire.sse import KEEP_ALIVE, last_event_id

REQUESTS: Final = "/v1/requests"
REQUEST: Final = "/v1/requests/{request_id}"
EVENTS: Final = "/v1/requests/{request_id}/events"
CANCEL: Final = "/v1/requests/{request_id}/cancel"
BODY_BYTES_MAX: Final = 64 * 1024
LIMIT: Final = 100
LIMIT_MAX: Final = 200

NOT_FOUND: Final = "request not found"
NOT_RUNNING: Final = "no such request is running"

Limit = Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX)]
Cursor = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class ListRequests(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    limit: Limit = LIMIT


class FollowRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The number of the last event that was seen, under either name; 0 or none: from the beginning."""

    since: Cursor | None = None
    since_seq: Cursor | None = None


class RequestList(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    count: int
    requests: tuple[RequestShown, ...]


class OneRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    request: RequestShown


class Cancelled(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """`reason` is the same for one that is unknown, another's, or over."""

    request_id: str
    cancelled: bool
    reason: str | None = None


class RequestDoor:
    def __init__(self, requests: TenantTasks) -> None:
        self._requests = requests

    async def list(self, asked: TenantRequest) -> tuple[int, RequestList]:
        limit = decode_query(ListRequests, asked.query).limit
        found = await self._requests.list(asked.caller, limit)
        rows = tuple(_listed(asked.caller.tenant.name, row) for row in found)
        return 200, RequestList(count=len(rows), requests=rows)

    async def show(self, asked: TenantRequest) -> tuple[int, OneRequest]:
        try:
            view = await self._requests.get(asked.caller, asked.path["request_id"])
        except NotFound:
            raise not_found() from None
        return 200, OneRequest(request=show_request(view))

    async def cancel(self, asked: TenantRequest) -> tuple[int, Cancelled]:
        request_id = asked.path["request_id"]
        if await self._requests.cancel(asked.caller, request_id):
            return 200, Cancelled(request_id=request_id, cancelled=True)
        return 404, Cancelled(request_id=request_id, cancelled=False, reason=NOT_RUNNING)


def not_found() -> NotFound:
    return NotFound("unknown_request", NOT_FOUND)


def _listed(tenant: str, row: TaskRow) -> RequestShown:
    return RequestShown(
        request_id=row.task_id,
        tenant_id=tenant,
        agent_id=row.agent_id,
        conversation_id=conversation_of(row.origin, row.context_id),
        origin=row.origin,
        state=request_state(row.state),
        a2a_state=row.state,
        started_at_ms=row.created_at_ms,
        updated_at_ms=row.updated_at_ms,
        completed_at_ms=row.updated_at_ms if TaskState(row.state).terminal else None,
        error_message=row.error_message or None,
        last_seq=row.generation,
    )


class EventsEndpoint:
    """The stream of one request, as an ASGI callable."""

    def __init__(self, requests: TenantTasks, gate: TenantGate, meter: Meter) -> None:
        self._requests = requests
        self._gate = gate
        self._meter = meter
        self._timer = meter.timer(TRANSPORT, "follow_request")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            caller, limiter = await self._gate.enter(scope), self._gate.limiter
            with limiter.connected(caller), limiter.streaming(caller):
                await self._follow(caller, scope, receive, send)
        except Refusal as refusal:
            self._meter.refused(TRANSPORT, refusal.code)
            await reply_problem(send, refusal)

    async def _follow(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        started_s = perf_counter()
        try:
            after = _cursor(scope)
            stream = await self._requests.follow(caller, scope["path_params"]["request_id"], after)
        except Refusal as refusal:
            told = not_found() if isinstance(refusal, NotFound) else refusal
            self._meter.refused(TRANSPORT, told.code)
            await reply_problem(send, told)
            return
        finally:
            self._timer.observe(perf_counter() - started_s)

        async def write(to: Send) -> None:
            await tell(stream, to, from_start=after == 0)

        await run_stream(stream, caller, write, tenancy=self._gate.tenancy, receive=receive, send=send)


def _cursor(scope: Scope) -> int:
    """What a client that came back says by itself is newer than the address it was first given."""
    header = next((value for name, value in scope["headers"] if name == b"last-event-id"), None)
    seen = last_event_id(header.decode("latin-1")) if header is not None else None
    if seen is not None:
        return seen
    asked = decode_query(FollowRequest, scope["query_string"])
    return asked.since if asked.since is not None else asked.since_seq or 0


async def tell(stream: TaskStream, send: Send, *, from_start: bool) -> None:
    telling = RequestEvents(stream.first.task, stream.first.created_at_ms)
    if from_start:
        await send({"type": "http.response.body", "body": telling.received(), "more_body": True})
    async for steps in stream:
        body = telling.frames(steps) if steps else KEEP_ALIVE
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": TOO_SLOW if stream.cut else b"", "more_body": False})


DESCRIBED: Final = (
    Described(
        path=REQUESTS,
        method="GET",
        name="list_requests",
        summary="Your requests, the newest first",
        query=ListRequests,
        answer=RequestList,
    ),
    Described(path=REQUEST, method="GET", name="show_request", summary="One of your requests", answer=OneRequest),
    Described(
        path=EVENTS,
        method="GET",
        name="follow_request",
        summary="What happened and happens to it, as server-sent events; resume with Last-Event-ID, or since",
        query=FollowRequest,
        answer=RequestEvent,
        media_type="text/event-stream",
    ),
    Described(
        path=CANCEL,
        method="POST",
        name="cancel_request",
        summary="End it; 404 says in the same shape that there was nothing to end",
        answer=Cancelled,
        same_at=404,
    ),
)


def request_routes(requests: TenantTasks, gate: TenantGate, meter: Meter) -> list[BaseRoute]:
    door = RequestDoor(requests)
    runs = {"list_requests": door.list, "show_request": door.show, "cancel_request": door.cancel}
    calls: dict[str, ASGIApp] = {
        name: TenantEndpoint(gate, meter, name, run, body_bytes_max=BODY_BYTES_MAX) for name, run in runs.items()
    }
    return described_routes(DESCRIBED, {**calls, "follow_request": EventsEndpoint(requests, gate, meter)})
