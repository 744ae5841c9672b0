"""A side whose ledger is restored from a backup, at each step of a delegation: no work that was done is lost."""

import shutil
from pathlib import Path
from typing import Final

import pytest

from covenant.model.peers.delegation_messages import (
    DelegationAccept,
    DelegationOffer,
    DelegationReject,
    DelegationResult,
)
from covenant.seal.proofs import offer_hash
from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.faults import Two, two
from tests.e2e.peers.peer_daemons import open_peer_daemons, until
from tests.e2e.peers.scripted_peer import ScriptedPeer
from tests.matrices import first_of

STEPS: Final = ("running", "before", "offered", "done", "ended")


def walk(pair: Two, side: str, step: str) -> tuple[str, str, Path]:
    """A delegation from its beginning to its end; the backup of one side is from this step of it."""
    node = pair.alice if side == "requester" else pair.bob
    backup = node.back_up() if step == "before" else None
    # Bob is away for alice, or alice for bob: what was said last waits in an outbox.
    way = pair.to_bob if step == "offered" else pair.to_alice
    away = way.lose("request") if step in ("offered", "done") else None
    offered, name = pair.begin()
    if step == "offered":
        pair.alice.stands(offered, "offered")
        backup = node.back_up()
        assert away is not None
        away.over()
    pair.daemons.wrote("runs", f"bob steady {name}")
    if step == "running":
        pair.alice.stands(offered, "running")
        backup = node.back_up()
    pair.daemons.touch(name)
    if step == "done":
        until(lambda: [each["state"] for each in pair.bob.delegations(role="provider")], lambda s: "completed" in s)
        backup = node.back_up()
        assert away is not None
        away.over()
    assert pair.alice.ended(offered)["result"] == f"done {name}"
    pair.quiet()
    if step == "ended":
        backup = node.back_up()
    assert backup is not None
    return offered, name, backup


@pytest.mark.parametrize("step", first_of(STEPS))
def test_a_requester_that_is_restored_has_the_result_of_what_was_done_for_it(step: str) -> None:
    with two() as pair:
        offered, name, backup = walk(pair, "requester", step)
        pair.alice.restore(backup)
        if step == "before":
            # It knows nothing of it. Whoever asks the same again, under its id, gets what was done.
            assert pair.alice.call("GET", f"/delegations/{offered}").status == 404
            assert pair.alice.delegate(name, "steady", "bob", id=offered) == offered
        assert pair.alice.ended(offered)["result"] == f"done {name}"
        assert pair.begun(name) == 1
        assert pair.alice.delegation(offered)["delegation"]["proven"] is True
        pair.quiet()
        after = pair.alice.delegate("after", "echo", "bob")
        assert pair.alice.ended(after)["result"] == "echo after"


@pytest.mark.parametrize("step", first_of(["running", "done"]))
def test_work_that_a_restored_requester_has_forgotten_is_proven_for_the_offer_that_it_makes_anew(step: str) -> None:
    """The new offer has another token and another deadline, and perhaps less time."""
    with two() as pair:
        backup = pair.alice.back_up()
        offered, name = pair.begin()
        pair.alice.stands(offered, "running")
        away = pair.to_alice.lose("request") if step == "done" else None
        if away is not None:
            pair.daemons.touch(name)
            pair.bob.stands(pair.work(offered)["id"], "completed")
            away.until()
        pair.alice.restore(backup)
        lost = pair.to_bob.lose("request")
        assert pair.alice.delegate(name, "steady", "bob", id=offered, timeout=100_000) == offered
        # The work that is forgotten goes on, and its provider may have told of it already.
        pair.alice.stands(offered, "offered", "accepted", "running")
        if away is not None:
            # The result of the offer that is forgotten comes first.
            away.over()
            until(lambda: pair.bob.peer("alice")["waiting"], lambda waiting: waiting == {})
        lost.over()
        pair.alice.stands(offered, "accepted", "running", "completed")
        pair.daemons.touch(name)
        ended = pair.alice.ended(offered)
        assert ended.get("result") == f"done {name}", ended
        assert ended["delegation"]["proven"] is True
        assert pair.begun(name) == 1
        pair.quiet()


@pytest.mark.parametrize("step", first_of(["ended", "running"]))
def test_no_other_work_is_proven_under_the_id_of_an_offer_that_was_taken(short_path: Path, step: str) -> None:
    with open_peer_daemons(short_path) as made, ScriptedPeer("old") as old:
        node = made.node("node", AGENTS)
        old.known_to(node)
        first = old.offer(node, "held", task="go")
        assert old.say(node, first).status == 200
        made.wrote("runs", "node held go")
        if step == "ended":
            made.touch("go")
            old.until(DelegationResult)
        old.until(DelegationAccept)
        heard = len(old.heard)
        other = old.offer(node, "held", task="something else", offer_id=first.offer_id)
        assert old.say(node, other, epoch="restored").status == 200
        reject = old.until(DelegationReject)
        assert (reject.code, reject.offer_id) == ("invalid", first.offer_id)
        made.touch("go")
        results = until(
            lambda: [each.message for each in old.heard if isinstance(each.message, DelegationResult)], bool
        )
        assert [each.proof.offer_hash for each in results if each.proof is not None] == [offer_hash(first)]
        assert not [each for each in old.heard[heard:] if isinstance(each.message, DelegationAccept)]


@pytest.mark.parametrize("step", first_of(STEPS))
def test_a_provider_that_is_restored_works_on_and_its_requester_keeps_what_it_has(step: str) -> None:
    with two() as pair:
        offered, name, backup = walk(pair, "provider", step)
        pair.bob.restore(backup)
        assert pair.alice.ended(offered)["result"] == f"done {name}"
        after = pair.alice.delegate("after", "echo", "bob")
        assert pair.alice.ended(after)["result"] == "echo after"
        pair.quiet()
        until(
            lambda: [each["state"] for each in pair.bob.delegations(role="provider") if each["offerId"] == offered],
            lambda states: set(states) <= {"completed", "cancelled"},
        )


@pytest.mark.parametrize("step", first_of(["running", "before", "offered"]))
def test_what_a_restored_provider_has_forgotten_is_done_again_for_a_requester_that_waits(step: str) -> None:
    with two() as pair:
        backup = pair.bob.back_up()
        away = pair.to_alice.lose("request") if step == "offered" else None
        offered, name = pair.begin()
        pair.daemons.wrote("runs", f"bob steady {name}")
        if away is not None:
            backup = pair.bob.back_up()
            away.over()
        pair.alice.stands(offered, "accepted", "running")
        if step == "running":
            pair.alice.stands(offered, "running")
            backup = pair.bob.back_up()
        pair.bob.restore(backup)
        pair.daemons.wrote("runs", f"bob steady {name}", 2)
        pair.daemons.touch(name)
        assert pair.alice.ended(offered)["result"] == f"done {name}"
        pair.quiet()


def test_a_cancel_that_a_restored_provider_has_forgotten_is_told_again() -> None:
    with two() as pair:
        offered, name = pair.begin("held")
        pair.alice.stands(offered, "running")
        backup = pair.bob.back_up()
        away = pair.to_bob.lose("request")
        pair.alice.post(f"/delegations/{offered}/cancel")
        pair.bob.restore(backup)
        away.over()
        assert pair.alice.ended(offered)["delegation"]["state"] == "cancelled"
        until(
            lambda: [each["state"] for each in pair.bob.delegations(role="provider")],
            lambda states: states == ["cancelled"],
        )
        assert pair.begun(name, "held") >= 1


def test_an_offer_that_was_made_again_and_then_cancelled_is_not_begun_by_a_restored_provider() -> None:
    with two(alice={"silence_ms": 500}) as pair:
        backup = pair.bob.back_up()
        offered, name = pair.begin()
        pair.alice.stands(offered, "running")
        pair.bob.kill()
        pair.alice.stands(offered, "lost")
        pair.alice.post(f"/delegations/{offered}/offer-again")
        pair.alice.post(f"/delegations/{offered}/cancel")
        pair.bob.restore(backup)
        pair.quiet()
        assert pair.work(offered)["state"] == "rejected"
        assert pair.begun(name) == 1
        assert pair.alice.ended(offered)["delegation"]["state"] == "cancelled"


@pytest.mark.embedded
def test_a_provider_that_is_put_back_as_a_plain_copy_is_noticed_by_a_number_that_it_says_again() -> None:
    """Since the copy nobody has asked how far its ledger had come."""
    with two(env={"COVENANT_DAEMON_GRACE_MS": "0"}) as pair:  # the agent works when its daemon stops
        offered, name = pair.begin()
        pair.alice.stands(offered, "running")
        copied = pair.daemons.folder / "copied"
        pair.bob.stop()
        shutil.copytree(pair.bob.home, copied, ignore=shutil.ignore_patterns("*.sock"))
        pair.bob.start()
        heard = len(pair.to_alice.said("delegation_status"))
        until(lambda: pair.to_alice.said("delegation_status"), lambda said: len(said) > heard + 5)
        pair.bob.kill()
        pair.bob.home.rename(pair.daemons.folder / "lost")
        copied.rename(pair.bob.home)
        pair.bob.start()
        (row,) = until(lambda: pair.bob.audit("ledger_forgotten"), bool)
        assert row["said"] > 0
        pair.daemons.touch(name)
        assert pair.alice.ended(offered)["result"] == f"done {name}"
        pair.quiet()


@pytest.mark.embedded
def test_a_number_that_was_left_out_tells_that_the_ones_before_it_are_forgotten(short_path: Path) -> None:
    with open_peer_daemons(short_path) as made, ScriptedPeer("old") as old:
        node = made.node("node", AGENTS)
        old.known_to(node)
        offered = node.delegate("find it", "researcher", "old")
        offer = old.until(DelegationOffer, lambda each: each.offer_id == offered)
        assert old.accept(node, offer).status == 200
        result = old.result(offer, node.id)
        refused = old.say(node, result, seq=5)
        assert (refused.status, refused.code) == (409, "out_of_order")
        (row,) = node.audit("ledger_forgotten")
        assert (row["peer"], row["heard"]) == (old.id, 5)
        assert old.say(node, result, seq=5).status == 200
        assert node.ended(offered)["result"] == "done"


@pytest.mark.embedded
@pytest.mark.parametrize("side", ["requester", "provider"])
@pytest.mark.parametrize("step", first_of(["before", "running", "ended"]))
def test_a_home_that_is_put_back_as_a_plain_copy_is_noticed(side: str, step: str) -> None:
    """Nobody says so: no restore, only the files of yesterday. What a peer remembers of the ledger tells."""
    with two() as pair:
        node, gate = (pair.alice, pair.to_bob) if side == "requester" else (pair.bob, pair.to_alice)
        copied = pair.daemons.folder / "copied"

        def questions() -> int:
            """How many questions have told the other side the epoch that began when the copy was noticed."""
            headers = [passing.header for passing in gate.passed]
            return sum(each.get("typ") == "capability_query" and "epoch" in each for each in headers)

        def copy() -> None:
            node.stop()
            shutil.copytree(node.home, copied, ignore=shutil.ignore_patterns("*.sock"))
            node.start()

        if step == "before":
            copy()
        offered, name = pair.begin()
        pair.daemons.wrote("runs", f"bob steady {name}")
        if step == "running":
            copy()
        pair.daemons.touch(name)
        assert pair.alice.ended(offered)["result"] == f"done {name}"
        pair.quiet()
        if step == "ended":
            copy()
        for number in range(3):
            assert pair.alice.ended(pair.alice.delegate(f"more {number}", "echo", "bob"))["result"]
        # The other side has heard how far it had come.
        pair.bob.get("/capabilities?peerId=alice&fresh=true")
        pair.alice.get("/capabilities?peerId=bob&fresh=true")
        pair.quiet()
        node.kill()
        node.home.rename(pair.daemons.folder / "lost")
        copied.rename(node.home)
        node.start()
        (row,) = until(lambda: node.audit("ledger_forgotten"), bool)
        assert row["known"] > row["end"]
        if side == "requester" and step != "ended":
            assert pair.alice.delegate(name, "steady", "bob", id=offered) == offered
        assert pair.alice.ended(offered)["result"] == f"done {name}"
        assert pair.alice.ended(pair.alice.delegate("after", "echo", "bob"))["result"] == "echo after"
        pair.quiet()
        # A daemon that stops before it has told its peer the new epoch notices the copy once more in its next run.
        until(questions, bool)
        node.stop()
        told = questions()
        node.start()
        until(questions, lambda count: count > told)
        assert len(node.audit("ledger_forgotten")) == 1, "noticed once"


def test_a_restored_requester_hears_the_result_of_a_peer_that_knows_nothing_of_epochs(short_path: Path) -> None:
    """A version-2 peer counts on from where it was, and what the backup forgot is not waited for."""
    with open_peer_daemons(short_path) as made, ScriptedPeer("old") as old:
        node = made.node("node", AGENTS)
        old.known_to(node)
        offered = node.delegate("find it", "researcher", "old")
        offer = old.until(DelegationOffer, lambda each: each.offer_id == offered)
        backup = node.back_up()
        assert old.accept(node, offer).status == 200
        node.stands(offered, "accepted")
        node.restore(backup)
        # The accept is forgotten; the next number of the peer is the second.
        assert old.say(node, old.result(offer, node.id)).status == 200
        ended = node.ended(offered)
        assert (ended["result"], ended["delegation"]["proven"]) == ("done", True)


def test_a_restored_requester_notes_what_its_peers_do_for_it_and_it_has_forgotten() -> None:
    with two() as pair:
        backup = pair.alice.back_up()
        offered, name = pair.begin()
        pair.alice.stands(offered, "running")
        pair.alice.restore(backup)
        rows = until(lambda: pair.alice.audit("delegation_forgotten"), bool)
        assert [row["offer_id"] for row in rows] == [offered]
        pair.daemons.touch(name)
