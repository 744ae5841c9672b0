"""Arguments of the public functions, checked against the annotations of the function when it is called."""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections import abc
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from covenant.model.errors import WrongType
from covenant.wire.validation import checked

T = TypeVar("T")
P = ParamSpec("P")

_PLAIN: Final = (str, int, float, bool, type(None))
_GENERIC: Final = (Union, types.UnionType, list, tuple, dict, abc.Sequence, abc.Mapping)


def checks_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Refuse, at the call, arguments that are not what the annotations of the function say.

    What can be JSON is checked as `checked` does it. Of other annotations the classes count; those that name none
    (`Any`, a callable) are not checked. An async function is refused when it is called, not when it is awaited.
    """
    signature = inspect.signature(function)

    @functools.cache
    def checks() -> Mapping[str, Callable[[str, Any], Any]]:
        hints = get_type_hints(inspect.unwrap(function))  # at the first call: by then all names are there
        found = {name: _check_of(hints[name]) for name in signature.parameters if name in hints}
        return {name: check for name, check in found.items() if check is not None}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = signature.bind(*args, **kwargs)
        for name, check in checks().items():
            if name not in bound.arguments:
                continue
            value = bound.arguments[name]
            match signature.parameters[name].kind:
                case inspect.Parameter.VAR_POSITIONAL:
                    value = tuple(check(f"{name}[{index}]", each) for index, each in enumerate(value))
                case inspect.Parameter.VAR_KEYWORD:
                    value = {key: check(key, each) for key, each in value.items()}
                case _:
                    value = check(name, value)
            bound.arguments[name] = value
        return function(*bound.args, **bound.kwargs)

    return call


def _check_of(hint: Any) -> Callable[[str, Any], Any] | None:
    if _is_json(hint):
        return lambda name, value: checked(name, value, hint)
    classes = _classes(hint)
    if classes is None:
        return None
    wanted = " | ".join(kind.__name__ for kind in classes)

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, classes):
            raise WrongType(name, f"Expected `{wanted}`, got `{type(value).__name__}`")
        return value

    return check


def _is_json(hint: Any) -> bool:
    """Whether the type is one that JSON can be read by."""
    if hasattr(hint, "__supertype__"):
        return _is_json(hint.__supertype__)
    origin = get_origin(hint)
    if origin is Literal:
        return True
    if origin is Annotated:
        return _is_json(get_args(hint)[0])
    if origin is not None:
        return origin in _GENERIC and all(each is ... or _is_json(each) for each in get_args(hint))
    return isinstance(hint, type) and (hint in _PLAIN or issubclass(hint, msgspec.Struct | enum.Enum))


def _classes(hint: Any) -> tuple[type, ...] | None:
    """The classes that the annotation names; None if it names something else as well."""
    if get_origin(hint) in (Union, types.UnionType):
        parts = [_classes(each) for each in get_args(hint)]
        return None if None in parts else tuple(kind for part in parts if part for kind in part)
    if hint is bytes:
        return bytes, bytearray, memoryview
    kind = get_origin(hint) or hint
    return (kind,) if isinstance(kind, type) and kind is not Any else None
