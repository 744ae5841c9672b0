"""HTTP servers on loopback that say, byte by byte, what a test makes them say; and how a test calls them."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from covenant.outbound.address_guard import AddressGuard, Resolver, Unresolved
from covenant.outbound.guarded_transport import GuardedTransport
from covenant.outbound.http_fetcher import Fetcher, TlsTrust
from covenant.outbound.outbound_settings import OutboundSettings

HERE = "127.0.0.1"
LOADED = (GuardedTransport, ssl.create_default_context())
"""What the first call would load: done before any test begins, so that none of its time goes to that."""
LIMITS = OutboundSettings(body_bytes_max=100_000, total_ms=90_000, connect_ms=60_000, idle_ms=60_000, redirects_max=3)


@dataclass
class Request:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader


Answer = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Served:
    host: str = HERE
    port: int = 0
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a caller has closed a connection."""

    def url(self, path: str = "/", host: str | None = None) -> str:
        return f"http://{host or self.host}:{self.port}{path}"


def reply(status: int = 200, body: bytes = b"", **headers: str) -> bytes:
    """A whole answer. Headers are spelled with `_` for `-`; a length of one's own replaces the true one."""
    said = {"content-length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = [f"HTTP/1.1 {status} Said", *(f"{name}: {value}" for name, value in said.items()), "", ""]
    return "\r\n".join(lines).encode() + body


def always(answer: bytes, *, close: bool = False) -> Answer:
    async def speak(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        if close:
            writer.close()

    return speak


def redirect(place: str, status: int = 302) -> Answer:
    return always(reply(status, location=place))


def by_path(**answers: Answer) -> Answer:
    async def speak(request: Request, writer: asyncio.StreamWriter) -> None:
        await answers[request.target.strip("/") or "root"](request, writer)

    return speak


async def silence(request: Request, writer: asyncio.StreamWriter) -> None:
    """Says nothing for as long as somebody waits."""
    await request.reader.read()


def endless(head: bytes, piece: bytes, pause_s: float = 0.0) -> Answer:
    async def speak(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)

    return speak


async def _read(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *rest = head.split("\r\n")[:-2]
    method, target, _ = first.split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in rest)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(method, target, headers, body, reader)


@asynccontextmanager
async def http_server(
    answer: Answer, *, host: str = HERE, port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Served]:
    served = Served(host=host)
    open_tasks: set[asyncio.Task[None]] = set()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_tasks.add(task)
        served.connections += 1
        try:
            while not writer.is_closing():
                request = await _read(reader)
                served.requests.append(request)
                served.asked.set()
                await answer(request, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            served.closed.set()
        finally:
            open_tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(converse, host, port, ssl=tls)
    served.port = server.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        server.close()
        for task in open_tasks:
            task.cancel()
        await server.wait_closed()


async def nobody(name: str) -> Sequence[object]:
    raise Unresolved(f"nobody answers for {name}", transient=False)


@asynccontextmanager
async def fetcher(
    *allow: str,
    resolver: Resolver = nobody,  # type: ignore[assignment]  # returns nothing at all
    limits: OutboundSettings = LIMITS,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Fetcher]:
    opened = Fetcher(AddressGuard(allow, resolver=resolver), limits, trust=TlsTrust(tls or LOADED[1]))
    try:
        yield opened
    finally:
        await opened.close()
