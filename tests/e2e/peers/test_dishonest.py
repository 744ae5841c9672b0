"""What a real requester makes of its provider's word. Providers are actors with real keys, not all of them honest."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from covenant.model.peers.delegation_messages import (
    DelegationCancel,
    DelegationOffer,
    DelegationReject,
    DelegationResult,
    StatusReport,
    TokenUsage,
)
from covenant.model.peers.instance import InstanceId
from covenant.seal.keys import new_private_key
from covenant.seal.proofs import sign_proof
from covenant.seal.purpose_keys import PurposeKey
from tests.e2e.peers.conftest import Pair
from tests.e2e.peers.peer_daemons import Node, until
from tests.e2e.peers.scripted_peer import ScriptedPeer, now_ms

BUDGET = 100


@pytest.fixture
def carl(pair: Pair) -> Iterator[ScriptedPeer]:
    """A verified peer of alice's that offers `researcher`."""
    with ScriptedPeer(f"carl-{uuid4().hex[:8]}") as actor:
        actor.known_to(pair.alice)
        yield actor


def asked(alice: Node, carl: ScriptedPeer) -> DelegationOffer:
    """What carl hears once alice has delegated to it."""
    offered = alice.delegate("find it", "researcher", carl.name, maxTokenBudget=BUDGET)
    return carl.until(DelegationOffer, lambda offer: offer.offer_id == offered)


def usage(total: int) -> TokenUsage:
    return TokenUsage(prompt=0, completion=total, total=total)


def report(offer: DelegationOffer, seq: int = 1, **more: Any) -> StatusReport:
    return StatusReport(offer_id=offer.offer_id, delegation_id=offer.offer_id, seq=seq, status="running", **more)


def test_an_honest_provider_of_another_make_is_understood(pair: Pair, carl: ScriptedPeer) -> None:
    offer = asked(pair.alice, carl)
    assert (offer.task, offer.max_token_budget, offer.via) == ("find it", BUDGET, (pair.alice.id,))
    assert carl.accept(pair.alice, offer, max_token_budget=60).status == 200
    carl.say(pair.alice, report(offer, progress=0.5, message="halfway", token_usage=usage(10)))
    running = pair.alice.stands(offer.offer_id, "running")["delegation"]
    assert (running["maxTokenBudget"], running["progress"], running["message"]) == (60, 0.5, "halfway")
    carl.say(pair.alice, carl.result(offer, pair.alice.id, used=60))
    ended = pair.alice.ended(offer.offer_id)
    assert (ended["result"], ended["delegation"]["proven"], ended["delegation"]["overspent"]) == ("done", True, False)


def test_a_result_that_cost_more_than_agreed_is_not_a_success(pair: Pair, carl: ScriptedPeer) -> None:
    offer = asked(pair.alice, carl)
    carl.accept(pair.alice, offer)
    carl.say(pair.alice, carl.result(offer, pair.alice.id, used=BUDGET + 1))
    ended = pair.alice.ended(offer.offer_id)
    delegation = ended["delegation"]
    assert (delegation["overspent"], delegation["code"]) == (True, "budget_exceeded")
    assert delegation["tokenUsage"]["total"] == BUDGET + 1
    assert "budget_exceeded" in ended["error"]
    assert pair.alice.task(offer.offer_id)["a2a_state"] == "failed"


def test_a_provider_that_reports_more_than_agreed_is_told_to_stop(pair: Pair, carl: ScriptedPeer) -> None:
    offer = asked(pair.alice, carl)
    carl.accept(pair.alice, offer)
    carl.say(pair.alice, report(offer, token_usage=usage(BUDGET + 50)))
    cancel = carl.until(DelegationCancel, lambda it: it.offer_id == offer.offer_id)
    assert cancel.reason.startswith("budget_exceeded")
    carl.say(pair.alice, carl.result(offer, pair.alice.id, used=BUDGET + 50, status="cancelled", result=None))
    ended = pair.alice.ended(offer.offer_id)
    assert (ended["delegation"]["overspent"], ended["delegation"]["code"]) == (True, "budget_exceeded")
    assert pair.alice.task(offer.offer_id)["a2a_state"] == "failed"


def test_what_was_agreed_binds_even_if_more_was_offered(pair: Pair, carl: ScriptedPeer) -> None:
    offer = asked(pair.alice, carl)
    carl.accept(pair.alice, offer, max_token_budget=20)
    carl.say(pair.alice, carl.result(offer, pair.alice.id, used=21))
    assert pair.alice.ended(offer.offer_id)["delegation"]["code"] == "budget_exceeded"


@pytest.mark.parametrize("more", [{"max_token_budget": BUDGET + 1}, {"timeout": 600_000}], ids=["tokens", "time"])
def test_a_provider_that_takes_more_than_was_offered_is_told_to_stop(
    pair: Pair, carl: ScriptedPeer, more: dict[str, int]
) -> None:
    offer = asked(pair.alice, carl)
    carl.accept(pair.alice, offer, **more)
    assert carl.until(DelegationCancel, lambda it: it.offer_id == offer.offer_id).reason.startswith("terms_exceeded")
    carl.say(pair.alice, carl.result(offer, pair.alice.id, status="cancelled", result=None))
    ended = pair.alice.ended(offer.offer_id)
    assert ended["delegation"]["code"] == "terms_exceeded"
    assert pair.alice.task(offer.offer_id)["a2a_state"] == "failed"


def proven_by(private_key: bytes, offer: DelegationOffer, result: DelegationResult, requester: str) -> DelegationResult:
    assert result.transcript is not None
    proof = sign_proof(
        PurposeKey(private_key),
        requester=InstanceId(requester),
        offer=offer,
        result=result,
        transcript=result.transcript,
        now_ms=now_ms(),
    )
    return msgspec.structs.replace(result, proof=proof)


@pytest.mark.parametrize(
    ("lie", "broken"),
    [
        ("another result", "result"),
        ("another line", "transcript"),
        ("a line more", "transcript"),
        ("another offer", "offer"),
        ("another requester", "requester"),
        ("another provider", "provider"),
        ("no proof", "missing"),
    ],
)
def test_a_result_whose_proof_does_not_hold_is_not_a_success(
    pair: Pair, carl: ScriptedPeer, lie: str, broken: str
) -> None:
    offer, us = asked(pair.alice, carl), pair.alice.id
    carl.accept(pair.alice, offer)
    honest, change = carl.result(offer, us), msgspec.structs.replace
    assert honest.transcript is not None
    (line,) = honest.transcript
    told = {
        "another result": lambda: change(honest, result="done, and more"),
        "another line": lambda: change(honest, transcript=(change(line, content="find something else"),)),
        "a line more": lambda: change(honest, transcript=(line, change(line, seq=2))),
        "another offer": lambda: proven_by(carl.private_key, change(offer, task="another"), honest, us),
        "another requester": lambda: proven_by(carl.private_key, offer, honest, carl.id),
        "another provider": lambda: proven_by(new_private_key(), offer, honest, us),
        "no proof": lambda: change(honest, proof=None),
    }[lie]()
    carl.say(pair.alice, told)
    ended = pair.alice.ended(offer.offer_id)
    assert broken in ended["delegation"]["broken"]
    assert (ended["delegation"]["state"], ended["delegation"]["code"]) == ("failed", "proof_broken")
    assert "result" not in ended
    assert pair.alice.task(offer.offer_id)["a2a_state"] == "failed"


def test_somebody_on_the_way_cannot_say_that_a_peer_has_taken_a_letter(pair: Pair, carl: ScriptedPeer) -> None:
    carl.signs_for = False
    offered = pair.alice.delegate("find it", "researcher", carl.name)
    waiting = until(lambda: pair.alice.peer(carl.name)["waiting"], lambda found: found.get("failure"))
    assert (waiting["count"], waiting["failure"].partition(":")[0]) == (1, "bad_receipt")
    carl.signs_for = True
    until(lambda: pair.alice.peer(carl.name)["waiting"], lambda found: found == {})
    pair.alice.post(f"/delegations/{offered}/cancel")


def test_a_peer_cannot_answer_for_another(pair: Pair, carl: ScriptedPeer) -> None:
    offer = asked(pair.alice, carl)
    carl.accept(pair.alice, offer)
    with ScriptedPeer(f"rival-{uuid4().hex[:8]}") as rival:
        rival.known_to(pair.alice)
        rival.say(pair.alice, rival.result(offer, pair.alice.id))
        carl.say(pair.alice, report(offer))
        assert pair.alice.stands(offer.offer_id, "running")["delegation"]["peer"] == carl.name
    carl.say(pair.alice, carl.result(offer, pair.alice.id, result="mine"))
    assert pair.alice.ended(offer.offer_id)["result"] == "mine"


def test_a_reject_ends_the_delegation_with_its_code_and_when_to_come_back(pair: Pair, carl: ScriptedPeer) -> None:
    offer = asked(pair.alice, carl)
    reject = DelegationReject(offer_id=offer.offer_id, code="budget_too_low", reason="not now", retry_after=7_000)
    carl.say(pair.alice, reject)
    ended = pair.alice.ended(offer.offer_id)
    assert (ended["delegation"]["state"], ended["delegation"]["code"]) == ("rejected", "budget_too_low")
    assert (ended["delegation"]["retryAfter"], ended["error"]) == (7_000, "budget_too_low: not now")


def test_a_peer_that_speaks_another_version_is_refused_in_so_many_words(pair: Pair, carl: ScriptedPeer) -> None:
    offer = asked(pair.alice, carl)
    carl.say(pair.alice, DelegationReject(offer_id=offer.offer_id, code="version", reason="too old", versions=(9,)))
    ended = pair.alice.ended(offer.offer_id)
    assert (ended["delegation"]["state"], ended["delegation"]["code"]) == ("rejected", "version")
    with ScriptedPeer(f"modern-{uuid4().hex[:8]}") as modern:
        modern.versions = (9,)
        added = pair.alice.post("/peers", {"url": modern.url, "name": modern.name})
        assert added["peer"]["trustLevel"] == "peer"
        assert "verified" in added["note"]
        refused = pair.alice.call("POST", f"/peers/{modern.name}/verify", {})
        assert (refused.status, refused.code) == (409, "version")
        assert modern.name in refused.body["error"]


def test_an_agent_that_spends_more_than_was_agreed_is_stopped_by_its_own_side(pair: Pair) -> None:
    offered = pair.alice.delegate("500", "spender", "bob", maxTokenBudget=50)
    ended = pair.alice.ended(offered)
    ours = ended["delegation"]
    assert (ours["state"], ours["code"], ours["proven"]) == ("failed", "budget_exceeded", True)
    (theirs,) = [each for each in pair.bob.delegations() if each["offerId"] == offered]
    assert (theirs["state"], theirs["code"]) == ("failed", "budget_exceeded")
    assert theirs["maxTokenBudget"] == 50
    until(lambda: pair.bob.task(theirs["id"])["a2a_state"], lambda state: state == "failed")


def test_what_is_not_lost_can_be_cancelled_and_neither_offered_again_nor_given_up(
    pair: Pair, carl: ScriptedPeer
) -> None:
    offer = asked(pair.alice, carl)
    early = pair.alice.call("POST", f"/delegations/{offer.offer_id}/offer-again", {})
    assert early.status == 409
    early = pair.alice.call("POST", f"/delegations/{offer.offer_id}/force-error", {"reason": "impatient"})
    assert early.status == 409
    pair.alice.post(f"/delegations/{offer.offer_id}/cancel")
    carl.until(DelegationCancel, lambda it: it.offer_id == offer.offer_id)
    carl.say(pair.alice, DelegationReject(offer_id=offer.offer_id, code="busy"))
    assert pair.alice.stands(offer.offer_id, "ended")["delegation"]["state"] == "cancelled"
