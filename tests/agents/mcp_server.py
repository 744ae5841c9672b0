"""A small MCP server over standard input and output, written against the protocol alone; its argument says which kind.

Standard library only, so that it starts fast, and so that it is a stranger to the SDK on our side.
"""

import json
import os
import sys
import time
from typing import Any

WAY = sys.argv[1] if len(sys.argv) > 1 else "well"
FLOOD_BYTES = 40 * 1024 * 1024

TOOLS = [
    {"name": "add", "description": "Adds two numbers", "inputSchema": {"type": "object"}},
    {"name": "environment", "inputSchema": {"type": "object"}},
    {"name": "much", "description": "Says much", "inputSchema": {"type": "object"}},
    {"name": "flood", "description": "Says too much", "inputSchema": {"type": "object"}},
    {"name": "slow", "description": "Never answers", "inputSchema": {"type": "object"}},
    {"name": "die", "description": "Ends", "inputSchema": {"type": "object"}},
    {"name": "fail", "description": "Fails", "inputSchema": {"type": "object"}},
    {"name": "pid", "description": "Which process this is", "inputSchema": {"type": "object"}},
    {"name": "find", "description": "Searches", "inputSchema": {"type": "object"}},
    {"name": "picture", "description": "No text", "inputSchema": {"type": "object"}},
    {"name": "not a name", "description": "Cannot be a skill", "inputSchema": {"type": "object"}},
]


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    text = ""
    match name:
        case "add":
            text = str(arguments["a"] + arguments["b"])
        case "environment":
            text = json.dumps(dict(os.environ))
        case "much":
            text = "x" * 100_000
        case "flood":
            text = "x" * FLOOD_BYTES
        case "slow":
            time.sleep(3_600)
        case "die":
            os._exit(3)
        case "fail":
            text = "it did not work"
        case "find":
            text = f"found: {arguments['query']}"
        case "pid":
            text = str(os.getpid())
        case _:
            pass
    if name == "picture":
        return {"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]}
    return {"content": [{"type": "text", "text": text}], "isError": name == "fail"}


def answered(asked: dict[str, Any]) -> dict[str, Any] | None:
    params = asked.get("params") or {}
    match asked["method"]:
        case "initialize":
            return {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "small", "version": "1"},
            }
        case "tools/list":
            return {"tools": TOOLS}
        case "tools/call":
            return called(params["name"], params.get("arguments") or {})
        case "ping":
            return {}
        case _:
            return None


def main() -> None:
    if WAY == "dead":
        sys.exit(1)
    sys.stderr.write("small server starts\n")
    sys.stdout.write("this line is no message\n")
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked or WAY == "mute":
            continue
        result = answered(asked)
        if result is None:
            say({"id": asked["id"], "error": {"code": -32601, "message": "not here"}})
        else:
            say({"id": asked["id"], "result": result})


if __name__ == "__main__":
    main()
