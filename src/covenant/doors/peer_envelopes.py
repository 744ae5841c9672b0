"""What other instances ask over HTTP: who we are, to anybody; and envelopes, which prove themselves.

No token is asked for. Whoever has not proven to be a peer hears one and the same refusal, whatever was wrong; what is
larger than any envelope is refused in the same words. A wait ends when the one who waits is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import Any, Final, Protocol

import msgspec
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from covenant.doors.http.bearer_auth import address
from covenant.doors.http.endpoint import described_routes
from covenant.doors.http.openapi import Described
from covenant.doors.http.request_body import AnonymousPool
from covenant.doors.http.responses import CLOSE, Header, refusal_headers, reply_internal
from covenant.doors.metrics import Meter
from covenant.doors.waits import CallerGoneError
from covenant.model.errors import Refusal, TooLarge
from covenant.seal.envelope import ENVELOPE_BYTES_MAX
from covenant.wire.peers import EnvelopeRefused, Introduction, OutOfOrder, Polled, Received

TRANSPORT: Final = "sealed"
IDENTITY: Final = "/api/v1/a2a/identity"
RECEIVE: Final = "/api/v1/a2a/receive"
POLL: Final = "/api/v1/a2a/poll"
IDENTITY_AGE_S: Final = 60
"""How long a cache may show our keys: a small part of the time for which they overlap."""

_JSON: Final[Header] = (b"content-type", b"application/json")
_NO_STORE: Final[Header] = (b"cache-control", b"no-store")
_SHORTLY: Final[Header] = (b"cache-control", b"public, max-age=%d" % IDENTITY_AGE_S)

log = logging.getLogger(__name__)


class SealedEnvelope(msgspec.Struct, frozen=True, gc=False):
    """Each in base64url; see the page on envelopes."""

    protected: str
    ciphertext: str
    signature: str


class EnvelopeInbox(Protocol):
    """Where envelopes come in. Raises refusals that the sender may hear."""

    async def receive(self, body: bytes, address: str | None) -> Received: ...
    async def poll(self, body: bytes, address: str | None) -> Polled: ...
    async def too_large(self, address: str | None) -> Refusal: ...


class _Unread(Exception):
    """A refusal of a body that was not read to its end."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class EnvelopeEndpoint:
    """One way in as an ASGI callable. `run` is broken off when the caller has left, if it `waits`."""

    def __init__(
        self,
        letterbox: EnvelopeInbox,
        meter: Meter,
        name: str,
        run: Callable[[bytes, str | None], Coroutine[Any, Any, Received | Polled]],
        pool: AnonymousPool,
        *,
        waits: bool = False,
    ) -> None:
        self._letterbox = letterbox
        self._meter = meter
        self._timer = meter.timer(TRANSPORT, name)
        self._name = name
        self._run = run
        self._pool = pool
        self._waits = waits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_s = perf_counter()
        try:
            await self._answer(scope, receive, send)
        except CallerGoneError:
            return
        except Exception:  # the last stand before the client: it hears nothing of what went wrong
            log.exception("http.failed", extra={"operation": self._name})
            self._meter.refused(TRANSPORT, "internal")
            await reply_internal(send, plain=True)
        finally:
            self._timer.observe(perf_counter() - started_s)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = address(scope)
        try:
            answer = await self._heard(scope, receive, caller)
            await _reply(send, 200, msgspec.json.encode(answer), (_NO_STORE,))
        except _Unread as unread:
            # The rest of the body may still be on its way: the connection is of no more use.
            await self._refuse(send, unread.refusal, (CLOSE,))
        except Refusal as refusal:
            await self._refuse(send, refusal, ())

    async def _heard(self, scope: Scope, receive: Receive, caller: str) -> Received | Polled:
        with self._pool.lease(caller) as take:
            try:
                body = await self._pool.read(scope, receive, ENVELOPE_BYTES_MAX, take)
            except TooLarge:
                raise _Unread(await self._letterbox.too_large(caller)) from None
            except Refusal as refusal:
                raise _Unread(refusal) from None
            return await (self._while_there(body, caller, receive) if self._waits else self._run(body, caller))

    async def _refuse(self, send: Send, refusal: Refusal, headers: tuple[Header, ...]) -> None:
        self._meter.refused(TRANSPORT, refusal.code)
        expected = refusal.expected if isinstance(refusal, OutOfOrder) else None
        refused = EnvelopeRefused(error=refusal.message, code=refusal.code, expected=expected)
        told = (_NO_STORE, *refusal_headers(refusal), *headers)
        await _reply(send, refusal.status, msgspec.json.encode(refused), told)

    async def _while_there(self, body: bytes, caller: str, receive: Receive) -> Received | Polled:
        answering = asyncio.ensure_future(self._run(body, caller))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise CallerGoneError
            return answering.result()
        finally:
            # What is handed out waits until it is acknowledged, so nothing is lost by breaking off.
            answering.cancel()
            gone.cancel()


async def _disconnected(receive: Receive) -> None:
    message: Any = None
    while message is None or message["type"] != "http.disconnect":
        message = await receive()


async def _reply(send: Send, status: int, body: bytes, headers: tuple[Header, ...]) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [_JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body})


DESCRIBED: Final = (
    Described(
        path=IDENTITY,
        method="GET",
        name="peer_identity",
        summary="Who this instance is: its name and its signed keys",
        answer=Introduction,
        token=False,
    ),
    Described(
        path=RECEIVE,
        method="POST",
        name="peer_receive",
        summary="Take in a sealed envelope of a peer; answers once it is durable",
        request=SealedEnvelope,
        answer=Received,
        token=False,
        refusal=EnvelopeRefused,
    ),
    Described(
        path=POLL,
        method="POST",
        name="peer_poll",
        summary="Hand out what waits for a peer, sealed to it; the poll is a sealed envelope itself",
        request=SealedEnvelope,
        answer=Polled,
        token=False,
        refusal=EnvelopeRefused,
    ),
)


def sealed_routes(
    letterbox: EnvelopeInbox, introduce: Callable[[], Introduction], meter: Meter, pool: AnonymousPool
) -> list[BaseRoute]:
    """`introduce` gives our name and keys as they are now. `pool`: what all strangers may make us hold."""

    async def identity(_scope: Scope, _receive: Receive, send: Send) -> None:
        await _reply(send, 200, msgspec.json.encode(introduce()), (_SHORTLY,))

    return described_routes(
        DESCRIBED,
        {
            "peer_identity": identity,
            "peer_receive": EnvelopeEndpoint(letterbox, meter, "peer_receive", letterbox.receive, pool),
            "peer_poll": EnvelopeEndpoint(letterbox, meter, "peer_poll", letterbox.poll, pool, waits=True),
        },
    )
