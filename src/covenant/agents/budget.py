"""A budget: how many tokens one job may use, with all that it delegates. Who uses more is stopped, and has failed."""

from __future__ import annotations

from typing import Any

from covenant.model.correspondence import BUDGET_EXCEEDED, budget_of
from covenant.model.task import Task
from covenant.model.usage import tokens_of


class Budget:
    __slots__ = ("spent", "tokens")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.spent = 0.0

    @property
    def left(self) -> int:
        """For what is delegated: at least one, since whoever has none left is stopped."""
        return max(1, int(self.tokens - self.spent))

    def take(self, amounts: dict[str, float], notes: dict[str, Any]) -> str | None:
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
