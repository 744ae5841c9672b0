"""`covenant capabilities`."""

from __future__ import annotations

from typing import Final

from covenant.cli.lazy import LazyGroup

command: Final = LazyGroup(
    "capabilities",
    {name: f"covenant.cli.capabilities.{name}" for name in "recent grant revoke purge".split()},
    "Capabilities: who may do what.",
)
