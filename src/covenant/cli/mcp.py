"""`covenant mcp`: MCP on standard input and output, for clients that start their servers."""

from __future__ import annotations

import asyncio
import json
from typing import Final

import click

import covenant
from covenant.cli.daemon_client import read_token
from covenant.cli.options import given_before, home_option, token_option
from covenant.cli.terminal import Failure, Unreachable
from covenant.daemon.environment import environment, find_home
from covenant.daemon.home import url_in

PATH: Final = "/mcp"
LOOK_S: Final = 10.0


@click.command("mcp")
@home_option()
@token_option
@click.option("--url", metavar="URL", help="Where the daemon listens for HTTP. Default: as it left it in its home.")
def command(*, home: str | None, token_file: str | None, url: str | None) -> None:
    """Serve a running daemon's tools to an MCP client over stdio.

    For clients that start their MCP servers by a command. Starts no daemon, and exits with 3 if there is none. Clients
    that speak HTTP can use the daemon's /mcp instead. Needs the extra `mcp`, here and at the daemon.
    """
    variables = environment()
    folder, _ = find_home(given_before("home", home), variables)
    token = read_token(folder, given_before("token_file", token_file), variables)
    found = url or url_in(folder)
    if found is None:
        raise Unreachable(
            "daemon_unreachable",
            f"no daemon is in {folder}; start it with `covenant serve --home {folder}`, or give its --url",
        )
    address = found.rstrip("/").removesuffix(PATH) + PATH
    _look(address, token)
    try:
        from covenant.doors.mcp.stdio_bridge import bridge
    except ModuleNotFoundError as missing:
        raise Failure(
            "mcp_not_installed",
            f"the package {missing.name} is not installed: pip install 'covenant[mcp]'",
        ) from missing
    asyncio.run(bridge(address, token, covenant.__version__))


def _look(address: str, token: str) -> None:
    """Whether somebody answers there, and takes the token: said before a client waits for what never comes."""
    import httpx2

    headers = {"authorization": f"Bearer {token}", "accept": "application/json, text/event-stream"}
    ping = {"jsonrpc": "2.0", "id": 0, "method": "ping"}
    try:
        answer = httpx2.post(address, json=ping, headers=headers, timeout=LOOK_S, trust_env=False)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise Unreachable(
            "daemon_unreachable", f"no daemon answers at {address} ({error}); start it with `covenant serve`"
        ) from error
    if answer.status_code == 401:
        raise Failure("unknown_token", "the daemon does not take this token; name another with --token-file")
    if answer.status_code == 404:
        raise Failure("no_mcp", f"there is no MCP at {address}; is this a covenant daemon?")
    if answer.status_code == 501:
        raise Failure("mcp_not_installed", f"at the daemon: {_said(answer.content)}")


def _said(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return "MCP is not installed"
