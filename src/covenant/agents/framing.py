"""What a tool says to a model: text between `[/command …]` and `[END …]`, on as much room as there is.

Each result is cut at 16,384 bytes, and those of one round of the model share 32,768. Nothing that others wrote can look
like the end of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

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
