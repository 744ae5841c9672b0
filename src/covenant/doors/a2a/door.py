"""The A2A door: everything under one prefix, `…/{agent}` for JSON-RPC and `…/{agent}/…` for plain HTTP."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from covenant.doors.a2a.admission import Admission
from covenant.doors.a2a.jsonrpc_binding import JsonRpcBinding
from covenant.doors.a2a.operations import A2AServices
from covenant.doors.a2a.rest_binding import RestBinding
from covenant.doors.http.responses import JSON, PROBLEM, Header, refusal_form, refusal_headers, reply_not_allowed
from covenant.model.errors import Refusal
from covenant.wire.a2a.error_codes import rest_error

PREFIX: Final = "/v1/a2a/agents/"
CARD: Final = "agent-card.json"


class A2ADoor:
    """`cards` answers for the card of an agent, which is a document and no operation."""

    def __init__(self, gate: Admission, office: A2AServices, cards: ASGIApp, *, body_bytes_max: int) -> None:
        self._rpc = JsonRpcBinding(gate, office, body_bytes_max=body_bytes_max)
        self._rest = RestBinding(gate, office, body_bytes_max=body_bytes_max)
        self._cards = cards

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        agent_id, _, place = scope["path"][len(PREFIX) :].partition("/")
        place = place.rstrip("/")
        if not place:
            if scope["method"] == "POST":
                return self._rpc.answer(agent_id, scope, receive, send)
            return reply_not_allowed(send, PROBLEM, ("POST",))
        if place == CARD:
            return self._cards(scope, receive, send)
        return self._rest.answer(agent_id, place, scope, receive, send)

    def refusal_form(self, path: str, refusal: Refusal) -> tuple[tuple[Header, ...], bytes]:
        """A refusal before there is a call to answer: its headers and its body."""
        _, _, place = path[len(PREFIX) :].partition("/")
        if not place.rstrip("/"):
            return refusal_form(PROBLEM, refusal)
        return (JSON, *refusal_headers(refusal)), rest_error(refusal)[1]
