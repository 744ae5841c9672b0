"""HTTP routes for other instances: this instance's identity, and sealed envelopes, which prove their sender.

No token is needed. Every sender that has not proven to be a peer gets one and the same refusal.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

import msgspec
from starlette.routing import BaseRoute, Router
from starlette.types import Receive, Scope, Send

from covenant.doors.http.bearer_auth import client_address
from covenant.doors.http.endpoint import Endpoint, described_routes
from covenant.doors.http.openapi import DescribedRoute
from covenant.doors.http.request_body import AnonymousPool
from covenant.doors.http.responses import Style, refusal_form, reply, reply_refused
from covenant.doors.http.server.http_exchange import Header, HttpExchange, exchange_of
from covenant.doors.http.server.http_refusals import CLOSE
from covenant.doors.metrics import Meter
from covenant.doors.waits import while_connected
from covenant.model.errors import NotFound, Refusal, TooLarge
from covenant.seal.envelope import ENVELOPE_BYTES_MAX
from covenant.wire.peers import (
    IDENTITY_PATH,
    POLL_PATH,
    RECEIVE_PATH,
    RELAY_PATH,
    EnvelopeRefusal,
    Introduction,
    OutOfOrder,
    Polled,
    Received,
    Relayed,
)

INTRODUCTION_BYTES_MAX: Final = 64 * 1024
IDENTITY_AGE_S: Final = 60
"""How long a cache may show our keys: a small part of the time for which old and new keys overlap."""

_CACHE_BRIEFLY: Final[Header] = (b"cache-control", b"public, max-age=%d" % IDENTITY_AGE_S)


class SealedEnvelope(msgspec.Struct, frozen=True, gc=False):
    """Each field is base64url; see docs/formats/envelope.md."""

    protected: str
    ciphertext: str
    signature: str


class EnvelopeInbox(Protocol):
    """Takes in envelopes. Raises refusals that the sender may see."""

    async def receive(self, body: bytes, address: str | None) -> Received: ...
    async def poll(self, body: bytes, address: str | None) -> Polled: ...
    async def receive_introduction(self, body: bytes, address: str | None) -> Received: ...
    async def deposit(self, body: bytes, address: str | None, recipient: str) -> Relayed: ...
    async def introduction_of(self, recipient: str) -> bytes:
        """The introduction of an instance that fetches its envelopes here."""

    async def refuse_too_large(self, address: str | None) -> Refusal: ...


def _refusal_body(refusal: Refusal) -> bytes:
    expected = refusal.expected if isinstance(refusal, OutOfOrder) else None
    return msgspec.json.encode(EnvelopeRefusal(error=refusal.message, code=refusal.code, expected=expected))


STYLE: Final = Style(_refusal_body, transport="sealed")


class EnvelopeEndpoint(Endpoint):
    """A route for envelopes. `run` gets the body, the caller's address, and the path's parameters.

    An endpoint that `waits` stops when the caller has left.
    """

    def __init__(
        self,
        name: str,
        run: Callable[..., Awaitable[Received | Polled | Relayed]],
        inbox: EnvelopeInbox,
        meter: Meter,
        pool: AnonymousPool,
        *,
        waits: bool = False,
        bytes_max: int = ENVELOPE_BYTES_MAX,
    ) -> None:
        super().__init__(name, STYLE, meter)
        self._bytes_max = bytes_max
        self._run = run
        self._inbox = inbox
        self._pool = pool
        self._waits = waits

    async def _answer(self, scope: Scope, exchange: HttpExchange) -> None:
        caller = client_address(scope)
        with self._pool.lease(caller) as take:
            try:
                body = await self._pool.read(scope, exchange.receive, self._bytes_max, take)
            except Refusal as failure:
                refusal = await self._inbox.refuse_too_large(caller) if isinstance(failure, TooLarge) else failure
                # The rest of the body may still be on its way, so the connection cannot be reused.
                self._refuse(exchange, refusal, (CLOSE,))
                return
            if self._waits:
                # Envelopes stay here until they are acknowledged, so stopping loses nothing.
                with while_connected(exchange):
                    answer = await self._run(body, caller, **scope["path_params"])
            else:
                answer = await self._run(body, caller, **scope["path_params"])
        reply(exchange, 200, msgspec.json.encode(answer))


class SealedDoor:
    """The sealed routes, and nothing else. Any `Host` is accepted: an envelope names its recipient."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self._router = Router(routes, redirect_slashes=False, default=_not_found)

    def serve(self, exchange: HttpExchange) -> Awaitable[None]:
        return self._router(exchange.scope, exchange.receive, exchange)

    def refusal_form(self, _path: str, refusal: Refusal) -> tuple[tuple[Header, ...], bytes]:
        return refusal_form(STYLE, refusal)


async def _not_found(_scope: Scope, _receive: Receive, send: Send) -> None:
    reply_refused(exchange_of(send), STYLE, NotFound("unknown_route", "only peers are served here"))


DESCRIBED: Final = (
    DescribedRoute(
        "GET",
        IDENTITY_PATH,
        "peer_identity",
        "The identity of this instance: its name and its signed keys",
        Introduction,
        token=False,
    ),
    DescribedRoute(
        "POST",
        IDENTITY_PATH,
        "peer_introduced",
        "Take a peer's present and former identity; each change is signed by both keys",
        Received,
        request=Introduction,
        token=False,
        refusal=EnvelopeRefusal,
    ),
    DescribedRoute(
        "POST",
        RECEIVE_PATH,
        "peer_receive",
        "Take in a sealed envelope of a peer; answers once it is durable",
        Received,
        request=SealedEnvelope,
        token=False,
        refusal=EnvelopeRefusal,
    ),
    DescribedRoute(
        "POST",
        POLL_PATH,
        "peer_poll",
        "Hand out the envelopes that wait for a peer; the poll is a sealed envelope itself",
        Polled,
        request=SealedEnvelope,
        token=False,
        refusal=EnvelopeRefusal,
    ),
    DescribedRoute(
        "GET",
        f"{RELAY_PATH}/{{recipient}}{IDENTITY_PATH}",
        "relay_identity",
        "The identity of an instance that fetches its envelopes from this relay",
        Introduction,
        token=False,
        refusal=EnvelopeRefusal,
    ),
    DescribedRoute(
        "POST",
        f"{RELAY_PATH}/{{recipient}}{RECEIVE_PATH}",
        "relay_receive",
        "Keep a sealed envelope for an instance that fetches it here; answers once it is on disk",
        Relayed,
        request=SealedEnvelope,
        token=False,
        refusal=EnvelopeRefusal,
    ),
)


class IntroductionEndpoint(Endpoint):
    """Answers with the introduction of an instance that fetches its envelopes here."""

    def __init__(self, inbox: EnvelopeInbox, meter: Meter) -> None:
        super().__init__("relay_identity", STYLE, meter)
        self._inbox = inbox

    async def _answer(self, scope: Scope, exchange: HttpExchange) -> None:
        reply(exchange, 200, await self._inbox.introduction_of(scope["path_params"]["recipient"]))


def sealed_routes(
    inbox: EnvelopeInbox, introduce: Callable[[], Introduction], meter: Meter, pool: AnonymousPool
) -> list[BaseRoute]:
    """`introduce` returns our current name and keys. `pool` bounds the memory that all strangers together may use."""

    async def identity(_scope: Scope, _receive: Receive, send: Send) -> None:
        reply(exchange_of(send), 200, msgspec.json.encode(introduce()), cache_control=_CACHE_BRIEFLY)

    return described_routes(
        DESCRIBED,
        {
            "peer_identity": identity,
            "peer_introduced": EnvelopeEndpoint(
                "peer_introduced", inbox.receive_introduction, inbox, meter, pool, bytes_max=INTRODUCTION_BYTES_MAX
            ),
            "peer_receive": EnvelopeEndpoint("peer_receive", inbox.receive, inbox, meter, pool),
            "peer_poll": EnvelopeEndpoint("peer_poll", inbox.poll, inbox, meter, pool, waits=True),
            "relay_identity": IntroductionEndpoint(inbox, meter),
            "relay_receive": EnvelopeEndpoint("relay_receive", inbox.deposit, inbox, meter, pool),
        },
    )
