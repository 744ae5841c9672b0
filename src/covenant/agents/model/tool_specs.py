"""Specs of tools: what a model is told of a method that is one, and how the result of a use is written for it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar, get_type_hints

import msgspec

RESULT_BYTES_MAX: Final = 16_384
SHARED_BYTES_MAX: Final = 32_768
TRUNCATED: Final = "\n[truncated]"
HEAD_CHARS_MAX: Final = 200
LABELS: Final = {
    "agent": ("agent", "agent"),
    "a2a_card": ("a2a", "name"),
    "a2a_call": ("a2a", "name"),
    "mcp_call": ("mcp", "server", "tool"),
}
"""Of a tool: how its uses are named, and by which of its arguments."""

Method = TypeVar("Method", bound=Callable[..., Awaitable[str]])


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`command`: the capability that an agent needs for it. `takes`: a struct of its arguments."""

    name: str
    command: str
    about: str
    takes: type[msgspec.Struct]
    run: Callable[..., Awaitable[str]]

    @property
    def schema(self) -> dict[str, Any]:
        _, parts = msgspec.json.schema_components((self.takes,), ref_template="#/$defs/{name}")
        whole = dict(parts.pop(self.takes.__name__))
        return {**whole, "$defs": parts} if parts else whole


def tool(command: str, about: str) -> Callable[[Method], Method]:
    """The decorated method is a tool: its name and parameters are those that the model is told of."""

    def decorate(method: Method) -> Method:
        kinds = get_type_hints(method, include_extras=True)
        fields: list[Any] = []
        for parameter in [*inspect.signature(method).parameters.values()][1:]:
            default = () if parameter.default is parameter.empty else (parameter.default,)
            fields.append((parameter.name, kinds[parameter.name], *default))
        takes = msgspec.defstruct(method.__name__, fields, frozen=True, kw_only=True, forbid_unknown_fields=True)
        spec = ToolSpec(name=method.__name__, command=command, about=about, takes=takes, run=method)
        method.spec = spec  # type: ignore[attr-defined]
        return method

    return decorate


def specs_of(toolbox: type) -> dict[str, ToolSpec]:
    return {name: method.spec for name, method in vars(toolbox).items() if hasattr(method, "spec")}


def framed(command: str, name: str, given: Mapping[str, Any], body: str, room: int) -> tuple[str, int]:
    """The result of the tool `name`, and how many bytes of the room it took. `command` has no slash."""
    sub = name.partition("_")[2]
    rest = " ".join(plain(value) for value in given.values())
    head = " ".join(filter(None, (f"/{command}", sub, rest)))
    shown = cut(body.replace("[END ", "[end "), max(0, min(RESULT_BYTES_MAX, room)))
    return f"[{head[:HEAD_CHARS_MAX]}]\n{shown}\n[END {command.upper()}]", min(room, len(shown.encode()))


def label(name: str, given: Mapping[str, Any]) -> str:
    """Of a use, as its artifact has it: `a2a:weatherbot`, `mcp:server.tool`, `parallel`."""
    prefix, *fields = LABELS.get(name, (name.replace("_", ":", 1),))
    named = ".".join(plain(given.get(field, "")) for field in fields)
    return f"{prefix}:{named}"[:HEAD_CHARS_MAX] if fields else prefix


def plain(value: object) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return " ".join(text.split())[:400]


def cut(text: str, most: int) -> str:
    data = text.encode()
    if len(data) <= most:
        return text
    return data[: max(0, most - len(TRUNCATED))].decode(errors="ignore") + TRUNCATED
