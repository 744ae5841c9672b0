"""The view of a remote task, built from frames and snapshots, and the new events in each of them.

Pure. A snapshot (the first frame of a resumed stream, or the answer of a poll) repeats what is known already: only the
rest is new, so that no follower reads a text twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from covenant.model.content import Content, Text, is_plain
from covenant.model.errors import Invalid
from covenant.model.task_event import ArtifactUpdate, MessageUpdate
from covenant.model.task_view import (
    Artifact,
    ArtifactBuilder,
    RemoteArtifact,
    RemoteEvent,
    RemoteMessage,
    RemoteStatus,
    RemoteTask,
    TaskState,
    answer_text,
)
from covenant.model.usage import add_usage, larger_usage, usage_in
from covenant.outbound.call_errors import RemoteRefused
from covenant.wire.jsonrpc import one_line

if TYPE_CHECKING:
    from covenant.outbound.remote.remote_client import Remote


replace = msgspec.structs.replace
_TOKENS: Final = {"x-arbiter.input_tokens": "input_tokens", "x-arbiter.output_tokens": "output_tokens"}


class RemoteTaskView:
    def __init__(self, continued: str | None = None) -> None:
        """`continued`: the task that the message continues. The remote may report no other one."""
        self._continued = continued
        self.task_id: str | None = None
        self.context_id: str | None = None
        self.state = TaskState.SUBMITTED
        self.message: MessageUpdate | None = None
        self.history: tuple[MessageUpdate, ...] = ()
        self.metadata: dict[str, Any] = {}
        self.answered = False
        """Whether the answer was a bare message: then there is no task to follow."""
        self._drafts: dict[str, ArtifactBuilder] = {}
        self._reported: dict[str, float] = {}

    @property
    def known(self) -> bool:
        """Whether the remote has answered anything: then it has accepted the message."""
        return self.answered or self.task_id is not None

    @property
    def stopped(self) -> bool:
        """Whether nothing more comes unless the caller sends another message."""
        return self.answered or self.state.terminal or self.state.waits

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        return tuple(draft.artifact() for draft in self._drafts.values())

    @property
    def usage(self) -> dict[str, float]:
        made: dict[str, float] = {}
        for draft in self._drafts.values():
            add_usage(made, usage_in(draft.metadata or {}))
        return larger_usage(self._reported, made)

    def take(self, event: RemoteEvent) -> Iterator[RemoteEvent]:
        """The new events in a frame or snapshot. Raises RemoteRefused if it is about another task."""
        check_task(event, self.task_id or self._continued)
        match event:
            case RemoteMessage():
                self.answered, self.message = True, event.message
                self.context_id = event.context_id or self.context_id
                self.state = TaskState.COMPLETED
                self._report(event.message.metadata)
                yield event
            case RemoteTask():
                yield from self._snapshot(event)
            case RemoteStatus():
                yield from self._status(event)
            case RemoteArtifact():
                self._set_ids(event.task_id, event.context_id)
                self._apply(event.update)
                yield event

    def lacks(self, task: RemoteTask) -> bool:
        """Whether a snapshot has another state, or more of an artifact. Progress messages do not count."""
        drafts = self._drafts
        return task.state is not self.state or any(
            new_update(drafts[made.artifact_id].artifact() if made.artifact_id in drafts else None, made) is not None
            for made in task.artifacts
        )

    def _set_ids(self, task_id: str, context_id: str | None) -> None:
        self.task_id = self.task_id or task_id or None
        self.context_id = self.context_id or context_id

    def _snapshot(self, task: RemoteTask) -> Iterator[RemoteEvent]:
        first = self.task_id is None
        changed = (self.state, self.message) != (task.state, task.message)
        self._set_ids(task.task_id, task.context_id)
        self.history = task.history or self.history
        self.metadata |= task.metadata or {}
        self._report(task.metadata, task.message)
        if first:
            yield replace(task, artifacts=(), history=())
        for artifact in task.artifacts:
            draft = self._drafts.get(artifact.artifact_id)
            update = new_update(draft.artifact() if draft is not None else None, artifact)
            if update is not None:
                self._apply(update)
                yield RemoteArtifact(task_id=task.task_id, context_id=task.context_id, update=update)
        # The end of a task comes after its artifacts.
        if not self.state.terminal:
            self.state, self.message = task.state, task.message
            if changed and not first:
                yield RemoteStatus(
                    task_id=task.task_id,
                    context_id=task.context_id,
                    state=task.state,
                    message=task.message,
                    metadata=task.metadata,
                )

    def _status(self, status: RemoteStatus) -> Iterator[RemoteEvent]:
        if self.state.terminal:
            return
        self._set_ids(status.task_id, status.context_id)
        self.state, self.message = status.state, status.message
        self.metadata |= status.metadata or {}
        self._report(status.metadata, status.message)
        yield status

    def _report(self, metadata: dict[str, Any] | None, message: MessageUpdate | None = None) -> None:
        for fields in (metadata, message.metadata if message is not None else None):
            if fields:
                self._reported = larger_usage(self._reported, usage_in(fields))

    def _apply(self, update: ArtifactUpdate) -> None:
        draft = self._drafts.get(update.artifact_id)
        if draft is None or not update.append:
            # A replaced artifact keeps its place among the others.
            self._drafts[update.artifact_id] = draft = ArtifactBuilder(update)
        draft.add(replace(update, parts=_without_empty_texts(update.parts)))


def check_task(event: RemoteEvent, task_id: str | None) -> None:
    if task_id is not None and event.task_id and event.task_id != task_id:
        why = f"the remote reported task {one_line(event.task_id)} instead of task {task_id}"
        raise RemoteRefused("bad_answer", why, task_id=task_id)


def new_update(before: Artifact | None, now: Artifact) -> ArtifactUpdate | None:
    """The update from the known artifact to the new one; None if they are equal."""
    parts = _joined(now.parts)
    if before is None:
        return _update(now, parts, append=False)
    old = before.parts
    if parts == old:
        return None
    more = _rest_after(old, parts)
    return _update(now, parts if more is None else more, append=more is not None)


def _rest_after(old: tuple[Content, ...], new: tuple[Content, ...]) -> tuple[Content, ...] | None:
    """What follows `old` in `new`; None if `new` does not begin with it."""
    if new[: len(old)] == old:
        return new[len(old) :]
    if not old or len(new) < len(old) or new[: len(old) - 1] != old[:-1]:
        return None
    last, grown = old[-1], new[len(old) - 1]
    if not is_plain(last) or not is_plain(grown) or not grown.text.startswith(last.text):
        return None
    return (Text(grown.text[len(last.text) :]), *new[len(old) :])


def _update(artifact: Artifact, parts: tuple[Content, ...], *, append: bool) -> ArtifactUpdate:
    return ArtifactUpdate(
        artifact_id=artifact.artifact_id,
        parts=parts,
        name=artifact.name,
        description=artifact.description,
        append=append,
        metadata=artifact.metadata,
        extensions=artifact.extensions,
    )


def _joined(content: Sequence[Content]) -> tuple[Content, ...]:
    """Consecutive plain texts as one, without empty ones."""
    update = ArtifactUpdate("", _without_empty_texts(content))
    builder = ArtifactBuilder(update)
    builder.add(update)
    return builder.parts()


def _without_empty_texts(content: Sequence[Content]) -> tuple[Content, ...]:
    return tuple(part for part in content if not is_plain(part) or part.text)


Sendable = str | Content | Sequence[Content]


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """`state` is the outcome: `completed`, or `failed`, `canceled`, `rejected`; or that it waits for the caller
    (`input-required`, `auth-required`), who can `continue_`."""

    text: str
    """The agent's answer: its message, or the text of its artifacts."""
    state: TaskState
    task_id: str | None
    """None where the answer is a bare message, without a task."""
    context_id: str | None
    message: MessageUpdate | None
    artifacts: tuple[Artifact, ...]
    history: tuple[MessageUpdate, ...]
    usage: dict[str, Any] | None
    metadata: dict[str, Any]
    remote: Any = None

    @property
    def ok(self) -> bool:
        return self.state is TaskState.COMPLETED

    @property
    def waits(self) -> bool:
        return self.state.waits

    async def continue_(self, what: Sendable, **options: Any) -> Reply:
        """Sends another message to the same task, or in the same context. Takes the arguments of `Remote.send`."""
        if self.remote is None:
            raise Invalid(
                "not_connected", "this reply has no remote agent to continue with; use the one that `connect` returned"
            )
        task_id = self.task_id if self.waits else None
        remote: Remote = self.remote
        return await remote.send(what, task_id=task_id, context_id=self.context_id, **options)


def parts_of(what: Sendable) -> tuple[Content, ...]:
    parts: tuple[Content, ...]
    if isinstance(what, str):
        parts = (Text(what),)
    elif isinstance(what, Content):
        parts = (what,)
    else:
        parts = tuple(what)
    if not parts:
        raise Invalid("empty_message", "a message needs at least one part")
    return parts


def reply_of(view: RemoteTaskView, remote: Remote | None) -> Reply:
    artifacts = view.artifacts
    return Reply(
        text=answer_text(view.state, view.message, artifacts, view.history),
        state=view.state,
        task_id=view.task_id,
        context_id=view.context_id,
        message=view.message,
        artifacts=artifacts,
        history=view.history,
        usage=_usage(view.metadata) or view.usage or None,
        metadata=view.metadata,
        remote=remote,
    )


def _usage(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    usage = metadata.get("covenant.usage")
    if isinstance(usage, dict):
        return usage
    return {name: metadata[key] for key, name in _TOKENS.items() if key in metadata} or None
