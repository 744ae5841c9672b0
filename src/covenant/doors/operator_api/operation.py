"""An operation: one thing a caller may ask of the mailbox, and how each door names it.

The table of operations is the only list of them: routes, kinds of frames, the OpenAPI document and the metrics are all
read from it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_type_hints

from covenant.doors.metrics import Meter
from covenant.doors.operator_api.answers import ApiAnswer, ProtocolInfo, ProtocolVersions, encode, encode_legacy
from covenant.doors.waits import Pause, Waits
from covenant.exchange.access.identities import IdentityAdmin
from covenant.exchange.access.principals import IdentityAuth, Principal
from covenant.exchange.access.tenants import TenantAccess
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.mailbox import MailboxExchange
from covenant.ledger.contract.ledger import Ledger
from covenant.model.errors import Invalid
from covenant.wire.mailbox import Request, Wrapped

if TYPE_CHECKING:
    from covenant.doors.operator_api.peers import PeerOperations


R = TypeVar("R", bound=Request)


@dataclass(frozen=True, slots=True)
class Services:
    """What is behind the doors: operations work with this, and with nothing else."""

    exchange: MailboxExchange
    registry: IdentityAdmin
    ledger: Ledger
    tenancy: TenantAccess
    catalogue: Catalogue
    peers: PeerOperations | None = None
    """None: this daemon has none."""

    def give_up_ms(self, wait_ms: int | None) -> int:
        """When a wait is over, by a clock that nobody sets."""
        wait_ms, wait_ms_max = wait_ms or 0, self.exchange.limits.wait_ms_max
        if wait_ms > wait_ms_max:
            raise Invalid("invalid_wait", f"wait_ms must be between 0 and {wait_ms_max}")
        return self.ledger.clock.monotonic_ms() + wait_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiContext:
    """What HTTP and the local socket share: who is let in, what operations work with, and how answers are written."""

    services: Services
    doorkeeper: IdentityAuth
    waits: Waits
    meter: Meter
    version: str
    legacy_kinds: bool = False

    @property
    def encode(self) -> Callable[[ApiAnswer], bytes]:
        return encode_legacy if self.legacy_kinds else encode

    @property
    def info(self) -> ProtocolInfo:
        return ProtocolInfo(info=ProtocolVersions(), server=f"covenant/{self.version}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiOperation(Generic[R]):
    kind: str
    """Its frames on the local socket."""
    method: str
    path: str
    request: type[R]
    answer: type[ApiAnswer]
    run: Callable[[Services, Principal, R], Awaitable[ApiAnswer]]
    summary: str
    frame: type[Wrapped] | None = None
    """The frame that wraps the request; None if a frame has the request's fields beside its kind."""
    wait: Callable[[Services, Principal, R, Pause], Awaitable[ApiAnswer]] | None = None
    """How to run it when the caller is ready to wait (`wait_ms`): pauses end early, commits never do."""

    status: int = 200
    """Of the answer over HTTP."""

    @property
    def in_body(self) -> bool:
        """Whether HTTP carries the request in the body; otherwise in the query."""
        return self.method in ("POST", "PATCH", "PUT")


AnyApiOperation = ApiOperation[Any]


def operation_row(
    method: str,
    path: str,
    run: Callable[..., Any],
    summary: str,
    *,
    status: int = 200,
    frame: type[Wrapped] | None = None,
    wait: Callable[..., Any] | None = None,
) -> AnyApiOperation:
    """Named after what runs it, whose annotations say what is asked and answered."""
    _services, _caller, request, answer = get_type_hints(run).values()
    return ApiOperation(
        kind=run.__name__,
        method=method,
        path=path,
        request=request,
        answer=answer,
        run=run,
        summary=summary,
        frame=frame,
        wait=wait,
        status=status,
    )
