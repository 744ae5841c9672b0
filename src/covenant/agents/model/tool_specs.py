"""The tools that a model is told of: their names, the commands that they carry out, and what each takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from covenant.exchange.skills import MCP

PARALLEL_MAX: Final = 16

Short = Annotated[str, msgspec.Meta(min_length=1, max_length=1_000)]
Words = Annotated[str, msgspec.Meta(min_length=1, max_length=200_000)]


class Args(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The root of what a tool is given."""


class NoArgs(Args, frozen=True, kw_only=True):
    pass


class AgentArgs(Args, frozen=True, kw_only=True):
    agent: Short
    message: Words


class ParallelArgs(Args, frozen=True, kw_only=True):
    calls: Annotated[tuple[AgentArgs, ...], msgspec.Meta(min_length=1, max_length=PARALLEL_MAX)]


class RemoteArgs(Args, frozen=True, kw_only=True):
    name: Short


class RemoteCallArgs(Args, frozen=True, kw_only=True):
    name: Short
    message: Words


class ServerArgs(Args, frozen=True, kw_only=True):
    server: str | None = None


class McpArgs(Args, frozen=True, kw_only=True):
    server: Short
    tool: Short
    arguments: dict[str, Any] = {}


class FetchArgs(Args, frozen=True, kw_only=True):
    url: Annotated[str, msgspec.Meta(min_length=1, max_length=8_192)]


class NoteArgs(Args, frozen=True, kw_only=True):
    text: Words
    title: str = ""


class NoteIdArgs(Args, frozen=True, kw_only=True):
    id: int


class SearchArgs(Args, frozen=True, kw_only=True):
    query: Short


class ClearArgs(Args, frozen=True, kw_only=True):
    id: int | None = None


class AdviseArgs(Args, frozen=True, kw_only=True):
    question: Words


class WriteArgs(Args, frozen=True, kw_only=True):
    path: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    content: str
    persist: bool = False


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as a model is told of it: its name, the command that it carries out, and what it takes."""

    name: str
    command: str
    about: str
    takes: type[Args]

    @property
    def schema(self) -> dict[str, Any]:
        _, parts = msgspec.json.schema_components((self.takes,), ref_template="#/$defs/{name}")
        whole = dict(parts.pop(self.takes.__name__))
        return {**whole, "$defs": parts} if parts else whole


TOOL_SPECS: Final = (
    ToolSpec(
        name="agent", command="/agent", about="Hand a task to another agent, and get its answer.", takes=AgentArgs
    ),
    ToolSpec(
        name="parallel",
        command="/parallel",
        about=f"Hand tasks to up to {PARALLEL_MAX} agents at once, and get all their answers.",
        takes=ParallelArgs,
    ),
    ToolSpec(name="a2a_list", command="/a2a", about="List the remote agents.", takes=NoArgs),
    ToolSpec(name="a2a_card", command="/a2a", about="Show a remote agent's card.", takes=RemoteArgs),
    ToolSpec(
        name="a2a_call",
        command="/a2a",
        about="Send a message to a remote agent, and get its answer. It sees this text and nothing else.",
        takes=RemoteCallArgs,
    ),
    ToolSpec(name="mcp_tools", command=MCP, about="List the tools of the MCP servers, or of one.", takes=ServerArgs),
    ToolSpec(name="mcp_call", command=MCP, about="Call a tool of an MCP server.", takes=McpArgs),
    ToolSpec(name="fetch", command="/fetch", about="Read a web address as text.", takes=FetchArgs),
    ToolSpec(name="mem_write", command="/mem", about="Remember something beyond this task.", takes=NoteArgs),
    ToolSpec(name="mem_read", command="/mem", about="Read a note that you wrote.", takes=NoteIdArgs),
    ToolSpec(name="mem_show", command="/mem", about="List your notes.", takes=NoArgs),
    ToolSpec(name="mem_search", command="/mem", about="Find notes by their words.", takes=SearchArgs),
    ToolSpec(name="mem_clear", command="/mem", about="Forget one note, or all of them.", takes=ClearArgs),
    ToolSpec(name="advise", command="/advise", about="Ask your advisor before you go on.", takes=AdviseArgs),
    ToolSpec(name="write", command="/write", about="Give the user a file, as part of the answer.", takes=WriteArgs),
)
BY_NAME: Final = {ware.name: ware for ware in TOOL_SPECS}


RESULT_BYTES_MAX: Final = 16_384
SHARED_BYTES_MAX: Final = 32_768
TRUNCATED: Final = "\n[truncated]"
HEAD_CHARS_MAX: Final = 200


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
