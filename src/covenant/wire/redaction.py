"""Finds secrets in content before the content leaves the instance. A secret is removed, refused or reported.

`find_secrets` searches a text by the patterns of `redaction_patterns`. It skips numbers (`max_token: 500`), UUIDs and
hashes, certificates and public keys, data marked as base64, placeholders and long names. Its time is linear. A long
text is searched window by window, so that no single step holds the interpreter for more than a few milliseconds. A
secret across two windows is found whole.

`redact` works on texts and on JSON values. Findings have a path and a kind, never the secret. A value without secrets
is returned as the same object.
"""

from __future__ import annotations

import base64
import binascii
import bisect
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple

import msgspec

from covenant.model.errors import Forbidden
from covenant.wire.redaction_patterns import (
    ASSIGNED,
    BARE,
    CANDIDATE,
    CANDIDATE_REST,
    ENTROPY_CHARS_MIN,
    NAMES,
    NO_HINT,
    PATTERNS,
    SECRET_CHARS_MIN,
    SEGMENT_CHARS_MAX,
    VALUE_CHARS_MAX,
    NameHint,
    is_harmless_name,
    is_placeholder,
    is_secret_value,
    looks_random,
    name_hint,
)

WINDOW_CHARS: Final = 32 * 1024
OVERLAP_CHARS: Final = 2 * max(SEGMENT_CHARS_MAX, VALUE_CHARS_MAX)
"""How far behind a window the end of a match is searched: farther than any pattern needs to decide."""
_BEFORE_CHARS: Final = 32
"""How many characters before a match are looked at."""
_EMPTY: Final = re.compile("")


_VAGUE: Final = {"named_secret": 1, "high_entropy": 2}
"""Kinds that say less than others about the secret."""
_MARK: Final = re.compile(r"-----(BEGIN|END) ([A-Z0-9 ]{1,60}+)(?=-----)")
_DASHES: Final = 5
# The characters that may follow a header whose end was cut off. Line ends may be escaped, as inside JSON.
_REST: Final = re.compile(r"[A-Za-z0-9+/=\s\\:,.\-]*+")
_DATA_URI: Final = re.compile(r"data:[\w.+/;=-]{0,100};base64,[A-Za-z0-9+/=_%-]*+")
_DATA_REST: Final = re.compile(r"[A-Za-z0-9+/=_%-]*+")
_DIGEST: Final = re.compile(r"(?i)\bsha-?(?:1|224|256|384|512)[-:=][A-Za-z0-9+/=_-]++")
_DIGEST_REST: Final = re.compile(r"[A-Za-z0-9+/=_-]*+")
FINDINGS_MAX: Final = 100
STEP_CHARS_MAX: Final = 64
"""The longest name in a path."""
_SEARCHES_MAX: Final = 5
_BASE64_CHARS: Final = 256 * 1024
"""The number of characters that are decoded at once: a multiple of four."""
_ENCODED: Final = ("data", "blob", "raw", "bytes")
_MARKS: Final = ("mimeType", "mime_type", "mediaType", "media_type")


class SecretSpan(NamedTuple):
    start: int
    end: int
    kind: str


class _Match(NamedTuple):
    match: re.Match[str]
    end: int
    """The end of the match in the text, which may be behind the window that was searched."""


def find_secrets(text: str, naming: NameHint = NO_HINT) -> list[SecretSpan]:
    """The secrets in a text, in order, without overlaps. `naming` is what the text's name says about it."""
    if len(text) < SECRET_CHARS_MIN:
        return []
    blocks = list(_blocks(text))
    spans = [SecretSpan(start, end, "private_key") for start, end, label, _ in blocks if "PRIVATE KEY" in label]
    spans += _known(text)
    spans += _assigned(text)
    if naming.secret and is_secret_value(text.strip()):
        spans.append(SecretSpan(0, len(text), "named_secret"))
    if not naming.public:
        spans += _random(text, blocks)
    return _merged(spans)


def _merged(spans: list[SecretSpan]) -> list[SecretSpan]:
    """Joins overlapping spans. A joined span gets the more specific kind of the two."""
    merged: list[SecretSpan] = []
    for span in sorted(spans, key=lambda each: (each.start, -each.end)):
        if merged and span.start < merged[-1].end:
            last = merged[-1]
            kind = span.kind if _VAGUE.get(last.kind, 0) > _VAGUE.get(span.kind, 0) else last.kind
            merged[-1] = SecretSpan(last.start, max(last.end, span.end), kind)
        else:
            merged.append(span)
    return merged


def _matches(
    decides: re.Pattern[str], rest: re.Pattern[str], text: str, needles: tuple[str, ...] = ()
) -> Iterator[_Match]:
    """Yields the matches of `decides`, window by window. `rest` matches the part of a match that is behind its window.

    A window without any of the `needles` is skipped.
    """
    at, size = 0, len(text)
    while at < size:
        stop = at + WINDOW_CHARS
        limit = min(stop + OVERLAP_CHARS, size)
        if needles and all(text.find(needle, at, limit) < 0 for needle in needles):
            at = stop
            continue
        for match in decides.finditer(text, at, limit):
            if match.start() >= stop:
                break
            end = _end(rest, text, limit) if match.end() == limit else match.end()
            yield _Match(match, end)
            stop = max(stop, end)
        at = stop


def _end(rest: re.Pattern[str], text: str, at: int) -> int:
    """The end of a run that continues at `at`."""
    size = len(text)
    while at < size:
        limit = min(at + WINDOW_CHARS, size)
        match = rest.match(text, at, limit)
        at = match.end() if match is not None else at
        if at < limit:
            break
    return at


def _blocks(text: str) -> Iterator[tuple[int, int, str, bool]]:
    """Start, end and label of each PEM block, and whether its end mark is there."""
    marks = [found.match for found in _matches(_MARK, _EMPTY, text, ("-----BEGIN ", "-----END "))]
    ends: dict[str, list[int]] = {}
    for mark in marks:
        if mark[1] == "END":
            ends.setdefault(mark[2], []).append(mark.start())
    at = 0
    for mark in marks:
        if mark[1] == "END" or mark.start() < at:
            continue
        inside = mark.end() + _DASHES
        ending = ends.get(mark[2], ())
        next_one = bisect.bisect_left(ending, inside)
        whole = next_one < len(ending)
        at = ending[next_one] + len(f"-----END {mark[2]}-----") if whole else _end(_REST, text, inside)
        yield mark.start(), at, mark[2], whole


def _known(text: str) -> Iterator[SecretSpan]:
    has = text.__contains__
    for kind, needles, decides, rest, accept in PATTERNS:
        if not any(map(has, needles)):
            continue
        group = "secret" if "secret" in decides.groupindex else 0
        for match, whole_end in _matches(decides, rest, text, needles):
            if "whole" in decides.groupindex and match["whole"] is None:
                continue
            start = match.start(group)
            end = whole_end if whole_end > match.end() else match.end(group)
            value = text[start : min(end, start + WINDOW_CHARS)]
            before = text[max(0, match.start() - _BEFORE_CHARS) : match.start()]
            if (accept is None or accept(value, before)) and not is_placeholder(value):
                yield SecretSpan(start, end, kind)


def _assigned(text: str) -> Iterator[SecretSpan]:
    lowered = _lowered(text)
    if not any(map(lowered.__contains__, NAMES)):
        return
    for match, end in _matches(ASSIGNED, BARE, lowered, NAMES):
        start = match.start()
        if is_harmless_name(match["name"], text[max(0, start - _BEFORE_CHARS) : start]):
            continue
        if match["bare"] is None:
            first, last = match.span(2 if match[2] is not None else 3)
            if is_secret_value(text[first:last].strip()):
                yield SecretSpan(first, last, "assigned_secret")
            continue
        first = match.start("bare")
        # A bracket after the value: a call or a look-up, not a secret.
        if text[end : end + 1] not in ("(", "[") and is_secret_value(text[first : min(end, first + VALUE_CHARS_MAX)]):
            yield SecretSpan(first, end, "assigned_secret")


def _lowered(text: str) -> str:
    """The text in lower case, with every character at its position."""
    lowered = []
    for at in range(0, len(text), WINDOW_CHARS):
        piece = text[at : at + WINDOW_CHARS]
        lower = piece.lower()
        lowered.append(lower if len(lower) == len(piece) else "".join(each.lower()[:1] for each in piece))
    return "".join(lowered)


def _random(text: str, blocks: list[tuple[int, int, str, bool]]) -> Iterator[SecretSpan]:
    if len(text) < ENTROPY_CHARS_MIN:
        return
    exempt: list[tuple[int, int]] | None = None
    for match, end in _matches(CANDIDATE, CANDIDATE_REST, text):
        start = match.start()
        if not any(looks_random(text[at : min(at + WINDOW_CHARS, end)]) for at in range(start, end, WINDOW_CHARS)):
            continue
        if exempt is None:
            exempt = sorted(_marked(text, blocks))
        before = bisect.bisect_right(exempt, (start, len(text)))
        if before == 0 or exempt[before - 1][1] <= start:
            yield SecretSpan(start, end, "high_entropy")


def _marked(text: str, blocks: list[tuple[int, int, str, bool]]) -> Iterator[tuple[int, int]]:
    """Spans that are marked as data, a digest, a certificate or a public key."""
    for match, end in _matches(_DATA_URI, _DATA_REST, text, ("data:",)):
        yield match.start(), end
    for match, end in _matches(_DIGEST, _DIGEST_REST, text):
        yield match.start(), end
    yield from ((start, end) for start, end, label, whole in blocks if whole and "PRIVATE" not in label)


Mode = Literal["block", "redact", "warn"]


class SecretFinding(msgspec.Struct, frozen=True, gc=False):
    """`path` is a JSON pointer into the value, empty for the whole; `count` secrets of this kind were found there."""

    path: str
    kind: str
    count: int = 1


class Redaction(msgspec.Struct, frozen=True):
    """`value` is what may be sent: without secrets after `redact`, None if `block` found any."""

    value: Any
    findings: tuple[SecretFinding, ...] = ()
    """At most FINDINGS_MAX are listed; all secrets are acted on."""
    blocked: bool = False


class _Location(NamedTuple):
    """A place in the value. Its path is written out only if a secret is found there."""

    above: _Location | None
    step: str | int

    @property
    def path(self) -> str:
        steps: list[str] = []
        location = self
        while location.above is not None:
            steps.append(str(location.step)[:STEP_CHARS_MAX].replace("~", "~0").replace("/", "~1"))
            location = location.above
        return "".join(f"/{step}" for step in reversed(steps))


_Findings = Counter[tuple[str, str]]
"""Numbers of secrets by path and kind."""


def redact(value: Any, mode: Mode) -> Redaction:
    found: _Findings = Counter()
    clean = _cleaned(value, _Location(None, ""), NO_HINT, found)
    findings = tuple(SecretFinding(path, kind, count) for (path, kind), count in found.items())
    if not findings or mode == "warn":
        return Redaction(value, findings)
    return Redaction(None, findings, blocked=True) if mode == "block" else Redaction(clean, findings)


def describe_findings(findings: tuple[SecretFinding, ...], most: int = 10) -> str:
    """Where secrets were found, and of which kind; never the secrets."""
    return ", ".join(f"{each.kind} at {each.path or '/'}" for each in findings[:most])


def refuse_secrets(redaction: Redaction) -> Forbidden:
    """The refusal for the sender."""
    places = describe_findings(redaction.findings, 5)
    return Forbidden("secret_found", f"not sent, since it seems to hold secrets: {places}")


def _cleaned(value: Any, location: _Location, naming: NameHint, found: _Findings) -> Any:
    """The value without secrets; the same object if it has none."""
    if isinstance(value, str):
        return _cleaned_text(value, location, naming, found)
    if isinstance(value, dict):
        return _cleaned_object(value, location, found)
    if isinstance(value, list | tuple):
        cleaned = [_cleaned(inner, _Location(location, at), naming, found) for at, inner in enumerate(value)]
        if all(new is old for new, old in zip(cleaned, value, strict=True)):
            return value
        return cleaned if isinstance(value, list) else tuple(cleaned)
    return value


def _cleaned_object(value: dict[str, Any], location: _Location, found: _Findings) -> Any:
    encoded = _encoded_members(value)
    cleaned: dict[str, Any] = {}
    changed = False
    for key, inner in value.items():
        # Keys are redacted like values. The path must not show a secret key either.
        new_key = _cleaned_text(str(key), _Location(location, "*"), NO_HINT, found)
        below = _Location(location, new_key)
        read = _cleaned_blob if key in encoded else _cleaned
        new = read(inner, below, name_hint(str(key)), found)
        changed = changed or new is not inner or new_key != key
        cleaned[new_key] = new
    return cleaned if changed else value


def _cleaned_text(text: str, location: _Location, naming: NameHint, found: _Findings) -> str:
    """Removes secrets until none is found: a removed text may have made the text next to it look harmless."""
    for _ in range(_SEARCHES_MAX):
        spans = find_secrets(text, naming)
        if not spans:
            break
        text = _without(text, spans)
        for span in spans:
            key = location.path, span.kind
            if key in found or len(found) < FINDINGS_MAX:
                found[key] += 1
    return text


def _without(text: str, spans: list[SecretSpan]) -> str:
    pieces, at = [], 0
    for start, end, kind in spans:
        pieces += [text[at:start], f"[redacted:{kind}]"]
        at = end
    return "".join([*pieces, text[at:]])


def _encoded_members(value: dict[str, Any]) -> tuple[str, ...]:
    """The members that hold base64, in an object with a media type."""
    if not any(isinstance(value.get(mark), str) for mark in _MARKS):
        return ()
    return tuple(name for name in _ENCODED if isinstance(value.get(name), str))


def _cleaned_blob(text: str, location: _Location, naming: NameHint, found: _Findings) -> str:
    """Redacts base64 that holds text; images and other binary data are returned unchanged."""
    try:
        data = b"".join(
            base64.b64decode(text[at : at + _BASE64_CHARS], validate=True) for at in range(0, len(text), _BASE64_CHARS)
        )
    except (binascii.Error, ValueError):
        return _cleaned_text(text, location, naming, found)
    try:
        inside = data.decode()
    except UnicodeDecodeError:
        return text
    clean = _cleaned_text(inside, location, NO_HINT, found)
    return text if clean is inside else base64.b64encode(clean.encode()).decode()
