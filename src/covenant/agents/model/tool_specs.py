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
    """`command`: the capability that an agent needs for the tool. `takes`: the struct of its arguments."""

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
    """Makes the method a tool. The model sees the method's name and parameters."""

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
    """The result of the tool `name`, framed, and how many bytes of `room` it took. `command` has no slash."""
    sub = name.partition("_")[2]
    rest = " ".join(plain(value) for value in given.values())
    head = " ".join(filter(None, (f"/{command}", sub, rest)))
    shown = cut(body.replace("[END ", "[end "), max(0, min(RESULT_BYTES_MAX, room)))
    return f"[{head[:HEAD_CHARS_MAX]}]\n{shown}\n[END {command.upper()}]", min(room, len(shown.encode()))


def label(name: str, given: Mapping[str, Any]) -> str:
    """The label of a use in its artifact: `a2a:weatherbot`, `mcp:server.tool`, `parallel`."""
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


def joined(agents: Sequence[str], answers: Iterable[str]) -> str:
    share = RESULT_BYTES_MAX // len(agents) - 100
    return "\n".join(f"[{agent}]\n{cut(answer, share)}" for agent, answer in zip(agents, answers, strict=True))


def list_remotes(known: Mapping[str, RemoteCardEntry]) -> str:
    if not known:
        return "no remote agents configured"
    lines = [f"configured remote agents ({len(known)}):"]
    for name, entry in known.items():
        if entry.card is None:
            lines.append(f"  {name} (card unavailable: {plain(entry.error)})")
            continue
        lines.append(f"  {name} — {plain(entry.card.description)}")
        if entry.card.skills:
            lines.append(f"    skills: {', '.join(plain(skill.id) for skill in entry.card.skills)}")
    return "\n".join(lines)


def describe_card(card: RemoteCard) -> str:
    protocols = [f"{each.binding} {each.version}" for each in card.interfaces]
    lines = [
        f"name: {plain(card.name)}",
        f"url: {card.interfaces[0].url if card.interfaces else card.url}",
        f"protocol: {', '.join(protocols) or 'unknown'}; version: {plain(card.version)}",
        f"description: {plain(card.description)}",
        *(f"- {plain(skill.id)}: {plain(skill.description or skill.name)}" for skill in card.skills),
    ]
    return "\n".join(lines)
