"""The frames of a call as they were on the wire, and what breaks the A2A specification in each of them.

A recorder keeps as much as may be kept: the frames and their bytes are bounded. Checks run on what was kept, and pass
over a frame that was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from covenant.outbound.remote.a2a_transport import EVENT_BYTES_MAX
from covenant.wire.a2a import conformance
from covenant.wire.a2a.conformance import BrokenRule, Form
from covenant.wire.sse import EventReader

FRAMES_MAX: Final = 200
FRAME_BYTES_MAX: Final = 2 * 1024 * 1024
"""Of all frames together."""
Phase = Literal["card", "keys", "call"]
"""What a frame is part of: the look-up of the card, that of the keys that it is signed with, or the call."""
GRPC_TYPE: Final = "application/grpc"
"""The answer over gRPC is a frame without a body, and each message that follows one of its own."""
CALL_ID: Final = 1
"""What the client's requests of JSON-RPC are numbered with: each is alone on its connection."""


class RecordedFrame:
    """As it was on the wire. `event`: of a stream."""

    __slots__ = ("at_ms", "body", "cut", "direction", "event", "findings", "headers", "of", "status", "what")

    def __init__(self, at_ms: int, direction: Literal["in", "out"], what: str, *, of: Phase, event: bool) -> None:
        self.at_ms, self.direction, self.what = at_ms, direction, what
        self.of, self.event = of, event
        self.status: int | None = None
        self.headers: Mapping[str, str] = {}
        self.body = bytearray()
        self.cut = False
        self.findings: list[BrokenRule] = []


class FrameRecorder:
    """Hears every request and answer, and keeps as much as may be kept."""

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
        place = urlsplit(url)
        frame = self.add("out", f"{method} {place.path}")
        frame.headers = {"host": place.netloc, **headers}
        self.keep(frame, content)
        return _Answer(self)

    def add(self, direction: Literal["in", "out"], what: str, *, event: bool = False) -> RecordedFrame:
        frame = RecordedFrame(self._now_ms(), direction, what, of=self.phase, event=event)
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
        if status == 200 and _media_type(headers) == "text/event-stream":
            frame.what = "stream"
            self._reader = EventReader(EVENT_BYTES_MAX)
        elif _media_type(headers) == GRPC_TYPE:
            self._messages = True
            refused = headers.get("grpc-status")
            frame.what = f"refused: {refused}" if refused else "stream" if self._recorder.streams else "answer"

    def heard(self, piece: bytes) -> None:
        if self._reader is not None:
            for event in self._reader.feed(piece):
                self._recorder.keep(self._recorder.add("in", "event", event=True), event.data)
        elif self._messages:
            self._recorder.keep(self._recorder.add("in", "message", event=True), piece)
        elif self._frame is not None:
            self._recorder.keep(self._frame, piece)

    def ended(self) -> None:
        """What was heard is shown as it is."""


def _media_type(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


_NO_JSON: Final = BrokenRule("json", "the answer is no JSON object")


class FrameChecks:
    """What breaks the specification in the frames of one call. Findings are noted at their frames."""

    def __init__(self, form: Form, frames: list[RecordedFrame], *, rpc: bool, stream: bool, task_alone: bool) -> None:
        """`stream`: one was asked for. `task_alone`: the answer is a task, as that of a get or a cancel."""
        self._form = form
        self._frames = frames
        self._rpc, self._streams, self._task_alone = rpc, stream, task_alone
        self._stream = conformance.StreamCheck(form)

    def run(self, *, cut: bool) -> None:
        cards = [frame for frame in self._frames if frame.of == "card" and succeeded(frame)]
        for frame in cards[-1:]:
            self._card(frame)
        answers = [frame for frame in self._frames if frame.direction == "in" and frame.of == "call"]
        for frame in answers:
            # Where a redirect leads to is shown, and its body is nobody's answer.
            if not 300 <= (frame.status or 200) < 400 and not frame.cut:
                self._answer(frame)
        streams = [frame for frame in answers if frame.what == "stream"]
        if streams and not cut:
            streams[-1].findings += self._stream.end()

    def _card(self, frame: RecordedFrame) -> None:
        frame.findings += conformance.check_media_type(_media_type(frame.headers), stream=False)
        said = conformance.parse_object(bytes(frame.body))
        frame.findings += [_NO_JSON] if said is None else conformance.check_card(said)

    def _answer(self, frame: RecordedFrame) -> None:
        if frame.what == "stream":
            if not self._streams:
                frame.findings += [BrokenRule("http.content_type", "a stream answers a request that asked for none")]
            return
        said = conformance.parse_object(bytes(frame.body))
        if not frame.event:
            frame.findings += self._head(frame, said)
        if said is None:
            if (frame.event or succeeded(frame)) and _media_type(frame.headers) != GRPC_TYPE:
                frame.findings.append(_NO_JSON)
            return
        failed = not frame.event and not succeeded(frame)
        if self._rpc:
            frame.findings += conformance.check_rpc(said, CALL_ID)
            result = said.get("result")
            if said.get("error") is not None or result is None:
                return
            if failed:
                frame.findings.append(BrokenRule("http.status", f"a result comes with HTTP {frame.status}"))
            said = result if isinstance(result, dict) else {}
        elif failed:
            frame.findings += conformance.check_rest_error(self._form, frame.status or 0, said)
            return
        reply = conformance.check_reply(self._form, said, task_alone=self._task_alone)
        frame.findings += reply.findings
        if frame.event and self._streams:
            frame.findings += self._stream.take(reply)

    def _head(self, frame: RecordedFrame, said: Mapping[str, Any] | None) -> list[BrokenRule]:
        # A refusal may come as JSON where a stream was asked for.
        refused = said is not None and said.get("error") is not None
        if (not succeeded(frame) and said is None) or _media_type(frame.headers) == GRPC_TYPE:
            return []
        streams = self._streams and succeeded(frame) and not refused
        return list(conformance.check_media_type(_media_type(frame.headers), stream=streams))


def succeeded(frame: RecordedFrame) -> bool:
    return frame.direction == "in" and 200 <= (frame.status or 0) < 300
