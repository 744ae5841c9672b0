"""Decodes JSON and query strings by type. Invalid input raises a refusal that names the place, and no other exception.

Unknown fields are ignored, unless `check_fields` looks for them. Depth is bounded well below the interpreter's
recursion limit, so that every accepted value can also be journaled, archived and sent again, from any depth of calls.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, Final, TypeVar, get_args
from urllib.parse import parse_qsl

import msgspec

from covenant.model.errors import Invalid, did_you_mean

T = TypeVar("T")

NESTING_MAX: Final = 64
A2A_NESTING_MAX: Final = 32
"""For values that A2A clients get back: they build protocol buffers, which nest three messages a level, 100 at most."""
QUERY_FIELDS_MAX: Final = 32
_MESSAGE_LENGTH_MAX: Final = 300
_CONTAINERS: Final = (dict, list, tuple, msgspec.Struct)


def decode(decoder: msgspec.json.Decoder[T], data: bytes, nesting_max: int = NESTING_MAX) -> T:
    try:
        return parse(decoder, data, nesting_max)
    except msgspec.ValidationError as wrong:
        raise Invalid("invalid_request", shorten(str(wrong))) from None


def parse(decoder: msgspec.json.Decoder[T], data: bytes, nesting_max: int = NESTING_MAX) -> T:
    """Like `decode`, but raises the decoder's own error where a value does not fit its type."""
    try:
        value = decoder.decode(data)
    except msgspec.ValidationError:
        raise
    except RecursionError:
        raise too_deep(nesting_max) from None
    except ValueError as wrong:  # malformed JSON, or bytes that are not UTF-8
        raise Invalid("invalid_json", shorten(str(wrong))) from None
    # Every level takes two brackets: most requests are so short, or have so few, that their depth is not checked.
    if (
        len(data) > 2 * nesting_max
        and data.count(b"{") + data.count(b"[") > nesting_max
        and deeper_than(value, nesting_max)
    ):
        raise too_deep(nesting_max)
    return value


def check_fields(data: bytes, kind: type[msgspec.Struct], allowed: Container[str] = ()) -> None:
    """Refuses unknown fields of decoded data, at any depth. `allowed`: further fields that are allowed at the top."""
    given = msgspec.json.decode(data)
    _check_fields({name: value for name, value in given.items() if name not in allowed}, kind, "")


def _check_fields(given: Any, kind: Any, where: str) -> None:
    structs = [
        each for each in (get_args(kind) or (kind,)) if isinstance(each, type) and issubclass(each, msgspec.Struct)
    ]
    if not structs or not isinstance(given, dict):
        return
    fields = {field.encode_name: field.type for each in structs for field in msgspec.structs.fields(each)}
    tags = {each.__struct_config__.tag_field for each in structs}
    for name, value in given.items():
        if name in fields:
            _check_fields(value, fields[name], f"{where}{name}.")
        elif name not in tags:
            meant = did_you_mean(name, fields)
            raise Invalid("unknown_field", f"{where}{name[:80]} is not a field of this request{meant}")


def decode_query(kind: type[T], query: bytes) -> T:
    """Decodes a query string as a struct. Of a field that is given twice, the last value counts."""
    try:
        fields = parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX)
    except ValueError:
        raise Invalid("invalid_request", f"a query may have at most {QUERY_FIELDS_MAX} fields") from None
    if getattr(kind, "strict", False):
        _check_fields(dict(fields), kind, "")
    try:
        return msgspec.convert(dict(fields), kind, strict=False)
    except msgspec.ValidationError as wrong:
        raise Invalid("invalid_request", shorten(str(wrong))) from None


def shorten(message: str) -> str:
    """Cuts a decoder's message in the middle: its path is at the end, and the caller's own long text before it."""
    if len(message) <= _MESSAGE_LENGTH_MAX:
        return message
    return f"{message[: _MESSAGE_LENGTH_MAX - 100]}…{message[-100:]}"


def too_deep(nesting_max: int = NESTING_MAX) -> Invalid:
    return Invalid("invalid_json", f"nested more than {nesting_max} levels deep")


def deeper_than(value: Any, levels: int) -> bool:
    """Whether a value is nested deeper. Works level by level, so that a deep value cannot exhaust our own recursion."""
    level: list[Any] = [value]
    for _ in range(levels):
        level = [inner for outer in level for inner in members(outer) if isinstance(inner, _CONTAINERS)]
        if not level:
            return False
    return True


def members(value: Any) -> Iterable[Any]:
    """The members of a container, one level down."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.astuple(value)
    return value if isinstance(value, list | tuple) else ()
