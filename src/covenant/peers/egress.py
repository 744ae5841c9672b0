"""What leaves for a peer, searched for secrets first: what is offered, rejected, reported, cancelled and answered.

Only words and values are looked at; ids, numbers and signatures are not changed. Words are searched whole and cut to
their limits only then: half a secret looks like none. Whoever signs something signs what was cleared. What was found is
told by path and kind, never as what it was. In the mode `block` an offer with a secret is refused; a report, a cancel
and a reject go without their words; and of a result nothing goes but that it was held back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from covenant.model.content import Content
from covenant.model.peers.delegation import DelegationKey
from covenant.model.peers.delegation_messages import (
    CONTEXT_CHARS_MAX,
    RESULT_CHARS_MAX,
    TASK_CHARS_MAX,
    DelegationCancel,
    DelegationResult,
    DelegationOffer,
    DelegationReject,
    StatusReport,
    TranscriptEntry,
)
from covenant.model.errors import TooLarge
from covenant.peers.settings import Redaction
from covenant.wire import redaction
from covenant.wire.redaction import SecretFinding

HELD_BACK: Final = "secret_found"
MESSAGE_CHARS_MAX: Final = 4_000
ERROR_CHARS_MAX: Final = 10_000
REASON_CHARS_MAX: Final = 500
HEAVY_CHARS: Final = 64 * 1024
"""From here on words are searched in a thread: the loop has others to serve."""
LINE_MEMBERS: Final = ("content", "tool_calls", "tool_result")

M = TypeVar("M")
R = TypeVar("R", DelegationCancel, DelegationReject)
replace = msgspec.structs.replace
log = logging.getLogger(__name__)


class Cleared(NamedTuple, Generic[M]):
    """`message` may leave. `findings`: what was in it before, or (mode `warn`) still is."""

    message: M
    findings: tuple[SecretFinding, ...] = ()

    @property
    def found(self) -> int:
        """How many secrets."""
        return sum(each.count for each in self.findings)


def told(findings: tuple[SecretFinding, ...]) -> str:
    """For people: what was found and where."""
    return ", ".join(f"{each.kind} at {each.path or '/'}" for each in findings[:10])


def note(key: DelegationKey, findings: tuple[SecretFinding, ...]) -> None:
    """In the log, for whoever runs this instance."""
    if findings:
        log.warning("peer.secrets_found", extra={"peer": key.peer, "offer_id": key.offer_id, "found": told(findings)})


async def clear_beside(
    clear: Callable[[M, Redaction], Cleared[M]], message: M, mode: Redaction, characters: int
) -> Cleared[M]:
    """One of the functions below, in a thread where there is much to search. The thread lets others run in between."""
    if mode == "off" or characters < HEAVY_CHARS:
        return clear(message, mode)
    return await asyncio.to_thread(clear, message, mode)


def clear_offer(offer: DelegationOffer, mode: Redaction) -> Cleared[DelegationOffer]:
    """`secret_found`, if it is not to be sent."""
    if mode == "off":
        return Cleared(offer)
    words = {"task": offer.task, "context": offer.context, "parts": msgspec.to_builtins(offer.parts)}
    found = redaction.redact(words, mode)
    if found.blocked:
        raise redaction.refuse_secrets(found)
    if found.value is words:
        return Cleared(offer, found.findings)
    clean = found.value
    if len(clean["task"]) > TASK_CHARS_MAX or len(clean["context"] or "") > CONTEXT_CHARS_MAX:
        raise TooLarge("offer_too_large", "without the secrets that were found in it, it is too long to be offered")
    parts = msgspec.convert(clean["parts"], tuple[Content, ...])
    return Cleared(replace(offer, task=clean["task"], context=clean["context"], parts=parts), found.findings)


def clear_reason(message: R, mode: Redaction) -> Cleared[R]:
    if mode == "off":
        return Cleared(replace(message, reason=message.reason[:REASON_CHARS_MAX]))
    found = redaction.redact({"reason": message.reason}, mode)
    reason = "" if found.blocked else found.value["reason"][:REASON_CHARS_MAX]
    return Cleared(replace(message, reason=reason), found.findings)


def clear_report(report: StatusReport, mode: Redaction) -> Cleared[StatusReport]:
    if report.message is None:
        return Cleared(report)
    if mode == "off":
        return Cleared(replace(report, message=report.message[:MESSAGE_CHARS_MAX]))
    found = redaction.redact({"message": report.message}, mode)
    message = None if found.blocked else found.value["message"][:MESSAGE_CHARS_MAX]
    return Cleared(replace(report, message=message), found.findings)


def clear_result(result: DelegationResult, mode: Redaction) -> Cleared[DelegationResult]:
    """Without its transcript, which is cleared by itself."""
    if mode == "off":
        return Cleared(_cut(result))
    words = {"result": result.result, "error": result.error, "parts": msgspec.to_builtins(result.parts)}
    found = redaction.redact(words, mode)
    if found.blocked:
        error = f"the result was held back, since it seems to hold secrets: {told(found.findings)}"
        held = replace(result, status="failed", result=None, parts=(), error=error, error_code=HELD_BACK)
        return Cleared(_cut(held), found.findings)
    if found.value is words:
        return Cleared(_cut(result), found.findings)
    clean: dict[str, Any] = found.value
    parts = msgspec.convert(clean["parts"], tuple[Content, ...])
    return Cleared(_cut(replace(result, result=clean["result"], error=clean["error"], parts=parts)), found.findings)


def _cut(result: DelegationResult) -> DelegationResult:
    text, error = result.result, result.error
    if len(text or "") <= RESULT_CHARS_MAX and len(error or "") <= ERROR_CHARS_MAX:
        return result
    return replace(result, result=text and text[:RESULT_CHARS_MAX], error=error and error[:ERROR_CHARS_MAX])


def clear_transcript(transcript: tuple[TranscriptEntry, ...], mode: Redaction) -> Cleared[tuple[TranscriptEntry, ...]]:
    """In the mode `block` lines are cleared too: their root leaves in any case."""
    if mode == "off":
        return Cleared(transcript)
    words = [{name: getattr(line, name) for name in LINE_MEMBERS} for line in transcript]
    found = redaction.redact(words, "warn" if mode == "warn" else "redact")
    if found.value is words:
        return Cleared(transcript, found.findings)
    lines = (
        replace(line, **{name: clean[name] and clean[name][:RESULT_CHARS_MAX] for name in LINE_MEMBERS})
        for line, clean in zip(transcript, found.value, strict=True)
    )
    return Cleared(tuple(lines), found.findings)
