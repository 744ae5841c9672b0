"""The states of a delegation on either side, and every move between them, as one table.

The table is the only place that says what may follow what; who asks `move` for anything else is told that it cannot
happen. Nothing leaves a state in which a delegation has ended. A requester that has heard nothing for too long holds a
delegation as `lost`: whether it is offered again or given up is for the operator, or for a setting made by one, to say.
"""

from __future__ import annotations

import enum
from typing import Final

from covenant.model.delegation import Outcome, Status
from covenant.model.errors import Conflict


class Role(enum.StrEnum):
    REQUESTER = "requester"
    PROVIDER = "provider"


class State(enum.StrEnum):
    OFFERED = "offered"
    ACCEPTED = "accepted"
    RUNNING = "running"
    CANCELLING = "cancelling"
    """Asked to stop; the provider's last word is still to come."""
    LOST = "lost"
    """The provider has been silent beyond the bound. It may be heard of again."""
    REJECTED = "rejected"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"


OFFERED, ACCEPTED, RUNNING, CANCELLING, LOST, REJECTED, COMPLETED, FAILED, CANCELLED, TIMEOUT = State

ENDED: Final = frozenset({REJECTED, COMPLETED, FAILED, CANCELLED, TIMEOUT})
OUTCOMES: Final[dict[Outcome, State]] = {
    "completed": COMPLETED,
    "failed": FAILED,
    "cancelled": CANCELLED,
    "timeout": TIMEOUT,
}


def _results(*befores: State) -> dict[tuple[State | None, str], State]:
    """A result may come in each of these states: the other side's word is the end, whatever was missed before it."""
    return {(before, f"result_{outcome}"): after for before in befores for outcome, after in OUTCOMES.items()}


_REQUESTER: Final[dict[tuple[State | None, str], State]] = {
    (None, "offer"): OFFERED,
    (OFFERED, "offer"): OFFERED,
    (OFFERED, "accept"): ACCEPTED,
    (ACCEPTED, "accept"): ACCEPTED,
    (RUNNING, "accept"): RUNNING,
    (CANCELLING, "accept"): CANCELLING,
    (LOST, "accept"): ACCEPTED,
    (OFFERED, "reject"): REJECTED,
    (LOST, "reject"): REJECTED,
    (CANCELLING, "reject"): CANCELLED,
    (OFFERED, "status"): RUNNING,
    (ACCEPTED, "status"): RUNNING,
    (RUNNING, "status"): RUNNING,
    (CANCELLING, "status"): CANCELLING,
    (LOST, "status"): RUNNING,
    (OFFERED, "cancel"): CANCELLING,
    (ACCEPTED, "cancel"): CANCELLING,
    (RUNNING, "cancel"): CANCELLING,
    (CANCELLING, "cancel"): CANCELLING,
    (LOST, "cancel"): CANCELLING,
    (OFFERED, "silence"): LOST,
    (ACCEPTED, "silence"): LOST,
    (RUNNING, "silence"): LOST,
    (LOST, "offer"): OFFERED,
    (LOST, "force_error"): FAILED,
    (CANCELLING, "force_error"): CANCELLED,
    (OFFERED, "timeout"): TIMEOUT,
    (ACCEPTED, "timeout"): TIMEOUT,
    (RUNNING, "timeout"): TIMEOUT,
    **_results(OFFERED, ACCEPTED, RUNNING, CANCELLING, LOST),
}

_PROVIDER: Final[dict[tuple[State | None, str], State]] = {
    (None, "offer"): OFFERED,
    (OFFERED, "offer"): OFFERED,
    (ACCEPTED, "offer"): ACCEPTED,
    (RUNNING, "offer"): RUNNING,
    (CANCELLING, "offer"): CANCELLING,
    (OFFERED, "accept"): ACCEPTED,
    (OFFERED, "reject"): REJECTED,
    (ACCEPTED, "start"): RUNNING,
    (ACCEPTED, "status"): ACCEPTED,
    (RUNNING, "status"): RUNNING,
    (CANCELLING, "status"): CANCELLING,
    (OFFERED, "cancel"): CANCELLING,
    (ACCEPTED, "cancel"): CANCELLING,
    (RUNNING, "cancel"): CANCELLING,
    (CANCELLING, "cancel"): CANCELLING,
    **_results(ACCEPTED, RUNNING, CANCELLING),
}

# role -> (state before, what happens) -> state after. None is a delegation that this side has never heard of.
TRANSITIONS: Final = {Role.REQUESTER: _REQUESTER, Role.PROVIDER: _PROVIDER}

STATUS: Final[dict[State, Status]] = {
    OFFERED: "pending",
    ACCEPTED: "pending",
    RUNNING: "running",
    CANCELLING: "running",
    LOST: "running",
    REJECTED: "failed",
    COMPLETED: "completed",
    FAILED: "failed",
    CANCELLED: "cancelled",
    TIMEOUT: "timeout",
}
"""How each state is told in the protocol's six words."""


def move(role: Role, before: State | None, happening: str) -> State:
    after = TRANSITIONS[role].get((before, happening))
    if after is None:
        said = "unknown" if before is None else before.value
        raise Conflict("illegal_move", f"{happening} cannot happen to a delegation that is {said}")
    return after
