"""A stream, written as server-sent events: frames that are ready together are one write, and each has its number."""

from __future__ import annotations

from functools import partial

from starlette.types import Receive, Send

from covenant.doors.a2a.operations import WIRES, A2ACall
from covenant.doors.http.endpoint import TOO_SLOW, serve_stream
from covenant.exchange.access.tenants import TenantAccess
from covenant.exchange.tasks.task_stream import TaskStream
from covenant.wire.sse import KEEP_ALIVE, SseFormat


async def write_stream(
    stream: TaskStream, asked: A2ACall, framing: SseFormat, *, tenancy: TenantAccess, receive: Receive, send: Send
) -> None:
    writing = partial(_frames, stream, asked, framing)
    await serve_stream(stream, asked.ask.caller, writing, tenancy=tenancy, receive=receive, send=send)


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
