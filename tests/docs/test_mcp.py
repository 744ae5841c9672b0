"""The snippets for MCP clients are valid, and what they start is there."""

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

from covenant.doors.mcp.streamable_http import PATH
from covenant.doors.mcp.tool_arguments import BY_NAME
from covenant.model.mcp_servers import read_mcp_servers
from tests.cli.daemons import COVENANT, covenant, environment
from tests.doors.mcp.daemon import start

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs" / "mcp.md").read_text(encoding="utf-8") + (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def entries() -> list[dict[str, Any]]:
    """How each client is told of this server."""
    found = [json.loads(block) for block in blocks("json")] + [tomllib.loads(block) for block in blocks("toml")]
    servers = [each.get("mcpServers") or each.get("mcp_servers") for each in found]
    return [each["covenant"] for each in servers if each is not None]


def test_every_client_that_is_named_has_a_snippet() -> None:
    text = (ROOT / "docs" / "mcp.md").read_text(encoding="utf-8")
    for client in ("Claude Code", "Claude Desktop", "Cursor", "Codex", "Gemini CLI", "Windsurf", "Cline"):
        assert client in text
    assert len(entries()) >= 8


def test_every_command_line_in_a_snippet_is_real() -> None:
    typed = [
        shlex.split(line.partition("-- ")[2]) for block in blocks("sh") for line in block.splitlines() if "-- " in line
    ]
    typed += [[entry["command"], *entry["args"]] for entry in entries() if "command" in entry]
    assert len(typed) >= 7
    for program, *words in typed:
        assert program == "covenant"
        assert covenant(*words, "--help").code == 0


def test_every_address_in_a_snippet_is_ours() -> None:
    urls = [entry["url"] for entry in entries() if "url" in entry]
    assert len(urls) == 2
    assert all(url == f"http://127.0.0.1:8421{PATH}" for url in urls)


def test_what_is_approved_in_advance_only_reads() -> None:
    approved = {name for entry in entries() for name in entry.get("autoApprove", [])}
    assert approved
    assert all(BY_NAME[name].read_only for name in approved)


def test_every_tool_is_in_the_table() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)) == set(BY_NAME)


def test_the_servers_file_can_be_read() -> None:
    files, elsewhere = [read for block in blocks("json") if "servers" in (read := json.loads(block))]
    assert [tool.name for tool in read_mcp_servers(files)["files"].tools] == ["read", "list"]
    search = read_mcp_servers(elsewhere)["search"]
    assert search.sent_headers({"SEARCH_TOKEN": "t"}) == {"authorization": "Bearer t", "x-team": "blue"}


async def test_a_snippet_connects_a_client_to_the_daemon_of_the_home(short_path: Path) -> None:
    daemon = start(short_path)
    try:
        entry = next(entry for entry in entries() if "command" in entry)
        started = StdioServerParameters(
            command=str(COVENANT), args=entry["args"], env=environment(COVENANT_HOME=str(daemon.home))
        )
        async with Client(started) as client:
            assert {tool.name for tool in (await client.list_tools()).tools} == set(BY_NAME)
    finally:
        assert daemon.stop() == 0


@pytest.mark.parametrize("language", ["json", "toml"])
def test_every_block_can_be_read(language: str) -> None:
    for block in blocks(language):
        json.loads(block) if language == "json" else tomllib.loads(block)
