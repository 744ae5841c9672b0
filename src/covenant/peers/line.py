"""The line to a peer: requests that go through the address guard, and what can become of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

from covenant.model.peers.peer_record import Peer
from covenant.model.errors import CovenantError

IDENTITY: Final = "/api/v1/a2a/identity"
RECEIVE: Final = "/api/v1/a2a/receive"
POLL: Final = "/api/v1/a2a/poll"


class Response(NamedTuple):
    status: int
    headers: Mapping[str, str]
    """By names in lower case."""
    body: bytes


class LineFailed(CovenantError):
    """Nobody answered, or nobody may be asked there. `passing`: it may be otherwise in a while."""

    def __init__(self, code: str, message: str, *, passing: bool) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.passing = passing


class Line(Protocol):
    """To one address. Follows no redirects; bounded in size and time. `LineFailed` is all that it raises."""

    async def get(self, path: str) -> Response: ...
    async def post(self, path: str, body: bytes, *, timeout_s: float) -> Response: ...


class Lines(Protocol):
    """Lines by address, kept open as long as they are used. A private address is only called for a peer that an
    operator or a setting has given there."""

    def to(self, url: str) -> Line: ...


def address(peer: Peer) -> str:
    if peer.url is None:
        raise LineFailed("no_address", f"{peer.name} has no address; it fetches what there is for it", passing=False)
    return peer.url
