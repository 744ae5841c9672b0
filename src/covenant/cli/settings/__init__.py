"""`covenant settings`."""

from __future__ import annotations

from typing import Final

from covenant.cli.lazy import LazyGroup

command: Final = LazyGroup(
    "settings", {"show": "covenant.cli.settings.show"}, "Settings: what is in force, and where it came from."
)
