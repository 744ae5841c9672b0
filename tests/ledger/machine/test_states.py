"""The table of transitions: every pair of a state and an event is either in it, or refused by `evolve`."""

from itertools import product
from typing import Any, get_args

import msgspec
import pytest

from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.events import (
    AnyTaskEvent,
    LeaseInterrupted,
    LeaseReleased,
    LeaseRenewed,
    MessageKept,
    ResultDrained,
    ResultReturned,
    SignalKept,
    SignalTaken,
    TaskClosed,
    TaskContinued,
    TaskEvent,
    TaskFollowed,
    TaskLeased,
    TaskParked,
    TaskPromoted,
    TaskRequeued,
    TaskResumed,
    TaskSent,
    TaskSettled,
    TaskSuspended,
    TaskUpdated,
    TurnEnded,
)
from covenant.ledger.machine.evolution import IllegalMoveError, evolve, start
from covenant.ledger.machine.states import (
    DRAINED,
    FINISHED,
    FOLLOWING,
    LEASED,
    PARKED,
    QUEUED,
    SETTLED,
    TRANSITIONS,
    State,
)
from covenant.model.clock_steps import STEADY
from covenant.model.ids import LeaseId
from covenant.model.retry_policy import Posture
from covenant.model.task import Cause, Ending, Lease
from covenant.model.task_event import Interruption, MessageUpdate, Signal, StatusUpdate, Wait
from tests.ledger_contract.samples import BOB, make_task, ok, task_id

LEASE = Lease(lease_id=LeaseId("l1"), leased_to=BOB, leased_at_ms=10, attempt=1)
ID = task_id(1)
EVENTS: list[TaskEvent] = [
    TaskSent(ID, make_task(), "digest"),
    TaskFollowed(ID, make_task(), "digest", task_id(2)),
    TaskPromoted(ID),
    TaskLeased(ID, LEASE, 2),
    LeaseRenewed(ID, LEASE.lease_id, 20),
    LeaseReleased(ID, LEASE.lease_id, "no room"),
    LeaseInterrupted(ID, LEASE.lease_id, "stopping"),
    TaskUpdated(ID, LEASE.lease_id, 3, StatusUpdate("on it")),
    TaskParked(ID, LEASE.lease_id, 3, Interruption.INPUT_REQUIRED, StatusUpdate("which?")),
    TaskSuspended(ID, Wait(since_ms=1, for_ms=5), LEASE.lease_id),
    TaskResumed(ID),
    SignalKept(ID, Signal("paid", "s1")),
    SignalTaken(ID, "s0"),
    TaskContinued(ID, 4, MessageUpdate(), "m1"),
    MessageKept(ID, 4, MessageUpdate(), "m2"),
    TurnEnded(ID, LEASE.lease_id, MessageUpdate(), 5),
    TaskRequeued(ID, LEASE.lease_id, "gone", Posture.OPERATOR_ACCEPTED, 1),
    TaskSettled(ID, ok(ID), Ending.COMPLETED, Cause.RESULT, 3),
    TaskClosed(ID, ok(ID), Ending.COMPLETED, Cause.RESULT, 3),
    ResultDrained(ID),
    ResultReturned(ID, "left", make_task(), "digest", ok(ID), Ending.COMPLETED, Cause.RESULT, 3, 1),
]
TAGS = {str(event.__struct_config__.tag): event for event in EVENTS}

# What each state holds when it is reached by the shortest way.
SENT = evolve(None, TAGS["task_sent"], 1)
HELD = evolve(evolve(SENT, TAGS["task_leased"], 2), SignalKept(ID, Signal("paid", "s0")), 2)
ENTRIES: dict[State | None, Entry | None] = {
    None: None,
    QUEUED: SENT,
    LEASED: HELD,
    PARKED: evolve(HELD, TAGS["task_parked"], 3),
    FOLLOWING: evolve(None, TAGS["task_followed"], 1),
    SETTLED: evolve(HELD, TAGS["task_settled"], 3),
    DRAINED: evolve(evolve(HELD, TAGS["task_settled"], 3), TAGS["result_drained"], 4),
}
PAIRS = list(product(ENTRIES, TAGS))


def name(value: Any) -> str:
    return str(value)


@pytest.mark.parametrize("generation", [0, 2])
def test_a_task_that_is_leased_as_it_is_accepted_is_what_the_two_events_make_of_it(generation: int) -> None:
    sent, leased = TAGS["task_sent"], msgspec.structs.replace(TAGS["task_leased"], generation=generation)
    assert isinstance(sent, TaskSent)
    assert isinstance(leased, TaskLeased)
    assert start(sent, leased, 7) == evolve(evolve(None, sent, 7), leased, 7)


def test_every_event_of_a_task_is_tried_here() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(AnyTaskEvent))


def test_every_state_is_tried_here_and_the_table_knows_no_other() -> None:
    assert set(ENTRIES) == {None, *State}
    assert {entry.state for entry in ENTRIES.values() if entry is not None} == set(State)
    assert {before for before, _ in TRANSITIONS} | set(TRANSITIONS.values()) <= set(ENTRIES)


@pytest.mark.parametrize(("before", "tag"), [pair for pair in PAIRS if pair in TRANSITIONS], ids=name)
def test_a_move_in_the_table_leads_where_it_says(before: State | None, tag: str) -> None:
    entry = ENTRIES[before]
    after = evolve(entry, TAGS[tag], 99)
    assert after.state is TRANSITIONS[before, tag]
    assert after.updated_at_ms == 99
    assert after.task == make_task()
    if entry is not None:
        assert after.generation >= entry.generation
        assert after.accepted_at_ms == entry.accepted_at_ms


@pytest.mark.parametrize(("before", "tag"), [pair for pair in PAIRS if pair not in TRANSITIONS], ids=name)
def test_a_move_that_is_not_in_the_table_is_refused(before: State | None, tag: str) -> None:
    with pytest.raises(IllegalMoveError, match=tag):
        evolve(ENTRIES[before], TAGS[tag], 99)


def test_nothing_leaves_a_finished_task_but_the_drain_of_its_result_and_its_return() -> None:
    leaving = {(before, tag): after for (before, tag), after in TRANSITIONS.items() if before in FINISHED}
    assert leaving == {(SETTLED, "result_drained"): DRAINED, (DRAINED, "result_returned"): SETTLED}


def test_a_task_that_the_ledger_had_forgotten_comes_back_as_it_was_settled() -> None:
    drained = ENTRIES[DRAINED]
    assert drained is not None
    event = ResultReturned(
        ID,
        "left",
        drained.task,
        drained.digest,
        ok(ID),
        Ending.COMPLETED,
        Cause.RESULT,
        drained.generation,
        drained.accepted_at_ms,
        drained.lease,
    )
    known, forgotten = evolve(drained, event, 9), evolve(None, event, 9)
    for field in ("task", "digest", "state", "accepted_at_ms", "generation", "result", "ending", "cause", "lease"):
        assert getattr(forgotten, field) == getattr(known, field), field


def test_a_lease_that_nobody_was_told_of_is_no_attempt() -> None:
    again = evolve(HELD, LeaseReleased(ID, LEASE.lease_id, "left", undelivered=True), 3)
    assert (again.state, again.attempt, again.undelivered) == (QUEUED, 1, 1)
    assert (again.lease, again.turn_started_ms) == (None, 0)


def test_every_state_can_be_reached_and_every_unfinished_one_can_be_settled() -> None:
    assert set(TRANSITIONS.values()) == set(State)
    for state in set(State) - FINISHED:
        assert TRANSITIONS[state, "task_settled"] is SETTLED


def test_a_lease_begins_only_in_the_queue() -> None:
    assert [before for before, tag in TRANSITIONS if tag == "task_leased"] == [QUEUED]


def test_only_an_operator_the_holder_or_the_gate_brings_leased_work_back_to_the_queue() -> None:
    back = {tag for (before, tag), after in TRANSITIONS.items() if before is LEASED and after is QUEUED}
    assert back == {"lease_released", "task_requeued", "turn_ended"}


def test_evolving_leaves_the_entry_before_as_it_was() -> None:
    before = msgspec.json.encode(HELD)
    for tag in ("lease_renewed", "task_updated", "task_parked", "task_settled"):
        evolve(HELD, TAGS[tag], 99)
    assert msgspec.json.encode(HELD) == before


@pytest.mark.parametrize("state", list(State), ids=name)
def test_an_entry_is_the_same_after_being_written_and_read(state: State) -> None:
    entry = ENTRIES[state]
    assert msgspec.json.decode(msgspec.json.encode(entry), type=Entry) == entry


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: str(event.__struct_config__.tag))
def test_an_event_is_the_same_after_being_written_and_read(event: TaskEvent) -> None:
    written = msgspec.json.encode([event])
    assert msgspec.json.decode(written, type=list[AnyTaskEvent]) == [event]


def test_the_turn_begins_anew_with_the_next_message() -> None:
    parked = ENTRIES[PARKED]
    assert parked is not None
    continued = evolve(parked, TAGS["task_continued"], 50)
    assert (continued.turn, continued.attempt, continued.lease, continued.turn_started_ms) == (2, 0, None, 0)
    again = evolve(continued, TaskLeased(ID, msgspec.structs.replace(LEASE, leased_at_ms=60)), 60)
    assert (again.attempt, again.turn_started_ms) == (1, 60)


def test_a_task_without_a_timeout_never_times_out_and_one_with_it_counts_from_its_first_lease() -> None:
    assert HELD.times_out_at_ms(10, STEADY) is None
    timed = evolve(None, TaskSent(ID, make_task(timeout_ms=5), "d"), 1)
    assert timed.times_out_at_ms(10, STEADY) is None
    held = evolve(timed, TAGS["task_leased"], 10)
    assert held.times_out_at_ms(10, STEADY) == 15
    back = evolve(held, TAGS["task_requeued"], 12)
    later = evolve(back, TaskLeased(ID, msgspec.structs.replace(LEASE, leased_at_ms=13, attempt=2)), 13)
    assert later.times_out_at_ms(10, STEADY) == 15
