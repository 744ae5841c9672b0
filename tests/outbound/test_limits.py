"""Servers that send too much, too slowly, or something else than they say."""

import asyncio
import gzip
import zlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from covenant.outbound.call_errors import CallFailed
from covenant.outbound.outbound_settings import OutboundSettings
from tests.outbound.http_servers import LIMITS, Answer, always, endless, fetcher, http_server, reply, silence
from tests.waits import BOUND_S

BYTES_MAX = LIMITS.body_bytes_max
ENDLESS = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\n\r\n"
GZIP_CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n"
QUICK = replace(LIMITS, total_ms=600)


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def bomb(megabytes: int) -> bytes:
    return gzip.compress(bytes(megabytes * 1024 * 1024))


def empty_blocks() -> bytes:
    """The beginning of a gzip body, and blocks that hold nothing, any number of which may follow."""
    packer = zlib.compressobj(wbits=31)
    return packer.flush(zlib.Z_SYNC_FLUSH)


async def failure(answer: Answer, limits: OutboundSettings = LIMITS) -> CallFailed:
    async with http_server(answer) as server, fetcher("127.0.0.1", limits=limits) as calls:
        with pytest.raises(CallFailed) as failed:
            await calls.fetch("GET", server.url())
        # Whoever is cut off is hung up on, not left to send.
        await asyncio.wait_for(server.closed.wait(), BOUND_S)
    return failed.value


TOO_LARGE: dict[str, Callable[[], Answer]] = {
    "one byte": lambda: always(reply(body=bytes(BYTES_MAX + 1))),
    "declared": lambda: always(reply(content_length=str(BYTES_MAX + 1))),
    "chunked": lambda: endless(ENDLESS, chunk(bytes(1000))),
    "until closed": lambda: endless(UNTIL_CLOSED, bytes(1000)),
    "gzip bomb": lambda: always(reply(body=bomb(50), content_encoding="gzip")),
    "deflate bomb": lambda: always(reply(body=zlib.compress(bytes(50 * 1024 * 1024)), content_encoding="deflate")),
    "bomb in a bomb": lambda: always(reply(body=gzip.compress(bomb(200)), content_encoding="gzip, gzip")),
    "compressed nothing": lambda: endless(GZIP_CHUNKED + chunk(empty_blocks()), chunk(b"\x00\x00\x00\xff\xff" * 1000)),
}


@pytest.mark.parametrize("name", TOO_LARGE)
async def test_an_answer_over_the_limit_is_cut_off_while_it_arrives(name: str) -> None:
    failed = await failure(TOO_LARGE[name]())
    assert (failed.code, failed.transient) == ("too_large", False)


@pytest.mark.parametrize("body", [b"", b"x", bytes(BYTES_MAX)], ids=len)
@pytest.mark.parametrize("encoding", ["identity", "gzip", "deflate"])
async def test_an_answer_up_to_the_limit_is_read_whole(body: bytes, encoding: str) -> None:
    packed = {"identity": body, "gzip": gzip.compress(body), "deflate": zlib.compress(body)}[encoding]
    async with (
        http_server(always(reply(body=packed, content_encoding=encoding))) as server,
        fetcher("127.0.0.1") as calls,
    ):
        assert (await calls.fetch("GET", server.url())).body == body


TOO_SLOW: dict[str, tuple[Answer, OutboundSettings]] = {
    "no headers": (silence, replace(LIMITS, idle_ms=50)),
    "headers by the byte": (endless(b"HTTP/1.1 200 OK\r\nx: ", b"x", 0.01), QUICK),
    "header after header": (endless(b"HTTP/1.1 200 OK\r\n", b"x: y\r\n", 0.01), QUICK),
    "interim answers": (endless(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n", 0.01), QUICK),
    "no body": (always(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"), replace(LIMITS, idle_ms=50)),
    "body by the byte": (endless(UNTIL_CLOSED, b"x", 0.01), QUICK),
    "chunk by chunk": (endless(ENDLESS, chunk(b"x"), 0.01), QUICK),
}


@pytest.mark.parametrize("name", TOO_SLOW)
async def test_an_answer_that_does_not_come_in_time_is_given_up(name: str) -> None:
    answer, limits = TOO_SLOW[name]
    failed = await failure(answer, limits)
    assert (failed.code, failed.transient) == ("timed_out", True)


NOT_HTTP: dict[str, Answer] = {
    "nothing": always(b"", close=True),
    "another protocol": always(b"220 smtp.example ESMTP\r\n\r\n"),
    "no status": always(b"HTTP/1.1 OK\r\n\r\n"),
    "endless header": endless(b"HTTP/1.1 200 OK\r\nx: ", b"x" * 1000),
    "endless headers": endless(b"HTTP/1.1 200 OK\r\n", b"x: y\r\n" * 100),
    "two lengths": always(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx"),
    "negative length": always(b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n"),
    "length in words": always(b"HTTP/1.1 200 OK\r\ncontent-length: ten\r\n\r\n"),
    "less than it says": always(reply(body=b"short", content_length="10"), close=True),
    "chunk cut off": always(ENDLESS + b"a\r\nshort", close=True),
    "chunk of no size": always(ENDLESS + b"zz\r\nxx\r\n"),
    "not gzip": always(reply(body=b"plain", content_encoding="gzip")),
}


@pytest.mark.parametrize("name", NOT_HTTP)
async def test_an_answer_that_is_not_what_it_says_is_no_answer(name: str) -> None:
    async with http_server(NOT_HTTP[name]) as server, fetcher("127.0.0.1") as calls:
        with pytest.raises(CallFailed) as failed:
            await calls.fetch("GET", server.url())
    assert failed.value.code in {"bad_response", "connection_lost"}


async def test_what_follows_the_length_that_was_said_is_not_taken_for_the_next_answer() -> None:
    more = reply(body=b"right") + reply(body=b"smuggled")
    async with http_server(always(more)) as server, fetcher("127.0.0.1") as calls:
        for _ in range(3):
            assert (await calls.fetch("GET", server.url())).body == b"right"
        assert server.connections == 3


async def test_a_stream_is_read_while_it_is_written_and_closed_by_its_reader() -> None:
    async with (
        http_server(endless(ENDLESS, chunk(b"data: x\n\n"))) as server,
        fetcher("127.0.0.1") as calls,
    ):
        read = 0
        async with calls.stream("POST", server.url(), content=b"{}", headers={"accept": "text/event-stream"}) as answer:
            assert answer.status == 200
            async for piece in answer.pieces:
                read += len(piece)
                if read > 2_000:
                    break
        await asyncio.wait_for(server.closed.wait(), BOUND_S)
    assert server.requests[0].headers["accept-encoding"] == "identity"


async def test_a_stream_that_pauses_too_long_or_says_too_much_ends_in_failure() -> None:
    silent = always(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
    async with http_server(silent) as server, fetcher("127.0.0.1") as calls:
        with pytest.raises(CallFailed) as failed:
            async with calls.stream("GET", server.url(), idle_ms=50) as answer:
                await anext(answer.pieces)
        assert failed.value.code == "timed_out"
    async with http_server(endless(ENDLESS, chunk(bytes(1000)))) as server, fetcher("127.0.0.1") as calls:
        with pytest.raises(CallFailed) as failed:
            async with calls.stream("GET", server.url(), bytes_max=5_000) as answer:
                assert sum([len(piece) async for piece in answer.pieces]) <= 5_000
        assert failed.value.code == "too_large"


async def test_a_stream_is_never_decompressed() -> None:
    async with http_server(endless(GZIP_CHUNKED, chunk(b"x"))) as server, fetcher("127.0.0.1") as calls:
        with pytest.raises(CallFailed) as failed:
            async with calls.stream("GET", server.url()):
                pass
        await asyncio.wait_for(server.closed.wait(), BOUND_S)
    assert failed.value.code == "bad_response"


async def test_a_stream_that_does_not_begin_is_given_up() -> None:
    async with http_server(silence) as server, fetcher("127.0.0.1", limits=QUICK) as calls:
        with pytest.raises(CallFailed) as failed:
            async with calls.stream("GET", server.url()):
                pass
    assert failed.value.code == "timed_out"
