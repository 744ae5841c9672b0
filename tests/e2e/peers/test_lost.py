"""A provider that is silent for too long is lost to a real requester, which waits for its operator's word."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from covenant.model.peers.delegation_messages import DelegationCancel, DelegationOffer
from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.peer_daemons import Node, open_peer_daemons, until
from tests.e2e.peers.scripted_peer import ScriptedPeer
from tests.places import short_folder


@pytest.fixture(scope="module")
def nervous() -> Iterator[Node]:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        yield made.node("nervous", AGENTS, silence_ms=200, status_interval_ms=100)


@pytest.fixture
def mute(nervous: Node) -> Iterator[ScriptedPeer]:
    """It takes offers in, and says nothing."""
    with ScriptedPeer(f"mute-{uuid4().hex[:8]}") as actor:
        actor.known_to(nervous)
        yield actor


def lost(node: Node, actor: ScriptedPeer) -> str:
    """A delegation that has become so."""
    offered = node.delegate("are you there?", "researcher", actor.name)
    found = node.stands(offered, "lost")["delegation"]
    assert found["status"] == "running"
    assert found["reason"].startswith("no message came for")
    return offered


def test_a_lost_delegation_is_first_in_the_list_and_is_offered_again_under_its_id(
    nervous: Node, mute: ScriptedPeer
) -> None:
    offered = lost(nervous, mute)
    newer = nervous.delegate("later", "echo")
    assert nervous.delegations()[0]["id"] == offered
    assert [each["id"] for each in nervous.delegations(status="lost")][:1] == [offered]
    (need,) = [each for each in nervous.cli("attention")["items"] if each.get("task_id") == offered]
    assert (need["what"], need["command"]) == ("delegation_lost", f"covenant peers offer-again {offered}")
    assert need["act"]["href"] == f"/ui/act/delegation?id={offered}&do=offer_again"
    again = nervous.post(f"/delegations/{offered}/offer-again")["delegation"]
    assert again["state"] == "offered"
    until(lambda: sum(isinstance(each.message, DelegationOffer) for each in mute.heard), lambda count: count == 2)
    assert {each.message.offer_id for each in mute.heard if isinstance(each.message, DelegationOffer)} == {offered}
    offer = next(each.message for each in mute.heard if isinstance(each.message, DelegationOffer))
    mute.accept(nervous, offer)
    mute.say(nervous, mute.result(offer, nervous.id, result="here I am"))
    assert nervous.ended(offered)["result"] == "here I am"
    assert newer


def test_a_lost_delegation_that_is_given_up_fails_and_its_late_result_is_not_used(
    nervous: Node, mute: ScriptedPeer
) -> None:
    offered = lost(nervous, mute)
    blank = nervous.call("POST", f"/delegations/{offered}/force-error", {"reason": " "})
    assert (blank.status, blank.code) == (400, "invalid_request")
    given_up = nervous.post(f"/delegations/{offered}/force-error", {"reason": "it is gone"})["delegation"]
    assert (given_up["state"], given_up["code"]) == ("failed", "provider_lost")
    ended = nervous.ended(offered)
    assert ended["error"].startswith("provider_lost")
    assert nervous.task(offered)["a2a_state"] == "failed"
    mute.until(DelegationCancel, lambda it: it.offer_id == offered)
    offer = mute.until(DelegationOffer)
    mute.say(nervous, mute.result(offer, nervous.id, result="too late"))
    after = nervous.delegation(offered)
    assert after["delegation"]["state"] == "failed"
    assert "result" not in after


def test_the_operator_sees_and_decides_from_the_command_line(nervous: Node, mute: ScriptedPeer) -> None:
    first, second = lost(nervous, mute), lost(nervous, mute)
    told = nervous.run("peers", "delegations")
    assert told.code == 0
    assert first in told.out
    assert "offer-again" in told.err + told.out
    assert nervous.cli("peers", "offer-again", first)["delegation"]["state"] == "offered"
    assert nervous.cli("peers", "force-error", second, "--reason", "gone")["delegation"]["code"] == "provider_lost"
    nervous.stands(first, "lost")
    said = nervous.run("peers", "force-error", first, "--reason", "gone too")
    assert said.code == 0
    assert "failed" in said.out
    assert "provider_lost" in said.out
    refused = nervous.run("peers", "offer-again", first)
    assert refused.code != 0
