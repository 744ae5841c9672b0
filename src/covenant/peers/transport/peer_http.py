"""HTTP to peers, at the addresses that an operator or a setting has given, over connections that are kept open.

The address guard judges each address right before the connection. A peer's own address may be private or loopback;
link-local addresses and a cloud's metadata are never called. Redirects are not followed, and an answer has limits of
size and time.

Messages to one peer share connections, unlike other calls. Whoever sits on the way can claim that an envelope was
taken, but cannot read or forge one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from covenant.model.errors import Conflict, Refusal, Unavailable
from covenant.outbound.address_guard import AddressGuard
from covenant.outbound.call_errors import AddressRefused, CallFailed
from covenant.outbound.http_fetcher import TlsTrust
from covenant.outbound.urls import InvalidUrl, Location, host_text, read_url
from covenant.seal.envelope import ENVELOPE_BYTES_MAX

if TYPE_CHECKING:
    import httpcore2

ANSWER_BYTES_MAX: Final = ENVELOPE_BYTES_MAX + 64 * 1024
INTRODUCTION_BYTES_MAX: Final = 256 * 1024
GET_S: Final = 15.0
CONNECT_S: Final = 5.0
CONNECTIONS_MAX: Final = 16
"""To one place: deliveries, a poll, and questions."""
KEPT_S: Final = 30.0
"""How long a connection is kept that nobody uses; ours keep theirs for longer."""
PLACES_MAX: Final = 256


class PeerResponse(NamedTuple):
    status: int
    headers: Mapping[str, str]
    """By names in lower case."""
    body: bytes


class PeerCallFailed(Refusal):
    """Nobody answered, or nobody may be asked there."""


class PeerUnavailable(PeerCallFailed, Unavailable):
    """It may be otherwise in a while."""


class PeerConflict(PeerCallFailed, Conflict):
    """It will not be otherwise by itself."""


def call_failed(code: str, message: str, *, passing: bool) -> PeerCallFailed:
    return PeerUnavailable(code, message) if passing else PeerConflict(code, message)


class PeerConnections:
    """The connections, by the URL of the peer. `guard` is the daemon's own."""

    def __init__(self, guard: AddressGuard, *, user_agent: str = "covenant", trust: TlsTrust | None = None) -> None:
        self._guard = guard
        self._trust = trust or TlsTrust()
        self._user_agent = user_agent
        self._lines: OrderedDict[str, PeerConnection] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def to(self, url: str) -> PeerConnection:
        """Calls and refuses nothing yet."""
        line = self._lines.get(url)
        if line is None:
            line = self._lines[url] = PeerConnection(url, self._guard, self._trust, self._user_agent)
            if len(self._lines) > PLACES_MAX:
                self._drop_oldest()
        self._lines.move_to_end(url)
        return line

    async def close(self) -> None:
        lines, self._lines = list(self._lines.values()), OrderedDict()
        await asyncio.gather(*(line.close() for line in lines), *self._closing, return_exceptions=True)

    def _drop_oldest(self) -> None:
        _, oldest = self._lines.popitem(last=False)
        closing = asyncio.ensure_future(oldest.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


class PeerConnection:
    """To one peer. Raises `PeerCallFailed`, and nothing else."""

    def __init__(self, url: str, guard: AddressGuard, trust: TlsTrust, user_agent: str) -> None:
        self._url = url
        self._guard = guard
        self._trust = trust
        self._user_agent = user_agent
        self._pool: httpcore2.AsyncConnectionPool | None = None
        self._used = 0
        self._closed = False

    async def get(self, path: str) -> PeerResponse:
        return await self._call("GET", path, b"", timeout_s=GET_S, bytes_max=INTRODUCTION_BYTES_MAX)

    async def post(self, path: str, body: bytes, *, timeout_s: float) -> PeerResponse:
        return await self._call("POST", path, body, timeout_s=timeout_s, bytes_max=ANSWER_BYTES_MAX)

    async def close(self) -> None:
        """At once, unless a call is under way: then that closes it."""
        self._closed = True
        if self._pool is not None and not self._used:
            pool, self._pool = self._pool, None
            await pool.aclose()

    async def _call(self, method: str, path: str, body: bytes, *, timeout_s: float, bytes_max: int) -> PeerResponse:
        self._used += 1
        try:
            with _failures_named():
                async with asyncio.timeout(timeout_s):
                    location = read_url(self._place().url.rstrip("/") + path)
                    return await self._exchange(method, location, body, timeout_s=timeout_s, bytes_max=bytes_max)
        finally:
            self._used -= 1
            if self._closed:
                await self.close()

    async def _exchange(
        self, method: str, location: Location, body: bytes, *, timeout_s: float, bytes_max: int
    ) -> PeerResponse:
        pool = await self._opened()
        import httpcore2  # noqa: PLC0415  (loaded by now; see `TlsTrust`)

        from covenant.outbound.guarded_transport import failures_named  # noqa: PLC0415

        headers: dict[bytes | str, bytes | str] = {
            "host": location.authority,
            "user-agent": self._user_agent,
            "accept": "application/json",
            "accept-encoding": "identity",
        }
        if method == "POST":
            headers |= {"content-type": "application/json", "content-length": str(len(body))}
        with failures_named():
            response = await pool.handle_async_request(
                httpcore2.Request(
                    method,
                    location.url,
                    headers=headers,
                    content=body or None,
                    extensions={
                        "timeout": {"connect": CONNECT_S, "pool": timeout_s, "read": timeout_s, "write": timeout_s}
                    },
                )
            )
            async with aclosing(response):
                return PeerResponse(response.status, _plain(response), await _read(response, bytes_max))

    def _place(self) -> Location:
        """Where the peer is, as somebody has given it."""
        try:
            return read_url(self._url)
        except InvalidUrl as error:
            raise AddressRefused(f"this URL cannot be called: {error}") from error

    def _meant(self) -> AddressGuard:
        place = self._place()
        return self._guard.meaning((f"{host_text(place.host)}:{place.port}",))

    async def _opened(self) -> httpcore2.AsyncConnectionPool:
        if self._pool is None:
            context = await self._trust.context()
            import httpcore2  # noqa: PLC0415  (loaded by now)

            from covenant.outbound.guarded_transport import GuardedBackend  # noqa: PLC0415  (loaded by now)

            if self._pool is None:
                self._pool = httpcore2.AsyncConnectionPool(
                    ssl_context=context,
                    max_connections=CONNECTIONS_MAX,
                    max_keepalive_connections=CONNECTIONS_MAX,
                    keepalive_expiry=KEPT_S,
                    network_backend=GuardedBackend(self._meant()),
                )
        return self._pool


def _plain(response: httpcore2.Response) -> Mapping[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}


async def _read(response: httpcore2.Response, bytes_max: int) -> bytes:
    if _plain(response).get("content-encoding", "identity") != "identity":
        raise PeerConflict("bad_response", "the answer is compressed, and compression was not asked for")
    pieces: list[bytes] = []
    size = 0
    async with aclosing(response.aiter_stream()) as stream:
        async for piece in stream:
            size += len(piece)
            if size > bytes_max:
                raise PeerConflict("too_large", f"the answer has more than {bytes_max} bytes")
            pieces.append(piece)
    return b"".join(pieces)


@contextmanager
def _failures_named() -> Iterator[None]:
    """One word for each way in which nobody answered."""
    try:
        yield
    except PeerCallFailed:
        raise
    except AddressRefused as refused:
        raise call_failed(refused.code, refused.detail, passing=refused.transient) from refused
    except CallFailed as failed:
        # A kept connection that the peer has closed meanwhile reads as an answer that is none.
        code = "connection_lost" if failed.code == "bad_response" else failed.code
        raise PeerUnavailable(code, failed.message) from failed
    except TimeoutError as error:
        raise PeerUnavailable("timed_out", "no answer in time") from error
