"""One connection's bytes: frames out of what arrives, bounded both ways.

Reading stops while a frame waits to be served, so a caller that does not wait for answers fills its own buffers, not
ours. A caller that does not read its answers is cut off after a while.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, cast

from covenant.wire.ipc_frames import HEADER_BYTES, encode_frame, frame_length

READ_AHEAD_BYTES: Final = 64 * 1024
WRITE_STALL_S: Final = 30.0


class FrameTooLargeError(Exception):
    """The caller announced a frame over the limit. What follows it cannot be told apart any more."""


class FrameStream(asyncio.Protocol):
    def __init__(self, frame_bytes_max: int, *, write_stall_s: float = WRITE_STALL_S) -> None:
        loop = asyncio.get_running_loop()
        self.frame_bytes_max = frame_bytes_max
        self._write_stall_s = write_stall_s
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done once no more frames will come: the other side is gone, or we are through with it."""
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._reading = True
        self._cut_off = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # what a stream server's loop makes

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  (the loop's signature)
        self._transport = None
        self.end()
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._reading and len(self._buffer) > self._wanted() + READ_AHEAD_BYTES:
            self._reading = False
            self._pause(True)
        self._arrived.set()

    def eof_received(self) -> bool:
        self.end()
        return True  # what was asked before is still answered

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def end(self) -> None:
        """Serve what has arrived in full, and then nothing more."""
        if not self.ended.done():
            self.ended.set_result(None)
        self._arrived.set()

    def cut_off(self) -> None:
        """Serve nothing more, whatever has arrived."""
        self._cut_off = True
        self.end()

    @contextmanager
    def on_end(self, call: Callable[[], None]) -> Iterator[None]:
        """While this context is open, `call` is called if the stream ends."""

        def ended(_: asyncio.Future[None]) -> None:
            call()

        self.ended.add_done_callback(ended)
        try:
            yield
        finally:
            self.ended.remove_done_callback(ended)

    async def read(self) -> bytes | None:
        """The next frame's body; None at the end."""
        while not self._cut_off:
            if len(self._buffer) >= HEADER_BYTES:
                length = frame_length(self._buffer)
                if length > self.frame_bytes_max:
                    raise FrameTooLargeError
                if len(self._buffer) >= HEADER_BYTES + length:
                    return self._cut(length)
            if self.ended.done():
                return None
            self._arrived.clear()
            await self._arrived.wait()
        return None

    def _cut(self, length: int) -> bytes:
        body = bytes(memoryview(self._buffer)[HEADER_BYTES : HEADER_BYTES + length])
        del self._buffer[: HEADER_BYTES + length]
        if not self._reading and len(self._buffer) <= self._wanted() + READ_AHEAD_BYTES:
            self._reading = True
            self._pause(False)
        return body

    def _wanted(self) -> int:
        """What must be buffered to have one whole frame. One that is too long is not waited for."""
        if len(self._buffer) < HEADER_BYTES:
            return HEADER_BYTES
        length = frame_length(self._buffer)
        return HEADER_BYTES + length if length <= self.frame_bytes_max else HEADER_BYTES

    def _pause(self, pause: bool) -> None:  # noqa: FBT001  (private)
        if self._transport is not None and not self._transport.is_closing():
            if pause:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    async def write(self, body: bytes) -> None:
        """Send one frame, and wait until the other side has taken most of it."""
        transport = self._transport
        if transport is None:
            return
        transport.write(encode_frame(body))
        if not self._writable.is_set():
            try:
                await asyncio.wait_for(self._writable.wait(), self._write_stall_s)
            except TimeoutError:
                transport.abort()

    def address(self) -> str:
        """Who is at the other end, as the kernel knows them."""
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        if sock is None or not hasattr(socket, "SO_PEERCRED"):
            return "local"
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return f"uid:{uid}"

    def close(self) -> None:
        """Close when the other side has taken what was written, or has had time enough to."""
        self.cut_off()
        transport = self._transport
        if transport is not None:
            transport.close()
            asyncio.get_running_loop().call_later(self._write_stall_s, transport.abort)

    def abort(self) -> None:
        self.cut_off()
        if self._transport is not None:
            self._transport.abort()
