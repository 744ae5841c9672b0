"""Checks the arguments of public functions against the functions' annotations, at each call."""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections import abc
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from covenant.model.errors import WrongType
from covenant.wire.validation import checked

T = TypeVar("T")
P = ParamSpec("P")

Check = Callable[[str, Any], Any]

_PLAIN: Final = (str, int, float, bool, type(None))
_GENERIC: Final = (Union, types.UnionType, list, tuple, dict, abc.Sequence, abc.Mapping)


def checks_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Refuses, at the call, arguments that do not match the function's annotations.

    JSON types are checked by `checked`. Of other annotations the classes are checked; annotations without a class
    (`Any`, a callable) are not. Keyword names that the caller makes up must be valid text. An async function refuses
    when it is called, not when it is awaited.
    """
    parameters = inspect.signature(function).parameters
    several = next((name for name, each in parameters.items() if each.kind is each.VAR_POSITIONAL), None)
    others = next((name for name, each in parameters.items() if each.kind is each.VAR_KEYWORD), None)
    names = [
        name for name, each in parameters.items() if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]

    @functools.cache
    def checks() -> Mapping[str, Check]:
        hints = get_type_hints(inspect.unwrap(function))  # at the first call, when all names are defined
        found = {name: _check_of(hints[name]) for name in parameters if name in hints}
        return {name: check for name, check in found.items() if check is not None}

    @functools.cache
    def places() -> list[tuple[str, Check | None]]:
        return [(name, checks().get(name)) for name in names]

    def unnamed(args: tuple[Any, ...]) -> Iterator[Any]:
        check = checks().get(several) if several is not None else None
        for place, value in enumerate(args):
            yield value if check is None else check(f"{several}[{place}]", value)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        # By hand: binding the signature takes several times as long as all the checks.
        found = checks()
        for name, value in kwargs.items():
            check = found.get(name)
            if others is not None and name not in parameters:
                check = found.get(others)
                if not name.isascii():
                    checked(others, name, str)  # the name may hold half a surrogate pair
            if check is not None:
                kwargs[name] = check(name, value)
        named = zip(args, places(), strict=False)
        given: list[Any] = [value if check is None else check(name, value) for value, (name, check) in named]
        return function(*given, *unnamed(args[len(given) :]), **kwargs)

    return call


def checks_methods(kind: type[T]) -> type[T]:
    """`checks_arguments` for every public method of a class."""
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(kind, name, checks_arguments(method))
    return kind


def _check_of(hint: Any) -> Check | None:
    if _is_json(hint):
        parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        plain = {getattr(part, "__supertype__", part) for part in parts} & {str, int, bool, type(None)}

        def check_json(name: str, value: Any) -> Any:
            # A value of the right plain type needs no encoding. Text that is not ASCII may be half a surrogate pair.
            kind = type(value)
            return value if kind in plain and (kind is not str or value.isascii()) else checked(name, value, hint)

        return check_json
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
    """Whether JSON can be decoded as this type."""
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
