"""The fetcher: calls a URL through the address guard and within limits.

The guard checks each request, and each redirect that is followed. The answer is bounded in size,
on the wire and after decompression, while it arrives. Every phase has a time limit, and so has the whole fetch. Nothing
of one call, such as a cookie, is kept for the next.

GET and HEAD follow all redirects, other methods only 307 and 308; any other redirect is the answer. None leads from
https to http. Another origin (scheme, host, port) gets no body, and only headers that are known to hold no secret.

One `Fetcher` serves a daemon. httpx2 is imported, and certificates are read, in a thread, with the first call.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urljoin

from covenant.model.errors import Invalid
from covenant.outbound.address_guard import AddressGuard
from covenant.outbound.call_errors import CallFailed, too_large
from covenant.outbound.outbound_settings import OutboundSettings
from covenant.outbound.urls import InvalidUrl, Location, has_forbidden, read_url

if TYPE_CHECKING:
    import httpx2

MIB: Final = 1024 * 1024
REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
METHOD_KEPT: Final = frozenset({307, 308})
READ_METHODS: Final = frozenset({"GET", "HEAD"})
# A list of allowed headers, since nobody can list all headers that hold secrets.
FORWARDED: Final = frozenset(
    "accept accept-encoding accept-language a2a-extensions a2a-version connection traceparent user-agent".split()
)
COMPRESSED: Final = {"accept-encoding": "gzip, deflate"}
PLAIN: Final = {"accept-encoding": "identity"}
# Headers that frame a request or belong to its connection are set by us alone.
OWN_HEADERS: Final = frozenset(
    """
    accept-encoding connection content-length expect host keep-alive proxy-authorization proxy-connection te trailer
    transfer-encoding upgrade
    """.split()
)
RECORD: Final = "covenant.call_record"
"""The extension of a response that has the record of its call, if there is one."""
_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE: Final = re.compile(r"(?:[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?)?")


class TlsTrust:
    """The certificate authorities that are believed: the system's, unless a context is given. Read once."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self._fixed_context = context
        self._context: ssl.SSLContext | None = None
        self._opening = asyncio.Lock()

    async def context(self) -> ssl.SSLContext:
        async with self._opening:
            if self._context is None:
                # The import and reading certificates are slow, and must not hold the loop.
                self._context = await asyncio.to_thread(self._open)
            return self._context

    def _open(self) -> ssl.SSLContext:
        from covenant.outbound.guarded_transport import load  # noqa: PLC0415  (see the module's contract)

        load()
        return self._fixed_context or ssl.create_default_context()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """An answer of any status. `headers` have lower-case names; `url` is the last URL after redirects."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """An answer whose body is still arriving: to be read once, inside the `async with` that gave it."""

    status: int
    headers: Mapping[str, str]
    pieces: AsyncIterator[bytes]
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One request on its way, changed by the redirects that it follows."""

    method: str
    location: Location
    headers: Mapping[str, str]
    content: bytes = field(repr=False)


class CallRecord(Protocol):
    """Observes the answer to one request: the head, the decompressed body as it arrives, and its end."""

    def answered(self, status: int, headers: Mapping[str, str]) -> None: ...

    def received(self, piece: bytes) -> None: ...

    def ended(self) -> None: ...


class CallObserver(Protocol):
    """Called for each request that is sent, redirects included. Returns None if the answer is not of interest."""

    def sent(self, method: str, url: str, headers: Mapping[str, str], content: bytes) -> CallRecord | None: ...


class Fetcher:
    """Raises, from each call: AddressRefused; Invalid for headers that cannot be sent; CallFailed."""

    def __init__(
        self,
        guard: AddressGuard,
        limits: OutboundSettings,
        *,
        user_agent: str = "covenant",
        trust: TlsTrust | None = None,
        observer: CallObserver | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """`transport` carries the requests in place of the network."""
        self.guard = guard
        self._limits = limits
        self._user_agent = user_agent
        self._trust = trust or TlsTrust()
        self.observer = observer
        self._transport = transport

    def allowing(self, *places: str) -> Fetcher:
        """A fetcher that may also call these places (`host:port`) at private addresses, since the caller named them."""
        return self._with(guard=self.guard.allowing(places))

    def observed(
        self, observer: CallObserver, limits: OutboundSettings, transport: httpx2.AsyncBaseTransport | None = None
    ) -> Fetcher:
        """A fetcher whose calls are observed, within other limits. The caller closes it."""
        return self._with(observer=observer, limits=limits, transport=transport)

    def _with(self, **other: Any) -> Fetcher:
        same = {"guard": self.guard, "limits": self._limits, "user_agent": self._user_agent, "trust": self._trust}
        return Fetcher(**{**same, "observer": self.observer, **other})

    async def open(self) -> None:
        await self.transport()

    async def fetch(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes = b"",
        total_ms: int | None = None,
    ) -> Fetched:
        """Fetches the whole answer, or raises.

        `total_ms` replaces the time limit of the settings. A pause in the answer may then take as long, too.
        """
        bytes_max, idle_ms = self._limits.body_bytes_max, max(self._limits.idle_ms, total_ms or 0)
        call = self._begin(method, url, headers or {}, COMPRESSED, content)
        async with self._in_time(total_ms):
            call, response = await self._follow(call, idle_ms=idle_ms, bytes_max=bytes_max)
            async with aclosing(response):
                body = b"".join([piece async for piece in _bounded(response, bytes_max)])
        return Fetched(status=response.status_code, headers=_headers_of(response), body=body, url=call.location.url)

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes = b"",
        idle_ms: int | None = None,
        bytes_max: int | None = None,
    ) -> AsyncIterator[Streamed]:
        """Streams an answer for as long as it comes. It is never compressed, so each piece arrives when it was sent.

        Without `bytes_max` the reader must bound its own buffers.
        """
        call = self._begin(method, url, headers or {}, PLAIN, content)
        async with self._in_time():
            call, response = await self._follow(call, idle_ms=idle_ms or self._limits.idle_ms, bytes_max=bytes_max)
        async with aclosing(response):
            if response.headers.get("content-encoding", "identity") != "identity":
                raise CallFailed(
                    "bad_response", "the stream is compressed, and compression was not asked for", transient=False
                )
            async with aclosing(_bounded(response, bytes_max)) as pieces:
                yield Streamed(
                    status=response.status_code, headers=_headers_of(response), pieces=pieces, url=call.location.url
                )

    async def close(self) -> None:
        if self._transport is not None:
            await self._transport.aclose()

    def _begin(
        self, method: str, url: str, headers: Mapping[str, str], encodings: Mapping[str, str], content: bytes
    ) -> _Call:
        check_headers(headers)
        given = {name.lower(): value for name, value in headers.items()}
        sent = {"user-agent": self._user_agent, "accept": "*/*", **given, **encodings, "connection": "close"}
        return _Call(method=method.upper(), location=self.guard.read(url), headers=sent, content=content)

    @asynccontextmanager
    async def _in_time(self, total_ms: int | None = None) -> AsyncIterator[None]:
        total_s = (total_ms or self._limits.total_ms) / 1000
        try:
            async with asyncio.timeout(total_s):
                yield
        except TimeoutError as error:
            raise CallFailed("timed_out", f"no answer within {total_s:g} s") from error

    async def _follow(self, call: _Call, *, idle_ms: int, bytes_max: int | None) -> tuple[_Call, httpx2.Response]:
        """Sends the request and follows redirects until there is an answer. The caller closes the response."""
        for _ in range(self._limits.redirects_max + 1):
            response = await self._send(call, idle_ms=idle_ms, bytes_max=bytes_max)
            target = _redirection(call, response)
            if target is None:
                return call, response
            # The body of a redirect is ignored.
            await response.aclose()
            _end(response)
            call = _redirected(call, target)
            self.guard.read(call.location.url)
        raise CallFailed("bad_redirect", "the server redirects too often", transient=False)

    async def _send(self, call: _Call, *, idle_ms: int, bytes_max: int | None) -> httpx2.Response:
        transport = await self.transport()
        import httpx2  # noqa: PLC0415  (see the module's contract)

        record = None
        if self.observer is not None:
            record = self.observer.sent(call.method, call.location.url, call.headers, call.content)
        connect_s, idle_s = self._limits.connect_ms / 1000, idle_ms / 1000
        request = httpx2.Request(
            call.method,
            call.location.url,
            headers=call.headers,
            content=call.content or None,
            extensions={
                "timeout": {"connect": connect_s, "pool": connect_s, "read": idle_s, "write": idle_s},
                "wire_bytes_max": bytes_max,
            },
        )
        try:
            response = await transport.handle_async_request(request)
        except BaseException:
            if record is not None:
                record.ended()
            raise
        if record is not None:
            record.answered(response.status_code, _headers_of(response))
            response.extensions[RECORD] = record
        return response

    async def transport(self) -> httpx2.AsyncBaseTransport:
        """The transport, for a client of another library, which then keeps its own limits."""
        if self._transport is None:
            context = await self._trust.context()
            from covenant.outbound.guarded_transport import GuardedTransport  # noqa: PLC0415  (loaded by now)

            # Another caller may have made it while we waited: all share one.
            if self._transport is None:
                limit = self._limits.connections_max
                self._transport = GuardedTransport(self.guard, connections_max=limit, ssl_context=context)
        return self._transport


def check_headers(headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise Invalid("bad_header", f"the header {name!r} has characters that a header cannot have")
        if name.lower() in OWN_HEADERS:
            raise Invalid("bad_header", f"the header {name!r} is set by the daemon; leave it out")


def _redirection(call: _Call, response: httpx2.Response) -> str | None:
    """The target of a redirect that is followed; None if this response is the answer."""
    follows = REDIRECTS if call.method in READ_METHODS else METHOD_KEPT
    target: str | None = response.headers.get("location")
    return target if response.status_code in follows else None


def _redirected(call: _Call, target: str) -> _Call:
    try:
        # Joining silently drops invalid characters, so these are refused first.
        if has_forbidden(target):
            raise InvalidUrl("it has spaces, control characters or backslashes")
        location = read_url(urljoin(call.location.url, target))
    except ValueError as error:
        raise CallFailed(
            "bad_redirect", "the server redirects to a URL that cannot be called", transient=False
        ) from error
    if call.location.scheme == "https" and location.scheme == "http":
        raise CallFailed("bad_redirect", "the server redirects from https to http", transient=False)
    if location.origin == call.location.origin:
        return replace(call, location=location)
    if call.content:
        raise CallFailed(
            "bad_redirect",
            "the server redirects to another origin, and a body is not sent there; call that address itself",
            transient=False,
        )
    kept = {name: value for name, value in call.headers.items() if name in FORWARDED}
    return replace(call, location=location, headers=kept)


def _headers_of(response: httpx2.Response) -> Mapping[str, str]:
    return dict(response.headers.items())


async def _bounded(response: httpx2.Response, bytes_max: int | None) -> AsyncGenerator[bytes]:
    """The decompressed body.

    The library yields at most a megabyte at once, so a decompression bomb is noticed early.
    """
    import httpx2  # noqa: PLC0415  (loaded by now)

    declared: str = response.headers.get("content-length", "")
    if bytes_max is not None and declared.isdecimal() and int(declared) > bytes_max:
        raise too_large(bytes_max)
    record: CallRecord | None = response.extensions.get(RECORD)
    seen = 0
    try:
        async with aclosing(response.aiter_bytes()) as pieces:
            async for piece in pieces:
                seen += len(piece)
                if bytes_max is not None and seen > bytes_max:
                    raise too_large(bytes_max)
                if record is not None:
                    record.received(piece)
                yield piece
    except httpx2.DecodingError as error:
        raise CallFailed("bad_response", "the body is not compressed as its headers say", detail=str(error)) from error
    finally:
        _end(response)


def _end(response: httpx2.Response) -> None:
    record: CallRecord | None = response.extensions.pop(RECORD, None)
    if record is not None:
        record.ended()
