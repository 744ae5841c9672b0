"""Requests that are part of somebody's trace, whichever door they are for: what is begun for them goes on in it.

Put before the doors only where spans are on. (A2A's own door reads the trace context itself, also from metadata, and
keeps it where there are no spans.)
"""

from __future__ import annotations

from typing import Final

from starlette.types import Scope

from covenant.doors.http.server.exchange import Door, Exchange
from covenant.model.call_context import Hop
from covenant.model.tracing import Tracer, trace_of
from covenant.wire.call_headers import TRACEPARENT, TRACESTATE, read_call_context

_NAMES: Final = {TRACEPARENT.encode(): TRACEPARENT, TRACESTATE.encode(): TRACESTATE}


class Traced:
    def __init__(self, door: Door, tracer: Tracer) -> None:
        self._door = door
        self._tracer = tracer

    async def serve(self, exchange: Exchange) -> None:
        trace = trace_of(_said(exchange.scope))
        if trace is None:
            await self._door.serve(exchange)
            return
        with self._tracer.within(trace):
            await self._door.serve(exchange)


def _said(scope: Scope) -> Hop:
    return read_call_context(
        None, {_NAMES[name]: value.decode("latin-1") for name, value in scope["headers"] if name in _NAMES}
    )
