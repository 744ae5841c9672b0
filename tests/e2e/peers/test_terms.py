"""What a delegation costs, how far it is, whom it goes to, and that it ends: as two or three daemons settle it."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from covenant.model.peers.delegation_messages import DelegationCancel, DelegationOffer, Profile
from tests.cli.daemons import covenant
from tests.e2e.peers.agents import AGENTS, FINDER
from tests.e2e.peers.conftest import Pair
from tests.e2e.peers.faults import two
from tests.e2e.peers.peer_daemons import Node, PeerDaemons, introduce, open_peer_daemons, until
from tests.e2e.peers.scripted_peer import ScriptedPeer
from tests.places import free_port, short_folder

COUNTER: Final = '''
counter = Agent("counter")


@counter
async def count(turn):
    """Says how far it is, and what it may still use, until there is a file of the name that it is told."""
    yield turn.status(f"{turn.tokens_left} left", progress=0.25)
    turn.spend(40)
    await gate(turn.text)
    yield f"{turn.tokens_left} of it is left"
'''


@pytest.fixture
def daemons() -> Iterator[PeerDaemons]:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        yield made


def test_progress_is_a_number_on_both_sides_and_an_agent_knows_what_is_left(daemons: PeerDaemons) -> None:
    alice, bob = daemons.node("alice", AGENTS), daemons.node("bob", AGENTS + COUNTER)
    introduce(alice, bob)
    offered = alice.delegate("go-count", "counter", "bob", maxTokenBudget=100)
    found = until(
        lambda: alice.stands(offered, "running")["delegation"],
        lambda it: it["progress"] is not None and it["tokenUsage"]["total"] == 40,
    )
    assert (found["progress"], found["message"]) == (0.25, "100 left")
    daemons.touch("go-count")
    assert alice.ended(offered)["result"] == "60 of it is left"


def test_a_profile_has_a_budget_of_its_own(daemons: PeerDaemons) -> None:
    alice = daemons.node("alice", AGENTS)
    bob = daemons.node("bob", AGENTS, profile_budgets="spender=50,echo=9000000", budget_max=1_000)
    introduce(alice, bob)
    told = alice.get("/capabilities?peerId=bob&fresh=true")["capabilities"]["profiles"]
    budgets = {each["name"]: each["maxTokenBudget"] for each in told}
    assert (budgets["spender"], budgets["echo"], budgets["researcher"]) == (50, 1_000, 1_000)
    ended = alice.ended(alice.delegate("200", "spender", "bob", maxTokenBudget=500))
    assert (ended["delegation"]["maxTokenBudget"], ended["delegation"]["code"]) == (50, "budget_exceeded")


def test_of_peers_that_are_alike_the_cheaper_one_is_taken_and_an_old_peer_is_told_no_price(
    daemons: PeerDaemons,
) -> None:
    alice = daemons.node("alice", AGENTS)
    dear = daemons.node("dear", AGENTS + FINDER, prices="finder=900", slots=50, slots_per_peer=50)
    cheap = daemons.node("cheap", AGENTS + FINDER, prices="finder=3")
    for other in (dear, cheap):
        introduce(alice, other)
    told = alice.get("/capabilities?peerId=dear&fresh=true")["capabilities"]["profiles"]
    alice.get("/capabilities?peerId=cheap&fresh=true")
    assert [each.get("price") for each in told if each["name"] == "finder"] == [900]
    for number in range(3):
        assert alice.ended(alice.delegate(f"cheap {number}", "finder"))["delegation"]["peer"] == "cheap"
    alice.ask("PUT", "/peers/dear/trust", {"trustLevel": "trusted"})
    assert alice.ended(alice.delegate("trusted", "finder"))["delegation"]["peer"] == "dear", "trust comes first"
    with ScriptedPeer("old") as old:
        old.known_to(dear)
        profiles = old.ask(dear).profiles
        assert "price" not in json.dumps([_plain(each) for each in profiles])


def _plain(profile: Profile) -> dict[str, Any]:
    return {name: value for name in profile.__struct_fields__ if isinstance(value := getattr(profile, name), str | int)}


@pytest.mark.parametrize("known", [True, False], ids=["with an id", "without an id"])
def test_static_peers_that_meet_at_their_first_task_do_it(daemons: PeerDaemons, *, known: bool) -> None:
    ports = {"alice": free_port(), "bob": free_port()}
    alice = daemons.node("alice", AGENTS, port=ports["alice"], static=f"bob=http://127.0.0.1:{ports['bob']}")
    if known:
        bob_id = daemons.node("bob", AGENTS + FINDER, port=ports["bob"]).id
        daemons.nodes["bob"].kill()
        alice.again(static=f"{bob_id}@http://127.0.0.1:{ports['bob']}")
    # Bob is away, and alice has never met him: the task waits for him.
    offered = alice.delegate("find it", "finder")
    assert alice.call("GET", f"/delegations/{offered}").status == 200
    back = f"http://127.0.0.1:{ports['alice']}"
    if known:
        daemons.nodes["bob"].again(static=f"alice={back}")
    else:
        daemons.node("bob", AGENTS + FINDER, port=ports["bob"], static=f"alice={back}")
    assert alice.ended(offered)["result"] == "found: find it"


def test_a_static_peer_is_waited_for_by_its_name_at_the_first_contact(daemons: PeerDaemons) -> None:
    port, back = free_port(), free_port()
    alice = daemons.node("alice", AGENTS, port=back, static=f"bob=http://127.0.0.1:{port}")
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(alice.delegate, "find it", "finder", "bob")
        assert alice.call("POST", "/delegate", {"task": "x", "profile": "y", "peerId": "rob"}).code == "unknown_peer"
        daemons.node("bob", AGENTS + FINDER, port=port, static=f"alice=http://127.0.0.1:{back}")
        assert alice.ended(begun.result())["result"] == "found: find it"


def test_a_cancel_that_a_dead_provider_never_hears_ends(daemons: PeerDaemons) -> None:
    with two(alice={"lost_after_ms": 500, "silence_ms": 300}) as pair:
        running, name = pair.begin()
        pair.alice.stands(running, "running")
        pair.bob.kill()
        assert pair.alice.post(f"/delegations/{running}/cancel")["delegation"]["state"] in ("cancelling", "cancelled")
        assert pair.alice.ended(running)["delegation"]["state"] == "cancelled"
        pair.bob.start()
        pair.daemons.touch(name)
        pair.quiet()
        assert pair.alice.delegation(running)["delegation"]["state"] == "cancelled"


def test_whose_signature_a_proof_needs_is_found_in_the_ledger(pair: Pair, tmp_path: Path) -> None:
    offered = pair.alice.delegate("prove it by the record", "echo", "bob")
    pair.alice.ended(offered)
    proof = pair.alice.get(f"/delegations/{offered}/proof")
    file = tmp_path / "proof.json"
    file.write_text(json.dumps(proof))

    def verified(node: Node) -> tuple[int, str]:
        ran = covenant("--home", str(node.home), "peers", "verify-proof", str(file))
        return ran.code, ran.out

    code, said = verified(pair.alice)
    assert (code, "holds   provider  " in said) == (0, True), said
    assert verified(pair.bob)[0] == 4, "who did it does not say of itself who it should have been"
    with ScriptedPeer("mallory") as mallory:
        # The same delegation, under the seal of somebody else.
        mallory.known_to(pair.alice)
        theirs = pair.alice.delegate("mine", "researcher", "mallory")
        made = mallory.until(DelegationOffer, lambda each: each.offer_id == theirs)
        mallory.accept(pair.alice, made)
        mallory.say(pair.alice, mallory.result(made, pair.alice.id))
        pair.alice.ended(theirs)
        other = pair.alice.get(f"/delegations/{theirs}/proof")
        other["proof"]["delegationId"] = proof["proof"]["delegationId"]
        file.write_text(json.dumps(other))
        assert verified(pair.alice)[0] == 1


def test_the_message_log_has_both_ways_of_everything_that_was_said(pair: Pair) -> None:
    with ScriptedPeer("lydia") as lydia:
        lydia.known_to(pair.alice)
        lydia.ask(pair.alice)
        offered = pair.alice.delegate("talk", "researcher", "lydia")
        made = lydia.until(DelegationOffer, lambda each: each.offer_id == offered)
        lydia.accept(pair.alice, made)
        pair.alice.post(f"/delegations/{offered}/cancel")
        lydia.until(DelegationCancel)
        lydia.say(pair.alice, lydia.result(made, pair.alice.id, status="cancelled", result=None))
        pair.alice.ended(offered)
        wanted = {
            ("sent", "capability_query"),
            ("received", "capability_response"),
            ("received", "capability_query"),
            ("sent", "capability_response"),
            ("sent", "delegation_offer"),
            ("received", "delegation_accept"),
            ("sent", "delegation_cancel"),
            ("received", "delegation_result"),
        }

        def seen() -> set[tuple[str, str]]:
            rows = pair.alice.get("/messages?peerId=lydia&limit=100")["messages"]
            return {(row["direction"], row["type"]) for row in rows}

        until(seen, lambda found: found >= wanted)
