"""The requests that an A2A client can make to an agent, in any dialect and binding. Doors decode into these types."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from covenant.model.content import Content
from covenant.model.task_view import TaskState, TaskView

PAGE_SIZE: Final = 50
PAGE_SIZE_MAX: Final = 100


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message from a client. With `task_id` it continues that task; without one it begins a new task."""

    message_id: str
    parts: tuple[Content, ...]
    role: str = "user"
    task_id: str | None = None
    context_id: str | None = None
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] = ()
    reference_task_ids: tuple[str, ...] = ()


class PushAuthentication(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    scheme: str
    credentials: str | None = None

    def __repr__(self) -> str:
        """Leaves out the credentials, so that no log or traceback shows them."""
        return f"PushAuthentication(scheme={self.scheme!r})"


class PushConfig(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A webhook that gets each step of a task. The client gives `id`, or the daemon mints one."""

    url: str
    id: str | None = None
    token: str | None = None
    authentication: PushAuthentication | None = None
    version: str = "1.0"
    """The A2A version of the request that made the configuration. Deliveries are written in this version."""

    def __repr__(self) -> str:
        """Leaves out all secrets; a webhook's URL is often one."""
        return f"PushConfig(id={self.id!r})"


class SendMessage(msgspec.Struct, frozen=True, kw_only=True):
    """`blocking`: the answer comes when the task has ended or waits for its sender; otherwise once it is accepted."""

    message: Message
    blocking: bool = True
    history_length: int | None = None
    output_modes: tuple[str, ...] = ()
    push: PushConfig | None = None
    metadata: dict[str, Any] | None = None


class GetTask(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    task_id: str
    history_length: int | None = None
    """None: the whole history; 0: none of it."""


class ListTasks(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    context_id: str | None = None
    state: TaskState | None = None
    updated_after_ms: int | None = None
    page_size: int = PAGE_SIZE
    page_token: str = ""
    history_length: int | None = None
    include_artifacts: bool = False


class TaskPage(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks are ordered by the time of their status, newest first. `next_page_token` is empty on the last page."""

    tasks: tuple[TaskView, ...]
    total_size: int
    page_size: int
    next_page_token: str


class CancelTask(msgspec.Struct, frozen=True, kw_only=True):
    task_id: str
    metadata: dict[str, Any] | None = None


class Subscribe(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    task_id: str
    after: int | None = None
    """The last generation that the client has seen; None: the client has seen none."""


class CreatePush(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    task_id: str
    config: PushConfig


class GetPush(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    task_id: str
    id: str | None = None


class ListPush(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    task_id: str
    page_size: int = PAGE_SIZE
    page_token: str = ""


class DeletePush(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    task_id: str
    id: str


class PushPage(msgspec.Struct, frozen=True, kw_only=True):
    """Configurations are ordered oldest first. `next_page_token` is empty on the last page."""

    configs: tuple[PushConfig, ...]
    next_page_token: str = ""
