"""Checks an agent's card, its answers and the events of its streams against the A2A specification.

`FrameChecks` does so for the frames of one call, as they were on the wire. It passes over a frame that was cut.

`FORMS` has, for each dialect, the members of every object and which of them are required. A finding is named after the
object and member that it is about (`Task.status`), or after the broken rule (`RULES`). An unknown member is no finding,
since the specification does not forbid it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from covenant.model.agent_card import GRPC, HTTP_JSON, JSONRPC
from covenant.model.task_view import TaskState
from covenant.wire.a2a.dialects import PROTO_V03, V03, V1, Dialect
from covenant.wire.json_input import deeper_than

RULES: Final = {
    "http.content_type": "an answer names its media type: JSON, or text/event-stream for a stream",
    "http.status": "a result comes with a status of success",
    "json": "an answer is one JSON object",
    "jsonrpc.envelope": 'a response has "jsonrpc": "2.0" and either a result or an error',
    "jsonrpc.id": "a response repeats the id of its request",
    "jsonrpc.error": "an error has a whole number as its code, and a message",
    "rest.error": "an error of 1.0 over HTTP has the status as its code, a status name and a message",
    "reply": "an answer is one task or one message, and an event of a stream one of those or one update",
    "stream.first": "a stream begins with the task, or is one message",
    "stream.order": "nothing follows a message, or the end of a task",
    "stream.task": "all events of a stream are about one task",
    "stream.end": "a stream ends when its task has ended or waits for its caller",
    "card.interfaces": "a card names at least one interface: where it is, its binding and its version",
}
FINDINGS_MAX: Final = 100
"""The most findings for one answer."""
NESTING_MAX: Final = 100
_MEMBERS: Final = {
    "task": "Task",
    "message": "Message",
    "statusUpdate": "TaskStatusUpdateEvent",
    "artifactUpdate": "TaskArtifactUpdateEvent",
}
_KINDS: Final = {
    "task": "Task",
    "message": "Message",
    "status-update": "TaskStatusUpdateEvent",
    "artifact-update": "TaskArtifactUpdateEvent",
}
_CONTENTS: Final = {V1: ("text", "raw", "url", "data"), PROTO_V03: ("text", "file", "data")}
"""Members of which a part has exactly one. In the JSON of 0.3 the part's `kind` names it."""
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII)
_STOPPED: Final = frozenset(state for state in TaskState if state.terminal or state.waits)
BINDINGS: Final = {"jsonrpc": JSONRPC, "rest": HTTP_JSON, "grpc": GRPC}
"""Bindings by their names in the operator API."""
GRPC_TYPE: Final = "application/grpc"
"""Over gRPC the answer is a frame without a body, and each message after it is a frame."""
CALL_ID: Final = 1
"""The id of the client's JSON-RPC requests: each is alone on its connection."""


class BrokenRule(NamedTuple):
    rule: str
    text: str


class Member(NamedTuple):
    """`kind`: the name of an object, or a type such as `text`, `bool`, `state`, `role` or `time`."""

    name: str
    kind: str
    required: bool = False
    many: bool = False


class Form(NamedTuple):
    """The objects of one dialect. `members` tells answers apart by member name, `by_kind` by the value of `kind`."""

    dialect: Dialect
    objects: Mapping[str, tuple[Member, ...]]
    members: Mapping[str, str]
    by_kind: bool = False

    @property
    def version(self) -> str:
        return self.dialect.version.value


def _rows(**texts: str) -> dict[str, tuple[Member, ...]]:
    """Parses rows of `name:kind` members; `!` marks a required one, `*` a list."""
    return {owner: tuple(map(_member, text.split())) for owner, text in texts.items()}


def _member(text: str) -> Member:
    name, _, kind = text.rstrip("!*").partition(":")
    marks = text[len(text.rstrip("!*")) :]
    return Member(name, kind or "text", required="!" in marks, many="*" in marks)


_V1: Final = _rows(
    Task="id! contextId status:TaskStatus! artifacts:Artifact* history:Message*",
    TaskStatus="state:state! message:Message timestamp:time",
    Message="messageId! role:role! parts:Part!* contextId taskId",
    Artifact="artifactId! parts:Part!*",
    TaskStatusUpdateEvent="taskId! contextId! status:TaskStatus!",
    TaskArtifactUpdateEvent="taskId! contextId! artifact:Artifact! append:bool lastChunk:bool",
    Part="",
)
_V03: Final = _rows(
    Task="id! contextId! kind! status:TaskStatus! artifacts:Artifact* history:Message*",
    TaskStatus="state:state! message:Message timestamp:time",
    Message="messageId! kind! role:role! parts:Part!* contextId taskId",
    Artifact="artifactId! parts:Part!*",
    TaskStatusUpdateEvent="taskId! contextId! kind! status:TaskStatus! final:bool!",
    TaskArtifactUpdateEvent="taskId! contextId! kind! artifact:Artifact! append:bool lastChunk:bool",
    Part="kind!",
)
_PROTO_V03: Final = {
    **_V1,
    **_rows(
        TaskStatus="state:state! message:Message update:Message timestamp:time",
        Message="messageId! role:role! content:Part!* contextId taskId",
    ),
}
FORMS: Final = {
    V1: Form(V1, _V1, _MEMBERS),
    V03: Form(V03, _V03, _KINDS, by_kind=True),
    PROTO_V03: Form(PROTO_V03, _PROTO_V03, _MEMBERS),
}


def parse_object(data: bytes) -> dict[str, Any] | None:
    try:
        read = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return read if isinstance(read, dict) and not deeper_than(read, NESTING_MAX) else None


def check_object(form: Form, name: str, value: Any, where: str) -> Iterator[BrokenRule]:
    if not isinstance(value, dict):
        yield BrokenRule(name, f"{where} is not an object")
        return
    for member in form.objects[name]:
        yield from _check_member(form, name, member, value, where)
    if name == "Part":
        yield from _check_part(form, value, where)


def _check_member(form: Form, owner: str, member: Member, fields: dict[str, Any], where: str) -> Iterator[BrokenRule]:
    rule, path = f"{owner}.{member.name}", f"{where}.{member.name}"
    value = fields.get(member.name)
    if value is None or (member.required and value in ("", [])):
        if member.required:
            yield BrokenRule(rule, f"{path} is required{'' if value is None else ' and is empty'}")
    elif not member.many:
        yield from _check_value(form, member.kind, value, rule, path)
    elif isinstance(value, list):
        for at, each in enumerate(value):
            yield from _check_value(form, member.kind, each, rule, f"{path}[{at}]")
    else:
        yield BrokenRule(rule, f"{path} is not a list")


def _check_value(form: Form, kind: str, value: Any, rule: str, path: str) -> Iterator[BrokenRule]:
    codec = form.dialect.client
    if kind in form.objects:
        yield from check_object(form, kind, value, path)
    elif kind == "bool":
        if not isinstance(value, bool):
            yield BrokenRule(rule, f"{path} is neither true nor false")
    elif not isinstance(value, str):
        yield BrokenRule(rule, f"{path} is not a text")
    elif kind == "state" and codec.states.get(value) is None:
        yield BrokenRule(rule, f"{path}: A2A {form.version} has no state {value[:40]!r}")
    elif kind == "role" and codec.roles.get(value) is None:
        yield BrokenRule(rule, f"{path}: A2A {form.version} has no role {value[:40]!r}")
    elif kind == "time" and not _TIME.fullmatch(value):
        yield BrokenRule(rule, f"{path} is not an ISO 8601 time with a zone")


def _check_part(form: Form, part: dict[str, Any], where: str) -> Iterator[BrokenRule]:
    if form.by_kind:
        kind = part.get("kind")
        if kind not in ("text", "file", "data"):
            yield BrokenRule("Part.kind", f"{where}.kind is not one of text, file and data")
        elif kind not in part:
            yield BrokenRule(f"Part.{kind}", f"{where} is a part of kind {kind} without {kind}")
        return
    present = [name for name in _CONTENTS[form.dialect] if name in part]
    if len(present) != 1:
        found = " and ".join(present) or "none"
        yield BrokenRule("Part.content", f"{where} has {found} of {', '.join(_CONTENTS[form.dialect])}, and not one")


class CheckedReply(NamedTuple):
    """A decoded answer: the name of its object and its members. `name` is empty if the object is unknown."""

    name: str
    body: dict[str, Any]
    findings: tuple[BrokenRule, ...]


def check_reply(form: Form, body: dict[str, Any], *, task_alone: bool = False) -> CheckedReply:
    """Checks an answer. `task_alone`: it answers a get or a cancel, and is the task itself."""
    found, where = _reply_in(form, body, task_alone=task_alone)
    if found is None:
        names = " or ".join(form.members)
        return CheckedReply("", {}, (BrokenRule("reply", f"the answer is none of {names}, or several of them"),))
    name, inner = found
    findings = tuple(check_object(form, name, inner, where))[:FINDINGS_MAX]
    return CheckedReply(name, inner if isinstance(inner, dict) else {}, findings)


def _reply_in(form: Form, body: dict[str, Any], *, task_alone: bool) -> tuple[tuple[str, Any] | None, str]:
    if task_alone:
        return ("Task", body), "task"
    if form.by_kind:
        kind = body.get("kind")
        name = form.members.get(kind) if isinstance(kind, str) else None
        return (None if name is None else (name, body)), str(kind)
    present = [member for member in form.members if body.get(member) is not None]
    if len(present) != 1:
        return None, ""
    return (form.members[present[0]], body[present[0]]), present[0]


def check_rpc(body: dict[str, Any], call_id: int) -> Iterator[BrokenRule]:
    """Checks the envelope of a JSON-RPC 2.0 response."""
    if body.get("jsonrpc") != "2.0":
        yield BrokenRule("jsonrpc.envelope", 'the response does not say "jsonrpc": "2.0"')
    if ("result" in body) == (body.get("error") is not None):
        yield BrokenRule("jsonrpc.envelope", "the response must have either a result or an error")
    found_id = body.get("id")
    # The server may fail before it has read the request's id.
    if (found_id != call_id or isinstance(found_id, bool)) and not (found_id is None and body.get("error") is not None):
        has = f"the id {msgspec.json.encode(found_id).decode()[:40]}" if "id" in body else "no id"
        yield BrokenRule("jsonrpc.id", f"the response has {has}; its request had the id {call_id}")
    error = body.get("error")
    if error is None:
        return
    if not isinstance(error, dict):
        yield BrokenRule("jsonrpc.error", "the error is not an object")
        return
    if not isinstance(error.get("code"), int) or isinstance(error.get("code"), bool):
        yield BrokenRule("jsonrpc.error", "the error's code is not a whole number")
    if not isinstance(error.get("message"), str):
        yield BrokenRule("jsonrpc.error", "the error has no message")


def check_rest_error(form: Form, status: int, body: dict[str, Any]) -> Iterator[BrokenRule]:
    if form.dialect is not V1:
        return
    error = body.get("error")
    if not isinstance(error, dict):
        yield BrokenRule("rest.error", "an error of 1.0 is an object under error")
        return
    if error.get("code") != status:
        yield BrokenRule("rest.error", f"error.code is {str(error.get('code'))[:40]}, the status {status}")
    for name in ("status", "message"):
        if not isinstance(error.get(name), str):
            yield BrokenRule("rest.error", f"error.{name} is required")


def check_media_type(content_type: str, *, stream: bool) -> Iterator[BrokenRule]:
    kind = content_type.partition(";")[0].strip().lower()
    if stream and kind != "text/event-stream":
        yield BrokenRule("http.content_type", f"the answer to a stream is {kind or 'without a media type'}")
    elif not stream and not kind.endswith(("/json", "+json")):
        yield BrokenRule("http.content_type", f"the answer is {kind or 'without a media type'}, and not JSON")


class StreamCheck:
    """Checks the order of a stream's events."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._seen = 0
        self._task_id: Any = None
        self._over = ""
        self._stopped = False

    def take(self, reply: CheckedReply) -> Iterator[BrokenRule]:
        self._seen += 1
        if self._over:
            yield BrokenRule("stream.order", f"this event comes after {self._over}")
        if self._seen == 1 and not self._form.by_kind and reply.name not in ("Task", "Message", ""):
            yield BrokenRule("stream.first", f"the stream begins with {reply.name}")
        if reply.name == "Message":
            self._over = "the message that answers"
            return
        task_id = reply.body.get("id" if reply.name == "Task" else "taskId")
        if self._task_id is None:
            self._task_id = task_id
        elif task_id != self._task_id:
            yield BrokenRule("stream.task", f"the event is about task {str(task_id)[:60]!r}")
        status = reply.body.get("status")
        if isinstance(status, dict):
            name = status.get("state")
            state = self._form.dialect.client.states.get(name) if isinstance(name, str) else None
            self._stopped = state in _STOPPED
            if state is not None and state.terminal:
                self._over = "the task has ended"

    def end(self) -> Iterator[BrokenRule]:
        if not self._seen:
            yield BrokenRule("stream.first", "the stream ended before it said anything")
        elif not self._over and not self._stopped:
            yield BrokenRule("stream.end", "the stream ended, and the task neither has ended nor waits for its caller")


_CARD: Final = Form(
    V1,
    _rows(
        AgentCard="name! description! version! supportedInterfaces:AgentInterface!* capabilities:AgentCapabilities! "
        "defaultInputModes!* defaultOutputModes!* skills:AgentSkill* provider:AgentProvider "
        "signatures:AgentCardSignature*",
        AgentInterface="url! protocolBinding! protocolVersion! tenant",
        AgentCapabilities="streaming:bool pushNotifications:bool extendedAgentCard:bool",
        AgentSkill="id! name! description! tags!*",
        AgentProvider="organization! url!",
        AgentCardSignature="protected! signature!",
    ),
    {},
)
_CARD_V03: Final = _CARD._replace(
    objects={
        **_CARD.objects,
        **_rows(
            AgentCard="name! description! version! protocolVersion! url! preferredTransport "
            "capabilities:AgentCapabilities! defaultInputModes!* defaultOutputModes!* skills:AgentSkill* "
            "provider:AgentProvider additionalInterfaces:AgentInterface* signatures:AgentCardSignature*",
            AgentInterface="url! transport!",
        ),
    },
)


def check_card(card: dict[str, Any]) -> tuple[BrokenRule, ...]:
    """Checks a card as one of 1.0 if it lists interfaces, otherwise as one of 0.3."""
    if "supportedInterfaces" in card:
        found = list(check_object(_CARD, "AgentCard", card, "card"))
    elif "url" in card:
        found = list(check_object(_CARD_V03, "AgentCard", card, "card"))
    else:
        found = [BrokenRule("card.interfaces", "the card has neither supportedInterfaces (1.0) nor url (0.3)")]
    if "skills" not in card:
        found.append(BrokenRule("AgentCard.skills", "card.skills is required"))
    return tuple(found[:FINDINGS_MAX])


Phase = Literal["card", "keys", "call"]
"""The part of the call that a frame belongs to: the look-up of the card, of the keys that signed it, or the request."""
_NO_JSON: Final = BrokenRule("json", "the answer is no JSON object")


class RecordedFrame:
    """A frame as it was on the wire. `event`: it is an event of a stream."""

    __slots__ = ("at_ms", "body", "cut", "direction", "event", "findings", "headers", "phase", "status", "what")

    def __init__(self, at_ms: int, direction: Literal["in", "out"], what: str, *, phase: Phase, event: bool) -> None:
        self.at_ms, self.direction, self.what = at_ms, direction, what
        self.phase, self.event = phase, event
        self.status: int | None = None
        self.headers: Mapping[str, str] = {}
        self.body = bytearray()
        self.cut = False
        self.findings: list[BrokenRule] = []


def media_type(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


class FrameChecks:
    """Finds breaches of the specification in the frames of one call. Findings are noted at their frames."""

    def __init__(self, form: Form, frames: list[RecordedFrame], *, rpc: bool, stream: bool, task_alone: bool) -> None:
        """`stream`: one was asked for. `task_alone`: the answer is a task, as that of a get or a cancel."""
        self._form = form
        self._frames = frames
        self._rpc, self._streams, self._task_alone = rpc, stream, task_alone
        self._stream = StreamCheck(form)

    def run(self, *, cut: bool) -> None:
        cards = [frame for frame in self._frames if frame.phase == "card" and succeeded(frame)]
        for frame in cards[-1:]:
            self._card(frame)
        answers = [frame for frame in self._frames if frame.direction == "in" and frame.phase == "call"]
        for frame in answers:
            # The target of a redirect is shown; its body is not an answer.
            if not 300 <= (frame.status or 200) < 400 and not frame.cut:
                self._answer(frame)
        streams = [frame for frame in answers if frame.what == "stream"]
        if streams and not cut:
            streams[-1].findings += self._stream.end()

    def _card(self, frame: RecordedFrame) -> None:
        frame.findings += check_media_type(media_type(frame.headers), stream=False)
        body = parse_object(bytes(frame.body))
        frame.findings += [_NO_JSON] if body is None else check_card(body)

    def _answer(self, frame: RecordedFrame) -> None:
        if frame.what == "stream":
            if not self._streams:
                frame.findings += [BrokenRule("http.content_type", "a stream answers a request that asked for none")]
            return
        body = parse_object(bytes(frame.body))
        if not frame.event:
            frame.findings += self._head(frame, body)
        if body is None:
            if (frame.event or succeeded(frame)) and media_type(frame.headers) != GRPC_TYPE:
                frame.findings.append(_NO_JSON)
            return
        failed = not frame.event and not succeeded(frame)
        if self._rpc:
            frame.findings += check_rpc(body, CALL_ID)
            result = body.get("result")
            if body.get("error") is not None or result is None:
                return
            if failed:
                frame.findings.append(BrokenRule("http.status", f"a result comes with HTTP {frame.status}"))
            body = result if isinstance(result, dict) else {}
        elif failed:
            frame.findings += check_rest_error(self._form, frame.status or 0, body)
            return
        reply = check_reply(self._form, body, task_alone=self._task_alone)
        frame.findings += reply.findings
        if frame.event and self._streams:
            frame.findings += self._stream.take(reply)

    def _head(self, frame: RecordedFrame, body: Mapping[str, Any] | None) -> list[BrokenRule]:
        # A refusal may come as JSON where a stream was asked for.
        refused = body is not None and body.get("error") is not None
        if (not succeeded(frame) and body is None) or media_type(frame.headers) == GRPC_TYPE:
            return []
        streams = self._streams and succeeded(frame) and not refused
        return list(check_media_type(media_type(frame.headers), stream=streams))


def succeeded(frame: RecordedFrame) -> bool:
    return frame.direction == "in" and 200 <= (frame.status or 0) < 300
