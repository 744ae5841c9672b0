"""The HTTP server: connections that others accepted, clients that do not read, callers by address, and the stop."""

import asyncio
import contextlib
import gc
import socket
import weakref
from pathlib import Path

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from covenant.doors.http.server.bounds import HttpBounds
from covenant.doors.http.server.http_server import HttpServer
from tests.doors.doors_under_test import open_doors
from tests.doors.http.server.server_under_test import GET, answer, connected, hello, listening, make, serving
from tests.waits import BOUND_S

LARGE = b"a" * 20_000_000


async def large(_: Scope, __: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(LARGE))]})
    await send({"type": "http.response.body", "body": LARGE})


async def endless(_: Scope, receive: Receive, send: Send) -> None:
    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.create_task(left())
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while not leaving.done():
        for __ in range(1_000):  # without a pause, except where the client does not read
            await send({"type": "http.response.body", "body": b"data: x\n\n" * 1000, "more_body": True})
        await asyncio.sleep(0)


async def test_a_connection_that_somebody_else_accepted_is_served() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        async with listening() as (server, _):
            reader, writer = await asyncio.open_connection(*other.getsockname()[:2])
            writer.write(GET)
            accepted, _ = other.accept()
            await server.adopt(accepted)
            assert await answer(reader) == (b"HTTP/1.1 200 OK", b"hello")
            writer.close()


async def test_a_server_that_stops_adopts_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        async with listening() as (server, _):
            reader, writer = await asyncio.open_connection(*other.getsockname()[:2])
            await server.stop(0)
            await server.adopt(other.accept()[0])
            assert await reader.read() == b""
            writer.close()


async def reset_by_server(reader: asyncio.StreamReader, limit: int) -> bool:
    """Whether the connection is cut off before so many bytes were read."""
    received = 0
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1_000_000):
            received += len(data)
            if received >= limit:
                return False
    return True


async def test_a_client_that_reads_nothing_of_an_answer_is_cut_off() -> None:
    async with serving(large, HttpBounds(unread_s_max=0.2)) as (reader, writer):
        reader._transport.pause_reading()  # type: ignore[attr-defined]  # the reader's own flow control reads ahead
        writer.write(GET)
        await asyncio.sleep(1)  # the attack itself
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        assert await reset_by_server(reader, len(LARGE))


async def test_a_client_that_reads_slowly_gets_its_whole_answer() -> None:
    async with serving(large, HttpBounds(unread_s_max=1.0)) as (reader, writer):
        writer.write(GET)
        received = 0
        while received < len(LARGE):
            received += len(await reader.read(2_000_000))
            await asyncio.sleep(0.02)


async def test_a_stream_may_wait_for_its_reader_longer_but_not_for_ever() -> None:
    bounds = HttpBounds(unread_s_max=0.1, unread_stream_s_max=2.0)
    async with listening(endless, bounds) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        await reader.readuntil(b"data: x")
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(0.3)
        assert server.tasks, "it outlives the patience for an answer"
        (task,) = server.tasks
        await asyncio.wait((task,), timeout=BOUND_S)
        assert task.done()
        writer.close()


async def test_nothing_of_a_connection_is_kept_after_it_is_lost() -> None:
    forever = asyncio.Event()

    async def waiting(_: Scope, receive: Receive, __: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        forever.set()

    connection, _ = connected(waiting)
    connection.data_received(GET * 500)
    await asyncio.sleep(0)
    gone = weakref.ref(connection)
    connection.connection_lost(None)
    await forever.wait()
    await asyncio.sleep(0)
    del connection
    gc.disable()
    try:
        assert gone() is None, "freed by counting, without the collector"
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::2%eth1", True),
    ],
)
def test_who_counts_as_one_address(one: str, other: str, same: bool) -> None:
    assert (HttpServer.counted_as(one) == HttpServer.counted_as(other)) is same


async def test_the_bounds_on_what_is_pipelined_hold_for_one_read() -> None:
    connection, transport = connected(hello)
    connection.data_received(GET * 5_000)
    assert len(connection._queue) == HttpBounds().pipelined_max
    assert transport.paused
    await transport.until(lambda: b"".join(transport.writes).count(b"HTTP/1.1 200") == 5_000)
    assert not transport.paused


async def test_requests_that_wait_are_not_read_until_they_are_answered() -> None:
    goes_on = asyncio.Event()

    async def held(scope: Scope, receive: Receive, send: Send) -> None:
        await goes_on.wait()
        await hello(scope, receive, send)

    bounds = HttpBounds(pipelined_bytes_max=2_000)
    connection, transport = connected(held, bounds)
    connection.data_received(GET)
    connection.data_received(b"POST / HTTP/1.1\r\ncontent-length: 5000\r\n\r\n" + b"a" * 3_000)
    assert transport.paused, "a few large ones are as much as many small ones"
    goes_on.set()
    await transport.until(lambda: not transport.paused)
    connection.data_received(b"a" * 2_000)
    await transport.answered(2)


async def test_a_stop_ends_idle_connections_at_once_and_tells_the_others() -> None:
    begun = asyncio.Event()

    async def held(_: Scope, receive: Receive, __: Send) -> None:
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    async with listening(held) as (server, port):
        idle, working, halfway = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        working[1].write(GET * 3)
        halfway[1].write(GET[:10])
        await begun.wait()
        async with asyncio.timeout(BOUND_S):
            stopping = asyncio.create_task(server.stop(0.2))
            assert await idle[0].read() == b""
            for reader, _ in (working, halfway):
                status, body = await answer(reader)
                assert status == b"HTTP/1.1 503 Service Unavailable"
                assert b'"code":"stopping"' in body
                assert await reader.read() == b""
            await stopping
        for _, writer in (idle, working, halfway):
            writer.close()
        assert not server.tasks


async def test_a_stop_that_is_given_up_can_be_asked_for_again() -> None:
    begun = asyncio.Event()

    async def held(_: Scope, receive: Receive, __: Send) -> None:
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    async with listening(held) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        await begun.wait()
        patient = asyncio.create_task(server.stop(60))
        await asyncio.sleep(0)
        patient.cancel()
        await server.stop(0)
        assert (await answer(reader))[0] == b"HTTP/1.1 503 Service Unavailable"
        writer.close()


def test_the_server_runs_on_the_loop_of_the_daemon_too() -> None:
    async def all_of_it() -> None:
        async with serving(large, HttpBounds(unread_s_max=0.2)) as (reader, writer):
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(GET)
            await asyncio.sleep(1)
            reader._transport.resume_reading()  # type: ignore[attr-defined]
            assert await reset_by_server(reader, len(LARGE))
        async with serving() as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\nx: " + b"a" * 70_000)
            assert (await answer(reader))[0].startswith(b"HTTP/1.1 431 ")
            assert await reader.read() == b""

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(all_of_it())


async def test_an_answer_of_a_hot_door_is_one_write_also_for_a_web_page(short_path: Path) -> None:
    """What stands before the doors leaves the way for a whole answer open."""
    origin = "http://pages.example"
    async with open_doors(short_path, origins=[origin]) as under_test:
        connection, transport = connected(server=make(hello))
        connection._http_server.door = under_test.door
        token = under_test.operator.token
        connection.data_received(
            f"GET /a2a/tasks/next HTTP/1.1\r\nhost: 127.0.0.1\r\norigin: {origin}\r\n"
            f"authorization: Bearer {token}\r\n\r\n"
            "GET /version HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode()
        )
        await transport.answered(2)
        assert len(transport.writes) == 2
        assert transport.writes[0].startswith(b"HTTP/1.1 200 OK")
        assert b"access-control-allow-origin: http://pages.example\r\n" in transport.writes[0]
        assert b"access-control" not in transport.writes[1]


async def test_a_client_without_an_address_is_no_proxy() -> None:
    """The system no longer knows the address of a client that left before its connection was accepted."""
    server = make(hello, proxies=("127.0.0.0/8",))
    assert [server.is_proxy(host) for host in ("", "127.0.0.1", "::ffff:127.0.0.1", "10.0.0.1")] == [
        False,
        True,
        True,
        False,
    ]
