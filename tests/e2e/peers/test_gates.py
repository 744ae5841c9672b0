"""Who may delegate how much to a real daemon: trust, lists, tokens, slots, rates, budgets and depth.

Those who offer are actors with real keys; what they hear is what a peer's daemon would.
"""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from covenant.model.ids import PublicKey
from covenant.model.peers.delegation_messages import (
    DelegationAccept,
    DelegationCancel,
    DelegationOffer,
    DelegationReject,
    DelegationResult,
)
from covenant.model.peers.instance import InstanceId
from covenant.seal.keys import new_private_key
from covenant.seal.proofs import assert_offer
from covenant.seal.purpose_keys import PurposeKey
from covenant.seal.tokens import Narrowing, issue, narrow
from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.conftest import Pair
from tests.e2e.peers.peer_daemons import ENDED, Node, introduce, open_peer_daemons, until
from tests.e2e.peers.scripted_peer import ScriptedPeer, now_ms
from tests.places import short_folder


@pytest.fixture(scope="module")
def strict() -> Iterator[Node]:
    """One with little room, that does not like dan."""
    with short_folder() as folder, open_peer_daemons(folder) as made:
        yield made.node(
            "strict",
            AGENTS,
            deny="dan",
            profiles="echo,slow,spender",
            slots=2,
            slots_per_peer=1,
            budget_max=1_000,
            budget_min=10,
            depth_max=1,
        )


@pytest.fixture(scope="module")
def brief() -> Iterator[Node]:
    """One that takes offers of three only, whose tokens are soon over, and that does not listen for long."""
    with short_folder() as folder, open_peer_daemons(folder) as made:
        yield made.node("brief", AGENTS, allow="eve,tom,sam", token_life_ms=1_000, messages_per_min=100)


@pytest.fixture
def ann(strict: Node) -> Iterator[ScriptedPeer]:
    """A verified peer of its own for each test; what it has under way ends with it."""
    with ScriptedPeer(f"ann-{uuid4().hex[:8]}") as actor:
        actor.known_to(strict)
        yield actor
        for each in strict.delegations(role="provider", peerId=actor.name):
            if each["state"] not in ENDED:
                strict.call("POST", f"/delegations/{each['id']}/cancel")
                strict.stands(each["id"], "ended")


def answer_to(actor: ScriptedPeer, node: Node, offer: DelegationOffer) -> DelegationReject | DelegationAccept:
    """What the node makes of an offer: its first word on it."""
    assert actor.say(node, offer).status == 200
    # A union is a kind like any other to `isinstance`.
    kinds: Any = DelegationReject | DelegationAccept
    found: DelegationReject | DelegationAccept = actor.until(kinds, lambda it: bool(it.offer_id == offer.offer_id))
    return found


def rejection(actor: ScriptedPeer, node: Node, offer: DelegationOffer) -> DelegationReject:
    found = answer_to(actor, node, offer)
    assert isinstance(found, DelegationReject), found
    (kept,) = [each for each in node.delegations(role="provider") if each["offerId"] == offer.offer_id]
    assert (kept["state"], kept["code"]) == ("rejected", found.code)
    return found


def accepted(actor: ScriptedPeer, node: Node, profile: str = "echo", **changes: Any) -> DelegationAccept:
    """What is agreed on an offer like this, as soon as there is room for it."""
    found = until(
        lambda: answer_to(actor, node, actor.offer(node, profile, **changes)),
        lambda answer: isinstance(answer, DelegationAccept) or answer.code != "busy",
    )
    assert isinstance(found, DelegationAccept), found
    return found


# Standing


def test_a_mere_peer_cannot_delegate(strict: Node, ann: ScriptedPeer) -> None:
    offer = ann.offer(strict)
    strict.ask("PUT", f"/peers/{ann.name}/trust", {"trustLevel": "peer"})
    assert rejection(ann, strict, offer).code == "untrusted"
    assert ann.ask(strict).token is None
    of_nothing = ann.say(strict, DelegationCancel(offer_id=str(uuid4())))
    assert (of_nothing.status, of_nothing.code) == (403, "untrusted")
    strict.ask("PUT", f"/peers/{ann.name}/trust", {"trustLevel": "verified"})
    accepted(ann, strict)


def test_a_real_requester_that_is_a_mere_peer_hears_untrusted() -> None:
    """Once the time is over in which two that have just met may not have verified each other."""
    met = {"covenant.peers.requester.requester_service.INTRODUCTION_MS": 500}
    with short_folder() as folder, open_peer_daemons(folder) as daemons:
        alice, bob = daemons.node("alice", AGENTS, constants=met), daemons.node("bob", AGENTS)
        introduce(alice, bob)
        bob.ask("PUT", "/peers/alice/trust", {"trustLevel": "peer"})
        ended = alice.ended(alice.delegate("am I trusted?", "echo", "bob"))
        assert (ended["delegation"]["state"], ended["delegation"]["code"]) == ("rejected", "untrusted")
        assert ended["error"].startswith("untrusted: ")
        assert not daemons.lines("runs")


def test_a_peer_on_the_list_of_those_who_may_not_is_denied(strict: Node) -> None:
    with ScriptedPeer("dan") as dan:
        dan.known_to(strict)
        assert dan.ask(strict).token is None
        assert rejection(dan, strict, dan.offer(strict, token=None)).code == "denied"


def test_where_there_is_a_list_of_those_who_may_nobody_else_may(brief: Node) -> None:
    with ScriptedPeer("eve") as eve, ScriptedPeer("uri") as uri:
        eve.known_to(brief)
        uri.known_to(brief)
        assert rejection(uri, brief, uri.offer(brief, token=None)).code == "denied"
        assert uri.ask(brief).profiles == ()
        accepted(eve, brief)


def test_an_offer_that_is_not_signed_for_this_instance_is_invalid(strict: Node, ann: ScriptedPeer) -> None:
    good = ann.offer(strict)
    unsigned = msgspec.structs.replace(good, assertion=None, offer_id=str(uuid4()))
    assert rejection(ann, strict, unsigned).code == "invalid"
    changed = msgspec.structs.replace(good, task="something else", offer_id=str(uuid4()))
    assert rejection(ann, strict, changed).code == "invalid"
    elsewhere = assert_offer(PurposeKey(ann.private_key), good, provider=InstanceId("frd1_" + "a" * 40))
    assert rejection(ann, strict, elsewhere).code == "invalid"


def test_a_profile_that_is_not_offered_cannot_be_had(strict: Node, ann: ScriptedPeer) -> None:
    assert {each.name for each in ann.ask(strict).profiles} == {"echo", "slow", "spender"}
    assert rejection(ann, strict, ann.offer(strict, "relay")).code == "no_profile"


# Tokens


def test_an_offer_without_a_token_is_denied(strict: Node, ann: ScriptedPeer) -> None:
    assert rejection(ann, strict, ann.offer(strict, token=None)).code == "denied"


def test_a_token_that_somebody_else_made_is_denied(strict: Node, ann: ScriptedPeer) -> None:
    made = issue(PurposeKey(new_private_key()), ann.id, Narrowing(expires_at_ms=now_ms() + 60_000))
    rejected = rejection(ann, strict, ann.offer(strict, token=made))
    assert rejected.code == "denied"
    assert "token_" in rejected.reason
    assert rejection(ann, strict, ann.offer(strict, token="no token at all")).code == "denied"


def test_a_token_is_of_use_to_its_holder_alone(strict: Node, ann: ScriptedPeer) -> None:
    with ScriptedPeer(f"ben-{uuid4().hex[:8]}") as ben:
        ben.known_to(strict)
        stolen = ben.ask(strict).token
        assert rejection(ann, strict, ann.offer(strict, token=stolen)).code == "denied"


def test_a_token_that_has_been_narrowed_allows_no_more_than_that(strict: Node, ann: ScriptedPeer) -> None:
    given, key = ann.ask(strict).token, PublicKey(ann.keys_of(strict).identity_key)
    assert given is not None
    over = narrow(given, key, Narrowing(expires_at_ms=now_ms() - 1))
    assert rejection(ann, strict, ann.offer(strict, token=over)).code == "denied"
    for_another = narrow(given, key, Narrowing(offer_id=str(uuid4())))
    assert rejection(ann, strict, ann.offer(strict, token=for_another)).code == "denied"
    for_slow = narrow(given, key, Narrowing(profiles=frozenset({"slow"})))
    assert rejection(ann, strict, ann.offer(strict, token=for_slow)).code == "denied"
    for_little = narrow(given, key, Narrowing(budget=20))
    assert accepted(ann, strict, token=for_little, max_token_budget=500).max_token_budget == 20


def test_a_token_is_over_in_time(brief: Node) -> None:
    with ScriptedPeer("tom") as tom:
        tom.known_to(brief)
        given = tom.ask(brief).token

        def refused() -> str | None:
            answer = answer_to(tom, brief, tom.offer(brief, token=given))
            return answer.code if isinstance(answer, DelegationReject) and answer.code != "busy" else None

        assert until(refused, bool) == "denied"
        accepted(tom, brief)


def test_revoked_tokens_are_denied_and_no_new_one_is_given_before_the_operator_trusts_it_again(
    strict: Node, ann: ScriptedPeer
) -> None:
    offer = ann.offer(strict)
    revoked = strict.post(f"/peers/{ann.name}/revoke-tokens")
    assert (revoked["id"], revoked["revoked"]) == (ann.id, 1)
    rejected = rejection(ann, strict, offer)
    assert rejected.code == "denied"
    assert "token_revoked" in rejected.reason
    assert ann.ask(strict).token is None
    assert ann.ask(strict).token is None
    strict.ask("PUT", f"/peers/{ann.name}/trust", {"trustLevel": "verified"})
    accepted(ann, strict)


def test_a_real_requester_whose_tokens_were_revoked_works_on_as_soon_as_it_is_trusted_again(pair: Pair) -> None:
    assert pair.alice.ended(pair.alice.delegate("with a token", "echo", "bob"))["result"] == "echo with a token"
    pair.bob.post("/peers/alice/revoke-tokens")
    ended = pair.alice.ended(pair.alice.delegate("without one", "echo", "bob"))
    assert (ended["delegation"]["state"], ended["delegation"]["code"]) == ("rejected", "denied")
    pair.bob.ask("PUT", "/peers/alice/trust", {"trustLevel": "verified"})
    assert pair.alice.ended(pair.alice.delegate("with another", "echo", "bob"))["result"] == "echo with another"


# Room


def test_when_all_slots_are_taken_the_next_offer_hears_busy_and_when_to_come_back(
    strict: Node, ann: ScriptedPeer
) -> None:
    accepted(ann, strict, "slow")
    rejected = rejection(ann, strict, ann.offer(strict, "slow"))
    assert rejected.code == "busy"
    assert rejected.retry_after
    (ours,) = [each for each in strict.delegations(role="provider", peerId=ann.name) if each["state"] != "rejected"]
    strict.post(f"/delegations/{ours['id']}/cancel")
    ann.until(DelegationResult)
    accepted(ann, strict)


def test_a_peer_that_offers_too_often_hears_when_it_may_again(strict: Node, ann: ScriptedPeer) -> None:
    limits = strict.ask("PATCH", f"/peers/{ann.name}", {"limits": {"offersPerMin": 1}})["peer"]["limits"]
    assert limits["offersPerMin"] == 1
    first = accepted(ann, strict)
    ann.until(DelegationResult, lambda each: each.offer_id == first.offer_id)
    rejected = rejection(ann, strict, ann.offer(strict))
    assert rejected.code == "rate_limited"
    assert rejected.retry_after is not None
    assert 50_000 < rejected.retry_after <= 60_000


def test_a_peer_that_speaks_too_often_is_told_when_it_may_again(brief: Node) -> None:
    with ScriptedPeer("sam") as sam, ScriptedPeer("someone") as someone:
        for actor in (sam, someone):
            actor.known_to(brief)
        answers = (brief.receive(sam.envelope(brief)) for _ in range(200))
        refused = next(each for each in answers if each.status != 200)
        assert (refused.status, refused.code) == (429, "rate_limited")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert brief.receive(someone.envelope(brief)).status == 200, "it is counted for each peer"


def test_an_offer_of_fewer_tokens_than_are_worth_beginning_is_rejected(strict: Node, ann: ScriptedPeer) -> None:
    assert rejection(ann, strict, ann.offer(strict, max_token_budget=9)).code == "budget_too_low"


def test_what_is_agreed_is_at_most_what_this_instance_and_the_peers_own_limits_allow(
    strict: Node, ann: ScriptedPeer
) -> None:
    assert accepted(ann, strict, max_token_budget=50_000).max_token_budget == 1_000
    strict.ask("PATCH", f"/peers/{ann.name}", {"limits": {"budgetMax": 50}})
    assert accepted(ann, strict, max_token_budget=50_000).max_token_budget == 50


# Depth


def test_work_that_comes_through_too_many_instances_or_in_a_circle_is_rejected(strict: Node, ann: ScriptedPeer) -> None:
    others = tuple("frd1_" + letter * 40 for letter in "abc")
    assert rejection(ann, strict, ann.offer(strict, via=(*others, ann.id))).code == "depth_exceeded"
    assert rejection(ann, strict, ann.offer(strict, via=(strict.id,))).code == "depth_exceeded"


def test_an_offer_whose_deadline_has_passed_has_expired(strict: Node, ann: ScriptedPeer) -> None:
    assert rejection(ann, strict, ann.offer(strict, deadline_ms=now_ms() - 1)).code == "expired"


def test_a_circle_of_two_daemons_is_stopped_and_both_say_so(pair: Pair) -> None:
    """Alice has bob ask alice."""
    offered = pair.alice.delegate("alice/echo round", "relay", "bob")
    said = pair.alice.ended(offered)["result"]
    assert said.startswith("bob>failed: depth_exceeded")
    (theirs,) = [each for each in pair.bob.delegations(role="requester") if each["code"] == "depth_exceeded"]
    assert (theirs["state"], theirs["peer"]) == ("rejected", "alice")
    assert "bob echo round" not in pair.daemons.lines("runs")
    assert "alice echo round" not in pair.daemons.lines("runs")


def test_work_with_no_depth_left_cannot_be_delegated_on(pair: Pair) -> None:
    with ScriptedPeer(f"deep-{uuid4().hex[:8]}") as deep:
        deep.known_to(pair.bob)
        deep.say(pair.bob, deep.offer(pair.bob, "relay", task="alice/echo deeper", depth_remaining=0))
        result = deep.until(DelegationResult)
    assert (result.status, result.sub_delegations) == ("completed", ())
    assert result.result is not None
    assert result.result.startswith("bob>refused: ")
    assert "deep" in result.result
    assert not [line for line in pair.daemons.lines("runs") if line.endswith("echo deeper") and "alice" in line]


def test_a_cancel_from_a_peer_ends_the_work_and_is_answered(strict: Node, ann: ScriptedPeer) -> None:
    offer = ann.offer(strict, "slow")
    assert isinstance(answer_to(ann, strict, offer), DelegationAccept)
    assert ann.say(strict, DelegationCancel(offer_id=offer.offer_id, reason="enough")).status == 200
    result = ann.until(DelegationResult)
    assert (result.status, result.proof is not None) == ("cancelled", True)
