"""The transport over gRPC (A2A 1.0 and 0.3), for agents that offer nothing else. Needs the extra `grpc`.

The guard looks the name up, and the channel is made to an address from that answer: no second look-up, no proxy, no
service configuration from DNS. Each call has a channel of its own. Messages are ProtoJSON on our side, as in the other
bindings; observers of calls see that form, too. A stream is resumed from a snapshot; Covenant's own agents send the
event's number in the metadata (`covenant.generation`), and their streams resume from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import grpc  # type: ignore[import-untyped]
from a2a.compat.v0_3 import a2a_v0_3_pb2
from a2a.types import a2a_pb2
from google.protobuf.json_format import MessageToJson, Parse
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from covenant.model.agent_card import RemoteCard, RemoteInterface
from covenant.outbound.address_guard import CheckedTarget
from covenant.outbound.call_errors import AddressRefused, CallFailed, RefusalCode, RemoteRefused
from covenant.outbound.http_fetcher import Fetcher, check_headers
from covenant.outbound.remote.a2a_transport import (
    EVENT_BYTES_MAX,
    QUIET_S,
    STREAM_BYTES_MAX,
    A2ATransport,
    Request,
    StreamItem,
    decoded,
)
from covenant.outbound.remote.remote_registry import Credentials
from covenant.wire.jsonrpc import one_line

SERVICES: Final = {
    "1.0": a2a_pb2.DESCRIPTOR.services_by_name["A2AService"],
    "0.3": a2a_v0_3_pb2.DESCRIPTOR.services_by_name["A2AService"],
}
CALL_S: Final = 30.0
CONNECT_S: Final = 5.0
KEEPALIVE_MS: Final = 60_000
CONTENT_TYPE: Final = "application/grpc"
GENERATION: Final = "covenant.generation"

_SCHEMES: Final = {"": "http", "grpc": "http", "http": "http", "grpcs": "https", "https": "https"}
_REFUSED: Final[dict[str, RefusalCode]] = {
    "NOT_FOUND": "unknown_task",
    "FAILED_PRECONDITION": "unsupported",
    "UNIMPLEMENTED": "other_dialect",
    "UNAUTHENTICATED": "unauthenticated",
    "PERMISSION_DENIED": "forbidden",
    "RESOURCE_EXHAUSTED": "over_limit",
}
_METHODS: Final[dict[tuple[str, str], tuple[type[Message], type[Message]]]] = {
    (version, method.name): (GetMessageClass(method.input_type), GetMessageClass(method.output_type))
    for version, service in SERVICES.items()
    for method in service.methods
}
"""By version and name: the types of the request and the answer."""


def grpc_url(url: str) -> str:
    """The address as a URL: cards write `host:port`, or one of several schemes."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    known = _SCHEMES.get(scheme.lower())
    if known is None:
        raise AddressRefused(f"{url[:200]!r} is no address of a gRPC agent")
    return f"{known}://{urlsplit(f'//{rest}').netloc}"


class GrpcTransport(A2ATransport):
    def __init__(
        self,
        interface: RemoteInterface,
        fetcher: Fetcher,
        credentials: Credentials,
        card: RemoteCard | None,
        channel: Any = None,
    ) -> None:
        """`channel`: carries the calls in place of the network."""
        super().__init__(interface)
        self._guard, self._observer = fetcher.guard, fetcher.observer
        self._url = grpc_url(interface.url)
        self._own_channel = channel
        secrets = credentials.headers(self._url, card)
        check_headers(secrets)
        self._secrets = {name.lower(): value for name, value in secrets.items()}

    async def _ask(self, request: Request, headers: Mapping[str, str], within_ms: int | None = None) -> bytes:
        request_type, response_type = _METHODS[self.interface.version, request.operation]
        within_s = CALL_S if within_ms is None else within_ms / 1000
        async with self._channel() as channel:
            call = channel.unary_unary(
                _path(self.interface.version, request.operation),
                request_serializer=_serializer(request_type),
                response_deserializer=response_type.FromString,
            )
            with self._observed(request, headers) as observe:
                answer = _json(await call(request.params, metadata=self._metadata(headers), timeout=within_s))
                observe(answer)
                return answer

    @asynccontextmanager
    async def _stream(self, request: Request, headers: Mapping[str, str]) -> AsyncIterator[AsyncIterator[StreamItem]]:
        async with self._channel() as channel:
            yield self._frames(channel, request, headers)

    async def _frames(self, channel: Any, request: Request, headers: Mapping[str, str]) -> AsyncIterator[StreamItem]:
        request_type, response_type = _METHODS[self.interface.version, request.operation]
        call = channel.unary_stream(
            _path(self.interface.version, request.operation),
            request_serializer=_serializer(request_type),
            response_deserializer=response_type.FromString,
        )
        seen = 0
        with self._observed(request, headers) as observe:
            async for message in _messages(aiter(call(request.params, metadata=self._metadata(headers)))):
                if message is None:
                    yield None
                    continue
                seen += message.ByteSize()
                if seen > STREAM_BYTES_MAX:
                    raise CallFailed("too_large", f"the stream has more than {STREAM_BYTES_MAX} bytes", transient=False)
                body = _json(message)
                observe(body)
                yield _number(message), decoded(self._codec.decode_reply, body)

    @contextmanager
    def _observed(self, request: Request, headers: Mapping[str, str]) -> Iterator[Callable[[bytes], None]]:
        """A context around one call. It yields a function that must be called with each answer."""
        record = None
        if self._observer is not None:
            url = f"{self._url}{_path(self.interface.version, request.operation)}"
            record = self._observer.sent("gRPC", url, dict(self._metadata(headers)), request.params)
        answered = False

        def answer(status: Mapping[str, str]) -> None:
            nonlocal answered
            if record is not None and not answered:
                answered = True
                record.answered(200, {"content-type": CONTENT_TYPE, **status})

        def observe(body: bytes) -> None:
            answer({})
            if record is not None:
                record.received(body + b"\n")

        try:
            yield observe
            answer({})
        except grpc.aio.AioRpcError as error:
            code = error.code()
            answer({"grpc-status": f"{code.value[0]} {code.name}", "grpc-message": one_line(error.details() or "")})
            raise _call_error(error) from error
        finally:
            if record is not None:
                record.ended()

    def _metadata(self, headers: Mapping[str, str]) -> list[tuple[str, str]]:
        version = [("a2a-version", self._codec.version)] if self._codec.version is not None else []
        return [*version, *headers.items(), *self._secrets.items()]

    @asynccontextmanager
    async def _channel(self) -> AsyncIterator[Any]:
        if self._own_channel is not None:
            yield self._own_channel
            return
        target = await self._guard.check(f"{self._url}/")
        async with _channel_to(target) as channel:
            await _connected(channel)
            yield channel


async def _connected(channel: Any) -> None:
    """Returns when there is a connection. A failure before that means that nothing was sent."""
    try:
        async with asyncio.timeout(CONNECT_S):
            state = channel.get_state(try_to_connect=True)
            while state is not grpc.ChannelConnectivity.READY:
                if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                    raise CallFailed("connect_failed", "no connection could be made", sent=False)
                await channel.wait_for_state_change(state)
                state = channel.get_state()
    except TimeoutError as error:
        raise CallFailed("timed_out", "no connection in time", sent=False) from error


def _channel_to(target: CheckedTarget) -> Any:
    address = target.addresses[0]
    where = f"ipv6:[{address}]:{target.port}" if address.version == 6 else f"ipv4:{address}:{target.port}"
    options = [
        ("grpc.default_authority", target.host),
        ("grpc.enable_http_proxy", 0),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.enable_retries", 0),
        ("grpc.max_receive_message_length", EVENT_BYTES_MAX),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ]
    if target.scheme == "https":
        options.append(("grpc.ssl_target_name_override", target.host))
        return grpc.aio.secure_channel(where, grpc.ssl_channel_credentials(), options=options)
    return grpc.aio.insecure_channel(where, options=options)


async def _messages(messages: AsyncIterator[Message]) -> AsyncIterator[Message | None]:
    """The messages, and None each time that the stream is quiet."""
    reading = asyncio.ensure_future(anext(messages, None))
    try:
        while True:
            if not (await asyncio.wait((reading,), timeout=QUIET_S))[0]:
                yield None
            elif (message := reading.result()) is not None:
                yield message
                reading = asyncio.ensure_future(anext(messages, None))
            else:
                return
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def _path(version: str, method: str) -> str:
    return f"/{SERVICES[version].full_name}/{method}"


def _serializer(kind: type[Message]) -> Any:
    def write(params: bytes) -> bytes:
        # Fields of the other bindings that this version of the messages does not have are left out.
        return Parse(params, kind(), ignore_unknown_fields=True).SerializeToString()

    return write


def _number(message: Any) -> str | None:
    """The number of the event, if it has one."""
    kind = message.WhichOneof("payload")
    fields = getattr(message, kind).metadata.fields if kind is not None else {}
    number = fields[GENERATION].number_value if GENERATION in fields else 0.0
    return str(int(number)) if number >= 1 else None


def _json(message: Message) -> bytes:
    return MessageToJson(message, indent=None).encode()


def _call_error(error: grpc.aio.AioRpcError) -> RemoteRefused | CallFailed:
    name, details = error.code().name, one_line(error.details() or "")
    if name == "UNAVAILABLE":
        return CallFailed("connection_lost", "the connection broke", detail=details)
    if name in ("DEADLINE_EXCEEDED", "CANCELLED"):
        return CallFailed("timed_out", "no answer in time", detail=details)
    # The library's own limit has no status of its own.
    if name == "RESOURCE_EXHAUSTED" and "larger than max" in details:
        return CallFailed("too_large", f"the answer has more than {EVENT_BYTES_MAX} bytes", transient=False)
    return RemoteRefused(_REFUSED.get(name, "refused"), f"the remote refused: {details} (gRPC {name})")
