"""What operators and authors may rely on with peers: depth, pace, names, limits and local work."""

import re

import msgspec

from covenant.seal.identity import unsigned
from covenant.seal.keys import sign_document
from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.conftest import Pair
from tests.e2e.peers.peer_daemons import introduce, open_peer_daemons
from tests.e2e.peers.scripted_peer import ScriptedPeer, now_ms
from tests.places import short_folder

HASTY = '''
hasty = Agent("hasty")


@hasty
async def call_twice(turn):
    """Two calls to a peer, one straight after the other."""
    first = await turn.call("bob/echo", "one")
    second = await turn.call("bob/echo", "two")
    return f"{first.text} {second.text}"
'''


def test_depth_max_0_takes_work_of_a_peer_and_delegates_it_no_further() -> None:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        alice = made.node("alice", AGENTS)
        bob = made.node("bob", AGENTS, depth_max=0)
        introduce(alice, bob)
        assert alice.ended(alice.delegate("near", "echo", "bob"))["result"] == "echo near"
        further = alice.ended(alice.delegate("alice/echo far", "relay", "bob"))
        assert "refused" in further["result"] or "failed" in further["result"]
        assert "alice echo far" not in made.lines("runs")


def test_calls_to_peers_are_not_paced_by_the_cooldown_for_agents_elsewhere() -> None:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        alice = made.node("alice", AGENTS + HASTY, "--delegation-cooldown-ms", "600000")
        bob = made.node("bob", AGENTS)
        introduce(alice, bob)
        here = alice.post("/delegate", {"task": "go", "profile": "hasty"})
        assert here["remote"] is False
        assert alice.ended(here["delegationId"])["result"] == "echo one echo two"


def test_what_an_agent_here_does_is_shown_by_its_delegation_id(pair: Pair) -> None:
    here = pair.alice.post("/delegate", {"task": "at home", "profile": "echo"})
    ended = pair.alice.ended(here["delegationId"])
    assert ended["result"] == "echo at home"
    shown = ended["delegation"]
    assert (shown["remote"], shown["state"], shown["profile"]) == (False, "completed", "echo")
    unknown = pair.alice.call("GET", "/delegations/00000000-0000-4000-8000-000000000000")
    assert unknown.status == 404


def test_a_peer_is_renamed_and_limited_from_the_command_line(pair: Pair) -> None:
    with ScriptedPeer("before") as peer:
        peer.known_to(pair.bob)
        changed = pair.bob.cli("peers", "change", "before", "--name", "after", "--concurrent", "2")["peer"]
        assert (changed["name"], changed["limits"]) == ("after", {"concurrent": 2})
        changed = pair.bob.cli("peers", "change", "after", "--budget-max", "100")["peer"]
        assert changed["limits"] == {"concurrent": 2, "budgetMax": 100}
        assert pair.bob.run("peers", "change", "after").code == 2
        assert pair.bob.run("peers", "show", "before").code != 0
        pair.bob.cli("peers", "remove", "after")


def test_an_instance_of_another_version_is_refused_for_its_version_and_not_for_its_clock(pair: Pair) -> None:
    with ScriptedPeer("later") as later:
        bundle = msgspec.structs.replace(later.keyring.bundle(now_ms()), versions=(9,))
        signature = sign_document(later.private_key, "bundle", unsigned(bundle))
        later.shows = msgspec.structs.replace(bundle, signature=signature)
        answer = pair.alice.call("POST", "/peers", {"url": later.url, "name": "later"})
        assert (answer.status, answer.code) == (409, "version")
        assert re.search(r"speaks the protocol's versions 9, and we 2, 3", answer.body["error"])
