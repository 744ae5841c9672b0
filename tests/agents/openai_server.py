"""A server that speaks as OpenAI's does, on loopback: it streams what a test wrote down, texts and calls of tools."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.outbound.http_servers import Request, http_server, reply

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


@dataclass(frozen=True)
class Cut:
    """A text that ends where it came to its limit of tokens."""

    text: str


@dataclass(frozen=True)
class Drip:
    """One word now and then, and no end."""

    word: str
    pause_s: float


Line = str | tuple[str, dict[str, Any]] | int | Cut | Drip
"""A text, a tool with its arguments, the status of a failure, or one of the above."""


@dataclass
class OpenAi:
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)


@asynccontextmanager
async def openai_server(lines: Sequence[Line]) -> AsyncIterator[OpenAi]:
    left, server = list(lines), OpenAi()

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        assert request.target == "/v1/chat/completions"
        body = json.loads(request.body)
        assert body["stream"] is True
        server.asked.append(body)
        server.keys.append(request.headers["authorization"])
        line = left.pop(0)
        if isinstance(line, int):
            writer.write(reply(line, b'{"error": {"message": "swordfish"}}', content_type="application/json"))
            return
        writer.write(HEAD)
        if isinstance(line, Drip):
            await _drip(writer, body["model"], line)
            return
        why = "stop"
        if isinstance(line, Cut):
            line, why = line.text, "length"
        for delta in _deltas(line):
            writer.write(_chunk(body["model"], [{"index": 0, "delta": delta, "finish_reason": None}]))
        if not isinstance(line, str):
            why = "tool_calls"
        writer.write(_chunk(body["model"], [{"index": 0, "delta": {}, "finish_reason": why}]))
        usage = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
        writer.write(_chunk(body["model"], [], usage))
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()

    async with http_server(answer) as served:
        server.url = served.url("/v1")
        yield server


async def _drip(writer: asyncio.StreamWriter, model: str, line: Drip) -> None:
    with contextlib.suppress(ConnectionError):  # whoever asked has had enough
        while not writer.is_closing():
            delta = {"role": "assistant", "content": line.word}
            writer.write(_chunk(model, [{"index": 0, "delta": delta, "finish_reason": None}]))
            await writer.drain()
            await asyncio.sleep(line.pause_s)


def _deltas(line: str | tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(line, str):
        return [{"role": "assistant", "content": word} for word in line.split(" ")]
    name, arguments = line
    text = json.dumps(arguments)
    half = len(text) // 2
    first = {"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": text[:half]}}
    rest = {"index": 0, "function": {"arguments": text[half:]}}
    return [{"role": "assistant", "content": None, "tool_calls": [first]}, {"tool_calls": [rest]}]


def _chunk(model: str, choices: list[Any], usage: dict[str, int] | None = None) -> bytes:
    made = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": model, "choices": choices}
    if usage is not None:
        made["usage"] = usage
    return b"data: " + json.dumps(made).encode() + b"\n\n"
