"""Folding: builds a reader's view of a task at any generation from the task's steps.

Pure, and the same for every door: the task that a client builds from a stream's frames equals that of a later read.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final

import msgspec

from covenant.model.content import Content, Text
from covenant.model.question import QUESTION
from covenant.model.task import Cause, Ending, Result, ResultStatus, Task
from covenant.model.task_event import (
    ArtifactUpdate,
    Began,
    Continued,
    Ended,
    MessageUpdate,
    Started,
    StatusUpdate,
    Step,
    StepUpdate,
    weigh_message,
)

PROGRESS_MAX: Final = 100
PROGRESS_BYTES_MAX: Final = 64 * 1024
"""The most progress messages in a task's history, and their total size: the oldest are dropped first."""


class TaskState(enum.StrEnum):
    """A task's state, as A2A names it."""

    SUBMITTED = "submitted"
    WORKING = "working"
    INPUT_REQUIRED = "input-required"
    AUTH_REQUIRED = "auth-required"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"
    REJECTED = "rejected"

    @property
    def terminal(self) -> bool:
        return self in _TERMINAL

    @property
    def waits(self) -> bool:
        """Whether the task is parked until its sender's next message."""
        return self in _INTERRUPTED

    @property
    def rests(self) -> bool:
        """Whether the task has ended or is parked."""
        return self in RESTING


_ENDED = {ending: TaskState(ending.value) for ending in Ending}
_TERMINAL = frozenset(_ENDED.values())
_INTERRUPTED = frozenset({TaskState.INPUT_REQUIRED, TaskState.AUTH_REQUIRED})
RESTING = _TERMINAL | _INTERRUPTED
# Attribute access through an enum class runs a hook and takes fifty times as long as these names.
_SUBMITTED, _WORKING = TaskState.SUBMITTED, TaskState.WORKING
_COMPLETED, _PARTIAL = Ending.COMPLETED, ResultStatus.PARTIAL


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    artifact_id: str
    parts: tuple[Content, ...]
    name: str | None = None
    description: str | None = None
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] = ()


class TaskView(msgspec.Struct, frozen=True, kw_only=True):
    """A task folded up to `generation`."""

    task: Task
    state: TaskState
    generation: int
    created_at_ms: int
    updated_at_ms: int
    """The time of the task's newest step."""
    message: MessageUpdate | None
    """The message of the present status."""
    history: tuple[MessageUpdate, ...]
    artifacts: tuple[Artifact, ...]
    result: Result | None = None
    cause: Cause | None = None
    """Why the task ended. A timeout is recognised by this cause, never by the text of a result."""
    holder_lost: bool = False
    """The task's worker was lost: an operator must decide."""
    progress: tuple[tuple[int, MessageUpdate], ...] = ()
    """The agent's newest progress messages, each with the number of messages in `history` before it."""

    @property
    def messages(self) -> tuple[MessageUpdate, ...]:
        """The history with the progress messages in their places."""
        if not self.progress:
            return self.history
        messages: list[MessageUpdate] = []
        at = 0
        for before, message in self.progress:
            messages += self.history[at:before]
            messages.append(message)
            at = before
        return (*messages, *self.history[at:])

    @property
    def partial(self) -> bool:
        return self.result is not None and self.result.status is _PARTIAL


def fold(steps: Iterable[Step]) -> TaskView | None:
    """Returns the view of a task with these steps; None without a first step."""
    folder = TaskViewBuilder()
    for step in steps:
        folder.add(step)
    return folder.view()


class TaskViewBuilder:
    """Folds step by step, at a cost that does not grow with the number of steps before."""

    __slots__ = (
        "_artifacts",
        "_cause",
        "_created_at_ms",
        "_history",
        "_message",
        "_progress",
        "_progress_bytes",
        "_result",
        "_task",
        "generation",
        "state",
        "updated_at_ms",
    )

    def __init__(self) -> None:
        self.generation = 0
        self.updated_at_ms = 0
        self._task: Task | None = None
        self.state = _SUBMITTED
        self._created_at_ms = 0
        self._message: MessageUpdate | None = None
        self._history: list[MessageUpdate] = []
        self._progress: deque[tuple[int, MessageUpdate, int]] | None = None
        """Entries are (messages before it, message, size in bytes)."""
        self._progress_bytes = 0
        self._artifacts: dict[str, ArtifactBuilder] = {}
        self._result: Result | None = None
        self._cause: Cause | None = None

    def add(self, step: Step) -> None:
        # A table by class: a `match` over the same classes takes three times as long.
        self.generation, self.updated_at_ms = step.generation, step.ts_ms
        self._folded[type(step.what)](self, step.what)

    def catch_up(self, steps: Iterable[Step]) -> None:
        """Adds the steps that are newer than `generation`."""
        folded = self._folded
        for step in steps:
            if step.generation > self.generation:
                self.generation, self.updated_at_ms, what = step.generation, step.ts_ms, step.what
                folded[type(what)](self, what)

    def _begin(self, what: Began) -> None:
        self._task = what.task
        self._created_at_ms = self.updated_at_ms
        self._history.append(first_message(what.task))

    def _start(self, _: Started) -> None:
        self.state = _WORKING

    def _artifact(self, what: ArtifactUpdate) -> None:
        draft = self._artifacts.get(what.artifact_id)
        if draft is None or not what.append:
            # A replaced artifact keeps its place among the others.
            self._artifacts[what.artifact_id] = draft = ArtifactBuilder(what)
        draft.add(what)

    def _add_message(self, what: MessageUpdate) -> None:
        self._history.append(what)

    def _status(self, what: StatusUpdate) -> None:
        assert self._task is not None
        self.state = TaskState(what.state)
        self._message = status_message(self._task.id, what, self.generation)
        if self._message is None:
            return
        if self.state.waits:
            self._forget_repeated(self._message)
            self._history.append(self._message)
        else:
            self._keep_progress(self._message)

    def _forget_repeated(self, question: MessageUpdate) -> None:
        """Drops a progress message that the question repeats."""
        if self._progress and self._progress[-1][1].parts == question.parts:
            self._progress_bytes -= self._progress.pop()[2]

    def _keep_progress(self, message: MessageUpdate) -> None:
        if self._progress is None:
            self._progress = deque()
        size = weigh_message(message)
        self._progress.append((len(self._history), message, size))
        self._progress_bytes += size
        while len(self._progress) > PROGRESS_MAX or self._progress_bytes > PROGRESS_BYTES_MAX:
            self._progress_bytes -= self._progress.popleft()[2]

    def _step(self, what: StepUpdate) -> None:
        """Ends the waiting state once the step that asked has its outcome. The sender sees no other steps."""
        if not what.waits and self.state.waits:
            self.state, self._message = _WORKING, None

    def _continue(self, what: Continued) -> None:
        self.state, self._message = _WORKING, None
        self._history.append(what.message)

    def _end(self, what: Ended) -> None:
        self.state, self._result, self._cause = _ENDED[what.ending], what.result, what.cause
        self._message = final_message(what.result, what.ending)
        if self._message is not None:
            self._history.append(self._message)

    _folded: ClassVar[dict[type[Any], Callable[[TaskViewBuilder, Any], None]]] = {
        Began: _begin,
        Started: _start,
        ArtifactUpdate: _artifact,
        MessageUpdate: _add_message,
        StatusUpdate: _status,
        StepUpdate: _step,
        Continued: _continue,
        Ended: _end,
    }

    def existing_view(self) -> TaskView:
        """The view of a task that was accepted, and so has a first step."""
        assert self._task is not None, "a task that was accepted has a first step"
        return TaskView(
            task=self._task,
            state=self.state,
            generation=self.generation,
            created_at_ms=self._created_at_ms,
            updated_at_ms=self.updated_at_ms,
            message=self._message,
            history=tuple(self._history),
            artifacts=tuple(map(ArtifactBuilder.artifact, self._artifacts.values())),
            result=self._result,
            cause=self._cause,
            progress=tuple([(at, text) for at, text, _ in self._progress]) if self._progress else (),
        )

    def view(self) -> TaskView | None:
        return None if self._task is None else self.existing_view()


class ArtifactBuilder(msgspec.Struct, eq=False):
    """An artifact under construction. Consecutive plain text is joined into one part, however it was chunked."""

    _first: ArtifactUpdate
    _parts: list[Content] = []
    _text: list[str] = []
    metadata: dict[str, Any] | None = None

    def add(self, update: ArtifactUpdate) -> None:
        for part in update.parts:
            if type(part) is Text and part == Text(part.text):  # text and nothing else
                self._text.append(part.text)
            else:
                self._flush()
                self._parts.append(part)
        if update.metadata:
            self.metadata = {**(self.metadata or {}), **update.metadata}

    def _flush(self) -> None:
        if self._text:
            self._parts.append(Text("".join(self._text)))
            self._text = []

    def parts(self) -> tuple[Content, ...]:
        return (*self._parts, Text("".join(self._text))) if self._text else tuple(self._parts)

    def artifact(self) -> Artifact:
        first = self._first
        return Artifact(
            artifact_id=first.artifact_id,
            parts=self.parts(),
            name=first.name,
            description=first.description,
            metadata=self.metadata,
            extensions=first.extensions,
        )


def first_message(task: Task) -> MessageUpdate:
    return MessageUpdate(
        "user",
        task.parts or (Text(task.intent_text),),
        task.message_id or f"{task.id}-m",
        task.metadata,
        task.extensions,
        task.reference_task_ids,
    )


def status_message(task_id: str, update: StatusUpdate, generation: int) -> MessageUpdate | None:
    parts = update.parts or ((Text(update.text),) if update.text else ())
    if not parts:
        return None
    message_id, question = update.message_id or f"{task_id}-s{generation}", (update.metadata or {}).get(QUESTION)
    about = {QUESTION: question} if question is not None else None
    return MessageUpdate(role="agent", parts=parts, message_id=message_id, metadata=about)


def final_message(result: Result, ending: Ending) -> MessageUpdate | None:
    """The message of the last status: the reply, or the error."""
    if ending is _COMPLETED:
        return MessageUpdate("agent", result.content, f"{result.task_id}-r") if result.content else None
    message = result.error_message
    parts: tuple[Content, ...] = result.content or ((Text(message),) if isinstance(message, str) and message else ())
    return MessageUpdate(parts=parts, message_id=f"{result.task_id}-err") if parts else None


class _RemoteState(msgspec.Struct, frozen=True, kw_only=True):
    task_id: str
    context_id: str | None
    state: TaskState
    message: MessageUpdate | None = None
    metadata: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return plain_text(self.message.parts) if self.message is not None else ""


class RemoteTask(_RemoteState, frozen=True, kw_only=True):
    artifacts: tuple[Artifact, ...] = ()
    history: tuple[MessageUpdate, ...] = ()


class RemoteStatus(_RemoteState, frozen=True, kw_only=True):
    """A status update of a remote agent. `final`: the stream ends after it (only the 0.3 dialect says so)."""

    final: bool = False


class RemoteArtifact(msgspec.Struct, frozen=True, kw_only=True):
    task_id: str
    context_id: str | None
    update: ArtifactUpdate

    @property
    def text(self) -> str:
        return plain_text(self.update.parts)


class RemoteMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that is the whole answer: there is no task."""

    message: MessageUpdate
    context_id: str | None
    task_id: str | None = None

    @property
    def text(self) -> str:
        return plain_text(self.message.parts)


RemoteEvent = RemoteTask | RemoteStatus | RemoteArtifact | RemoteMessage


def plain_text(content: tuple[Content, ...]) -> str:
    """The text parts of the content, joined."""
    return "".join(part.text for part in content if isinstance(part, Text))


def answer_text(
    state: TaskState,
    message: MessageUpdate | None,
    artifacts: Sequence[Artifact],
    history: Sequence[MessageUpdate],
) -> str:
    """The text that answers the sender: the artifacts' text, or the status message if it contains that or stands alone.

    If a task did not complete, its message says why, and takes precedence over the artifacts. A task that ended without
    either is answered by its agent's last message.
    """
    status_text = plain_text(message.parts) if message is not None else ""
    artifact_text = "\n".join(text for artifact in artifacts if (text := plain_text(artifact.parts)))
    if state is TaskState.COMPLETED and artifact_text and artifact_text.strip() not in status_text:
        return artifact_text
    if status_text or artifact_text:
        return status_text or artifact_text
    agent_texts = (plain_text(past.parts) for past in reversed(history) if past.role == "agent")
    return next((text for text in agent_texts if text), "") if state.terminal else ""
