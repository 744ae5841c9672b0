"""One connection: requests in order, answers in the same order, and a deadline for each wait.

Requests behind the running one wait, within bounds; above these, the connection is not read until they are answered.
Nothing is kept after the connection is lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Final, cast

from covenant.doors.http.server import http_refusals as refusals
from covenant.doors.http.server.http_exchange import HttpExchange
from covenant.doors.http.server.request_reader import HttpRequestReader
from covenant.model.errors import Refusal

if TYPE_CHECKING:
    from covenant.doors.http.server.http_server import HttpServer
    from covenant.doors.http.server.tls_handshakes import ServerTls

_HEAD_END: Final = b"\r\n\r\n"
"""Ends each head. A piece with `n` of these completes at most `n + 1` heads."""


class HttpConnection(asyncio.Protocol):
    __slots__ = (
        "__weakref__",
        "_body_end_s",
        "_body_full",
        "_current",
        "_discarded_bytes",
        "_drained",
        "_expected",
        "_http_server",
        "_lingers",
        "_paused_at_s",
        "_pipeline_full",
        "_queue",
        "_queued_bytes",
        "_reader",
        "_reading_paused",
        "_refusal",
        "_unflushed_bytes",
        "_unread",
        "_unread_at",
        "_upload",
        "_writes",
        "address",
        "bounds",
        "certificate_names",
        "client",
        "deadline_s",
        "heads",
        "loop",
        "new_exchange",
        "reserved",
        "scheme",
        "server",
        "silent_since_s",
        "tasks",
        "tls",
        "transport",
        "unsent_bytes",
        "unsent_since_s",
        "urls",
        "write_paused",
    )

    transport: asyncio.Transport

    def __init__(self, http: HttpServer, tls: ServerTls | None = None) -> None:
        self.tls = tls
        self.scheme = "http" if tls is None else "https"
        self.certificate_names: tuple[str, ...] = ()
        """The names in the client's certificate, if an authority of ours has signed it."""
        self.client: tuple[str, int] | None = None
        self.server: tuple[str, int] | None = None
        self.address = ""
        """The address that the connection is counted under."""
        self.reserved = False
        """The server was full when this connection came: every request except health is refused."""
        self.write_paused = False
        self.deadline_s = inf
        """When the awaited head, body, request or end must have come."""
        self.silent_since_s = 0.0
        """When the last byte came, or the last answer was given."""
        self._reader: HttpRequestReader | None = None
        self._current: HttpExchange | None = None
        """The exchange that is being answered."""
        self._unread = b""
        """Bytes received and not given to the reader yet, from `_unread_at` on."""
        self._unread_at = 0
        self._queued_bytes = 0
        self._discarded_bytes = 0
        self._expected = (1, True)
        """The number of the request whose head or body is due, and whether the head is. `connection_made` sets the
        first deadline."""
        self._body_end_s = inf
        self._upload: tuple[HttpExchange, float] | None = None
        self._paused_at_s = 0.0
        self._pipeline_full = False
        self._body_full = False
        self._reading_paused = False
        self._refusal: Refusal | None = None
        """Why nothing more is read. The refusal is sent after the answers to earlier requests."""
        self._lingers = False
        self._unflushed_bytes = 0
        self.unsent_bytes = 0
        """Bytes written that the client had not read at the last look."""
        self.unsent_since_s = 0.0
        """When the client was last seen to read."""
        self._http_server = http
        self.loop = http.loop
        self.bounds = http.bounds
        self.heads = http.heads
        self.urls = http.urls
        self.new_exchange = http.new_exchange
        self.tasks = http.tasks
        self._queue: deque[HttpExchange] = deque()
        self._writes: list[bytes] = []
        self._drained = asyncio.Event()

    # The transport's callbacks.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit from it
        self.transport.set_write_buffer_limits(self.bounds.response_bytes_max)
        self.client = _host_and_port(self.transport.get_extra_info("peername"))
        self.server = _host_and_port(self.transport.get_extra_info("sockname"))
        if self.tls is not None:
            certificate: bytes | None = self.transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
            self.certificate_names = self.tls.names_of(certificate) if certificate else ()
        self._reader = HttpRequestReader(self)
        self.silent_since_s = self.loop.time()
        self.deadline_s = self.silent_since_s + self.bounds.head_s_max
        self._http_server.admit(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._http_server.count_unsent(self, 0)
        self._http_server.forget(self)
        self.deadline_s = inf
        exchanges = [*self._queue] if self._current is None else [self._current, *self._queue]
        if self._reader is not None:
            self._reader.close()
        self._current = self._reader = None
        self._queue.clear()
        self._writes.clear()
        self._unread = b""
        for exchange in exchanges:
            exchange.disconnect()
        self._drained.set()

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if reader is None or self._refusal is not None or (reader.ended and not reader.open):
            self.discard(len(data))
            return
        if self._unread:
            data = self._unread[self._unread_at :] + data
        self._unread, self._unread_at = data, 0
        if not (self._pipeline_full or self._body_full):
            self._read_on(reader)

    def pause_writing(self) -> None:
        self.write_paused = True
        self._drained.clear()
        self._count_unsent()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._drained.set()
        if self._current is None:
            self._answer_next()

    async def drain(self) -> None:
        """Waits until the client has read enough, or has left."""
        while self.write_paused and not self.transport.is_closing():
            await self._drained.wait()

    # Reading.

    def _read_on(self, reader: HttpRequestReader) -> None:
        """Reads the received bytes, as far as the bounds allow."""
        was_open = reader.open
        while self._unread and not (self._pipeline_full or self._body_full):
            piece = self._unread
            if self._unread_at or piece.count(_HEAD_END) > self.bounds.pipelined_max - len(self._queue):
                piece = self._take_piece()
            else:
                self._unread = b""
            refusal = reader.feed(piece)
            if refusal is not None:
                self._refuse(refusal)
                return
            if self._queue or reader.open:
                self._check_bounds(reader, len(piece))
        if reader.open:
            self._expect_rest(reader)
        elif self._current is not None or self._queue:
            self.deadline_s = inf
        elif was_open:
            # The rest of a request that was answered before it had arrived.
            self._wait_for_request()
        if self._pipeline_full or self._body_full:
            self._pause_reading()

    def _take_piece(self) -> bytes:
        """A piece of the received bytes that completes at most one request more than may wait."""
        data, start = self._unread, self._unread_at
        end = start
        for _ in range(self.bounds.pipelined_max - len(self._queue)):
            found = data.find(_HEAD_END, end)
            if found < 0:
                end = len(data)
                break
            end = found + len(_HEAD_END)
        if end == len(data):
            self._unread, self._unread_at = b"", 0
        else:
            self._unread_at = end
        return data[start:end]

    def _check_bounds(self, reader: HttpRequestReader, size: int) -> None:
        bounds = self.bounds
        if self._queue:
            self._queued_bytes += size
            many, large = len(self._queue) >= bounds.pipelined_max, self._queued_bytes > bounds.pipelined_bytes_max
            self._pipeline_full = many or large
        # Bytes after the answer are discarded, and must not stop the reading.
        if reader.exchange is not None and not reader.exchange.complete:
            self._body_full = reader.exchange.kept_bytes > bounds.body_kept_bytes_max

    def accept(self, exchange: HttpExchange) -> None:
        """Starts a request whose head is complete, or queues it behind the running one."""
        if self.transport.is_closing():
            exchange.disconnect()
        elif self._current is None and not self.write_paused:
            self._start(exchange)
        else:
            self._queue.append(exchange)

    def extend_body(self, exchange: HttpExchange, body_s: float) -> None:
        self._upload, self._expected = (exchange, self.loop.time() + body_s), (0, True)

    def want_body(self) -> None:
        """Reads on: the door waits for more of the body."""
        if self._body_full:
            self._body_full = False
            self._resume()

    def discard(self, size: int) -> None:
        """Counts discarded bytes, which come after an answer or a refusal."""
        self._discarded_bytes += size
        bounds = self.bounds
        if self._discarded_bytes > (bounds.linger_bytes_max if self._lingers else bounds.body_discarded_bytes_max):
            self.transport.abort()

    def _pause_reading(self) -> None:
        self.deadline_s = inf
        if not self._reading_paused and not self.transport.is_closing():
            self._reading_paused = True
            self._paused_at_s = self.loop.time()
            self.transport.pause_reading()

    def _resume(self) -> None:
        """Reads on, unless a bound still forbids it."""
        reader = self._reader
        if reader is None or self._pipeline_full or self._body_full:
            return
        if self._reading_paused and not self.transport.is_closing():
            self._reading_paused = False
            self.transport.resume_reading()
            # The time for which we did not read does not count against the client.
            self._body_end_s += self.loop.time() - self._paused_at_s
            self._expected = (0, True)
        if self._refusal is None:
            self._read_on(reader)

    def _expect_rest(self, reader: HttpRequestReader) -> None:
        """Sets the deadline for the rest of a request that has begun to arrive."""
        bounds, now_s, expected = self.bounds, self.loop.time(), (reader.number, reader.in_head)
        self.silent_since_s = now_s
        if reader.in_head:
            if expected != self._expected:
                self.deadline_s = now_s + bounds.head_s_max
        else:
            if expected != self._expected:
                upload, exchange = self._upload, reader.exchange
                self._body_end_s = upload[1] if upload and upload[0] is exchange else now_s + bounds.body_s_max
            self.deadline_s = min(now_s + bounds.body_idle_s_max, self._body_end_s)
        self._expected = expected

    # Answering.

    def _start(self, exchange: HttpExchange) -> None:
        self._current = exchange
        if self.reserved or self._http_server.stopping:
            if exchange.scope["path"] not in self._http_server.exempt_paths:
                refusal = refusals.stopping() if self._http_server.stopping else refusals.crowded()
                self._answer_refusal(exchange, refusal)
                return
            exchange.keep_alive = False
        # Made directly, with a name: the loop's create_task would invent a name for each.
        exchange.task = task = asyncio.Task(exchange.run(self._http_server.door), loop=self.loop, name="http-exchange")
        self.tasks.add(task)

    def _answer_refusal(self, exchange: HttpExchange, refusal: Refusal) -> None:
        """Refuses in the form of the requested door; then the connection is closed."""
        exchange.keep_alive = False
        headers, body = self._http_server.refusal_form(exchange.scope["path"], refusal)
        exchange.answer(refusal.status, headers, body)

    def write(self, data: bytes) -> None:
        """Writes part of an answer. Writes within one turn of the loop go out as one."""
        if not self._writes:
            self.loop.call_soon(self._flush)
        self._writes.append(data)
        self._unflushed_bytes += len(data)
        if self._unflushed_bytes > self.bounds.response_bytes_max:
            # Otherwise a door that never waits could fill the memory.
            self._flush()

    def _flush(self) -> None:
        writes = self._writes
        if writes and not self.transport.is_closing():
            self._writes, self._unflushed_bytes = [], 0
            self.transport.write(writes[0] if len(writes) == 1 else b"".join(writes))

    def finish(self, exchange: HttpExchange, data: bytes) -> None:
        """Writes the end of an answer, or a whole answer, at once: nothing follows that could share its packet."""
        if self._writes:
            self._writes.append(data)
            self._flush()
        elif not self.transport.is_closing():
            self.transport.write(data)
        self._current = None
        if not exchange.keep_alive:
            self.close()
        elif not self.write_paused:
            self._answer_next()

    def break_off(self, exchange: HttpExchange) -> None:
        """Called when a door has failed. Refuses a request whose answer has not begun; otherwise breaks it off."""
        if exchange is self._current:
            if not exchange.written:
                self._write_refusal(refusals.internal(), exchange)
            self.close()

    def _answer_next(self) -> None:
        reader = self._reader
        if reader is None or self._lingers or self.transport.is_closing():
            return
        if self._queue:
            self._start(self._queue.popleft())
            if self._queue:
                return
            self._queued_bytes = 0
            self._pipeline_full = False
        if self._refusal is not None:
            if self._current is None:
                self._refuse_and_linger(self._refusal)
            return
        if self._unread or self._reading_paused:
            # A body that its door did not read must not stop the reading of the next request.
            self._body_full = self._body_full and reader.exchange is not None and not reader.exchange.complete
            self._resume()
        if self._current is None and not reader.open:
            self._wait_for_request()

    def _wait_for_request(self) -> None:
        if self._http_server.stopping:
            self.close()
            return
        self.silent_since_s = now_s = self.loop.time()
        self.deadline_s = now_s + self.bounds.keep_alive_s_max
        self._discarded_bytes = 0

    # Refusing, and ending.

    def _refuse(self, refusal: Refusal) -> None:
        """Ends the reading. Requests that were read before are answered first."""
        self._refusal = refusal
        self._unread = b""
        self.deadline_s = inf
        unfinished = self._reader.exchange if self._reader is not None else None
        if unfinished is not None and not unfinished.complete:
            if unfinished is self._current:
                self._current = None
                if unfinished.written:
                    unfinished.disconnect()
                    self.close()
                    return
            else:
                self._queue.remove(unfinished)
            unfinished.disconnect()
        if self._current is None and not self._queue:
            self._refuse_and_linger(refusal)

    def _refuse_and_linger(self, refusal: Refusal) -> None:
        self._write_refusal(refusal)
        self._linger()

    def _write_refusal(self, refusal: Refusal, exchange: HttpExchange | None = None) -> None:
        """Writes the last answer, in the form of the requested door."""
        form = refusals.plain_form if exchange is None else self._http_server.refusal_form
        headers, body = form(exchange.scope["path"] if exchange is not None else "", refusal)
        head, _ = self.heads.whole(refusal.status, (*headers, refusals.CLOSE))
        self.write(b"%b%d\r\n\r\n%b" % (head, len(body), body))

    def _linger(self) -> None:
        """Keeps the connection for a while: closing at once would lose the answer for a client that still sends."""
        self._flush()
        if self.transport.is_closing() or not self.transport.can_write_eof():
            self.close()
            return
        self._lingers = True
        self._discarded_bytes = 0
        self.transport.write_eof()
        if self._reading_paused:
            self._reading_paused = False
            self.transport.resume_reading()
        self.deadline_s = self.loop.time() + self.bounds.linger_s_max

    def expire(self) -> None:
        """Called at the deadline."""
        reader = self._reader
        if self._lingers or reader is None:
            self.transport.abort()
        elif reader.open:
            self._refuse(refusals.timed_out("the head" if reader.in_head else "the body"))
        else:
            self.close()

    def close(self) -> None:
        self._flush()
        self.deadline_s = inf
        if not self.transport.is_closing():
            self._count_unsent()
            self.transport.close()

    def _count_unsent(self) -> None:
        if self.transport.get_write_buffer_size():
            self.unsent_since_s = self.loop.time()
            self._http_server.count_unsent(self, self.transport.get_write_buffer_size())

    def check_unsent(self, now_s: float) -> None:
        """Aborts the connection of a client that reads nothing."""
        unsent_bytes = self.transport.get_write_buffer_size()
        if unsent_bytes == 0 or not (self.write_paused or self.transport.is_closing()):
            self._http_server.count_unsent(self, 0)
        elif unsent_bytes < self.unsent_bytes:
            self.unsent_since_s = now_s
            self._http_server.count_unsent(self, unsent_bytes)
        else:
            streams = self._current is not None and self._current.chunked and not self.transport.is_closing()
            unread_s_max = self.bounds.unread_stream_s_max if streams else self.bounds.unread_s_max
            if now_s - self.unsent_since_s > unread_s_max:
                self.transport.abort()

    @property
    def waits_for_client(self) -> bool:
        """Whether the connection may be closed in favour of another one."""
        if self._current is None:
            return True
        reader = self._reader
        return reader is not None and reader.exchange is self._current and not self._reading_paused

    # Stopping.

    def stop(self) -> None:
        """Closes an idle connection; lets the others come to their end."""
        current, reader = self._current, self._reader
        if reader is None or (current is None and not reader.open):
            self.close()
        elif current is not None:
            if current.end_stream():
                self.close()
            elif not (self._queue or reader.open or current.begun):
                current.keep_alive = False

    def cut_off(self) -> None:
        """Ends the connection after the grace time; refuses the requests that still wait."""
        waiting = [*self._queue] if self._current is None else [self._current, *self._queue]
        reader = self._reader
        if waiting:
            if not waiting[0].written:
                self._write_refusal(refusals.stopping(), waiting[0])
        elif reader is not None and reader.open and not self._lingers:
            self._write_refusal(refusals.stopping())
        for exchange in waiting:
            exchange.disconnect()
        self._queue.clear()
        self._current = None
        self.close()


def _host_and_port(found: object) -> tuple[str, int] | None:
    return (str(found[0]), int(found[1])) if isinstance(found, tuple) and len(found) >= 2 else None
