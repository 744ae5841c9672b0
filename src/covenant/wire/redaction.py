"""Before content leaves the instance: secrets in it are taken out, or it stays, or somebody is told.

Works on texts and on values as JSON has them (nested no deeper than `decoding` lets in). Says what was found by path
and kind, never what it was. Nothing else is changed: what has no secret in it comes back as the same object. There is
no mode that does not look.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final, Literal, NamedTuple

import msgspec

from covenant.model.errors import Forbidden
from covenant.wire.credentials import Span, secrets_in
from covenant.wire.secret_shapes import UNNAMED, Naming, naming_of

Mode = Literal["block", "redact", "warn"]
FINDINGS_MAX: Final = 100
STEP_CHARS_MAX: Final = 64
"""Of a path, for one name in it."""
_SEARCHES_MAX: Final = 5
_BASE64_CHARS: Final = 256 * 1024
"""How much is decoded in one go: a multiple of four."""


class Finding(msgspec.Struct, frozen=True, gc=False):
    """`path` is a JSON pointer into what was given, empty for all of it; `count` secrets of this kind stood there."""

    path: str
    kind: str
    count: int = 1


class Redaction(msgspec.Struct, frozen=True):
    """`value` is what may leave: changed by `redact`, None where `block` found something."""

    value: Any
    findings: tuple[Finding, ...] = ()
    """At most FINDINGS_MAX; all are acted on."""
    blocked: bool = False


class _Place(NamedTuple):
    """Where in what was given: written out only if something is found there."""

    above: _Place | None
    step: str | int

    @property
    def path(self) -> str:
        steps: list[str] = []
        place = self
        while place.above is not None:
            steps.append(_escaped(str(place.step)[:STEP_CHARS_MAX]))
            place = place.above
        return "".join(f"/{step}" for step in reversed(steps))


class _Findings:
    """Counted by path and kind."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}

    def add(self, place: _Place, kind: str) -> None:
        key = place.path, kind
        if key in self._counts or len(self._counts) < FINDINGS_MAX:
            self._counts[key] = self._counts.get(key, 0) + 1

    def told(self) -> tuple[Finding, ...]:
        return tuple(Finding(path, kind, count) for (path, kind), count in self._counts.items())


def redact(value: Any, mode: Mode) -> Redaction:
    found = _Findings()
    clean = _cleaned(value, _Place(None, ""), UNNAMED, found)
    findings = found.told()
    if not findings or mode == "warn":
        return Redaction(value, findings)
    return Redaction(None, findings, blocked=True) if mode == "block" else Redaction(clean, findings)


def blocked(redaction: Redaction) -> Forbidden:
    """How the sender is told that it was not sent."""
    places = ", ".join(f"{each.kind} at {each.path or '/'}" for each in redaction.findings[:5])
    return Forbidden("secret_found", f"not sent, since it seems to hold secrets: {places}")


def _cleaned(value: Any, place: _Place, naming: Naming, found: _Findings) -> Any:
    """The value without secrets; the very same if it has none."""
    if isinstance(value, str):
        return _cleaned_text(value, place, naming, found)
    if isinstance(value, dict):
        return _cleaned_object(value, place, found)
    if isinstance(value, list | tuple):
        cleaned = [_cleaned(inner, _Place(place, at), naming, found) for at, inner in enumerate(value)]
        if all(new is old for new, old in zip(cleaned, value, strict=True)):
            return value
        return cleaned if isinstance(value, list) else tuple(cleaned)
    return value


def _cleaned_object(value: dict[str, Any], place: _Place, found: _Findings) -> Any:
    encoded = _encoded_members(value)
    cleaned: dict[str, Any] = {}
    changed = False
    for key, inner in value.items():
        # A key is written out as any value is. The path must not give it away either.
        new_key = _cleaned_text(str(key), _Place(place, "*"), UNNAMED, found)
        below = _Place(place, new_key)
        read = _cleaned_blob if key in encoded else _cleaned
        new = read(inner, below, naming_of(str(key)), found)
        changed = changed or new is not inner or new_key != key
        cleaned[new_key] = new
    return cleaned if changed else value


def _cleaned_text(text: str, place: _Place, naming: Naming, found: _Findings) -> str:
    """What was taken out may have been what made something beside it harmless: the rest is searched again."""
    for _ in range(_SEARCHES_MAX):
        spans = secrets_in(text, naming)
        if not spans:
            break
        text = _without(text, spans)
        for span in spans:
            found.add(place, span.kind)
    return text


def _without(text: str, spans: list[Span]) -> str:
    pieces, at = [], 0
    for start, end, kind in spans:
        pieces += [text[at:start], f"[redacted:{kind}]"]
        at = end
    return "".join([*pieces, text[at:]])


_ENCODED: Final = ("data", "blob", "raw", "bytes")
_MARKS: Final = ("mimeType", "mime_type", "mediaType", "media_type")


def _encoded_members(value: dict[str, Any]) -> tuple[str, ...]:
    """The members that hold base64, in an object that says so by having a media type."""
    if not any(isinstance(value.get(mark), str) for mark in _MARKS):
        return ()
    return tuple(name for name in _ENCODED if isinstance(value.get(name), str))


def _cleaned_blob(text: str, place: _Place, naming: Naming, found: _Findings) -> str:
    """Images and the like are left alone; a file of text is text, though in base64."""
    try:
        data = b"".join(
            base64.b64decode(text[at : at + _BASE64_CHARS], validate=True) for at in range(0, len(text), _BASE64_CHARS)
        )
    except (binascii.Error, ValueError):
        return _cleaned_text(text, place, naming, found)
    try:
        inside = data.decode()
    except UnicodeDecodeError:
        return text
    clean = _cleaned_text(inside, place, UNNAMED, found)
    return text if clean is inside else base64.b64encode(clean.encode()).decode()


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
