"""The table of a delegation's states, on both sides."""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.model.errors import Conflict
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import (
    DELEGATION_TRANSITIONS,
    ENDED,
    OUTCOMES,
    STATUS,
    Delegation,
    DelegationRole,
    DelegationState,
    move,
)
from covenant.model.peers.delegation_messages import DelegationStatus
from covenant.model.peers.instance import InstanceId

TRANSITION_NAMES = sorted({transition for table in DELEGATION_TRANSITIONS.values() for _, transition in table})

BY_TASK = {f"task_{outcome}" for outcome in OUTCOMES}


def reachable(role: DelegationRole, start: DelegationState | None) -> set[DelegationState | None]:
    found: set[DelegationState | None] = {start}
    while True:
        more = {after for (before, _), after in DELEGATION_TRANSITIONS[role].items() if before in found} - found
        if not more:
            return found
        found |= more


@pytest.mark.parametrize("role", DelegationRole)
def test_nothing_but_the_end_of_its_task_changes_an_ended_delegation(role: DelegationRole) -> None:
    moves = {transition for before, transition in DELEGATION_TRANSITIONS[role] if before in ENDED}
    assert moves == (BY_TASK if role is DelegationRole.REQUESTER else set())
    assert all(after in ENDED for (before, _), after in DELEGATION_TRANSITIONS[role].items() if before in ENDED)


@pytest.mark.parametrize("role", DelegationRole)
def test_every_state_of_a_side_can_come_to_an_end_and_is_reached_from_nothing(role: DelegationRole) -> None:
    states = reachable(role, None) - {None}
    assert all(reachable(role, state) & ENDED for state in states)
    assert {before for before, _ in DELEGATION_TRANSITIONS[role]} - {None} <= states


def test_only_a_requester_loses_sight_of_the_other_side() -> None:
    assert DelegationState.LOST in reachable(DelegationRole.REQUESTER, None)
    assert DelegationState.LOST not in reachable(DelegationRole.PROVIDER, None)


@given(st.sampled_from(DelegationRole), st.lists(st.sampled_from(TRANSITION_NAMES), max_size=30))
def test_whatever_happens_an_end_is_the_end(role: DelegationRole, transitions: list[str]) -> None:
    state: DelegationState | None = None
    for transition in transitions:
        before = state
        try:
            state = move(role, before, transition)
        except Conflict:
            continue
        assert before not in ENDED or (transition in BY_TASK and state in ENDED)
        assert state in DelegationState


def test_every_state_is_told_in_the_protocols_words() -> None:
    assert STATUS.keys() == set(DelegationState)
    assert set(STATUS.values()) == set(get_args(DelegationStatus))
    assert {STATUS[state] for state in ENDED} == set(OUTCOMES)


LIVES: list[tuple[DelegationRole, list[Any]]] = [
    (DelegationRole.REQUESTER, ["offer", "accept", "status", "status", "result_completed", DelegationState.COMPLETED]),
    (DelegationRole.REQUESTER, ["offer", "reject", DelegationState.REJECTED]),
    (DelegationRole.REQUESTER, ["offer", "offer", "accept", DelegationState.ACCEPTED]),
    (DelegationRole.REQUESTER, ["offer", "accept", "cancel", "status", "result_cancelled", DelegationState.CANCELLED]),
    (DelegationRole.REQUESTER, ["offer", "cancel", "reject", DelegationState.CANCELLED]),
    (DelegationRole.REQUESTER, ["offer", "accept", "cancel", "result_completed", DelegationState.COMPLETED]),
    (DelegationRole.REQUESTER, ["offer", "accept", "silence", DelegationState.LOST]),
    (DelegationRole.REQUESTER, ["offer", "accept", "silence", "status", DelegationState.RUNNING]),
    (DelegationRole.REQUESTER, ["offer", "accept", "silence", "offer", "accept", DelegationState.ACCEPTED]),
    (DelegationRole.REQUESTER, ["offer", "accept", "silence", "force_error", DelegationState.FAILED]),
    (DelegationRole.REQUESTER, ["offer", "accept", "silence", "result_completed", DelegationState.COMPLETED]),
    (DelegationRole.REQUESTER, ["offer", "accept", "status", "timeout", DelegationState.TIMEOUT]),
    (DelegationRole.PROVIDER, ["offer", "accept", "start", "status", "result_completed", DelegationState.COMPLETED]),
    (DelegationRole.PROVIDER, ["offer", "accept", "offer", "start", "offer", DelegationState.RUNNING]),
    (DelegationRole.PROVIDER, ["offer", "reject", DelegationState.REJECTED]),
    (DelegationRole.PROVIDER, ["offer", "accept", "start", "cancel", "result_cancelled", DelegationState.CANCELLED]),
    (DelegationRole.PROVIDER, ["offer", "cancel", "result_cancelled", DelegationState.CANCELLED]),
    (DelegationRole.PROVIDER, ["offer", "accept", "start", "result_timeout", DelegationState.TIMEOUT]),
]


@pytest.mark.parametrize(("role", "life"), LIVES, ids=lambda value: "-".join(map(str, value)) if value else "")
def test_a_life_ends_where_the_table_says(role: DelegationRole, life: list[Any]) -> None:
    state: DelegationState | None = None
    for transition in life[:-1]:
        state = move(role, state, transition)
    assert state is life[-1]


@pytest.mark.parametrize(
    ("role", "state", "transition"),
    [
        (DelegationRole.REQUESTER, None, "accept"),
        (DelegationRole.REQUESTER, DelegationState.ACCEPTED, "reject"),
        (DelegationRole.REQUESTER, DelegationState.COMPLETED, "result_failed"),
        (DelegationRole.REQUESTER, DelegationState.RUNNING, "force_error"),
        (DelegationRole.PROVIDER, None, "cancel"),
        (DelegationRole.PROVIDER, DelegationState.OFFERED, "result_completed"),
        (DelegationRole.PROVIDER, DelegationState.CANCELLED, "offer"),
    ],
)
def test_a_move_that_is_not_in_the_table_is_refused(
    role: DelegationRole, state: DelegationState | None, transition: str
) -> None:
    with pytest.raises(Conflict, match=transition):
        move(role, state, transition)


def test_the_numbers_of_messages_are_stored_under_their_names_of_old() -> None:
    delegation = Delegation(
        role=DelegationRole.PROVIDER,
        peer=InstanceId("frd1_" + "a" * 40),
        offer_id="o",
        task_id=TaskId("t"),
        profile="p",
        state=DelegationState.RUNNING,
        budget=1,
        timeout_ms=1,
        sent_seq=3,
        received_seq=5,
    )
    stored = msgspec.to_builtins(delegation)
    assert (stored["said"], stored["heard"]) == (3, 5)
    assert msgspec.convert(stored, Delegation) == delegation
