"""The state of a delegation is that of its task: whoever polls it never reads an end without what came of it."""

from collections.abc import Iterator
from uuid import uuid4

import msgspec
import pytest

from covenant.model.peers.delegation_messages import (
    DelegationCancel,
    DelegationInput,
    DelegationOffer,
    StatusReport,
)
from tests.e2e.peers.conftest import Pair
from tests.e2e.peers.faults import two
from tests.e2e.peers.peer_daemons import ENDED, until
from tests.e2e.peers.scripted_peer import ScriptedPeer
from tests.matrices import first_of
from tests.waits import LONGER_S


@pytest.fixture
def carl(pair: Pair) -> Iterator[ScriptedPeer]:
    with ScriptedPeer(f"carl-{uuid4().hex[:8]}") as actor:
        actor.known_to(pair.alice)
        yield actor


def asked(pair: Pair, carl: ScriptedPeer) -> DelegationOffer:
    offered = pair.alice.delegate("find it", "researcher", carl.name, maxTokenBudget=100)
    return carl.until(DelegationOffer, lambda offer: offer.offer_id == offered)


@pytest.mark.parametrize("polled", first_of([15, 60]))
def test_whoever_polls_reads_the_end_together_with_the_result(pair: Pair, polled: int) -> None:
    early = 0
    for number in range(polled):
        offered = pair.alice.delegate(f"poll {number}", "echo", "bob")
        seen = until(
            lambda named=offered: pair.alice.delegation(named),  # type: ignore[misc]
            lambda found: found["delegation"]["state"] in ENDED,
        )
        early += "result" not in seen
        assert pair.alice.ended(offered)["result"] == f"echo poll {number}"
    assert early == 0


def test_a_rejected_delegation_is_ended_once_its_error_can_be_read(pair: Pair) -> None:
    for _ in range(10):
        offered = pair.alice.delegate("nobody does this", "no-such-agent", "bob")
        seen = until(
            lambda named=offered: pair.alice.delegation(named),  # type: ignore[misc]
            lambda found: found["delegation"]["state"] in ENDED,
        )
        assert "no_profile" in seen["error"]


def test_a_question_is_told_once_and_not_again_after_its_answer(pair: Pair, carl: ScriptedPeer) -> None:
    offer = asked(pair, carl)
    made = offer.offer_id
    carl.accept(pair.alice, offer)
    asks = StatusReport(
        offer_id=made, delegation_id=made, seq=1, status="input_required", message="which one?", question=1
    )
    carl.say(pair.alice, asks)
    until(lambda: pair.alice.task(made)["a2a_state"], lambda state: state == "input-required")
    pair.alice.cli("a2a", "answer", made, "the first one")
    carl.until(DelegationInput, lambda said: said.offer_id == made)
    carl.say(pair.alice, msgspec.structs.replace(asks, seq=2))  # sent before the answer was heard
    working = StatusReport(offer_id=made, delegation_id=made, seq=3, status="running", message="reading it")
    carl.say(pair.alice, working)
    until(lambda: pair.alice.task(made), lambda task: "reading it" in str(task["updates"]))
    carl.say(pair.alice, carl.result(offer, pair.alice.id))
    pair.alice.ended(made)
    updates = pair.alice.task(made)["updates"]
    assert [update["kind"] for update in updates if "which one?" in str(update)] == ["parked"]


def test_a_result_that_is_not_believed_makes_no_completed_delegation(pair: Pair, carl: ScriptedPeer) -> None:
    offer = asked(pair, carl)
    carl.accept(pair.alice, offer)
    carl.say(pair.alice, carl.result(offer, pair.alice.id, used=101))
    ended = pair.alice.ended(offer.offer_id)
    assert (ended["delegation"]["state"], ended["delegation"]["status"]) == ("failed", "failed")
    assert [each["state"] for each in pair.alice.delegations(status="failed") if each["id"] == offer.offer_id]
    assert not [each for each in pair.alice.delegations(status="completed") if each["id"] == offer.offer_id]


def test_a_cancel_that_loses_its_race_to_a_result_leaves_a_cancelled_delegation(pair: Pair, carl: ScriptedPeer) -> None:
    offer = asked(pair, carl)
    carl.accept(pair.alice, offer)
    pair.alice.post(f"/delegations/{offer.offer_id}/cancel")
    carl.until(DelegationCancel, lambda it: it.offer_id == offer.offer_id)
    carl.say(pair.alice, carl.result(offer, pair.alice.id, used=9, result="done before it heard"))
    ended = pair.alice.ended(offer.offer_id)
    assert (ended["delegation"]["state"], pair.alice.task(offer.offer_id)["a2a_state"]) == ("cancelled", "canceled")
    assert "result" not in ended
    assert ended["delegation"]["tokenUsage"]["total"] == 9


def test_a_delegation_whose_time_is_over_here_is_timed_out_whatever_its_provider_says(
    pair: Pair, carl: ScriptedPeer
) -> None:
    offered = pair.alice.delegate("find it", "researcher", carl.name, timeout=1_000)
    offer = carl.until(DelegationOffer, lambda each: each.offer_id == offered)
    carl.accept(pair.alice, offer)
    carl.until(DelegationCancel, lambda it: it.offer_id == offered)
    carl.say(pair.alice, carl.result(offer, pair.alice.id, status="cancelled", result=None, error="told to stop"))
    ended = pair.alice.ended(offered)
    assert (ended["delegation"]["state"], ended["delegation"]["status"]) == ("timeout", "timeout")


def test_a_delegation_whose_task_has_ended_says_so_while_its_provider_is_gone() -> None:
    for seconds in LONGER_S:
        with two() as pair:
            alice = pair.alice
            cancelled_id = alice.delegate("cancel", "slow", "bob")
            late_id = alice.delegate("time out", "slow", "bob", timeout=int(seconds * 1_000))
            alice.stands(cancelled_id, "running")
            alice.stands(late_id, "running", *ENDED)
            pair.bob.kill()
            if alice.delegation(late_id)["delegation"]["state"] != "running":
                continue  # its time was over before bob was gone
            cancelled = alice.post(f"/delegations/{cancelled_id}/cancel")["delegation"]
            assert (cancelled["status"], cancelled["state"]) == ("cancelled", "cancelling")
            over = until(lambda: alice.delegation(late_id), lambda found: "error" in found)  # noqa: B023
            assert over["delegation"]["status"] == "timeout"
            assert over["delegation"]["state"] in ("running", "cancelling")
            for status, offered in (("cancelled", cancelled_id), ("timeout", late_id)):
                assert alice.tree(offered)["status"] == status
                assert [each["id"] for each in alice.delegations(status=status)] == [offered]
                again = alice.call("POST", f"/delegations/{offered}/cancel", {})
                assert (again.status, again.code) == (409, "already_ended")
            assert alice.delegations(status="running") == []
            assert "cancelled (cancelling)" in alice.run("peers", "delegations").out
            return
    pytest.fail("bob is never gone in time")
