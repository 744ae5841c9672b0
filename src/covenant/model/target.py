"""The target of a task that is done elsewhere: an agent at an address, an entry of the registry, or a peer.

The daemon alone writes a target, as a field of the task. No door decodes one: what a client says never decides where
its task goes.
"""

from __future__ import annotations

from typing import Final

import msgspec

ELSEWHERE: Final = "remote.url"
"""As whom agents are known that are called by their address. No agent of a catalogue can have this name."""
PEERS: Final = "remote.peer"
"""As whom agents of peers are known. No agent of a catalogue can have this name either."""


class Target(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Either `url` or `name` (the registry's entry, which wins), or `profile` with the peer that offers it."""

    name: str | None = None
    url: str | None = None
    peer: str | None = None
    """The peer's id or name; None or empty: whichever peer offers the profile."""
    profile: str | None = None
    budget: int | None = None
    """How many tokens the peer may use; None: as many as the settings say."""
    context: str | None = None
    """What the peer is told besides the task."""

    @property
    def of_peer(self) -> bool:
        return self.profile is not None

    @property
    def label(self) -> str:
        """What tells it from other targets."""
        return self.name or self.url or ""
