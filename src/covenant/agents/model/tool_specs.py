"""Tool specifications: how a method is described to a model, and how a tool's result is written for it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar, get_type_hints

import msgspec

from covenant.agents.agent_directory import RemoteCardEntry
from covenant.model.agent_card import RemoteCard

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
"""How the uses of a tool are labeled: a prefix, then the arguments that name the use."""

Method = TypeVar("Method", bound=Callable[..., Awaitable[str]])


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`command`: the capability that an agent needs for the tool. `arguments_type`: the struct of its arguments."""

    name: str
    command: str
    description: str
    arguments_type: type[msgspec.Struct]
    run: Callable[..., Awaitable[str]]

    @property
    def schema(self) -> dict[str, Any]:
        _, parts = msgspec.json.schema_components((self.arguments_type,), ref_template="#/$defs/{name}")
        whole = dict(parts.pop(self.arguments_type.__name__))
        return {**whole, "$defs": parts} if parts else whole


def tool(command: str, description: str) -> Callable[[Method], Method]:
    """Makes the method a tool. The model sees the method's name and parameters."""

    def decorate(method: Method) -> Method:
        kinds = get_type_hints(method, include_extras=True)
        fields: list[Any] = []
        for parameter in [*inspect.signature(method).parameters.values()][1:]:
            default = () if parameter.default is parameter.empty else (parameter.default,)
            fields.append((parameter.name, kinds[parameter.name], *default))
        arguments_type = msgspec.defstruct(
            method.__name__, fields, frozen=True, kw_only=True, forbid_unknown_fields=True
        )
        spec = ToolSpec(
            name=method.__name__, command=command, description=description, arguments_type=arguments_type, run=method
        )
        method.spec = spec  # type: ignore[attr-defined]
        return method

    return decorate


def specs_of(toolbox: type) -> dict[str, ToolSpec]:
    return {name: method.spec for name, method in vars(toolbox).items() if hasattr(method, "spec")}


def framed(command: str, name: str, arguments: Mapping[str, Any], body: str, bytes_left: int) -> tuple[str, int]:
    """The framed result of a tool, and how many bytes of `bytes_left` its body took. `command` has no slash."""
    sub = name.partition("_")[2]
    rest = " ".join(one_line(value) for value in arguments.values())
    head = " ".join(filter(None, (f"/{command}", sub, rest)))
    shown = truncate(body.replace("[END ", "[end "), max(0, min(RESULT_BYTES_MAX, bytes_left)))
    return f"[{head[:HEAD_CHARS_MAX]}]\n{shown}\n[END {command.upper()}]", min(bytes_left, len(shown.encode()))


def label(name: str, arguments: Mapping[str, Any]) -> str:
    """The label of a use in its artifact: `a2a:weatherbot`, `mcp:server.tool`, `parallel`."""
    prefix, *fields = LABELS.get(name, (name.replace("_", ":", 1),))
    named = ".".join(one_line(arguments.get(field, "")) for field in fields)
    return f"{prefix}:{named}"[:HEAD_CHARS_MAX] if fields else prefix


def one_line(value: object) -> str:
    """The value as text on one line, cut at 400 characters."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return " ".join(text.split())[:400]


def truncate(text: str, most: int) -> str:
    data = text.encode()
    if len(data) <= most:
        return text
    return data[: max(0, most - len(TRUNCATED))].decode(errors="ignore") + TRUNCATED


def joined(agents: Sequence[str], answers: Iterable[str]) -> str:
    share = RESULT_BYTES_MAX // len(agents) - 100
    return "\n".join(f"[{agent}]\n{truncate(answer, share)}" for agent, answer in zip(agents, answers, strict=True))


def list_remotes(known: Mapping[str, RemoteCardEntry]) -> str:
    if not known:
        return "no remote agents configured"
    lines = [f"configured remote agents ({len(known)}):"]
    for name, entry in known.items():
        if entry.card is None:
            lines.append(f"  {name} (card unavailable: {one_line(entry.error)})")
            continue
        lines.append(f"  {name} — {one_line(entry.card.description)}")
        if entry.card.skills:
            lines.append(f"    skills: {', '.join(one_line(skill.id) for skill in entry.card.skills)}")
    return "\n".join(lines)


def describe_card(card: RemoteCard) -> str:
    protocols = [f"{each.binding} {each.version}" for each in card.interfaces]
    lines = [
        f"name: {one_line(card.name)}",
        f"url: {card.interfaces[0].url if card.interfaces else card.url}",
        f"protocol: {', '.join(protocols) or 'unknown'}; version: {one_line(card.version)}",
        f"description: {one_line(card.description)}",
        *(f"- {one_line(skill.id)}: {one_line(skill.description or skill.name)}" for skill in card.skills),
    ]
    return "\n".join(lines)
