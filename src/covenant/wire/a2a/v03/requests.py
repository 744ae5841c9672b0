"""What a client asks by a slash method: the params of each, read into the model. Null is absent, unknown is ignored."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from covenant.model import a2a_requests as asking
from covenant.model.a2a_requests import PAGE_SIZE, PAGE_SIZE_MAX
from covenant.model.task_view import TaskState
from covenant.wire import timestamps as moments
from covenant.wire.a2a.error_codes import InvalidParams
from covenant.wire.a2a.protojson import Number, ParamsReader, enum_value, int_value, required
from covenant.wire.a2a.v03.parts import Message, content_of

Params = bytes | msgspec.Raw

_ROLES: Final[dict[str | int, str]] = {"user": "user", "agent": "agent"}
_STATES: Final[dict[str | int, TaskState]] = {state.value: state for state in TaskState}
_MS_MAX: Final = 2**53


class _Params(msgspec.Struct, frozen=True, gc=False, rename="camel", kw_only=True):
    """All are objects, and none needs to be complete: what is missing is named when it is needed."""


class _Authentication(_Params, frozen=True):
    schemes: list[str] | None = None
    credentials: str | None = None


class _Push(_Params, frozen=True):
    id: str | None = None
    url: str | None = None
    token: str | None = None
    authentication: _Authentication | None = None


class _Configuration(_Params, frozen=True):
    accepted_output_modes: tuple[str, ...] | None = None
    push_notification_config: _Push | None = None
    history_length: Number | None = None
    blocking: bool | None = None


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
    status: str | None = None
    page_size: Number | None = None
    page_token: str | None = None
    history_length: Number | None = None
    last_updated_after: Number | None = None
    status_timestamp_after: str | None = None
    include_artifacts: bool | None = None


class _SetPush(_Params, frozen=True):
    task_id: str | None = None
    push_notification_config: _Push | None = None


class _PushOf(_Params, frozen=True):
    id: str | None = None
    push_notification_config_id: str | None = None


_send = ParamsReader(_Send, snake=False).read
_task = ParamsReader(_Task, snake=False).read
_list = ParamsReader(_List, snake=False).read
_set_push = ParamsReader(_SetPush, snake=False).read
_push_of = ParamsReader(_PushOf, snake=False).read
_nothing = ParamsReader(_Params, snake=False).read


def decode_send(params: Params) -> asking.SendMessage:
    """message/send and message/stream."""
    given: _Send = _send(params)
    if given.message is None:
        raise InvalidParams("message", "is required")
    message = _message(given.message)
    configuration = given.configuration
    if configuration is None:
        return asking.SendMessage(message=message, metadata=given.metadata)
    push = configuration.push_notification_config
    return asking.SendMessage(
        message=message,
        blocking=configuration.blocking is not False,
        history_length=int_value(configuration.history_length, "configuration.historyLength"),
        output_modes=configuration.accepted_output_modes or (),
        push=_push_config(push, "configuration.pushNotificationConfig") if push is not None else None,
        metadata=given.metadata,
    )


def _message(given: Message) -> asking.Message:
    role = enum_value(given.role, _ROLES, "message.role")
    if role is None:
        raise InvalidParams("message.role", "is required")
    if not given.parts:
        raise InvalidParams("message.parts", "must have at least one part")
    return asking.Message(
        message_id=required(given.message_id, "message.messageId"),
        parts=tuple([content_of(part, f"message.parts[{at}]") for at, part in enumerate(given.parts)]),
        role=role,
        task_id=given.task_id or None,
        context_id=given.context_id or None,
        metadata=given.metadata,
        extensions=given.extensions or (),
        reference_task_ids=given.reference_task_ids or (),
    )


def decode_get_task(params: Params) -> asking.GetTask:
    given: _Task = _task(params)
    return asking.GetTask(
        task_id=required(given.id, "id"), history_length=int_value(given.history_length, "historyLength")
    )


def decode_list_tasks(params: Params) -> asking.ListTasks:
    """Not a method of 0.3, but one that its clients miss; `lastUpdatedAfter` is in milliseconds."""
    given: _List = _list(params)
    after = int_value(given.last_updated_after, "lastUpdatedAfter", high=_MS_MAX)
    if given.status_timestamp_after is not None:
        after = moments.parse_ms(given.status_timestamp_after, "statusTimestampAfter")
    size = int_value(given.page_size, "pageSize", low=1, high=PAGE_SIZE_MAX)
    return asking.ListTasks(
        context_id=given.context_id or None,
        state=enum_value(given.status, _STATES, "status"),
        updated_after_ms=after,
        page_size=PAGE_SIZE if size is None else size,
        page_token=given.page_token or "",
        history_length=int_value(given.history_length, "historyLength"),
        include_artifacts=bool(given.include_artifacts),
    )


def decode_cancel(params: Params) -> asking.CancelTask:
    given: _Task = _task(params)
    return asking.CancelTask(task_id=required(given.id, "id"), metadata=given.metadata)


def decode_subscribe(params: Params, after: int | None = None) -> asking.Subscribe:
    """tasks/resubscribe. `after` is what `Last-Event-ID` said."""
    given: _Task = _task(params)
    return asking.Subscribe(task_id=required(given.id, "id"), after=after)


def decode_create_push(params: Params) -> asking.CreatePush:
    """tasks/pushNotificationConfig/set."""
    given: _SetPush = _set_push(params)
    task_id = required(given.task_id, "taskId")
    if given.push_notification_config is None:
        raise InvalidParams("pushNotificationConfig", "is required")
    return asking.CreatePush(
        task_id=task_id, config=_push_config(given.push_notification_config, "pushNotificationConfig")
    )


def _push_config(given: _Push, where: str) -> asking.PushConfig:
    return asking.PushConfig(
        url=required(given.url, f"{where}.url"),
        id=given.id or None,
        token=given.token or None,
        authentication=_authentication(given.authentication, f"{where}.authentication"),
    )


def _authentication(given: _Authentication | None, where: str) -> asking.PushAuthentication | None:
    """The first scheme is the one that we use. None at all, and nothing to prove it with, is no authentication."""
    if given is None or not (given.schemes or given.credentials):
        return None
    scheme = required(next(iter(given.schemes or ()), None), f"{where}.schemes")
    return asking.PushAuthentication(scheme=scheme, credentials=given.credentials or None)


def decode_get_push(params: Params) -> asking.GetPush:
    given: _PushOf = _push_of(params)
    return asking.GetPush(task_id=required(given.id, "id"), id=given.push_notification_config_id or None)


def decode_list_push(params: Params) -> asking.ListPush:
    given: _PushOf = _push_of(params)
    return asking.ListPush(task_id=required(given.id, "id"), page_size=PAGE_SIZE_MAX)


def decode_delete_push(params: Params) -> asking.DeletePush:
    given: _PushOf = _push_of(params)
    config_id = required(given.push_notification_config_id, "pushNotificationConfigId")
    return asking.DeletePush(task_id=required(given.id, "id"), id=config_id)


def decode_nothing(params: Params) -> None:
    """agent/getAuthenticatedExtendedCard: it needs nothing, but what it has must be an object."""
    _nothing(params)
