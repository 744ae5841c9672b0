"""Usage: the resources that work took, as named amounts that can be added. The only reader of usage reports.

Every form of report is normalised to `input_tokens`, `output_tokens` and `tokens` (the total, never less than the other
two together); other amounts keep their names. Negative numbers, NaN, texts and booleans are ignored; an amount above
`AMOUNT_MAX` counts as that. So sums stay exact, and no report lowers one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

AMOUNT_MAX: Final = 10**15
"""The limit of one amount and of a sum. It is exact as a float and in JSON."""
NAMES_MAX: Final = 32
"""The most names of amounts in one report, besides those of tokens."""
NAME_CHARS_MAX: Final = 64
NESTED_MAX: Final = 3
"""The deepest nesting of a report in metadata."""

USAGE: Final = "usage"
"""Key in a result's metadata: the usage of its task."""
TOKENS: Final = "tokens"
INPUT: Final = "input_tokens"
OUTPUT: Final = "output_tokens"
_COUNTED: Final = frozenset({TOKENS, INPUT, OUTPUT})
_ALIASES: Final = {
    "prompt_tokens": INPUT,
    "inputTokens": INPUT,
    "promptTokens": INPUT,
    "x-arbiter.input_tokens": INPUT,
    "completion_tokens": OUTPUT,
    "outputTokens": OUTPUT,
    "completionTokens": OUTPUT,
    "x-arbiter.output_tokens": OUTPUT,
    "promptTokenCount": INPUT,
    "prompt_token_count": INPUT,
    "candidatesTokenCount": OUTPUT,
    "candidates_token_count": OUTPUT,
    "total_tokens": TOKENS,
    "totalTokens": TOKENS,
    "totalTokenCount": TOKENS,
    "total_token_count": TOKENS,
}
_REPORT_KEYS: Final = (
    "covenant.usage",
    "usage",
    "token_usage",
    "tokenUsage",
    "usage_metadata",
    "usageMetadata",
    "adk_usage_metadata",
)
"""Keys under which metadata may hold a report. The first report that counts tokens is used."""
_FLAT_KEYS: Final = frozenset({*_COUNTED, *_ALIASES})
"""Keys that are read where metadata is itself a report. All its other keys are ignored, numbers or not."""


def read_usage(reported: Any) -> dict[str, float]:
    """Normalises a report. The result is empty if `reported` is no report."""
    found: dict[str, float] = {}
    if not isinstance(reported, Mapping):
        return found
    for name, amount in reported.items():
        if not isinstance(name, str) or len(name) > NAME_CHARS_MAX or (counted := _amount(amount)) is None:
            continue
        known = _ALIASES.get(name, name)
        if _has_room(found, known):
            # The same amount under two names was used once.
            found[known] = max(found.get(known, 0), counted)
    both = found.get(INPUT, 0) + found.get(OUTPUT, 0)
    if both > found.get(TOKENS, 0):
        found[TOKENS] = min(both, AMOUNT_MAX)
    return found


def usage_in(metadata: Any, depth: int = NESTED_MAX) -> dict[str, float]:
    """The usage report in the metadata of a result or an answer: nested under a key, or among the other keys."""
    if not isinstance(metadata, Mapping):
        return {}
    other: dict[str, float] = {}
    for name in _REPORT_KEYS:
        within = metadata.get(name)
        if isinstance(within, Mapping):
            found = read_usage(within) if depth <= 1 or not _reports(within) else usage_in(within, depth - 1)
            if TOKENS in found:
                return found
            other = other or found
    return read_usage({name: amount for name, amount in metadata.items() if name in _FLAT_KEYS}) or other


def _reports(metadata: Mapping[Any, Any]) -> bool:
    return any(isinstance(metadata.get(name), Mapping) for name in _REPORT_KEYS)


def add_usage(total: dict[str, float], amounts: Mapping[str, float]) -> None:
    """Adds `amounts` to `total` in place. Both are normalised, and so is the sum."""
    for name, amount in amounts.items():
        if _has_room(total, name):
            total[name] = min(total.get(name, 0) + amount, AMOUNT_MAX)


def larger_usage(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """The larger amount of each name in two reports on the same work. Both are normalised, and so is the result."""
    return read_usage({name: max(one.get(name, 0), other.get(name, 0)) for name in (*one, *other)})


def usage_beyond(report: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """The amounts that a report adds to those counted `before`. Both are normalised.

    A report that has at least all of `before` is a total, and adds the difference. Any other report is separate, and
    adds all its amounts.
    """
    if any(report.get(name, 0) < amount for name, amount in before.items()):
        return dict(report)
    more = {name: amount - before.get(name, 0) for name, amount in report.items()}
    return {name: amount for name, amount in more.items() if amount > 0}


def _has_room(found: Mapping[str, float], name: str) -> bool:
    """Token counts always have room, however many other names there are."""
    return name in found or name in _COUNTED or len(found) < NAMES_MAX


def tokens_of(usage: Mapping[str, float]) -> float:
    return read_usage(usage).get(TOKENS, 0)


def _amount(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        return None
    return min(value, AMOUNT_MAX)
