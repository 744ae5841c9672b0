"""The HTTP server under the doors: answers in one piece, heads within bounds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from covenant.daemon.gathering import HEAD_BYTES_MAX, Gathering
from covenant.daemon.listening import HttpServer, bound
from covenant.daemon.settings import HttpSettings

BOUND_S = 20.0


async def hello(_: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


@asynccontextmanager
async def serving(app: ASGIApp = hello) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    settings = HttpSettings(port=0)
    with bound(settings) as listener:
        server = HttpServer(app, listener, settings, grace_s=1)
        running = asyncio.create_task(server.run_until_told())
        await server.listening.wait()
        reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        try:
            async with asyncio.timeout(BOUND_S):
                yield reader, writer
        finally:
            writer.close()
            server.should_exit = True
            await running


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return head.partition(b"\r\n")[0], await reader.readexactly(length)


async def test_streams_end_with_their_daemon_and_say_so() -> None:
    left = asyncio.Event()

    async def streaming(_: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"id: 1\n\n", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    settings = HttpSettings(port=0)
    with bound(settings) as listener:
        server = HttpServer(streaming, listener, settings, grace_s=60)
        running = asyncio.create_task(server.run_until_told())
        await server.listening.wait()
        async with asyncio.timeout(BOUND_S):
            reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            writer.write(b"GET /v1/requests/x/events HTTP/1.1\r\nhost: h\r\n\r\n")
            await reader.readuntil(b"id: 1\n\n")
            server.should_exit = True
            said = await reader.read()
            await running
            writer.close()
    assert b": the daemon is stopping" in said
    assert said.endswith(b"\r\n0\r\n\r\n")
    assert left.is_set()


async def test_requests_on_one_connection_are_answered_in_turn() -> None:
    async with serving() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n" * 3)
        for _ in range(3):
            assert await answer(reader) == (b"HTTP/1.1 200 OK", b"hello")


async def test_a_head_that_does_not_end_is_refused_and_the_connection_with_it() -> None:
    async with serving() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\nx: " + b"a" * (HEAD_BYTES_MAX + 1))
        status, said = await answer(reader)
        assert status.startswith(b"HTTP/1.1 431 ")
        assert b"head_too_large" in said
        assert await reader.read() == b""


async def test_a_large_body_after_a_small_head_is_no_large_head() -> None:
    async with serving() as (reader, writer):
        size = 4 * HEAD_BYTES_MAX
        for _ in range(2):
            writer.write(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % size)
            for _ in range(4):
                writer.write(b"a" * HEAD_BYTES_MAX)
                await writer.drain()
            assert await answer(reader) == (b"HTTP/1.1 200 OK", b"hello")


GET = b"GET /some%20where?a=b HTTP/1.1\r\nhost: h\r\n\r\n"


async def test_an_application_is_told_what_was_asked() -> None:
    asked: list[Scope] = []

    async def listening(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope)
        await hello(scope, receive, send)

    async with serving(listening) as (reader, writer):
        writer.write(b"POST /some%20where?a=b HTTP/1.1\r\nHost: h\r\nX: Y\r\ncontent-length: 2\r\n\r\nhi")
        await answer(reader)
    (scope,) = asked
    assert (scope["method"], scope["path"], scope["raw_path"]) == ("POST", "/some where", b"/some%20where")
    assert (scope["query_string"], scope["http_version"], scope["scheme"]) == (b"a=b", "1.1", "http")
    assert (b"host", b"h") in scope["headers"]
    assert (b"x", b"Y") in scope["headers"]


async def test_a_body_without_a_length_is_told_in_chunks_and_the_connection_goes_on() -> None:
    async def streaming(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        await send({"type": "http.response.body", "body": b"three"})

    async with serving(streaming) as (reader, writer):
        for _ in range(2):
            writer.write(GET)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"transfer-encoding: chunked" in head
            assert await reader.readuntil(b"0\r\n\r\n") == b"3\r\none\r\n5\r\nthree\r\n0\r\n\r\n"


async def test_a_head_alone_is_answered_without_a_body() -> None:
    async with serving() as (reader, writer):
        writer.write(b"HEAD / HTTP/1.1\r\nhost: h\r\n\r\n" + GET)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-length: 5" in head
        assert await answer(reader) == (b"HTTP/1.1 200 OK", b"hello"), "the next answer follows at once"


async def test_a_client_that_waits_to_be_told_is_told_to_go_on() -> None:
    async with serving() as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hi")
        assert await answer(reader) == (b"HTTP/1.1 200 OK", b"hello")


async def test_an_older_client_is_answered_and_the_connection_ends() -> None:
    async with serving() as (reader, writer):
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        said = await reader.read()
        assert b"connection: close\r\n" in said
        assert said.endswith(b"\r\n\r\nhello")


async def test_an_application_that_fails_before_it_answers_is_answered_for() -> None:
    async def failing(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        raise ValueError("not for the client")

    async with serving(failing) as (reader, writer):
        writer.write(GET)
        said = await reader.read()
        assert said.startswith(b"HTTP/1.1 500 ")
        assert b"not for the client" not in said


async def test_an_answer_that_fails_halfway_is_broken_off_and_not_ended() -> None:
    async def failing(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        raise ValueError("halfway")

    async with serving(failing) as (reader, writer):
        writer.write(GET)
        said = await reader.read()
        assert said.endswith(b"3\r\none\r\n")


async def test_a_header_that_would_break_its_line_is_not_sent() -> None:
    async def splitting(_: Scope, __: Receive, send: Send) -> None:
        headers = [(b"content-length", b"0"), (b"location", b"/\r\nset-cookie: a=b")]
        await send({"type": "http.response.start", "status": 303, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    async with serving(splitting) as (reader, writer):
        writer.write(GET)
        said = await reader.read()
        assert said.startswith(b"HTTP/1.1 500 ")
        assert b"set-cookie" not in said


async def test_an_application_hears_that_its_caller_has_gone_also_where_another_request_waits() -> None:
    heard = asyncio.Event()

    async def waiting(_: Scope, receive: Receive, __: Send) -> None:
        assert (await receive())["type"] == "http.request"
        assert (await receive())["type"] == "http.disconnect"
        heard.set()

    async with serving(waiting) as (_, writer):
        writer.write(GET * 2)
        await writer.drain()
        writer.close()
        await heard.wait()


class Written(asyncio.Transport):
    """A transport that remembers each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def test_what_is_written_within_a_turn_goes_out_as_one() -> None:
    transport = Written()
    gathering = Gathering(transport, asyncio.get_running_loop())
    gathering.write(b"head ")
    gathering.write(b"body")
    assert transport.writes == []
    await asyncio.sleep(0)
    assert transport.writes == [b"head body"]
    gathering.write(b"last")
    gathering.close()
    assert transport.writes[1:] == [b"last"], "closing loses nothing"
    assert transport.closed
