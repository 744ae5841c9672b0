"""A question that a turn asks a person, and the decoding of the answer.

An approval is answered by a decision: a data part with the key `covenant.approval` (`approved`, and optionally `reason`
and `id`), or a text that is exactly one of a few words. Any other message decides nothing.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Final, Literal

import msgspec

from covenant.model.content import Content, Json, Text

QuestionKind = Literal["approval", "input"]
QUESTION: Final = "covenant.question"
"""Key in the metadata of the status that asks: `id`, `kind`, and for a tool call `tool` and `arguments`."""
APPROVAL: Final = "covenant.approval"
REASON_CHARS_MAX: Final = 2_000
QUESTION_CHARS_MAX: Final = 16_000

_YES: Final = frozenset({"approve", "approved", "yes"})
_NO: Final = frozenset({"deny", "denied", "no"})
_encode = msgspec.json.Encoder(order="sorted").encode


class Question(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    kind: QuestionKind
    text: str
    tool: str = ""
    arguments: Any = None

    @property
    def digest(self) -> str:
        """An answer is valid only for the question with this digest."""
        return hashlib.sha256(_encode(self)).hexdigest()[:32]


def question_id(turn: int, step: int) -> str:
    return f"{turn}-{step}"


class PersonDecision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`id`: the question that is decided. None: the question that is open now."""

    approved: bool
    reason: Annotated[str, msgspec.Meta(max_length=REASON_CHARS_MAX)] = ""
    id: Annotated[str, msgspec.Meta(max_length=64)] | None = None

    def as_parts(self) -> tuple[Text, Json]:
        """The decision as data for agents that read data, and as text for the others."""
        word = "approve" if self.approved else f"deny: {self.reason}" if self.reason else "deny"
        return Text(word), Json({APPROVAL: msgspec.to_builtins(self)})


def has_decision(parts: tuple[Content, ...]) -> bool:
    """Whether a message contains a decision part, valid or not."""
    return any(isinstance(part, Json) and isinstance(part.value, dict) and APPROVAL in part.value for part in parts)


def read_decision(parts: tuple[Content, ...]) -> PersonDecision | None:
    """Returns the decision in a message. None: the message decides nothing."""
    for part in parts:
        if isinstance(part, Json) and isinstance(part.value, dict) and APPROVAL in part.value:
            try:
                return msgspec.convert(part.value[APPROVAL], PersonDecision)
            except msgspec.ValidationError:
                return None
    if not all(isinstance(part, Text) for part in parts):
        return None
    word, colon, reason = "\n".join(part.text for part in parts if isinstance(part, Text)).partition(":")
    word, reason = word.strip().lower().rstrip(".!"), reason.strip()
    if len(reason) > REASON_CHARS_MAX or (colon and not reason):
        return None
    if word in _NO:
        return PersonDecision(approved=False, reason=reason)
    return PersonDecision(approved=True) if word in _YES and not colon else None


def id_of_question(metadata: dict[str, Any] | None) -> str | None:
    """The id of the question that the status with this metadata asks."""
    about = (metadata or {}).get(QUESTION)
    found = about.get("id") if isinstance(about, dict) else None
    return found if isinstance(found, str) else None


def asks_approval(metadata: dict[str, Any] | None) -> bool:
    """Whether the status with this metadata asks a person to approve something."""
    about = (metadata or {}).get(QUESTION)
    return isinstance(about, dict) and about.get("kind") == "approval"
