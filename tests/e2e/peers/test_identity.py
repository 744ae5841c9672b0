"""Who an instance is, over restarts and impostors: its key is what counts, and its address proves nothing."""

import stat
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from covenant.daemon.environment import PASSPHRASE_VARIABLE
from covenant.daemon.keystore import PREKEYS_NAME, Keystore
from covenant.seal.identity import PREKEY_PERIOD_MS, new_prekey, sign_change
from covenant.seal.keys import new_private_key
from tests.cli.daemons import COVENANT, covenant
from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.conftest import Pair
from tests.e2e.peers.peer_daemons import introduce, open_peer_daemons, until
from tests.e2e.peers.scripted_peer import ScriptedPeer, now_ms

KEPT = ("id", "name", "url", "publicKey", "trustLevel", "verifiedAtMs", "capabilities")


@pytest.fixture
def ivy(pair: Pair) -> Iterator[ScriptedPeer]:
    """A trusted peer of alice's."""
    with ScriptedPeer(f"ivy-{uuid4().hex[:8]}") as actor:
        actor.known_to(pair.alice)
        pair.alice.ask("PUT", f"/peers/{actor.name}/trust", {"trustLevel": "trusted"})
        yield actor


def test_whoever_takes_a_peers_address_gets_neither_its_trust_nor_its_letters(pair: Pair) -> None:
    alice = pair.alice
    vera = pair.daemons.node("vera", AGENTS)
    introduce(alice, vera)
    before = alice.peer("vera")
    vera.kill()
    evil = pair.daemons.node("evil", AGENTS, port=vera.port)
    offered = alice.delegate("for vera's eyes", "echo", "vera")
    found = until(lambda: alice.peer("vera"), lambda peer: peer["conflict"])
    assert found["conflict"] == "identity_changed"
    assert {name: found[name] for name in KEPT} == {name: before[name] for name in KEPT}
    refused = alice.call("POST", "/peers/vera/verify", {})
    assert (refused.status, refused.code) == (409, "identity_changed")
    assert alice.delegation(offered)["delegation"]["state"] == "offered"
    waiting = until(lambda: alice.peer("vera")["waiting"], lambda found: "failure" in found)
    assert "identity_changed" in waiting["failure"]
    assert "identity_changed" in alice.run("peers", "list").out
    assert (evil.get("/delegations")["delegations"], evil.get("/messages")["messages"]) == ([], [])
    # Back at its place, it is itself again, and has what waited for it.
    evil.kill()
    vera.start()
    assert alice.ended(offered)["result"] == "echo for vera's eyes"
    alice.post("/peers/vera/verify")
    assert alice.peer("vera")["conflict"] is None
    vera.kill()
    alice.ask("DELETE", "/peers/vera")


def test_a_peer_under_another_key_is_a_stranger_until_the_operator_says_otherwise(
    pair: Pair, ivy: ScriptedPeer
) -> None:
    alice = pair.alice
    before = alice.peer(ivy.name)
    ivy.become(new_private_key())
    refused = alice.call("POST", f"/peers/{ivy.name}/verify", {})
    assert (refused.status, refused.code) == (409, "identity_changed")
    found = alice.peer(ivy.name)
    assert (found["conflict"], found["id"], found["trustLevel"]) == ("identity_changed", before["id"], "trusted")
    assert alice.receive(ivy.envelope(alice)).code == "refused"
    wrong = alice.call("POST", f"/peers/{ivy.name}/identity", {"newId": "frd1_" + "a" * 40})
    assert (wrong.status, wrong.code) == (409, "identity_changed")
    ivy.deaf = True
    accepted = alice.cli("peers", "accept-identity", ivy.name, ivy.id)["peer"]
    assert (accepted["id"], accepted["trustLevel"], accepted["conflict"]) == (ivy.id, "peer", None)
    ivy.deaf = False
    assert alice.post(f"/peers/{ivy.name}/verify")["peer"]["trustLevel"] == "verified"
    assert alice.receive(ivy.envelope(alice)).status == 200


def test_a_peer_whose_old_key_has_named_its_new_one_keeps_its_trust(pair: Pair, ivy: ScriptedPeer) -> None:
    alice, old = pair.alice, ivy.private_key
    new = new_private_key()
    ivy.become(new, sign_change(old, new, now_ms()))
    found = alice.post(f"/peers/{ivy.name}/verify")["peer"]
    assert (found["id"], found["trustLevel"], found["conflict"]) == (ivy.id, "trusted", None)
    assert alice.peer(ivy.name)["id"] == ivy.id
    assert alice.receive(ivy.envelope(alice)).status == 200


def test_a_peer_of_the_settings_that_is_found_again_under_another_key_keeps_nothing_by_it(short_path: Path) -> None:
    with open_peer_daemons(short_path) as made, ScriptedPeer("olga") as olga:
        node = made.node("node", AGENTS, static=f"olga={olga.url}")
        found = until(lambda: node.get("/peers")["peers"], lambda peers: peers and peers[0]["trustLevel"] == "verified")
        assert (found[0]["id"], found[0]["source"], found[0]["name"]) == (olga.id, "setting", "olga")
        olga.become(new_private_key())
        (candidate,) = node.post("/discover", {"timeoutMs": 2_000})["discovered"]
        assert (candidate["instanceId"], candidate["url"]) == (olga.id, olga.url)
        assert candidate["conflict"], "another one is a peer at this address"
        after = node.get("/peers")["peers"]
        assert [{name: each[name] for name in KEPT} for each in after] == [
            {name: each[name] for name in KEPT} for each in found
        ]


def test_nobody_names_himself_a_successor(pair: Pair, ivy: ScriptedPeer) -> None:
    alice, mine = pair.alice, new_private_key()
    before = alice.peer(ivy.name)
    ivy.become(mine, sign_change(new_private_key(), mine, now_ms()))
    assert alice.call("POST", f"/peers/{ivy.name}/verify", {}).code == "identity_changed"
    assert alice.peer(ivy.name)["id"] == before["id"]


def test_an_instance_is_the_same_after_a_crash_and_so_are_its_peers(pair: Pair) -> None:
    bob, who = pair.bob, pair.bob.id
    known = pair.alice.peer("bob")["publicKey"]
    bob.kill()
    bob.start()
    assert bob.id == who
    assert bob.peer("alice")["trustLevel"] == "verified"
    assert pair.alice.peer("bob")["publicKey"] == known
    assert pair.alice.ended(pair.alice.delegate("still you?", "echo", "bob"))["result"] == "echo still you?"


@pytest.mark.embedded
def test_yesterdays_key_still_opens_what_was_sealed_to_it_and_the_day_befores_is_erased(short_path: Path) -> None:
    with open_peer_daemons(short_path) as made, ScriptedPeer("late") as late:
        node = made.node("node", AGENTS)
        late.known_to(node)
        node.stop()
        keystore = Keystore(node.home, None)
        key = keystore.read_instance_key()
        assert key is not None
        ages = {days: new_prekey(key, now_ms() - days * PREKEY_PERIOD_MS - 3_600_000) for days in (1, 2)}
        keystore.save_prekeys(tuple(ages.values()))
        node.start()
        shown = [each.kid for each in late.keys_of(node).prekeys]
        assert len(shown) == 2, "today's was made, and yesterday's is still shown"
        assert shown[1] == ages[1].prekey.kid
        assert node.receive(late.envelope(node, prekey=ages[1].prekey)).status == 200
        assert node.receive(late.envelope(node)).status == 200
        assert node.receive(late.envelope(node, prekey=ages[2].prekey)).code == "unknown_prekey"
        kept = (node.home / PREKEYS_NAME).read_text()
        assert [kid in kept for kid in (*shown, ages[2].prekey.kid)] == [True, True, False]
        assert ages[2].private_key.hex() not in kept


@pytest.mark.embedded
def test_a_locked_home_opens_with_its_passphrase_alone(short_path: Path) -> None:
    words = "correct horse battery staple"
    with open_peer_daemons(short_path) as made, ScriptedPeer("friend") as friend:
        vault = made.node("vault", AGENTS, env={PASSPHRASE_VARIABLE: words})
        friend.known_to(vault)
        who = vault.id
        secrets = [vault.home / "identity" / name for name in ("local.key", "prekeys.json")]
        for path in secrets:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert words not in path.read_text()
        assert '"privateKey"' not in secrets[1].read_text()
        vault.kill()
        flags = ("serve", "--home", str(vault.home), "--http-port", str(vault.port))
        on = {"COVENANT_PEERS_ENABLED": "1"}
        for env in ({}, {PASSPHRASE_VARIABLE: "wrong"}):
            refused = covenant(*flags, env={**on, **env})
            assert refused.code != 0, COVENANT
            assert PASSPHRASE_VARIABLE in refused.err
            assert "local.key" in refused.err
            assert "Traceback" not in refused.err
        before = secrets[0].read_text()
        vault.start()
        assert (vault.id, secrets[0].read_text()) == (who, before)
        assert vault.receive(friend.envelope(vault)).status == 200


@pytest.mark.slow
def test_with_another_passphrase_an_instance_is_who_it_was_and_reads_what_was_sealed_before(short_path: Path) -> None:
    new_file = short_path / "new"
    new_file.touch(0o600)
    new_file.write_text("other words")
    change = ("passphrase", "--new-file", str(new_file), "--json")
    with open_peer_daemons(short_path) as made, ScriptedPeer("friend") as friend:
        vault = made.node("vault", AGENTS, env={PASSPHRASE_VARIABLE: "words"})
        friend.known_to(vault)
        who, sealed = vault.id, friend.envelope(vault)
        secrets = [vault.home / "identity" / name for name in ("local.key", "prekeys.json")]
        before = [path.read_bytes() for path in secrets]
        running = covenant("--home", str(vault.home), *change, env=vault.env)
        assert (running.code, running.json["code"]) == (1, "daemon_runs")
        assert "stop it first" in running.err
        assert [path.read_bytes() for path in secrets] == before
        vault.stop()
        changed = covenant("--home", str(vault.home), *change, env=vault.env)
        assert changed.json == {
            "kind": "passphrase",
            "home": str(vault.home),
            "change": "changed",
            "prekeys_kept": True,
        }
        vault.env[PASSPHRASE_VARIABLE] = "other words"
        vault.start()
        assert vault.id == who
        assert vault.receive(sealed).status == 200
        assert "words" not in vault.log
