"""What one job uses, with all that it delegates, and the budget for it. Who uses more than that is stopped.

`Spending` writes into the notes of its job, which become the metadata of the result: `usage`, and as `delegated` how
much of that others have used; with a budget also `spent`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from covenant.model.peers.delegation import BUDGET_EXCEEDED, budget_of
from covenant.model.task import Task
from covenant.model.usage import add_usage, read_usage, tokens_of

if TYPE_CHECKING:
    from covenant.agents.job import Job

USAGE: Final = "usage"
DELEGATED: Final = "delegated"
"""In a result's metadata, beside `usage`: how much of that was used by what the task had delegated."""


class Budget:
    __slots__ = ("spent", "tokens")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.spent = 0.0

    @property
    def left(self) -> int:
        """For what is delegated: at least one, since whoever has none left is stopped."""
        return max(1, int(self.tokens - self.spent))

    def take(self, amounts: Mapping[str, float], notes: dict[str, Any]) -> str | None:
        """Why the job is over, if it is by this; said once. `notes` are the job's, for its result."""
        notes["spent"] = self.spent = self.spent + tokens_of(amounts)
        if self.spent <= self.tokens or notes.get("code") == BUDGET_EXCEEDED:
            return None
        notes["code"] = BUDGET_EXCEEDED
        return f"{BUDGET_EXCEEDED}: {self.spent:.0f} tokens were used, and {self.tokens} were agreed"


def budgeted(task: Task) -> Budget | None:
    """None where nobody has said how much: as much as it likes."""
    tokens = budget_of(task)
    return Budget(tokens) if tokens is not None else None


class Spending:
    """`running`: what is being used just now, and is not in the notes yet."""

    __slots__ = ("_notes", "budget", "running")

    def __init__(self, task: Task, notes: dict[str, Any]) -> None:
        self._notes = notes
        self.budget = budgeted(task)
        self.running: Callable[[], Mapping[str, float]] | None = None

    def add(self, amounts: Mapping[str, Any], *, delegated: bool = False) -> str | None:
        """Why the job is over, if it is by this. `delegated`: others used it, whom the job had asked."""
        counted = read_usage(amounts)
        if not counted:
            return None
        for name in (USAGE, DELEGATED) if delegated else (USAGE,):
            add_usage(self._notes.setdefault(name, {}), counted)
        return self.budget.take(counted, self._notes) if self.budget is not None else None

    def end_running(self) -> dict[str, float]:
        """What `running` came to, for `add`; it is counted no other way from now on."""
        running, self.running = self.running, None
        return read_usage(running()) if running is not None else {}

    @property
    def usage(self) -> dict[str, float]:
        """All of it, as far as it is known now."""
        used = dict(self._notes.get(USAGE, {}))
        if self.running is not None:
            add_usage(used, read_usage(self.running()))
        return used

    @property
    def told(self) -> dict[str, Any] | None:
        """For the metadata of a result that somebody else writes; None if nothing was used."""
        used = self.usage
        if not used:
            return None
        delegated = self._notes.get(DELEGATED)
        return {USAGE: used, DELEGATED: dict(delegated)} if delegated else {USAGE: used}


async def recall_usage(job: Job) -> None:
    """What earlier turns used counts on: usage and limits are a task's, and not a turn's."""
    used = read_usage(await job.noted(USAGE))
    if used:
        delegated = read_usage(await job.noted(DELEGATED))
        job.notes[USAGE] = used
        if delegated:
            job.notes[DELEGATED] = delegated
