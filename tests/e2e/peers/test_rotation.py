"""An instance that gives itself another identity key: its peers follow it, its work goes on, and nobody else gains."""

import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from covenant.daemon.environment import PASSPHRASE_VARIABLE
from covenant.daemon.keystore import CHANGES_NAME, INSTANCE_NAME, Keystore
from covenant.seal.identity import InstanceIdentity, new_prekey, sign_change, sign_revocation
from covenant.seal.keys import new_private_key
from covenant.wire.peers import Introduction
from tests.cli.daemons import covenant
from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.faults import two
from tests.e2e.peers.peer_daemons import API, Answer, Node, call, introduce, open_peer_daemons, until
from tests.e2e.peers.scripted_peer import ScriptedPeer, now_ms
from tests.matrices import first_of


def rotate(node: Node, *options: str, env: dict[str, str] | None = None) -> tuple[str, str]:
    """Who it was, and who it is; it is started again."""
    if node.runs:
        node.stop()
    ran = covenant("--home", str(node.home), "peers", "rotate-identity", *options, "--json", env=env or node.env)
    assert ran.code == 0, ran
    node.start()
    return ran.json["before"], ran.json["id"]


def knows(node: Node, peer: str, peer_id: str) -> dict[str, Any]:
    """Once it knows the peer by this id, and has nothing against it."""
    return until(lambda: node.peer(peer), lambda found: found["id"] == peer_id and found["conflict"] is None)


def show(node: Node, introduction: Introduction) -> Answer:
    return call(node.port, "POST", f"{API}/identity", msgspec.json.encode(introduction))


@pytest.mark.parametrize("side", first_of(["requester", "provider"]))
@pytest.mark.parametrize("options", first_of([(), ("--compromised",)]))
def test_a_delegation_in_flight_goes_on_under_the_new_key_of_either_side(side: str, options: tuple[str, ...]) -> None:
    with two() as pair:
        pair.bob.ask("PUT", "/peers/alice/trust", {"trustLevel": "trusted"})
        node, other = (pair.alice, pair.bob) if side == "requester" else (pair.bob, pair.alice)
        running, name = pair.begin()
        pair.alice.stands(running, "running")
        before, after = rotate(node, *options)
        assert before != after == node.id
        assert knows(other, node.name, after)["trustLevel"] == ("trusted" if side == "requester" else "verified")
        pair.daemons.touch(name)
        ended = pair.alice.ended(running)
        assert (ended["result"], ended["delegation"]["proven"], ended["delegation"]["broken"]) == (
            f"done {name}",
            True,
            [],
        )
        later = pair.alice.delegate("later", "echo", "bob")
        assert pair.alice.ended(later)["result"] == "echo later"
        assert other.peer(before)["id"] == after, "it is found by the id that it had"
        pair.quiet()


@pytest.mark.parametrize("side", first_of(["requester", "provider"]))
def test_an_offer_that_waited_for_its_provider_is_taken_though_one_of_the_two_has_another_key_by_then(
    side: str,
) -> None:
    with two() as pair:
        away = pair.to_bob.lose("request")
        waiting, name = pair.begin()
        pair.alice.stands(waiting, "offered")
        rotate(pair.alice if side == "requester" else pair.bob)
        away.over()
        pair.daemons.touch(name)
        ended = pair.alice.ended(waiting)
        assert (ended["result"], ended["delegation"]["proven"]) == (f"done {name}", True)


def test_three_that_know_each_other_follow_a_chain_that_one_of_them_slept_through(short_path: Path) -> None:
    with open_peer_daemons(short_path) as made:
        anna, bert, cleo = (made.node(name, AGENTS) for name in ("anna", "bert", "cleo"))
        introduce(anna, bert)
        introduce(anna, cleo)
        cleo.kill()
        ids = [rotate(anna)[1] for _ in range(3)]
        assert len(set(ids)) == 3
        knows(bert, "anna", ids[-1])
        cleo.start()
        assert knows(cleo, "anna", ids[-1])["trustLevel"] == "verified"
        for node in (bert, cleo):
            assert node.ended(node.delegate("still you?", "echo", "anna"))["result"] == "echo still you?"
            assert anna.ended(anna.delegate("and you?", "echo", node.name))["result"] == "echo and you?"


@pytest.mark.parametrize("who", first_of(["far", "near"]))
def test_a_peer_that_only_fetches_is_told_and_tells(short_path: Path, who: str) -> None:
    with open_peer_daemons(short_path) as made:
        near = made.node("near", AGENTS)
        far = made.node("far", AGENTS, poll=near.id, poll_wait_ms=2_000)
        near.post("/peers", {"id": far.id, "name": "far"})
        far.add(near.url, "near")
        for one, other in ((far, "near"), (near, "far")):
            until(lambda one=one, other=other: one.peer(other)["trustLevel"], lambda trust: trust == "verified")  # type: ignore[misc]
        node, told = (far, near) if who == "far" else (near, far)
        _, after = rotate(node)
        knows(told, who, after)
        assert near.ended(near.delegate("to afar", "echo", "far"))["result"] == "echo to afar"
        assert far.ended(far.delegate("from afar", "echo", "near"))["result"] == "echo from afar"


def test_a_peer_that_knows_one_change_at_a_time_follows_it(short_path: Path) -> None:
    """What an earlier release reads: the last change, in the bundle."""
    with open_peer_daemons(short_path) as made, ScriptedPeer("old") as old:
        node = made.node("node", AGENTS)
        old.known_to(node)
        before, after = rotate(node)
        change = old.keys_of(node).change
        assert change is not None
        assert (change.old_id, change.new_id) == (before, after)
        node.stop()


@pytest.mark.embedded
def test_a_home_with_one_key_for_everything_keeps_it_until_its_identity_is_changed(short_path: Path) -> None:
    """As homes were before identities had a key of their own."""
    with open_peer_daemons(short_path) as made:
        node, peer = made.node("node", AGENTS), made.node("peer", AGENTS)
        node.stop()
        store = Keystore(node.home, None)
        home_key = store.read_key()
        assert home_key is not None
        (node.home / INSTANCE_NAME).unlink()
        store.save_prekeys((new_prekey(home_key, now_ms()),))
        node.start()
        assert node.id == InstanceIdentity(home_key).id
        introduce(node, peer)
        before, after = rotate(node)
        assert before == InstanceIdentity(home_key).id
        knows(peer, "node", after)
        assert peer.ended(peer.delegate("still", "echo", "node"))["result"] == "echo still"
        assert store.read_key() == home_key, "the grants are signed with it"


def test_no_chain_but_its_own_moves_a_peer(short_path: Path) -> None:
    with open_peer_daemons(short_path) as made, ScriptedPeer("ivy") as ivy:
        node = made.node("node", AGENTS)
        ivy.known_to(node)
        first, second, third, thief = ivy.private_key, *(new_private_key() for _ in range(3))
        early = ivy.introduction()

        def chain(*keys: bytes, forge: bool = False) -> Introduction:
            changes = [sign_change(old, new, now_ms()) for old, new in itertools.pairwise(keys)]
            if forge:
                changes[0] = msgspec.structs.replace(changes[0], old_signature=changes[0].new_signature)
            with ScriptedPeer("made", keys[-1]) as made:
                keys_shown = made.keyring.bundle(now_ms())
            return Introduction(keys=keys_shown, changes=tuple(changes))

        # Forged; or with a link left out; or by somebody else's key.
        broken = chain(first, second, third)
        assert show(node, chain(first, thief, forge=True)).code == "refused"
        assert show(node, msgspec.structs.replace(broken, changes=broken.changes[:1])).code == "refused"
        assert show(node, chain(new_private_key(), thief)).code == "refused"
        assert node.peer("ivy")["id"] == ivy.id
        # Its own.
        true = chain(first, second, third)
        assert show(node, true).status == 200
        assert node.peer("ivy")["id"] == InstanceIdentity(third).id
        assert node.peer("ivy")["trustLevel"] == "verified"
        assert show(node, true).body["duplicate"] is True, "once more changes nothing"
        # Rolled back to a key that was given up, replayed in part, or led elsewhere by that key.
        assert show(node, chain(third, second)).status == 409
        assert show(node, chain(first, second)).code in ("refused", "identity_superseded")
        assert show(node, early).code == "refused"
        assert show(node, chain(first, thief)).code == "identity_superseded"
        assert node.peer("ivy")["id"] == InstanceIdentity(third).id
        assert [row["shown"] for row in node.audit("identity_forked")] == [InstanceIdentity(thief).id]
        # An envelope under a key that was given up is a stranger's.
        assert node.receive(ivy.envelope(node)).code == "refused"


def test_a_key_that_says_it_is_dead_is_believed_and_nobody_elses_word_for_it(short_path: Path) -> None:
    with open_peer_daemons(short_path) as made, ScriptedPeer("ivy") as ivy:
        node = made.node("node", AGENTS)
        ivy.known_to(node)
        keys = ivy.keyring.bundle(now_ms())
        other = sign_revocation(new_private_key(), now_ms())
        for wrong in (other, msgspec.structs.replace(other, id=ivy.id, key=ivy.identity.key)):
            show(node, Introduction(keys=keys, revocations=(wrong,)))
            assert node.peer("ivy")["denied"] is False
        dead = sign_revocation(ivy.private_key, now_ms())
        assert show(node, Introduction(keys=keys, revocations=(dead,))).status == 200
        found = node.peer("ivy")
        assert (found["denied"], found["conflict"]) == (True, "key_dead"), found
        assert node.receive(ivy.envelope(node)).code == "refused"


def test_a_revocation_that_was_kept_elsewhere_ends_the_key_without_its_home(short_path: Path) -> None:
    with open_peer_daemons(short_path) as made:
        node, lost = made.node("node", AGENTS), made.node("lost", AGENTS)
        introduce(node, lost)
        kept = lost.cli("peers", "revocation")["statement"]
        lost.kill()
        assert call(node.port, "POST", f"{API}/identity", kept.encode()).status == 200
        assert node.peer("lost")["denied"] is True


def test_strangers_are_told_nothing_and_large_or_odd_introductions_are_refused(short_path: Path) -> None:
    with open_peer_daemons(short_path) as made, ScriptedPeer("ivy") as ivy:
        node = made.node("node", AGENTS)
        ivy.known_to(node)
        good = json.loads(msgspec.json.encode(ivy.introduction()))
        odd: list[Any] = [b"", b"[]", b"{", {**good, "changes": [{}]}, {**good, "changes": "x"}, {**good, "keys": None}]
        with ScriptedPeer("nobody") as nobody:
            odd.append(msgspec.json.encode(nobody.introduction()))
        change = msgspec.to_builtins(sign_change(ivy.private_key, new_private_key(), now_ms()))
        odd.append({**good, "changes": [change] * 17})
        answers = {call(node.port, "POST", f"{API}/identity", each).raw for each in odd}
        assert len(answers) == 1, answers
        assert json.loads(answers.pop())["code"] == "refused"
        assert call(node.port, "POST", f"{API}/identity", b" " * 70_000).status in (400, 413)


KILLED = """
import os, signal, sys
from pathlib import Path
from covenant.daemon import home, keystore

save, left = home.save_secret, [int(sys.argv[2])]

def dying(path, text):
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    save(path, text)

keystore.save_secret = dying
keystore.change_identity(keystore.Keystore(Path(sys.argv[1]), None), int(sys.argv[3]), compromised=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_at_any_step_of_a_rotation_it_is_who_it_was_or_who_it_will_be(short_path: Path) -> None:
    with open_peer_daemons(short_path) as made:
        node, peer = made.node("node", AGENTS), made.node("peer", AGENTS)
        introduce(node, peer)
        seen = [node.id]
        for step in range(3):
            node.stop()
            dying = [sys.executable, "-c", KILLED, str(node.home), str(step), str(now_ms())]
            assert subprocess.run(dying, check=False).returncode == -signal.SIGKILL
            node.start()
            seen.append(node.id)
            knows(peer, "node", node.id)
            assert peer.ended(peer.delegate(f"after {step}", "echo", "node"))["result"] == f"echo after {step}"
        assert seen[0] == seen[1] == seen[2] != seen[3], "before its key is saved, it is who it was"
        assert rotate(node)[0] == seen[3]
        knows(peer, "node", node.id)


def test_a_rotation_needs_the_home_to_itself_and_keeps_what_is_locked_locked(short_path: Path) -> None:
    with open_peer_daemons(short_path) as made:
        vault = made.node("vault", AGENTS, env={PASSPHRASE_VARIABLE: "words"})
        ran = covenant("--home", str(vault.home), "peers", "rotate-identity", "--json", env=vault.env)
        assert (ran.code, ran.json["code"]) == (1, "daemon_runs")
        vault.stop()
        refused = covenant("--home", str(vault.home), "peers", "rotate-identity", "--json", env={})
        assert refused.code == 1
        before, after = rotate(vault)
        assert (before != after, vault.id) == (True, after)
        key = Keystore(vault.home, "words").read_instance_key()
        assert key is not None
        assert InstanceIdentity(key).id == after
        for name in (INSTANCE_NAME, CHANGES_NAME):
            assert key.hex() not in (vault.home / name).read_text()
        assert Keystore(vault.home, "words").read_key() != key, "the home's own key is another one"
