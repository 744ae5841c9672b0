"""The conversation of a delegation, as its proof covers it: from the steps of the provider's task to lines.

`user` is what was asked, `assistant` what the agent said and made, `tool` what it used. Chunks of an artifact are one
line, at the place of its first. What is not text is told by its kind and the hash of its bytes: the bytes are in the
result. Bounded in lines and in characters; where lines were left out, the last one says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from covenant.exchange.tasks.builder import media_type_of
from covenant.model.content import Content, Json, Text
from covenant.model.peers.delegation_messages import TRANSCRIPT_MAX, TranscriptEntry
from covenant.model.task_view import final_message, first_message
from covenant.model.task_event import Began, Continued, Ended, Step
from covenant.model.task_event import ArtifactUpdate, MessageUpdate, StatusUpdate

CHARS_MAX: Final = 4_000_000
"""Of all lines together."""
LINES_MAX: Final = TRANSCRIPT_MAX - 1
TOOLS: Final = frozenset({"tool_call", "sub_agent_response"})
"""By these names agents tell which tools they used, and what other agents answered."""

Role = Literal["user", "assistant", "tool"]

_encode = msgspec.json.Encoder(order="deterministic").encode


class _Line:
    __slots__ = ("at_ms", "kept", "pieces", "role")

    def __init__(self, role: Role, at_ms: int, *, kept: bool) -> None:
        self.role = role
        self.at_ms = at_ms
        self.kept = kept
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Transcriber:
    """Takes steps one by one, in order; what it keeps is bounded."""

    def __init__(self) -> None:
        self._lines: list[_Line] = []
        self._artifacts: dict[str, _Line] = {}
        self._characters = 0
        self._left_out = 0

    def add(self, step: Step) -> None:
        match step.what:
            case Began(task):
                self._say("user", first_message(task), step.ts_ms)
            case Continued(message):
                self._say("user", message, step.ts_ms)
            case StatusUpdate() as status:
                self._write(self._new("assistant", step.ts_ms), _told(status.parts) or status.text)
            case MessageUpdate() as message:
                self._say("user" if message.role == "user" else "assistant", message, step.ts_ms)
            case ArtifactUpdate() as update:
                self._make(update, step.ts_ms)
            case Ended(ending, result):
                last = final_message(result, ending)
                if last is not None and all(line.text != _told(last.parts) for line in self._artifacts.values()):
                    self._say("assistant", last, step.ts_ms)
            case _:
                pass

    def entries(self, salt: Callable[[int], str]) -> tuple[TranscriptEntry, ...]:
        """`salt` gives that of a line by its number."""
        said = [line for line in self._lines if line.pieces]
        made = [_entry(seq, line, salt(seq)) for seq, line in enumerate(said, 1)]
        if self._left_out:
            seq = len(made) + 1
            told = f"{self._left_out} more were left out"
            at_ms = made[-1].at_ms if made else 0
            made.append(TranscriptEntry(seq=seq, role="system", content=told, at_ms=at_ms, salt=salt(seq)))
        return tuple(made)

    def _say(self, role: Role, message: MessageUpdate, at_ms: int) -> None:
        self._write(self._new(role, at_ms), _told(message.parts))

    def _make(self, update: ArtifactUpdate, at_ms: int) -> None:
        line = self._artifacts.get(update.artifact_id)
        if line is None:
            role: Role = "tool" if update.name in TOOLS else "assistant"
            self._artifacts[update.artifact_id] = line = self._new(role, at_ms)
        elif not update.append:
            self._characters -= sum(map(len, line.pieces))
            line.pieces.clear()
        self._write(line, _told(update.parts, joined=""))

    def _new(self, role: Role, at_ms: int) -> _Line:
        line = _Line(role, at_ms, kept=len(self._lines) < LINES_MAX)
        if line.kept:
            self._lines.append(line)
        return line

    def _write(self, line: _Line, text: str) -> None:
        if not text:
            return
        if not line.kept or self._characters + len(text) > CHARS_MAX:
            # With all of its line: the first half of a secret would not be known as one.
            self._characters -= sum(map(len, line.pieces))
            line.pieces.clear()
            line.kept = False
            self._left_out += 1
            return
        self._characters += len(text)
        line.pieces.append(text)


def _entry(seq: int, line: _Line, salt: str) -> TranscriptEntry:
    if line.role == "tool":
        return TranscriptEntry(seq=seq, role="tool", content="", tool_result=line.text, at_ms=line.at_ms, salt=salt)
    return TranscriptEntry(seq=seq, role=line.role, content=line.text, at_ms=line.at_ms, salt=salt)


def _told(parts: tuple[Content, ...], joined: str = "\n") -> str:
    return joined.join(map(_part, parts))


def _part(part: Content) -> str:
    if isinstance(part, Text):
        return part.text
    if isinstance(part, Json):
        return _encode(part.value).decode()
    encoded = _encode(part)
    return _encode(
        {"type": media_type_of(part), "bytes": len(encoded), "sha256": hashlib.sha256(encoded).hexdigest()}
    ).decode()
