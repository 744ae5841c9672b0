"""What is said on one connection: who are you, then request and answer, strictly in turn.

Before authentication only `protocol_info` and `ping` are answered. A frame that is not JSON, or too long, ends the
connection after an error; a request that is refused does not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final

import msgspec

from covenant.doors.ipc.frame_stream import FrameStream, FrameTooLargeError
from covenant.doors.metrics import Meter
from covenant.doors.operator_api import BY_KIND, OPERATIONS
from covenant.doors.operator_api.answers import (
    INTERNAL_ERROR,
    ApiAnswer,
    Authenticated,
    AuthenticationFailed,
    ErrorAnswer,
    Pong,
    ProtocolInfo,
    ProtocolVersions,
    error_of,
)
from covenant.doors.operator_api.mailbox import ResultOpt, TaskOpt
from covenant.doors.operator_api.operation import AnyApiOperation, Services
from covenant.doors.waits import CallerGoneError, Waits
from covenant.exchange.access.principals import IdentityAuth, Principal
from covenant.model.errors import Invalid, Refusal, TooLarge
from covenant.wire.ipc_frames import canonical_kind
from covenant.wire.json_input import check_fields, decode
from covenant.wire.mailbox import FrameHeader

Encode = Callable[[ApiAnswer], bytes]


async def fitted(office: Services, caller: Principal, answer: ApiAnswer, encode: Encode, bytes_max: int) -> bytes:
    body = encode(answer)
    if len(body) <= bytes_max:
        return body
    # Of a single one the list only repeats what stands at the top.
    if isinstance(answer, ResultOpt) and len(answer.results) == 1:
        body = encode(msgspec.structs.replace(answer, results=()))
    elif isinstance(answer, TaskOpt):
        if len(answer.tasks) == 1:
            body = encode(msgspec.structs.replace(answer, tasks=()))
        if len(body) > bytes_max:
            for leased in answer.tasks:
                await office.exchange.release(caller, leased.task.id, leased.lease.lease_id, "too large for one frame")
    if len(body) > bytes_max:
        raise TooLarge("answer_too_large", f"the answer has {len(body)} bytes, a frame {bytes_max}; ask for fewer")
    return body


TRANSPORT: Final = "ipc"
HANDSHAKE_S: Final = 10.0
# Nobody needs more to say who they are, and whoever has not said so shall not fill our memory.
HANDSHAKE_BYTES_MAX: Final = 64 * 1024

_HEADING: Final = msgspec.json.Decoder(FrameHeader)
_FRAMES: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    operation.kind: msgspec.json.Decoder(operation.frame or operation.request) for operation in OPERATIONS
}
_HEADING_FIELDS: Final = FrameHeader.__struct_fields__
_MALFORMED: Final = ErrorAnswer(code="invalid_json", message="malformed frame")
_TOO_LARGE: Final = ErrorAnswer(code="frame_too_large", message="frame too large")

log = logging.getLogger(__name__)


class IpcContext:
    """What all connections share."""

    def __init__(
        self,
        office: Services,
        doorkeeper: IdentityAuth,
        waits: Waits,
        meter: Meter,
        *,
        encode: Callable[[ApiAnswer], bytes],
        server: str,
        frame_bytes_max: int,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self.office = office
        self.doorkeeper = doorkeeper
        self.waits = waits
        self.meter = meter
        self.encode = encode
        self.info = ProtocolInfo(info=ProtocolVersions(), server=server)
        self.frame_bytes_max = frame_bytes_max
        self.handshake_s = handshake_s
        self.timers = {operation.kind: meter.timer(TRANSPORT, operation.kind) for operation in OPERATIONS}


class IpcSession:
    def __init__(self, talk: IpcContext, stream: FrameStream) -> None:
        self._talk = talk
        self._stream = stream

    async def run(self) -> None:
        """Until either side is through. Leaves the stream closed."""
        try:
            async with asyncio.timeout(self._talk.handshake_s):
                caller = await self._handshake()
            if caller is not None:
                await self._serve(caller)
        except TimeoutError:
            await self._say(AuthenticationFailed(reason="nobody authenticated in time"))
        except FrameTooLargeError:
            await self._say(_TOO_LARGE)
        except CallerGoneError:
            pass
        finally:
            self._stream.close()

    async def _handshake(self) -> Principal | None:
        """The caller, or None once it has been told that it is not known."""
        while (frame := await self._stream.read()) is not None:
            try:
                heading = decode(_HEADING, frame)
            except Invalid as refusal:
                if refusal.code == "invalid_json":
                    await self._say(_MALFORMED)
                    return None
                heading = FrameHeader("")
            kind = canonical_kind(heading.kind)
            if kind == "authenticate":
                return await self._authenticate(heading.token_b58)
            if kind not in _BEFORE:
                await self._turn_away("first frame must be Authenticate")
                return None
            await self._say(_BEFORE[kind](self._talk))
        return None

    async def _authenticate(self, token: str | None) -> Principal | None:
        caller = self._talk.doorkeeper.recognise(token) if token else None
        if caller is None:
            await self._turn_away("unknown or revoked token")
            return None
        await self._say(Authenticated(display=caller.agent.display))
        return caller

    async def _turn_away(self, reason: str) -> None:
        try:
            refusal = await self._talk.doorkeeper.turned_away(
                reason, transport=TRANSPORT, address=self._stream.address()
            )
        except Refusal as unaudited:
            await self._say(error_of(unaudited))
            return
        self._talk.meter.refused(TRANSPORT, refusal.code)
        await self._say(AuthenticationFailed(reason=refusal.message))

    async def _serve(self, caller: Principal) -> None:
        stream, talk = self._stream, self._talk
        stream.frame_bytes_max = talk.frame_bytes_max
        # A caller revoked meanwhile still hears the answer under way: it may be about its own new token.
        with talk.doorkeeper.session(caller, stream.cut_off):
            while (frame := await stream.read()) is not None:
                try:
                    heading = decode(_HEADING, frame)
                except Invalid as refusal:
                    talk.meter.refused(TRANSPORT, refusal.code)
                    if refusal.code == "invalid_json":
                        await self._say(_MALFORMED)
                        return
                    await self._say(error_of(refusal))
                    continue
                await stream.write(await self._answer(caller, canonical_kind(heading.kind), frame))

    async def _answer(self, caller: Principal, kind: str, frame: bytes) -> bytes:
        talk, operation = self._talk, BY_KIND.get(kind)
        if operation is None:
            return talk.encode(_without_operation(talk, kind))
        started_s = perf_counter()
        try:
            answer = await self._run(caller, operation, frame)
            return await fitted(talk.office, caller, answer, talk.encode, talk.frame_bytes_max)
        except Refusal as refusal:
            talk.meter.refused(TRANSPORT, refusal.code)
            return talk.encode(error_of(refusal))
        except CallerGoneError:
            raise
        except Exception:  # the last stand before the client: it hears nothing of what went wrong
            log.exception("ipc.failed", extra={"operation": operation.kind})
            talk.meter.refused(TRANSPORT, "internal")
            return talk.encode(INTERNAL_ERROR)
        finally:
            talk.timers[operation.kind].observe(perf_counter() - started_s)

    async def _run(self, caller: Principal, operation: AnyApiOperation, frame: bytes) -> ApiAnswer:
        talk = self._talk
        request: Any = decode(_FRAMES[operation.kind], frame)
        if operation.request.strict:
            check_fields(frame, operation.frame or operation.request, _HEADING_FIELDS)
        if operation.frame is not None:
            request = request.request()
        wait = operation.wait
        if wait is None or not request.wait_ms:
            return await operation.run(talk.office, caller, request)
        with talk.waits.pause(caller) as pause, self._stream.on_end(pause.leave):
            return await wait(talk.office, caller, request, pause)

    async def _say(self, answer: ApiAnswer) -> None:
        await self._stream.write(self._talk.encode(answer))


_BEFORE: Final[dict[str, Callable[[IpcContext], ApiAnswer]]] = {
    "protocolinfo": lambda talk: talk.info,
    "ping": lambda _: Pong(),
}


def _without_operation(talk: IpcContext, kind: str) -> ApiAnswer:
    if kind in _BEFORE:
        return _BEFORE[kind](talk)
    if kind == "authenticate":
        return ErrorAnswer(code="already_authenticated", message="this connection is authenticated already")
    return ErrorAnswer(code="unknown_kind", message=f"there is no request kind {kind[:80]!r}")
