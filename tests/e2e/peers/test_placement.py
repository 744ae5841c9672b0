"""Which peer does a task: one that is there and has room. A task waits for room, within its time."""

from collections.abc import Iterator
from typing import Final

import pytest

from covenant.model.peers.delegation_messages import DelegationOffer, DelegationReject
from tests.e2e.peers.agents import AGENTS, FINDER
from tests.e2e.peers.peer_daemons import Node, PeerDaemons, introduce, open_peer_daemons, until
from tests.e2e.peers.scripted_peer import ScriptedPeer
from tests.places import short_folder

AT_ONCE: Final = (200, pytest.param(1_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)]))


@pytest.fixture
def daemons() -> Iterator[PeerDaemons]:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        yield made


def three(daemons: PeerDaemons) -> tuple[Node, Node, Node]:
    """Alice asks, bob and carol have an agent that she has not."""
    alice = daemons.node("alice", AGENTS)
    bob, carol = daemons.node("bob", AGENTS + FINDER), daemons.node("carol", AGENTS + FINDER)
    for other in (bob, carol):
        introduce(alice, other)
        alice.get(f"/capabilities?peerId={other.name}&fresh=true")
    return alice, bob, carol


@pytest.mark.parametrize("count", AT_ONCE)
def test_as_many_at_once_all_complete_with_the_settings_as_they_are(daemons: PeerDaemons, count: int) -> None:
    alice, bob = daemons.node("alice", AGENTS), daemons.node("bob", AGENTS)
    introduce(alice, bob)
    made = [alice.delegate(f"at once {number}", "echo", "bob") for number in range(count)]
    for number, each in enumerate(made):
        assert alice.ended(each)["result"] == f"echo at once {number}"
    lines = [line for line in daemons.lines("runs") if line.startswith("bob echo at once")]
    assert len(lines) == len(set(lines)) == count
    assert alice.delegations(status="failed") == []


def test_a_peer_that_is_away_is_passed_over_for_one_that_is_there(daemons: PeerDaemons) -> None:
    alice, bob, carol = three(daemons)
    alice.ask("PUT", "/peers/bob/trust", {"trustLevel": "trusted"})
    assert alice.ended(alice.delegate("here", "finder"))["delegation"]["peer"] == "bob"
    bob.kill()
    # The first finds out that bob is away, and goes on to carol; those after it know.
    for number in range(3):
        ended = alice.ended(alice.delegate(f"away {number}", "finder"))
        assert (ended["result"], ended["delegation"]["peer"]) == (f"found: away {number}", "carol")
    assert carol.runs
    bob.start()
    until(lambda: alice.peer("bob")["waiting"], lambda waiting: waiting == {})
    until(lambda: alice.ended(alice.delegate("back", "finder"))["delegation"]["peer"], lambda peer: peer == "bob")


def test_a_task_waits_for_a_peer_when_all_are_away(daemons: PeerDaemons) -> None:
    alice, bob, carol = three(daemons)
    bob.kill()
    carol.kill()
    offered = alice.delegate("patience", "finder")
    alice.stands(offered, "offered")
    until(lambda: [alice.peer(name)["status"] for name in ("bob", "carol")], lambda seen: "offline" in seen)
    alice.kill()
    alice.start()
    carol.start()
    assert alice.ended(offered)["result"] == "found: patience"


def test_a_busy_peer_is_offered_the_task_again_within_its_time_and_another_takes_it_sooner(
    daemons: PeerDaemons,
) -> None:
    alice = daemons.node("alice", AGENTS)
    with ScriptedPeer("full") as full:
        full.known_to(alice)
        offered = alice.delegate("find it", "researcher", "full")
        first = full.until(DelegationOffer)
        full.say(alice, DelegationReject(offer_id=first.offer_id, code="busy", retry_after=300))
        second = full.until(DelegationOffer, lambda offer: offer.offer_id != first.offer_id)
        assert (second.task, second.timeout) == (first.task, first.timeout)
        shown = alice.delegation(offered)["delegation"]
        assert (shown["id"], shown["offerId"], shown["state"]) == (offered, second.offer_id, "offered")
        full.accept(alice, second)
        full.say(alice, full.result(second, alice.id, result="at last"))
        assert alice.ended(offered)["result"] == "at last"
        assert [each["offerId"] for each in alice.delegations()] == [second.offer_id]
        # A time that is too short for another try ends it by its own cause.
        short = alice.delegate("find it soon", "researcher", "full", timeout=1_500)
        offer = full.until(DelegationOffer, lambda each: each.task == "find it soon")
        full.say(alice, DelegationReject(offer_id=offer.offer_id, code="busy", retry_after=60_000))
        assert alice.ended(short)["delegation"]["state"] == "timeout"
