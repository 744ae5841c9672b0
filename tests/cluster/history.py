"""What clients asked and what they were told: each operation with when it was called and when it returned."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

ACKNOWLEDGED: Final = "acknowledged"
REFUSED: Final = "refused"
UNKNOWN: Final = "unknown"
"""No answer, or one that says that nobody knows."""


@dataclass(slots=True)
class Operation:
    kind: str
    node: str
    about: str
    """The task, the request or whatever it is about."""
    called_s: float
    returned_s: float = 0.0
    outcome: str = UNKNOWN
    answer: dict[str, Any] = field(default_factory=dict)


class History:
    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.faults: Counter[str] = Counter()
        self.violations: list[str] = []

    @contextmanager
    def operation(self, kind: str, node: str, about: str) -> Iterator[Operation]:
        operation = Operation(kind, node, about, time.monotonic())
        self.operations.append(operation)
        try:
            yield operation
        finally:
            operation.returned_s = time.monotonic()

    def of(self, kind: str, outcome: str = ACKNOWLEDGED) -> Iterator[Operation]:
        return (each for each in self.operations if each.kind == kind and each.outcome == outcome)

    def violated(self, rule: str, detail: str) -> None:
        self.violations.append(f"{rule}: {detail}")

    def summary(self) -> str:
        kinds = Counter((each.kind, each.outcome) for each in self.operations)
        lines = [f"  {kind} {outcome}: {count}" for (kind, outcome), count in sorted(kinds.items())]
        refusals = Counter(str(each.answer)[:150] for each in self.operations if each.outcome == REFUSED)
        lines += [f"  refused {count} times: {said}" for said, count in refusals.most_common(8)]
        faults = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        return "\n".join(
            [
                *lines,
                f"  faults: {faults or 'none'}",
                *(f"  VIOLATION {each}" for each in self.violations[:20]),
                f"{len(self.operations)} operations, {self.faults.total()} faults, {len(self.violations)} violations",
            ]
        )
