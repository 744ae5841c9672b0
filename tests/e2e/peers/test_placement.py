"""Which peer does a task: one that is there and has room. A task waits for room, within its time."""

from collections.abc import Iterator
from typing import Any, Final

import pytest

from covenant.model.peers.delegation_messages import DelegationOffer, DelegationReject
from tests.e2e.peers.agents import AGENTS, FINDER
from tests.e2e.peers.peer_daemons import Node, PeerDaemons, introduce, open_peer_daemons, until
from tests.e2e.peers.scripted_peer import ScriptedPeer
from tests.matrices import first_of
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


@pytest.mark.parametrize("why", first_of(["no_profile", "denied"]))
def test_a_peer_that_will_not_do_it_is_passed_over_for_one_that_does(daemons: PeerDaemons, why: str) -> None:
    alice, bob, carol = three(daemons)
    alice.ask("PUT", "/peers/bob/trust", {"trustLevel": "trusted"})
    assert alice.ended(alice.delegate("here", "finder"))["delegation"]["peer"] == "bob"
    if why == "no_profile":
        bob.again(profiles="echo")
    else:
        bob.cli("peers", "revoke-tokens", "alice")
    ended = alice.ended(alice.delegate("elsewhere", "finder"))
    assert (ended.get("result"), ended["delegation"]["peer"]) == ("found: elsewhere", "carol"), ended
    # Whoever names the peer is told what it says, and so is everybody once no other is left.
    carol.stop()
    alice.cli("peers", "deny", "carol")
    assert why_not(alice, "nowhere") == why
    assert why_not(alice, "there", "bob") == why
    # The same once bob was asked again what it offers, which alice may have done by herself before.
    alice.get("/capabilities?peerId=bob&fresh=true")
    assert why_not(alice, "still nowhere") == why
    assert why_not(alice, "still there", "bob") == why


def why_not(node: Node, task: str, peer: str | None = None) -> str | None:
    """Why nobody does it: what the peer said to the offer, or that no peer is known to offer it."""
    answer = node.call("POST", "/delegate", {"task": task, "profile": "finder", **({"peerId": peer} if peer else {})})
    if answer.status == 404:
        return answer.code
    code: str = node.ended(answer.body["delegationId"])["delegation"]["code"]
    return code


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


def test_a_token_that_was_revoked_while_the_task_waited_is_asked_for_anew_once(daemons: PeerDaemons) -> None:
    alice = daemons.node("alice", AGENTS)
    with ScriptedPeer("full") as full:
        full.known_to(alice)
        offered = alice.delegate("find it", "researcher", "full")
        seen: list[str] = []
        for reject in (("busy", 100), ("denied", None), ("denied", None)):
            offer = full.until(DelegationOffer, lambda each: each.offer_id not in seen)
            seen.append(offer.offer_id)
            full.say(alice, DelegationReject(offer_id=offer.offer_id, code=reject[0], retry_after=reject[1]))
        ended = alice.ended(offered)["delegation"]
        assert (ended["offerId"], ended["state"], ended["code"]) == (seen[-1], "rejected", "denied")


def test_what_waits_for_a_place_is_listed_and_so_is_what_ended_without_one(daemons: PeerDaemons) -> None:
    alice, bob = daemons.node("alice", AGENTS), daemons.node("bob", AGENTS, slots=1)
    introduce(alice, bob)
    deputy = {"id": "deputy", "kind": "peer", "peer": "bob/slow"}
    alice.post("/v1/admin/tenants/default/agents", {"agent_def": deputy})
    made = [alice.delegate(f"place {number}", "slow", "bob") for number in range(4)]
    alice.stands(made[0], "running")
    sent = alice.call("POST", "/v1/a2a/agents/deputy", send("by a client"), headers={"A2A-Version": "1.0"})
    made.append(sent.body["result"]["task"]["id"])

    def listed(**query: str) -> dict[str, dict[str, Any]]:
        return {each["id"]: each for each in alice.delegations(**query)}

    found = until(listed, lambda rows: len(rows) == len(made) and rows[made[-1]]["peer"] == "bob")
    assert set(found) == set(made)
    assert alice.get("/delegations?limit=2")["total"] == len(made)
    assert {each["role"] for each in found.values()} == {"requester"}
    assert set(listed(status="pending", peerId="bob")) == set(made[1:])
    for act in ("offer-again", "force-error"):
        refused = alice.call(
            "POST", f"/delegations/{made[1]}/{act}", {"reason": "tired"} if act == "force-error" else {}
        )
        assert (refused.status, refused.code) == (409, "not_lost")
    for each in (made[1], made[-1]):
        # Nobody was told of it, so nobody need say anything about it any more.
        assert alice.post(f"/delegations/{each}/cancel")["delegation"]["state"] == "cancelled"
    assert set(listed(status="cancelled")) == {made[1], made[-1]}
    assert set(listed(status="pending")) == set(made[2:-1])
    alice.kill()
    alice.start()
    assert set(listed(status="cancelled")) == {made[1], made[-1]}
    assert len([line for line in daemons.lines("runs") if line.startswith("bob slow")]) == 1


def send(text: str) -> dict[str, Any]:
    message = {"messageId": text, "role": "ROLE_USER", "parts": [{"text": text}]}
    params = {"message": message, "configuration": {"returnImmediately": True}}
    return {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": params}
