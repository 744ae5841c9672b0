"""`covenant a2a`: tasks, their leases and their results."""

from __future__ import annotations

from typing import Final

from covenant.cli.lazy import LazyGroup

_COMMANDS: Final = (
    "status requeue force-error retry-stale compact send next respond results show tree watch push".split()
)

command: Final = LazyGroup(
    "a2a",
    {name: f"covenant.cli.a2a.{name.replace('-', '_')}" for name in _COMMANDS},
    "Tasks, their leases and their results.",
)
