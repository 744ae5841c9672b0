"""Where in a text secrets stand.

Told apart from what merely looks alike: numbers (`max_token: 500`), UUIDs and hashes in hex, `sha512-…`, certificates
and public keys, data marked as base64, placeholders, long names.

The search takes time that grows with the text and no faster (see `secret_shapes`). A long text is searched window by
window, so that no single step holds the interpreter for more than a few milliseconds. A secret that begins in one
window and ends in another is found whole.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from covenant.wire.secret_shapes import (
    ASSIGNED,
    BARE,
    CANDIDATE,
    CANDIDATE_REST,
    ENTROPY_CHARS_MIN,
    NAMES,
    SECRET_CHARS_MIN,
    SEGMENT_CHARS_MAX,
    SHAPES,
    UNNAMED,
    VALUE_CHARS_MAX,
    Naming,
    is_harmless_name,
    is_placeholder,
    is_secret_value,
    looks_random,
)

WINDOW_CHARS: Final = 32 * 1024
OVERLAP_CHARS: Final = 2 * max(SEGMENT_CHARS_MAX, VALUE_CHARS_MAX)
"""How far behind a window is searched for the end of what begins in it: farther than any pattern needs to decide."""
_BEFORE_CHARS: Final = 32
"""How much of what stands before a match is looked at."""
_EMPTY: Final = re.compile("")


_VAGUE: Final = {"named_secret": 1, "high_entropy": 2}
"""Kinds that say less than others about what was found."""


class Span(NamedTuple):
    start: int
    end: int
    kind: str


class _Found(NamedTuple):
    match: re.Match[str]
    end: int
    """Where it ends in the text, which may be behind the part that was searched."""


def secrets_in(text: str, naming: Naming = UNNAMED) -> list[Span]:
    """In order, without overlaps. `naming` says what follows from the name of the text where it stands."""
    if len(text) < SECRET_CHARS_MIN:
        return []
    blocks = list(_blocks(text))
    spans = [Span(start, end, "private_key") for start, end, label, _ in blocks if "PRIVATE KEY" in label]
    spans += _known(text)
    spans += _assigned(text)
    if naming.secret and is_secret_value(text.strip()):
        spans.append(Span(0, len(text), "named_secret"))
    if not naming.public:
        spans += _random(text, blocks)
    return _merged(spans)


def _merged(spans: list[Span]) -> list[Span]:
    """Where two overlap the whole is covered, and named as the more telling of them."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda each: (each.start, -each.end)):
        if merged and span.start < merged[-1].end:
            last = merged[-1]
            kind = span.kind if _VAGUE.get(last.kind, 0) > _VAGUE.get(span.kind, 0) else last.kind
            merged[-1] = Span(last.start, max(last.end, span.end), kind)
        else:
            merged.append(span)
    return merged


def _found(
    decides: re.Pattern[str], rest: re.Pattern[str], text: str, needles: tuple[str, ...] = ()
) -> Iterator[_Found]:
    """What `decides.finditer` finds, window by window. `rest` matches what belongs to a match behind its window.

    A window without one of the `needles` is passed over.
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
            yield _Found(match, end)
            stop = max(stop, end)
        at = stop


def _end(rest: re.Pattern[str], text: str, at: int) -> int:
    """Where a run that goes on at `at` ends."""
    size = len(text)
    while at < size:
        limit = min(at + WINDOW_CHARS, size)
        match = rest.match(text, at, limit)
        at = match.end() if match is not None else at
        if at < limit:
            break
    return at


_MARK: Final = re.compile(r"-----(BEGIN|END) ([A-Z0-9 ]{1,60}+)(?=-----)")
_DASHES: Final = 5
# What may follow a header whose end was cut off. Line ends may be spelled out, as inside JSON.
_REST: Final = re.compile(r"[A-Za-z0-9+/=\s\\:,.\-]*+")


def _blocks(text: str) -> Iterator[tuple[int, int, str, bool]]:
    """Start, end and label of each PEM block, and whether it has its end."""
    marks = [found.match for found in _found(_MARK, _EMPTY, text, ("-----BEGIN ", "-----END "))]
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


def _known(text: str) -> Iterator[Span]:
    for kind, needles, decides, rest, accept in SHAPES:
        if not any(needle in text for needle in needles):
            continue
        group = "secret" if "secret" in decides.groupindex else 0
        for match, whole_end in _found(decides, rest, text, needles):
            if "whole" in decides.groupindex and match["whole"] is None:
                continue
            start = match.start(group)
            end = whole_end if whole_end > match.end() else match.end(group)
            value = text[start : min(end, start + WINDOW_CHARS)]
            before = text[max(0, match.start() - _BEFORE_CHARS) : match.start()]
            if (accept is None or accept(value, before)) and not is_placeholder(value):
                yield Span(start, end, kind)


def _assigned(text: str) -> Iterator[Span]:
    lowered = _lowered(text)
    if not any(name in lowered for name in NAMES):
        return
    for match, end in _found(ASSIGNED, BARE, lowered, NAMES):
        start = match.start()
        if is_harmless_name(match["name"], text[max(0, start - _BEFORE_CHARS) : start]):
            continue
        if match["bare"] is None:
            first, last = match.span(2 if match[2] is not None else 3)
            if is_secret_value(text[first:last].strip()):
                yield Span(first, last, "assigned_secret")
            continue
        first = match.start("bare")
        # A bracket behind it: a call or a look-up.
        if text[end : end + 1] not in ("(", "[") and is_secret_value(text[first : min(end, first + VALUE_CHARS_MAX)]):
            yield Span(first, end, "assigned_secret")


def _lowered(text: str) -> str:
    """In lower case, with every character in its place."""
    pieces = (text[at : at + WINDOW_CHARS] for at in range(0, len(text), WINDOW_CHARS))
    return "".join(map(_lowered_piece, pieces))


def _lowered_piece(piece: str) -> str:
    lowered = piece.lower()
    return lowered if len(lowered) == len(piece) else "".join(each.lower()[:1] for each in piece)


_DATA_URI: Final = re.compile(r"data:[\w.+/;=-]{0,100};base64,[A-Za-z0-9+/=_%-]*+")
_DATA_REST: Final = re.compile(r"[A-Za-z0-9+/=_%-]*+")
_DIGEST: Final = re.compile(r"(?i)\bsha-?(?:1|224|256|384|512)[-:=][A-Za-z0-9+/=_-]++")
_DIGEST_REST: Final = re.compile(r"[A-Za-z0-9+/=_-]*+")


def _random(text: str, blocks: list[tuple[int, int, str, bool]]) -> Iterator[Span]:
    if len(text) < ENTROPY_CHARS_MIN:
        return
    exempt: list[tuple[int, int]] | None = None
    for match, end in _found(CANDIDATE, CANDIDATE_REST, text):
        start = match.start()
        if not any(looks_random(text[at : min(at + WINDOW_CHARS, end)]) for at in range(start, end, WINDOW_CHARS)):
            continue
        if exempt is None:
            exempt = sorted(_marked(text, blocks))
        before = bisect.bisect_right(exempt, (start, len(text)))
        if before == 0 or exempt[before - 1][1] <= start:
            yield Span(start, end, "high_entropy")


def _marked(text: str, blocks: list[tuple[int, int, str, bool]]) -> Iterator[tuple[int, int]]:
    """What says of itself that it is data, a digest, a certificate or a public key."""
    for match, end in _found(_DATA_URI, _DATA_REST, text, ("data:",)):
        yield match.start(), end
    for match, end in _found(_DIGEST, _DIGEST_REST, text):
        yield match.start(), end
    yield from ((start, end) for start, end, label, whole in blocks if whole and "PRIVATE" not in label)
