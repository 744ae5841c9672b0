"""The table of a delegation's states, on both sides."""

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.model.delegating import ENDED, OUTCOMES, STATUS, TRANSITIONS, Role, State, move
from covenant.model.delegation import Status
from covenant.model.errors import Conflict

HAPPENINGS = sorted({happening for table in TRANSITIONS.values() for _, happening in table})


def reachable(role: Role, start: State | None) -> set[State | None]:
    found: set[State | None] = {start}
    while True:
        more = {after for (before, _), after in TRANSITIONS[role].items() if before in found} - found
        if not more:
            return found
        found |= more


@pytest.mark.parametrize("role", Role)
def test_nothing_leaves_an_ended_delegation(role: Role) -> None:
    assert not {before for before, _ in TRANSITIONS[role]} & ENDED


@pytest.mark.parametrize("role", Role)
def test_every_state_of_a_side_can_come_to_an_end_and_is_reached_from_nothing(role: Role) -> None:
    states = reachable(role, None) - {None}
    assert all(reachable(role, state) & ENDED for state in states)
    assert {before for before, _ in TRANSITIONS[role]} - {None} <= states


def test_only_a_requester_loses_sight_of_the_other_side() -> None:
    assert State.LOST in reachable(Role.REQUESTER, None)
    assert State.LOST not in reachable(Role.PROVIDER, None)


@given(st.sampled_from(Role), st.lists(st.sampled_from(HAPPENINGS), max_size=30))
def test_whatever_happens_an_end_is_the_end(role: Role, happenings: list[str]) -> None:
    state: State | None = None
    for happening in happenings:
        before = state
        try:
            state = move(role, before, happening)
        except Conflict:
            continue
        assert before not in ENDED
        assert state in State


def test_every_state_is_told_in_the_protocols_words() -> None:
    assert STATUS.keys() == set(State)
    assert set(STATUS.values()) == set(get_args(Status))
    assert {STATUS[state] for state in ENDED} == set(OUTCOMES)


LIVES: list[tuple[Role, list[Any]]] = [
    (Role.REQUESTER, ["offer", "accept", "status", "status", "result_completed", State.COMPLETED]),
    (Role.REQUESTER, ["offer", "reject", State.REJECTED]),
    (Role.REQUESTER, ["offer", "offer", "accept", State.ACCEPTED]),
    (Role.REQUESTER, ["offer", "accept", "cancel", "status", "result_cancelled", State.CANCELLED]),
    (Role.REQUESTER, ["offer", "cancel", "reject", State.CANCELLED]),
    (Role.REQUESTER, ["offer", "accept", "cancel", "result_completed", State.COMPLETED]),
    (Role.REQUESTER, ["offer", "accept", "silence", State.LOST]),
    (Role.REQUESTER, ["offer", "accept", "silence", "status", State.RUNNING]),
    (Role.REQUESTER, ["offer", "accept", "silence", "offer", "accept", State.ACCEPTED]),
    (Role.REQUESTER, ["offer", "accept", "silence", "force_error", State.FAILED]),
    (Role.REQUESTER, ["offer", "accept", "silence", "result_completed", State.COMPLETED]),
    (Role.REQUESTER, ["offer", "accept", "status", "timeout", State.TIMEOUT]),
    (Role.PROVIDER, ["offer", "accept", "start", "status", "result_completed", State.COMPLETED]),
    (Role.PROVIDER, ["offer", "accept", "offer", "start", "offer", State.RUNNING]),
    (Role.PROVIDER, ["offer", "reject", State.REJECTED]),
    (Role.PROVIDER, ["offer", "accept", "start", "cancel", "result_cancelled", State.CANCELLED]),
    (Role.PROVIDER, ["offer", "cancel", "result_cancelled", State.CANCELLED]),
    (Role.PROVIDER, ["offer", "accept", "start", "result_timeout", State.TIMEOUT]),
]


@pytest.mark.parametrize(("role", "life"), LIVES, ids=lambda value: "-".join(map(str, value)) if value else "")
def test_a_life_ends_where_the_table_says(role: Role, life: list[Any]) -> None:
    state: State | None = None
    for happening in life[:-1]:
        state = move(role, state, happening)
    assert state is life[-1]


@pytest.mark.parametrize(
    ("role", "state", "happening"),
    [
        (Role.REQUESTER, None, "accept"),
        (Role.REQUESTER, State.ACCEPTED, "reject"),
        (Role.REQUESTER, State.COMPLETED, "result_failed"),
        (Role.REQUESTER, State.RUNNING, "force_error"),
        (Role.PROVIDER, None, "cancel"),
        (Role.PROVIDER, State.OFFERED, "result_completed"),
        (Role.PROVIDER, State.CANCELLED, "offer"),
    ],
)
def test_a_move_that_is_not_in_the_table_is_refused(role: Role, state: State | None, happening: str) -> None:
    with pytest.raises(Conflict, match=happening):
        move(role, state, happening)
