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


SPREAD = '''
import asyncio
spread, thrifty, gathering, careful = Agent("spread"), Agent("thrifty"), Agent("gathering"), Agent("careful")


@careful
async def set_aside(turn):
    """As many steps of 30 tokens as it is told, none of which it begins without having them."""
    done = 0
    for _ in range(int(turn.text)):
        try:
            with turn.reserve(30):
                turn.spend(30)
                done += 1
        except Exception as refused:
            return f"{done} steps: {refused.code}"
    return f"{done} steps"


@thrifty
async def spend_one_by_one(turn):
    """As many tokens as it is told, one at a time, while it may."""
    for _ in range(int(turn.text)):
        turn.spend(1)
        yield turn.status("spent")
    note(f"thrifty {turn.text}")
    yield "all spent"


@spread
async def spread_out(turn):
    """`3 80`: so many calls at once, of so many tokens each."""
    count, each = turn.text.split()
    answers = await turn.call_all([("thrifty", f"{each}")] * int(count))
    return " ".join(answer.state for answer in answers)


@gathering
async def gather_calls(turn):
    """The same, each call by itself."""
    count, each = turn.text.split()
    answers = await asyncio.gather(*(turn.call("thrifty", each) for _ in range(int(count))), return_exceptions=True)
    return " ".join(getattr(answer, "state", "refused") for answer in answers)
'''


def test_what_is_delegated_of_a_peers_work_stays_within_its_budget() -> None:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        alice, bob = made.node("alice", AGENTS), made.node("bob", AGENTS + SPREAD)
        introduce(alice, bob)

        def spent(task: str, agent: str) -> tuple[int, str]:
            ended = alice.ended(alice.delegate(task, agent, "bob", maxTokenBudget=100))
            return ended["delegation"]["tokenUsage"]["total"], ended.get("result") or ended["error"]

        # 240 were spent of 100: a child stops at its share, or one token beyond it, which is how it finds out.
        total, said = spent("3 80", "spread")
        assert total <= 103, said
        assert "completed" not in said
        # What one does not use another can: each of these takes 30 of what is left.
        assert spent("3 30", "gathering") == (90, "completed completed completed")
        # One that sets aside what it uses stops before it, and tells what it has.
        assert spent("5", "careful") == (90, "3 steps: budget_exceeded")
        # The fourth has 10, and finds out with the eleventh.
        assert spent("4 30", "gathering")[0] <= 101


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
