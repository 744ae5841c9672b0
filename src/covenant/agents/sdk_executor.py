"""Agents written for the official SDK: an `AgentExecutor` runs here unchanged.

It gets a `RequestContext` made from the turn, and an event queue whose events become updates of the task. An executor
that returns without a terminal state has completed the task; one that asked for input or authentication parks it. Only
this module imports the SDK's server side.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Final

import msgspec
from a2a.auth.user import User
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.context import ServerCallContext
from a2a.server.events import EventQueue
from a2a.types import a2a_pb2 as pb
from a2a.utils.errors import JSON_RPC_ERROR_CODE_MAP, A2AError
from google.protobuf import json_format, struct_pb2

from covenant.agents.runtime.job import DAEMON_STOPS, Job
from covenant.agents.runtime.job_buffer import FAILED
from covenant.model.content import Content, Text
from covenant.model.sanitizer import unreserved_parts, without_reserved
from covenant.model.task import ERROR_CODE
from covenant.model.task_event import ArtifactUpdate, Interruption, MessageUpdate, StatusUpdate
from covenant.model.task_view import TaskView
from covenant.wire.a2a.dialects import V1
from covenant.wire.a2a.error_codes import AGENT_CODES, INTERNAL
from covenant.wire.a2a.parts_v1 import PartV1, contents_of, message_of

CANCEL_S: Final = 1.0
_INTERRUPTIONS: Final = {
    pb.TASK_STATE_INPUT_REQUIRED: Interruption.INPUT_REQUIRED,
    pb.TASK_STATE_AUTH_REQUIRED: Interruption.AUTH_REQUIRED,
}

log = logging.getLogger(__name__)


class SdkExecutorAgent:
    def __init__(self, executor: AgentExecutor) -> None:
        self._executor = executor

    async def run(self, job: Job) -> None:
        context = _context(job, await job.view() if job.leased.turn > 1 else None)
        queue = SdkEventQueue(job)
        try:
            await self._executor.execute(context, queue)
        except asyncio.CancelledError:
            if job.stopping not in (None, DAEMON_STOPS):
                await self._cancel(context, queue, job)
            raise
        except A2AError as error:
            # The SDK's own server would send this error to the client, with its text.
            if not job.ended:
                kinds = (kind for kind in type(error).__mro__ if kind in JSON_RPC_ERROR_CODE_MAP)
                number = JSON_RPC_ERROR_CODE_MAP.get(next(kinds, A2AError), INTERNAL.v1)
                job.notes[ERROR_CODE] = AGENT_CODES.get(number, AGENT_CODES[INTERNAL.v1])
                job.fail(str(error.message))
            return
        queue.returned()

    async def _cancel(self, context: RequestContext, queue: SdkEventQueue, job: Job) -> None:
        """Tells the executor of a cancel. The task is over already, so its further events are dropped."""
        try:
            async with asyncio.timeout(CANCEL_S):
                await self._executor.cancel(context, queue)
        except Exception:
            log.warning("executor.cancel_failed", exc_info=True, extra=job.fields())


def described(values: Iterable[object]) -> dict[str, Any]:
    """The fields of an agent card beside an executor, for the catalogue."""
    cards = [value for value in values if isinstance(value, pb.AgentCard)]
    if len(cards) != 1:
        return {}
    (card,) = cards
    fields = json_format.MessageToDict(card, preserving_proto_field_name=True)
    names = ("id", "name", "description", "tags", "examples", "input_modes", "output_modes")
    return {
        "name": card.name,
        "description": card.description,
        "skills": [{name: skill[name] for name in names if name in skill} for skill in fields.get("skills", ())],
        "input_modes": fields.get("default_input_modes", []),
        "output_modes": fields.get("default_output_modes", []),
    }


class SdkEventQueue(EventQueue):
    """Turns the executor's events into updates. A terminal state ends the job; later events are dropped."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._interruption: StatusUpdate | None = None
        self._has_output = False

    async def enqueue_event(self, event: Any) -> None:
        job = self._job
        if job.over or job.ended:
            return
        match event:
            case pb.TaskArtifactUpdateEvent():
                self._go_on()
                job.add_update(_artifact(event.artifact, append=event.append, last_chunk=event.last_chunk))
                self._has_output = True
            case pb.TaskStatusUpdateEvent():
                self._status(event.status, event.metadata)
            case pb.Task():
                self._task(event)
            case pb.Message():
                job.complete(*_contents(event.parts), reply=not self._has_output and job.leased.turn == 1)
            case _:
                job.fail(f"the agent enqueued {type(event).__name__}, which is no event of a task")
        if job.full:
            await job.room()

    async def close(self, immediate: bool = False) -> None:  # noqa: FBT001, FBT002  (the SDK's signature)
        """Does nothing: the job ends when the executor returns."""

    def returned(self) -> None:
        if self._interruption is not None:
            self._job.park(self._interruption)

    def _task(self, task: pb.Task) -> None:
        if task.id != self._job.task.id:
            self._job.fail("the agent answered with another task's id")
            return
        for artifact in task.artifacts:
            self._job.add_update(_artifact(artifact))
            self._has_output = True
        if task.status.state != pb.TASK_STATE_SUBMITTED:
            self._status(task.status, task.metadata)

    def _status(self, status: pb.TaskStatus, metadata: struct_pb2.Struct) -> None:
        job, contents = self._job, _contents(status.message.parts)
        words = "\n".join(block.text for block in contents if isinstance(block, Text))
        if noted := _plain(metadata):
            job.notes.update(noted)
        match status.state:
            case pb.TASK_STATE_COMPLETED:
                job.complete(*contents)
            case pb.TASK_STATE_FAILED:
                job.fail(words or FAILED, *contents)
            case pb.TASK_STATE_REJECTED:
                job.reject(words or "the agent rejected this", *contents)
            case pb.TASK_STATE_CANCELED:
                job.end_canceled(words or "the agent canceled this", *contents)
            case pb.TASK_STATE_INPUT_REQUIRED | pb.TASK_STATE_AUTH_REQUIRED as state:
                self._go_on()
                message_id = status.message.message_id or None
                self._interruption = StatusUpdate(
                    words, _INTERRUPTIONS[state].value, parts=contents, message_id=message_id
                )
                if state == pb.TASK_STATE_AUTH_REQUIRED:
                    # The executor may wait for the answer inside `execute`, so its sender must see the question now.
                    job.add_update(StatusUpdate(words, parts=contents))
            case pb.TASK_STATE_WORKING:
                self._go_on()
                job.add_update(StatusUpdate(words, parts=contents, message_id=status.message.message_id or None))
                self._has_output = True
            case _:
                pass

    def _go_on(self) -> None:
        """Reports an earlier question as progress: the executor asked, and then went on."""
        if self._interruption is not None and self._interruption.state == Interruption.INPUT_REQUIRED.value:
            self._job.add_update(StatusUpdate(self._interruption.text, parts=self._interruption.parts))
        self._interruption = None


class SdkUser(User):
    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def is_authenticated(self) -> bool:
        return True

    @property
    def user_name(self) -> str:
        return self._name


def _context(job: Job, view: TaskView | None) -> RequestContext:
    task, messages = job.task, job.messages
    context_id = task.context_id or task.id
    message = _message(messages[-1], task.id, context_id)
    for more in messages[:-1]:
        message.parts.extend(_message(more, task.id, context_id).parts)
    request = pb.SendMessageRequest(
        message=message,
        configuration=pb.SendMessageConfiguration(accepted_output_modes=task.output_modes),
        metadata=task.request_metadata,
    )
    call = ServerCallContext(
        user=SdkUser(task.sender.display), tenant=task.tenant or "", requested_extensions=set(task.extensions)
    )
    return RequestContext(call, request=request, task_id=task.id, context_id=context_id, task=_task(view))


def _task(view: TaskView | None) -> pb.Task | None:
    if view is None:
        return None
    return json_format.Parse(V1.responses.encode_task(view), pb.Task(), ignore_unknown_fields=True)


def _message(update: MessageUpdate, task_id: str, context_id: str) -> pb.Message:
    plain = msgspec.to_builtins(message_of(update, task_id, context_id, ""))
    return json_format.ParseDict(plain, pb.Message())


def _artifact(artifact: pb.Artifact, *, append: bool = False, last_chunk: bool = False) -> ArtifactUpdate:
    return ArtifactUpdate(
        artifact.artifact_id,
        _contents(artifact.parts),
        artifact.name or None,
        artifact.description or None,
        append,
        last_chunk,
        _plain(artifact.metadata),
        tuple(artifact.extensions),
    )


def _contents(parts: Iterable[pb.Part]) -> tuple[Content, ...]:
    given = [_whole(json_format.MessageToDict(part)) or {"text": ""} for part in parts]
    return unreserved_parts(contents_of(msgspec.convert(given, list[PartV1]), "parts"))


def _plain(struct: struct_pb2.Struct) -> dict[str, Any] | None:
    """The executor's metadata without the daemon's own keys, which it may have copied from a client."""
    return without_reserved(_whole(json_format.MessageToDict(struct))) if struct.fields else None


def _whole(value: Any) -> Any:
    """Whole numbers as integers again: protobuf has only floats."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {key: _whole(inner) for key, inner in value.items()}
        case list():
            return [_whole(inner) for inner in value]
        case _:
            return value
