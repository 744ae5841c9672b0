"""Converts protocol buffers to the JSON that the operations read, and from the JSON that they write.

A plan for each kind of message is made once, from its descriptor. That is five times as fast as the protobuf library's
own conversion, which reads descriptors each time. Needs the extra `grpc`.
"""

from __future__ import annotations

import base64
import functools
import math
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final, Generic, TypeVar

import msgspec
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.struct_pb2 import Struct, Value

from covenant.model.errors import InvalidParams

M = TypeVar("M", bound=Message)

_EXACT_MAX: Final = 2**53
"""Up to here a double tells every whole number apart."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class RequestReader:
    __slots__ = ("_convert", "kind")

    def __init__(self, kind: type[Message]) -> None:
        self.kind = kind
        self._convert = _to_plain(kind.DESCRIPTOR)

    def read(self, data: bytes) -> Message:
        try:
            return self.kind.FromString(data)
        except DecodeError:
            raise InvalidParams("params", f"no {self.kind.DESCRIPTOR.name} in protocol buffers") from None

    def params(self, message: Message) -> bytes:
        """The same request in JSON."""
        try:
            return _encode(self._convert(message))
        except (ValueError, OverflowError) as wrong:
            raise InvalidParams("params", str(wrong)) from None


class ResponseWriter(Generic[M]):
    """Makes one kind of answer from the JSON that an operation encodes."""

    __slots__ = ("_fields", "kind")

    def __init__(self, kind: type[M]) -> None:
        self.kind = kind
        self._fields = _from_plain(kind.DESCRIPTOR)

    def message(self, body: bytes) -> M:
        return self.kind(**self._fields(_decode(body)))


# From a message to plain values. An enum stays its number, which the JSON rules allow.

_Convert = Callable[[Any], Any]
"""Converts one value."""


@functools.cache
def _to_plain(kind: Descriptor) -> _Convert:
    special = _TO_PLAIN.get(kind.full_name)
    if special is not None:
        return special
    plan: dict[int, tuple[str, _Convert | None]] = {}

    def plain(message: Message) -> dict[str, Any]:
        if not plan:
            # Made on first use: a kind may contain itself.
            plan.update({field.number: (field.json_name, _value_to_plain(field)) for field in kind.fields})
        given: dict[str, Any] = {}
        for field, value in message.ListFields():
            name, convert = plan[field.number]
            given[name] = value if convert is None else convert(value)
        return given

    return plain


def _value_to_plain(field: FieldDescriptor) -> _Convert | None:
    convert: _Convert
    if field.message_type is not None:
        convert = _to_plain(field.message_type)
    elif field.type == FieldDescriptor.TYPE_BYTES:
        convert = _base64
    else:
        return list if field.is_repeated else None
    return (lambda values: [convert(value) for value in values]) if field.is_repeated else convert


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _struct_to_plain(struct: Any) -> dict[str, Any]:
    return {name: _value_message_to_plain(value) for name, value in struct.fields.items()}


def _value_message_to_plain(value: Any) -> Any:
    kind = value.WhichOneof("kind")
    match kind:
        case "string_value" | "bool_value":
            return getattr(value, kind)
        case "number_value":
            return _number(value.number_value)
        case "struct_value":
            return _struct_to_plain(value.struct_value)
        case "list_value":
            return [_value_message_to_plain(each) for each in value.list_value.values]
        case _:
            return None


def _number(value: float) -> int | float:
    """Whole numbers as integers, as in JSON. Values that JSON cannot express are refused."""
    if value - value != 0:  # infinite, or no number at all
        raise ValueError(f"{value} cannot be written as JSON")
    return int(value) if abs(value) <= _EXACT_MAX and value.is_integer() else value


_TO_PLAIN: Final[Mapping[str, _Convert]] = {
    "google.protobuf.Struct": _struct_to_plain,
    "google.protobuf.Value": _value_message_to_plain,
    "google.protobuf.Timestamp": lambda moment: moment.ToJsonString(),
}


# From plain values to the arguments that make a message.


@functools.cache
def _from_plain(kind: Descriptor) -> _Convert:
    plan: dict[str, tuple[str, _Convert | None]] = {}

    def fields(given: dict[str, Any]) -> dict[str, Any]:
        if not plan:
            plan.update({field.json_name: (field.name, _value_from_plain(field)) for field in kind.fields})
        made: dict[str, Any] = {}
        for key, value in given.items():
            name, convert = plan[key]
            # Of all fields only a Value can be null.
            if value is not None or convert is _value_message_from_plain:
                made[name] = value if convert is None else convert(value)
        return made

    return fields


def _value_from_plain(field: FieldDescriptor) -> _Convert | None:
    kind = field.message_type
    convert: _Convert
    if kind is not None and kind.GetOptions().map_entry:
        value_type = kind.fields_by_name["value"].message_type
        if value_type is None:
            return None
        make, fields = GetMessageClass(value_type), _from_plain(value_type)
        return lambda given: {name: make(**fields(value)) for name, value in given.items()}
    if kind is not None:
        convert = _FROM_PLAIN.get(kind.full_name) or _from_plain(kind)
    elif field.type == FieldDescriptor.TYPE_BYTES:
        convert = base64.b64decode
    else:
        return None
    return (lambda values: [convert(value) for value in values]) if field.is_repeated else convert


def _struct_from_plain(given: Mapping[str, Any]) -> Struct:
    made = Struct()
    made.update(given)
    return made


def _value_message_from_plain(given: Any) -> Value:
    return _struct_from_plain({"it": given}).fields["it"]


def _timestamp_from_plain(text: str) -> dict[str, int]:
    moment = datetime.fromisoformat(text)
    return {"seconds": math.floor(moment.timestamp()), "nanos": moment.microsecond * 1000}


_FROM_PLAIN: Final[Mapping[str, _Convert]] = {
    "google.protobuf.Struct": _struct_from_plain,
    "google.protobuf.Value": _value_message_from_plain,
    "google.protobuf.Timestamp": _timestamp_from_plain,
}
