"""A provider's agent asks something: the question crosses to whoever sent the task, and the answer comes back."""

from collections.abc import Iterator
from typing import Any

import pytest

from covenant.model.peers.delegation_messages import DelegationInput, DelegationOffer, StatusReport
from tests.e2e.peers.peer_daemons import Node, PeerDaemons, introduce, open_peer_daemons, until
from tests.e2e.peers.scripted_peer import ScriptedPeer
from tests.matrices import first_of
from tests.places import short_folder

ASKER = '''
import os, pathlib
from covenant import Agent

FOLDER = pathlib.Path(os.environ["FOLDER"])
asker = Agent("asker")


@asker
async def ask(turn):
    """Asks twice, and tells what it heard."""
    with (FOLDER / "heard").open("a") as file:
        file.write(f"{turn.turn} {turn.text}\\n")
    if turn.turn < 3:
        yield turn.need_input(f"question {turn.turn}?")
        return
    yield "asked enough"
'''
CALLER = """
from covenant import Agent

idle = Agent("idle")


@idle
async def rest(turn):
    return "nothing"
"""


@pytest.fixture
def daemons() -> Iterator[PeerDaemons]:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        yield made


def pair(daemons: PeerDaemons) -> tuple[Node, Node]:
    alice, bob = daemons.node("alice", CALLER), daemons.node("bob", ASKER)
    introduce(alice, bob)
    return alice, bob


def asked(node: Node, task_id: str, text: str) -> dict[str, Any]:
    """The task here, once it waits with this question."""

    def waiting(task: dict[str, Any]) -> bool:
        return bool(task["a2a_state"] == "input-required" and text in str(task))

    return until(lambda: node.task(task_id), waiting)


def answer(node: Node, task_id: str, text: str) -> None:
    assert node.cli("a2a", "answer", task_id, text)["kind"] == "a2a_answered"


def test_questions_and_answers_cross_a_delegation_and_nothing_is_heard_twice(daemons: PeerDaemons) -> None:
    alice, bob = pair(daemons)
    made = alice.delegate("begin", "asker", "bob")
    asked(alice, made, "question 1?")
    assert alice.delegation(made)["delegation"]["state"] == "running"
    answer(alice, made, "first answer")
    asked(alice, made, "question 2?")
    answer(alice, made, "second answer")
    ended = alice.ended(made)
    assert (ended["result"], ended["delegation"]["proven"]) == ("asked enough", True)
    assert daemons.lines("heard") == ["1 begin", "2 first answer", "3 second answer"]
    assert bob.cli("peers", "delegations", made)["delegation"]["state"] == "completed"


@pytest.mark.parametrize("killed", first_of(["both", "requester", "provider"]))
def test_a_kill_between_question_and_answer_loses_and_repeats_nothing(daemons: PeerDaemons, killed: str) -> None:
    alice, bob = pair(daemons)
    struck = {"requester": (alice,), "provider": (bob,), "both": (alice, bob)}[killed]

    def strike() -> None:
        for node in struck:
            node.kill()
        for node in struck:
            node.start()

    def wait_for_question(text: str) -> None:
        """A provider killed before its agent has asked holds the task for an operator: the question must be durable."""
        found = until(bob.delegations, bool)
        asked(bob, found[0]["id"], text)

    made = alice.delegate("begin", "asker", "bob")
    wait_for_question("question 1?")
    strike()
    asked(alice, made, "question 1?")
    strike()
    answer(alice, made, "first answer")
    if bob in struck:
        wait_for_question("question 2?")
    strike()
    asked(alice, made, "question 2?")
    answer(alice, made, "second answer")
    assert alice.ended(made)["result"] == "asked enough"
    assert daemons.lines("heard") == ["1 begin", "2 first answer", "3 second answer"]


def test_an_answer_waits_for_a_provider_that_is_away(daemons: PeerDaemons) -> None:
    alice, bob = pair(daemons)
    made = alice.delegate("begin", "asker", "bob")
    asked(alice, made, "question 1?")
    bob.kill()
    answer(alice, made, "while you were away")
    bob.start()
    asked(alice, made, "question 2?")
    assert daemons.lines("heard") == ["1 begin", "2 while you were away"]
    alice.post(f"/delegations/{made}/cancel")
    until(lambda: [each["state"] for each in bob.delegations()], lambda states: states == ["cancelled"])


def test_a_question_that_is_repeated_after_its_answer_is_not_asked_again(daemons: PeerDaemons) -> None:
    alice = daemons.node("alice", CALLER)
    with ScriptedPeer("pat") as pat:
        pat.known_to(alice)
        made = alice.delegate("begin", "researcher", "pat")
        offer = pat.until(DelegationOffer)
        work = offer.offer_id
        pat.accept(alice, offer)

        def ask(seq: int, question: int) -> None:
            pat.say(
                alice,
                StatusReport(
                    offer_id=offer.offer_id,
                    delegation_id=work,
                    seq=seq,
                    status="input_required",
                    message="which?",
                    question=question,
                ),
            )

        ask(1, 5)
        asked(alice, made, "which?")
        answer(alice, made, "this one")
        heard = pat.until(DelegationInput)
        assert (heard.question, heard.text, heard.delegation_id) == (5, "this one", work)
        ask(2, 5)
        until(lambda: alice.task(made), lambda task: task["a2a_state"] == "working")
        ask(3, 6)
        asked(alice, made, "which?")


@pytest.mark.parametrize("restored", first_of(["requester", "provider"]))
@pytest.mark.parametrize("answered", first_of([False, True]), ids=["before the answer", "after the answer"])
def test_a_restore_between_question_and_answer_loses_neither(
    daemons: PeerDaemons, restored: str, *, answered: bool
) -> None:
    alice, bob = pair(daemons)
    node = alice if restored == "requester" else bob
    made = alice.delegate("begin", "asker", "bob", timeout=600_000)
    asked(alice, made, "question 1?")
    backup = node.back_up()
    if answered:
        answer(alice, made, "first answer")
        asked(alice, made, "question 2?")
    node.restore(backup)
    until(lambda: alice.delegation(made)["delegation"]["message"], lambda said: said == latest(restored, answered))
    if answered:
        # What the task waits with is not what is asked any more: the answer to it is no answer to anything else.
        answer(alice, made, "to what is over")
        times = 2 if restored == "requester" else 3
        until(lambda: last_question(alice, made), lambda said: said == (latest(restored, answered), times))
    if latest(restored, answered) == "question 1?":
        answer(alice, made, "first answer")
    until(lambda: last_question(alice, made)[0], lambda said: said == "question 2?")
    answer(alice, made, "second answer")
    ended = alice.ended(made)
    assert (ended["result"], ended["delegation"]["proven"]) == ("asked enough", True)
    heard = daemons.lines("heard")
    assert [line for line in heard if line != "2 first answer"] == ["1 begin", "3 second answer"]
    assert heard.count("2 first answer") == (2 if answered and restored == "provider" else 1)


def latest(restored: str, answered: bool) -> str:
    """What the provider asks, once both are back."""
    return "question 2?" if answered and restored == "requester" else "question 1?"


def last_question(node: Node, task_id: str) -> tuple[str, int]:
    """What the task waits with, and how often it has waited."""
    parked = [each for each in node.task(task_id)["updates"] if each["kind"] == "parked"]
    return parked[-1]["body"]["text"], len(parked)
