"""`/v1/requests`: a tenant's tasks by id, what happens to them, and an end to them. The request id is the task id.

The events are told from the beginning, or from where `Last-Event-ID` or `since` says that the caller stopped listening:
first what has happened, then what happens, each once and under its number.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final

import msgspec
from starlette.routing import BaseRoute
from starlette.types import Send

from covenant.doors.http.bearer_auth import TenantGate
from covenant.doors.http.endpoint import TOO_SLOW, TenantCall, Writer, tenant_routes
from covenant.doors.http.openapi import Described
from covenant.doors.metrics import Meter
from covenant.exchange.task_lookup import TaskLookup
from covenant.exchange.tasks.task_stream import TaskStream
from covenant.ledger.contract.tasks import TaskRow
from covenant.model.errors import Conflict, NotFound
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
    def __init__(self, requests: TaskLookup) -> None:
        self._requests = requests

    async def list_requests(self, asked: TenantCall) -> tuple[int, RequestList]:
        limit = decode_query(ListRequests, asked.query).limit
        found = await self._requests.list(asked.caller, limit)
        rows = tuple(_listed(asked.caller.tenant.name, row) for row in found)
        return 200, RequestList(count=len(rows), requests=rows)

    async def show_request(self, asked: TenantCall) -> tuple[int, OneRequest]:
        try:
            view = await self._requests.get(asked.caller, asked.path["request_id"])
        except NotFound:
            raise _not_found() from None
        return 200, OneRequest(request=show_request(view))

    async def cancel_request(self, asked: TenantCall) -> tuple[int, Cancelled]:
        request_id = asked.path["request_id"]
        try:
            await self._requests.cancel(asked.caller, request_id)
        except (NotFound, Conflict):
            # One that is unknown, another's or over is told apart by nobody.
            return 404, Cancelled(request_id=request_id, cancelled=False, reason=NOT_RUNNING)
        return 200, Cancelled(request_id=request_id, cancelled=True)

    async def follow_request(self, asked: TenantCall) -> tuple[TaskStream, Writer]:
        after = _cursor(asked)
        try:
            request_id = asked.path["request_id"]
            stream = await self._requests.follow(asked.caller, request_id, after, ends_when_parked=False)
        except NotFound:
            raise _not_found() from None
        return stream, partial(write_events, stream, from_start=after == 0)


def _not_found() -> NotFound:
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


def _cursor(asked: TenantCall) -> int:
    """What a client that came back says by itself is newer than the address it was first given."""
    header = asked.header(b"last-event-id")
    seen = last_event_id(header) if header is not None else None
    if seen is not None:
        return seen
    query = decode_query(FollowRequest, asked.query)
    return query.since if query.since is not None else query.since_seq or 0


async def write_events(stream: TaskStream, send: Send, *, from_start: bool) -> None:
    events = RequestEvents(stream.first.task, stream.first.created_at_ms)
    if from_start:
        await send({"type": "http.response.body", "body": events.received(), "more_body": True})
    async for steps in stream:
        body = events.frames(steps) if steps else KEEP_ALIVE
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


def request_routes(requests: TaskLookup, gate: TenantGate, meter: Meter) -> list[BaseRoute]:
    return tenant_routes(DESCRIBED, RequestDoor(requests), gate, meter, body_bytes_max=BODY_BYTES_MAX)
