"""A stream, written as server-sent events: frames that are ready together are one write, and each has its number."""

from __future__ import annotations

from functools import partial

from starlette.types import Receive, Send

from covenant.doors.a2a.operations import A2ACall
from covenant.doors.http.endpoint import TOO_SLOW, serve_stream
from covenant.exchange.access.tenants import TenantAccess
from covenant.exchange.tasks.task_stream import TaskStream
from covenant.wire.sse import KEEP_ALIVE, SseFormat


async def write_stream(
    stream: TaskStream, call: A2ACall, sse: SseFormat, *, tenancy: TenantAccess, receive: Receive, send: Send
) -> None:
    write = partial(_write_frames, stream, call, sse)
    await serve_stream(stream, call.ask.caller, write, tenancy=tenancy, receive=receive, send=send)


async def _write_frames(stream: TaskStream, call: A2ACall, sse: SseFormat, send: Send) -> None:
    first, reply, responses = stream.first, stream.reply, call.dialect.responses
    if reply is not None:
        frame = sse.frame(reply.generation, responses.encode_message(reply))
        await send({"type": "http.response.body", "body": frame, "more_body": False})
        return
    history_length = getattr(call.request, "history_length", None)
    frame = sse.frame(first.generation, responses.encode_snapshot(first, history_length))
    await send({"type": "http.response.body", "body": frame, "more_body": True})
    task, encode = first.task, responses.encode_step
    async for steps in stream:
        body = sse.frames([(step.generation, encode(task, step)) for step in steps]) if steps else KEEP_ALIVE
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": TOO_SLOW if stream.cut else b"", "more_body": False})
