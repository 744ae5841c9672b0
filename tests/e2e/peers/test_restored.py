"""A side whose ledger is restored from a backup, at each step of a delegation: no work that was done is lost."""

from pathlib import Path
from typing import Final

import pytest

from tests.e2e.peers.faults import Two, two
from tests.e2e.peers.peer_daemons import until

STEPS: Final = ("before", "offered", "running", "done", "ended")


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


@pytest.mark.parametrize("step", STEPS)
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


@pytest.mark.parametrize("step", STEPS)
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


@pytest.mark.parametrize("step", ["before", "offered", "running"])
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


def test_a_restored_requester_notes_what_its_peers_do_for_it_and_it_has_forgotten() -> None:
    with two() as pair:
        backup = pair.alice.back_up()
        offered, name = pair.begin()
        pair.alice.stands(offered, "running")
        pair.alice.restore(backup)
        rows = until(lambda: pair.alice.audit("delegation_forgotten"), bool)
        assert [row["offer_id"] for row in rows] == [offered]
        pair.daemons.touch(name)
