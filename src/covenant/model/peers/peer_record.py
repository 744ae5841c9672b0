"""Peers as this instance knows them: where they are, how far they are trusted, and what they last said they can do."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from covenant.model.peers.delegation_messages import Profile
from covenant.model.peers.instance import InstanceId, KeyBundle, Trust, Versions

NAME_CHARS_MAX: Final = 64

PeerSource = Literal["operator", "setting"]


class PeerLimits(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """What one peer may have of us, where it is not what the settings say. None: as there."""

    offers_per_min: int | None = None
    concurrent: int | None = None
    budget_max: int | None = None


class PeerCapabilities(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a peer said under its signature, in answer to our challenge. Believed until `expires_at_ms`."""

    profiles: tuple[Profile, ...]
    versions: Versions
    active_delegations: int
    free_slots: int
    trust_level: Trust
    """What we are to it."""
    issued_at_ms: int
    expires_at_ms: int
    token: str | None = None
    """What it allows us, as a token that we narrow for each offer. Never shown."""


class IssuedToken(msgspec.Struct, frozen=True, gc=False):
    """Of a token that we gave: the id by which it, and all that was narrowed from it, can be revoked."""

    id: str
    until_ms: int


class Challenge(msgspec.Struct, frozen=True, gc=False):
    nonce: str
    made_at_ms: int


class Peer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: InstanceId
    name: str
    url: str | None = None
    """Where its envelopes are taken. None: it cannot be reached, and fetches what there is for it."""
    trust: Trust = Trust.PEER
    denied: bool = False
    """Known, and nothing is taken from it."""
    source: PeerSource = "operator"
    added_at_ms: int = 0
    keys: KeyBundle | None = None
    """As it last showed them. Its own signature is on them."""
    challenge: Challenge | None = None
    """What we asked of it, while it has not answered."""
    verified_at_ms: int | None = None
    capabilities: PeerCapabilities | None = None
    limits: PeerLimits = PeerLimits()
    issued: tuple[IssuedToken, ...] = ()
    """The tokens that we gave it and that are still good, the newest last."""
    heard_at_ms: int = 0
    """When it last proved to be there."""
    conflict: str | None = None
    """What was found at its address that is not it: `identity_changed`, `unverified_keys`."""
