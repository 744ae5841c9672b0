"""A2A over gRPC: the third binding of the one table of operations, on a port of its own. Needs the extra `grpc`.

The services of 1.0 and 0.3 are both there. Each method of a service finds its row by its name. The field `tenant` of
1.0 names the agent; without it, and in 0.3, the published agent is meant. Service parameters are metadata, named like
the headers. The order of checks is as over HTTP.

A stream has one message a step, each with its generation in `covenant.generation` of its metadata. However the stream
ends, its trailer `last-event-id` has the last generation: sent as metadata, it resumes the stream after that.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Final, NoReturn, Protocol, TypeVar
from urllib.parse import unquote

import grpc  # type: ignore[import-untyped]
from a2a.compat.v0_3 import a2a_v0_3_pb2
from a2a.types import a2a_pb2
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.json_format import MessageToJson, ParseDict
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from starlette.types import Scope

from covenant.doors.a2a.admission import GRACE_S, Admission, Headers, headers_of
from covenant.doors.a2a.operations import BY_NAME, A2ACall, A2AOperation, A2AServices, skip_params
from covenant.doors.a2a.protobuf_json import RequestReader, ResponseWriter
from covenant.doors.http.bearer_auth import TenantAuth, client_address
from covenant.doors.http.host_names import as_host
from covenant.doors.http.request_body import AnonymousPool
from covenant.doors.http.server.http_exchange import HEADERS_BY_NAME
from covenant.doors.http.server.tls_handshakes import ServerTls
from covenant.doors.metrics import Timer
from covenant.doors.waits import CancelScope
from covenant.exchange.frame_log import CapturedCall, FrameLog
from covenant.exchange.tasks.reader import TaskStream
from covenant.model.errors import Invalid, NotFound, Refusal, Unauthenticated, Unavailable
from covenant.model.tenants import DEFAULT
from covenant.wire.a2a.dialects import PROTO_V03, V1, Dialect
from covenant.wire.a2a.error_codes import details, error_code_of, message_of, name_v03

CURSOR: Final = "last-event-id"
GENERATION: Final = "covenant.generation"
RETRY_MS: Final = 1_000
log = logging.getLogger(__name__)
T = TypeVar("T")
TRANSPORT: Final = "grpc"
SERVICES: Final = (
    (a2a_pb2.DESCRIPTOR.services_by_name["A2AService"], V1),
    (a2a_v0_3_pb2.DESCRIPTOR.services_by_name["A2AService"], PROTO_V03),
)
_NAMES_V03: Final = {
    "TaskSubscription": "SubscribeToTask",
    "ListTaskPushNotificationConfig": "ListTaskPushNotificationConfigs",
    "GetAgentCard": "GetExtendedAgentCard",
}
"""Methods of 0.3 that have another name in 1.0."""
_PING_MS: Final = 60_000
_IDLE_MS: Final = 60_000
"""A connection without a call is closed after this. Connections are bounded in total, not for each address."""
_HANDSHAKE_MS: Final = 10_000
_ANONYMOUS_MESSAGE_S: Final = 2.0
"""How long the message of a caller without a token may take. Meanwhile it holds bytes for the longest message."""
_STREAMS_MAX: Final = 1_000
"""The most running calls on one connection."""
_OPTIONS: Final = (
    # Otherwise two daemons could share a port, and each would get half of the calls.
    ("grpc.so_reuseport", 0),
    # A few bytes can unpack to gigabytes, and the library checks the size only afterwards: no compressed requests.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Our pings find callers that are gone. Callers' pings are welcome, since streams may be silent for long.
    ("grpc.keepalive_time_ms", _PING_MS),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_connection_idle_ms", _IDLE_MS),
    # Bounds connections that send nothing, and calls on one connection.
    ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
    ("grpc.max_concurrent_streams", _STREAMS_MAX),
)
DETAILS: Final = "grpc-status-details-bin"
DETAIL_TYPES: Final = (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo)
"""The types of error details. They are imported so that `ParseDict` finds them by name."""


class _StreamWriter:
    """Writes one stream to its caller. `sent`: the generation of the last message."""

    def __init__(self, stream: TaskStream, call: A2ACall, writer: ResponseWriter[Any], context: Any) -> None:
        self._stream = stream
        self._call = call
        self._writer = writer
        self._context = context
        self.sent: int | None = None

    async def write_all(self) -> None:
        stream, request, responses = self._stream, self._call.request, self._call.dialect.responses
        if stream.reply is not None:
            await self._write(stream.reply.generation, responses.encode_message(stream.reply, self._call.link))
            return
        first, history_length = stream.first, getattr(request, "history_length", None)
        await self._write(first.generation, responses.encode_snapshot(first, history_length, self._call.link))
        async for steps in stream:
            for step in steps:
                await self._write(step.generation, responses.encode_step(first.task, step, self._call.link))
        if stream.cut:
            message = f"the reader is too slow; the task goes on: resume with {CURSOR}"
            raise Unavailable("stream_cut", message, retry_after_ms=RETRY_MS)

    async def _write(self, generation: int, body: bytes) -> None:
        event = self._writer.message(body)
        getattr(event, event.WhichOneof("payload")).metadata[GENERATION] = generation
        # Set before the write: a write that has begun arrives before the trailers, even if it is canceled.
        self.sent = generation
        await self._context.write(event.SerializeToString())


def stopping() -> Refusal:
    message = f"the daemon is stopping; accepted tasks are kept: resume with {CURSOR}"
    return Unavailable("stopping", message, retry_after_ms=RETRY_MS)


@dataclass(frozen=True, slots=True)
class _Row:
    operation: A2AOperation
    dialect: Dialect
    reader: RequestReader
    writer: ResponseWriter[Message]
    timer: Timer


class GrpcTenants(TenantAuth):
    """Authenticates tenants as over HTTP, with its own transport name in the audit."""

    transport = TRANSPORT


class GrpcCalls:
    """Every method of the service. `published` is the agent for calls that name none."""

    def __init__(
        self,
        admission: Admission,
        services: A2AServices,
        pool: AnonymousPool,
        *,
        message_bytes_max: int,
        published: str = "",
        http_at: tuple[str, int] | None = None,
        tls: ServerTls | None = None,
        frames: FrameLog | None = None,
    ) -> None:
        """`pool` bounds the memory of callers without a token. `http_at`: where HTTP listens, for cards."""
        self._tls = tls
        self._frames = frames
        self._http_at = http_at
        self._admission = admission
        self._services = services
        self._pool = pool
        self.message_bytes_max = message_bytes_max
        self._published = published
        self._open: set[CancelScope] = set()
        self._abandoned: set[asyncio.Future[Any]] = set()
        self._stopping = False

    def methods(self, service: ServiceDescriptor, dialect: Dialect) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for method in service.methods:
            operation = BY_NAME[_NAMES_V03.get(method.name, method.name)]
            row = _Row(
                operation,
                dialect,
                RequestReader(GetMessageClass(method.input_type)),
                ResponseWriter(GetMessageClass(method.output_type)),
                self._admission.meter.timer(TRANSPORT, operation.name),
            )
            # Declared as streams, which is the same on the wire: then a message is read only on demand.
            streams = operation.open_stream is not None
            kind = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
            serve = self._call if self._frames is None else partial(self._captured_call, self._frames)
            found[method.name] = kind(partial(serve, row))
        return found

    def stop(self) -> None:
        """Ends all streams, now and from now on; a caller that waits for one answer still gets it."""
        self._stopping = True
        for work in tuple(self._open):
            work.end(stopping())

    async def wait_for_abandoned(self) -> None:
        """Waits for the operations whose callers have left."""
        await asyncio.gather(*self._abandoned, return_exceptions=True)

    async def _captured_call(self, log: FrameLog, row: _Row, requests: Any, context: Any) -> bytes | None:
        captured = CapturedContext(context, log, row.operation.name, row.reader.kind, row.writer.kind)
        try:
            reply = await self._call(row, requests, captured)
            if reply is not None:
                captured.add_answer(reply)
            return reply
        finally:
            captured.end()

    async def _call(self, row: _Row, _requests: Any, context: Any) -> bytes | None:
        started_s = perf_counter()
        try:
            call = await self._read_call(row, context)
            caller = call.ask.caller
            active = self._admission.activated(call) if call.ask.extensions else ""
            initial = (("a2a-extensions", active),) if active else ()
            if initial:
                # Before any refusal: a refusal has no metadata of its own.
                await context.send_initial_metadata(initial)
            operation, limiter = row.operation, self._admission.tenants.limiter
            with limiter.connected(caller):
                if operation.open_stream is not None:
                    with limiter.streaming(caller):
                        stream = await self._shielded(operation.open_stream(self._services, call))
                        await self._run(row, stream, call, context, metadata_sent=bool(initial))
                    return None
                reply = await self._shielded(self._admission.run(operation, self._services, call))
            return row.writer.message(reply).SerializeToString()
        except Exception as error:  # noqa: BLE001  (an internal error tells the client nothing)
            failure = error
        finally:
            row.timer.observe(perf_counter() - started_s)
        return await self._refuse(row, failure, context)

    async def _run(self, row: _Row, stream: TaskStream, call: A2ACall, context: Any, *, metadata_sent: bool) -> None:
        """Writes the stream. A caller that leaves or is revoked ends it, not the task."""
        writer, tenancy = _StreamWriter(stream, call, row.writer, context), self._admission.tenants.tenancy
        revoked = Unauthenticated(
            "unauthenticated", "the token is no longer valid; the task goes on, and a valid token can follow it again"
        )
        with stream:
            # Sent alone: after a canceled first write the library would send it again, which ends the call.
            if not metadata_sent:
                await context.send_initial_metadata(())
            with CancelScope() as work, tenancy.session(call.ask.caller, partial(work.end, revoked)):
                self._open.add(work)
                if self._stopping:
                    work.end(stopping())
                try:
                    # If the scope has ended already, the cancellation arrives here and not in the middle of a write.
                    await asyncio.sleep(0)
                    await writer.write_all()
                finally:
                    self._open.discard(work)
                    if writer.sent is not None:
                        context.set_trailing_metadata(((CURSOR, str(writer.sent)),))

    async def _read_call(self, row: _Row, context: Any) -> A2ACall:
        """Authenticates the caller before its message is read, so that no message of a refused caller is buffered."""
        scope = self._scope(context)
        headers = headers_of(scope)
        if (credential := headers.found.get(b"authorization")) is not None:
            tenants = self._admission.tenants
            caller = tenants.recognised(credential) or (await self._admission.enter(scope, headers, "")).caller
            with tenants.limiter.connected(caller):
                message = await self._pool.within(context.read())
            return await self._read(row, scope, headers, message)
        if not self._admission.admits_anonymous_callers(scope, self._published):
            await self._admission.enter(scope, headers, "")
        with self._pool.lease(client_address(scope)) as take:
            await self._pool.take_when_free(take, min(self.message_bytes_max, self._pool.share))
            # A client sends its message with the call. A slow one makes room for the next.
            message = await self._pool.within(context.read(), _ANONYMOUS_MESSAGE_S)
            return await self._read(row, scope, headers, message)

    async def _read(self, row: _Row, scope: Scope, headers: Headers, request: Any) -> A2ACall:
        try:
            if request is grpc.aio.EOF:
                raise Invalid("invalid_request", "the call ended before its message")
            message = row.reader.read(request)
        except Invalid:
            # Authentication comes first, also if the message cannot be read.
            await self._admission.enter(scope, headers, "")
            raise
        named: str = getattr(message, "tenant", "")
        admitted = await self._admission.enter(scope, headers, named or self._published)
        if not named and not (self._published and admitted.caller.tenant.name == DEFAULT):
            raise NotFound("unknown_agent", "no agent is published for you; name one in the field `tenant`")
        params = row.reader.params(message)
        pushes_off = row.operation.pushes and self._services.pushes is None
        decode = skip_params if pushes_off else row.operation.decode(row.dialect.requests)
        return self._admission.call(admitted, row.operation, row.dialect, decode, params)

    def _scope(self, context: Any) -> Scope:
        """The call as an HTTP scope: metadata become headers, and a repeated name becomes a list."""
        headers: dict[str, bytes] = {}
        for name, value in context.invocation_metadata() or ():
            if not name.endswith("-bin"):
                raw = value if isinstance(value, bytes) else value.encode()
                headers[name] = b"%b, %b" % (headers[name], raw) if name in headers else raw
        if self._tls is not None and "authorization" not in headers:
            self._add_certificate_credential(self._tls, context, headers)
        return {
            "type": "http",
            "scheme": "http" if self._tls is None else "https",
            "headers": [(name.encode(), value) for name, value in headers.items()],
            HEADERS_BY_NAME: {name.encode(): value for name, value in headers.items()},
            "query_string": b"",
            "client": parse_peer(context.peer()),
            "server": self._http_at,
        }

    def _add_certificate_credential(self, tls: ServerTls, context: Any, headers: dict[str, bytes]) -> None:
        """Authenticates by the client's certificate, if it sent no token and the operator has mapped its name."""
        certificates = context.auth_context().get("x509_pem_cert", ())
        names = tls.names_of(ssl.PEM_cert_to_DER_cert(certificates[0].decode())) if certificates else ()
        credential = tls.credential_of(names) if names else None
        if credential is not None:
            headers["authorization"] = credential

    async def _shielded(self, work: Awaitable[T]) -> T:
        """Lets the work run on for `GRACE_S` if the caller leaves, so that a commit is not interrupted."""
        running = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._abandoned.add(running)
            running.add_done_callback(self._collect)
            asyncio.get_running_loop().call_later(GRACE_S, running.cancel)
            raise

    def _collect(self, done: asyncio.Future[Any]) -> None:
        self._abandoned.discard(done)
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            if isinstance(done.result(), TaskStream):
                done.result().__exit__(None, None, None)
        elif not isinstance(error, Refusal):
            log.error("a2a.failed", exc_info=error)

    async def _refuse(self, row: _Row, error: Exception, context: Any) -> NoReturn:
        if not isinstance(error, Refusal):
            log.error("a2a.failed", extra={"operation": row.operation.name}, exc_info=error)
        self._admission.meter.refused(TRANSPORT, error.code if isinstance(error, Refusal) else "internal")
        # `abort` replaces the trailers, so those that were set before are passed again.
        trailers = (*(context.trailing_metadata() or ()), (DETAILS, status_of(error)))
        message = message_of(error) if row.dialect is V1 else f"{name_v03(error)}: {message_of(error)}"
        await context.abort(grpc.StatusCode[error_code_of(error).grpc], message, trailers)
        raise AssertionError("abort() raises")


class GrpcServer:
    """Binds its port when it is made, on the running loop, and serves from `start` on.

    `calls_max` bounds the connections as well.
    """

    def __init__(
        self, *, bind_addr: str, port: int, message_bytes_max: int, calls_max: int, tls: GrpcTls | None = None
    ) -> None:
        """Raises OSError if the address cannot be listened on."""
        self._calls: GrpcCalls | None = None
        self._server = grpc.aio.server(
            options=(
                *_OPTIONS,
                ("grpc.max_receive_message_length", message_bytes_max),
                # Each costs an open file, and the journal needs some.
                ("grpc.max_allowed_incoming_connections", calls_max),
            ),
            maximum_concurrent_rpcs=calls_max,
        )
        try:
            where = f"{as_host(bind_addr)}:{port}"
            if tls is None:
                self.port: int = self._server.add_insecure_port(where)
            else:
                self.port = self._server.add_secure_port(where, _credentials(tls))
        except RuntimeError as error:
            raise OSError(str(error)) from None

    async def start(self, calls: GrpcCalls) -> None:
        self._calls = calls
        for service, dialect in SERVICES:
            self._server.add_registered_method_handlers(service.full_name, calls.methods(service, dialect))
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Takes no more calls and ends streams; running calls have the grace time. May be repeated."""
        if self._calls is not None:
            self._calls.stop()
        await self._server.stop(grace_s)
        if self._calls is not None:
            await self._calls.wait_for_abandoned()


class GrpcTls(Protocol):
    """The certificate and key of the port; a new pair when the files have changed."""

    @property
    def pair(self) -> TlsPairLike: ...
    @property
    def client_required(self) -> bool: ...


class TlsPairLike(Protocol):
    @property
    def certificate(self) -> bytes: ...
    @property
    def key(self) -> bytes: ...
    @property
    def client_ca(self) -> bytes: ...


def _credentials(tls: GrpcTls) -> Any:
    """The library calls `changed_configuration` before each handshake, in a thread of its own."""
    required = bool(tls.pair.client_ca) and tls.client_required
    current = tls.pair

    def configuration(pair: TlsPairLike) -> Any:
        authorities = pair.client_ca if required else None
        return grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)], authorities)

    def changed_configuration() -> Any:
        nonlocal current
        if tls.pair is current:
            return None
        current = tls.pair
        return configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        configuration(current), changed_configuration, require_client_authentication=required
    )


def parse_peer(peer: str) -> tuple[str, int] | None:
    """The address in gRPC's name of a caller: `ipv4:127.0.0.1:5`, `ipv6:%5B::1%5D:5`; None for another kind."""
    kind, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return host.strip("[]"), int(port)


def status_of(error: BaseException) -> bytes:
    """`google.rpc.Status`, like the errors of the other bindings. An internal error reveals nothing."""
    code: int = grpc.StatusCode[error_code_of(error).grpc].value[0]
    fields = {"code": code, "message": message_of(error), "details": details(error)}
    status: bytes = ParseDict(fields, status_pb2.Status()).SerializeToString()
    return status


class CapturedContext:
    """A call's context that also captures the messages read and written."""

    def __init__(
        self, context: Any, log: FrameLog, operation_name: str, request: type[Message], answer: type[Message]
    ) -> None:
        self._context, self._request_type, self._answer_type = context, request, answer
        headers = {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
        self._call = CapturedCall(log, "in", "a2a", f"gRPC {operation_name}", headers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        message = await self._context.read()
        if isinstance(message, bytes):
            self._call.sent(_json(self._request_type, message))
        return message

    async def write(self, message: bytes) -> None:
        self.add_answer(message)
        await self._context.write(message)

    def add_answer(self, message: bytes) -> None:
        if not self._call.status:
            self._call.answered(200, {}, "OK")
        self._call.received(_json(self._answer_type, message) + b"\n")

    def end(self) -> None:
        """Offers the call to the frame log, after an answer or a refusal."""
        self._call.ended()


def _json(kind: type[Message], data: bytes) -> bytes:
    try:
        return MessageToJson(kind.FromString(data), indent=None).encode()
    except DecodeError:
        return b""
