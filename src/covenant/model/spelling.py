"""Words that somebody got almost right: which of the known ones was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

_LIKENESS_MIN: Final = 0.6
_LENGTH_MAX: Final = 256
"""A longer word is nobody's slip, and comparing it would cost more than it is worth."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """What a refusal adds: `; did you mean max_uses?`, or nothing where no known word is near."""
    if len(word) > _LENGTH_MAX:
        return ""
    found = difflib.get_close_matches(word, tuple(known), n=1, cutoff=_LIKENESS_MIN)
    return f"; did you mean {found[0]}?" if found else ""
