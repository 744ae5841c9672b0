"""Which offers are taken, on which terms, and by which word each other one is turned away."""

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from covenant.model.clock_steps import Ages
from covenant.model.peers.delegation import Peer, PeerLimits
from covenant.model.peers.delegation_messages import DelegationOffer, Profile
from covenant.model.peers.instance import InstanceId, Trust
from covenant.peers.directory.instance_keys import InstanceKeys
from covenant.peers.peer_settings import PeerSettings
from covenant.peers.provider.offer_admission import (
    AgreedTerms,
    OfferedProfiles,
    OfferFacts,
    OfferRate,
    OfferRejected,
    judge_offer,
    token_terms,
)
from covenant.seal.keys import new_private_key
from covenant.seal.proofs import assert_offer
from covenant.seal.purpose_keys import PurposeKey
from covenant.seal.tokens import Narrowing, issue, narrow, token_ids

NOW = 1_800_000_000_000
OFFER_ID = "0b0e3c52-4f6f-4b8e-8d0a-6a1f1d2c3b4a"
SETTINGS = PeerSettings()
CODER = Profile(name="coder", max_token_budget=50_000)
LAWYER = Profile(name="lawyer", max_token_budget=400_000)
US, THEM, THIRD = (InstanceKeys(new_private_key(), (), lambda _: None) for _ in range(3))
OFFERING = OfferedProfiles((CODER, LAWYER), 0, 5)


def peer(**changes: Any) -> Peer:
    given: dict[str, Any] = {"id": THEM.id, "name": "north", "trust": Trust.VERIFIED, "keys": THEM.bundle(NOW)}
    return Peer(**{**given, **changes})


def token(
    settings: PeerSettings = SETTINGS, *, holder: Peer | None = None, offering: OfferedProfiles = OFFERING
) -> str:
    terms = token_terms(holder or peer(), offering, settings)
    assert terms is not None
    return issue(
        PurposeKey(US.private_key), THEM.id, msgspec.structs.replace(terms, expires_at_ms=NOW + settings.token_life_ms)
    )


def offer(signer: InstanceKeys = THEM, provider: InstanceId = US.id, **changes: Any) -> DelegationOffer:
    given: dict[str, Any] = {
        "offer_id": OFFER_ID,
        "profile": "coder",
        "task": "write a test",
        "max_token_budget": 10_000,
        "timeout": 60_000,
        "depth_remaining": 2,
        "via": (THEM.id,),
        "token": token(),
    }
    return assert_offer(PurposeKey(signer.private_key), DelegationOffer(**{**given, **changes}), provider=provider)


def facts(profile: str, offering: OfferedProfiles, **changes: Any) -> OfferFacts:
    given: dict[str, Any] = {
        "active": 0,
        "active_of_peer": 0,
        "profile": next((each for each in offering.profiles if each.name == profile), None),
        "us": US,
        "now_ms": NOW,
    }
    return OfferFacts(**{**given, **changes})


def judged(
    made: DelegationOffer | None = None,
    of: Peer | None = None,
    settings: PeerSettings = SETTINGS,
    *,
    rate: Callable[[Peer], int | None] = lambda _: None,
    revoked: Callable[[str], bool] = lambda _: False,
    offering: OfferedProfiles = OFFERING,
    **changed: Any,
) -> AgreedTerms:
    asked = made or offer()
    given = facts(asked.profile, offering, **changed)
    return judge_offer(asked, of or peer(), given, settings, rate=rate, revoked=revoked)


def code(*given: Any, **named: Any) -> str:
    with pytest.raises(OfferRejected) as rejected:
        judged(*given, **named)
    assert rejected.value.reason
    return rejected.value.code


def changed(settings: PeerSettings = SETTINGS, **changes: Any) -> PeerSettings:
    return dataclasses.replace(settings, **changes)


def test_a_verified_peer_gets_what_it_asks_for_within_bounds() -> None:
    assert judged() == AgreedTerms("coder", 10_000, 60_000, None, 2, SETTINGS.status_interval_ms)


def test_what_the_day_leaves_is_all_that_is_agreed() -> None:
    settings = changed(offers_per_day=9, tokens_per_day=12_000)
    assert judged(settings=settings, accepted_today=8, tokens_today=4_000).budget == 8_000
    assert judged(of=peer(limits=PeerLimits(tokens_per_day=50_000)), settings=settings).budget == 10_000
    with pytest.raises(OfferRejected) as rejected:
        judged(settings=settings, accepted_today=9)
    assert (NOW + (rejected.value.retry_after_ms or 0)) % 86_400_000 == 0, "it may come back when the day is over"


@pytest.mark.parametrize(
    ("rejected", "made", "of", "settings", "now"),
    [
        ("denied", {}, {"denied": True}, {}, {}),
        ("denied", {}, {}, {"deny": ("north",)}, {}),
        ("denied", {}, {}, {"deny": (THEM.id,)}, {}),
        ("denied", {}, {}, {"allow": ("south",)}, {}),
        ("untrusted", {}, {"trust": Trust.PEER}, {}, {}),
        ("untrusted", {}, {"keys": None}, {}, {}),
        ("invalid", {"signer": THIRD}, {}, {}, {}),
        ("invalid", {"provider": THIRD.id}, {}, {}, {}),
        ("depth_exceeded", {"via": (US.id, THEM.id)}, {}, {}, {}),
        ("depth_exceeded", {"via": (THEM.id,) * 4}, {}, {}, {}),
        ("expired", {"deadline_ms": NOW}, {}, {}, {}),
        ("no_profile", {"profile": "poet"}, {}, {}, {}),
        ("budget_too_low", {"max_token_budget": 999}, {}, {"budget_min": 1_000}, {}),
        ("budget_too_low", {}, {"limits": PeerLimits(budget_max=0)}, {}, {}),
        ("denied", {"token": None}, {}, {}, {}),
        ("denied", {"token": "nonsense"}, {}, {}, {}),
        ("denied", {}, {}, {}, {"now_ms": NOW + SETTINGS.token_life_ms + 1}),
        ("rate_limited", {}, {}, {"offers_per_day": 3}, {"accepted_today": 3}),
        ("rate_limited", {}, {"limits": PeerLimits(offers_per_day=0)}, {}, {}),
        ("rate_limited", {}, {}, {"tokens_per_day": 500}, {"tokens_today": 500}),
        ("rate_limited", {}, {"limits": PeerLimits(tokens_per_day=0)}, {}, {}),
        ("busy", {}, {}, {}, {"draining": True}),
        ("busy", {}, {}, {}, {"active": SETTINGS.slots}),
        ("busy", {}, {}, {}, {"active_of_peer": SETTINGS.slots_per_peer}),
        ("busy", {}, {"limits": PeerLimits(concurrent=1)}, {}, {"active_of_peer": 1}),
        ("busy", {}, {"limits": PeerLimits(concurrent=0)}, {}, {}),
    ],
)
def test_every_offer_that_is_not_taken_has_its_word(
    rejected: str, made: dict[str, Any], of: dict[str, Any], settings: dict[str, Any], now: dict[str, Any]
) -> None:
    assert code(offer(**made), peer(**of), changed(**settings), **now) == rejected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"allow": ("north",)}, "coder"), ({"allow": (THEM.id, "south")}, "coder"), ({"deny": ("south",)}, "coder")],
)
def test_lists_name_peers_by_id_or_by_name(changes: dict[str, Any], expected: str) -> None:
    assert judged(settings=changed(**changes)).profile == expected


def test_deny_is_stronger_than_allow_and_than_trust() -> None:
    settings = changed(allow=("north",), deny=("north",))
    assert code(of=peer(trust=Trust.TRUSTED), settings=settings) == "denied"


def test_one_word_of_an_offer_changed_on_the_way_makes_it_invalid() -> None:
    made = offer()
    for field, value in (("task", "write a poem"), ("max_token_budget", 10_001), ("via", ()), ("token", None)):
        assert code(msgspec.structs.replace(made, **{field: value})) == "invalid"


@pytest.mark.parametrize(
    ("asked", "of", "settings", "granted"),
    [
        (400_000, {}, {}, 200_000),
        (400_000, {}, {"budget_max": 300_000}, 300_000),
        (400_000, {"limits": PeerLimits(budget_max=7_000)}, {}, 7_000),
        (400_000, {"limits": PeerLimits(budget_max=300_000)}, {}, 200_000),
        (123, {}, {}, 123),
    ],
)
def test_the_budget_is_the_least_of_all_that_is_said_of_it(
    asked: int, of: dict[str, Any], settings: dict[str, Any], granted: int
) -> None:
    bounds, holder = changed(**settings), peer(**of)
    made = offer(profile="lawyer", max_token_budget=asked, token=token(bounds, holder=holder))
    assert judged(made, holder, bounds).budget == granted


def test_a_profile_bounds_the_budget_too() -> None:
    assert judged(offer(max_token_budget=400_000)).budget == CODER.max_token_budget


def test_time_and_depth_are_the_least_of_all_that_is_said_of_them() -> None:
    assert judged(offer(timeout=600_000), settings=changed(timeout_ms_max=5_000)).timeout_ms == 5_000
    assert judged(offer(deadline_ms=NOW + 1_234)).timeout_ms == 1_234
    assert judged(offer(depth_remaining=10)).depth_remaining == SETTINGS.depth_max
    assert judged(offer(depth_remaining=0)).depth_remaining == 0


class TestTokens:
    def test_what_its_holder_narrowed_bounds_what_is_agreed(self) -> None:
        further = Narrowing(budget=600, depth=1, profiles=frozenset({"coder"}), offer_id=OFFER_ID)
        terms = judged(offer(token=narrow(token(), US.key, further)))
        assert (terms.budget, terms.depth_remaining) == (600, 1)

    @pytest.mark.parametrize(
        "further",
        [
            Narrowing(profiles=frozenset({"lawyer"})),
            Narrowing(expires_at_ms=NOW - 1),
            Narrowing(offer_id="another"),
            Narrowing(budget=0),
        ],
    )
    def test_what_it_was_narrowed_away_from_is_denied(self, further: Narrowing) -> None:
        assert code(offer(token=narrow(token(), US.key, further))) == "denied"

    def test_one_for_another_holder_or_of_another_provider_is_denied(self) -> None:
        terms = Narrowing(expires_at_ms=NOW + 1_000)
        assert code(offer(token=issue(PurposeKey(US.private_key), THIRD.id, terms))) == "denied"
        assert code(offer(token=issue(PurposeKey(THIRD.private_key), THEM.id, terms))) == "denied"

    def test_one_that_was_revoked_is_denied_with_all_that_was_narrowed_from_it(self) -> None:
        whole = token()
        narrowed = narrow(whole, US.key, Narrowing(budget=600))
        (root,) = token_ids(whole, US.key)
        assert code(offer(token=narrowed), revoked=lambda which: which == root) == "denied"

    def test_none_is_needed_where_the_settings_say_so_and_a_bad_one_is_denied_all_the_same(self) -> None:
        free = changed(require_token=False)
        assert judged(offer(token=None), settings=free).budget == 10_000
        assert code(offer(token="nonsense"), settings=free) == "denied"

    def test_a_reason_says_where_a_new_one_comes_from(self) -> None:
        with pytest.raises(OfferRejected, match="ask for our capabilities again"):
            judged(offer(token=None))

    def test_one_that_its_holder_sealed_is_taken(self) -> None:
        sealed = narrow(token(), US.key, Narrowing(budget=600), sealed=True)
        assert judged(offer(token=sealed)).budget == 600

    def test_they_are_given_to_those_alone_who_may_delegate(self) -> None:
        for of, settings in (
            (peer(trust=Trust.PEER), SETTINGS),
            (peer(denied=True), SETTINGS),
            (peer(), changed(deny=("north",))),
            (peer(), changed(allow=("south",))),
        ):
            assert token_terms(of, OFFERING, settings) is None
        assert token_terms(peer(), OfferedProfiles((), 0, 5), SETTINGS) is None

    def test_more_profiles_than_a_token_can_name_are_not_named_in_it(self) -> None:
        many = tuple(Profile(name=f"p{number}", max_token_budget=1_000) for number in range(100))
        odd = (Profile(name="a name with spaces", max_token_budget=1_000),)
        for profiles in (many, odd):
            offering = OfferedProfiles(profiles, 0, 5)
            asked = offer(profile=profiles[-1].name, token=token(offering=offering))
            assert judged(asked, offering=offering).budget == 1_000


class TestRate:
    def rate(self, settings: PeerSettings = SETTINGS) -> tuple[OfferRate, list[int]]:
        now = [NOW]
        return OfferRate(settings, lambda: now[0]), now

    def test_so_many_offers_may_be_made_in_a_minute_and_the_next_one_hears_when(self) -> None:
        rate, now = self.rate(changed(offers_per_min=6))
        assert [rate(peer()) for _ in range(7)] == [None] * 6 + [10_000]
        now[0] += 9_999
        assert rate(peer()) == 1
        now[0] += 1
        assert rate(peer()) is None

    def test_it_is_asked_last_but_for_room_and_counts_no_offer_that_is_turned_away_before(self) -> None:
        rate, _ = self.rate(changed(offers_per_min=1))
        for _ in range(5):
            assert code(offer(profile="poet"), rate=rate) == "no_profile"
        judged(rate=rate)
        with pytest.raises(OfferRejected) as rejected:
            judged(rate=rate)
        assert (rejected.value.code, rejected.value.retry_after_ms) == ("rate_limited", 60_000)

    def test_a_trusted_peer_may_offer_ten_times_as_often_unless_it_has_a_limit_of_its_own(self) -> None:
        rate, _ = self.rate(changed(offers_per_min=6))
        assert rate.per_min(peer(trust=Trust.TRUSTED)) == 60
        assert rate.per_min(peer(trust=Trust.TRUSTED, limits=PeerLimits(offers_per_min=2))) == 2
        assert rate(peer(limits=PeerLimits(offers_per_min=0))) == 60_000

    def test_peers_do_not_use_up_each_others_rate(self) -> None:
        rate, _ = self.rate(changed(offers_per_min=1))
        assert (rate(peer()), rate(peer(id=THIRD.id)), rate(peer())) == (None, None, 60_000)

    def test_a_clock_that_is_set_back_gives_nothing(self) -> None:
        rate, now = self.rate(changed(offers_per_min=1))
        rate(peer())
        now[0] -= 1_000_000
        assert rate(peer()) == 60_000


def test_room_is_told_with_when_to_come_back() -> None:
    with pytest.raises(OfferRejected) as rejected:
        judged(active=SETTINGS.slots)
    assert rejected.value.retry_after_ms is not None


def test_a_token_that_had_expired_stays_expired_while_a_clock_that_was_set_back_is_paused() -> None:
    """Fail closed: for as long as nobody knows which clock is right, the later one counts for tokens."""
    over_ms = NOW + SETTINGS.token_life_ms + 1
    assert judged(ages=Ages(paused=True)).profile == "coder"
    assert code(now_ms=over_ms) == "denied"
    assert code(ages=Ages(paused=True, latest_ms=over_ms)) == "denied"


def test_an_offer_whose_deadline_only_a_step_of_our_clock_has_passed_is_taken_within_its_timeout() -> None:
    assert code(offer(deadline_ms=NOW - 1)) == "expired"
    assert judged(offer(deadline_ms=NOW - 1), ages=Ages(paused=True)).timeout_ms == 60_000
