"""What a card says an agent can do: talk, its capabilities, the skills it declares, and the tools it may call.

Only what the agent can really use is listed. Each skill's id is one word, and no two skills of a card have the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Final

import msgspec

from covenant.model import agent_definition as written
from covenant.model.agent_card import CardSkill
from covenant.model.agent_definition import INDEX, AgentDefinition
from covenant.model.mcp_servers import Tool

MCP: Final = "/mcp"
ABILITIES: Final = ("/agent", "/parallel", "/a2a", MCP, "/fetch", "/mem", "/advise", "/write")
"""The commands that there are tools for. Others may stand in an agent definition, and nobody can carry them out."""
ROUTING: Final = frozenset({"/agent"})
"""What the master does without a model, too."""
BUNDLES: Final = {"web": ("/fetch",), "delegation": ("/agent", "/parallel")}
"""Words for several commands at once. Any command may be written without its slash."""
GENERAL: Final = ("general",)
_JSON: Final = ("application/json",)
_JSON_AND_TEXT: Final = ("application/json", "text/plain")

CHAT: Final = CardSkill(id="chat", name="chat", description="Ask in plain text, and get an answer.", tags=("text",))

CAPABILITIES: Final = {
    "/fetch": ("fetch-url", "Fetch a web address and read what is there."),
    "/search": ("web-search", "Search the web."),
    "/browse": ("browse-page", "Open a web page and read it as a person would."),
    "/exec": ("shell-exec", "Run a command in a shell."),
    "/write": ("write-file", "Write a file."),
    "/read": ("read-file", "Read a file."),
    "/list": ("list-files", "List files."),
    "/map": ("workspace-map", "Give an overview of a workspace."),
    MCP: ("mcp-tools", "Call tools of MCP servers."),
    "/a2a": ("remote-agents", "Hand work to agents elsewhere, over A2A."),
    "/agent": ("delegate", "Hand work to another agent."),
    "/parallel": ("parallel-fanout", "Hand work to several agents at once."),
    "/advise": ("advisor-consult", "Ask an advisor before answering."),
    "/todo": ("todos", "Keep a list of what is to be done."),
    "/schedule": ("schedule", "Do something at a later time."),
    "/lesson": ("lessons", "Remember what was learned from mistakes."),
    "/mem": ("memory", "Remember facts between tasks."),
}


class _TagRule(msgspec.Struct, frozen=True):
    words: frozenset[str]
    tags: tuple[str, ...]


class _ToolNames(msgspec.Struct, frozen=True):
    """`tool_tags.json`: how names of well-known tools are written for people, and which tags their skills have."""

    prefixes: tuple[str, ...]
    """Left out of titles and tags."""
    spellings: dict[str, str]
    tags: dict[str, tuple[str, ...]]
    families: dict[str, tuple[_TagRule, ...]]
    """By the first word of a name: the first rule that has another word of it."""


@cache
def _tool_names() -> _ToolNames:
    data = files("covenant.exchange").joinpath("tool_tags.json").read_bytes()
    return msgspec.json.decode(data, type=_ToolNames)


def skills_of(
    definition: AgentDefinition, tools: Sequence[Tool] = (), abilities: frozenset[str] | None = None
) -> tuple[CardSkill, ...]:
    """`abilities`: the commands that models can carry out here; none of them where there is no model.

    None: nobody says, and a card says what the definition does.
    """
    if abilities is not None and definition.kind_rules.needs_model:
        return _model_skills(definition, tools, abilities)
    return _distinct(
        (
            CHAT,
            *_capability_skills(definition),
            *(_declared_skill(skill) for skill in definition.skills),
            *_tool_skills(usable_tools(definition, tools)),
        )
    )


def _model_skills(
    definition: AgentDefinition, tools: Sequence[Tool], abilities: frozenset[str]
) -> tuple[CardSkill, ...]:
    if not abilities and definition.id != INDEX:
        # Nobody plays it: a card that promised anything would not be true.
        return ()
    commands = usable(definition, abilities or ROUTING)
    named = ((command, CAPABILITIES[command]) for command in commands)
    return _distinct(
        (
            CHAT,
            *(CardSkill(id=name, name=name, description=about, tags=(command,)) for command, (name, about) in named),
            *(_declared_skill(skill) for skill in definition.skills),
            *(_tool_skills(usable_tools(definition, tools)) if MCP in commands else ()),
        )
    )


def usable(definition: AgentDefinition, abilities: Iterable[str]) -> tuple[str, ...]:
    """The commands that this agent may use, of those that there are: an allow-list, in the order of the table.

    An empty list allows everything; one that has only unknown words, nothing.
    """
    there = [command for command in ABILITIES if command in set(abilities)]
    if not definition.capabilities:
        return tuple(there)
    allowed: set[str] = set()
    for capability in definition.capabilities:
        word = (capability.split() or [""])[0].removeprefix("/").lower()
        allowed.update(BUNDLES.get(word, (f"/{word}",)))
    return tuple(command for command in there if command in allowed)


def usable_tools(definition: AgentDefinition, tools: Sequence[Tool]) -> Sequence[Tool]:
    """The registered tools that this agent can and may call."""
    allowed = definition.mcp_tool_permissions
    if definition.kind_rules.needs_model:
        if not usable(definition, (MCP,)):
            return ()
        if allowed is None:
            return tools
    return [tool for tool in tools if allowed is not None and (tool.name in allowed or tool.full_name in allowed)]


def _capability_skills(definition: AgentDefinition) -> Iterator[CardSkill]:
    if not definition.kind_rules.needs_model:
        return
    for capability in definition.capabilities:
        known = CAPABILITIES.get(capability.strip())
        name = known[0] if known else _one_word(capability.strip().removeprefix("/"), "capability")
        description = known[1] if known else f"Capability: {capability.strip() or name}"
        yield CardSkill(id=name, name=name, description=description, tags=(capability.strip() or name,))


def _declared_skill(skill: written.Skill) -> CardSkill:
    name = skill.name or skill.id
    return CardSkill(
        id=_one_word(skill.id, "skill"),
        name=name,
        description=skill.description or name,
        tags=skill.tags or GENERAL,
        examples=skill.examples,
        input_modes=skill.input_modes,
        output_modes=skill.output_modes,
    )


def _tool_skills(tools: Sequence[Tool]) -> Iterator[CardSkill]:
    """Two servers may have tools of one name: the second is then told apart by its server."""
    seen: set[str] = set()
    for tool in tools:
        yield CardSkill(
            id=tool.full_name if tool.name in seen else tool.name,
            name=tool_title(tool.name),
            description=tool.description or f"Tool: {tool.name}",
            tags=tool_tags(tool.name),
            input_modes=_JSON,
            output_modes=_JSON_AND_TEXT,
        )
        seen.add(tool.name)


def tool_title(name: str) -> str:
    """`covenant_github_list_prs` as people would write it: GitHub List PRs."""
    spellings = _tool_names().spellings
    words = filter(None, _plain(name).split("_"))
    return " ".join(spellings.get(word, word[:1].upper() + word[1:]) for word in words) or name


def tool_tags(name: str) -> tuple[str, ...]:
    known, plain = _tool_names(), _plain(name)
    family, _, rest = plain.partition("_")
    if family in known.families and rest:
        words = set(plain.split("_"))
        return next((rule.tags for rule in known.families[family] if rule.words & words), (family,))
    return known.tags.get(plain, GENERAL)


def _plain(name: str) -> str:
    for prefix in _tool_names().prefixes:
        name = name.removeprefix(prefix)
    return name


def _one_word(text: str, otherwise: str) -> str:
    return re.sub(r"[^\w.]+", "-", text).strip("-") or otherwise


def _distinct(skills: Iterable[CardSkill]) -> tuple[CardSkill, ...]:
    """The first of each id."""
    kept: dict[str, CardSkill] = {}
    for skill in skills:
        kept.setdefault(skill.id, skill)
    return tuple(kept.values())
