"""Two daemons that can only call out, and a third one that carries what they say: it loses and reads nothing."""

import json
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Final, NamedTuple
from uuid import uuid4

import pytest

from covenant.model.peers.instance import InstanceId, KeyPurpose
from covenant.peers.directory.instance_keys import InstanceKeys
from covenant.seal.envelope import RELAYED_LIFE_MS_MAX, seal
from covenant.seal.identity import ENVELOPE_LIFE_MS_MAX, InstanceIdentity
from covenant.seal.keys import new_private_key, nonce
from covenant.wire.peers import Introduction, decode_introduction
from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.faults import PLENTY
from tests.e2e.peers.peer_daemons import API, Answer, Node, PeerDaemons, call, open_peer_daemons, until
from tests.e2e.peers.scripted_peer import now_ms
from tests.e2e.peers.test_rotation import rotate
from tests.e2e.peers.test_secrecy import readable
from tests.places import short_folder

TASK: Final = "pelican-under-walnut"


@cache
def id_of(node: Node) -> str:
    """Also of one that is stopped, once it was asked for."""
    return node.id


class Three(NamedTuple):
    daemons: PeerDaemons
    relay: Node
    alice: Node
    bob: Node


def meet(relay: Node, *nodes: Node) -> None:
    """Nobody has an address of anybody but the relay."""
    for node in nodes:
        relay.post("/peers", {"id": id_of(node), "name": node.name})
    for node, other in ((nodes[0], nodes[1]), (nodes[1], nodes[0])):
        node.post("/peers", {"id": id_of(other), "name": other.name})
    for one, other in ((nodes[0], nodes[1]), (nodes[1], nodes[0]), (relay, nodes[0]), (relay, nodes[1])):
        until(lambda one=one, other=other: one.peer(other.name)["trustLevel"], lambda trust: trust == "verified")  # type: ignore[misc]


@pytest.fixture(scope="module")
def three() -> Iterator[Three]:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        relay = made.node("relay", AGENTS, relay_for="*", **PLENTY)
        at = f"relay={relay.url}"
        alice, bob = (made.node(name, AGENTS, relay=at, poll_wait_ms=2_000, **PLENTY) for name in ("alice", "bob"))
        meet(relay, alice, bob)
        for asks, works in ((alice, bob), (bob, alice)):
            # From here on each has a token of the other: an offer goes out although nobody answers.
            assert asks.ended(asks.delegate("first", "echo", works.name))["result"] == "echo first"
        yield Three(made, relay, alice, bob)


def waiting(node: Node) -> int:
    return sum(each["waiting"].get("count", 0) for each in node.get("/peers")["peers"])


def kept(relay: Node) -> list[Path]:
    return sorted((relay.home / "relay").rglob("*.envelope"))


def shown(relay: Node, node: Node) -> Introduction:
    return decode_introduction(call(relay.port, "GET", f"/relay/{id_of(node)}{API}/identity").raw)


def left(sender: InstanceIdentity, to: Node, keys: Introduction, life_ms: int = ENVELOPE_LIFE_MS_MAX) -> bytes:
    return seal(
        json.dumps({"acks": [{"role": "requester", "offerId": str(uuid4()), "seq": 1}]}).encode(),
        typ="delivery_acks",
        sender=sender,
        to=InstanceId(id_of(to)),
        prekey=keys.hybrid_prekey or keys.keys.prekeys[0],
        jti=nonce(),
        now_ms=now_ms(),
        life_ms=life_ms,
    )


def deposit(relay: Node, to: Node, envelope: bytes) -> Answer:
    return call(relay.port, "POST", f"/relay/{id_of(to)}{API}/receive", envelope)


def own_key(node: Node) -> InstanceIdentity:
    held = node.purpose_keys().keys
    key = next(each for each in held if each.certificate and each.certificate.purpose is KeyPurpose.ENVELOPES)
    return InstanceIdentity(*key)


def test_a_delegation_completes_although_neither_side_can_call_the_other(three: Three) -> None:
    for asks, works in ((three.alice, three.bob), (three.bob, three.alice)):
        assert asks.peer(works.name)["url"] is None
        ended = asks.ended(asks.delegate(TASK, "echo", works.name))
        assert (ended["result"], ended["delegation"]["proven"]) == (f"echo {TASK}", True)
    until(lambda: kept(three.relay), lambda files: not files)
    for node in (three.alice, three.bob):
        until(partial(waiting, node), lambda count: count == 0)


def test_an_answer_to_a_question_comes_back_through_the_relay(three: Three) -> None:
    offered = three.alice.delegate("go-relayed", "held", "bob")
    three.alice.stands(offered, "running")
    three.daemons.touch("go-relayed")
    assert three.alice.ended(offered)["delegation"]["status"] == "completed"


def test_the_home_of_the_relay_has_nothing_that_can_be_read(three: Three) -> None:
    three.bob.stop()
    offered = three.alice.delegate(TASK, "echo", "bob", context="marmalade-for-the-otter")
    until(lambda: kept(three.relay), bool)
    files = [path for path in three.relay.home.rglob("*") if path.is_file()]
    assert any(path.suffix == ".envelope" for path in files)
    for path in files:
        assert not readable(path.read_bytes(), TASK, "marmalade-for-the-otter"), path
    assert all(
        path.stat().st_mode & 0o077 == 0 for path in files if "relay/" in str(path.relative_to(three.relay.home))
    )
    three.bob.start()
    assert three.alice.ended(offered)["result"] == f"echo {TASK}"


def test_what_is_cancelled_before_its_provider_fetches_it_is_not_begun(three: Three) -> None:
    three.bob.stop()
    offered = [three.alice.delegate(f"withdrawn {number}", "echo", "bob") for number in range(5)]
    until(lambda: len(kept(three.relay)), lambda count: count >= len(offered))
    for each in offered:
        three.alice.post(f"/delegations/{each}/cancel")
    until(lambda: len(kept(three.relay)), lambda count: count >= 2 * len(offered))
    three.bob.start()
    for each in offered:
        assert three.alice.ended(each)["delegation"]["status"] == "cancelled"
    assert three.alice.ended(three.alice.delegate("after", "echo", "bob"))["result"] == "echo after"
    assert not [line for line in three.daemons.lines("runs") if "withdrawn" in line]
    for node in (three.alice, three.bob):
        until(partial(waiting, node), lambda count: count == 0)


def test_a_relay_that_is_killed_loses_nothing(three: Three) -> None:
    three.bob.stop()
    offered = three.alice.delegate("through a crash", "echo", "bob")
    until(lambda: kept(three.relay), bool)
    three.relay.kill()
    three.bob.start()
    three.relay.start()
    assert three.alice.ended(offered)["result"] == "echo through a crash"
    runs = three.daemons.lines("runs")
    assert runs.count("bob echo through a crash") == 1


def test_a_relay_that_is_gone_and_comes_back_only_delays(three: Three) -> None:
    three.relay.kill()
    offered = three.bob.delegate("while nobody carries", "echo", "alice")
    three.relay.start()
    assert three.bob.ended(offered)["result"] == "echo while nobody carries"


def test_a_stranger_can_leave_nothing_and_fetch_nothing(three: Three) -> None:
    keys = shown(three.relay, three.bob)
    stranger = InstanceIdentity(new_private_key())
    refused = deposit(three.relay, three.bob, left(stranger, three.bob, keys))
    assert (refused.status, refused.code) == (400, "refused")
    garbage = deposit(three.relay, three.bob, b"{}")
    assert (garbage.status, garbage.raw) == (400, refused.raw)
    assert not [path for path in kept(three.relay) if stranger.id in path.name]
    ring = InstanceKeys(new_private_key(), (), lambda _: None)
    at_relay = decode_introduction(call(three.relay.port, "GET", f"{API}/identity").raw)
    body = json.dumps({"keys": {}, "relay": {}}).encode()
    poll = ring.seal(
        body,
        typ="poll",
        to=InstanceId(id_of(three.relay)),
        prekey=at_relay.hybrid_prekey or at_relay.keys.prekeys[0],
        now_ms=now_ms(),
    )
    assert three.relay.receive(poll, at="poll").code == "refused"
    for nobody in (f"frd1_{'a' * 40}", "..%2f..%2fidentity", "x" * 300):
        answer = call(three.relay.port, "GET", f"/relay/{nobody}{API}/identity")
        assert answer.status == 404, nobody


def test_an_envelope_that_is_left_twice_is_taken_once_and_nothing_of_another_is_taken(three: Three) -> None:
    three.bob.stop()
    keys, alice = shown(three.relay, three.bob), own_key(three.alice)
    envelope = left(alice, three.bob, keys, life_ms=RELAYED_LIFE_MS_MAX)
    first, second = deposit(three.relay, three.bob, envelope), deposit(three.relay, three.bob, envelope)
    assert (first.body["status"], first.body["duplicate"], second.body["duplicate"]) == ("relayed", False, True)
    assert first.body["untilMs"] == second.body["untilMs"] <= now_ms() + RELAYED_LIFE_MS_MAX
    assert deposit(three.relay, three.alice, envelope).status == 400, "it is for bob"
    assert deposit(three.relay, three.bob, left(alice, three.alice, keys)).code == "wrong_recipient"
    three.bob.start()
    until(lambda: kept(three.relay), lambda files: not files)
    again = deposit(three.relay, three.bob, envelope)
    assert again.status == 200
    until(lambda: kept(three.relay), lambda files: not files)
    rows = until(
        lambda: three.bob.audit("envelope_refused"), lambda rows: any(row["code"] == "replayed" for row in rows)
    )
    assert rows


def test_nobody_can_fill_the_relay() -> None:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        relay = made.node("relay", AGENTS, relay_for="*", relay_envelopes_per_peer=3, relay_bytes_per_peer=20_000)
        at = f"relay={relay.url}"
        alice, bob = (made.node(name, AGENTS, relay=at, poll_wait_ms=2_000) for name in ("alice", "bob"))
        meet(relay, alice, bob)
        bob.stop()
        keys, sender = shown(relay, bob), own_key(alice)
        answers = [deposit(relay, bob, left(sender, bob, keys, life_ms=RELAYED_LIFE_MS_MAX)) for _ in range(5)]
        # What the two said when they met may wait there too.
        assert [answer.status for answer in answers][-2:] == [429, 429]
        assert answers[-1].code == "relay_full"
        # What bob took before it was stopped is given up first, and removed then.
        until(lambda: [path for path in kept(relay) if path.parent.name == id_of(bob)], lambda paths: len(paths) == 3)
        relay.kill()
        relay.start()
        full = deposit(relay, bob, left(sender, bob, keys, life_ms=RELAYED_LIFE_MS_MAX))
        assert full.status == 429, "a restart forgets nothing"
        bob.start()
        until(lambda: kept(relay), lambda files: not files)
        # One that is not named any more is served nothing, and nothing is kept for it.
        relay.again(relay_for="alice")
        refused = deposit(relay, bob, left(sender, bob, keys, life_ms=RELAYED_LIFE_MS_MAX))
        assert (refused.status, refused.code) == (404, "not_relayed")
        until((relay.home / "relay" / id_of(bob)).exists, lambda there: not there)


def test_one_that_was_denied_at_the_relay_and_is_not_any_more_is_shown_there_again() -> None:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        often = {"covenant.peers.transport.relay.SWEEP_S": 0.1}
        relay = made.node("relay", AGENTS, constants=often, relay_for="*", **PLENTY)
        at = f"relay={relay.url}"
        alice, bob = (made.node(name, AGENTS, relay=at, poll_wait_ms=500) for name in ("alice", "bob"))
        meet(relay, alice, bob)
        relay.cli("peers", "deny", "bob")
        until((relay.home / "relay" / id_of(bob)).exists, lambda there: not there)
        relay.cli("peers", "allow", "bob")
        path = f"/relay/{id_of(bob)}{API}/identity"
        until(lambda: call(relay.port, "GET", path).status, lambda status: status == 200)


def test_a_daemon_is_no_relay_unless_it_is_told_to_be(three: Three) -> None:
    keys = shown(three.relay, three.bob)
    envelope = left(own_key(three.alice), three.bob, keys)
    refused = call(three.alice.port, "POST", f"/relay/{id_of(three.bob)}{API}/receive", envelope)
    assert (refused.status, refused.code) == (400, "refused")
    assert call(three.alice.port, "GET", f"/relay/{id_of(three.bob)}{API}/identity").status == 404


def test_a_side_that_changes_its_identity_is_followed_through_the_relay(three: Three) -> None:
    before = id_of(three.alice)
    rotate(three.alice)
    offered = three.alice.delegate("under another name", "echo", "bob")
    assert three.alice.ended(offered)["result"] == "echo under another name"
    assert three.bob.peer("alice")["formerIds"] == [before]
    back = three.bob.delegate("to another name", "echo", "alice")
    assert three.bob.ended(back)["result"] == "echo to another name"
