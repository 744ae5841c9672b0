"""Messages to a peer, searched for secrets before they leave: offers, rejects, reports, answers, cancels and results.

Only texts and values are searched; ids, numbers and signatures are not changed. A text is searched as a whole and cut
to its limit afterwards, since half a secret is not recognised. Signatures are made after redaction. Findings are
reported by path and kind, never by value. In the mode `block` an offer or an answer with a secret is refused; a report,
a cancel and a reject lose their texts; and a result says only that it was held back.
"""

from __future__ import annotations

import asyncio
import logging
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
    DelegationInput,
    DelegationMessage,
    DelegationOffer,
    DelegationReject,
    DelegationResult,
    StatusReport,
    TranscriptEntry,
)
from covenant.peers.peer_settings import Redaction
from covenant.wire import peers as wire
from covenant.wire import redaction
from covenant.wire.redaction import SecretFinding, describe_findings

HELD_BACK: Final = "secret_found"
MESSAGE_CHARS_MAX: Final = 4_000
ERROR_CHARS_MAX: Final = 10_000
REASON_CHARS_MAX: Final = 500
HEAVY_CHARS: Final = 64 * 1024
"""Texts of this length or more are searched in a thread."""
TEXTS: Final[dict[type[msgspec.Struct], dict[str, int]]] = {
    DelegationOffer: {"task": TASK_CHARS_MAX, "context": CONTEXT_CHARS_MAX},
    DelegationReject: {"reason": REASON_CHARS_MAX},
    DelegationCancel: {"reason": REASON_CHARS_MAX},
    StatusReport: {"message": MESSAGE_CHARS_MAX},
    DelegationInput: {"text": TASK_CHARS_MAX},
    DelegationResult: {"result": RESULT_CHARS_MAX, "error": ERROR_CHARS_MAX},
    TranscriptEntry: dict.fromkeys(("content", "tool_calls", "tool_result"), RESULT_CHARS_MAX),
}
"""The texts of each message, and their limits. If a message has `parts`, these are searched, too."""

M = TypeVar("M")
D = TypeVar("D", bound=DelegationMessage)
replace = msgspec.structs.replace
log = logging.getLogger(__name__)


class Redacted(NamedTuple, Generic[M]):
    """`message` may be sent. `findings`: the secrets that were in it, or (mode `warn`) still are."""

    message: M
    findings: tuple[SecretFinding, ...] = ()

    @property
    def found(self) -> int:
        return sum(each.count for each in self.findings)


def log_findings(key: DelegationKey, findings: tuple[SecretFinding, ...]) -> None:
    if findings:
        log.warning(
            "peer.secrets_found",
            extra={"peer": key.peer, "offer_id": key.offer_id, "found": describe_findings(findings)},
        )


async def redact_aside(message: D, mode: Redaction, key: DelegationKey | None = None) -> Redacted[D]:
    """`redact`, in a thread if there is much to search. With `key`, findings are logged."""
    texts = (getattr(message, name) or "" for name in TEXTS[type(message)])
    if mode == "off" or (not getattr(message, "parts", ()) and sum(map(len, texts)) < HEAVY_CHARS):
        cleared = redact(message, mode)
    else:
        cleared = await asyncio.to_thread(redact, message, mode)
    if key is not None:
        log_findings(key, cleared.findings)
    return cleared


def redact(message: D, mode: Redaction) -> Redacted[D]:
    """Raises if the message must not be sent.

    A result comes without its transcript, which `redact_transcript` searches.
    """
    limits = TEXTS[type(message)]
    words = {name: getattr(message, name) for name in limits}
    if isinstance(message, DelegationOffer | DelegationResult | StatusReport | DelegationInput):
        words["parts"] = msgspec.to_builtins(message.parts)
    if mode == "off":
        return Redacted(_with_texts(message, words, limits))
    found = redaction.redact(words, mode)
    if found.blocked:
        return Redacted(_held_back(message, found), found.findings)
    clean: dict[str, Any] = found.value
    if clean is not words and "parts" in clean:
        message = replace(message, parts=msgspec.convert(clean["parts"], tuple[Content, ...]))
    return Redacted(_with_texts(message, clean, limits), found.findings)


def _with_texts(message: D, clean: dict[str, Any], limits: dict[str, int]) -> D:
    if isinstance(message, DelegationOffer | DelegationInput) and any(
        len(clean[name] or "") > most for name, most in limits.items()
    ):
        raise TooLarge("offer_too_large", "the message to the peer is too long, perhaps because secrets were replaced")
    return replace(message, **_cut(clean, limits))


def _cut(texts: dict[str, Any], limits: dict[str, int]) -> dict[str, Any]:
    return {name: texts[name] and texts[name][:most] for name, most in limits.items()}


def _held_back(message: D, found: redaction.Redaction) -> D:
    match message:
        case DelegationOffer() | DelegationInput():
            raise redaction.refuse_secrets(found)
        case DelegationResult():
            error = f"the result was held back, since it seems to hold secrets: {describe_findings(found.findings)}"
            error = error[:ERROR_CHARS_MAX]
            return replace(message, status="failed", result=None, parts=(), error=error, error_code=HELD_BACK)
        case StatusReport():
            return replace(message, message=None, parts=())
        case _:
            return replace(message, reason="")


def redact_transcript(
    transcript: tuple[TranscriptEntry, ...], mode: Redaction
) -> Redacted[tuple[TranscriptEntry, ...]]:
    """In the mode `block` lines are cleared, too, since their root is sent in any case."""
    if mode == "off":
        return Redacted(transcript)
    limits = TEXTS[TranscriptEntry]
    words = [{name: getattr(line, name) for name in limits} for line in transcript]
    found = redaction.redact(words, "warn" if mode == "warn" else "redact")
    if found.value is words:
        return Redacted(transcript, found.findings)
    lines = (replace(line, **_cut(clean, limits)) for line, clean in zip(transcript, found.value, strict=True))
    return Redacted(tuple(lines), found.findings)


def outgoing(message: Any, *, latest: bool = False) -> PeerMessage:
    return PeerMessage(typ=wire.type_of(message), body=msgspec.Raw(wire.encode(message)), latest=latest)
