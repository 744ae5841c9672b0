"""Messages to a peer, searched for secrets before they leave: offers, rejects, status reports, cancels and results.

Only texts and values are searched; ids, numbers and signatures are not changed. A text is searched as a whole and cut
to its limit afterwards, since half a secret is not recognised. Signatures are made after redaction. Findings are
reported by path and kind, never by value. In the mode `block` an offer with a secret is refused; a report, a cancel and
a reject lose their texts; and a result says only that it was held back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from covenant.ledger.machine.peer_commands import PeerMessage
from covenant.model.content import Content
from covenant.model.errors import TooLarge
from covenant.model.peers.delegation import DelegationKey
from covenant.model.peers.delegation_messages import (
    CONTEXT_CHARS_MAX,
    RESULT_CHARS_MAX,
    TASK_CHARS_MAX,
    DelegationCancel,
    DelegationOffer,
    DelegationReject,
    DelegationResult,
    StatusReport,
    TranscriptEntry,
)
from covenant.peers.peer_settings import Redaction
from covenant.wire import peers as wire
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


class Redacted(NamedTuple, Generic[M]):
    """`message` may leave. `findings`: what was in it before, or (mode `warn`) still is."""

    message: M
    findings: tuple[SecretFinding, ...] = ()

    @property
    def found(self) -> int:
        """How many secrets."""
        return sum(each.count for each in self.findings)


def describe_findings(findings: tuple[SecretFinding, ...]) -> str:
    """For people: what was found and where."""
    return ", ".join(f"{each.kind} at {each.path or '/'}" for each in findings[:10])


def log_findings(key: DelegationKey, findings: tuple[SecretFinding, ...]) -> None:
    """In the log, for whoever runs this instance."""
    if findings:
        log.warning(
            "peer.secrets_found",
            extra={"peer": key.peer, "offer_id": key.offer_id, "found": describe_findings(findings)},
        )


async def redact_message(
    clear: Callable[[M, Redaction], Redacted[M]], message: M, mode: Redaction, characters: int
) -> Redacted[M]:
    """One of the functions below, in a thread where there is much to search. The thread lets others run in between."""
    if mode == "off" or characters < HEAVY_CHARS:
        return clear(message, mode)
    return await asyncio.to_thread(clear, message, mode)


def redact_offer(offer: DelegationOffer, mode: Redaction) -> Redacted[DelegationOffer]:
    """`secret_found`, if it is not to be sent."""
    if mode == "off":
        return Redacted(offer)
    words = {"task": offer.task, "context": offer.context, "parts": msgspec.to_builtins(offer.parts)}
    found = redaction.redact(words, mode)
    if found.blocked:
        raise redaction.refuse_secrets(found)
    if found.value is words:
        return Redacted(offer, found.findings)
    clean = found.value
    if len(clean["task"]) > TASK_CHARS_MAX or len(clean["context"] or "") > CONTEXT_CHARS_MAX:
        raise TooLarge("offer_too_large", "without the secrets that were found in it, it is too long to be offered")
    parts = msgspec.convert(clean["parts"], tuple[Content, ...])
    return Redacted(replace(offer, task=clean["task"], context=clean["context"], parts=parts), found.findings)


def redact_reason(message: R, mode: Redaction) -> Redacted[R]:
    if mode == "off":
        return Redacted(replace(message, reason=message.reason[:REASON_CHARS_MAX]))
    found = redaction.redact({"reason": message.reason}, mode)
    reason = "" if found.blocked else found.value["reason"][:REASON_CHARS_MAX]
    return Redacted(replace(message, reason=reason), found.findings)


def redact_report(report: StatusReport, mode: Redaction) -> Redacted[StatusReport]:
    if report.message is None:
        return Redacted(report)
    if mode == "off":
        return Redacted(replace(report, message=report.message[:MESSAGE_CHARS_MAX]))
    found = redaction.redact({"message": report.message}, mode)
    message = None if found.blocked else found.value["message"][:MESSAGE_CHARS_MAX]
    return Redacted(replace(report, message=message), found.findings)


def redact_result(result: DelegationResult, mode: Redaction) -> Redacted[DelegationResult]:
    """Without its transcript, which is cleared by itself."""
    if mode == "off":
        return Redacted(_cut(result))
    words = {"result": result.result, "error": result.error, "parts": msgspec.to_builtins(result.parts)}
    found = redaction.redact(words, mode)
    if found.blocked:
        error = f"the result was held back, since it seems to hold secrets: {describe_findings(found.findings)}"
        held = replace(result, status="failed", result=None, parts=(), error=error, error_code=HELD_BACK)
        return Redacted(_cut(held), found.findings)
    if found.value is words:
        return Redacted(_cut(result), found.findings)
    clean: dict[str, Any] = found.value
    parts = msgspec.convert(clean["parts"], tuple[Content, ...])
    return Redacted(_cut(replace(result, result=clean["result"], error=clean["error"], parts=parts)), found.findings)


def _cut(result: DelegationResult) -> DelegationResult:
    text, error = result.result, result.error
    if len(text or "") <= RESULT_CHARS_MAX and len(error or "") <= ERROR_CHARS_MAX:
        return result
    return replace(result, result=text and text[:RESULT_CHARS_MAX], error=error and error[:ERROR_CHARS_MAX])


def redact_transcript(
    transcript: tuple[TranscriptEntry, ...], mode: Redaction
) -> Redacted[tuple[TranscriptEntry, ...]]:
    """In the mode `block` lines are cleared too: their root leaves in any case."""
    if mode == "off":
        return Redacted(transcript)
    words = [{name: getattr(line, name) for name in LINE_MEMBERS} for line in transcript]
    found = redaction.redact(words, "warn" if mode == "warn" else "redact")
    if found.value is words:
        return Redacted(transcript, found.findings)
    lines = (
        replace(line, **{name: clean[name] and clean[name][:RESULT_CHARS_MAX] for name in LINE_MEMBERS})
        for line, clean in zip(transcript, found.value, strict=True)
    )
    return Redacted(tuple(lines), found.findings)


def outgoing(message: Any, *, latest: bool = False) -> PeerMessage:
    return PeerMessage(typ=wire.type_of(message), body=msgspec.Raw(wire.encode(message)), latest=latest)
