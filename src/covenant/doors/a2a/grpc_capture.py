"""Calls of gRPC for the frame log: their messages in JSON. Needs the extra `grpc`."""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import DecodeError, Message

from covenant.exchange.frame_log import CapturedCall, FrameLog


class CapturedContext:
    """A call as the door sees it. What it reads and writes is kept beside."""

    def __init__(self, context: Any, log: FrameLog, what: str, request: type[Message], answer: type[Message]) -> None:
        self._context, self._log, self._asks, self._tells = context, log, request, answer
        headers = {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
        self._call = CapturedCall(log.now_ms(), "in", "a2a", f"gRPC {what}", headers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        message = await self._context.read()
        if isinstance(message, bytes):
            self._call.ask(_json(self._asks, message))
        return message

    async def write(self, message: bytes) -> None:
        self.tell(message)
        await self._context.write(message)

    def tell(self, message: bytes) -> None:
        if not self._call.status:
            self._call.status, self._call.outcome, self._call.answered_ms = 200, "OK", self._log.now_ms()
        self._call.tell(_json(self._tells, message) + b"\n")

    def end(self) -> None:
        """It is offered once, whether it was answered or refused."""
        self._log.offer(self._call)


def _json(kind: type[Message], data: bytes) -> bytes:
    try:
        return MessageToJson(kind.FromString(data), indent=None).encode()
    except DecodeError:
        return b""
