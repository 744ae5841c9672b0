"""MCP servers and their tools, as the home's `mcp_servers.json` declares them.

    {"servers": {"<name>": {"command": "…", "args": [], "env": {}, "init_timeout_ms": 60000, "call_timeout_ms": 30000,
                            "tools": ["name", {"name": "…", "description": "…"}], "tenants": ["default"]}}}

    {"servers": {"<name>": {"url": "https://…", "auth": {"type": "bearer", "token_env": "…"}, "headers": {}, …}}}

A server is a program (`command`) or a remote server (`url`); one of the two is required. A server, with the keys that
it was given, belongs to the first tenant, `default`, unless it lists its `tenants`: for the agents of other tenants it
does not exist. `tools` lists a server's tools in advance, so that cards can name them without starting the server. Read
strictly: an unknown key or a wrong value is refused with a JSON pointer to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from covenant.model.agent_definition import escaped_key, explain_invalid
from covenant.model.errors import Invalid, did_you_mean
from covenant.model.remote_auth import RemoteAuth
from covenant.model.tenants import DEFAULT

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}").fullmatch
ToolName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_./-]{1,128}\Z")]
Text = Annotated[str, msgspec.Meta(max_length=32_000)]
Wait = Annotated[int, msgspec.Meta(ge=1, le=24 * 3_600_000)]


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of the structs of this file: unknown fields are refused."""


class DeclaredTool(_Part, frozen=True, kw_only=True):
    name: ToolName
    description: Text = ""


class McpServer(_Part, frozen=True, kw_only=True):
    command: Annotated[str, msgspec.Meta(max_length=4_096)] = ""
    args: Annotated[tuple[Text, ...], msgspec.Meta(max_length=200)] = ()
    env: dict[str, Text] = {}
    url: Annotated[str, msgspec.Meta(pattern=r"\A(https?://\S+)?\Z", max_length=8_192)] = ""
    headers: Annotated[dict[str, Text], msgspec.Meta(max_length=50)] = {}
    auth: RemoteAuth | None = None
    init_timeout_ms: Wait = 60_000
    call_timeout_ms: Wait = 30_000
    tools: Annotated[tuple[DeclaredTool, ...], msgspec.Meta(max_length=1_000)] = ()
    tenants: Annotated[tuple[str, ...], msgspec.Meta(max_length=10_000)] = (DEFAULT,)
    """The tenants whose agents may use the server."""

    def __repr__(self) -> str:
        """Leaves out the secrets, so that no log or traceback shows them."""
        return f"McpServer(command={self.command!r}, url={self.url!r})"

    def sent_headers(self, secrets: Mapping[str, str]) -> dict[str, str]:
        """The headers of each request to a server with a `url`. `secrets`: the variables that `token_env` names."""
        token = self.auth.secret(secrets) if self.auth is not None else None
        sent = {name.lower(): value for name, value in self.headers.items()}
        return sent if token is None else {**sent, "authorization": f"Bearer {token}"}

    @property
    def has_secrets(self) -> bool:
        """Whether the declaration contains secrets, so that only the file's owner may read the file."""
        return bool(self.env or self.headers or (self.auth is not None and self.auth.token))


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
    """Returns the servers of decoded JSON, in the order of the file."""
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
        server = msgspec.convert(_with_tool_objects(given), McpServer)
        _check_place(where, server)
        return server
    except msgspec.ValidationError as wrong:
        raise _wrong(explain_invalid(str(wrong), McpServer, where)) from None


def _check_place(where: str, server: McpServer) -> None:
    if bool(server.command) == bool(server.url):
        raise _wrong(f"{where}: give either `command` or `url`")
    wanted, others = ("command", ("args", "env")) if server.url else ("url", ("headers", "auth"))
    for name in others:
        if getattr(server, name):
            raise _wrong(f"{where}/{name}: is for a server with a `{wanted}`")


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
