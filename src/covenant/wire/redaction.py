"""Before content leaves the instance: secrets in it are taken out, or it stays, or somebody is told.

Works on texts and on values as JSON has them (nested no deeper than `decoding` lets in). Says what was found by path
and kind, never what it was. Nothing else is changed: what has no secret in it comes back as the same object. There is
no mode that does not look.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final, Literal

import msgspec

from covenant.model.errors import Forbidden
from covenant.wire.credentials import secrets_in

Mode = Literal["block", "redact", "warn"]
FINDINGS_MAX: Final = 100


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


def redact(value: Any, mode: Mode) -> Redaction:
    found: dict[tuple[str, str], int] = {}
    clean = _cleaned(value, "", "", found)
    findings = tuple(Finding(path, kind, count) for (path, kind), count in list(found.items())[:FINDINGS_MAX])
    if not findings or mode == "warn":
        return Redaction(value, findings)
    return Redaction(None, findings, blocked=True) if mode == "block" else Redaction(clean, findings)


def blocked(redaction: Redaction) -> Forbidden:
    """How the sender is told that it was not sent."""
    places = ", ".join(f"{each.kind} at {each.path or '/'}" for each in redaction.findings[:5])
    return Forbidden("secret_found", f"not sent, since it seems to hold secrets: {places}")


def _cleaned(value: Any, path: str, name: str, found: dict[tuple[str, str], int]) -> Any:
    """The value without secrets; the very same if it has none."""
    if isinstance(value, str):
        return _cleaned_text(value, path, name, found)
    if isinstance(value, dict):
        return _cleaned_object(value, path, found)
    if isinstance(value, list | tuple):
        cleaned = [_cleaned(inner, f"{path}/{at}", name, found) for at, inner in enumerate(value)]
        if all(new is old for new, old in zip(cleaned, value, strict=True)):
            return value
        return cleaned if isinstance(value, list) else tuple(cleaned)
    return value


def _cleaned_object(value: dict[str, Any], path: str, found: dict[tuple[str, str], int]) -> Any:
    encoded = _encoded_members(value)
    cleaned: dict[str, Any] = {}
    changed = False
    for key, inner in value.items():
        # A key is written out as any value is. The path must not give it away either.
        new_key = _cleaned_text(str(key), f"{path}/*", "", found)
        below = f"{path}/{_escaped(new_key)}"
        read = _cleaned_blob if key in encoded else _cleaned
        new = read(inner, below, str(key), found)
        changed = changed or new is not inner or new_key != key
        cleaned[new_key] = new
    return cleaned if changed else value


def _cleaned_text(text: str, path: str, name: str, found: dict[tuple[str, str], int]) -> str:
    spans = secrets_in(text, name)
    if not spans:
        return text
    pieces, at = [], 0
    for start, end, kind in spans:
        found[path, kind] = found.get((path, kind), 0) + 1
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


def _cleaned_blob(text: str, path: str, name: str, found: dict[tuple[str, str], int]) -> str:
    """Images and the like are left alone; a file of text is text, though in base64."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return _cleaned_text(text, path, name, found)
    try:
        inside = data.decode()
    except UnicodeDecodeError:
        return text
    clean = _cleaned_text(inside, path, "", found)
    return text if clean is inside else base64.b64encode(clean.encode()).decode()


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
