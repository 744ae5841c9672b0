"""Tools as a model sees them: their specifications, and the text of their results.

A result stands between `[/command …]` and `[END …]`. Each result is cut at 16,384 bytes, and those of one round of the
model share 32,768. Nothing that others wrote can look like the end of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar, get_type_hints

import msgspec

RESULT_BYTES_MAX: Final = 16_384
SHARED_BYTES_MAX: Final = 32_768
TRUNCATED: Final = "\n[truncated]"
HEAD_CHARS_MAX: Final = 200

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
    """By name, in the order of the class."""
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
    match name:
        case "agent":
            return f"agent:{plain(given.get('agent', ''))}"[:HEAD_CHARS_MAX]
        case "a2a_card" | "a2a_call":
            return f"a2a:{plain(given.get('name', ''))}"[:HEAD_CHARS_MAX]
        case "mcp_call":
            return f"mcp:{plain(given.get('server', ''))}.{plain(given.get('tool', ''))}"[:HEAD_CHARS_MAX]
        case _:
            return name.replace("_", ":", 1)


def plain(value: object) -> str:
    """On one line."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return " ".join(text.split())[:400]


def cut(text: str, most: int) -> str:
    data = text.encode()
    if len(data) <= most:
        return text
    return data[: max(0, most - len(TRUNCATED))].decode(errors="ignore") + TRUNCATED
