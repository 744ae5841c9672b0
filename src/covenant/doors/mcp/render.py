"""The answers of tools: text for a model to read, and the same as data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from covenant.exchange.task_lookup import QueueStatus
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.content import Audio, Content, File, Image, Json, Resource, ResourceLink, Text
from covenant.model.task_event import (
    ArtifactUpdate,
    Continued,
    Ended,
    MessageUpdate,
    Started,
    StatusUpdate,
    Step,
    StepUpdate,
)
from covenant.model.task_view import TaskState, TaskView
from covenant.model.tenants import DEFAULT
from covenant.wire.a2a.parts_v1 import Link

TEXT_MAX: Final = 100_000
PROGRESS_MAX: Final = 500


class ToolAnswer(NamedTuple):
    """`failed`: the call was refused, or the task in question failed or was rejected."""

    text: str
    data: dict[str, Any]
    failed: bool = False


def render_task(view: TaskView, *, agent: str, link: Link) -> ToolAnswer:
    task, state = view.task, view.state
    text, files = agent_text(view, link)
    lines = [f"Task {task.id} ({agent}): {state}"]
    if view.holder_lost:
        lines.append("Its holder is lost; an operator decides what becomes of the task.")
    if state.waits:
        lines.append(f"The task waits for an answer: call send_task with agent {agent!r} and task_id {task.id!r}.")
    elif not state.terminal:
        lines.append("The task goes on by itself; get_task shows its state.")
    data: dict[str, Any] = {"task_id": task.id, "agent": agent, "state": str(state), "text": text, "artifacts": files}
    if task.context_id:
        data["context_id"] = task.context_id
    if view.holder_lost:
        data["holder_lost"] = True
    listed = [f"Artifact: {file}" for file in files]
    return ToolAnswer(
        "\n".join([*lines, *listed, *(["", shortened(text)] if text else [])]),
        data,
        failed=state in (TaskState.FAILED, TaskState.REJECTED),
    )


def agent_text(view: TaskView, link: Link) -> tuple[str, list[str]]:
    """The text of an agent's artifacts and its last message, and the names of its files."""
    parts: list[str] = []
    files: list[str] = []
    for artifact in view.artifacts:
        text = plain_text(artifact.parts)
        if text:
            parts.append(text)
        files += [name for part in artifact.parts if (name := _file_name(part, artifact.name, link)) is not None]
    last_text = plain_text(view.message.parts) if view.message is not None and view.message.role == "agent" else ""
    if last_text and last_text not in parts:
        parts.append(last_text)
    return "\n\n".join(parts), files


def plain_text(parts: Iterable[Content]) -> str:
    return "".join(_part_text(part) for part in parts)


def _part_text(part: Content) -> str:
    match part:
        case Text():
            return part.text
        case Json():
            return msgspec.json.encode(part.value).decode()
        case Resource():
            return part.resource.text or ""
        case _:
            return ""


def _file_name(part: Content, default_name: str | None, link: Link) -> str | None:
    match part:
        case Resource() if part.resource.text is None:
            return part.filename or default_name or part.resource.uri or "unnamed"
        case Image() | Audio():
            return default_name or "unnamed"
        case File():
            return f"{part.filename or default_name or 'unnamed'} <{link(part)}>"
        case ResourceLink():
            return f"{part.name or default_name or 'unnamed'} <{part.uri}>"
        case Text() if part.filename:
            return part.filename
        case _:
            return None


def render_step(step: Step) -> str | None:
    """A line of progress; None if the step has nothing to report."""
    match step.what:
        case Started():
            return "working"
        case StatusUpdate(text=text, parts=parts):
            return _brief(text or plain_text(parts)) or None
        case ArtifactUpdate(parts=parts, name=name):
            return _brief(plain_text(parts)) or (f"artifact {name}" if name else None)
        case MessageUpdate(parts=parts):
            return _brief(plain_text(parts)) or None
        case Ended(ending=ending):
            return str(ending.value)
        case Continued():
            return "message received"
        case StepUpdate(name=name, wait=wait):
            return f"waits: {name}" if wait is not None else f"step {name}"
        case _:
            return None


def _brief(text: str) -> str:
    return text if len(text) <= PROGRESS_MAX else f"{text[: PROGRESS_MAX - 1]}…"


def shortened(text: str, most: int = TEXT_MAX) -> str:
    return text if len(text) <= most else f"{text[:most]}\n[cut: {len(text) - most} more characters]"


def agent_name(agent: CatalogueAgent) -> str:
    """An agent's name for a caller: without the tenant if that is `default`."""
    return agent.id if agent.tenant == DEFAULT else f"{agent.id}@{agent.tenant}"


def render_agents(agents: Sequence[tuple[str, CatalogueAgent]]) -> ToolAnswer:
    rows, data = [], []
    for name, agent in agents:
        definition = agent.definition
        description = definition.description or definition.role or definition.goal
        skills = [skill.name or skill.id for skill in definition.skills]
        named = f" [{', '.join(skills)}]" if skills else ""
        rows.append(f"- {name}: {description or definition.name or 'no description'}{named}")
        data.append({"agent": name, "kind": definition.kind, "description": description, "skills": skills})
    return ToolAnswer("\n".join([f"{len(rows)} agent(s)", *rows]), {"agents": data})


def render_queue(status: QueueStatus) -> ToolAnswer:
    counts = ", ".join(f"{name} {count}" for name, count in status.counts.items()) or "nothing"
    counted_text = "" if status.counted is None else f" (of the newest {status.counted} tasks)"
    rows = [
        f"- {each.task_id} {each.agent}: {each.state}" + (" (its holder is lost)" if each.holder_lost else "")
        for each in status.waiting
    ]
    return ToolAnswer("\n".join([f"{counts}{counted_text}", *rows]), msgspec.to_builtins(status))
