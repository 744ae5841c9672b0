"""Inspecting an agent: sends one A2A request, as an operator wrote it, and shows every frame and its breaches of the
specification.

The request goes over the transports of `remote_client`, and nothing is repeated: the operator sees exactly the agent's
answer. Everything is bounded: the time, the frames, the bytes of each answer and of all answers together.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

import msgspec

from covenant.model.a2a_requests import Message, SendMessage
from covenant.model.agent_card import GRPC, JSONRPC, RemoteCard, RemoteInterface
from covenant.model.content import Content
from covenant.model.errors import OverLimit
from covenant.model.task_view import RemoteEvent, RemoteStatus, answer_text, plain_text
from covenant.outbound.call_errors import CallFailed, NoCard, RemoteError
from covenant.outbound.http_fetcher import Fetcher
from covenant.outbound.outbound_settings import OutboundSettings
from covenant.outbound.remote.a2a_transport import EVENT_BYTES_MAX, A2ATransport
from covenant.outbound.remote.card_lookup import CardSignature, check_signature, find_card, offered_by
from covenant.outbound.remote.remote_client import KEY_HEADER, open_transport
from covenant.outbound.remote.remote_registry import Credentials, host_and_port
from covenant.outbound.remote.remote_task import RemoteTaskView
from covenant.wire.a2a.card_codec import BadCard
from covenant.wire.a2a.conformance import FORMS, GRPC_TYPE, FrameChecks, Phase, RecordedFrame, media_type
from covenant.wire.a2a.dialects import dialect_of
from covenant.wire.frame_redaction import (
    TEXT_CHARS_MAX,
    redact_answer_headers,
    redact_body,
    redact_request_headers,
    secrets_in,
)
from covenant.wire.sse import EventReader

if TYPE_CHECKING:
    import httpx2

Method = Literal["send", "card", "get", "cancel"]

INSPECTION_S: Final = 60.0
INSPECTIONS_MAX: Final = 8
RETRY_MS: Final = 2_000
BODY_BYTES_MAX: Final = 1024 * 1024
TURN_CHARS_MAX: Final = 64 * 1024
FRAMES_MAX: Final = 200
FRAME_BYTES_MAX: Final = 2 * 1024 * 1024
"""The most bytes of all frames together. Further frames are dropped."""


class FrameRecorder:
    """Observes every request and answer, and keeps them within its bounds."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.frames: list[RecordedFrame] = []
        self.phase: Phase = "card"
        self.streams = False
        """Whether the call asks for a stream."""
        self._now_ms = now_ms
        self._bytes = 0

    @property
    def full(self) -> bool:
        return len(self.frames) >= FRAMES_MAX or self._bytes >= FRAME_BYTES_MAX

    def sent(self, method: str, url: str, headers: Mapping[str, str], content: bytes) -> _Answer:
        parts = urlsplit(url)
        frame = self.add("out", f"{method} {parts.path}")
        frame.headers = {"host": parts.netloc, **headers}
        self.keep(frame, content)
        return _Answer(self)

    def add(self, direction: Literal["in", "out"], what: str, *, event: bool = False) -> RecordedFrame:
        frame = RecordedFrame(self._now_ms(), direction, what, phase=self.phase, event=event)
        if len(self.frames) < FRAMES_MAX:
            self.frames.append(frame)
        return frame

    def keep(self, frame: RecordedFrame, piece: bytes) -> None:
        room = max(0, FRAME_BYTES_MAX - self._bytes)
        frame.body += piece[:room]
        frame.cut = frame.cut or len(piece) > room
        self._bytes += min(len(piece), room)


class _Answer:
    def __init__(self, recorder: FrameRecorder) -> None:
        self._recorder = recorder
        self._frame: RecordedFrame | None = None
        self._reader: EventReader | None = None
        self._messages = False

    def answered(self, status: int, headers: Mapping[str, str]) -> None:
        self._frame = frame = self._recorder.add("in", "answer")
        frame.status, frame.headers = status, headers
        if status == 200 and media_type(headers) == "text/event-stream":
            frame.what = "stream"
            self._reader = EventReader(EVENT_BYTES_MAX)
        elif media_type(headers) == GRPC_TYPE:
            self._messages = True
            refused = headers.get("grpc-status")
            frame.what = f"refused: {refused}" if refused else "stream" if self._recorder.streams else "answer"

    def received(self, piece: bytes) -> None:
        if self._reader is not None:
            for event in self._reader.feed(piece):
                self._recorder.keep(self._recorder.add("in", "event", event=True), event.data)
        elif self._messages:
            self._recorder.keep(self._recorder.add("in", "message", event=True), piece)
        elif self._frame is not None:
            self._recorder.keep(self._frame, piece)

    def ended(self) -> None:
        """The frames were kept as they came."""


class InspectedCall(msgspec.Struct, frozen=True, kw_only=True):
    """`interface`: where to call, if the card need not be read for it. `headers` go to the origin of `url` alone."""

    url: str
    method: Method
    binding: str
    version: str
    interface: str | None = None
    parts: tuple[Content, ...] = ()
    headers: dict[str, str] = {}
    key: str | None = None
    task_id: str | None = None
    context_id: str | None = None
    stream: bool = False
    agent: str = ""
    """Which agent at the interface is meant, if several share it (over gRPC)."""


class InspectedFrame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    at_ms: int
    direction: Literal["in", "out"]
    what: str
    text: str
    status: int | None = None
    headers: dict[str, str] = {}
    findings: tuple[str, ...] = ()
    truncated: bool = False


class InspectedTurn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: Literal["user", "agent"]
    text: str
    state: str | None = None
    task_id: str | None = None
    context_id: str | None = None


class ConformanceFinding(msgspec.Struct, frozen=True, kw_only=True):
    """`frame` is the index of the frame in the list; null for a finding that no single frame shows."""

    rule: str
    text: str
    frame: int | None = None


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """`interface` is where the request went. `error` says why there is no readable answer."""

    ok: bool
    interface: str | None
    card: dict[str, Any] | None
    signature: CardSignature | None
    conversation: tuple[InspectedTurn, ...]
    frames: tuple[InspectedFrame, ...]
    findings: tuple[ConformanceFinding, ...]
    took_ms: int
    error: str | None = None
    truncated: bool = False


class _InspectionRun:
    """One inspection under way, and what is known so far."""

    def __init__(self, call: InspectedCall, recorder: FrameRecorder, fetcher: Fetcher, channel: object) -> None:
        self.call, self.recorder, self.fetcher, self.channel = call, recorder, fetcher, channel
        self.card: RemoteCard | None = None
        self.signature: CardSignature | None = None
        self.interface: str | None = None
        self.view = RemoteTaskView()
        self.turns: list[InspectedTurn] = []
        self.cut = False

    async def run(self) -> None:
        call, credentials = self.call, Credentials(self.call.url, headers=self.call.headers)
        # Over gRPC the card also says which agent at the address is meant.
        if call.method == "card" or call.interface is None or (call.binding == GRPC and not call.agent):
            await self._read_card(credentials)
        if call.method == "card":
            return
        interface = self._interface()
        self.recorder.phase, self.interface = "call", interface.url
        self.recorder.streams = call.stream and call.method == "send"
        transport = open_transport(interface, self.fetcher, credentials, self.card, self.channel)
        if call.method == "send":
            await self._send(transport)
        else:
            assert call.task_id is not None
            ask = transport.get if call.method == "get" else transport.cancel
            self._add_event(await ask(call.task_id))

    async def _read_card(self, credentials: Credentials) -> None:
        try:
            self.card = await find_card(self.fetcher, self.call.url, credentials)
        except (RemoteError, BadCard, CallFailed):
            if self.call.method == "card":
                raise
            return
        if self.call.method == "card":
            self.recorder.phase = "keys"
            self.signature = await check_signature(self.fetcher, self.card)

    def _interface(self) -> RemoteInterface:
        call = self.call
        binding, version = call.binding, call.version
        for interface in self.card.interfaces if self.card is not None else ():
            if (interface.binding, interface.version) == (binding, version):
                return interface
        if call.interface is None and urlsplit(call.url).path.endswith(".json"):
            raise NoCard(f"the card at {call.url} offers no {binding} {version}; it has {offered_by(self.card)}")
        tenant = call.agent or None if binding == GRPC else None
        return RemoteInterface(url=call.interface or call.url, binding=binding, version=version, tenant=tenant)

    async def _send(self, transport: A2ATransport) -> None:
        call = self.call
        message = Message(
            message_id=str(uuid.uuid4()), parts=call.parts, task_id=call.task_id, context_id=call.context_id
        )
        self.turns.append(InspectedTurn(role="user", text=plain_text(call.parts)[:TURN_CHARS_MAX]))
        headers = {KEY_HEADER: call.key} if call.key is not None else {}
        if not call.stream:
            self._add_event(await transport.send(SendMessage(message=message), headers, int(INSPECTION_S * 1000)))
            return
        async with transport.stream(SendMessage(message=message), headers) as events:
            async for item in events:
                if item is not None:
                    self._add_event(item[1])
                if self.recorder.full:
                    self.cut = True
                    return

    def _add_event(self, event: RemoteEvent) -> None:
        for new in self.view.take(event):
            if isinstance(new, RemoteStatus) and new.message is not None:
                self._add_turn(plain_text(new.message.parts))

    def _add_turn(self, text: str) -> None:
        view = self.view
        turn = InspectedTurn(
            role="agent",
            text=text[:TURN_CHARS_MAX],
            state=view.state.value if view.task_id is not None else None,
            task_id=view.task_id,
            context_id=view.context_id,
        )
        if self.turns and self.turns[-1].role == "agent" and self.turns[-1].text == turn.text:
            self.turns.pop()
        if len(self.turns) < FRAMES_MAX:
            self.turns.append(turn)

    def conversation(self) -> tuple[InspectedTurn, ...]:
        view = self.view
        if view.known:
            self._add_turn(answer_text(view.state, view.message, view.artifacts, view.history))
        return tuple(self.turns)


class Inspector:
    """At most `INSPECTIONS_MAX` inspections run at once."""

    def __init__(self, fetcher: Fetcher, limits: OutboundSettings, now_ms: Callable[[], int]) -> None:
        self._fetcher = fetcher
        self._limits = replace(limits, body_bytes_max=min(limits.body_bytes_max, BODY_BYTES_MAX))
        self._now_ms = now_ms
        self._running = 0

    async def inspect(
        self, call: InspectedCall, transport: httpx2.AsyncBaseTransport | None = None, channel: object = None
    ) -> Inspection:
        """`transport` and, over gRPC, `channel` carry the requests in place of the network.

        Raises AddressRefused for an address that may not be called, and Invalid for a request that cannot be encoded.
        """
        if self._running >= INSPECTIONS_MAX:
            raise OverLimit(
                "inspection_limit",
                "too many inspections are under way; try again when one has ended",
                retry_after_ms=RETRY_MS,
            )
        self._running += 1
        recorder, started_s = FrameRecorder(self._now_ms), time.monotonic()
        # Without the network there is no address to check.
        source = self._fetcher if transport is None else self._fetcher.allowing(host_and_port(call.url))
        fetcher = source.observed(recorder, self._limits, transport)
        under_way = _InspectionRun(call, recorder, fetcher, channel)
        try:
            error = await _run(under_way)
        finally:
            self._running -= 1
            await fetcher.close()
        took_ms = int((time.monotonic() - started_s) * 1000)
        # Checking and redacting a few megabytes is slow, and must not hold the loop.
        return await asyncio.to_thread(_inspection_of, under_way, error, took_ms)


async def _run(under_way: _InspectionRun) -> str | None:
    """Why there is no readable answer; None if there is one."""
    try:
        async with asyncio.timeout(INSPECTION_S):
            await under_way.run()
    except TimeoutError:
        under_way.cut = True
        return f"no answer within {INSPECTION_S:g} s"
    except (BadCard, RemoteError) as failed:
        return str(failed)
    except CallFailed as failed:
        under_way.cut = True
        return failed.detail
    return None


def _inspection_of(under_way: _InspectionRun, error: str | None, took_ms: int) -> Inspection:
    call, recorder = under_way.call, under_way.recorder
    FrameChecks(
        FORMS[dialect_of(call.version, call.binding)],
        recorder.frames,
        rpc=call.binding == JSONRPC,
        stream=call.stream and call.method == "send",
        task_alone=call.method in ("get", "cancel"),
    ).run(cut=under_way.cut)
    secrets, card = secrets_in(call.headers), under_way.card
    findings = [
        ConformanceFinding(rule=rule, text=text, frame=at)
        for at, frame in enumerate(recorder.frames)
        for rule, text in frame.findings
    ]
    return Inspection(
        ok=error is None,
        interface=under_way.interface,
        card=card.fields if card is not None else None,
        signature=under_way.signature,
        conversation=under_way.conversation(),
        frames=tuple(_inspected_frame(frame, secrets) for frame in recorder.frames),
        findings=tuple(findings),
        took_ms=took_ms,
        error=error,
        truncated=recorder.full,
    )


def _inspected_frame(frame: RecordedFrame, secrets: tuple[str, ...]) -> InspectedFrame:
    out = frame.direction == "out"
    return InspectedFrame(
        at_ms=frame.at_ms,
        direction=frame.direction,
        what=frame.what,
        text=redact_body(bytes(frame.body), secrets, public=frame.phase != "call"),
        status=frame.status,
        headers=redact_request_headers(frame.headers) if out else redact_answer_headers(frame.headers, secrets),
        findings=tuple(f"{rule}: {text}" for rule, text in frame.findings),
        truncated=frame.cut or len(frame.body) > TEXT_CHARS_MAX,
    )
