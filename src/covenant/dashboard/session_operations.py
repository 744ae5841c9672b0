"""The operator API for browser sessions: which role may run which operation.

The operator runs every operation except the GETs that take something, with the same grants and audit rows as on the
command line. A viewer runs the operations that only read, and sees all that the operator sees. A tenant runs a few
operations on its own tasks; ownership is checked before anything else is looked up.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from covenant.dashboard.sessions import Role, UiSession, no_session
from covenant.doors.http.endpoint import Endpoint, OperationEndpoint, routes_of_calls
from covenant.doors.http.request_body import read_body
from covenant.doors.http.responses import MAILBOX, reply, reply_refused
from covenant.doors.http.server.http_exchange import HttpExchange, exchange_of
from covenant.doors.operator_api.operation import (
    AnyApiOperation,
    ApiAnswer,
    ApiContext,
    Services,
    encode,
    expand_ids,
    has_short_id,
)
from covenant.doors.operator_api.operation_table import OPERATIONS
from covenant.exchange.access.principals import Principal
from covenant.ledger.machine.decisions.context import unknown_task
from covenant.model.errors import Forbidden, Invalid, NotFound
from covenant.model.ids import parse_task_id
from covenant.wire.json_input import shorten
from covenant.wire.mailbox import Request

SESSION: Final = "covenant.ui_session"
"""The key of the session in a request's scope."""

R = TypeVar("R", bound=Request)

VIEWER_KINDS: Final = frozenset(
    """
    find_a2a_tasks count_a2a_tasks a2a_task_log a2a_task_frames recent_a2a_tasks recent_a2a_results a2a_queue
    show_a2a_task a2a_tree a2a_pushes
    list_identities recent_capabilities recent_audit verify_audit_integrity
    list_tenants list_stored_files list_agents show_agent show_agent_card show_settings list_nodes show_attention
    list_schedules show_schedule
    list_peers show_peer peer_capabilities list_peer_messages peer_usage peer_config
    list_delegations show_delegation delegation_tree delegation_proof
    """.split()
)
"""Operations for viewers: they change nothing and take nothing. Not every GET is one: receiving is a GET, too."""

OPERATOR_GETS: Final = VIEWER_KINDS | {"tenant_removal", "tenant_traces", "drain_status"}
"""GET operations for the operator. Any link can lead a browser to a GET, so no GET of a session may take anything."""

OWN_TASK_KINDS: Final = frozenset("show_a2a_task a2a_tree cancel_a2a_task answer_a2a_task signal_a2a_task".split())
"""Operations for a tenant on a task of its own, named by `task_id`."""

_BY_KIND: Final = {operation.kind: operation for operation in OPERATIONS}
TAKING_GETS: Final = frozenset(operation.kind for operation in OPERATIONS if operation.method == "GET") - OPERATOR_GETS
TENANT_KINDS: Final = frozenset(operation.kind for operation in OPERATIONS if operation.for_tenants) - OWN_TASK_KINDS
"""Operations that a tenant may also run with its token: they check by themselves what belongs to the tenant."""


def allowed(role: Role, kind: str) -> bool:
    """Whether a role may run an operation of this kind at all."""
    if role is Role.OPERATOR:
        return kind not in TAKING_GETS
    return kind in (VIEWER_KINDS if role is Role.VIEWER else OWN_TASK_KINDS | TENANT_KINDS)


async def scoped(session: UiSession, operation: AnyApiOperation, request: R, services: Services) -> tuple[Principal, R]:
    """The principal and the request to run the operation with, after the check that this session may run it."""
    if session.ended:  # while the body of the request arrived
        raise no_session()
    if not allowed(session.role, operation.kind):
        raise role_forbidden(session.role, operation.kind)
    # An operation that the tables allow, on a task that is the session's own, may read as the operator.
    as_operator = msgspec.structs.replace(session.principal, operator=True)
    if has_short_id(request):
        viewer = session.principal if session.role is Role.TENANT else as_operator
        request = await expand_ids(services, viewer, request)
    if session.role is Role.OPERATOR or (session.role is Role.TENANT and operation.kind in TENANT_KINDS):
        return session.principal, request
    if session.role is Role.TENANT:
        await _check_own(session, request, services)
    return as_operator, request


async def _check_own(session: UiSession, request: Request, services: Services) -> None:
    task_id = str(getattr(request, "task_id", ""))
    parties = await services.ledger.parties(parse_task_id(task_id))
    if parties is None or parties.tenant != session.tenant:
        raise unknown_task(task_id)


def role_forbidden(role: Role, what: str) -> Forbidden:
    return Forbidden(
        "role_forbidden", f"the role {role.value} may not do this on the dashboard: {what.replace('_', ' ')}"
    )


class SessionEndpoint(OperationEndpoint[R]):
    """Runs an operation for the session in the scope."""

    async def _answer(self, scope: Scope, exchange: HttpExchange) -> None:
        session: UiSession = scope[SESSION]
        if not allowed(session.role, self._operation.kind):  # before anything of the request is read
            raise role_forbidden(session.role, self._operation.kind)
        body = b""
        if self._in_body:
            found = exchange.take_whole_body(self._body_bytes_max)
            body = await read_body(scope, exchange.receive, self._body_bytes_max) if found is None else found
        caller, request = await scoped(session, self._operation, self._request(scope, body), self._services)
        if self._operation.wait is not None and getattr(request, "wait_ms", None):
            answer = await self._wait(caller, request, scope, exchange)
        else:
            answer = await self._run(self._services, caller, request)
        reply(exchange, self._operation.status, self._encode(answer))


class SessionPage(Endpoint):
    """A GET of the dashboard's own: `run` returns what the session is shown."""

    def __init__(self, name: str, api: ApiContext, run: Callable[[UiSession, Scope], Awaitable[Any]]) -> None:
        super().__init__(name, MAILBOX, api.meter)
        self._run = run

    async def _answer(self, scope: Scope, exchange: HttpExchange) -> None:
        reply(exchange, 200, encode(await self._run(scope[SESSION], scope)))


def operation_router(api: ApiContext, *, body_bytes_max: int, gets: Mapping[str, ASGIApp]) -> Router:
    """Routes every operation at its HTTP path, and the further endpoints `gets`, which answer GET."""
    calls: list[tuple[str, str, ASGIApp]] = [("GET", path, call) for path, call in gets.items()]
    for operation in OPERATIONS:
        call = SessionEndpoint(operation, api, style=MAILBOX, body_bytes_max=body_bytes_max)
        calls.append((operation.method, operation.path, call))
    return Router(routes_of_calls(calls, MAILBOX), redirect_slashes=False, default=_not_found)


async def _not_found(_scope: Scope, _: Receive, send: Send) -> None:
    reply_refused(exchange_of(send), MAILBOX, NotFound("unknown_route", "no operation has this path and method"))


async def run_for(session: UiSession, kind: str, services: Services, fields: Mapping[str, Any]) -> ApiAnswer:
    """Runs an operation for a form or an endpoint of the dashboard, with the same checks as over HTTP."""
    operation = _BY_KIND[kind]
    try:
        request = msgspec.convert(fields, operation.request)
    except msgspec.ValidationError as wrong:
        raise Invalid("invalid_request", shorten(str(wrong))) from None
    caller, request = await scoped(session, operation, request, services)
    return await operation.run(services, caller, request)
