"""What an operator decides about peers. Every number here is a setting of `[peers]`."""

from __future__ import annotations

from typing import Literal

import msgspec

Redaction = Literal["redact", "block", "warn", "off"]
Transcripts = Literal["full", "root"]


class PeerSettings(msgspec.Struct, frozen=True, kw_only=True):
    name: str = ""
    """What others call us, unless they choose otherwise. Empty: the end of our id."""
    allow: tuple[str, ...] = ()
    """Ids or names of those who may delegate to us. Empty: all who are trusted enough."""
    deny: tuple[str, ...] = ()
    require_token: bool = True
    """An offer must carry a token that we gave."""
    profiles: tuple[str, ...] = ()
    """The agents that peers may delegate to. Empty: all of the first tenant's."""

    # What others may have of us
    slots: int = 5
    """Delegations from peers that may be at work at once."""
    slots_per_peer: int = 5
    offers_per_min: int = 60
    """From one peer; a trusted one may make ten times as many."""
    messages_per_min: int = 1_200
    budget_default: int = 50_000
    """Tokens, where neither the offer nor the agent says."""
    budget_max: int = 200_000
    budget_min: int = 1
    """An offer of less is not worth beginning."""
    depth_max: int = 3
    timeout_ms_max: int = 600_000
    status_interval_ms: int = 5_000
    token_life_ms: int = 24 * 3_600_000
    """An offer waits with its token for a peer that is away."""
    capabilities_life_ms: int = 300_000

    # What we ask of others
    timeout_ms: int = 300_000
    silence_ms: int = 60_000
    """A provider that has not been heard of for this long, and for three of its status intervals, is lost."""
    force_lost: bool = False
    """Give a lost delegation up by itself; otherwise it waits for an operator."""
    lost_after_ms: int = 600_000
    """How long it waits for that, with `force_lost`."""

    # How messages travel
    poll: tuple[str, ...] = ()
    """Ids or names of peers from whom we fetch, because they cannot reach us. `*`: all that have an address."""
    poll_wait_ms: int = 25_000
    deliveries_per_peer: int = 4
    retry_first_ms: int = 500
    retry_max_ms: int = 60_000

    # What leaves
    redaction: Redaction = "redact"
    transcripts: Transcripts = "full"
    """`root`: the conversation stays here, and only its root and its proof leave."""
