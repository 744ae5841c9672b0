"""What a remote agent answered, as a caller wants to have it: a text first, and the rest of it besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from covenant.model.content import Content, Text
from covenant.model.errors import Invalid
from covenant.model.task_view import Artifact, TaskState
from covenant.model.task_view import plain_text
from covenant.model.task_event import MessageUpdate
from covenant.outbound.assembly import Assembly

if TYPE_CHECKING:
    from covenant.outbound.remote import Remote

Sendable = str | Content | Sequence[Content]
"""A text, a part, or several parts."""

_TOKENS: Final = {"x-arbiter.input_tokens": "input_tokens", "x-arbiter.output_tokens": "output_tokens"}


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """`state` says what became of it: `completed`, or `failed`, `canceled`, `rejected`; or that it waits for the caller
    (`input-required`, `auth-required`), who can `continue_`."""

    text: str
    """What the agent said: its message, or what it made where that is the answer."""
    state: TaskState
    task_id: str | None
    """None where the answer is a bare message, without a task."""
    context_id: str | None
    message: MessageUpdate | None
    artifacts: tuple[Artifact, ...]
    history: tuple[MessageUpdate, ...]
    usage: dict[str, Any] | None
    """What it took, where the remote says."""
    metadata: dict[str, Any]
    remote: Any = None

    @property
    def ok(self) -> bool:
        return self.state is TaskState.COMPLETED

    @property
    def waits(self) -> bool:
        return self.state.waits

    async def continue_(self, what: Sendable, **options: Any) -> Reply:
        """Say more about the same task, or in the same context. Takes what `Remote.send` takes."""
        if self.remote is None:
            raise Invalid("not_connected", "this reply has no remote to go on with")
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


def reply_of(heard: Assembly, remote: Remote | None) -> Reply:
    artifacts = heard.artifacts
    return Reply(
        text=answer_text(heard.state, heard.message, artifacts, heard.history),
        state=heard.state,
        task_id=heard.task_id,
        context_id=heard.context_id,
        message=heard.message,
        artifacts=artifacts,
        history=heard.history,
        usage=_usage(heard.metadata) or heard.usage or None,
        metadata=heard.metadata,
        remote=remote,
    )


def answer_text(
    state: TaskState,
    message: MessageUpdate | None,
    artifacts: Sequence[Artifact],
    history: Sequence[MessageUpdate],
) -> str:
    """A result is in the artifacts; the message with it may be the same text, a word about it, or all there is.

    Where a task did not complete, its message says why, and counts before whatever it had made by then.
    """
    said = plain_text(message.parts) if message is not None else ""
    made = "\n".join(text for artifact in artifacts if (text := plain_text(artifact.parts)))
    if state is TaskState.COMPLETED and made and made.strip() not in said:
        return made
    if said or made:
        return said or made
    spoken = (plain_text(each.parts) for each in reversed(history) if each.role == "agent")
    return next((text for text in spoken if text), "") if state.terminal else ""


def _usage(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    usage = metadata.get("covenant.usage")
    if isinstance(usage, dict):
        return usage
    return {name: metadata[key] for key, name in _TOKENS.items() if key in metadata} or None
