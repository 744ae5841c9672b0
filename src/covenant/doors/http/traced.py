"""Requests that are part of somebody's trace, whichever door they are for: what is begun for them goes on in it.

Put before the doors only where spans are on. (A2A's own door reads the trace context itself, also from metadata, and
keeps it where there are no spans.)
"""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from covenant.model.hop import Hop
from covenant.model.tracing import Tracer, trace_of
from covenant.wire.hops import TRACEPARENT, TRACESTATE, read_hop

_NAMES: Final = {TRACEPARENT.encode(): TRACEPARENT, TRACESTATE.encode(): TRACESTATE}


class Traced:
    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace = trace_of(_said(scope)) if scope["type"] == "http" else None
        if trace is None:
            await self._app(scope, receive, send)
            return
        with self._tracer.within(trace):
            await self._app(scope, receive, send)


def _said(scope: Scope) -> Hop:
    return read_hop(None, {_NAMES[name]: value.decode("latin-1") for name, value in scope["headers"] if name in _NAMES})
