"""A stream, written as server-sent events: frames that are ready together are one write, and each has its number."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from starlette.types import Receive, Send

from covenant.doors.a2a.disconnect import Disconnect
from covenant.doors.a2a.operations import WIRES, A2ACall
from covenant.exchange.access.tenants import Caller, TenantAccess
from covenant.exchange.tasks.task_stream import TaskStream
from covenant.wire.sse import KEEP_ALIVE, SseFormat, comment

_HEADERS: Final = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    # Or a proxy would gather frames until its buffer is full.
    (b"x-accel-buffering", b"no"),
]
TOO_SLOW: Final = comment("too slow: the task goes on; come back with Last-Event-ID")
TURNED_OUT: Final = comment("no longer allowed: the task goes on")


async def write_stream(
    stream: TaskStream, asked: A2ACall, framing: SseFormat, *, tenancy: TenantAccess, receive: Receive, send: Send
) -> None:
    writing = partial(_frames, stream, asked, framing)
    await run_stream(stream, asked.ask.caller, writing, tenancy=tenancy, receive=receive, send=send)


async def run_stream(
    stream: TaskStream,
    caller: Caller,
    write: Callable[[Send], Awaitable[None]],
    *,
    tenancy: TenantAccess,
    receive: Receive,
    send: Send,
) -> None:
    """Whatever `write` makes of the stream. Leaving, or being made to leave, ends the stream and not the task."""
    departure = Disconnect(receive)
    turned_out = False

    def turn_out() -> None:
        nonlocal turned_out
        turned_out = True
        departure.end()

    with stream, departure, tenancy.session(caller, turn_out):
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await write(send)
    if turned_out:
        await send({"type": "http.response.body", "body": TURNED_OUT, "more_body": False})


async def _frames(stream: TaskStream, asked: A2ACall, framing: SseFormat, send: Send) -> None:
    first, reply, wire = stream.first, stream.reply, WIRES[asked.dialect]
    if reply is not None:
        frame = framing.frame(reply.generation, wire.encode_message(reply))
        await send({"type": "http.response.body", "body": frame, "more_body": False})
        return
    history_length = getattr(asked.request, "history_length", None)
    frame = framing.frame(first.generation, wire.encode_snapshot(first, history_length))
    await send({"type": "http.response.body", "body": frame, "more_body": True})
    task, encode = first.task, wire.encode_step
    async for steps in stream:
        body = framing.frames([(step.generation, encode(task, step)) for step in steps]) if steps else KEEP_ALIVE
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": TOO_SLOW if stream.cut else b"", "more_body": False})
