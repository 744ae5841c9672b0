"""Two daemons that are peers, with a line on each way between them, for all tests that leave them as they were."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.e2e.peers.agents import AGENTS, FINDER
from tests.e2e.peers.peer_daemons import Node, PeerDaemons, introduce, open_peer_daemons
from tests.e2e.peers.proxy import Proxy
from tests.places import short_folder


class Pair(NamedTuple):
    daemons: PeerDaemons
    alice: Node
    bob: Node
    to_bob: Proxy
    """What alice says to bob goes through it, and what bob answers."""
    to_alice: Proxy

    @property
    def heard(self) -> bytes:
        """All that went over either line, both ways."""
        return b"".join((self.to_bob.there, self.to_bob.back, self.to_alice.there, self.to_alice.back))


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    """Nobody waits for a rate here; bob has one agent more."""
    plenty: dict[str, Any] = {
        "offers_per_min": 1_000_000,
        "messages_per_min": 1_000_000,
        "slots": 50,
        "slots_per_peer": 50,
    }
    with short_folder() as folder, open_peer_daemons(folder) as made:
        alice = made.node("alice", AGENTS, **plenty)
        bob = made.node("bob", AGENTS + FINDER, **plenty)
        to_bob, to_alice = made.proxy(bob), made.proxy(alice)
        introduce(alice, bob, a_calls=to_bob.url, b_calls=to_alice.url)
        yield Pair(made, alice, bob, to_bob, to_alice)
