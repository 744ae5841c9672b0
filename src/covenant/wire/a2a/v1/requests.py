"""What a 1.0 client asks: the params of each method, read into the model. ProtoJSON rules hold."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from covenant.model import a2a_requests as asking
from covenant.model.a2a_requests import PAGE_SIZE, PAGE_SIZE_MAX
from covenant.model.task_view import TaskState
from covenant.wire import timestamps as moments
from covenant.wire.a2a.error_codes import InvalidParams
from covenant.wire.a2a.protojson import Number, ParamsReader, enum_value, int_value, required
from covenant.wire.a2a.v1.parts import ROLES, Message, contents_of

Params = bytes | msgspec.Raw

_NUMBERED: Final = (
    TaskState.SUBMITTED,
    TaskState.WORKING,
    TaskState.COMPLETED,
    TaskState.FAILED,
    TaskState.CANCELED,
    TaskState.INPUT_REQUIRED,
    TaskState.REJECTED,
    TaskState.AUTH_REQUIRED,
)
STATE_NAMES: Final = {state: f"TASK_STATE_{state.name}" for state in TaskState}
STATES: Final[dict[str | int, TaskState | None]] = {
    **{STATE_NAMES[state]: state for state in _NUMBERED},
    **dict(enumerate(_NUMBERED, start=1)),
    "TASK_STATE_UNSPECIFIED": None,
    0: None,
}


class _Params(msgspec.Struct, frozen=True, gc=False, rename="camel", kw_only=True):
    """`tenant`, which every request may carry, is not read: the address already names the agent."""


class _Authentication(_Params, frozen=True):
    scheme: str | None = None
    credentials: str | None = None


class _Push(_Params, frozen=True):
    id: str | None = None
    task_id: str | None = None
    url: str | None = None
    token: str | None = None
    authentication: _Authentication | None = None


class _Configuration(_Params, frozen=True):
    accepted_output_modes: tuple[str, ...] | None = None
    task_push_notification_config: _Push | None = None
    history_length: Number | None = None
    return_immediately: bool | None = None


class _Send(_Params, frozen=True):
    message: Message | None = None
    configuration: _Configuration | None = None
    metadata: dict[str, Any] | None = None


class _Task(_Params, frozen=True):
    id: str | None = None
    history_length: Number | None = None
    metadata: dict[str, Any] | None = None


class _List(_Params, frozen=True):
    context_id: str | None = None
    status: str | int | None = None
    page_size: Number | None = None
    page_token: str | None = None
    history_length: Number | None = None
    status_timestamp_after: str | None = None
    include_artifacts: bool | None = None


class _PushOf(_Params, frozen=True):
    task_id: str | None = None
    id: str | None = None
    page_size: Number | None = None
    page_token: str | None = None


_send = ParamsReader(_Send).read
_task = ParamsReader(_Task).read
_list = ParamsReader(_List).read
_push = ParamsReader(_Push).read
_push_of = ParamsReader(_PushOf).read
_nothing = ParamsReader(_Params).read


def decode_send(params: Params) -> asking.SendMessage:
    """SendMessage and SendStreamingMessage."""
    given: _Send = _send(params)
    if given.message is None:
        raise InvalidParams("message", "is required")
    message = _message(given.message)
    configuration = given.configuration
    if configuration is None:
        return asking.SendMessage(message=message, metadata=given.metadata)
    push = configuration.task_push_notification_config
    return asking.SendMessage(
        message=message,
        blocking=not configuration.return_immediately,
        history_length=int_value(configuration.history_length, "configuration.historyLength"),
        output_modes=configuration.accepted_output_modes or (),
        push=_push_config(push, "configuration.taskPushNotificationConfig.") if push is not None else None,
        metadata=given.metadata,
    )


def _message(given: Message) -> asking.Message:
    role = enum_value(given.role, ROLES, "message.role")
    if role is None:
        raise InvalidParams("message.role", "is required")
    if not given.parts:
        raise InvalidParams("message.parts", "must have at least one part")
    return asking.Message(
        message_id=required(given.message_id, "message.messageId"),
        parts=contents_of(given.parts, "message.parts"),
        role=role,
        task_id=given.task_id or None,
        context_id=given.context_id or None,
        metadata=given.metadata,
        extensions=given.extensions or (),
        reference_task_ids=given.reference_task_ids or (),
    )


def decode_get_task(params: Params, task_id: str | None = None) -> asking.GetTask:
    """`task_id`, here and below, is what the address said; it goes before what the params say."""
    given: _Task = _task(params)
    return asking.GetTask(
        task_id=task_id or required(given.id, "id"), history_length=int_value(given.history_length, "historyLength")
    )


def decode_list_tasks(params: Params) -> asking.ListTasks:
    return _listing(_list(params))


def _listing(given: _List) -> asking.ListTasks:
    after = given.status_timestamp_after
    size = int_value(given.page_size, "pageSize", low=1, high=PAGE_SIZE_MAX)
    return asking.ListTasks(
        context_id=given.context_id or None,
        state=enum_value(given.status, STATES, "status"),
        updated_after_ms=moments.parse_ms(after, "statusTimestampAfter") if after is not None else None,
        page_size=PAGE_SIZE if size is None else size,
        page_token=given.page_token or "",
        history_length=int_value(given.history_length, "historyLength"),
        include_artifacts=bool(given.include_artifacts),
    )


def decode_cancel(params: Params, task_id: str | None = None) -> asking.CancelTask:
    given: _Task = _task(params)
    return asking.CancelTask(task_id=task_id or required(given.id, "id"), metadata=given.metadata)


def decode_subscribe(params: Params, after: int | None = None, task_id: str | None = None) -> asking.Subscribe:
    """`after` is what `Last-Event-ID` said."""
    given: _Task = _task(params)
    return asking.Subscribe(task_id=task_id or required(given.id, "id"), after=after)


def decode_create_push(params: Params, task_id: str | None = None) -> asking.CreatePush:
    given: _Push = _push(params)
    return asking.CreatePush(task_id=task_id or required(given.task_id, "taskId"), config=_push_config(given, ""))


def _push_config(given: _Push, where: str) -> asking.PushConfig:
    authentication = None
    if given.authentication is not None:
        authentication = asking.PushAuthentication(
            scheme=required(given.authentication.scheme, f"{where}authentication.scheme"),
            credentials=given.authentication.credentials or None,
        )
    return asking.PushConfig(
        url=required(given.url, f"{where}url"),
        id=given.id or None,
        token=given.token or None,
        authentication=authentication,
    )


def decode_get_push(params: Params) -> asking.GetPush:
    given: _PushOf = _push_of(params)
    return asking.GetPush(task_id=required(given.task_id, "taskId"), id=required(given.id, "id"))


def decode_list_push(params: Params, task_id: str | None = None) -> asking.ListPush:
    given: _PushOf = _push_of(params)
    # Zero is what a client that does not care sends: this field, unlike that of a listing of tasks, has no presence.
    return asking.ListPush(
        task_id=task_id or required(given.task_id, "taskId"),
        page_size=min(int_value(given.page_size, "pageSize") or PAGE_SIZE, PAGE_SIZE_MAX),
        page_token=given.page_token or "",
    )


def decode_delete_push(params: Params) -> asking.DeletePush:
    given: _PushOf = _push_of(params)
    return asking.DeletePush(task_id=required(given.task_id, "taskId"), id=required(given.id, "id"))


def decode_nothing(params: Params) -> None:
    """GetExtendedAgentCard: it needs nothing, but what it has must be an object."""
    _nothing(params)
