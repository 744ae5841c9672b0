"""An MCP server over streamable HTTP, by the official SDK, in a process of its own: `mcp_http_server.py PORT KIND`.

Each use of a tool is a line in the file that `MCP_LOG` names, written before the tool does anything.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import create_connection
from subprocess import Popen

import uvicorn
from mcp.server.mcpserver import MCPServer
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.waits import until

server = MCPServer("elsewhere")


def note(what: str) -> None:
    with Path(os.environ["MCP_LOG"]).open("a") as log:
        log.write(f"{what}\n")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers"""
    note("add")
    return a + b


@server.tool()
def pid() -> int:
    """Which process this is"""
    note("pid")
    return os.getpid()


@server.tool()
def slow() -> str:
    """Never answers"""
    note("slow")
    time.sleep(3_600)
    return ""


@server.tool()
def much(count: int) -> str:
    """Says much"""
    note("much")
    return "x" * count


class Guarded:
    """Lets nobody in without the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            note(f"{scope['method']} {headers.get(b'x-team', b'').decode()}")
            if headers.get(b"authorization") != b"Bearer " + self._token:
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
        await self._app(scope, receive, send)


def main() -> None:
    port, kind = int(sys.argv[1]), sys.argv[2]
    app = server.streamable_http_app(json_response=kind == "json", host="127.0.0.1")
    uvicorn.run(Guarded(app, "s3cret"), host="127.0.0.1", port=port, log_level="error")


@contextmanager
def served(port: int, log: Path, kind: str = "sse") -> Iterator["Popen[bytes]"]:
    """The server, listening."""
    words = [sys.executable, "-m", "tests.agents.mcp_http_server", str(port), kind]
    root = Path(__file__).parents[2]
    process = Popen(words, env={**os.environ, "MCP_LOG": str(log), "PYTHONPATH": str(root)}, cwd=root)
    try:
        until(lambda: _listens(port))
        yield process
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    try:
        create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
