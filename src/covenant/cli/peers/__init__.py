"""`covenant peers`."""

from __future__ import annotations

from typing import Final

from covenant.cli.lazy import LazyGroup

COMMANDS: Final = (
    "list add show remove trust verify deny allow accept-identity revoke-tokens discover capabilities "
    "delegate delegations cancel offer-again force-error proof verify-proof messages config"
)

command: Final = LazyGroup(
    "peers",
    {name: f"covenant.cli.peers.{name.replace('-', '_')}" for name in COMMANDS.split()},
    "Peers: other instances, what is delegated to them and by them.",
)
