"""Either daemon killed at every step of a delegation: started again, it ends as it should, once, and both agree.

A gate stops one message at one moment, so that what the killed daemon had done by then is known: nothing of it, perhaps
all of it, or all of it and nobody has heard so.
"""

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

import pytest

from tests.e2e.peers.faults import Two, two
from tests.e2e.peers.gate import At, says
from tests.e2e.peers.peer_daemons import until


class Message(NamedTuple):
    typ: str
    by: Literal["alice", "bob"]
    ends: str = "completed"


MESSAGES: Final = {
    "offer": Message("delegation_offer", "alice"),
    "accept": Message("delegation_accept", "bob"),
    "status": Message("delegation_status", "bob"),
    "result": Message("delegation_result", "bob"),
    "cancel": Message("delegation_cancel", "alice", "cancelled"),
    "last word after a cancel": Message("delegation_result", "bob", "cancelled"),
}
Victim = Literal["sender", "receiver", "both"]
MOMENTS: Final[dict[str, tuple[At, Victim]]] = {
    "the sender before it arrives": ("request", "sender"),
    "the receiver as it arrives": ("forwarded", "receiver"),
    "the receiver before its answer is heard": ("answer", "receiver"),
    "the sender before it hears the answer": ("answer", "sender"),
    "the receiver after its answer": ("answered", "receiver"),
    "the sender after the answer": ("answered", "sender"),
    "both before the answer is heard": ("answer", "both"),
}
EVERY: Final = [(message, moment) for message in MESSAGES for moment in MOMENTS]
ONCE: Final = list(zip(MESSAGES, [list(MOMENTS)[number] for number in (2, 3, 4, 5, 0, 1)], strict=True))[::2]
"""Some messages, and some moments at which one dies: all of each at all of the other takes minutes."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Two]:
    with two() as made:
        yield made
        made.compare()


def strike(pair: Two, message: Message, moment: str) -> None:
    at, victim = MOMENTS[moment]
    line = pair.to_bob if message.by == "alice" else pair.to_alice
    sender, receiver = (pair.alice, pair.bob) if message.by == "alice" else (pair.bob, pair.alice)
    killed = {"sender": (sender,), "receiver": (receiver,), "both": (sender, receiver)}[victim]
    if message.ends == "cancelled":
        offered, name = pair.begin()
        pair.alice.stands(offered, "running")
        caught = line.catch(at, says(message.typ))
        pair.alice.post(f"/delegations/{offered}/cancel", {"reason": "no longer wanted"})
    else:
        caught = line.catch(at, says(message.typ))
        offered, name = pair.begin()
        if message.typ == "delegation_result":
            pair.daemons.touch(name)
    caught.until()
    for node in killed:
        node.kill()
    caught.lose()
    for node in killed:
        node.start()
    if message.ends == "completed":
        pair.daemons.touch(name)
    task = pair.agreed(offered, message.ends)
    # What an agent had in its hands when its daemon died is begun again, and nothing else ever is.
    begun = pair.begun(name)
    assert begun <= len(task["leases"]) <= (2 if pair.bob in killed else 1)
    if message.ends == "completed":
        assert begun >= 1
        assert pair.alice.delegation(offered)["result"] == f"done {name}"


@pytest.mark.faults
@pytest.mark.matrix
@pytest.mark.parametrize(("message", "moment"), ONCE)
def test_whichever_daemon_is_killed_at_a_step_the_delegation_ends_once_and_as_it_should(
    pair: Two, message: str, moment: str
) -> None:
    strike(pair, MESSAGES[message], moment)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize(("message", "moment"), [each for each in EVERY if each not in ONCE])
def test_whichever_daemon_is_killed_at_any_step_the_delegation_ends_once_and_as_it_should(
    pair: Two, message: str, moment: str
) -> None:
    strike(pair, MESSAGES[message], moment)


@pytest.mark.faults
def test_work_that_must_not_be_repeated_waits_for_the_providers_operator_and_the_requester_is_told(pair: Two) -> None:
    offered, name = pair.begin("held")
    pair.alice.stands(offered, "running")
    work = pair.work(offered)
    pair.bob.kill()
    pair.bob.start()
    told = until(
        lambda: pair.alice.delegation(offered)["delegation"]["message"], lambda it: "an operator decides" in (it or "")
    )
    assert told.startswith("the agent was lost")
    pair.bob.cli("capabilities", "grant", "a2a.repair.force_error")
    pair.bob.cli("a2a", "force-error", work["id"], "--reason", "who knows", "--message", "lost")
    pair.agreed(offered, "failed")
    assert pair.begun(name, "held") == 1
