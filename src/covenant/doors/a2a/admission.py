"""What each binding over HTTP does before an operation runs: who calls, how often, at which agent, in which version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from covenant.doors.a2a.operations import A2ACall, A2AOperation, check_version
from covenant.doors.http.bearer_auth import TenantGate, address
from covenant.doors.http.request_body import AnonymousPool, body_at_hand, read_body
from covenant.doors.http.responses import JSON, Header, reply
from covenant.doors.metrics import Meter
from covenant.exchange.a2a_service import ANONYMOUS, A2ARequest
from covenant.exchange.access.tenants import Caller
from covenant.exchange.catalogue import Catalogue
from covenant.ledger.machine.decisions.identities import unknown_agent
from covenant.model.a2a_requests import SendMessage
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.call_context import Hop
from covenant.model.tenants import DEFAULT
from covenant.wire.a2a.error_codes import Dialect
from covenant.wire.call_headers import (
    CHAIN_HEADER,
    DEADLINE_HEADER,
    DEPTH_HEADER,
    TRACEPARENT,
    TRACESTATE,
    read_call_context,
)
from covenant.wire.sse import last_event_id

TRANSPORT: Final = "a2a"
_NO_PLACE: Final = nullcontext()
EXTENSIONS_MAX: Final = 50

Decode = Callable[[Any, int | None], Any]
"""From what was said and the cursor to the request."""

_HOP: Final = frozenset(
    name.encode() for name in (DEPTH_HEADER, CHAIN_HEADER, DEADLINE_HEADER, TRACEPARENT, TRACESTATE)
)
_NO_HOP: Final = Hop()


class Headers:
    """The headers by name; of one that came twice, the last."""

    __slots__ = ("_found",)

    def __init__(self, scope: Scope) -> None:
        self._found: dict[bytes, bytes] = dict(scope["headers"])

    def get(self, name: bytes) -> str | None:
        value = self._found.get(name)
        return None if value is None else value.decode("latin-1")

    @property
    def credential(self) -> bytes | None:
        return self._found.get(b"authorization")

    @property
    def extensions(self) -> tuple[str, ...]:
        value = self.get(b"a2a-extensions")
        if not value:
            return ()
        return tuple(name for each in value.split(",")[:EXTENSIONS_MAX] if (name := each.strip()))

    @property
    def of_hop(self) -> dict[str, str]:
        if _HOP.isdisjoint(self._found):
            return {}
        return {name.decode(): value.decode("latin-1") for name, value in self._found.items() if name in _HOP}

    def version(self, scope: Scope) -> str:
        """Said in a header or in the query."""
        said = self.get(b"a2a-version")
        if said is not None or not scope["query_string"]:
            return said or ""
        query = parse_qsl(scope["query_string"].decode("latin-1"), max_num_fields=100)
        return next((value for name, value in query if name.lower() == "a2a-version"), "")


class AdmittedCaller(msgspec.Struct, frozen=True):
    """A caller that was let in, and the agent it came for, which need not exist."""

    scope: Scope
    headers: Headers
    caller: Caller
    agent_id: str


@dataclass(frozen=True, slots=True)
class Admission:
    """Shared by the bindings."""

    tenants: TenantGate
    catalogue: Catalogue
    meter: Meter
    base_url: Callable[[Scope], str]
    """Where a caller reached us, for the addresses in a card."""
    admits: Callable[[CatalogueAgent, Scope], bool]
    """Whether an agent may be called without a token."""
    pool: AnonymousPool
    """What callers without a token may make the daemon hold."""

    async def enter(self, scope: Scope, headers: Headers, agent_id: str) -> AdmittedCaller:
        # A credential that cannot be read is refused, and not the same as none.
        credential = headers.credential
        caller = self._anonymous(scope, agent_id) if credential is None else self.tenants.recognised(credential)
        if caller is None:
            caller = await self.tenants.enter(scope)
        else:
            self.tenants.limiter.admit(caller)
        return AdmittedCaller(scope, headers, caller, agent_id)

    def _anonymous(self, scope: Scope, agent_id: str) -> Caller | None:
        tenant, agent = self.tenants.tenancy.tenant(DEFAULT), self.catalogue.agent(DEFAULT, agent_id)
        if tenant is None or tenant.disabled_at_ms is not None or agent is None or not self.admits(agent, scope):
            return None
        return Caller(tenant, "", operator=False, name=f"{ANONYMOUS}@{tenant.name}")

    def admits_strangers(self, scope: Scope, agent_id: str) -> bool:
        """Whether somebody without a token may call this agent."""
        return self._anonymous(scope, agent_id) is not None

    def asked(
        self, visit: AdmittedCaller, operation: A2AOperation, dialect: Dialect, said: Any, decode: Decode
    ) -> A2ACall:
        """The request, checked in this order: version, agent, params. `decode` is given what was said, and a cursor."""
        headers, caller = visit.headers, visit.caller
        check_version(headers.version(visit.scope), dialect)
        agent = self.catalogue.agent(caller.tenant.name, visit.agent_id)
        if agent is None:
            raise unknown_agent(visit.agent_id)
        cursor = last_event_id(headers.get(b"last-event-id")) if operation.streams else None
        request = decode(said, cursor)
        ask = A2ARequest(
            caller=caller,
            agent=agent,
            extensions=headers.extensions,
            idempotency_key=headers.get(b"idempotency-key"),
            hop=hop_of(request, headers) if isinstance(request, SendMessage) else None,
        )
        return A2ACall(ask, request, dialect, self.base_url, visit.scope)

    async def read_body(self, visit: AdmittedCaller, receive: Receive, send: Send, bytes_max: int) -> bytes:
        """The body of the request. Of a caller without a token, it is held out of the pool until all of it is here."""
        body = body_at_hand(send, bytes_max)
        if body is not None:
            return body
        if not visit.caller.anonymous:
            return await read_body(visit.scope, receive, bytes_max)
        with self.pool.lease(address(visit.scope)) as take:
            return await self.pool.read(visit.scope, receive, bytes_max, take)

    def connected(self, caller: Caller) -> AbstractContextManager[None]:
        """While the call is answered."""
        return self.tenants.limiter.connected(caller)

    def streaming(self, caller: Caller, operation: A2AOperation) -> AbstractContextManager[None]:
        """While the operation runs: a stream is one of the tenant's, whether it begins a task or follows one."""
        return self.tenants.limiter.streaming(caller) if operation.streams else _NO_PLACE


def hop_of(request: SendMessage, headers: Headers) -> Hop | None:
    """What the caller says of the calls before this one, in headers, or in the metadata of request or message."""
    said, inner, outer = headers.of_hop, request.message.metadata, request.metadata
    if not (said or inner or outer):
        return None
    hop = read_call_context({**(outer or {}), **(inner or {})}, said)
    return hop if hop != _NO_HOP else None


A2A_JSON: Final[Header] = (b"content-type", b"application/a2a+json")


def reply_json(
    send: Send, body: bytes, *, status: int = 200, kind: Header = JSON, headers: Sequence[Header] = ()
) -> Awaitable[None]:
    return reply(send, status, body, headers, kind=kind)
