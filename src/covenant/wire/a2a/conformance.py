"""What breaks the A2A specification in what an agent answers: its card, one answer, or the events of a stream.

`FORMS` has, for each dialect, the members of every object, as the specification requires them. A finding is named after
the object and the member that it is about (`Task.status`), or after the rule that is broken (`RULES`). What the
specification does not say is not judged: an unknown member is no finding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from covenant.model.agent_card import GRPC, HTTP_JSON, JSONRPC
from covenant.model.task_view import TaskState
from covenant.wire.a2a.dialects import PROTO_V03, V03, V1, Dialect
from covenant.wire.json_input import deeper_than

RULES: Final = {
    "http.content_type": "an answer names its media type: JSON, or text/event-stream for a stream",
    "http.status": "a result comes with a status of success",
    "json": "what is answered is one JSON object",
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
"""Of one answer."""
NESTING_MAX: Final = 100


class BrokenRule(NamedTuple):
    rule: str
    text: str


class Member(NamedTuple):
    """`kind`: the name of an object, or one of the texts below."""

    name: str
    kind: str
    required: bool = False
    many: bool = False


class Form(NamedTuple):
    """One dialect's objects. `members`: what tells answers apart; `by_kind`: by what a member `kind` says."""

    dialect: Dialect
    objects: Mapping[str, tuple[Member, ...]]
    members: Mapping[str, str]
    by_kind: bool = False

    @property
    def version(self) -> str:
        return self.dialect.version.value


def _rows(**said: str) -> dict[str, tuple[Member, ...]]:
    """`name:kind` each; `!` for what is required, `*` for a list."""
    return {owner: tuple(map(_member, text.split())) for owner, text in said.items()}


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
FORMS: Final = {
    V1: Form(V1, _V1, _MEMBERS),
    V03: Form(V03, _V03, _KINDS, by_kind=True),
    PROTO_V03: Form(PROTO_V03, _PROTO_V03, _MEMBERS),
}
_CONTENTS: Final = {V1: ("text", "raw", "url", "data"), PROTO_V03: ("text", "file", "data")}
"""What a part has exactly one of; in the JSON of 0.3 its `kind` names it."""

_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII)


def parse_object(data: bytes) -> dict[str, Any] | None:
    try:
        read = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return read if isinstance(read, dict) and not deeper_than(read, NESTING_MAX) else None


def check_object(form: Form, name: str, said: Any, where: str) -> Iterator[BrokenRule]:
    if not isinstance(said, dict):
        yield BrokenRule(name, f"{where} is no object")
        return
    for member in form.objects[name]:
        yield from _check_member(form, name, member, said, where)
    if name == "Part":
        yield from _check_part(form, said, where)


def _check_member(form: Form, owner: str, member: Member, said: dict[str, Any], where: str) -> Iterator[BrokenRule]:
    rule, place = f"{owner}.{member.name}", f"{where}.{member.name}"
    value = said.get(member.name)
    if value is None or (member.required and value in ("", [])):
        if member.required:
            yield BrokenRule(rule, f"{place} is required{'' if value is None else ' and is empty'}")
    elif not member.many:
        yield from _check_value(form, member.kind, value, rule, place)
    elif isinstance(value, list):
        for at, each in enumerate(value):
            yield from _check_value(form, member.kind, each, rule, f"{place}[{at}]")
    else:
        yield BrokenRule(rule, f"{place} is no list")


def _check_value(form: Form, kind: str, value: Any, rule: str, place: str) -> Iterator[BrokenRule]:
    codec = form.dialect.client
    if kind in form.objects:
        yield from check_object(form, kind, value, place)
    elif kind == "bool":
        if not isinstance(value, bool):
            yield BrokenRule(rule, f"{place} is neither true nor false")
    elif not isinstance(value, str):
        yield BrokenRule(rule, f"{place} is no text")
    elif kind == "state" and codec.states.get(value) is None:
        yield BrokenRule(rule, f"{place}: A2A {form.version} has no state {value[:40]!r}")
    elif kind == "role" and codec.roles.get(value) is None:
        yield BrokenRule(rule, f"{place}: A2A {form.version} has no role {value[:40]!r}")
    elif kind == "time" and not _TIME.fullmatch(value):
        yield BrokenRule(rule, f"{place} is no time of ISO 8601 with its zone")


def _check_part(form: Form, said: dict[str, Any], where: str) -> Iterator[BrokenRule]:
    if form.by_kind:
        kind = said.get("kind")
        if kind not in ("text", "file", "data"):
            yield BrokenRule("Part.kind", f"{where}.kind is none of text, file and data")
        elif kind not in said:
            yield BrokenRule(f"Part.{kind}", f"{where} is a part of kind {kind} without {kind}")
        return
    given = [name for name in _CONTENTS[form.dialect] if name in said]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        yield BrokenRule("Part.content", f"{where} has {found} of {', '.join(_CONTENTS[form.dialect])}, and not one")


class CheckedReply(NamedTuple):
    """What an answer is: the name of its object, and its members. `name` is empty if it is none that is known."""

    name: str
    said: dict[str, Any]
    findings: tuple[BrokenRule, ...]


def check_reply(form: Form, said: dict[str, Any], *, task_alone: bool = False) -> CheckedReply:
    """`task_alone`: the answer to a get or a cancel, which is the task itself."""
    found, where = _reply_in(form, said, task_alone=task_alone)
    if found is None:
        names = " or ".join(form.members)
        return CheckedReply("", {}, (BrokenRule("reply", f"the answer is none of {names}, or several of them"),))
    name, inner = found
    findings = tuple(check_object(form, name, inner, where))[:FINDINGS_MAX]
    return CheckedReply(name, inner if isinstance(inner, dict) else {}, findings)


def _reply_in(form: Form, said: dict[str, Any], *, task_alone: bool) -> tuple[tuple[str, Any] | None, str]:
    if task_alone:
        return ("Task", said), "task"
    if form.by_kind:
        kind = said.get("kind")
        name = form.members.get(kind) if isinstance(kind, str) else None
        return (None if name is None else (name, said)), str(kind)
    given = [member for member in form.members if said.get(member) is not None]
    if len(given) != 1:
        return None, ""
    return (form.members[given[0]], said[given[0]]), given[0]


def check_rpc(said: dict[str, Any], call_id: int) -> Iterator[BrokenRule]:
    """The envelope of JSON-RPC 2.0."""
    if said.get("jsonrpc") != "2.0":
        yield BrokenRule("jsonrpc.envelope", 'the response does not say "jsonrpc": "2.0"')
    if ("result" in said) == (said.get("error") is not None):
        yield BrokenRule("jsonrpc.envelope", "the response has not either a result or an error")
    given = said.get("id")
    # An error may come before the id could be read.
    if (given != call_id or isinstance(given, bool)) and not (given is None and said.get("error") is not None):
        yield BrokenRule("jsonrpc.id", f"the request has the id {call_id}, the response {str(given)[:40]!r}")
    error = said.get("error")
    if error is None:
        return
    if not isinstance(error, dict):
        yield BrokenRule("jsonrpc.error", "the error is no object")
        return
    if not isinstance(error.get("code"), int) or isinstance(error.get("code"), bool):
        yield BrokenRule("jsonrpc.error", "the error's code is no whole number")
    if not isinstance(error.get("message"), str):
        yield BrokenRule("jsonrpc.error", "the error has no message")


def check_rest_error(form: Form, status: int, said: dict[str, Any]) -> Iterator[BrokenRule]:
    if form.dialect is not V1:
        return
    error = said.get("error")
    if not isinstance(error, dict):
        yield BrokenRule("rest.error", "an error of 1.0 is an object under error")
        return
    if error.get("code") != status:
        yield BrokenRule("rest.error", f"error.code is {str(error.get('code'))[:40]}, the status {status}")
    for name in ("status", "message"):
        if not isinstance(error.get(name), str):
            yield BrokenRule("rest.error", f"error.{name} is required")


def check_media_type(said: str, *, stream: bool) -> Iterator[BrokenRule]:
    kind = said.partition(";")[0].strip().lower()
    if stream and kind != "text/event-stream":
        yield BrokenRule("http.content_type", f"the answer to a stream is {kind or 'without a media type'}")
    elif not stream and not kind.endswith(("/json", "+json")):
        yield BrokenRule("http.content_type", f"the answer is {kind or 'without a media type'}, and not JSON")


_STOPPED: Final = frozenset(state for state in TaskState if state.terminal or state.waits)


class StreamCheck:
    """The order of a stream's events."""

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
        task_id = reply.said.get("id" if reply.name == "Task" else "taskId")
        if self._task_id is None:
            self._task_id = task_id
        elif task_id != self._task_id:
            yield BrokenRule("stream.task", f"the event is about task {str(task_id)[:60]!r}")
        status = reply.said.get("status")
        if isinstance(status, dict):
            said = status.get("state")
            state = self._form.dialect.client.states.get(said) if isinstance(said, str) else None
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


def check_card(said: dict[str, Any]) -> tuple[BrokenRule, ...]:
    """As a card of 1.0 if it lists interfaces, else as one of 0.3."""
    if "supportedInterfaces" in said:
        found = list(check_object(_CARD, "AgentCard", said, "card"))
    elif "url" in said:
        found = list(check_object(_CARD_V03, "AgentCard", said, "card"))
    else:
        found = [BrokenRule("card.interfaces", "the card has neither supportedInterfaces (1.0) nor url (0.3)")]
    if "skills" not in said:
        found.append(BrokenRule("AgentCard.skills", "card.skills is required"))
    return tuple(found[:FINDINGS_MAX])


BINDINGS: Final = {"jsonrpc": JSONRPC, "rest": HTTP_JSON, "grpc": GRPC}
"""By what the operator API calls them."""
