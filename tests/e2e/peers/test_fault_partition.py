"""A network that breaks and heals, in both directions or in one: nothing is lost, repeated or told out of order."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.peers.faults import Two, two
from tests.e2e.peers.gate import Gate, says
from tests.e2e.peers.peer_daemons import until

SILENT: dict[str, Any] = {"silence_ms": 700}
TALKATIVE: dict[str, Any] = {"status_interval_ms": 200}
"""A provider is lost after three of its intervals of silence, or after what its requester bears, if that is more."""

STATUS = "delegation_status"


@pytest.fixture(scope="module")
def daemons() -> Iterator[Two]:
    with two(alice=SILENT, bob=TALKATIVE) as made:
        yield made
        made.compare()


@pytest.fixture
def pair(daemons: Two) -> Iterator[Two]:
    """Healed again after each test."""
    yield daemons
    daemons.to_bob.open()
    daemons.to_alice.open()


def heard(gate: Gate, since: int) -> list[int]:
    """The numbers of what was said since then on one delegation and was answered, as it came."""
    return [int(each.header["seq"]) for each in gate.passed[since:] if "seq" in each.header]


def test_what_was_said_while_the_network_was_broken_is_heard_in_its_order_afterwards(pair: Two) -> None:
    since = len(pair.to_alice.passed)
    offered, name = pair.begin()
    pair.alice.stands(offered, "running")
    pair.to_bob.shut()
    pair.to_alice.shut()
    pair.alice.stands(offered, "lost")
    pair.daemons.touch(name)
    work = pair.work(offered)
    pair.bob.stands(work["id"], "completed")
    waiting = until(lambda: pair.bob.peer("alice")["waiting"], lambda found: found.get("failure"))
    assert waiting["count"] >= 1
    assert pair.alice.delegation(offered)["delegation"]["state"] == "lost"
    pair.to_bob.open()
    pair.to_alice.open()
    pair.agreed(offered, "completed")
    assert pair.begun(name) == 1
    numbers = heard(pair.to_alice, since)
    assert numbers == sorted(numbers)
    assert sorted(set(numbers)) == list(range(1, numbers[-1] + 1)), "a number is missing"


def test_a_lost_delegation_is_shown_before_everything_else_and_goes_on_by_itself_when_it_is_heard_of(pair: Two) -> None:
    offered, name = pair.begin()
    pair.alice.stands(offered, "running")
    pair.to_alice.shut()
    pair.alice.stands(offered, "lost")
    later, other = pair.begin()
    pair.alice.stands(later, "offered", "lost")
    shown = pair.alice.cli("peers", "delegations")["delegations"]
    states = [each["state"] for each in shown]
    assert offered in [each["id"] for each in shown[: states.count("lost")]]
    assert "lost" not in states[states.count("lost") :]
    drawn = pair.alice.run("peers", "delegations")
    assert "lost ones wait for you" in drawn.out + drawn.err
    pair.to_alice.open()
    pair.alice.stands(offered, "running")
    for each in (name, other):
        pair.daemons.touch(each)
    for which, each in ((offered, name), (later, other)):
        pair.agreed(which, "completed")
        assert pair.begun(each) == 1


@pytest.mark.slow
def test_a_cancel_that_does_not_get_through_waits_while_its_provider_is_still_heard(pair: Two) -> None:
    offered, name = pair.begin()
    pair.alice.stands(offered, "running")
    pair.to_bob.shut()
    pair.alice.post(f"/delegations/{offered}/cancel")
    until(lambda: pair.alice.peer("bob")["waiting"], lambda found: found.get("failure"))
    told = len(pair.to_alice.said(STATUS))
    until(lambda: len(pair.to_alice.said(STATUS)), lambda count: count > told + 1)
    assert pair.alice.delegation(offered)["delegation"]["state"] == "cancelling"
    pair.to_bob.open()
    pair.agreed(offered, "cancelled")
    assert pair.begun(name) == 1


def test_answers_that_are_lost_repeat_what_was_said_and_change_nothing(pair: Two) -> None:
    there, back = pair.to_bob.lose("answer"), pair.to_alice.lose("answer")
    offered, name = pair.begin()
    # What was said was heard each time; only whoever said it does not know.
    back.until(6)
    there.until(2)
    assert pair.alice.stands(offered, "accepted", "running", "lost")
    assert pair.begun(name) == 1
    pair.daemons.touch(name)
    there.over()
    back.over()
    pair.agreed(offered, "completed")
    assert pair.begun(name) == 1
    numbers = [int(each.header["seq"]) for each in back.lost if "seq" in each.header]
    assert numbers == sorted(numbers)


@pytest.mark.slow
def test_a_lost_offer_that_is_made_again_under_its_id_begins_no_work_twice(pair: Two) -> None:
    pair.to_alice.shut()
    offered, name = pair.begin()
    pair.daemons.wrote("runs", f"bob steady {name}")
    pair.alice.stands(offered, "lost")
    offers = len(pair.to_bob.said("delegation_offer"))
    assert pair.alice.cli("peers", "offer-again", offered)["delegation"]["state"] == "offered"
    until(lambda: len(pair.to_bob.said("delegation_offer")), lambda count: count > offers)
    pair.to_alice.open()
    pair.alice.stands(offered, "running")
    pair.daemons.touch(name)
    task = pair.agreed(offered, "completed")
    assert (pair.begun(name), len(task["leases"])) == (1, 1)


@pytest.mark.slow
def test_an_offer_that_was_lost_before_it_arrived_and_is_made_again_begins_once(pair: Two) -> None:
    pair.to_bob.shut()
    offered, name = pair.begin()
    pair.alice.stands(offered, "lost")
    pair.alice.cli("peers", "offer-again", offered)
    pair.to_bob.open()
    pair.daemons.touch(name)
    pair.agreed(offered, "completed")
    assert pair.begun(name) == 1


def given_up(pair: Two, offered: str, name: str) -> None:
    """Alice has given up; bob still works, and is told to stop once he can be."""
    ended = pair.alice.ended(offered)
    assert (ended["delegation"]["state"], ended["delegation"]["code"]) == ("failed", "provider_lost")
    assert ended["error"].startswith("provider_lost")
    work = pair.work(offered)
    assert work["state"] == "running"
    pair.to_bob.open()
    pair.to_alice.open()
    assert pair.bob.stands(work["id"], "ended")["delegation"]["state"] == "cancelled"
    assert pair.bob.task(work["id"])["a2a_state"] == "canceled"
    pair.quiet()
    assert pair.alice.delegation(offered)["delegation"]["state"] == "failed"
    assert pair.begun(name) == 1


def test_a_delegation_that_is_given_up_fails_as_provider_lost_and_its_provider_is_told_to_stop(pair: Two) -> None:
    offered, name = pair.begin()
    pair.alice.stands(offered, "running")
    pair.to_bob.shut()
    pair.to_alice.shut()
    pair.alice.stands(offered, "lost")
    moved = pair.alice.cli("peers", "force-error", offered, "--reason", "its machine burned down")["delegation"]
    assert (moved["state"], moved["code"]) == ("failed", "provider_lost")
    given_up(pair, offered, name)


def test_a_lost_delegation_is_given_up_by_itself_where_the_settings_say_so() -> None:
    with two(alice=SILENT | {"force_lost": "true", "lost_after_ms": 500}, bob=TALKATIVE) as pair:
        offered, name = pair.begin()
        pair.alice.stands(offered, "running")
        pair.to_bob.shut()
        pair.to_alice.shut()
        given_up(pair, offered, name)
        pair.compare()


@pytest.mark.slow
def test_a_message_that_is_lost_over_and_over_holds_up_no_other_delegation(pair: Two) -> None:
    first, name = pair.begin()
    pair.alice.stands(first, "running")
    loss = pair.to_bob.lose("request", says("delegation_cancel"))
    pair.alice.post(f"/delegations/{first}/cancel")
    loss.until(2)
    other, gate = pair.begin()
    pair.daemons.touch(gate)
    pair.alice.ended(other)
    loss.over()
    pair.agreed(first, "cancelled")
    pair.agreed(other, "completed")
    assert pair.begun(name) == 1
