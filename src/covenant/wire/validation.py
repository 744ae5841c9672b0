"""Checks values from Python code against their declared types.

A value passes if its JSON, decoded by its declared type, equals the value: then it means the same after the journal. A
float where a whole number belongs, bytes where text belongs, NaN, half a surrogate pair and an id that is a `UUID` do
not pass. A tuple may stand for an array, an int for a key.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import msgspec

from covenant.model.errors import WrongType
from covenant.wire.json_input import NESTING_MAX, deeper_than

T = TypeVar("T")

_LENGTH_MAX: Final = 200
_KEY_LENGTH_MAX: Final = 40
_PLACE: Final = re.compile(r"^(?P<what>.*) - at `\$(?P<place>.*)`$", re.DOTALL)
_PLAIN: Final = (str, int, float, bool, type(None))

encode: Final = msgspec.json.Encoder().encode


def checked(name: str, value: Any, kind: Any, nesting_max: int = NESTING_MAX) -> Any:
    """Returns the value as it will be decoded. Raises `WrongType`, which names the field, if it would differ."""
    try:
        return read_back(value, _decoder(kind), nesting_max)[1]
    except WrongType as wrong:
        raise WrongType(name + wrong.field, wrong.what) from None


@functools.cache
def _decoder(kind: Any) -> Callable[[bytes], Any]:
    return msgspec.json.Decoder(kind).decode


def read_back(value: Any, decode: Callable[[bytes], T], nesting_max: int) -> tuple[bytes, T]:
    """The value's JSON, and the value decoded from it. Raises `WrongType` with the path inside the value."""
    try:
        encoded = encode(value)
        found = decode(encoded)
        different = None if found == value else _difference(value, found)
        # A level takes a bracket. Most values have so few brackets that their depth is not checked.
        many = encoded.count(b"[") + encoded.count(b"{") > nesting_max
        too_deep = many and deeper_than((found,), nesting_max + 1)
    except Exception as wrong:  # noqa: BLE001  objects of all kinds are encoded here, and raise what they like
        raise _refusal(wrong, value) from None
    if different is not None:
        raise WrongType(different, "this value would be decoded as a different one")
    if too_deep:
        raise WrongType("", f"nested more than {nesting_max} levels deep")
    return encoded, found


def _difference(given: Any, found: Any) -> str | None:
    """The path where the decoded value differs; None if it does not. Not recursive, since values may be deep."""
    pairs: list[tuple[str, Any, Any]] = [("", given, found)]
    while pairs:
        place, one, other = pairs.pop()
        if isinstance(other, _PLAIN):
            if not _equal(one, other):
                return place
        elif isinstance(other, dict) and isinstance(one, dict):
            if len(one) != len(other):
                return place
            for key in one:
                name = str(key) if type(key) is int else key
                if type(name) is not str or name not in other:
                    return f"{place}.{_key_text(key)}"
                pairs.append((f"{place}.{_key_text(key)}", one[key], other[name]))
        elif isinstance(other, list | tuple) and isinstance(one, list | tuple):
            if len(one) != len(other):
                return place
            pairs += [(f"{place}[{index}]", each, other[index]) for index, each in enumerate(one)]
        elif isinstance(other, msgspec.Struct) and type(one) is type(other):
            names = other.__struct_fields__
            pairs += [(f"{place}.{name}", getattr(one, name), getattr(other, name)) for name in names]
        elif one is not other and one != other:
            return place
    return None


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, enum.Enum):
        one = one.value
    # A whole number may stand where a float is declared; `True` is not a number.
    return type(one) in _PLAIN and isinstance(one, bool) is isinstance(other, bool) and one == other


def _refusal(wrong: Exception, value: Any) -> WrongType:
    """msgspec's message as a refusal, with the path in front."""
    found = _PLACE.match(str(wrong)) if isinstance(wrong, msgspec.ValidationError) else None
    if found is not None:
        return WrongType(found["place"], _short(found["what"]))
    return WrongType(_unreadable(value), _short(str(wrong) or type(wrong).__name__))


def _unreadable(value: Any) -> str:
    """The path to the part that cannot be encoded and decoded, where the error does not name it."""
    place = ""
    while True:
        for name, part in _parts(value):
            if not _is_readable(part):
                place, value = place + name, part
                break
        else:
            return place
        if len(place) > _LENGTH_MAX:
            return place


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, msgspec.Struct):
        return ((f".{name}", getattr(value, name)) for name in value.__struct_fields__)
    if type(value) is dict:
        return ((f".{_key_text(key)}", part) for key, part in value.items())
    if type(value) in (list, tuple):
        return ((f"[{index}]", part) for index, part in enumerate(value))
    return iter(())


def _key_text(key: Any) -> str:
    """A key in a path: short, and always encodable text."""
    return ascii(key)[1:-1][:_KEY_LENGTH_MAX] if type(key) is str else f"<{type(key).__name__}>"


def _is_readable(value: Any) -> bool:
    try:
        msgspec.json.decode(encode(value))
    except Exception:  # noqa: BLE001  as above
        return False
    return True


def _short(message: str) -> str:
    return message if len(message) <= _LENGTH_MAX else f"{message[:_LENGTH_MAX]}…"
