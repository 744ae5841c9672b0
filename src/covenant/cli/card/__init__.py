"""`covenant card`."""

from __future__ import annotations

from typing import Final

from covenant.cli.lazy import LazyGroup

command: Final = LazyGroup("card", {"get": "covenant.cli.card.get"}, "Agent cards, of whomever.")
