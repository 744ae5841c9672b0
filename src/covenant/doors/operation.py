"""An operation: one thing a caller may ask of the mailbox, and how each door names it.

The table of operations is the only list of them: routes, kinds of frames, the OpenAPI document and the metrics are all
read from it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from covenant.doors.answers import Answer
from covenant.doors.waiting import Pause
from covenant.exchange.access.identities import IdentityAdmin
from covenant.exchange.access.principals import Principal
from covenant.exchange.access.tenants import TenantAccess
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.mailbox import MailboxExchange
from covenant.ledger.contract.ledger import Ledger
from covenant.wire.ipc_frames import Wrapped
from covenant.wire.mailbox import Request

if TYPE_CHECKING:
    from covenant.doors.peers import PeerDesk

R = TypeVar("R", bound=Request)


@dataclass(frozen=True, slots=True)
class Office:
    """What is behind the doors: operations work with this, and with nothing else."""

    exchange: MailboxExchange
    registry: IdentityAdmin
    ledger: Ledger
    tenancy: TenantAccess
    catalogue: Catalogue
    peers: PeerDesk | None = None
    """None: this daemon has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Generic[R]):
    kind: str
    """Its frames on the local socket."""
    method: str
    path: str
    request: type[R]
    answer: type[Answer]
    run: Callable[[Office, Principal, R], Awaitable[Answer]]
    summary: str
    frame: type[Wrapped] | None = None
    """The frame that wraps the request; None if a frame has the request's fields beside its kind."""
    wait: Callable[[Office, Principal, R, Pause], Awaitable[Answer]] | None = None
    """How to run it when the caller is ready to wait (`wait_ms`): pauses end early, commits never do."""

    status: int = 200
    """Of the answer over HTTP."""

    @property
    def in_body(self) -> bool:
        """Whether HTTP carries the request in the body; otherwise in the query."""
        return self.method in ("POST", "PATCH", "PUT")


AnyOperation = Operation[Any]
