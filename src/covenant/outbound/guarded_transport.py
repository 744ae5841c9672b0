"""Connecting: an httpx2 transport whose every socket goes to an address that the guard has just checked.

The guard is inside the connection pool's own connect, so there is no path around it. TLS still verifies the other side
by the host's name. No connection is reused: each call is checked again, and the rest of one answer cannot be taken for
the next. Nothing is taken from the environment: no proxy, no credentials. Importing this imports httpx2.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from importlib import import_module
from typing import Final

import httpcore2
import httpx2

from covenant.outbound.address_guard import AddressGuard
from covenant.outbound.call_errors import CallFailed, FailureCode, too_large
from covenant.outbound.urls import InvalidUrl, read_authority

SocketOption = tuple[int, int, int] | tuple[int, int, bytes | bytearray] | tuple[int, int, None, int]
_BEFORE_SENDING: Final = (httpcore2.ConnectTimeout, httpcore2.PoolTimeout, httpcore2.ConnectError)
_FAILURES: Final[tuple[tuple[type[Exception], FailureCode, str], ...]] = (
    (httpcore2.TimeoutException, "timed_out", "no answer in time"),
    (httpcore2.ConnectError, "connect_failed", "no connection could be made"),
    (httpcore2.NetworkError, "connection_lost", "the connection broke"),
    (httpcore2.RemoteProtocolError, "bad_response", "the answer is not an HTTP response"),
)


def load() -> None:
    """Imports the modules that the first connection would otherwise import on the event loop."""
    import_module("anyio._backends._asyncio")


class GuardedBackend(httpcore2.AsyncNetworkBackend):
    def __init__(self, guard: AddressGuard) -> None:
        self._guard = guard
        self._sockets = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  (httpcore2's signature)
        local_address: str | None = None,
        socket_options: Iterable[SocketOption] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Tries the host's addresses in turn, within one `timeout` for the look-up and all of them."""
        loop = asyncio.get_running_loop()
        until = loop.time() + (timeout or 0.0)
        try:
            named, _ = read_authority(f"[{host}]" if ":" in host else host)
        except InvalidUrl as error:
            raise httpcore2.ConnectError(str(error)) from error
        addresses = await self._guard.vet(named, port)
        failed: Exception = httpcore2.ConnectError("no address")
        for tried, address in enumerate(addresses):
            # A dead address may use up only its own share of the time.
            share = None if timeout is None else max(0.001, (until - loop.time()) / (len(addresses) - tried))
            try:
                return await self._sockets.connect_tcp(
                    str(address), port, timeout=share, local_address=local_address, socket_options=socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failed = error
        raise failed


class GuardedTransport(httpx2.AsyncBaseTransport):
    """Sends one request, without following redirects. Raises AddressRefused and CallFailed.

    A request's extension `wire_bytes_max` bounds the body of its answer, before decompression.
    """

    def __init__(
        self,
        guard: AddressGuard,
        *,
        connections_max: int,
        ssl_context: ssl.SSLContext,
    ) -> None:
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=ssl_context,
            max_connections=connections_max,
            max_keepalive_connections=0,
            network_backend=GuardedBackend(guard),
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        assert isinstance(request.stream, httpx2.AsyncByteStream)
        url = request.url
        with failures_named():
            response = await self._pool.handle_async_request(
                httpcore2.Request(
                    method=request.method,
                    url=httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
                    headers=request.headers.raw,
                    content=request.stream,
                    extensions=request.extensions,
                )
            )
        return httpx2.Response(
            status_code=response.status,
            headers=response.headers,
            stream=_Body(response, request.extensions.get("wire_bytes_max")),
            extensions=response.extensions,
            request=request,
        )

    async def aclose(self) -> None:
        await self._pool.aclose()


class _Body(httpx2.AsyncByteStream):
    """Counts the bytes on the wire: a compressed body can go on for ever without growing when decompressed."""

    def __init__(self, response: httpcore2.Response, bytes_max: int | None) -> None:
        self._response = response
        self._bytes_max = bytes_max

    async def __aiter__(self) -> AsyncIterator[bytes]:
        seen = 0
        with failures_named():
            async with aclosing(self._response.aiter_stream()) as pieces:
                async for piece in pieces:
                    seen += len(piece)
                    if self._bytes_max is not None and seen > self._bytes_max:
                        raise too_large(self._bytes_max)
                    yield piece

    async def aclose(self) -> None:
        await self._response.aclose()


@contextmanager
def failures_named() -> Iterator[None]:
    """Raises the library's exceptions as ours.

    Their texts may name an inside address, so they are for the operator alone.
    """
    try:
        yield
    except (httpcore2.TimeoutException, httpcore2.NetworkError, httpcore2.RemoteProtocolError) as error:
        detail = f"{type(error).__name__}: {error}".removesuffix(": ")
        sent = not isinstance(error, _BEFORE_SENDING)
        code, message = next((code, message) for kind, code, message in _FAILURES if isinstance(error, kind))
        raise CallFailed(code, message, detail=detail, sent=sent) from error
    except AttributeError as error:
        # httpcore2 asks a new connection about its socket. Under uvloop a connection that was reset by then has none.
        if error.name != "getpeername":
            raise
        raise CallFailed("connection_lost", "the connection broke", detail="reset at once") from error
