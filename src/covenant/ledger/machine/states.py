"""The states of a task in the ledger, and every move between them, as one table.

The table is the only place that says what may follow what: `evolve` looks moves up in it, `decide` asks it
before it proposes one, and the diagram in the documentation is drawn from it.
"""

from __future__ import annotations

import enum
from typing import Final


class State(enum.StrEnum):
    QUEUED = "queued"
    """Waiting for a holder."""
    LEASED = "leased"
    """One holder works on it."""
    PARKED = "parked"
    """Waiting, without a lease, for its next message, a signal or a moment."""
    FOLLOWING = "following"
    """The same work is under way for an earlier task; its result will be this one's too."""
    SETTLED = "settled"
    """Ended, once; the sender has not taken the result."""
    DRAINED = "drained"
    """Ended, and the sender has the result."""

    @property
    def wire_name(self) -> str:
        return _WIRE_NAMES[self]

    @classmethod
    def _missing_(cls, value: object) -> State | None:
        """Snapshots that were written before states had words of their own have the wire names."""
        return next((state for state, name in _WIRE_NAMES.items() if name == value), None)


QUEUED, LEASED, PARKED, FOLLOWING, SETTLED, DRAINED = State

# What the mailbox's answers, the metrics and the rows of the archive call a state.
_WIRE_NAMES: Final[dict[State, str]] = {
    QUEUED: "queued",
    LEASED: "in_flight",
    PARKED: "parked",
    FOLLOWING: "following",
    SETTLED: "result_pending",
    DRAINED: "resolved",
}

# (state before, event) -> state after. None is a task the ledger has never seen, or has left to the archive.
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
"""A settled task stays settled: nothing leaves these but a drain, and the return of what nobody was given by one."""
LIVE_NAMES: Final = tuple(state.wire_name for state in State if state not in FINISHED)
"""What a queue can be asked for."""
QUERY_STATES: Final[dict[str, State]] = {"done" if state is DRAINED else state.wire_name: state for state in State}
"""What a query calls a state. `done`: ended in whatever way, and nothing is left to be drained."""
STATE_FILTERS: Final[dict[str, State]] = {**QUERY_STATES, DRAINED.wire_name: DRAINED, DRAINED.value: DRAINED}
"""Every word for a state that the filters of HTTP, IPC, the library and the command line take."""
OUTCOME_FILTERS: Final[dict[str, str]] = {
    "completed": "completed",
    "failed": "failed",
    "canceled": "canceled",
    "cancelled": "canceled",
    "rejected": "rejected",
}
"""The same for how a task ended. A filter by state takes them as well."""
