"""Admission of a peer's offers: the profiles it is offered, the terms of its token, and whether an offer is accepted.

Decides from the given facts, and changes nothing but a rate limit. The agreed terms never exceed the offer, the
profile, the settings, the peer's own limits and the token.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from covenant.model.clock_steps import STEADY, Ages
from covenant.model.errors import CovenantError, Refusal
from covenant.model.ids import PublicKey
from covenant.model.peers.delegation import Delegation, Peer
from covenant.model.peers.delegation_messages import (
    BUDGET_MAX,
    DelegationAccept,
    DelegationOffer,
    DelegationReject,
    Profile,
    RejectCode,
)
from covenant.model.peers.instance import SUPPORTED_VERSIONS, InstanceId, Trust
from covenant.model.peers.usage_by_day import DAY_MS
from covenant.model.rate_limits import MINUTE_MS, TokenBuckets
from covenant.peers.directory.instance_keys import InstanceKeys
from covenant.peers.peer_settings import PeerSettings, is_named
from covenant.seal import proofs
from covenant.seal.tokens import PROFILES_MAX, Narrowing, Use, authorize, token_parties

TRUSTED_RATE: Final = 10
BUSY_RETRY_MS: Final = 5_000
"""When a peer may offer again after `busy`: soon enough to keep slots in use, too late to flood us."""


_NAMEABLE: Final = re.compile(r"[A-Za-z0-9_.\-]{1,128}").fullmatch


class OfferedProfiles(NamedTuple):
    """The profiles that a peer is offered, how many delegations are active, and how many slots are free."""

    profiles: tuple[Profile, ...]
    active: int
    free: int


def is_barred(peer: Peer, settings: PeerSettings) -> bool:
    return peer.denied or is_named(peer, settings.deny) or bool(settings.allow and not is_named(peer, settings.allow))


def budget_max(peer: Peer, settings: PeerSettings) -> int:
    own = peer.limits.budget_max
    return min(BUDGET_MAX, settings.budget_max, own if own is not None else BUDGET_MAX)


def token_terms(peer: Peer, offering: OfferedProfiles, settings: PeerSettings) -> Narrowing | None:
    """The terms of a token for this peer, apart from its lifetime. None: the peer may not delegate, with any token."""
    if not peer.trust.covers(Trust.VERIFIED) or peer.tokenless or is_barred(peer, settings) or not offering.profiles:
        return None
    names = frozenset(each.name for each in offering.profiles)
    # A token names a bounded number of profiles. Beyond that it names none: each offer is checked against the
    # catalogue anyway.
    nameable = len(names) <= PROFILES_MAX and all(map(_NAMEABLE, names))
    return Narrowing(profiles=names if nameable else None, budget=budget_max(peer, settings), depth=settings.depth_max)


class OfferRejected(CovenantError):
    """The offer is rejected. The code and the reason are sent to the peer; nothing else is."""

    def __init__(self, code: RejectCode, reason: str, retry_after_ms: int | None = None) -> None:
        super().__init__(reason)
        self.code: RejectCode = code
        self.reason = reason
        self.retry_after_ms = retry_after_ms


def accept_message(delegation: Delegation) -> DelegationAccept:
    return DelegationAccept(
        offer_id=delegation.offer_id,
        delegation_id=delegation.delegation_id or delegation.task_id,
        max_token_budget=delegation.budget,
        timeout=delegation.timeout_ms,
        status_interval=max(100, delegation.status_interval_ms),
    )


def reject_message(offer: DelegationOffer, rejected: OfferRejected) -> DelegationReject:
    return DelegationReject(
        offer_id=offer.offer_id,
        code=rejected.code,
        reason=rejected.reason,
        retry_after=rejected.retry_after_ms if rejected.code != "busy" else rejected.retry_after_ms or BUSY_RETRY_MS,
        versions=SUPPORTED_VERSIONS if rejected.code == "version" else None,
    )


class OfferFacts(NamedTuple):
    active: int
    """Live delegations of all peers."""
    active_of_peer: int
    profile: Profile | None
    """The profile that the offer names; None if this peer is not offered it."""
    us: InstanceKeys
    now_ms: int
    ages: Ages = STEADY
    skew_ms: int = 0
    """How far our clock is ahead of the requester's, whose clock the offer's deadline is by."""
    draining: bool = False
    """Whether this daemon is draining: it takes no new work before the next start."""
    away: bool = False
    """Whether no daemon of this instance has the agent of the profile now."""
    accepted_today: int = 0
    """Offers of this peer accepted today; below, the tokens that its delegations have used today or may still use."""
    tokens_today: int = 0


class AgreedTerms(NamedTuple):
    profile: str
    budget: int
    timeout_ms: int
    deadline_ms: int | None
    """The deadline by our clock."""
    depth_remaining: int
    status_interval_ms: int


def judge_offer(
    offer: DelegationOffer,
    peer: Peer,
    facts: OfferFacts,
    settings: PeerSettings,
    *,
    rate: Callable[[Peer], int | None],
    revoked: Callable[[str], bool],
) -> AgreedTerms:
    """Raises `OfferRejected`.

    `rate` gives the milliseconds until this peer may offer again, or None: then it has counted this offer.
    """
    _check_standing(offer, peer, facts, settings)
    deadline_ms = offer.deadline_ms + facts.skew_ms if offer.deadline_ms is not None else None
    _check_place_and_time(offer, deadline_ms, facts, settings)
    profile = facts.profile
    if profile is None:
        raise OfferRejected("no_profile", "there is no such profile for you; ask for our capabilities")
    most = min(offer.max_token_budget, profile.max_token_budget, budget_max(peer, settings))
    _check_budget(most, settings)
    allowed = _allowed(offer, peer, facts, settings, revoked)
    budget = _least(most, allowed.budget)
    _check_budget(budget, settings)
    budget = min(budget, _check_quota(peer, facts, settings))
    _check_room(peer, facts, settings, rate)
    remaining_ms = deadline_ms - facts.now_ms if deadline_ms is not None else offer.timeout
    if remaining_ms <= 0:
        # The clock was set just now, so it cannot tell whether the deadline has passed: only the timeout counts.
        remaining_ms = offer.timeout
    return AgreedTerms(
        profile=profile.name,
        budget=budget,
        timeout_ms=min(offer.timeout, settings.timeout_ms_max, remaining_ms),
        deadline_ms=deadline_ms,
        depth_remaining=_least(min(offer.depth_remaining, settings.depth_max), allowed.depth),
        status_interval_ms=settings.status_interval_ms,
    )


def _check_standing(offer: DelegationOffer, peer: Peer, facts: OfferFacts, settings: PeerSettings) -> None:
    if is_barred(peer, settings):
        raise OfferRejected("denied", "you may not delegate to this instance")
    if not peer.trust.covers(Trust.VERIFIED) or peer.keys is None:
        raise OfferRejected("untrusted", "you are not verified here yet: answer our challenge, and offer again")
    if not is_asserted(offer, peer, facts.us):
        raise OfferRejected("invalid", "the offer has no valid signature of yours for this instance")


def is_asserted(offer: DelegationOffer, peer: Peer, us: InstanceKeys) -> bool:
    """Whether the peer signed the offer, for us. Former identities of both sides count, too."""
    parties = ((InstanceId(requester), InstanceId(provider)) for requester in peer.ids for provider in us.ids)
    return peer.keys is not None and any(proofs.is_asserted(offer, *each) for each in parties)


def _check_place_and_time(
    offer: DelegationOffer, deadline_ms: int | None, facts: OfferFacts, settings: PeerSettings
) -> None:
    if any(each in offer.via for each in facts.us.ids):
        raise OfferRejected(
            "depth_exceeded", "the offer is made on behalf of this instance itself: it went in a circle"
        )
    most = max(1, settings.depth_max)  # 0: offers are worked on here, and not delegated on
    if len(offer.via) > most:
        raise OfferRejected(
            "depth_exceeded", f"the work has come through more than the {most} instances that are allowed here"
        )
    if deadline_ms is not None and deadline_ms <= facts.now_ms and not facts.ages.paused:
        raise OfferRejected("expired", "the deadline of the offer has passed by the provider's clock")


def _check_budget(budget: int, settings: PeerSettings) -> None:
    if budget < max(1, settings.budget_min):
        raise OfferRejected(
            "budget_too_low",
            f"{budget} tokens are left for this offer, and at least {max(1, settings.budget_min)} are needed",
        )


def _allowed(
    offer: DelegationOffer, peer: Peer, facts: OfferFacts, settings: PeerSettings, revoked: Callable[[str], bool]
) -> Narrowing:
    """The limits of the token.

    They bound the agreed terms, so the token is checked only for the smallest possible offer.
    """
    if offer.token is None:
        if settings.require_token and peer.tokenless:
            raise OfferRejected("denied", "your tokens were revoked here; our operator has to trust you again")
        if settings.require_token:
            raise OfferRejected(
                "denied", "the offer has no token; ask for our capabilities again: the answer brings one"
            )
        return Narrowing()
    holder, audience = token_parties(offer.token)
    use = Use(
        sender=peer.signed_as(holder),
        profile=offer.profile,
        budget=max(1, settings.budget_min),
        depth=0,
        offer_id=offer.offer_id,
    )
    expiry_ms = facts.ages.expiry_ms(facts.now_ms)
    try:
        return authorize(
            offer.token,
            PublicKey(facts.us.signed_as(audience).key),
            use,
            now_ms=expiry_ms,
            revoked=revoked,
            void_before_ms=facts.us.void_before_ms,
        )
    except Refusal as refused:
        raise OfferRejected(
            "denied",
            f"{refused.message} ({refused.code}); ask for our capabilities again: the answer brings a new token",
        ) from None


def daily_quota(peer: Peer, settings: PeerSettings) -> tuple[int | None, int | None]:
    """The most offers and tokens of this peer in a day; None: no limit."""
    offers, tokens = peer.limits.offers_per_day, peer.limits.tokens_per_day
    return (
        offers if offers is not None else settings.offers_per_day or None,
        tokens if tokens is not None else settings.tokens_per_day or None,
    )


def _check_quota(peer: Peer, facts: OfferFacts, settings: PeerSettings) -> int:
    """How many tokens are left today for this offer."""
    offers, tokens = daily_quota(peer, settings)
    retry_ms = DAY_MS - facts.now_ms % DAY_MS
    if offers is not None and facts.accepted_today >= offers:
        raise OfferRejected(
            "rate_limited", f"your {offers} offers of today were accepted; offer again tomorrow", retry_ms
        )
    if tokens is None:
        return BUDGET_MAX
    remaining = tokens - facts.tokens_today
    if remaining < max(1, settings.budget_min):
        raise OfferRejected(
            "rate_limited", f"your delegations leave too few of today's {tokens} tokens; offer again tomorrow", retry_ms
        )
    return remaining


def _check_room(peer: Peer, facts: OfferFacts, settings: PeerSettings, rate: Callable[[Peer], int | None]) -> None:
    if facts.draining:
        raise OfferRejected("busy", "this daemon is draining; offer again later", BUSY_RETRY_MS)
    if facts.away:
        raise OfferRejected("busy", "the daemons that serve this profile are away; offer again later", BUSY_RETRY_MS)
    own = peer.limits.concurrent
    if facts.active_of_peer >= (own if own is not None else settings.slots_per_peer):
        raise OfferRejected("busy", "your delegations have reached their limit here; offer again later", BUSY_RETRY_MS)
    if facts.active >= settings.slots:
        raise OfferRejected("busy", "all slots for delegations are taken; offer again later", BUSY_RETRY_MS)
    # The rate is checked last, so that an offer that is rejected as busy does not count.
    wait_ms = rate(peer)
    if wait_ms is not None:
        raise OfferRejected("rate_limited", "too many offers; slow down", wait_ms)


def _least(value: int, bound: int | None) -> int:
    return value if bound is None else min(value, bound)


class OfferRate:
    """How often each peer may offer: a token bucket that holds a minute's worth and refills in a minute. In memory."""

    def __init__(self, settings: PeerSettings, now_ms: Callable[[], int]) -> None:
        self._settings = settings
        self._now_ms = now_ms
        self._buckets = TokenBuckets()

    def __call__(self, peer: Peer) -> int | None:
        per_min = self.per_min(peer)
        return self._buckets.take(peer.id, self._now_ms(), per_min) if per_min > 0 else MINUTE_MS

    def per_min(self, peer: Peer) -> int:
        own = peer.limits.offers_per_min
        if own is not None:
            return own
        return self._settings.offers_per_min * (TRUSTED_RATE if peer.trust.covers(Trust.TRUSTED) else 1)
