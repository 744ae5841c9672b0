"""The states of a task in the ledger, and every move between them, as one table.

Only this table says which state may follow which: `evolve` looks moves up in it, and the diagram in the documentation
is drawn from it.
"""

from __future__ import annotations

import enum
from typing import Final

OUTCOME_FILTERS: Final[dict[str, str]] = {
    "completed": "completed",
    "failed": "failed",
    "canceled": "canceled",
    "cancelled": "canceled",
    "rejected": "rejected",
}
"""Every name of an outcome that filters accept, and the outcome itself. A filter by state accepts these names, too."""


class State(enum.StrEnum):
    QUEUED = "queued"
    """Waiting for a holder."""
    LEASED = "leased"
    """One holder works on the task."""
    PARKED = "parked"
    """The task waits, without a lease, for its next message, a signal or a time."""
    FOLLOWING = "following"
    """An earlier task does the same work; this task gets the same result."""
    SETTLED = "settled"
    """The task has ended; its sender has not taken the result."""
    DRAINED = "drained"
    """The task has ended, and its sender has the result."""

    @property
    def wire_name(self) -> str:
        return _WIRE_NAMES[self]

    @classmethod
    def _missing_(cls, value: object) -> State | None:
        """Old snapshots have the wire names instead of the states' own."""
        return next((state for state, name in _WIRE_NAMES.items() if name == value), None)


QUEUED, LEASED, PARKED, FOLLOWING, SETTLED, DRAINED = State

# The names of states in the mailbox's answers, the metrics and the rows of the archive.
_WIRE_NAMES: Final[dict[State, str]] = {
    QUEUED: "queued",
    LEASED: "in_flight",
    PARKED: "parked",
    FOLLOWING: "following",
    SETTLED: "result_pending",
    DRAINED: "resolved",
}

# Maps (state before, event) -> state after. State None: the ledger has never seen the task, or left it to the archive.
TRANSITIONS: Final[dict[tuple[State | None, str], State]] = {
    (None, "task_sent"): QUEUED,
    (None, "task_followed"): FOLLOWING,
    (FOLLOWING, "task_promoted"): QUEUED,
    (QUEUED, "task_leased"): LEASED,
    (LEASED, "lease_renewed"): LEASED,
    (LEASED, "lease_released"): QUEUED,
    (LEASED, "lease_interrupted"): LEASED,
    (LEASED, "task_updated"): LEASED,
    (LEASED, "task_requeued"): QUEUED,
    (LEASED, "task_parked"): PARKED,
    (PARKED, "task_continued"): QUEUED,
    (QUEUED, "task_suspended"): PARKED,
    (LEASED, "task_suspended"): PARKED,
    (PARKED, "task_resumed"): QUEUED,
    (QUEUED, "signal_kept"): QUEUED,
    (LEASED, "signal_kept"): LEASED,
    (PARKED, "signal_kept"): PARKED,
    (LEASED, "signal_taken"): LEASED,
    (QUEUED, "message_kept"): QUEUED,
    (LEASED, "message_kept"): LEASED,
    (PARKED, "message_kept"): PARKED,
    (QUEUED, "turn_ended"): QUEUED,
    (LEASED, "turn_ended"): QUEUED,
    (PARKED, "turn_ended"): QUEUED,
    (QUEUED, "task_settled"): SETTLED,
    (LEASED, "task_settled"): SETTLED,
    (PARKED, "task_settled"): SETTLED,
    (FOLLOWING, "task_settled"): SETTLED,
    (SETTLED, "result_drained"): DRAINED,
    (DRAINED, "result_returned"): SETTLED,
    (None, "result_returned"): SETTLED,
    (QUEUED, "task_closed"): DRAINED,
    (LEASED, "task_closed"): DRAINED,
    (PARKED, "task_closed"): DRAINED,
    (FOLLOWING, "task_closed"): DRAINED,
}

FINISHED: Final = frozenset({SETTLED, DRAINED})
"""A settled task stays settled: only a drain follows, and the return of a result that its caller never got."""
LIVE_NAMES: Final = tuple(state.wire_name for state in State if state not in FINISHED)
"""The states that a queue can be filtered by."""
QUERY_STATES: Final[dict[str, State]] = {"done" if state is DRAINED else state.wire_name: state for state in State}
"""The names of states in a query. `done`: the task has ended, and no result is left to drain."""
STATE_FILTERS: Final[dict[str, State]] = {**QUERY_STATES, DRAINED.wire_name: DRAINED, DRAINED.value: DRAINED}
"""Every name of a state that the filters of HTTP, IPC, the library and the command line accept."""
