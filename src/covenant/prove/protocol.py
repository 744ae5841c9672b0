"""A2A as bytes: 1.0 and 0.3, JSON-RPC and REST. Builds requests and reads answers.

Answers are read leniently (servers differ in what they leave out) and become `TaskSeen` and `EventSeen`, which are the
same for every version and binding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

Version = Literal["1.0", "0.3"]
Binding = Literal["JSONRPC", "HTTP+JSON"]

TERMINAL: Final = frozenset({"completed", "failed", "canceled", "rejected"})
WAITING: Final = frozenset({"input-required", "auth-required"})


class Operation(NamedTuple):
    """The names of one operation. A version in which it has no name does not offer it."""

    rpc: str
    rpc_03: str | None
    verb: str
    path: str


OPERATIONS: Final = {
    "send": Operation("SendMessage", "message/send", "POST", "/message:send"),
    "stream": Operation("SendStreamingMessage", "message/stream", "POST", "/message:stream"),
    "get": Operation("GetTask", "tasks/get", "GET", "/tasks/{id}"),
    "cancel": Operation("CancelTask", "tasks/cancel", "POST", "/tasks/{id}:cancel"),
    "subscribe": Operation("SubscribeToTask", "tasks/resubscribe", "GET", "/tasks/{id}:subscribe"),
    "list": Operation("ListTasks", None, "GET", "/tasks"),
}


class Interface(msgspec.Struct, frozen=True):
    """One version and binding of an agent, as its card offers it."""

    url: str
    version: Version
    binding: Binding

    def __str__(self) -> str:
        return f"A2A {self.version} over {self.binding}"


class TaskSeen(msgspec.Struct, frozen=True):
    id: str
    context_id: str
    state: str
    stamp: str
    """The time of the state, as the server wrote it."""
    artifacts: dict[str, str]
    """The text of each artifact by its id, in the server's order."""
    raw: dict[str, Any]

    @property
    def text(self) -> str:
        return "".join(self.artifacts.values())

    @property
    def state_text(self) -> str:
        """The state, and the message that the server shows with it."""
        status = _object("a status", self.raw.get("status") or {})
        text = read_text(_object("the message of a status", status.get("message") or {}).get("parts"))
        return f"{self.state!r}, and says {text!r}" if text else f"{self.state!r}"

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL

    def says(self, text: str) -> bool:
        """Whether the task contains this text anywhere: some servers keep answers in the history alone."""
        return text in msgspec.json.encode(self.raw).decode()


class EventSeen(msgspec.Struct, frozen=True):
    kind: Literal["task", "message", "status", "artifact", "error"]
    number: str = ""
    """The id of the server-sent event, if it has one."""
    state: str = ""
    task_id: str = ""
    artifact_id: str = ""
    text: str = ""
    append: bool = False
    task: TaskSeen | None = None


class ServerRefused(Exception):
    def __init__(self, code: int, answer: str) -> None:
        super().__init__(f"{code} {answer}"[:300])
        self.code = code


class Unreadable(Exception):
    """The server's answer is not A2A."""

    def __init__(self, what: str, answer: object) -> None:
        super().__init__(f"{what} cannot be read: {answer!r}"[:300])


class Outgoing(NamedTuple):
    verb: str
    url: str
    body: bytes | None
    headers: dict[str, str]
    query: dict[str, str]


# --- requests


def build_message(
    version: Version, binding: Binding, message_id: str, text: str, task: TaskSeen | None
) -> dict[str, Any]:
    message: dict[str, Any] = {"messageId": message_id}
    if version == "1.0":
        message |= {"role": "ROLE_USER", "parts": [{"text": text}]}
    elif binding == "HTTP+JSON":
        message |= {"role": "ROLE_USER", "content": [{"text": text}]}
    else:
        message |= {"kind": "message", "role": "user", "parts": [{"kind": "text", "text": text}]}
    if task is not None:
        message |= {"taskId": task.id, "contextId": task.context_id}
    return message


def build_configuration(version: Version, *, waits: bool, push: dict[str, str] | None) -> dict[str, Any]:
    made: dict[str, Any] = {"returnImmediately": not waits} if version == "1.0" else {"blocking": waits}
    if push is not None:
        made["taskPushNotificationConfig" if version == "1.0" else "pushNotificationConfig"] = push
    return made


def build_request(
    interface: Interface, name: str, params: dict[str, Any], headers: Mapping[str, str], number: int
) -> Outgoing:
    """`params` has `id` for an operation on a task. Raises `ServerRefused` for an operation that the version lacks."""
    operation = OPERATIONS[name]
    sent = {"accept": "text/event-stream" if name in {"stream", "subscribe"} else "application/json", **headers}
    sent.setdefault("a2a-version", interface.version)
    if interface.binding == "JSONRPC":
        method = operation.rpc if interface.version == "1.0" else operation.rpc_03
        if method is None:
            raise ServerRefused(-32601, f"A2A 0.3 has no {operation.rpc} over JSON-RPC")
        body = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        sent["content-type"] = "application/json"
        return Outgoing("POST", interface.url, msgspec.json.encode(body), sent, {})
    prefix = "" if interface.version == "1.0" else "/v1"
    url = interface.url.rstrip("/") + prefix + operation.path.format(id=params.get("id", ""))
    rest = {key: value for key, value in params.items() if key != "id"}
    if operation.verb == "GET":
        return Outgoing("GET", url, None, sent, {key: str(value) for key, value in rest.items()})
    sent["content-type"] = "application/json"
    return Outgoing("POST", url, msgspec.json.encode(rest), sent, {})


# --- answers


def read_answer(interface: Interface, status: int, body: bytes) -> dict[str, Any]:
    """The result of a call. Raises `ServerRefused` for an error in any of its shapes."""
    try:
        value = read_object("an answer", body) if body else {}
    except Unreadable as odd:
        if status >= 400:
            raise ServerRefused(status, str(odd)) from None
        raise
    error = value.get("error")
    if isinstance(error, dict):
        raise ServerRefused(_code(error.get("code") or status), str(error.get("message") or error))
    if status >= 400:
        raise ServerRefused(status, str(value.get("message") or value.get("detail") or value))
    return _object("the result", value.get("result")) if interface.binding == "JSONRPC" else value


def read_object(what: str, body: bytes) -> dict[str, Any]:
    try:
        return _object(what, msgspec.json.decode(body))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise Unreadable(what, body[:80]) from None


def _object(what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Unreadable(what, value)
    return value


def read_objects(what: str, value: Any) -> list[dict[str, Any]]:
    """Reads a list of objects. An absent list is empty."""
    if not isinstance(value or [], list):
        raise Unreadable(what, value)
    return [_object(f"one of {what}", each) for each in value or []]


def _code(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise Unreadable("the code of an error", value) from None


def read_state(status: Any) -> str:
    state = (
        str(_object("a status", status or {}).get("state", "")).removeprefix("TASK_STATE_").lower().replace("_", "-")
    )
    return {"cancelled": "canceled", "unspecified": "unknown"}.get(state, state)


def read_text(parts: Any) -> str:
    texts = [part["text"] for part in read_objects("the parts", parts) if part.get("text") is not None]
    for text in texts:
        if not isinstance(text, str):
            raise Unreadable("the text of a part", text)
    return "".join(texts)


def read_task(raw: dict[str, Any]) -> TaskSeen:
    status = _object("a status", raw.get("status") or {})
    artifacts: dict[str, str] = {}
    for number, artifact in enumerate(read_objects("the artifacts", raw.get("artifacts"))):
        artifacts[str(artifact.get("artifactId", number))] = read_text(artifact.get("parts"))
    return TaskSeen(
        id=str(raw.get("id", "")),
        context_id=str(raw.get("contextId", "")),
        state=read_state(status),
        stamp=str(status.get("timestamp", "")),
        artifacts=artifacts,
        raw=raw,
    )


def read_event(result: dict[str, Any], number: str = "") -> EventSeen:
    """Reads an event of a stream, a notification's body or the result of a send, in either version's shape."""
    kind = result.get("kind", "")
    task = result.get("task") or (result if kind == "task" or ("status" in result and "id" in result) else None)
    if task is not None:
        seen = read_task(_object("a task", task))
        return EventSeen("task", number, seen.state, seen.id, text=seen.text, task=seen)
    status = result.get("statusUpdate") or (result if kind == "status-update" else None)
    if status is not None:
        status = _object("a status update", status)
        return EventSeen("status", number, read_state(status.get("status")), str(status.get("taskId", "")))
    update = result.get("artifactUpdate") or (result if kind == "artifact-update" else None)
    if update is not None:
        update = _object("an artifact update", update)
        artifact = _object("an artifact", update.get("artifact") or {})
        return EventSeen(
            "artifact",
            number,
            task_id=str(update.get("taskId", "")),
            artifact_id=str(artifact.get("artifactId", "")),
            text=read_text(artifact.get("parts")),
            append=bool(update.get("append")),
        )
    message = _object("a message", result.get("message") or result)
    return EventSeen("message", number, text=read_text(message.get("parts")))


def offers(card: dict[str, Any], capability: str) -> bool:
    return bool(_object("the card's capabilities", card.get("capabilities") or {}).get(capability))


def read_interfaces(card: dict[str, Any]) -> list[Interface]:
    """The interfaces of a card that the kit supports, in the card's order of preference."""
    offered = [
        (each.get("url", ""), each.get("protocolBinding", ""), each.get("protocolVersion", "1.0"))
        for each in read_objects("the card's interfaces", card.get("supportedInterfaces"))
    ]
    if card.get("url"):
        version = str(card.get("protocolVersion") or "0.3")
        offered.append((card["url"], card.get("preferredTransport") or "JSONRPC", version))
        more = read_objects("the card's interfaces", card.get("additionalInterfaces"))
        offered += [(each.get("url", ""), each.get("transport", ""), version) for each in more]
    found: list[Interface] = []
    for url, binding, version in offered:
        if not (isinstance(url, str) and isinstance(binding, str) and isinstance(version, str)):
            raise Unreadable("an interface of the card", (url, binding, version))
        if binding not in {"JSONRPC", "HTTP+JSON"}:
            continue
        known: Version = "0.3" if version.startswith("0.") else "1.0"
        made = Interface(url, known, "JSONRPC" if binding == "JSONRPC" else "HTTP+JSON")
        if made not in found:
            found.append(made)
    return found
