"""What we tell a peer that we can do, under our signature; and how far a token for it may go."""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Final, NamedTuple

from covenant.model.peers.peer_record import PeerCapabilities, Peer
from covenant.model.peers.delegation_messages import BUDGET_MAX, CapabilityQuery, CapabilityResponse, Profile
from covenant.model.peers.instance import SUPPORTED_VERSIONS, KeyBundle, Trust
from covenant.peers.keyring import Keyring
from covenant.peers.settings import PeerSettings
from covenant.seal.assertions import sign_capabilities
from covenant.seal.tokens import PROFILES_MAX, Narrowing

BELIEVED_MS_MAX: Final = 3_600_000
KEYS_EVERY_MS: Final = 60_000
PROFILES_BYTES_MAX: Final = 64 * 1024
"""How much of what a peer says of its profiles is kept. It is written down with each thing that is learned of it."""

_NAMEABLE: Final = re.compile(r"[A-Za-z0-9_.\-]{1,128}").fullmatch


class Offering(NamedTuple):
    """What a peer may ask of us now, how much of that is under way, and how much more there could be."""

    profiles: tuple[Profile, ...]
    active: int
    free: int


def listed(peer: Peer, entries: tuple[str, ...]) -> bool:
    return peer.id in entries or peer.name in entries


def barred(peer: Peer, settings: PeerSettings) -> bool:
    """Whether an operator has said that this peer may not delegate to us."""
    return peer.denied or listed(peer, settings.deny) or bool(settings.allow and not listed(peer, settings.allow))


def budget_max(peer: Peer, settings: PeerSettings) -> int:
    own = peer.limits.budget_max
    return min(BUDGET_MAX, settings.budget_max, own if own is not None else BUDGET_MAX)


def answer(
    query: CapabilityQuery,
    peer: Peer,
    offering: Offering,
    keyring: Keyring,
    *,
    token: str | None,
    life_ms: int,
    now_ms: int,
) -> CapabilityResponse:
    response = CapabilityResponse(
        provider=keyring.id,
        audience=peer.id,
        nonce=query.nonce,
        versions=SUPPORTED_VERSIONS,
        profiles=offering.profiles,
        active_delegations=offering.active,
        free_slots=offering.free,
        trust_level=peer.trust,
        keys=keyring.bundle(now_ms),
        issued_at_ms=now_ms,
        expires_at_ms=now_ms + life_ms,
        token=token,
    )
    return sign_capabilities(keyring.private_key, response)


def terms_for(peer: Peer, offering: Offering, settings: PeerSettings) -> Narrowing | None:
    """What a token for this peer allows, but for its time. None: it may not delegate, whatever it shows."""
    if not peer.trust.covers(Trust.VERIFIED) or barred(peer, settings) or not offering.profiles:
        return None
    names = frozenset(each.name for each in offering.profiles)
    # More than a token can name are not named in it: each offer is held against what there is in any case.
    nameable = len(names) <= PROFILES_MAX and all(map(_NAMEABLE, names))
    return Narrowing(profiles=names if nameable else None, budget=budget_max(peer, settings), depth=settings.depth_max)


def worth_learning(known: KeyBundle | None, shown: KeyBundle) -> bool:
    """Whether keys that a peer shows as it speaks are to be kept. Not at each word: what is kept is written down."""
    return known is None or shown.issued_at_ms >= known.issued_at_ms + KEYS_EVERY_MS


def learned(response: CapabilityResponse, now_ms: int) -> PeerCapabilities:
    """What is kept of an answer that holds; not for ever, whatever it says."""
    return PeerCapabilities(
        profiles=_bounded(response.profiles),
        versions=response.versions,
        active_delegations=response.active_delegations,
        free_slots=response.free_slots,
        trust_level=response.trust_level,
        issued_at_ms=response.issued_at_ms,
        expires_at_ms=min(response.expires_at_ms, now_ms + BELIEVED_MS_MAX),
        token=response.token,
    )


def _bounded(profiles: tuple[Profile, ...]) -> tuple[Profile, ...]:
    """The first that there is room for."""
    sizes = accumulate(len(each.name.encode()) + len(each.description.encode()) + 64 for each in profiles)
    return tuple(each for each, size in zip(profiles, sizes, strict=True) if size <= PROFILES_BYTES_MAX)
