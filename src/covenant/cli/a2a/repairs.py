"""What the two repairs share: the request, and how its outcome is told."""

from __future__ import annotations

from typing import Any

from covenant.cli.calling import Call
from covenant.cli.output import put, say


def repair(call: Call, task_id: str, reason: str, command: dict[str, Any]) -> None:
    given = {name: value for name, value in command.items() if value is not None}
    answer = call.ask("repair_a2a_task", request={"task_id": task_id, "command": given, "reason": reason})
    if call.answer(answer):
        return
    outcome = answer["outcome"]
    put(f"{outcome['action']} {outcome['task_id']}")
    say(f"it is {outcome['state'].replace('_', ' ')} now, after {outcome['attempt']} attempt(s)")
