"""One operation as an ASGI callable: who calls, what they ask, the answer; or the refusal, and never a traceback.

The order of checks is authentication, size, JSON, types. Nothing is buffered for a caller who is not known.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import perf_counter
from typing import Any, Generic, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from covenant.doors.answers import Answer
from covenant.doors.http.bearer import TRANSPORT, authenticate
from covenant.doors.http.body import BODY_TOO_LARGE, body_at_hand, read_body
from covenant.doors.http.reply import CLOSE, reply, reply_internal, reply_problem, reply_refused, speaks_plainly
from covenant.doors.metrics import Meter
from covenant.doors.operation import Office, Operation
from covenant.doors.waiting import CallerGoneError, Waits
from covenant.exchange.access.principals import IdentityAuth, Principal
from covenant.model.errors import Refusal
from covenant.wire.json_input import check_fields, decode, decode_query
from covenant.wire.mailbox import Request

R = TypeVar("R", bound=Request)

log = logging.getLogger(__name__)


class Call(Generic[R]):
    def __init__(
        self,
        operation: Operation[R],
        office: Office,
        doorkeeper: IdentityAuth,
        waits: Waits,
        meter: Meter,
        *,
        encode: Callable[[Answer], bytes],
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
                answer = await self._wait(caller, request, receive)
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

    async def _wait(self, caller: Principal, request: R, receive: Receive) -> Answer:
        wait = self._operation.wait
        assert wait is not None
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            return await self._waits.run(caller, gone, lambda pause: wait(self._office, caller, request, pause))
        finally:
            gone.cancel()


async def _disconnected(receive: Receive) -> None:
    message: Any = None
    while message is None or message["type"] != "http.disconnect":
        message = await receive()
