"""A peer that is away while more and more is delegated to it, and comes back; the one who delegates dies in between."""

from typing import Final

from tests.e2e.peers.faults import Two, two
from tests.e2e.peers.peer_daemons import until

COUNT: Final = 20


def offer_some(pair: Two, count: int, before: int = 0) -> dict[str, str]:
    """One after the other, so that their order is known: the ids, and what their agents wait for."""
    made: dict[str, str] = {}
    for number in range(count):
        offered, name = pair.begin()
        pair.daemons.touch(name)
        pair.alice.stands(offered, "offered")
        until(lambda: pair.alice.peer("bob")["waiting"].get("count", 0), (before + number + 1).__eq__)
        made[offered] = name
    return made


def test_all_that_was_delegated_while_a_peer_was_away_is_done_in_its_order_and_once_when_it_is_back() -> None:
    with two(alice={"deliveries_per_peer": 1, "silence_ms": 600_000}) as pair:
        pair.alice.ended(pair.alice.delegate("first", "echo", "bob"))
        pair.bob.kill()
        made = offer_some(pair, COUNT // 2)
        pair.alice.kill()
        pair.alice.start()
        made |= offer_some(pair, COUNT // 2, len(made))
        waiting = until(lambda: pair.alice.peer("bob")["waiting"], lambda found: found.get("failure"))
        assert waiting["count"] == COUNT, waiting
        assert pair.alice.peer("bob")["status"] == "offline"
        pair.bob.start()
        for offered, name in made.items():
            pair.agreed(offered, "completed")
            assert pair.begun(name) == 1
        messages = pair.bob.get("/messages?limit=100&type=delegation_offer")["messages"]
        arrived = [each["offerId"] for each in reversed(messages)]
        # What was tried while it was not back yet is tried again after the others.
        ids, again = list(made), list(made).index(arrived[-COUNT])
        in_order = COUNT - again
        assert arrived[-COUNT:][:in_order] == ids[again:]
        assert sorted(arrived[-COUNT:][in_order:]) == sorted(ids[:again])
        pair.compare()
