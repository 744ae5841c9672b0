"""What a client was told, in one form for every binding and dialect, so that answers can be compared.

Reading is strict: an answer that the official types would not take fails the test that got it, whatever it is about.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from a2a.compat.v0_3 import types as v03
from a2a.types import a2a_pb2 as v1
from google.protobuf import json_format
from google.protobuf.message import Message

from tests.conformance.a2a.required import missing

TERMINAL: Final = frozenset({"completed", "failed", "canceled", "rejected"})
WAITING: Final = frozenset({"input-required", "auth-required"})


class Part(NamedTuple):
    """`kind` is text, raw, url or data; `value` the text, the bytes, the address, or any JSON."""

    kind: str
    value: Any
    media_type: str | None = None
    filename: str | None = None
    metadata: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Said:
    """A message."""

    message_id: str
    role: str
    parts: tuple[Part, ...]
    context_id: str | None = None
    task_id: str | None = None
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] = ()
    references: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return "".join(part.value for part in self.parts if part.kind == "text")


@dataclass(frozen=True, kw_only=True)
class Made:
    """An artifact, or a chunk of one."""

    id: str
    parts: tuple[Part, ...]
    name: str | None = None
    description: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return "".join(part.value for part in self.parts if part.kind == "text")


@dataclass(frozen=True, kw_only=True)
class Told:
    """A task. None where something was not there at all."""

    id: str
    context_id: str
    state: str
    timestamp: str
    message: Said | None = None
    artifacts: tuple[Made, ...] | None = None
    history: tuple[Said, ...] | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """What its artifacts say in words."""
        return "".join(made.text for made in self.artifacts or ())

    @property
    def generation(self) -> int:
        found = self.notes["covenant.generation"]
        return int(found)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One event of a stream: `kind` is task, message, status or artifact, and what belongs to it is there."""

    number: int
    kind: str
    task: Told | None = None
    message: Said | None = None
    state: str | None = None
    made: Made | None = None
    append: bool = False
    last: bool = False
    final: bool | None = None
    """Only one dialect has it."""

    @property
    def ends(self) -> bool:
        return self.state in TERMINAL


@dataclass(frozen=True, kw_only=True)
class Page:
    tasks: tuple[Told, ...]
    next: str
    size: int
    total: int


def folded(frames: Sequence[Frame]) -> tuple[str, dict[str, str]]:
    """The state, and what each artifact says, as a client that reads these frames puts them together."""
    state, made = "", dict[str, str]()
    for frame in frames:
        match frame:
            case Frame(kind="task", task=Told() as task):
                state = task.state
                made |= {each.id: each.text for each in task.artifacts or ()}
            case Frame(kind="status", state=str() as now):
                state = now
            case Frame(kind="artifact", made=Made() as chunk):
                made[chunk.id] = (made.get(chunk.id, "") if frame.append else "") + chunk.text
            case _:
                pass
    return state, made


def known(task: Told) -> tuple[str, dict[str, str]]:
    """The same of a task that was read."""
    return task.state, {each.id: each.text for each in task.artifacts or ()}


# A2A 1.0


def _strictly(body: dict[str, Any], kind: type[Message]) -> None:
    """The official types read it, know every name in it, and would write the same; nothing required is missing."""
    assert not (owed := [*missing(kind.DESCRIPTOR, body)]), (owed, body)
    read = json_format.ParseDict(body, kind())
    # It leaves out the milliseconds of a full second.
    whole = json.loads(json.dumps(body).replace('.000Z"', 'Z"'))
    again = json.loads(json.dumps(json_format.MessageToDict(read)).replace('.000Z"', 'Z"'))
    assert {**again, **_defaults(whole)} == whole, (again, whole)


def _defaults(body: dict[str, Any]) -> dict[str, Any]:
    """What the official writer leaves out, since it is nothing."""
    return {name: value for name, value in body.items() if value in ("", [], 0)}


def _part1(part: dict[str, Any]) -> Part:
    (kind,) = part.keys() & {"text", "raw", "url", "data"}
    value = base64.b64decode(part["raw"], validate=True) if kind == "raw" else part[kind]
    return Part(kind, value, part.get("mediaType"), part.get("filename"), part.get("metadata"))


def _said1(message: dict[str, Any]) -> Said:
    return Said(
        message_id=message["messageId"],
        role={"ROLE_USER": "user", "ROLE_AGENT": "agent"}[message["role"]],
        parts=tuple(map(_part1, message["parts"])),
        context_id=message.get("contextId"),
        task_id=message.get("taskId"),
        metadata=message.get("metadata"),
        extensions=tuple(message.get("extensions", ())),
        references=tuple(message.get("referenceTaskIds", ())),
    )


def _made1(artifact: dict[str, Any]) -> Made:
    return Made(
        id=artifact["artifactId"],
        parts=tuple(map(_part1, artifact["parts"])),
        name=artifact.get("name"),
        description=artifact.get("description"),
        metadata=artifact.get("metadata"),
    )


def _state1(state: str) -> str:
    assert state.startswith("TASK_STATE_"), state
    return state.removeprefix("TASK_STATE_").lower().replace("_", "-")


def _task1(task: dict[str, Any]) -> Told:
    status = task["status"]
    artifacts, history, message = task.get("artifacts"), task.get("history"), status.get("message")
    return Told(
        id=task["id"],
        context_id=task["contextId"],
        state=_state1(status["state"]),
        timestamp=status["timestamp"],
        message=None if message is None else _said1(message),
        artifacts=None if artifacts is None else tuple(map(_made1, artifacts)),
        history=None if history is None else tuple(map(_said1, history)),
        notes=task.get("metadata", {}),
    )


def task_v1(body: dict[str, Any]) -> Told:
    _strictly(body, v1.Task)
    return _task1(body)


def sent_v1(body: dict[str, Any]) -> Told | Said:
    _strictly(body, v1.SendMessageResponse)
    ((kind, inner),) = body.items()
    return _task1(inner) if kind == "task" else _said1(inner)


def page_v1(body: dict[str, Any]) -> Page:
    for task in body["tasks"]:
        _strictly({name: value for name, value in task.items() if name != "artifacts" or value}, v1.Task)
    tasks = tuple(map(_task1, body["tasks"]))
    return Page(tasks=tasks, next=body["nextPageToken"], size=body["pageSize"], total=body["totalSize"])


def frame_v1(number: int, body: dict[str, Any]) -> Frame:
    _strictly(body, v1.StreamResponse)
    ((kind, inner),) = body.items()
    if kind == "task":
        return Frame(number=number, kind="task", task=_task1(inner))
    if kind == "message":
        return Frame(number=number, kind="message", message=_said1(inner))
    if kind == "statusUpdate":
        message = inner["status"].get("message")
        said = None if message is None else _said1(message)
        return Frame(number=number, kind="status", state=_state1(inner["status"]["state"]), message=said)
    assert kind == "artifactUpdate", kind
    return Frame(
        number=number,
        kind="artifact",
        made=_made1(inner["artifact"]),
        append=inner.get("append", False),
        last=inner.get("lastChunk", False),
    )


# The slash methods


def _part03(part: dict[str, Any]) -> Part:
    noted = dict(part.get("metadata") or {})
    media_type, filename = noted.pop("covenant.media_type", None), noted.pop("covenant.filename", None)
    match part["kind"]:
        case "text":
            return Part("text", part["text"], media_type, filename, noted or None)
        case "data":
            wrapped = noted.pop("data_part_compat", False)
            value = part["data"]["value"] if wrapped else part["data"]
            return Part("data", value, media_type, filename, noted or None)
        case "file":
            file = part["file"]
            about = (file.get("mimeType"), file.get("name"), noted or None)
            if "bytes" in file:
                return Part("raw", base64.b64decode(file["bytes"], validate=True), *about)
            return Part("url", file["uri"], *about)
        case _:
            raise AssertionError(part)


def _said03(message: dict[str, Any]) -> Said:
    assert message["kind"] == "message"
    assert message["role"] in ("user", "agent")
    return Said(
        message_id=message["messageId"],
        role=message["role"],
        parts=tuple(map(_part03, message["parts"])),
        context_id=message.get("contextId"),
        task_id=message.get("taskId"),
        metadata=message.get("metadata"),
        extensions=tuple(message.get("extensions", ())),
        references=tuple(message.get("referenceTaskIds", ())),
    )


def _made03(artifact: dict[str, Any]) -> Made:
    return Made(
        id=artifact["artifactId"],
        parts=tuple(map(_part03, artifact["parts"])),
        name=artifact.get("name"),
        description=artifact.get("description"),
        metadata=artifact.get("metadata"),
    )


def task_v03(body: dict[str, Any]) -> Told:
    assert body["kind"] == "task"
    v03.Task.model_validate(body)
    status = body["status"]
    artifacts, history, message = body.get("artifacts"), body.get("history"), status.get("message")
    return Told(
        id=body["id"],
        context_id=body["contextId"],
        state=status["state"],
        timestamp=status["timestamp"],
        message=None if message is None else _said03(message),
        artifacts=None if artifacts is None else tuple(map(_made03, artifacts)),
        history=None if history is None else tuple(map(_said03, history)),
        notes=body.get("metadata", {}),
    )


def sent_v03(body: dict[str, Any]) -> Told | Said:
    if body["kind"] == "task":
        return task_v03(body)
    v03.Message.model_validate(body)
    return _said03(body)


def page_v03(body: dict[str, Any]) -> Page:
    tasks = tuple(map(task_v03, body["tasks"]))
    return Page(tasks=tasks, next=body["nextPageToken"], size=body["pageSize"], total=body["totalSize"])


def frame_v03(number: int, body: dict[str, Any]) -> Frame:
    match body["kind"]:
        case "task":
            return Frame(number=number, kind="task", task=task_v03(body))
        case "message":
            return Frame(number=number, kind="message", message=_said03(body))
        case "status-update":
            v03.TaskStatusUpdateEvent.model_validate(body)
            status = body["status"]
            said = _said03(status["message"]) if "message" in status else None
            return Frame(number=number, kind="status", state=status["state"], message=said, final=body["final"])
        case "artifact-update":
            v03.TaskArtifactUpdateEvent.model_validate(body)
            return Frame(
                number=number,
                kind="artifact",
                made=_made03(body["artifact"]),
                append=body["append"],
                last=body["lastChunk"],
            )
        case _:
            raise AssertionError(body)
