"""`covenant agents`."""

from __future__ import annotations

from typing import Final

from covenant.cli.lazy import LazyGroup

command: Final = LazyGroup(
    "agents",
    {name: f"covenant.cli.agents.{name}" for name in "add list show remove".split()},
    "Agents: what each tenant's catalogue has.",
)
