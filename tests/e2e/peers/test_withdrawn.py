"""What nobody waits for any more is not begun by a provider that was away: canceled, or timed out."""

from typing import Final

import pytest

from covenant.model.peers.delegation_messages import DelegationCancel, DelegationOffer, DelegationReject
from tests.e2e.peers.conftest import Pair
from tests.e2e.peers.faults import Two, two
from tests.e2e.peers.peer_daemons import until
from tests.e2e.peers.scripted_peer import ScriptedPeer, now_ms

COUNT: Final = 5


def come_back(pair: Two) -> None:
    """Bob is there again, and has all that alice had to say to him, and works."""
    pair.bob.start()
    assert pair.alice.ended(pair.alice.delegate("after", "echo", "bob"))["result"] == "echo after"
    until(lambda: pair.alice.peer("bob")["waiting"], lambda waiting: waiting == {})
    assert [line for line in pair.daemons.lines("runs") if line.startswith("bob echo away")] == []


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
def test_what_was_cancelled_while_its_provider_was_away_is_never_begun(*, restarted: bool) -> None:
    with two() as pair:
        assert pair.alice.ended(pair.alice.delegate("first", "echo", "bob"))["result"] == "echo first"
        pair.bob.kill()
        made = [pair.alice.delegate(f"away {n}", "echo", "bob") for n in range(COUNT)]
        for each in made:
            pair.alice.stands(each, "offered")
        until(lambda: pair.alice.peer("bob")["waiting"], lambda waiting: waiting.get("failure"))
        if restarted:
            pair.alice.kill()
            pair.alice.start()
        for each in made:
            pair.alice.post(f"/delegations/{each}/cancel")
        come_back(pair)
        for each in made:
            assert pair.alice.ended(each)["delegation"]["state"] == "cancelled"
        begun = [each for each in pair.bob.delegations(role="provider") if each["state"] != "rejected"]
        assert len(begun) == 2


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
def test_what_timed_out_while_its_provider_was_away_is_never_begun(*, restarted: bool) -> None:
    with two() as pair:
        assert pair.alice.ended(pair.alice.delegate("first", "echo", "bob"))["result"] == "echo first"
        pair.bob.kill()
        made = [pair.alice.delegate(f"away {n}", "echo", "bob", timeout=1_500) for n in range(COUNT)]
        for each in made:
            pair.alice.stands(each, "offered", "timeout")  # the time of the first may be over by then
        if restarted:
            # Their time passes while alice is away too: the deadline in the offers is what bob holds to.
            pair.alice.kill()
            over_ms = now_ms() + 2_000
            until(now_ms, lambda at_ms: at_ms > over_ms)
            pair.bob.start()
            pair.alice.start()
        else:
            for each in made:
                until(lambda named=each: pair.alice.delegation(named).get("error"), bool)  # type: ignore[misc]
            come_back(pair)
        for each in made:
            assert pair.alice.ended(each)["delegation"]["state"] == "timeout"
        until(lambda: pair.alice.peer("bob")["waiting"], lambda waiting: waiting == {})
        assert [line for line in pair.daemons.lines("runs") if line.startswith("bob echo away")] == []


def test_a_cancel_without_its_offer_is_answered_and_the_late_offer_begins_nothing(pair: Pair) -> None:
    with ScriptedPeer("early") as early:
        early.known_to(pair.bob)
        pair.bob.call("POST", "/peers/early/verify", {})
        early.ask(pair.bob)
        offer = early.offer(pair.bob, task="too late")
        assert early.say(pair.bob, DelegationCancel(offer_id=offer.offer_id), seq=2).status == 200
        reject = early.until(DelegationReject, lambda it: it.offer_id == offer.offer_id)
        assert reject.code == "expired"
        assert early.say(pair.bob, offer, seq=1).body["duplicate"] is True
        assert "bob echo too late" not in pair.daemons.lines("runs")


def test_an_offer_says_until_when_its_task_waits(pair: Pair) -> None:
    with ScriptedPeer("awaited") as awaited:
        awaited.known_to(pair.alice)
        before_ms = now_ms()
        pair.alice.delegate("find it", "researcher", "awaited", timeout=50_000)
        offer = awaited.until(DelegationOffer)
        assert offer.deadline_ms is not None
        assert before_ms < offer.deadline_ms <= now_ms() + 50_000
