"""The steps that every binding takes around an operation: the caller, its rate, the agent, the version, the time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Scope

from covenant.doors.a2a.operations import A2ACall, A2AOperation, A2AServices
from covenant.doors.http.bearer_auth import TenantAuth, client_address
from covenant.doors.http.request_body import AnonymousPool, read_body
from covenant.doors.http.server.http_exchange import HEADERS_BY_NAME, HttpExchange
from covenant.doors.metrics import Meter
from covenant.doors.waits import CancelScope
from covenant.exchange.a2a_service import ANONYMOUS, A2ARequest
from covenant.exchange.access.tenants import Caller, TenantAccess, unauthenticated
from covenant.exchange.cards import takes_sealed
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.file_links import FileLinks
from covenant.model.a2a_requests import SendMessage
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.errors import Invalid
from covenant.model.task import Hop
from covenant.model.tenants import DEFAULT
from covenant.wire.a2a.dialects import PROTO_V03, V03, V1, Dialect
from covenant.wire.call_headers import HEADERS, read_call_context
from covenant.wire.peers import SEALED_DELEGATION
from covenant.wire.sse import last_event_id

S = TypeVar("S")

TRANSPORT: Final = "a2a"
EXTENSIONS_MAX: Final = 50
GRACE_S: Final = 1.0
"""How long an operation goes on after its caller has left, so that a commit is not interrupted."""

_EMPTY_HOP: Final = Hop()
_HOP_HEADERS: Final = frozenset(HEADERS)
_CURRENT_VERSION: Final = b"1.0"
"""The version that most callers send, and every dialect accepts."""
_VERSIONS_EVERYWHERE: Final = ("1.0", "")
_VERSIONS_V03: Final = frozenset({*_VERSIONS_EVERYWHERE, "1", "0.3"})
_VERSIONS_OF: Final = {V1: frozenset(_VERSIONS_EVERYWHERE), V03: _VERSIONS_V03, PROTO_V03: _VERSIONS_V03}


class Headers(msgspec.Struct, frozen=True, gc=False):
    """The headers by name; the last value of a repeated header counts."""

    found: dict[bytes, bytes]

    def get(self, name: bytes) -> str | None:
        value = self.found.get(name)
        return None if value is None else value.decode("latin-1")

    @property
    def extensions(self) -> tuple[str, ...]:
        value = self.get(b"a2a-extensions")
        if not value:
            return ()
        return tuple(name for each in value.split(",")[:EXTENSIONS_MAX] if (name := each.strip()))

    @property
    def call_context(self) -> dict[str, str]:
        found = self.found
        return {HEADERS[name]: found[name].decode("latin-1") for name in HEADERS.keys() & found.keys()}

    def version(self, scope: Scope) -> str:
        """The version from the header or from the query."""
        header = self.get(b"a2a-version")
        if header is not None or not scope["query_string"]:
            return header or ""
        query = parse_qsl(scope["query_string"].decode("latin-1"), max_num_fields=100)
        return next((value for name, value in query if name.lower() == "a2a-version"), "")


def headers_of(scope: Scope) -> Headers:
    return Headers(scope[HEADERS_BY_NAME])


class AdmittedCaller(msgspec.Struct, frozen=True):
    """An admitted caller, and the agent that it calls. Whether the agent exists is checked later."""

    scope: Scope
    headers: Headers
    caller: Caller
    agent_id: str


class CallerScope(CancelScope):
    """A context around an operation that runs for one caller.

    The operation is ended `GRACE_S` after the caller has left (CallerGoneError) or its token has ended
    (Unauthenticated). A task that the operation began continues. Without an exchange, a caller that leaves is not
    noticed.
    """

    __slots__ = ("_before", "_caller", "_exchange", "_tenants")

    def __init__(self, tenants: TenantAccess, caller: Caller, exchange: HttpExchange | None = None) -> None:
        self._reason = None
        self._tenants = tenants
        self._caller = caller
        self._exchange = exchange

    def __enter__(self) -> Self:
        exchange = self._exchange
        self._work = exchange.task if exchange is not None else asyncio.current_task()
        self._tenants.open_session(self._caller, self._on_revoked)
        if exchange is not None:
            self._before, exchange.on_disconnect = exchange.on_disconnect, self._on_disconnect
            if exchange.disconnected:
                self._on_disconnect()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._exchange is not None:
            self._exchange.on_disconnect = self._before
        self._tenants.close_session(self._on_revoked)
        if self._reason is not None:
            super().__exit__(kind, error, at)
        self._work = None

    def _on_disconnect(self) -> None:
        asyncio.get_running_loop().call_later(GRACE_S, self.leave)

    def _on_revoked(self) -> None:
        asyncio.get_running_loop().call_later(GRACE_S, self.end, unauthenticated())


@dataclass(frozen=True, slots=True)
class Admission:
    """The checks that every binding makes before an operation."""

    tenants: TenantAuth
    catalogue: Catalogue
    meter: Meter
    base_url: Callable[[Scope], str]
    """The base URL by which a caller reached the daemon, for the URLs in a card."""
    admits: Callable[[CatalogueAgent, Scope], bool]
    """Whether an agent may be called without a token."""
    pool: AnonymousPool
    """Bounds the memory that callers without a token may use."""
    files: FileLinks | None = None
    """None: there is no blob store here."""
    peer_profiles: tuple[str, ...] | None = None
    """The agents that take sealed delegations, as the settings name them; None: none does."""

    async def enter(self, scope: Scope, headers: Headers, agent_id: str) -> AdmittedCaller:
        # Only a caller without the header is anonymous; an unreadable credential is refused.
        credential = headers.found.get(b"authorization")
        tenants = self.tenants
        caller = self._anonymous(scope, agent_id) if credential is None else tenants.known.get(credential)
        if caller is None:
            caller = await tenants.caller(scope)
        tenants.limiter.admit(caller)
        return AdmittedCaller(scope, headers, caller, agent_id)

    def _anonymous(self, scope: Scope, agent_id: str) -> Caller | None:
        tenant, agent = self.tenants.tenancy.tenant(DEFAULT), self.catalogue.known(DEFAULT, agent_id)
        if tenant is None or tenant.disabled_at_ms is not None or agent is None or not self.admits(agent, scope):
            return None
        return Caller(tenant, "", operator=False, name=f"{ANONYMOUS}@{tenant.name}")

    def admits_anonymous_callers(self, scope: Scope, agent_id: str) -> bool:
        """Whether a caller without a token may call this agent."""
        return self._anonymous(scope, agent_id) is not None

    async def read_body(self, admitted: AdmittedCaller, exchange: HttpExchange, bytes_max: int) -> bytes:
        """The body of the request. Without a token, it counts against the pool until all of it has arrived."""
        if (body := exchange.take_whole_body(bytes_max)) is not None:
            return body
        if not admitted.caller.anonymous:
            body = await read_body(admitted.scope, exchange.receive, bytes_max)
            self.tenants.tenancy.check_valid(admitted.caller)
            return body
        with self.pool.lease(client_address(admitted.scope)) as take:
            return await self.pool.read(admitted.scope, exchange.receive, bytes_max, take)

    def call(
        self, admitted: AdmittedCaller, operation: A2AOperation, dialect: Dialect, decode: Callable[[S], Any], params: S
    ) -> A2ACall:
        """The request, checked in this order: version, agent, params. `decode` makes it from `params`."""
        headers, caller = admitted.headers, admitted.caller
        found = headers.found
        if found.get(b"a2a-version") != _CURRENT_VERSION:
            check_version(headers.version(admitted.scope), dialect)
        agent = self.catalogue.agent(caller.tenant.name, admitted.agent_id)
        away = agent is None
        if agent is None and (agent := self.catalogue.known(caller.tenant.name, admitted.agent_id)) is None:
            raise self.catalogue.missing(caller.tenant.name, admitted.agent_id)
        cursor = last_event_id(headers.get(b"last-event-id")) if operation.open_stream is not None else None
        request = decode(params)
        ask = A2ARequest(
            caller=caller,
            agent=agent,
            away=away,
            extensions=headers.extensions if b"a2a-extensions" in found else (),
            idempotency_key=headers.get(b"idempotency-key") if b"idempotency-key" in found else None,
            hop=hop_of(request, headers) if isinstance(request, SendMessage) else None,
        )
        return A2ACall(ask, request, dialect, cursor, self.base_url, admitted.scope, self.files)

    def activated(self, call: A2ACall) -> str:
        """The extensions that the caller named and its agent has, as the answer's `A2A-Extensions` lists them."""
        agent = call.ask.agent
        own = {*agent.definition.extensions, *((SEALED_DELEGATION,) if takes_sealed(agent, self.peer_profiles) else ())}
        return ", ".join(dict.fromkeys(each for each in call.ask.extensions if each in own))

    async def run(self, operation: A2AOperation, services: A2AServices, call: A2ACall) -> bytes:
        """Runs an operation, for a binding that notices by itself when its caller leaves."""
        assert operation.run is not None
        with CallerScope(self.tenants.tenancy, call.ask.caller):
            return operation.encode(services, call, await operation.run(services, call))


def hop_of(request: SendMessage, headers: Headers) -> Hop | None:
    """The chain of calls before this one, from the headers and from the metadata of the request and its message."""
    inner, outer = request.message.metadata, request.metadata
    if not inner and not outer and _HOP_HEADERS.isdisjoint(headers.found):
        return None
    hop = read_call_context({**(outer or {}), **(inner or {})}, headers.call_context)
    return hop if hop != _EMPTY_HOP else None


def check_version(version: str, dialect: Dialect) -> None:
    """Checks `A2A-Version`: Major.Minor, with any patch."""
    if version in _VERSIONS_EVERYWHERE:
        return
    requested = version.strip()
    if requested in _VERSIONS_OF[dialect]:
        return
    numbers = requested.split(".")
    if len(numbers) == 3 and numbers[2].isdigit() and ".".join(numbers[:2]) in _VERSIONS_OF[dialect]:
        return
    raise Invalid("version_not_supported", f"A2A version {requested[:20]!r} is not supported; ask for 1.0")
