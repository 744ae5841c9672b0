"""A delegation between two real daemons, from the offer to the result, as both of them show it."""

from typing import Any

from tests.e2e.peers.conftest import Pair
from tests.e2e.peers.peer_daemons import Node, until


def types(node: Node, offer_id: str) -> list[tuple[str, str]]:
    """What went to and fro of this delegation, the oldest first."""
    messages = node.get("/messages?limit=100")["messages"]
    return [(each["direction"], each["type"]) for each in reversed(messages) if each.get("offerId") == offer_id]


def provided(node: Node, offer_id: str) -> dict[str, Any]:
    """The provider's record of an offer, once it has one."""
    (found,) = until(lambda: [each for each in node.delegations(role="provider") if each["offerId"] == offer_id], bool)
    return found


def test_a_delegation_is_offered_accepted_reported_on_and_answered(pair: Pair) -> None:
    alice, bob = pair.alice, pair.bob
    offered = alice.delegate("go-life", "held", "bob", context="quietly", maxTokenBudget=400)
    running = until(
        lambda: alice.stands(offered, "running")["delegation"], lambda it: it["message"] and it["tokenUsage"]["total"]
    )
    assert running["status"] == "running"
    assert (running["message"], running["tokenUsage"]["total"]) == ("waiting for go-life", 3)
    assert (running["maxTokenBudget"], running["peer"], running["remote"]) == (400, "bob", True)
    theirs = provided(bob, offered)
    assert (theirs["state"], theirs["peer"], theirs["remote"]) == ("running", "alice", False)
    assert theirs["id"] == running["delegationId"] != offered

    pair.daemons.touch("go-life")
    ended = alice.ended(offered)
    assert ended["result"] == "ended"
    ours = ended["delegation"]
    assert (ours["state"], ours["proven"], ours["broken"], ours["overspent"]) == ("completed", True, [], False)
    assert ours["tokenUsage"] == {"prompt": 0, "completion": 3, "total": 3}
    done = bob.stands(theirs["id"], "completed")["delegation"]
    assert (done["tokenUsage"], done["proven"]) == (ours["tokenUsage"], True)

    # The offer is logged when its receipt is known, which may be after its answer.
    logged = until(lambda: types(alice, offered), lambda found: ("sent", "delegation_offer") in found)
    (first, *reports, last) = [each for each in logged if each != ("sent", "delegation_offer")]
    assert (first, last) == (("received", "delegation_accept"), ("received", "delegation_result"))
    assert set(reports) == {("received", "delegation_status")}
    assert logged.count(("sent", "delegation_offer")) == 1
    assert types(bob, offered)[0] == ("received", "delegation_offer")
    assert pair.daemons.lines("runs").count("bob held go-life") == 1


def test_the_requesters_tree_shows_what_is_done_elsewhere_and_by_whom(pair: Pair) -> None:
    alice, bob = pair.alice, pair.bob
    offered = alice.delegate("to be seen", "echo", "bob")
    alice.ended(offered)
    tree = alice.tree(offered)
    assert (tree["remote"], tree["provider"], tree["profile"]) == (True, bob.id, "echo")
    assert (tree["status"], tree["usage"]) == ("completed", {"tokens": 7})
    (theirs,) = [each for each in bob.delegations() if each["offerId"] == offered]
    assert tree["remote_task_id"] == theirs["id"]
    assert alice.cli("a2a", "tree", offered)["tree"] == tree
    drawn = alice.run("a2a", "tree", offered).out
    assert f"echo ⇄ {bob.id}" in drawn
    there = bob.tree(theirs["id"])
    assert (there["task_id"], there["task"]["sender"]["display"]) == (theirs["id"], "alice@peer")
    assert (there["a2a_state"], there["usage"], there.get("remote", False)) == ("completed", {"tokens": 7}, False)


def test_what_a_peer_delegates_on_is_in_the_result_and_in_its_own_tree(pair: Pair) -> None:
    alice, bob = pair.alice, pair.bob
    offered = alice.delegate("echo deeper", "relay", "bob")
    assert alice.ended(offered)["result"] == "bob>completed: echo deeper"
    theirs = provided(bob, offered)
    (child,) = bob.tree(theirs["id"])["children"]
    assert child["task"]["intent_text"] == "deeper"
    (told,) = alice.get(f"/delegations/{offered}/proof")["result"]["subDelegations"]
    assert (told["delegationId"], told["profile"], told["status"]) == (child["task_id"], "echo", "completed")
    assert (told["remote"], told["tokenUsage"]["total"]) == (False, 7)
    (below,) = alice.tree(offered)["children"]
    assert (below["task_id"], below["profile"], below["status"]) == (child["task_id"], "echo", "completed")
    assert (below["task"], below["remote"], below["usage_total"]) == (None, True, {"tokens": 7})
    assert "echo ⇄ at the peer" in alice.run("a2a", "tree", offered).out


def test_what_a_peer_delegates_on_is_in_the_tree_while_it_is_done(pair: Pair) -> None:
    alice, bob = pair.alice, pair.bob
    offered = alice.delegate("held go-below", "relay", "bob")
    (below,) = until(lambda: alice.tree(offered).get("children", []), bool)
    (child,) = bob.tree(provided(bob, offered)["id"])["children"]
    assert (below["task_id"], below["profile"], below["remote"]) == (child["task_id"], "held", True)
    until(lambda: alice.tree(offered)["children"][0]["status"], lambda status: status == "running")
    assert "held ⇄ at the peer" in alice.run("a2a", "tree", offered).out
    pair.daemons.touch("go-below")
    assert alice.ended(offered)["result"] == "bob>completed: ended"
    (below,) = alice.tree(offered)["children"]
    assert (below["task_id"], below["status"], below["usage_total"]) == (child["task_id"], "completed", {"tokens": 3})


def test_an_agent_that_fails_over_there_fails_here_and_what_it_raised_stays_there(pair: Pair) -> None:
    ended = pair.alice.ended(pair.alice.delegate("not a number", "spender", "bob"))
    assert ended["delegation"]["state"] == "failed"
    assert (ended["delegation"]["code"], ended["delegation"]["proven"]) == ("agent_failed", True)
    assert ended["error"] == "agent_failed: the agent failed"


def test_the_same_request_again_under_its_id_is_the_same_delegation(pair: Pair) -> None:
    asked = {"task": "only once", "profile": "echo", "peerId": "bob", "id": "0b0e3c52-4f6f-4b8e-8d0a-6a1f1d2c3b4a"}
    first, again = pair.alice.post("/delegate", asked), pair.alice.post("/delegate", asked)
    assert first["delegationId"] == again["delegationId"] == asked["id"]
    assert (first.get("duplicate", False), again["duplicate"]) == (False, True)
    pair.alice.ended(asked["id"])
    refused = pair.alice.call("POST", "/delegate", {**asked, "task": "another"})
    assert refused.status == 409
    assert pair.daemons.lines("runs").count("bob echo only once") == 1


def test_a_cancel_reaches_the_provider_and_ends_both_sides(pair: Pair) -> None:
    alice, bob = pair.alice, pair.bob
    offered = alice.delegate("cancel me", "slow", "bob")
    alice.stands(offered, "running")
    moved = alice.post(f"/delegations/{offered}/cancel", {"reason": "no longer wanted"})["delegation"]
    assert moved["state"] in ("cancelling", "cancelled")
    theirs = provided(bob, offered)
    assert alice.stands(offered, "ended")["delegation"]["state"] == "cancelled"
    assert bob.stands(theirs["id"], "ended")["delegation"]["state"] == "cancelled"
    assert bob.task(theirs["id"])["a2a_state"] == "canceled"
    assert alice.task(offered)["a2a_state"] == "canceled"
    again = alice.call("POST", f"/delegations/{offered}/cancel", {})
    assert (again.status, again.code) == (409, "already_ended")


def test_the_provider_can_cancel_what_it_does_for_others(pair: Pair) -> None:
    alice, bob = pair.alice, pair.bob
    offered = alice.delegate("stopped there", "slow", "bob")
    alice.stands(offered, "running")
    bob.post(f"/delegations/{provided(bob, offered)['id']}/cancel", {"reason": "maintenance"})
    ended = alice.ended(offered)
    assert ended["delegation"]["state"] == "cancelled"
    assert alice.task(offered)["a2a_state"] == "canceled"


def test_a_cancel_while_the_provider_is_offline_is_delivered_when_it_is_back(pair: Pair) -> None:
    alice, bob = pair.alice, pair.bob
    offered = alice.delegate("cancel me later", "slow", "bob")
    alice.stands(offered, "running")
    theirs = provided(bob, offered)
    bob.kill()
    alice.post(f"/delegations/{offered}/cancel")
    assert alice.task(offered)["a2a_state"] == "canceled"
    assert alice.delegation(offered)["delegation"]["state"] == "cancelling"
    waiting = until(lambda: alice.peer("bob")["waiting"], lambda found: found.get("failure"))
    assert waiting["count"] == 1
    bob.start()
    assert alice.stands(offered, "ended")["delegation"]["state"] == "cancelled"
    assert bob.stands(theirs["id"], "ended")["delegation"]["state"] == "cancelled"
    until(lambda: alice.peer("bob")["waiting"], lambda found: found == {})


def test_an_agent_here_has_a_peer_do_its_work_by_a_profiles_name_alone(pair: Pair) -> None:
    """An A2A client, an agent here, `turn.call`, a peer."""
    alice, bob = pair.alice, pair.bob
    message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "the answer"}]}
    asked = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message}}
    task = alice.ask("POST", "/v1/a2a/agents/boss", asked)["result"]["task"]
    assert task["status"]["state"] == "TASK_STATE_COMPLETED", task
    assert task["status"]["message"]["parts"][0]["text"] == "completed: found: the answer"
    tree = alice.get(f"/a2a/tasks/{task['id']}/tree")["tree"]
    (child,) = tree["children"]
    assert (child["remote"], child["provider"], child["profile"]) == (True, bob.id, "finder")
    assert (child["status"], child["usage"], tree["usage_total"]) == ("completed", {"tokens": 5}, {"tokens": 5})
    (offered,) = [each for each in alice.delegations() if each["id"] == child["task_id"]]
    assert (offered["state"], offered["profile"], offered["proven"]) == ("completed", "finder", True)
    # Nothing leaves but what was given: the words, not the caller nor what it said before.
    offer = alice.get(f"/delegations/{child['task_id']}/proof")["offer"]
    assert (offer["task"], offer["context"], offer["parts"]) == ("the answer", None, [])
    assert (offer["parentId"], offer["via"]) == (task["id"], [alice.id])
