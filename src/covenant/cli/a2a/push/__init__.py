"""`covenant a2a push`: what is owed to webhooks."""

from __future__ import annotations

from typing import Final

from covenant.cli.lazy import LazyGroup

command: Final = LazyGroup(
    "push",
    {name: f"covenant.cli.a2a.push.{name}" for name in ("list", "retry")},
    "Push notifications: what is owed to webhooks, and what was given up.",
)
