"""One operation as an ASGI callable: who calls, what they ask, the answer; or the refusal, and never a traceback.

The order of checks is authentication, size, JSON, types. Nothing is buffered for a caller who is not known.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, Generic, TypeVar

import msgspec
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from covenant.doors.http.bearer_auth import TRANSPORT, TenantGate, _encode, authenticate
from covenant.doors.http.openapi import Described
from covenant.doors.http.request_body import BODY_TOO_LARGE, body_at_hand, read_body
from covenant.doors.http.responses import (
    CLOSE,
    reply,
    reply_internal,
    reply_not_allowed,
    reply_problem,
    reply_refused,
    speaks_plainly,
)
from covenant.doors.metrics import Meter
from covenant.doors.operator_api.answers import ApiAnswer
from covenant.doors.operator_api.operation import ApiOperation, Services
from covenant.doors.waits import CallerGoneError, OnDisconnect, Waits
from covenant.exchange.access.principals import IdentityAuth, Principal
from covenant.exchange.access.tenants import Caller
from covenant.model.call_context import Hop
from covenant.model.errors import Refusal
from covenant.wire.call_headers import (
    CHAIN_HEADER,
    DEADLINE_HEADER,
    DEPTH_HEADER,
    TRACEPARENT,
    TRACESTATE,
    read_call_context,
)
from covenant.wire.json_input import check_fields, decode, decode_query
from covenant.wire.mailbox import Request

R = TypeVar("R", bound=Request)

log = logging.getLogger(__name__)


class OperationEndpoint(Generic[R]):
    def __init__(
        self,
        operation: ApiOperation[R],
        office: Services,
        doorkeeper: IdentityAuth,
        waits: Waits,
        meter: Meter,
        *,
        encode: Callable[[ApiAnswer], bytes],
        body_bytes_max: int,
    ) -> None:
        self._operation = operation
        self._run = operation.run
        self._office = office
        self._doorkeeper = doorkeeper
        self._waits = waits
        self._meter = meter
        self._timer = meter.timer(TRANSPORT, operation.kind)
        self._encode = encode
        self._body_bytes_max = body_bytes_max
        self._decoder = msgspec.json.Decoder(operation.request)
        self._in_body = operation.in_body
        self._in_path = "{" in operation.path
        self._plainly = speaks_plainly(operation.path)
        self._refuse = reply_problem if self._plainly else reply_refused
        # A GET without a query asks for the defaults; requests are frozen, so one will do for all.
        self._plain = msgspec.convert({}, operation.request) if not operation.in_body else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_s = perf_counter()
        try:
            caller = await authenticate(self._doorkeeper, scope)
            request = await self._request(scope, receive, send)
            if self._operation.wait is not None and getattr(request, "wait_ms", None):
                answer = await self._wait(caller, request, receive, send)
            else:
                answer = await self._run(self._office, caller, request)
            await reply(send, self._operation.status, self._encode(answer))
        except Refusal as refusal:
            self._meter.refused(TRANSPORT, refusal.code)
            await self._refuse(send, refusal, (CLOSE,) if refusal.code == BODY_TOO_LARGE else ())
        except CallerGoneError:
            return
        except Exception:  # the last stand before the client: it hears nothing of what went wrong
            log.exception("http.failed", extra={"operation": self._operation.kind})
            self._meter.refused(TRANSPORT, "internal")
            await reply_internal(send, plain=self._plainly)
        finally:
            self._timer.observe(perf_counter() - started_s)

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> R:
        if self._in_body:
            body = body_at_hand(send, self._body_bytes_max)
            if body is None:
                body = await read_body(scope, receive, self._body_bytes_max)
            # What has no required field may come without a body.
            request = decode(self._decoder, body if body.strip() else b"{}")
            if request.strict and body.strip():
                check_fields(body, self._operation.request)
        elif self._plain is not None and not scope["query_string"]:
            request = self._plain
        else:
            request = decode_query(self._operation.request, scope["query_string"])
        if self._in_path:
            return msgspec.structs.replace(request, **scope["path_params"])
        return request

    async def _wait(self, caller: Principal, request: R, receive: Receive, send: Send) -> ApiAnswer:
        wait = self._operation.wait
        assert wait is not None
        with self._waits.pause(caller) as pause, OnDisconnect(send, receive, pause.leave):
            return await wait(self._office, caller, request, pause)


@dataclass(frozen=True, slots=True)
class TenantRequest:
    """One request of a tenant, its body read and nothing more."""

    caller: Caller
    path: Mapping[str, str]
    query: bytes
    body: bytes


class RefusedByExisting(Exception):
    """A refusal that shows what stands in the way."""

    def __init__(self, refusal: Refusal, existing: Any) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.existing = existing


class TenantEndpoint:
    """One route as an ASGI callable: `run` gives a status and what is answered as JSON."""

    def __init__(
        self,
        gate: TenantGate,
        meter: Meter,
        name: str,
        run: Callable[[TenantRequest], Awaitable[tuple[int, Any]]],
        *,
        body_bytes_max: int,
    ) -> None:
        self._gate = gate
        self._meter = meter
        self._timer = meter.timer(TRANSPORT, name)
        self._name = name
        self._run = run
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_s = perf_counter()
        try:
            caller = await self._gate.enter(scope)
            with self._gate.limiter.connected(caller):
                body = await read_body(scope, receive, self._body_bytes_max)
                status, answer = await self._run(
                    TenantRequest(caller, scope["path_params"], scope["query_string"], body)
                )
                await reply(send, status, _encode(answer))
        except Refusal as refusal:
            self._meter.refused(TRANSPORT, refusal.code)
            await reply_problem(send, refusal, (CLOSE,) if refusal.code == BODY_TOO_LARGE else ())
        except RefusedByExisting as refused:
            self._meter.refused(TRANSPORT, refused.refusal.code)
            await reply_problem(send, refused.refusal, existing=refused.existing)
        except CallerGoneError:
            return
        except Exception:  # the last stand before the client: it hears nothing of what went wrong
            log.exception("http.failed", extra={"operation": self._name})
            self._meter.refused(TRANSPORT, "internal")
            await reply_internal(send, plain=True)
        finally:
            self._timer.observe(perf_counter() - started_s)


class MethodRouter:
    """The routes of one path."""

    def __init__(self, calls: Mapping[str, ASGIApp]) -> None:
        self.calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self.calls.get(scope["method"])
        if call is None:
            await reply_not_allowed(send, tuple(self.calls), plain=speaks_plainly(scope["path"]))
        else:
            await call(scope, receive, send)


def described_routes(described: Iterable[Described], calls: Mapping[str, ASGIApp]) -> list[BaseRoute]:
    """The routes that the OpenAPI document describes so, each with what answers it, by name."""
    paths: dict[str, dict[str, ASGIApp]] = {}
    for each in described:
        paths.setdefault(each.path, {})[each.method] = calls[each.name]
    return [Route(path, MethodRouter(by_method), name=path) for path, by_method in paths.items()]


_NAMES: Final = {name.encode(): name for name in (DEPTH_HEADER, CHAIN_HEADER, DEADLINE_HEADER, TRACEPARENT, TRACESTATE)}


def read_call_headers(scope: Scope) -> Hop | None:
    """None if nothing is said."""
    said = {_NAMES[name]: value.decode("latin-1") for name, value in scope["headers"] if name in _NAMES}
    return read_call_context(None, said) if said else None
