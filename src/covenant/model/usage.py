"""Usage: what work took, by name, in numbers that can be added up."""

from __future__ import annotations

from typing import Any


def numbers(usage: Any) -> dict[str, float]:
    """What can be added up of what somebody says."""
    if not isinstance(usage, dict):
        return {}
    return {
        name: amount
        for name, amount in usage.items()
        if isinstance(name, str) and isinstance(amount, int | float) and not isinstance(amount, bool)
    }


def tokens_of(usage: dict[str, float]) -> float:
    """All of them: as they were counted, or those that went in and came out."""
    if "tokens" in usage:
        return usage["tokens"]
    return usage.get("input_tokens", 0) + usage.get("output_tokens", 0)
