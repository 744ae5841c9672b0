"""MCP servers and their tools, as the home's `mcp_servers.json` declares them.

    {"servers": {"<name>": {"command": "…", "args": [], "env": {}, "init_timeout_ms": 60000, "call_timeout_ms": 30000,
                            "tools": ["name", {"name": "…", "description": "…"}], "tenants": ["default"]}}}

Only `command` must be there. A server, with the keys that it was given, belongs to the first tenant, `default`, unless
it lists its `tenants`: for the agents of others it is not there. `tools` says in advance what a server has, so that
cards can name it without starting the server. Read strictly: an unknown key or a wrong value is refused with a JSON
pointer to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from covenant.model.agent_definition import escaped_key, explain_invalid
from covenant.model.errors import Invalid, did_you_mean
from covenant.model.tenants import DEFAULT

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}").fullmatch
ToolName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_./-]{1,128}\Z")]
Text = Annotated[str, msgspec.Meta(max_length=32_000)]
Wait = Annotated[int, msgspec.Meta(ge=1, le=24 * 3_600_000)]


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The root of what is read strictly."""


class DeclaredTool(_Part, frozen=True, kw_only=True):
    name: ToolName
    description: Text = ""


class McpServer(_Part, frozen=True, kw_only=True):
    command: Annotated[str, msgspec.Meta(min_length=1, max_length=4_096)]
    args: Annotated[tuple[Text, ...], msgspec.Meta(max_length=200)] = ()
    env: dict[str, Text] = {}
    init_timeout_ms: Wait = 60_000
    call_timeout_ms: Wait = 30_000
    tools: Annotated[tuple[DeclaredTool, ...], msgspec.Meta(max_length=1_000)] = ()
    tenants: Annotated[tuple[str, ...], msgspec.Meta(max_length=10_000)] = (DEFAULT,)
    """Whose agents may use it."""


class Tool(msgspec.Struct, frozen=True, gc=False):
    """One tool of one server, for the agents of some tenants."""

    server: str
    name: str
    description: str = ""
    tenants: tuple[str, ...] = (DEFAULT,)

    @property
    def full_name(self) -> str:
        return f"{self.server}.{self.name}"


def read_mcp_servers(given: object) -> Mapping[str, McpServer]:
    """From JSON that was read already, in the order of the file."""
    if not isinstance(given, dict):
        raise _wrong("must be an object")
    for key in given:
        if key != "servers":
            raise _wrong(f"unknown key /{escaped_key(str(key))}{did_you_mean(str(key), ('servers',))}")
    servers = given.get("servers")
    if not isinstance(servers, dict):
        raise _wrong("/servers: must be an object" if "servers" in given else "/servers: must be given")
    return {name: _server(name, server) for name, server in servers.items()}


def _server(name: str, given: object) -> McpServer:
    where = f"/servers/{escaped_key(name)}"
    if _NAME(name) is None:
        raise _wrong(f"{where}: a server's name has letters, digits, `_`, `.` and `-`, at most 64")
    try:
        return msgspec.convert(_with_tool_objects(given), McpServer)
    except msgspec.ValidationError as wrong:
        said = explain_invalid(str(wrong), McpServer)
    if said.startswith("/"):
        raise _wrong(where + said)
    unknown = "unknown key "
    raise _wrong(f"{unknown}{where}{said.removeprefix(unknown)}" if said.startswith(unknown) else f"{where}: {said}")


def _wrong(message: str) -> Invalid:
    return Invalid("invalid_mcp_servers", message)


def tools_of(servers: Mapping[str, McpServer]) -> tuple[Tool, ...]:
    return tuple(
        Tool(server, tool.name, tool.description, found.tenants)
        for server, found in servers.items()
        for tool in found.tools
    )


def tools_for(tenant: str, tools: Iterable[Tool]) -> tuple[Tool, ...]:
    return tuple(tool for tool in tools if tenant in tool.tenants)


def _with_tool_objects(server: object) -> object:
    if not isinstance(server, dict) or not isinstance(tools := server.get("tools"), list):
        return server
    return {**server, "tools": [{"name": tool} if isinstance(tool, str) else tool for tool in tools]}
