"""A peer that was written from the format documents alone: it asks, works, proves, and changes its identity."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.independent_peer import IndependentPeer, id_of, proof_holds
from tests.e2e.peers.peer_daemons import Node, open_peer_daemons, until
from tests.e2e.peers.test_rotation import rotate


@pytest.fixture
def node(short_path: Path) -> Iterator[Node]:
    with open_peer_daemons(short_path) as made:
        yield made.node("node", AGENTS)


@pytest.fixture(params=[False, True], ids=["one key", "a key for each purpose"])
def indie(request: pytest.FixtureRequest, node: Node) -> Iterator[IndependentPeer]:
    with IndependentPeer("indie", certified=request.param) as peer:
        added = node.add(peer.url, "indie")
        assert (added["id"], added["trustLevel"]) == (peer.id, "verified")
        yield peer


def asked(indie: IndependentPeer, node: Node, task: str) -> dict[str, Any]:
    """What the node's agent answers, proven."""
    offer = indie.offer(node.port, "echo", task)
    accept = indie.until("delegation_accept", lambda body: body["offerId"] == offer["offerId"])
    assert accept["maxTokenBudget"] <= 500
    result = indie.until("delegation_result", lambda body: body["offerId"] == offer["offerId"])
    assert proof_holds(offer, result)
    assert (result["proof"]["provider"], result["proof"]["requester"]) == (node.id, indie.id)
    return result


def done(indie: IndependentPeer, node: Node, task: str, text: str) -> dict[str, Any]:
    """What the node has of a task that it gave to the peer."""
    offered = node.delegate(task, "scribe", "indie")
    offer = indie.until("delegation_offer", lambda body: body["task"] == task)
    terms = {"delegationId": offer["offerId"], "maxTokenBudget": 500, "timeout": 30_000, "statusInterval": 5_000}
    assert indie.say(node.port, "delegation_accept", {"offerId": offer["offerId"], **terms})[0] == 200
    assert indie.say(node.port, "delegation_result", indie.result(offer, node.id, text))[0] == 200
    return node.ended(offered)


def test_it_delegates_and_is_delegated_to(node: Node, indie: IndependentPeer) -> None:
    assert asked(indie, node, "by the book")["result"] == "echo by the book"
    ended = done(indie, node, "write it down", "written")
    assert (ended["result"], ended["delegation"]["proven"], ended["delegation"]["broken"]) == ("written", True, [])
    # One that knows certificates never sees a signature of the identity key; one that does not sees no other.
    identity = indie.identity(node.port)["keys"]["identityKey"]
    assert (identity in indie.signers, len(indie.signers)) == (7 not in indie.versions, 1)


@pytest.mark.parametrize("dead", [False, True])
def test_it_changes_its_identity_twice_and_is_followed(node: Node, indie: IndependentPeer, *, dead: bool) -> None:
    indie.rotate(dead=dead)
    indie.rotate()
    assert indie.introduce(node.port) == 200
    found = node.peer("indie")
    assert (found["id"], found["trustLevel"], len(found["formerIds"])) == (indie.id, "verified", 2)
    assert asked(indie, node, "as somebody else")["result"] == "echo as somebody else"
    assert done(indie, node, "still you", "it is")["delegation"]["proven"] is True


def test_it_follows_an_instance_that_changed_its_identity(node: Node, indie: IndependentPeer) -> None:
    before = node.id
    rotate(node)
    rotate(node)
    shown = indie.identity(node.port)
    assert indie.follow(before, shown) == node.id == id_of(shown["keys"]["identityKey"]) != before
    shown["changes"] = shown["changes"][1:]
    assert indie.follow(before, shown) == before, "a chain with a change left out proves nothing"
    until(lambda: node.peer("indie")["conflict"], lambda conflict: conflict is None)
    assert asked(indie, node, "under your new name")["result"] == "echo under your new name"
