"""A daemon that nobody can call fetches what there is for it: the same delegations, both ways, by polls alone."""

from collections.abc import Iterator

import pytest

from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.conftest import Pair
from tests.e2e.peers.peer_daemons import Node, open_peer_daemons, until
from tests.places import short_folder


@pytest.fixture(scope="module")
def far(pair: Pair) -> Iterator[Node]:
    """It knows where bob is; bob knows only who it is."""
    with short_folder() as folder, open_peer_daemons(folder) as made:
        node = made.node("far", AGENTS, poll="*", poll_wait_ms=2_000)
        pair.bob.post("/peers", {"id": node.id, "name": "far"})
        node.add(pair.bob.url, "bob")
        for one, other in ((node, "bob"), (pair.bob, "far")):
            until(lambda one=one, other=other: one.peer(other)["trustLevel"], lambda trust: trust == "verified")  # type: ignore[misc]
        assert pair.bob.peer("far")["url"] is None
        yield node
        node.kill()


def test_one_that_fetches_delegates_and_hears_of_it(pair: Pair, far: Node) -> None:
    ended = far.ended(far.delegate("from afar", "finder", "bob"))
    assert (ended["result"], ended["delegation"]["proven"]) == ("found: from afar", True)


def test_one_that_fetches_is_delegated_to(pair: Pair, far: Node) -> None:
    ended = pair.bob.ended(pair.bob.delegate("to afar", "echo", "far"))
    assert (ended["result"], ended["delegation"]["proven"]) == ("echo to afar", True)
    assert (far.folder / "runs").read_text().splitlines().count("far echo to afar") == 1
