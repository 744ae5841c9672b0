"""Asking for the next tasks or results: what `a2a next` and `a2a results --next` have in common."""

from __future__ import annotations

from typing import Any

from covenant.cli.calling import Call
from covenant.cli.connection import ANSWER_S


def take(
    call: Call, kind: str, *, wait_ms: int | None, count: int | None, everyone: bool, request_id: str | None
) -> dict[str, Any]:
    """The daemon's answer, which may be as long in coming as it was told to wait."""
    return call.ask(
        kind,
        within_s=ANSWER_S + (wait_ms or 0) / 1000,
        wait_ms=wait_ms,
        max=count,
        request_id=request_id,
        scope="all" if everyone else None,
    )
