"""Draws docs/states.md from the ledger's transition table. `make docs` runs it; a test compares."""

from __future__ import annotations

from pathlib import Path

from covenant.ledger.machine.states import TRANSITIONS, State

PAGE = Path(__file__).parent.parent / "docs" / "states.md"

INTRODUCTION = """# The states of a task

Drawn from the table in `covenant.ledger.machine.states` by `make docs`; a test fails when the two differ.
The ledger refuses every other event in a state.

"""

MEANINGS = {
    State.QUEUED: "waits for a holder",
    State.LEASED: "one holder works on it; its lease never expires",
    State.PARKED: "waits, without a lease, for its next message, a signal or a time",
    State.FOLLOWING: "an earlier task does the same work; this task gets the same result",
    State.SETTLED: "ended, once; the sender has not taken the result",
    State.DRAINED: "ended, and the sender has the result",
}


def page() -> str:
    arrows: dict[tuple[str, str], list[str]] = {}
    for (before, event), after in TRANSITIONS.items():
        arrows.setdefault((before.value if before else "[*]", after.value), []).append(event)
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    {before} --> {after}: {', '.join(events)}" for (before, after), events in arrows.items()]
    lines += [f"    {State.DRAINED.value} --> [*]", "```", ""]
    lines += ["| state | in answers and metrics | meaning |", "|---|---|---|"]
    lines += [f"| `{state.value}` | `{state.wire_name}` | {meaning} |" for state, meaning in MEANINGS.items()]
    lines += ["", "| before | event | after |", "|---|---|---|"]
    lines += [
        f"| {f'`{before.value}`' if before else 'unknown'} | `{event}` | `{after.value}` |"
        for (before, event), after in TRANSITIONS.items()
    ]
    return INTRODUCTION + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
