"""`covenant identities`."""

from __future__ import annotations

from typing import Final

from covenant.cli.lazy import LazyGroup

command: Final = LazyGroup(
    "identities",
    {name: f"covenant.cli.identities.{name}" for name in "enroll list revoke rotate purge".split()},
    "Identities: who holds a token.",
)
