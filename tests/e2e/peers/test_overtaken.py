"""What an agent says while its last word is still on its way: the peer hears it then, and not at the next heartbeat."""

from typing import Any, Final, Literal
from uuid import uuid4

import pytest

from tests.e2e.peers.faults import Two, two
from tests.e2e.peers.gate import says
from tests.e2e.peers.peer_daemons import until

STATUS: Final = "delegation_status"
SELDOM: Final = 600_000
"""Nobody here waits for a heartbeat of this interval."""
TELLER: Final = '''
teller = Agent("teller")


@teller
async def tell(turn):
    """One word after the other, as there are files of their names."""
    for word in ("first", "second", "third"):
        await gate(f"{turn.text}-{word}")
        yield turn.status(word)
    await gate(turn.text)
    yield "done"
'''


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sent", "fetched"])
def test_what_is_said_while_the_word_before_is_on_its_way_is_heard_after_it(way: Literal["sent", "fetched"]) -> None:
    fetches: dict[str, Any] = {"poll": "*", "poll_wait_ms": 1_000} if way == "fetched" else {}
    with two(alice=fetches, bob={"status_interval_ms": SELDOM}, met=way == "sent", agents=TELLER) as pair:
        if way == "fetched":
            pair.to_alice.shut()
            pair.bob.post("/peers", {"id": pair.alice.id, "name": "alice"})
            pair.alice.add(pair.to_bob.url, "bob")
            until(lambda: pair.bob.peer("alice")["trustLevel"], lambda level: level == "verified")
        name = f"go-{uuid4().hex[:12]}"
        offered = pair.alice.delegate(name, "teller", "bob")
        heard(pair, name, offered, "first")
        pair.quiet()
        caught = (pair.to_alice if way == "sent" else pair.to_bob).catch("answer", says(STATUS))
        pair.daemons.touch(f"{name}-second")
        caught.until()
        pair.daemons.touch(f"{name}-third")
        until(lambda: pair.work(offered)["message"], lambda message: message == "third")
        caught.pass_on()
        heard(pair, name, offered, "third")
        pair.daemons.touch(name)
        pair.agreed(offered, "completed")
        pair.compare()


def heard(pair: Two, name: str, offered: str, word: str) -> None:
    pair.daemons.touch(f"{name}-{word}")
    until(
        lambda: pair.alice.call("GET", f"/delegations/{offered}"),
        lambda answer: answer.status == 200 and answer.body["delegation"]["message"] == word,
        bound_s=10.0,
    )
