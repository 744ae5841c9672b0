"""`covenant tenants`."""

from __future__ import annotations

from typing import Final

from covenant.cli.lazy import LazyGroup

command: Final = LazyGroup(
    "tenants",
    {name: f"covenant.cli.tenants.{name}" for name in "add list limit disable enable rotate".split()},
    "Tenants: whose agents and tasks are whose.",
)
