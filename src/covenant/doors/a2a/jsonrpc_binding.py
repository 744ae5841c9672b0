"""A2A over JSON-RPC: both dialects at one address, told apart by the method's name.

The order of checks is authentication, limits, JSON, envelope, method, version, agent, params. What is refused before
there is a call to answer has an HTTP status; what is refused after it rides on 200, as JSON-RPC has it.
"""

from __future__ import annotations

import logging
from time import perf_counter
from typing import NoReturn

from starlette.types import Receive, Scope, Send

from covenant.doors.a2a.admission import TRANSPORT, Admission, AdmittedCaller, Headers, reply_json
from covenant.doors.a2a.disconnect import run_while_connected
from covenant.doors.a2a.operations import METHODS, OPERATIONS, A2ACall, A2AOperation, A2AServices
from covenant.doors.a2a.sse_stream import write_stream
from covenant.doors.http.responses import reply_problem
from covenant.doors.waits import CallerGoneError
from covenant.model.errors import OverLimit, Refusal, Unauthenticated
from covenant.wire import jsonrpc
from covenant.wire.a2a.error_codes import Dialect
from covenant.wire.sse import SseFormat

log = logging.getLogger(__name__)


class Rpc:
    def __init__(self, gate: Admission, office: A2AServices, *, body_bytes_max: int) -> None:
        self._gate = gate
        self._office = office
        self._body_bytes_max = body_bytes_max
        self._timers = {operation.name: gate.meter.timer(TRANSPORT, operation.name) for operation in OPERATIONS}

    async def answer(self, agent_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            visit = await self._gate.enter(scope, Headers(scope), agent_id)
            with self._gate.connected(visit.caller):
                await self._answer(visit, receive, send)
        except Refusal as refusal:
            self._gate.meter.refused(TRANSPORT, refusal.code)
            await reply_problem(send, refusal)

    async def _answer(self, visit: AdmittedCaller, receive: Receive, send: Send) -> None:
        try:
            call = jsonrpc.decode_call(await self._gate.read_body(visit, receive, send, self._body_bytes_max))
            method = METHODS.get(call.method) or _unknown(call)
        except jsonrpc.UnreadableCall as unreadable:
            self._gate.meter.refused(TRANSPORT, unreadable.code)
            await reply_json(send, jsonrpc.encode_refusal(unreadable.id, unreadable, Dialect.V1))
            return
        except Refusal as refusal:
            self._gate.meter.refused(TRANSPORT, refusal.code)
            await reply_problem(send, refusal)
            return
        except CallerGoneError:
            return
        operation, dialect, wire, decode = method
        started_s = perf_counter()
        try:
            asked = self._gate.asked(visit, operation, dialect, call.params, decode)
            with self._gate.streaming(visit.caller, operation):
                if operation.streams:
                    await self._stream(operation, asked, call.id, receive, send)
                    return
                if operation.works:
                    told, gone = await run_while_connected(
                        operation, self._office, asked, receive, self._gate.tenants.tenancy
                    )
                else:
                    told, gone = await operation.run(self._office, asked), False
                if not gone:
                    await reply_json(send, jsonrpc.encode_result(call.id, operation.encode(wire, told, asked.request)))
        except (OverLimit, Unauthenticated) as refusal:
            self._gate.meter.refused(TRANSPORT, refusal.code)
            await reply_problem(send, refusal)
        except Refusal as refusal:
            self._gate.meter.refused(TRANSPORT, refusal.code)
            await reply_json(send, jsonrpc.encode_refusal(call.id, refusal, dialect))
        except Exception as error:  # the last stand before the client: it hears nothing of what went wrong
            log.exception("a2a.failed", extra={"operation": operation.name})
            self._gate.meter.refused(TRANSPORT, "internal")
            await reply_json(send, jsonrpc.encode_refusal(call.id, error, dialect))
        finally:
            self._timers[operation.name].observe(perf_counter() - started_s)

    async def _stream(
        self, operation: A2AOperation, asked: A2ACall, call_id: bytes, receive: Receive, send: Send
    ) -> None:
        stream = await operation.run(self._office, asked)
        framing = SseFormat(*jsonrpc.result_frame(call_id), named=asked.dialect is Dialect.V03)
        await write_stream(stream, asked, framing, tenancy=self._gate.tenants.tenancy, receive=receive, send=send)


def _unknown(call: jsonrpc.RpcCall) -> NoReturn:
    unknown = jsonrpc.unknown_method(call.method)
    raise jsonrpc.UnreadableCall(unknown.code, unknown.message, call.id)
