"""One connection's bytes: nothing is read further ahead than it should be, nor written to those who do not read."""

import asyncio
import json

import pytest

from covenant.doors.ipc_server import READ_AHEAD_BYTES, FrameStream, FrameTooLargeError
from covenant.wire.ipc_frames import encode_frame


class Wire(asyncio.Transport):
    """The loop's end of a connection, as the loop would show it."""

    def __init__(self) -> None:
        super().__init__()
        self._reading = True
        self.written = b""
        self.aborted = self.closed = False

    def pause_reading(self) -> None:
        assert self._reading
        self._reading = False

    def resume_reading(self) -> None:
        assert not self._reading
        self._reading = True

    def is_reading(self) -> bool:
        return self._reading

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


def connected(frame_bytes_max: int = 1_000_000, **options: float) -> tuple[FrameStream, Wire]:
    stream, wire = FrameStream(frame_bytes_max, **options), Wire()
    stream.connection_made(wire)
    return stream, wire


async def test_reading_stops_while_a_frame_waits_and_goes_on_when_it_is_served() -> None:
    stream, wire = connected()
    body = b"x" * 50_000
    for _ in range(2):
        stream.data_received(encode_frame(body))
    assert wire.is_reading()
    stream.data_received(encode_frame(body))
    assert not wire.is_reading()
    assert await stream.read() == body
    assert wire.is_reading()
    assert [await stream.read(), await stream.read()] == [body, body]


async def test_a_frame_of_the_full_size_is_still_read_whole() -> None:
    stream, wire = connected(frame_bytes_max=10 * READ_AHEAD_BYTES)
    body = b"x" * (10 * READ_AHEAD_BYTES)
    data = encode_frame(body)
    for start in range(0, len(data), 100_000):
        assert wire.is_reading()
        stream.data_received(data[start : start + 100_000])
    assert await stream.read() == body


async def test_a_frame_that_is_too_long_is_not_waited_for() -> None:
    stream, wire = connected(frame_bytes_max=100)
    stream.data_received(b"\x00\x00\x00\x65" + b"x" * (READ_AHEAD_BYTES + 1))
    assert not wire.is_reading()
    with pytest.raises(FrameTooLargeError):
        await stream.read()


async def test_what_arrived_whole_is_served_after_the_end_and_the_rest_is_not() -> None:
    stream, _ = connected()
    stream.data_received(encode_frame(b"one") + encode_frame(b"two")[:-1])
    assert stream.eof_received()
    assert [await stream.read(), await stream.read()] == [b"one", None]
    assert stream.ended.done()


async def test_nothing_more_is_served_after_a_cut() -> None:
    stream, _ = connected()
    stream.data_received(encode_frame(b"one"))
    stream.cut_off()
    assert await stream.read() is None


async def test_a_reader_is_woken_by_a_frame_and_by_the_end() -> None:
    stream, _ = connected()
    reading = asyncio.ensure_future(stream.read())
    await asyncio.sleep(0)
    stream.data_received(encode_frame(b"one"))
    assert await reading == b"one"
    reading = asyncio.ensure_future(stream.read())
    await asyncio.sleep(0)
    stream.connection_lost(None)
    assert await reading is None
    await stream.write(b"nobody is there")


async def test_a_write_waits_until_the_other_side_takes_it() -> None:
    stream, wire = connected()
    stream.pause_writing()
    writing = asyncio.ensure_future(stream.write(json.dumps({"kind": "pong"}).encode()))
    await asyncio.sleep(0)
    assert wire.written == encode_frame(b'{"kind": "pong"}')
    assert not writing.done()
    stream.resume_writing()
    await writing
    assert not wire.aborted


async def test_who_does_not_read_is_cut_off() -> None:
    stream, wire = connected(write_stall_s=0.01)
    stream.pause_writing()
    await stream.write(b"{}")
    assert wire.aborted
