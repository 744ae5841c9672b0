"""One connection of the HTTP server: answers in one piece and in order, heads within bounds."""

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from covenant.doors.http.server.bounds import HttpBounds
from covenant.doors.http.server.http_exchange import HttpExchange
from covenant.doors.http.server.http_server import HttpServer
from tests.doors.http.server.server_under_test import (
    GET,
    Whole,
    answer,
    connected,
    hello,
    listening,
    make,
    now_ms,
    serving,
)

HEAD_BYTES_MAX = HttpBounds().head_bytes_max


async def test_streams_end_with_their_daemon_and_say_so() -> None:
    left = asyncio.Event()

    async def streaming(_: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"id: 1\n\n", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async with listening(streaming, grace_s=60) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/requests/x/events HTTP/1.1\r\nhost: h\r\n\r\n")
        await reader.readuntil(b"id: 1\n\n")
        stopping = asyncio.create_task(server.stop(60))
        said = await reader.read()
        await stopping
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


LARGE = b"GET / HTTP/1.1\r\nhost: h\r\nx: " + b"a" * HEAD_BYTES_MAX + b"\r\n\r\n"


@pytest.mark.parametrize(
    "reads",
    [
        pytest.param([LARGE], id="in one read"),
        pytest.param([LARGE[:100], LARGE[100:]], id="in two"),
        pytest.param([GET + LARGE], id="after a whole request"),
        pytest.param([GET + LARGE[:-100], LARGE[-100:]], id="begun after a whole request"),
        pytest.param([GET[:-1], GET[-1:] + LARGE], id="after the end of a request"),
        pytest.param([LARGE + GET], id="before another"),
        pytest.param([b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (HEAD_BYTES_MAX // 6) + b"\r\n"], id="of many headers"),
        pytest.param([b"GET /" + b"a" * HEAD_BYTES_MAX + b" HTTP/1.1\r\n\r\n"], id="of a long URL"),
    ],
)
async def test_a_head_that_is_too_large_is_refused_however_it_arrives(reads: list[bytes]) -> None:
    asked: list[Scope] = []

    async def asked_for(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope)
        await hello(scope, receive, send)

    connection, transport = connected(asked_for)
    for read in reads:
        connection.data_received(read)
    await transport.until(lambda: transport.closed)
    before = [b"/some%20where"] * (GET in b"".join(reads)[: len(GET)])
    assert [scope["raw_path"] for scope in asked] == before
    statuses = [part.split()[0] for part in b"".join(transport.writes).split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200"] * len(before) + [b"431"], "what was whole is answered first"


async def test_a_head_as_large_as_may_be_is_read_also_beside_others() -> None:
    asked: list[Scope] = []

    async def asked_for(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope)
        await hello(scope, receive, send)

    connection, transport = connected(asked_for)
    connection.data_received(GET + b"GET / HTTP/1.1\r\nx: " + b"a" * (HEAD_BYTES_MAX - 100) + b"\r\n\r\n" + GET)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(asked) == len(transport.writes) == 3
    assert not transport.closed


async def test_what_follows_a_body_is_not_part_of_the_head() -> None:
    asked: list[Scope] = []

    async def asked_for(scope: Scope, receive: Receive, send: Send) -> None:
        await hello(scope, receive, send)
        asked.append(scope)

    async with serving(asked_for) as (reader, writer):
        chunked = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nauthorization: x\r\n\r\n"
        writer.write(chunked + GET)
        for _ in range(2):
            assert await answer(reader) == (b"HTTP/1.1 200 OK", b"hello")
    assert [name for scope in asked for name, _ in scope["headers"]] == [b"transfer-encoding", b"host"]


async def test_a_large_body_after_a_small_head_is_no_large_head() -> None:
    async with serving() as (reader, writer):
        size = 4 * HEAD_BYTES_MAX
        for _ in range(2):
            writer.write(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % size)
            for _ in range(4):
                writer.write(b"a" * HEAD_BYTES_MAX)
                await writer.drain()
            assert await answer(reader) == (b"HTTP/1.1 200 OK", b"hello")


async def test_an_application_is_told_what_was_asked() -> None:
    asked: list[Scope] = []

    async def asked_for(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope)
        await hello(scope, receive, send)

    async with serving(asked_for) as (reader, writer):
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


async def test_what_is_written_within_a_turn_goes_out_as_one() -> None:
    connection, transport = connected()
    connection.write(b"head ")
    connection.write(b"body")
    assert transport.writes == []
    await asyncio.sleep(0)
    assert transport.writes == [b"head body"]
    connection.write(b"last")
    connection.close()
    assert transport.writes[1:] == [b"last"], "closing loses nothing"
    assert transport.closed


IDLE_S = 60.0


async def test_a_connection_that_is_kept_for_nothing_is_closed_so_long_after_its_last_answer() -> None:
    connection, transport = connected(bounds=HttpBounds(keep_alive_s_max=IDLE_S))
    for number in (1, 2, 3):
        asked_s = connection.loop.time()
        connection.data_received(GET)
        await transport.answered(number)
        assert asked_s + IDLE_S <= connection.deadline_s <= connection.loop.time() + IDLE_S, "from each answer anew"
    assert not transport.closed
    connection.expire()
    assert transport.closed


async def test_a_connection_is_not_closed_while_it_is_answered() -> None:
    goes_on = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            await goes_on.wait()
        await hello(scope, receive, send)

    async with serving(slow, HttpBounds(keep_alive_s_max=0.02)) as (reader, writer):
        writer.write(GET + b"POST / HTTP/1.1\r\nhost: h\r\n\r\n")
        assert await answer(reader) == (b"HTTP/1.1 200 OK", b"hello")
        await asyncio.sleep(0.1)
        assert not reader.at_eof()
        goes_on.set()
        assert await answer(reader) == (b"HTTP/1.1 200 OK", b"hello")
        assert await reader.read() == b""


HEADERS = ((b"content-type", b"application/json"), (b"cache-control", b"no-store"))


async def test_a_whole_answer_is_the_same_bytes_as_one_that_is_sent() -> None:
    async def sent(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, (b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})

    def whole(exchange: HttpExchange) -> None:
        exchange.answer(200, HEADERS, b"{}")

    for asked in (b"GET / HTTP/1.1\r\n\r\n", b"HEAD / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n"):
        said = []
        for server in (make(sent), HttpServer(Whole(whole), HttpBounds(), now_ms=now_ms)):
            server.heads.set_date(b"Thu, 01 Jan 1970 00:00:00 GMT")
            connection, transport = connected(server=server)
            connection.data_received(asked)
            await transport.answered(1)
            said.append((b"".join(transport.writes), transport.closed))
        assert said[0] == said[1]


async def test_a_whole_answer_has_the_date_of_now_and_is_given_once() -> None:
    def whole(exchange: HttpExchange) -> None:
        exchange.answer(200, (), b"")
        with pytest.raises(RuntimeError, match="already"):
            exchange.answer(200, (), b"")

    server = HttpServer(Whole(whole), HttpBounds(), now_ms=now_ms)
    connection, transport = connected(server=server)
    for number in (1, 2):
        server.heads.set_date(b"%d" % number)
        connection.data_received(GET)
        await transport.answered(number)
        assert b"\r\ndate: %d\r\n" % number in transport.writes[-1]


async def test_a_request_waits_for_a_reader_that_is_slow() -> None:
    def whole(exchange: HttpExchange) -> None:
        exchange.answer(200, (), b"")

    connection, transport = connected(server=HttpServer(Whole(whole), HttpBounds(), now_ms=now_ms))
    connection.pause_writing()
    connection.data_received(GET)
    for _ in range(5):
        await asyncio.sleep(0)
    assert transport.writes == []
    connection.resume_writing()
    await transport.answered(1)


async def test_headers_that_were_added_are_said_with_either_kind_of_answer() -> None:
    def whole(exchange: HttpExchange) -> None:
        exchange.add_headers([(b"vary", b"Origin")])
        exchange.answer(200, (), b"")

    async def sent(_: Scope, __: Receive, send: Send) -> None:
        assert isinstance(send, HttpExchange)
        send.add_headers([(b"vary", b"Origin")])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    for server in (make(sent), HttpServer(Whole(whole), HttpBounds(), now_ms=now_ms)):
        connection, transport = connected(server=server)
        connection.data_received(GET)
        await transport.answered(1)
        assert b"\r\nvary: Origin\r\n" in transport.writes[0]
