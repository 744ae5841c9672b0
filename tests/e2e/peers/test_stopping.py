"""Stopping a real daemon that waits for a peer: what is done there needs nobody here, and is followed again later."""

import signal
from collections.abc import Iterator
from typing import Final

import pytest

from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.peer_daemons import Node, PeerDaemons, introduce, open_peer_daemons, until
from tests.places import short_folder
from tests.waits import BOUND_S

GRACE_MS: Final = 600_000
"""Far more than any test waits: a stop that takes it fails."""


@pytest.fixture(scope="module")
def made() -> Iterator[PeerDaemons]:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        alice = made.node("alice", AGENTS, "--daemon-grace-ms", str(GRACE_MS))
        introduce(alice, made.node("bob", AGENTS))
        yield made


def tell_to_stop(node: Node) -> None:
    """Until it has heard that."""
    before = node.log.count("daemon.stopping")
    node.daemon.process.send_signal(signal.SIGTERM)
    until(lambda: node.log.count("daemon.stopping"), lambda count: count > before)


def has_stopped(node: Node) -> None:
    node.daemon.process.wait(BOUND_S)
    node.stop()


def test_a_daemon_that_only_follows_a_peers_work_stops_at_once_and_follows_it_again(made: PeerDaemons) -> None:
    alice, bob = made.nodes["alice"], made.nodes["bob"]
    offered = alice.delegate("go-stop", "held", "bob")
    alice.stands(offered, "running")
    tell_to_stop(alice)
    has_stopped(alice)
    made.touch("go-stop")
    (work,) = [each for each in bob.delegations(role="provider") if each["offerId"] == offered]
    assert bob.stands(work["id"], "ended")["delegation"]["state"] == "completed"
    alice.start()
    ended = alice.ended(offered)
    ours = ended["delegation"]
    assert (ended["result"], ours["state"], ours["proven"]) == ("ended", "completed", True)
    assert [each["kind"] for each in alice.task(offered)["updates"]].count("settled") == 1
    assert made.lines("runs").count("bob held go-stop") == 1


def test_an_agent_here_that_needs_what_a_peer_does_still_gets_it_while_its_daemon_stops(made: PeerDaemons) -> None:
    """Its own work must not be begun again, so it has the grace time: and in that, whoever follows for it goes on."""
    alice = made.nodes["alice"]
    message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "bob/held go-relay"}]}
    params = {"message": message, "configuration": {"returnImmediately": True}}
    asked = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": params}
    task_id = alice.ask("POST", "/v1/a2a/agents/relay", asked)["result"]["task"]["id"]
    made.wrote("runs", "bob held go-relay")
    tell_to_stop(alice)
    made.touch("go-relay")
    has_stopped(alice)
    alice.start()
    relayed = alice.task(task_id)
    assert (relayed["a2a_state"], relayed["result"]["content"][0]["text"]) == ("completed", "alice>completed: ended")
    assert made.lines("runs").count("bob held go-relay") == 1
