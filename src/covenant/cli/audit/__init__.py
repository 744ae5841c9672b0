"""`covenant audit`."""

from __future__ import annotations

from typing import Final

from covenant.cli.lazy import LazyGroup

command: Final = LazyGroup(
    "audit",
    {name: f"covenant.cli.audit.{name}" for name in "recent verify purge".split()},
    "The audit: who was let in, who was not, and what was repaired.",
)
