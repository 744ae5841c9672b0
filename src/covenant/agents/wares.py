"""The tools that a model is told of: their names, the commands that they carry out, and what each takes."""

from __future__ import annotations

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


class Ware(msgspec.Struct, frozen=True, kw_only=True):
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


WARES: Final = (
    Ware(name="agent", command="/agent", about="Hand a task to another agent, and get its answer.", takes=AgentArgs),
    Ware(
        name="parallel",
        command="/parallel",
        about=f"Hand tasks to up to {PARALLEL_MAX} agents at once, and get all their answers.",
        takes=ParallelArgs,
    ),
    Ware(name="a2a_list", command="/a2a", about="List the remote agents.", takes=NoArgs),
    Ware(name="a2a_card", command="/a2a", about="Show a remote agent's card.", takes=RemoteArgs),
    Ware(
        name="a2a_call",
        command="/a2a",
        about="Send a message to a remote agent, and get its answer. It sees this text and nothing else.",
        takes=RemoteCallArgs,
    ),
    Ware(name="mcp_tools", command=MCP, about="List the tools of the MCP servers, or of one.", takes=ServerArgs),
    Ware(name="mcp_call", command=MCP, about="Call a tool of an MCP server.", takes=McpArgs),
    Ware(name="fetch", command="/fetch", about="Read a web address as text.", takes=FetchArgs),
    Ware(name="mem_write", command="/mem", about="Remember something beyond this task.", takes=NoteArgs),
    Ware(name="mem_read", command="/mem", about="Read a note that you wrote.", takes=NoteIdArgs),
    Ware(name="mem_show", command="/mem", about="List your notes.", takes=NoArgs),
    Ware(name="mem_search", command="/mem", about="Find notes by their words.", takes=SearchArgs),
    Ware(name="mem_clear", command="/mem", about="Forget one note, or all of them.", takes=ClearArgs),
    Ware(name="advise", command="/advise", about="Ask your advisor before you go on.", takes=AdviseArgs),
    Ware(name="write", command="/write", about="Give the user a file, as part of the answer.", takes=WriteArgs),
)
BY_NAME: Final = {ware.name: ware for ware in WARES}
