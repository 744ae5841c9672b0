"""A stream over gRPC: one message a step, each with its generation in `covenant.generation` of its metadata.

However it ends, the trailer `last-event-id` says how far it came: sent again as metadata, it resumes after that.
There are no keep-alive messages, since HTTP/2 has pings of its own.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Final

from a2a.types import a2a_pb2

from covenant.doors.a2a.operations import A2ACall
from covenant.doors.a2a.protobuf_json import ResponseWriter
from covenant.exchange.access.tenants import TenantAccess
from covenant.exchange.tasks.task_stream import TaskStream
from covenant.model.errors import Refusal, Unauthenticated, Unavailable
from covenant.wire.a2a.dialects import V1

CURSOR: Final = "last-event-id"
GENERATION: Final = "covenant.generation"
RETRY_MS: Final = 1_000

_writer = ResponseWriter(a2a_pb2.StreamResponse)


class GrpcStream:
    """One stream on its way to its caller. Leaving, or being made to leave, ends the stream and not the task."""

    def __init__(self, stream: TaskStream, call: A2ACall, context: Any) -> None:
        self._stream = stream
        self._call = call
        self._context = context
        self._sent: int | None = None
        self._refusal: Refusal | None = None
        self._work: asyncio.Task[Any] | None = None

    def end(self, refusal: Refusal) -> None:
        """At once, also while the caller does not read."""
        if self._refusal is None:
            self._refusal = refusal
            if self._work is not None:
                self._work.cancel()

    async def run(self, tenancy: TenantAccess) -> None:
        """Returns when the stream has come to its end, and raises the refusal if it was ended before."""
        with self._stream:
            # Alone, since a first write that is broken off would have this sent a second time, which ends the call.
            await self._context.send_initial_metadata(())
            await self._write_until_end(tenancy)
        if self._refusal is not None:
            raise self._refusal
        if self._stream.cut:
            raise _too_slow()

    async def _write_until_end(self, tenancy: TenantAccess) -> None:
        work = self._work = asyncio.current_task()
        assert work is not None
        try:
            with tenancy.session(self._call.ask.caller, partial(self.end, _turned_out())):
                # Where the session ended as it began, that is noticed here and not in the middle of a write.
                await asyncio.sleep(0)
                if self._refusal is None:
                    await self._write_all()
        except asyncio.CancelledError:
            # The caller may have left in the same moment: then there is nobody to tell.
            if self._refusal is None or work.uncancel() > 0:
                raise
        finally:
            self._work = None
            if self._sent is not None:
                self._context.set_trailing_metadata(((CURSOR, str(self._sent)),))

    async def _write_all(self) -> None:
        stream, request = self._stream, self._call.request
        if stream.reply is not None:
            await self._write(stream.reply.generation, V1.responses.encode_message(stream.reply))
            return
        first, history_length = stream.first, getattr(request, "history_length", None)
        await self._write(first.generation, V1.responses.encode_snapshot(first, history_length))
        async for steps in stream:
            for step in steps:
                await self._write(step.generation, V1.responses.encode_step(first.task, step))

    async def _write(self, generation: int, told: bytes) -> None:
        event = _writer.message(told)
        getattr(event, event.WhichOneof("payload")).metadata[GENERATION] = generation
        # A write that was begun arrives before the trailers do, also if nobody waits for it any more.
        self._sent = generation
        await self._context.write(event.SerializeToString())


def _turned_out() -> Refusal:
    return Unauthenticated("unauthenticated", "no longer allowed: the task goes on")


def _too_slow() -> Refusal:
    message = f"too slow: the task goes on; come back to it with {CURSOR}"
    return Unavailable("stream_cut", message, retry_after_ms=RETRY_MS)


def stopping() -> Refusal:
    message = f"the daemon is stopping: what is accepted is kept; come back with {CURSOR}"
    return Unavailable("stopping", message, retry_after_ms=RETRY_MS)
