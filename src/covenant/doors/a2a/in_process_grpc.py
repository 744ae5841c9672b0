"""Calls the gRPC door of this daemon from inside: a channel without a socket. Needs the extra `grpc`.

The door reads the message and answers as it does over gRPC. Closing a stream does not end its task.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn

import grpc  # type: ignore[import-untyped]
from starlette.types import Scope

from covenant.doors.a2a.grpc import SERVICES, GrpcCalls
from covenant.doors.a2a.own_agents import ACTING
from covenant.exchange.access.tenants import Caller

MESSAGES_MAX: Final = 16
"""The most messages of a stream that wait to be read."""
Metadata = Sequence[tuple[str, str]]


class ActingCalls(GrpcCalls):
    """The gRPC door with an `ActingTenantAuth`: each call's context names its caller."""

    def _scope(self, context: Any) -> Scope:
        return {**super()._scope(context), ACTING: context.caller}


class InProcessChannel:
    """The part of a gRPC channel that a client needs, for the calls of one caller."""

    def __init__(self, calls: ActingCalls, caller: Caller) -> None:
        self._caller = caller
        self._methods = {
            f"/{service.full_name}/{name}": handler
            for service, dialect in SERVICES
            for name, handler in calls.methods(service, dialect).items()
        }

    def unary_unary(self, path: str, *, request_serializer: Any, response_deserializer: Any) -> Any:
        async def call(params: bytes, *, metadata: Metadata, timeout: float) -> Any:  # noqa: ASYNC109  (the library's)
            context = _CallContext(self._caller, request_serializer(params), metadata)
            try:
                async with asyncio.timeout(timeout):
                    return response_deserializer(await self._methods[path].stream_unary(None, context))
            except TimeoutError:
                context.fail(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

        return call

    def unary_stream(
        self, path: str, *, request_serializer: Any, response_deserializer: Any
    ) -> Callable[..., AsyncIterator[Any]]:
        async def call(params: bytes, *, metadata: Metadata) -> AsyncIterator[Any]:
            context = _CallContext(self._caller, request_serializer(params), metadata)
            work = asyncio.create_task(self._methods[path].stream_stream(None, context))
            work.add_done_callback(context.end)
            try:
                while (message := await context.next()) is not None:
                    yield response_deserializer(message)
                await work
            finally:
                work.cancel()
                with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                    await work

        return call


class _CallContext:
    def __init__(self, caller: Caller, request: bytes, metadata: Metadata) -> None:
        self.caller = caller
        self.messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._request = request
        self._metadata = metadata
        self._room = asyncio.Semaphore(MESSAGES_MAX)
        self._trailers: Metadata = ()

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def peer(self) -> str:
        return "ipv4:127.0.0.1:0"

    def auth_context(self) -> dict[str, Any]:
        return {}

    async def read(self) -> bytes:
        return self._request

    async def write(self, message: bytes) -> None:
        await self._room.acquire()
        self.messages.put_nowait(message)

    async def next(self) -> bytes | None:
        """The next message of a stream; None at its end."""
        self._room.release()
        return await self.messages.get()

    async def send_initial_metadata(self, _: Metadata) -> None: ...

    def set_trailing_metadata(self, trailers: Metadata) -> None:
        self._trailers = trailers

    def trailing_metadata(self) -> Metadata:
        return self._trailers

    async def abort(self, code: Any, details: str, _trailers: Any) -> NoReturn:
        self.fail(code, details)

    def fail(self, code: Any, details: str) -> NoReturn:
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

    def end(self, _: object) -> None:
        self.messages.put_nowait(None)
