"""The socket in the home, which only the home's owner may connect to.

A connection authenticates; then its requests are answered in order. Before that, only `protocol_info` and `ping` are
answered. A frame that is not JSON, or too long, ends the connection after an error; a refused request does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, Final, cast

import msgspec

from covenant.doors.http.frame_capture import door_of
from covenant.doors.operator_api.mailbox import ResultOpt, TaskOpt
from covenant.doors.operator_api.operation import (
    INTERNAL_ERROR,
    AnyApiOperation,
    ApiAnswer,
    ApiContext,
    Authenticated,
    AuthenticationFailed,
    ErrorAnswer,
    Pong,
    encode,
    error_of,
    expand_ids,
    has_short_id,
)
from covenant.doors.operator_api.operation_table import BY_KIND, OPERATIONS
from covenant.doors.waits import CallerGoneError
from covenant.exchange.access.principals import Principal
from covenant.exchange.frame_log import CapturedCall, FrameLog
from covenant.ledger.machine.commands import Drained
from covenant.model.errors import Invalid, Refusal, SettingsError, TooLarge
from covenant.wire.ipc_frames import FRAME_BYTES_MAX, HEADER_BYTES, canonical_kind, encode_frame, frame_length
from covenant.wire.json_input import check_fields, decode
from covenant.wire.mailbox import FrameHeader

READ_AHEAD_BYTES: Final = 64 * 1024
WRITE_STALL_S: Final = 30.0
TRANSPORT: Final = "ipc"
HANDSHAKE_S: Final = 10.0
# Enough for a token. An unauthenticated caller must not fill the daemon's memory.
HANDSHAKE_BYTES_MAX: Final = 64 * 1024
_HEADER: Final = msgspec.json.Decoder(FrameHeader)
_FRAMES: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    operation.kind: msgspec.json.Decoder(operation.frame or operation.request) for operation in OPERATIONS
}
_HEADER_FIELDS: Final = FrameHeader.__struct_fields__
_MALFORMED: Final = ErrorAnswer(code="invalid_json", message="malformed frame")
_TOO_LARGE: Final = ErrorAnswer(code="frame_too_large", message="frame too large")
log = logging.getLogger(__name__)
_UNAUTHENTICATED: Final[dict[str, Callable[[ApiContext], ApiAnswer]]] = {
    "protocolinfo": lambda api: api.info,
    "ping": lambda _: Pong(),
}
_LOGGED: Final = frozenset(each.kind for each in OPERATIONS if door_of(each.path, each.method) is not None)
"""Operations whose calls the frame log keeps: the same as over HTTP."""
CONNECTIONS_MAX: Final = 1_024
BACKLOG: Final = 1_024


class FrameTooLargeError(Exception):
    """The caller announced a frame over the limit. The stream after it cannot be split into frames any more."""


class FrameStream(asyncio.Protocol):
    def __init__(self, frame_bytes_max: int, *, write_stall_s: float = WRITE_STALL_S) -> None:
        loop = asyncio.get_running_loop()
        self.frame_bytes_max = frame_bytes_max
        self._write_stall_s = write_stall_s
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done once no more frames will come: the other side is gone, or the server has ended the stream."""
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._reading = True
        self._cut_off = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # a stream server's loop makes no other

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  (the loop's signature)
        self._transport = None
        self.end()
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._reading and len(self._buffer) > self._bytes_to_buffer() + READ_AHEAD_BYTES:
            self._set_reading(False)
        self._arrived.set()

    def eof_received(self) -> bool:
        self.end()
        return True  # requests that arrived before are still answered

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def end(self) -> None:
        """Serves the frames that have arrived in full, and nothing more."""
        if not self.ended.done():
            self.ended.set_result(None)
        self._arrived.set()

    def cut_off(self) -> None:
        """Serves nothing more, even if frames have arrived."""
        self._cut_off = True
        self.end()

    @contextmanager
    def on_end(self, call: Callable[[], None]) -> Iterator[None]:
        """Calls `call` if the stream ends while this context is open."""

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
                    return self._take_frame(length)
            if self.ended.done():
                return None
            self._arrived.clear()
            await self._arrived.wait()
        return None

    def _take_frame(self, length: int) -> bytes:
        body = bytes(memoryview(self._buffer)[HEADER_BYTES : HEADER_BYTES + length])
        del self._buffer[: HEADER_BYTES + length]
        if not self._reading and len(self._buffer) <= self._bytes_to_buffer() + READ_AHEAD_BYTES:
            self._set_reading(True)
        return body

    def _bytes_to_buffer(self) -> int:
        """The size of the next frame. Of a frame over the limit only the header is buffered."""
        if len(self._buffer) < HEADER_BYTES:
            return HEADER_BYTES
        length = frame_length(self._buffer)
        return HEADER_BYTES + length if length <= self.frame_bytes_max else HEADER_BYTES

    def _set_reading(self, reading: bool) -> None:  # noqa: FBT001  (private)
        self._reading = reading
        if self._transport is not None and not self._transport.is_closing():
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    async def write(self, body: bytes) -> None:
        """Sends one frame, and waits until the other side has taken most of it."""
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
        """The user at the other end, as the kernel knows it."""
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        if sock is None or not hasattr(socket, "SO_PEERCRED"):
            return "local"
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return f"uid:{uid}"

    def close(self) -> None:
        """Closes once the other side has taken all bytes, or after `write_stall_s`."""
        self.cut_off()
        transport = self._transport
        if transport is not None:
            transport.close()
            asyncio.get_running_loop().call_later(self._write_stall_s, transport.abort)

    def abort(self) -> None:
        self.cut_off()
        if self._transport is not None:
            self._transport.abort()


class IpcSession:
    def __init__(self, server: IpcServer, stream: FrameStream) -> None:
        self._server = server
        self._api = server.api
        self._encode = server.api.encode
        self._stream = stream

    async def run(self) -> None:
        """Serves the connection until either side ends it. Leaves the stream closed."""
        try:
            async with asyncio.timeout(self._server.handshake_s):
                caller = await self._handshake()
            if caller is not None:
                await self._serve(caller)
        except TimeoutError:
            await self._send(AuthenticationFailed(reason="no authentication in time"))
        except FrameTooLargeError:
            await self._send(_TOO_LARGE)
        except CallerGoneError:
            pass
        finally:
            self._stream.close()

    async def _handshake(self) -> Principal | None:
        """The caller; None once it has been refused."""
        while (frame := await self._stream.read()) is not None:
            try:
                header = decode(_HEADER, frame)
            except Invalid as refusal:
                if refusal.code == "invalid_json":
                    await self._send(_MALFORMED)
                    return None
                header = FrameHeader("")
            kind = canonical_kind(header.kind)
            if kind == "authenticate":
                return await self._authenticate(header.token_b58)
            if kind not in _UNAUTHENTICATED:
                await self._refuse_caller("first frame must be Authenticate")
                return None
            await self._send(_UNAUTHENTICATED[kind](self._api))
        return None

    async def _authenticate(self, token: str | None) -> Principal | None:
        caller = self._api.identity_auth.recognise(token) if token else None
        if caller is None:
            await self._refuse_caller(self._api.services.tenancy.refusal_reason(token))
            return None
        await self._send(Authenticated(display=caller.agent.display))
        return caller

    async def _refuse_caller(self, reason: str) -> None:
        try:
            refusal = await self._api.identity_auth.audit_refused_caller(
                reason, transport=TRANSPORT, address=self._stream.address()
            )
        except Refusal as not_audited:
            await self._send(error_of(not_audited))
            return
        self._api.meter.refused(TRANSPORT, refusal.code)
        await self._send(AuthenticationFailed(reason=refusal.message))

    async def _serve(self, caller: Principal) -> None:
        stream, api = self._stream, self._api
        stream.frame_bytes_max = self._server.frame_bytes_max
        # A caller revoked meanwhile still gets the running answer: it may hold its own new token.
        with api.identity_auth.session(caller, stream.cut_off):
            while (frame := await stream.read()) is not None:
                try:
                    header = decode(_HEADER, frame)
                except Invalid as refusal:
                    api.meter.refused(TRANSPORT, refusal.code)
                    if refusal.code == "invalid_json":
                        await self._send(_MALFORMED)
                        return
                    await self._send(error_of(refusal))
                    continue
                await stream.write(await self._answer(caller, canonical_kind(header.kind), frame))

    async def _answer(self, caller: Principal, kind: str, frame: bytes) -> bytes:
        api, operation = self._api, BY_KIND.get(kind)
        if operation is None:
            return self._encode(_answer_without_operation(api, kind))
        started_s = perf_counter()
        try:
            reply = await self._run(caller, operation, frame)
            if api.services.frames is not None and operation.kind in _LOGGED:
                _log_call(api.services.frames, operation.kind, frame, reply)
            return reply
        except Refusal as refusal:
            api.meter.refused(TRANSPORT, refusal.code)
            return self._encode(error_of(refusal))
        except CallerGoneError:
            raise
        except Exception:  # the client is told nothing of the cause; the log has it
            log.exception("ipc.failed", extra={"operation": operation.kind})
            api.meter.refused(TRANSPORT, "internal")
            return self._encode(INTERNAL_ERROR)
        finally:
            self._server.timers[operation.kind].observe(perf_counter() - started_s)

    async def _run(self, caller: Principal, operation: AnyApiOperation, frame: bytes) -> bytes:
        services, request = self._api.services, self._request(operation, frame)
        if request.ids and has_short_id(request):
            request = await expand_ids(services, caller, request)
        wait = operation.wait
        if wait is None or not request.wait_ms:
            answer = await operation.run(services, caller, request)
        else:
            with self._api.waits.pause(caller) as pause, self._stream.on_end(pause.leave):
                answer = await wait(services, caller, request, pause)
        return await self._encode_within_frame(caller, request, answer)

    @staticmethod
    def _request(operation: AnyApiOperation, frame: bytes) -> Any:
        request: Any = decode(_FRAMES[operation.kind], frame)
        if operation.request.strict:
            check_fields(frame, operation.frame or operation.request, _HEADER_FIELDS)
        return request.request() if operation.frame is not None else request

    async def _encode_within_frame(self, caller: Principal, request: Any, answer: ApiAnswer) -> bytes:
        """Encodes an answer. Refuses an answer that no frame can hold, and gives back its leases or results.

        Results stay drained under a request id: the caller gets them by the same request over HTTP.
        """
        exchange, bytes_max, body = self._api.services.exchange, self._server.frame_bytes_max, self._encode(answer)
        if len(body) <= bytes_max:
            return body
        # With a single item, the list only repeats the fields at the top.
        if isinstance(answer, ResultOpt):
            if len(answer.results) == 1:
                body = self._encode(msgspec.structs.replace(answer, results=()))
            if len(body) > bytes_max and request.request_id is None:
                await exchange.give_back(Drained(answer.results))
        elif isinstance(answer, TaskOpt):
            if len(answer.tasks) == 1:
                body = self._encode(msgspec.structs.replace(answer, tasks=()))
            if len(body) > bytes_max:
                for leased in answer.tasks:
                    lease_id, reason = leased.lease.lease_id, "too large for one frame"
                    await exchange.release(caller, leased.task.id, lease_id, reason, audited=False)
        if len(body) > bytes_max:
            raise TooLarge("answer_too_large", f"the answer has {len(body)} bytes, a frame {bytes_max}; ask for fewer")
        return body

    async def _send(self, answer: ApiAnswer) -> None:
        await self._stream.write(self._encode(answer))


class _TaskIdField(msgspec.Struct, frozen=True, gc=False):
    task_id: Any = None


_TASK_ID: Final = msgspec.json.Decoder(_TaskIdField)


def _log_call(log: FrameLog, kind: str, frame: bytes, reply: bytes) -> None:
    call = CapturedCall(log, "in", "socket", f"{kind} {_TASK_ID.decode(frame).task_id or ''}".rstrip(), {})
    call.sent(frame)
    call.answered(200, {}, "answer")
    call.received(reply)
    call.ended()


def _answer_without_operation(api: ApiContext, kind: str) -> ApiAnswer:
    if kind in _UNAUTHENTICATED:
        return _UNAUTHENTICATED[kind](api)
    if kind == "authenticate":
        return ErrorAnswer(code="already_authenticated", message="the connection is authenticated already")
    return ErrorAnswer(code="unknown_kind", message=f"there is no request kind {kind[:80]!r}")


class IpcServer:
    """Must be used on the event loop that it was started on."""

    def __init__(
        self,
        path: Path,
        api: ApiContext,
        *,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        connections_max: int = CONNECTIONS_MAX,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self._path = path
        self._connections_max = connections_max
        self.api = api
        self.frame_bytes_max = frame_bytes_max
        self.handshake_s = handshake_s
        self.timers = {operation.kind: api.meter.timer(TRANSPORT, operation.kind) for operation in OPERATIONS}
        self._open: dict[FrameStream, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        sock = _bind_socket(self._path)
        try:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(lambda: _Connection(self), sock=sock, backlog=BACKLOG)
        except BaseException:
            sock.close()
            raise

    def opened(self, stream: FrameStream) -> None:
        session = IpcSession(self, stream).run() if len(self._open) < self._connections_max else self._refuse(stream)
        self._open[stream] = asyncio.ensure_future(session)
        self.api.meter.connections = len(self._open)

    def lost(self, stream: FrameStream) -> None:
        # The session notices by itself and ends; until then it still counts.
        task = self._open.get(stream)
        if task is not None:
            task.add_done_callback(lambda _: self._forget(stream))

    def _forget(self, stream: FrameStream) -> None:
        self._open.pop(stream, None)
        self.api.meter.connections = len(self._open)

    async def _refuse(self, stream: FrameStream) -> None:
        message = f"{self._connections_max} connections are open already; close some, or raise ipc.connections_max"
        await stream.write(encode(ErrorAnswer(code="too_many_connections", message=message)))
        stream.close()

    async def stop(self, grace_s: float = 5.0) -> None:
        """Takes no more connections, lets running answers finish, then closes. Removes the socket's file."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
        sessions = dict(self._open)
        for stream in sessions:
            stream.cut_off()
        if sessions:
            await asyncio.wait(sessions.values(), timeout=grace_s)
        for stream, task in sessions.items():
            task.cancel()
            stream.abort()
        await asyncio.gather(*sessions.values(), return_exceptions=True)


class _Connection(FrameStream):
    def __init__(self, server: IpcServer) -> None:
        super().__init__(HANDSHAKE_BYTES_MAX)
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._server.lost(self)


def _bind_socket(path: Path) -> socket.socket:
    """A socket at this path that only its owner may connect to. Its mode is set before it listens."""
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(os.fspath(path))
        path.chmod(0o600)
        sock.setblocking(False)
    except OSError as failed:
        sock.close()
        if failed.errno is None or failed.errno == errno.ENAMETOOLONG:
            raise SettingsError(
                f"the socket's path is too long for this system: {path}; choose a shorter home"
            ) from None
        raise
    return sock


def _remove_stale(path: Path) -> None:
    """Removes the socket of an earlier daemon. The home's lock shows that it is not running."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SettingsError(f"{path} exists and is not a socket; move it away")
    path.unlink()
