"""A2A over JSON-RPC: both dialects at one address, told apart by the method's name.

The order of checks is authentication, limits, JSON, envelope, method, version, agent, params. What is refused before
there is a call to answer has an HTTP status; what is refused after it rides on 200, as JSON-RPC has it.
"""

from __future__ import annotations

import logging
from time import perf_counter

from starlette.types import Receive, Scope, Send

from covenant.doors.a2a.admission import TRANSPORT, Admission, AdmittedCaller, Headers
from covenant.doors.a2a.operations import METHODS, OPERATIONS, A2AServices, RpcMethod
from covenant.doors.a2a.sse_stream import write_stream
from covenant.doors.http.responses import reply, reply_problem
from covenant.doors.waits import CallerGoneError
from covenant.model.errors import OverLimit, Refusal, Unauthenticated
from covenant.wire import jsonrpc
from covenant.wire.a2a.error_codes import Version
from covenant.wire.sse import SseFormat

log = logging.getLogger(__name__)


class JsonRpcBinding:
    def __init__(self, gate: Admission, services: A2AServices, *, body_bytes_max: int) -> None:
        self._gate = gate
        self._services = services
        self._body_bytes_max = body_bytes_max
        self._timers = {operation.name: gate.meter.timer(TRANSPORT, operation.name) for operation in OPERATIONS}

    async def answer(self, agent_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            visit = await self._gate.enter(scope, Headers(scope), agent_id)
            with self._gate.tenants.limiter.connected(visit.caller):
                body = await self._gate.read_body(visit, receive, send, self._body_bytes_max)
                await self._answer(visit, body, receive, send)
        except Refusal as refusal:
            self._gate.meter.refused(TRANSPORT, refusal.code)
            await reply_problem(send, refusal)
        except CallerGoneError:
            return

    async def _answer(self, visit: AdmittedCaller, body: bytes, receive: Receive, send: Send) -> None:
        try:
            call = jsonrpc.decode_call(body)
            method = METHODS.get(call.method)
            if method is None:
                raise jsonrpc.unknown_method(call)
        except jsonrpc.UnreadableCall as unreadable:
            self._gate.meter.refused(TRANSPORT, unreadable.code)
            await reply(send, 200, jsonrpc.encode_refusal(unreadable.id, unreadable, Version.V1))
            return
        name, version, started_s = method.operation.name, method.dialect.version, perf_counter()
        try:
            await self._run(visit, method, call, receive, send)
        except (OverLimit, Unauthenticated, CallerGoneError):
            # Told outside, by its status.
            raise
        except Refusal as refusal:
            self._gate.meter.refused(TRANSPORT, refusal.code)
            await reply(send, 200, jsonrpc.encode_refusal(call.id, refusal, version))
        except Exception as error:  # the last stand before the client: it hears nothing of what went wrong
            log.exception("a2a.failed", extra={"operation": name})
            self._gate.meter.refused(TRANSPORT, "internal")
            await reply(send, 200, jsonrpc.encode_refusal(call.id, error, version))
        finally:
            self._timers[name].observe(perf_counter() - started_s)

    async def _run(
        self, visit: AdmittedCaller, method: RpcMethod, rpc: jsonrpc.RpcCall, receive: Receive, send: Send
    ) -> None:
        operation, dialect, decode = method
        call = self._gate.call(visit, operation, dialect, decode, rpc.params)
        tenancy = self._gate.tenants.tenancy
        if operation.open_stream is None:
            answer = await self._gate.run(operation, self._services, call, send, receive)
            await reply(send, 200, jsonrpc.encode_result(rpc.id, answer))
            return
        with self._gate.tenants.limiter.streaming(visit.caller):
            stream = await operation.open_stream(self._services, call)
            frames = SseFormat(*jsonrpc.result_frame(rpc.id), named=dialect.named_events)
            await write_stream(stream, call, frames, tenancy=tenancy, receive=receive, send=send)
