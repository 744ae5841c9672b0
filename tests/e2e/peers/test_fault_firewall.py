"""Only one side can be called: the other fetches. Whole delegations, cancels, killed pollers and lost answers."""

from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple

import pytest

from tests.e2e.peers.faults import Two, two
from tests.e2e.peers.gate import At, Gate, says
from tests.e2e.peers.peer_daemons import Node, until

Where = Literal["requester", "provider"]
OFFER, ACCEPT, STATUS, RESULT, CANCEL = (
    f"delegation_{word}" for word in ("offer", "accept", "status", "result", "cancel")
)


class Walled(NamedTuple):
    pair: Two
    inside: Node
    """Whoever nobody can call: it fetches."""
    outside: Node
    line: Gate
    """All there is between them: from the inside to the outside."""

    @property
    def fetched(self) -> tuple[str, ...]:
        """What the one inside is told, as far as it ends well."""
        return (ACCEPT, STATUS, RESULT) if self.inside is self.pair.alice else (OFFER,)


@pytest.fixture(scope="module", params=["requester", "provider"])
def walled(request: pytest.FixtureRequest) -> Iterator[Walled]:
    where: Where = request.param
    fetching: dict[str, Any] = {"poll": "*", "poll_wait_ms": 1_000}
    asks = fetching if where == "requester" else {}
    works = fetching if where == "provider" else {}
    with two(alice=asks, bob=works, met=False) as pair:
        nodes: Final = (pair.alice, pair.bob) if where == "requester" else (pair.bob, pair.alice)
        inside, outside = nodes
        line, closed = (pair.to_bob, pair.to_alice) if where == "requester" else (pair.to_alice, pair.to_bob)
        closed.shut()
        outside.post("/peers", {"id": inside.id, "name": inside.name})
        inside.add(line.url, outside.name)
        for one, other in ((inside, outside), (outside, inside)):
            until(lambda one=one, other=other: one.peer(other.name)["trustLevel"], lambda level: level == "verified")  # type: ignore[misc]
        yield Walled(pair, inside, outside, line)
        assert "url" not in outside.peer(inside.name) or outside.peer(inside.name)["url"] is None
        pair.compare()


def test_a_delegation_comes_to_its_end_although_only_one_side_can_be_called(walled: Walled) -> None:
    pair = walled.pair
    offered, name = pair.begin()
    pair.alice.stands(offered, "running")
    pair.daemons.touch(name)
    pair.agreed(offered, "completed")
    assert pair.begun(name) == 1
    carried = {str(header["typ"]) for passing in walled.line.passed for header in passing.carried}
    assert carried >= set(walled.fetched)


def test_a_cancel_reaches_work_although_only_one_side_can_be_called(walled: Walled) -> None:
    pair = walled.pair
    offered, name = pair.begin()
    pair.alice.stands(offered, "running")
    pair.alice.post(f"/delegations/{offered}/cancel")
    pair.agreed(offered, "cancelled")
    assert pair.begun(name) == 1


def strike(walled: Walled, at: At) -> None:
    """Kill the one who fetches as it is told of each kind of thing in turn."""
    pair = walled.pair
    for typ in walled.fetched:
        caught = walled.line.catch(at, says(typ))
        offered, name = pair.begin()
        if typ == RESULT:
            pair.daemons.touch(name)
        caught.until()
        walled.inside.kill()
        caught.lose()
        walled.inside.start()
        pair.daemons.touch(name)
        task = pair.agreed(offered, "completed")
        assert pair.begun(name) <= len(task["leases"]) <= (2 if walled.inside is pair.bob else 1)


def test_whoever_fetches_can_be_killed_before_it_hears_what_it_asked_for(walled: Walled) -> None:
    strike(walled, "answer")


@pytest.mark.slow
def test_whoever_fetches_can_be_killed_right_after_it_heard_what_it_asked_for(walled: Walled) -> None:
    strike(walled, "answered")


@pytest.mark.slow
def test_a_cancel_is_fetched_by_a_provider_that_was_killed_before_it_heard_it(walled: Walled) -> None:
    pair = walled.pair
    offered, name = pair.begin()
    pair.alice.stands(offered, "running")
    caught = walled.line.catch("answer", says(CANCEL if walled.inside is pair.bob else RESULT))
    pair.alice.post(f"/delegations/{offered}/cancel")
    caught.until()
    walled.inside.kill()
    caught.lose()
    walled.inside.start()
    pair.agreed(offered, "cancelled")
    assert pair.begun(name) <= 2


@pytest.mark.slow
def test_whoever_is_asked_can_be_killed_while_others_wait_for_its_answer(walled: Walled) -> None:
    pair = walled.pair
    offered, name = pair.begin()
    pair.alice.stands(offered, "running")
    walled.outside.kill()
    pair.daemons.touch(name)
    walled.outside.start()
    pair.agreed(offered, "completed")


def test_answers_to_polls_that_are_lost_cost_nothing(walled: Walled) -> None:
    pair, fetched = walled.pair, walled.fetched
    loss = walled.line.lose("answer", lambda passing: any(typ in passing.types for typ in fetched))
    offered, name = pair.begin()
    loss.until(3)
    pair.daemons.touch(name)
    loss.over()
    pair.agreed(offered, "completed")
    assert pair.begun(name) == 1
