"""Decodes the params of the A2A methods into the model (`model.a2a_requests`), in either dialect.

A2A 1.0 is read by the rules of ProtoJSON. In 0.3, null is absent and unknown fields are ignored. An invalid value
raises `InvalidParams` that names the field. The REST binding's reads have their params in a query string, under the
names that bodies use; `task_id` and `config_id` are the ids in the URL, which win over those in the params.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Final
from urllib.parse import parse_qsl

import msgspec

from covenant.model import a2a_requests
from covenant.model.a2a_requests import PAGE_SIZE, PAGE_SIZE_MAX
from covenant.model.errors import InvalidParams
from covenant.model.task_view import TaskState
from covenant.wire import timestamps
from covenant.wire.a2a import parts_v03, parts_v1
from covenant.wire.a2a.error_codes import Version
from covenant.wire.a2a.parts_proto_v03 import MessageProtoV03
from covenant.wire.a2a.parts_v03 import MessageV03
from covenant.wire.a2a.parts_v1 import MessageV1
from covenant.wire.a2a.protojson import Number, ParamsReader, enum_value, int_value, required
from covenant.wire.json_input import QUERY_FIELDS_MAX

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
STATE_NAMES_V1: Final = {state: f"TASK_STATE_{state.name}" for state in TaskState}
STATES_V1: Final[dict[str | int, TaskState | None]] = {
    **{STATE_NAMES_V1[state]: state for state in _NUMBERED},
    **dict(enumerate(_NUMBERED, start=1)),
    "TASK_STATE_UNSPECIFIED": None,
    0: None,
}
CANCELLED_V03: Final = "TASK_STATE_CANCELLED"
"""The spelling of this state in the protocol buffers of 0.3."""
STATES_PROTO_V03: Final = STATES_V1 | {CANCELLED_V03: TaskState.CANCELED}
STATES_V03: Final[dict[str | int, TaskState | None]] = {state.value: state for state in TaskState}
ONLY_PUSH_V03: Final = "default"
"""The id of a configuration whose client gives none: in 0.3 only clients with several configurations give ids."""
_MS_MAX: Final = 2**53
_BOOLEANS: Final = {"true": True, "false": False}
_encode = msgspec.json.Encoder().encode
_task_name = re.compile(r"tasks/([^/]+)(?:/pushNotificationConfigs(?:/([^/]+))?)?").fullmatch


class _Params(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """No field is required here: a missing one is refused where it is needed. `tenant` of 1.0 is ignored: the URL
    already names the agent. Push configurations are written in the same form."""


class AuthenticationV1(_Params, frozen=True):
    scheme: str | None = None
    credentials: str | None = None


class PushObjectV1(_Params, frozen=True):
    id: str | None = None
    task_id: str | None = None
    url: str | None = None
    token: str | None = None
    authentication: AuthenticationV1 | None = None


class AuthenticationV03(_Params, frozen=True):
    schemes: list[str] | None = None
    credentials: str | None = None


class PushObjectV03(_Params, frozen=True):
    id: str | None = None
    url: str | None = None
    token: str | None = None
    authentication: AuthenticationV03 | None = None


class TaskPushObjectV03(_Params, frozen=True):
    task_id: str | None = None
    push_notification_config: PushObjectV03 | None = None


class _Configuration(_Params, frozen=True):
    accepted_output_modes: tuple[str, ...] | None = None
    history_length: Number | None = None


class _ConfigurationV1(_Configuration, frozen=True):
    task_push_notification_config: PushObjectV1 | None = None
    return_immediately: bool | None = None


class _ConfigurationV03(_Configuration, frozen=True):
    push_notification_config: PushObjectV03 | None = None
    blocking: bool | None = None


class _SendV1(_Params, frozen=True):
    message: MessageV1 | None = None
    configuration: _ConfigurationV1 | None = None
    metadata: dict[str, Any] | None = None


class _SendV03(_Params, frozen=True):
    message: MessageV03 | None = None
    configuration: _ConfigurationV03 | None = None
    metadata: dict[str, Any] | None = None


class _ConfigurationProtoV03(_Configuration, frozen=True):
    push_notification: PushObjectV03 | None = None
    blocking: bool | None = None

    @property
    def push_notification_config(self) -> PushObjectV03 | None:
        return self.push_notification


class _SendProtoV03(_Params, frozen=True):
    request: MessageProtoV03 | None = msgspec.field(default=None, name="message")
    """Protocol buffers have two JSON names for it. Official clients send this one."""
    configuration: _ConfigurationProtoV03 | None = None
    metadata: dict[str, Any] | None = None

    @property
    def message(self) -> MessageProtoV03 | None:
        return self.request


class _Task(_Params, frozen=True):
    id: str | None = None
    history_length: Number | None = None
    metadata: dict[str, Any] | None = None


class _List(_Params, frozen=True):
    context_id: str | None = None
    page_size: Number | None = None
    page_token: str | None = None
    history_length: Number | None = None
    status_timestamp_after: str | None = None
    include_artifacts: bool | None = None


class _ListV1(_List, frozen=True):
    status: str | int | None = None


class _ListV03(_List, frozen=True):
    status: str | None = None
    last_updated_after: Number | None = None


class _PushOfV1(_Params, frozen=True):
    task_id: str | None = None
    id: str | None = None
    page_size: Number | None = None
    page_token: str | None = None


class _PushOfV03(_Params, frozen=True):
    id: str | None = None
    push_notification_config_id: str | None = None


class _NamedProtoV03(_Params, frozen=True):
    """A task or push configuration, named by a path: `tasks/…/pushNotificationConfigs/…`."""

    name: str | None = None
    parent: str | None = None
    history_length: Number | None = None
    metadata: dict[str, Any] | None = None

    @property
    def id(self) -> str | None:
        found = _task_name(self.name or self.parent or "")
        return found[1] if found is not None else None

    @property
    def push_notification_config_id(self) -> str | None:
        found = _task_name(self.name or "")
        return found[2] if found is not None else None


class _ConfigProtoV03(_Params, frozen=True):
    push_notification_config: PushObjectV03 | None = None


class _SetPushProtoV03(_ConfigProtoV03, frozen=True):
    """In gRPC the configuration comes with the task's name. Over HTTP the body may also be the bare configuration."""

    parent: str | None = None
    config_id: str | None = None
    config: _ConfigProtoV03 | None = None


class RequestDecoder(ABC):
    """The decoding that both dialects share."""

    push_fields: ClassVar[tuple[str, str]]
    """The fields that name a push configuration: its task, and its own id."""
    one_push: ClassVar[bool]
    """Whether a client may leave out the configuration's id, as most tasks have only one."""
    _push_of: Callable[[Params], Any]
    """Reads the params that name push configurations, as a struct with `push_fields`."""

    def __init__(
        self,
        send: type[_SendV1 | _SendV03 | _SendProtoV03],
        listing: type[_ListV1 | _ListV03],
        *,
        task: type[_Task | _NamedProtoV03] = _Task,
        roles: dict[str | int, str | None],
        states: dict[str | int, TaskState | None],
        snake: bool,
    ) -> None:
        self._send = ParamsReader(send, snake=snake, renamed=send is _SendProtoV03).read
        self._list = ParamsReader(listing, snake=snake).read
        self._task = ParamsReader(task, snake=snake).read
        self._nothing = ParamsReader(_Params, snake=snake).read
        self._roles = roles
        self._states = states

    def decode_send(self, params: Params) -> a2a_requests.SendMessage:
        """Decodes the params of a send, streamed or not."""
        fields: _SendV1 | _SendV03 | _SendProtoV03 = self._send(params)
        if fields.message is None:
            raise InvalidParams("message", "is required")
        message = self._message(fields.message)
        configuration = fields.configuration
        if configuration is None:
            return a2a_requests.SendMessage(message=message, metadata=fields.metadata)
        blocking, push = self._configured(configuration)
        return a2a_requests.SendMessage(
            message=message,
            blocking=blocking,
            history_length=int_value(configuration.history_length, "configuration.historyLength"),
            output_modes=configuration.accepted_output_modes or (),
            push=push,
            metadata=fields.metadata,
        )

    def _message(self, fields: MessageV1 | MessageV03 | MessageProtoV03) -> a2a_requests.Message:
        role = self._roles.get(fields.role) if fields.role else None
        if role is None:
            role = enum_value(fields.role, self._roles, "message.role")
        if role is None:
            raise InvalidParams("message.role", "is required")
        if not fields.parts:
            raise InvalidParams("message.parts", "must have at least one part")
        return a2a_requests.Message(
            message_id=fields.message_id or required(fields.message_id, "message.messageId"),
            parts=fields.contents("message.parts"),
            role=role,
            task_id=fields.task_id or None,
            context_id=fields.context_id or None,
            metadata=fields.metadata,
            extensions=fields.extensions or (),
            reference_task_ids=fields.reference_task_ids or (),
        )

    def decode_get_task(self, params: Params, task_id: str | None = None) -> a2a_requests.GetTask:
        fields: _Task | _NamedProtoV03 = self._task(params)
        length = int_value(fields.history_length, "historyLength")
        return a2a_requests.GetTask(task_id=task_id or required(fields.id, "id"), history_length=length)

    def decode_cancel(self, params: Params, task_id: str | None = None) -> a2a_requests.CancelTask:
        fields: _Task | _NamedProtoV03 = self._task(params)
        return a2a_requests.CancelTask(task_id=task_id or required(fields.id, "id"), metadata=fields.metadata)

    def decode_subscribe(self, params: Params, task_id: str | None = None) -> a2a_requests.Subscribe:
        fields: _Task | _NamedProtoV03 = self._task(params)
        return a2a_requests.Subscribe(task_id=task_id or required(fields.id, "id"))

    def decode_list_tasks(self, params: Params) -> a2a_requests.ListTasks:
        fields: _ListV1 | _ListV03 = self._list(params)
        size = int_value(fields.page_size, "pageSize", low=1, high=PAGE_SIZE_MAX)
        return a2a_requests.ListTasks(
            context_id=fields.context_id or None,
            state=enum_value(fields.status, self._states, "status"),
            updated_after_ms=_updated_after(fields),
            page_size=PAGE_SIZE if size is None else size,
            page_token=fields.page_token or "",
            history_length=int_value(fields.history_length, "historyLength"),
            include_artifacts=bool(fields.include_artifacts),
        )

    def decode_nothing(self, params: Params) -> None:
        """Decodes the params of the extended card: any object."""
        self._nothing(params)

    @abstractmethod
    def _configured(self, fields: Any) -> tuple[bool, a2a_requests.PushConfig | None]:
        """Returns whether the answer waits for the task's end, and the push configuration."""

    @abstractmethod
    def decode_create_push(self, params: Params, task_id: str | None = None) -> a2a_requests.CreatePush: ...

    def decode_get_push(
        self, params: Params, task_id: str | None = None, config_id: str | None = None
    ) -> a2a_requests.GetPush:
        named = self._push_ids(params, task_id, config_id, config_required=not self.one_push)
        return a2a_requests.GetPush(task_id=named[0], id=named[1] or None)

    @abstractmethod
    def decode_list_push(self, params: Params, task_id: str | None = None) -> a2a_requests.ListPush: ...

    def decode_delete_push(
        self, params: Params, task_id: str | None = None, config_id: str | None = None
    ) -> a2a_requests.DeletePush:
        named = self._push_ids(params, task_id, config_id, config_required=True)
        return a2a_requests.DeletePush(task_id=named[0], id=named[1])

    def _push_ids(
        self, params: Params, task_id: str | None, config_id: str | None, *, config_required: bool
    ) -> tuple[str, str]:
        fields = self._push_of(params)
        task_field, config_field = self.push_fields
        task_id = task_id or required(getattr(fields, task_field), _json_name(task_field))
        config_id = config_id or getattr(fields, config_field)
        return task_id, required(config_id, _json_name(config_field)) if config_required else config_id or ""


def _json_name(field: str) -> str:
    first, *others = field.split("_")
    return first + "".join(map(str.title, others))


def _updated_after(fields: _ListV1 | _ListV03) -> int | None:
    """The lower bound of `updated_at`. 0.3 has no listing; its clients send `lastUpdatedAfter` in milliseconds."""
    if fields.status_timestamp_after is not None:
        return timestamps.parse_ms(fields.status_timestamp_after, "statusTimestampAfter")
    if isinstance(fields, _ListV03):
        return int_value(fields.last_updated_after, "lastUpdatedAfter", high=_MS_MAX)
    return None


def _push_config(
    fields: PushObjectV1 | PushObjectV03,
    where: str,
    authentication: a2a_requests.PushAuthentication | None,
    version: Version,
) -> a2a_requests.PushConfig:
    return a2a_requests.PushConfig(
        url=required(fields.url, f"{where}url"),
        id=fields.id or None,
        token=fields.token or None,
        authentication=authentication,
        version=version.value,
    )


class RequestDecoderV1(RequestDecoder):
    push_fields = "task_id", "id"
    one_push = False

    def __init__(self) -> None:
        super().__init__(_SendV1, _ListV1, roles=parts_v1.ROLES, states=STATES_V1, snake=True)
        self._push = ParamsReader(PushObjectV1).read
        self._push_of = ParamsReader(_PushOfV1).read

    def _configured(self, fields: _ConfigurationV1) -> tuple[bool, a2a_requests.PushConfig | None]:
        push = fields.task_push_notification_config
        config = self._config(push, "configuration.taskPushNotificationConfig.") if push is not None else None
        return not fields.return_immediately, config

    def _config(self, fields: PushObjectV1, where: str) -> a2a_requests.PushConfig:
        authentication = None
        if fields.authentication is not None:
            authentication = a2a_requests.PushAuthentication(
                scheme=required(fields.authentication.scheme, f"{where}authentication.scheme"),
                credentials=fields.authentication.credentials or None,
            )
        return _push_config(fields, where, authentication, Version.V1)

    def decode_create_push(self, params: Params, task_id: str | None = None) -> a2a_requests.CreatePush:
        fields: PushObjectV1 = self._push(params)
        return a2a_requests.CreatePush(
            task_id=task_id or required(fields.task_id, "taskId"), config=self._config(fields, "")
        )

    def decode_list_push(self, params: Params, task_id: str | None = None) -> a2a_requests.ListPush:
        fields: _PushOfV1 = self._push_of(params)
        # A client without a preference sends zero: unlike in a listing of tasks, this field has no presence.
        return a2a_requests.ListPush(
            task_id=task_id or required(fields.task_id, "taskId"),
            page_size=min(int_value(fields.page_size, "pageSize") or PAGE_SIZE, PAGE_SIZE_MAX),
            page_token=fields.page_token or "",
        )


class _RequestDecoder03(RequestDecoder):
    """The decoding that all bindings of 0.3 share."""

    push_fields = "id", "push_notification_config_id"
    one_push = True

    def _configured(
        self, fields: _ConfigurationV03 | _ConfigurationProtoV03
    ) -> tuple[bool, a2a_requests.PushConfig | None]:
        push = fields.push_notification_config
        config = self._config(push, "configuration.pushNotificationConfig.") if push is not None else None
        return fields.blocking is not False, config

    def _config(self, fields: PushObjectV03, where: str) -> a2a_requests.PushConfig:
        """Reads a push configuration. The first scheme is used. Neither scheme nor credentials: no authentication."""
        auth, authentication = fields.authentication, None
        if auth is not None and (auth.schemes or auth.credentials):
            scheme = required(next(iter(auth.schemes or ()), None), f"{where}authentication.schemes")
            authentication = a2a_requests.PushAuthentication(scheme=scheme, credentials=auth.credentials or None)
        config = _push_config(fields, where, authentication, Version.V03)
        return config if config.id is not None else msgspec.structs.replace(config, id=ONLY_PUSH_V03)

    def decode_create_push(self, params: Params, task_id: str | None = None) -> a2a_requests.CreatePush:
        named, push = self._created_push(params)
        task_id = task_id or required(named, "taskId")
        if push is None:
            raise InvalidParams("pushNotificationConfig", "is required")
        return a2a_requests.CreatePush(task_id=task_id, config=self._config(push, "pushNotificationConfig."))

    @abstractmethod
    def _created_push(self, params: Params) -> tuple[str | None, PushObjectV03 | None]:
        """The task's id and the configuration."""

    def decode_list_push(self, params: Params, task_id: str | None = None) -> a2a_requests.ListPush:
        fields = self._push_of(params)
        return a2a_requests.ListPush(task_id=task_id or required(fields.id, "id"), page_size=PAGE_SIZE_MAX)


class RequestDecoderV03(_RequestDecoder03):
    def __init__(self) -> None:
        super().__init__(_SendV03, _ListV03, roles=parts_v03.ROLES, states=STATES_V03, snake=False)
        self._set_push = ParamsReader(TaskPushObjectV03, snake=False).read
        self._push_of = ParamsReader(_PushOfV03, snake=False).read

    def _created_push(self, params: Params) -> tuple[str | None, PushObjectV03 | None]:
        fields: TaskPushObjectV03 = self._set_push(params)
        return fields.task_id, fields.push_notification_config


class RequestDecoderProtoV03(_RequestDecoder03):
    """Decodes 0.3 over HTTP+JSON and gRPC. Over HTTP the ids are in the URL."""

    def __init__(self) -> None:
        super().__init__(
            _SendProtoV03, _ListV03, task=_NamedProtoV03, roles=parts_v1.ROLES, states=STATES_PROTO_V03, snake=True
        )
        self._set_push = ParamsReader(_SetPushProtoV03).read
        self._push_of = ParamsReader(_NamedProtoV03).read

    def _configured(
        self, fields: _ConfigurationV03 | _ConfigurationProtoV03
    ) -> tuple[bool, a2a_requests.PushConfig | None]:
        # A field that a protocol buffer leaves out is false.
        return bool(fields.blocking), super()._configured(fields)[1]

    def _created_push(self, params: Params) -> tuple[str | None, PushObjectV03 | None]:
        fields: _SetPushProtoV03 = self._set_push(params)
        push = (fields.config or fields).push_notification_config
        if push is not None and push.id is None and fields.config_id:
            push = msgspec.structs.replace(push, id=fields.config_id)
        found = _task_name(fields.parent or "")
        return found[1] if found is not None else None, push


def query_params(query: bytes) -> bytes:
    """Converts a query string to a JSON object. Of a field that is given twice, the last value counts."""
    try:
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX)
    except ValueError:
        raise InvalidParams("query", f"may have at most {QUERY_FIELDS_MAX} fields") from None
    return _encode({name: _query_value(name, text) for name, text in pairs if text})


def _query_value(name: str, text: str) -> Any:
    if name in ("includeArtifacts", "include_artifacts"):
        if text not in _BOOLEANS:
            raise InvalidParams("includeArtifacts", "must be true or false")
        return _BOOLEANS[text]
    # An enum may be given by its number, and values of a query are all text.
    return int(text) if name == "status" and text.isascii() and text.isdigit() and len(text) < 10 else text
