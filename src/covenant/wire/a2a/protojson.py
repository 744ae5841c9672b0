"""ProtoJSON input: the JSON forms of protocol buffers that a sender may use, beyond the form that we write.

Field names may be camelCase or snake_case wherever a name is known, unknown fields are ignored, null means absent, an
enum may be its name or its number, an integer may be a string, bytes may be base64 of either alphabet with or without
padding, and times are RFC 3339. An invalid value raises `InvalidParams` that names the field.
"""

from __future__ import annotations

import binascii
import functools
import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar, get_args, get_origin

import msgspec

from covenant.model.errors import InvalidParams
from covenant.wire.json_input import A2A_NESTING_MAX, parse, shorten

T = TypeVar("T", bound=msgspec.Struct)
E = TypeVar("E")

Number = int | float | str
INT32_MAX: Final = 2**31 - 1

# Only a name in snake_case needs the slow path. An underscore may be written as a JSON escape.
_UNDERSCORE, _BACKSLASH = b"_\\"
_snake = re.compile(rb"_[a-z]").search
_WRONG: Final = re.compile(r"(?P<what>.*?)(?: - at `(?P<where>[^`]*)`)?", re.DOTALL)
_any = msgspec.json.Decoder()
_integer = re.compile(r"-?[0-9]{1,20}").fullmatch
_URL_SAFE: Final = str.maketrans("-_", "+/")


class ParamsReader:
    """Decodes one type of params: directly if all names are in our spelling, otherwise after renaming them."""

    __slots__ = ("_decode", "_decoder", "_kind", "_renamed", "_snake")

    def __init__(self, kind: type[msgspec.Struct], *, snake: bool = True, renamed: bool = False) -> None:
        """`snake`: names may be in snake_case. `renamed`: a field's Python name is not its JSON name in snake_case."""
        self._kind = kind
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)
        self._decode = self._decoder.decode
        self._snake = snake
        self._renamed = renamed

    def read(self, params: bytes | msgspec.Raw) -> Any:
        data = (params if type(params) is bytes else bytes(params)) or b"{}"
        # Searching for one byte by its number is ten times as fast as searching for several.
        may_be_snake = (_UNDERSCORE in data and _snake(data) is not None) or (_BACKSLASH in data and b"\\u005" in data)
        plain = not (self._renamed or (self._snake and may_be_snake))
        # Every level takes two brackets: with so few brackets the nesting cannot be too deep.
        if plain and (len(data) <= 2 * A2A_NESTING_MAX or data.count(b"{") + data.count(b"[") <= A2A_NESTING_MAX):
            try:
                return self._decode(data)
            except (ValueError, RecursionError):
                pass  # the slow path below reports what is wrong
        try:
            if plain:
                return parse(self._decoder, data, A2A_NESTING_MAX)
            spelled = in_camel_case(parse(_any, data, A2A_NESTING_MAX), self._kind, "")
            return msgspec.convert(spelled, self._kind)
        except msgspec.ValidationError as wrong:
            raise invalid_field(wrong) from None


def invalid_field(wrong: msgspec.ValidationError) -> InvalidParams:
    """The decoder's message as a refusal, with the path of the field in front and without its `$`."""
    match = _WRONG.fullmatch(shorten(str(wrong)))
    assert match is not None
    where = (match["where"] or "").removeprefix("$").removeprefix(".")
    return InvalidParams(where if where[:1] not in ("", "[") else f"params{where}", match["what"])


@functools.cache
def _fields_of(kind: type[msgspec.Struct]) -> tuple[tuple[str, str, type[msgspec.Struct] | None], ...]:
    """The Python and JSON names of each field, and the struct inside it, if any."""
    fields = msgspec.structs.fields(kind)
    return tuple((field.name, field.encode_name, _struct_in(field.type)) for field in fields)


def _struct_in(annotation: Any) -> type[msgspec.Struct] | None:
    kind = get_origin(annotation) or annotation
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        of_kind: type[msgspec.Struct] = annotation  # with its parameters, if it is generic
        return of_kind
    return next((found for inner in get_args(annotation) if (found := _struct_in(inner))), None)


def in_camel_case(value: Any, kind: type[msgspec.Struct], where: str) -> Any:
    """`value` with the field names of `kind` in camelCase; other names are untouched."""
    if isinstance(value, list):
        return [in_camel_case(item, kind, f"{where}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    spelled = dict(value)
    for snake, camel, inside in _fields_of(kind):
        if snake != camel and snake in spelled:
            given = spelled.pop(snake)
            if spelled.get(camel) is not None and given is not None:
                raise InvalidParams(inside_of(where, camel), f"given twice, also as {snake}")
            if given is not None:
                spelled[camel] = given
        if inside is not None and camel in spelled:
            spelled[camel] = in_camel_case(spelled[camel], inside, inside_of(where, camel))
    return spelled


def inside_of(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def required(value: str | None, field: str) -> str:
    """Returns the value, or refuses an absent or empty one: protocol buffers do not tell the two apart."""
    if not value:
        raise InvalidParams(field, "is required")
    return value


def int_value(value: Number | None, field: str, *, low: int = 0, high: int = INT32_MAX) -> int | None:
    """Reads an integer between `low` and `high`, written as a number (1, 1.0) or a string."""
    if value is None:
        return None
    try:
        number = int(value) if not isinstance(value, str) else int(_plain(value))
        exact = isinstance(value, str) or number == value
    except (ValueError, OverflowError):
        number, exact = 0, False
    if not exact:
        raise InvalidParams(field, f"must be a whole number, not {str(value)[:40]!r}")
    if not low <= number <= high:
        raise InvalidParams(field, f"must be between {low} and {high}, not {str(number)[:20]}")
    return number


def _plain(text: str) -> str:
    if _integer(text) is None:
        raise ValueError(text)
    return text


def enum_value(value: str | int | None, names: Mapping[str | int, E], field: str) -> E | None:
    """Reads a member of an enum by its name or number; None if it is missing or unspecified."""
    if value is None:
        return None
    try:
        return names[value]
    except KeyError:
        known = ", ".join(name for name in names if isinstance(name, str))
        raise InvalidParams(field, f"{str(value)[:60]!r} is not one of {known}") from None


def standard_base64(text: str, field: str) -> str:
    """The same bytes in the standard alphabet with padding; a text that has both is returned as it is."""
    standard = text.translate(_URL_SAFE) if "-" in text or "_" in text else text
    if len(standard) % 4:
        standard = standard.rstrip("=")
        standard += "=" * (-len(standard) % 4)
    try:
        binascii.a2b_base64(standard, strict_mode=True)
    except ValueError:
        raise InvalidParams(field, "is not base64") from None
    return standard
