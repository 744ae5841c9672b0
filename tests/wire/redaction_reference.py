"""Where in a short text secrets stand, found in the simplest way: each pattern over all of it, whatever that costs.

The patterns backtrack freely and their time can grow with the square of the text. They say what must be found.
"""

from __future__ import annotations

import base64
import binascii
import bisect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

ENTROPY_CHARS_MIN: Final = 24


class Span(NamedTuple):
    start: int
    end: int
    kind: str


class _Shape(NamedTuple):
    kind: str
    found: re.Pattern[str]
    accept: Callable[[str], bool] | None = None


def reference_secrets_in(text: str, name: str = "") -> list[Span]:
    spans = [*_pem_blocks(text), *_known(text), *_assigned(text)]
    if not spans and name and _SECRET_NAME(name) and not _HARMLESS_NAME(name) and _is_secret_value(text.strip()):
        spans.append(Span(0, len(text), "named_secret"))
    if not _PUBLIC_NAME(name):
        spans += _random(text)
    return _merged(spans)


def _merged(spans: list[Span]) -> list[Span]:
    """Where two overlap the whole is covered, and named as the more telling of them."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda each: (each.start, -each.end)):
        if merged and span.start < merged[-1].end:
            last = merged[-1]
            kind = span.kind if last.kind == "high_entropy" else last.kind
            merged[-1] = Span(last.start, max(last.end, span.end), kind)
        else:
            merged.append(span)
    return merged


_BEGIN: Final = re.compile(r"-----BEGIN ([A-Z0-9 ]{1,60})-----")
# What may follow a header whose end was cut off. Line ends may be spelled out, as inside JSON.
_REST: Final = re.compile(r"[A-Za-z0-9+/=\s\\:,.\-]*")
_DATA_URI: Final = re.compile(r"data:[\w.+/;=-]{0,100};base64,[A-Za-z0-9+/=_%-]*")
_DIGEST: Final = re.compile(r"(?i)\bsha-?(?:1|224|256|384|512)[-:=][A-Za-z0-9+/=_-]+")


def _blocks(text: str) -> Iterator[tuple[int, int, str, bool]]:
    """Start, end and label of each PEM block, and whether it has its end."""
    at = 0
    endless: set[str] = set()
    while (begin := _BEGIN.search(text, at)) is not None:
        ending = f"-----END {begin[1]}-----"
        end = -1 if begin[1] in endless else text.find(ending, begin.end())
        if end >= 0:
            at = end + len(ending)
        else:
            endless.add(begin[1])
            rest = _REST.match(text, begin.end())
            at = rest.end() if rest is not None else begin.end()
        yield begin.start(), at, begin[1], end >= 0


def _pem_blocks(text: str) -> Iterator[Span]:
    if "-----BEGIN " in text:
        for start, end, label, _ in _blocks(text):
            if "PRIVATE KEY" in label:
                yield Span(start, end, "private_key")


def _has_digit(value: str) -> bool:
    return any(character.isdigit() for character in value)


def _is_basic(value: str) -> bool:
    try:
        inside = base64.b64decode(value + "=" * (-len(value) % 4), validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        return False
    return ":" in inside and inside.isprintable()


def _is_mixed(value: str) -> bool:
    return _has_digit(value) and value.upper() != value != value.lower()


def _is_made(value: str) -> bool:
    """With digits, and not made of words."""
    return _has_digit(value) and _share_of_words(value) <= _WORDS_MAX


def _shape(kind: str, pattern: str, accept: Callable[[str], bool] | None = None) -> _Shape:
    return _Shape(kind, re.compile(pattern), accept)


_START = r"(?<![A-Za-z0-9_])"
_SHAPES: Final = (
    _shape("anthropic_key", _START + r"sk-ant-[A-Za-z0-9_-]{16,}"),
    _shape("openai_key", _START + r"sk-(?:proj-|svcacct-|admin-)?[A-Za-z0-9_-]{20,}", _is_mixed),
    _shape("github_token", _START + r"gh[pousr]_[A-Za-z0-9]{30,}"),
    _shape("github_token", _START + r"github_pat_[A-Za-z0-9_]{30,}"),
    _shape("gitlab_token", _START + r"gl(?:pat|dt|rt|ptt|cbt)-[A-Za-z0-9_-]{20,}"),
    _shape("aws_key", _START + r"(?:AKIA|ASIA)[A-Z2-7]{16}(?![A-Za-z0-9])"),
    _shape("google_key", _START + r"AIza[A-Za-z0-9_-]{35}"),
    _shape("google_token", _START + r"ya29\.[A-Za-z0-9_-]{20,}"),
    _shape("slack_token", _START + r"(?:xox[abeoprs]|xapp)-[A-Za-z0-9-]{10,}", _has_digit),
    _shape("slack_webhook", r"hooks\.slack\.com/(?:services|workflows)/([A-Za-z0-9/_+-]{20,})"),
    _shape("stripe_key", _START + r"(?:[srp]k_(?:live|test)_|whsec_)[A-Za-z0-9+/=]{16,}"),
    _shape("npm_token", _START + r"npm_[A-Za-z0-9]{36}"),
    _shape("pypi_token", _START + r"pypi-AgE[A-Za-z0-9_-]{30,}"),
    _shape("huggingface_token", _START + r"hf_[A-Za-z0-9]{30,}"),
    _shape("sendgrid_key", _START + r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"),
    _shape("digitalocean_token", _START + r"do[opr]_v1_[a-f0-9]{64}"),
    _shape("telegram_token", _START + r"[0-9]{8,10}:AA[A-Za-z0-9_-]{32,}"),
    _shape("age_key", r"AGE-SECRET-KEY-1[A-Z0-9]{40,}"),
    _shape("azure_key", r"(?:Account|SharedAccess)Key=([A-Za-z0-9+/]{40,}={0,2})"),
    _shape("covenant_token", _START + r"atr_[0-9a-f]{64}"),
    _shape("jwt", _START + r"eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),
    _shape("basic_auth", r"\b[Bb]asic\s{1,4}([A-Za-z0-9+/]{8,}={0,2})", _is_basic),
    _shape("bearer_token", r"\b[Bb]earer\s{1,4}([A-Za-z0-9._~+/-]{16,}=*)", _is_made),
    _shape("url_password", r"[a-z][a-z0-9+.-]{1,20}://[^\s/:@\"'<>]{0,128}:([^\s/@\"'<>]{3,256})@"),
)


def _known(text: str) -> Iterator[Span]:
    for kind, found, accept in _SHAPES:
        group = min(found.groups, 1)
        for match in found.finditer(text):
            value = match[group]
            if (accept is None or accept(value)) and not _is_placeholder(value):
                yield Span(*match.span(group), kind)


_NAMED_SO = (
    r"(?:pass(?:word|wd|phrase)|pwd|secret|credential|token|"
    r"(?:api|access|auth|secret|private|signing|encryption|account)[_\-. ]?key|apikey)s?"
)
_SECRET_NAME: Final = re.compile(rf"(?i)(?:.*[_\-. ]|.*[a-z](?=[A-Z]))?{_NAMED_SO}").fullmatch
# Tokens that are words of a model or marks of a place, and keys that are meant to be seen.
_HARMLESS_NAME: Final = re.compile(
    r"(?i).*(?:max|min|num|total|page|next|prev|previous|continuation|sync|pad|eos|bos|sep|cls|mask|unk|stop|special|"
    r"prompt|completion|input|output|reasoning|cached)[_\-. ]?tokens?"
).fullmatch
_PUBLIC_NAME: Final = re.compile(
    r"(?i:(?:.*[_\-.])?(?:id|ids|uuid|hash|digest|sha(?:1|256|384|512)?|md5|checksum|integrity|fingerprint|etag|signature|"
    r"pubkey|public[_-]?key|kid|commit|revision|cursor|nonce|traceparent|root))|.*(?:Id|Ids|Hash|Digest|PublicKey|Cursor)"
).fullmatch
_ASSIGNED: Final = re.compile(
    rf"(?i)(?<![A-Za-z0-9])((?:[A-Za-z0-9]{{1,32}}[_\-.]){{0,6}}[A-Za-z0-9]{{0,32}}?{_NAMED_SO})[\"']?\s{{0,4}}(?:=>|:=|[:=])\s{{0,4}}"
    r"(?:\"([^\"\n]{6,512})\"|'([^'\n]{6,512})'|([^\s\"',;(){}\[\]]{6,512}))"
)
_NUMBER: Final = re.compile(r"[-+]?[0-9][0-9_.,]*(?:[eE][-+]?[0-9]+)?[A-Za-z%]{0,2}").fullmatch
_PLACEHOLDER: Final = re.compile(
    r"(?i)<.*>|\$\{.*\}|\{.*\}|%.*%|(?-i:\$[A-Z_][A-Z0-9_]*)|\*+|\.+|x{3,}|(?:your|example|sample|dummy|changeme|placeholder|redacted)[_\-a-z]*|"
    r"\[redacted:\w+\]|none|null|true|false|undefined|"
    r"pass|password|passwd|secret|token|string"
).fullmatch


# How code says where a value comes from.
_REFERENCE: Final = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+").fullmatch


def _is_placeholder(value: str) -> bool:
    return _PLACEHOLDER(value.strip("`")) is not None


def _is_secret_value(value: str) -> bool:
    """Of something that is called a secret: could this be one, or is it a number, a type, a placeholder, prose?"""
    if not 6 <= len(value) <= 4_096 or any(character.isspace() for character in value):
        return False
    if _NUMBER(value) is not None or _REFERENCE(value) is not None or _is_placeholder(value):
        return False
    has_letter = any(character.isalpha() for character in value)
    return has_letter and any(character.isdigit() or character in "!@#$%^&*+/=~?" for character in value)


def _assigned(text: str) -> Iterator[Span]:
    for match in _ASSIGNED.finditer(text):
        if _HARMLESS_NAME(match[1]) is not None:
            continue
        if match[4] is not None and text[match.end() : match.end() + 1] in ("(", "["):
            continue  # a call or a look-up
        for group in (2, 3, 4):
            if match[group] is not None and _is_secret_value(match[group].strip()):
                yield Span(*match.span(group), "assigned_secret")


_CANDIDATE: Final = re.compile(r"[A-Za-z0-9+/_-]{24,}={0,2}")
_HEX: Final = re.compile(r"(?:0x)?[0-9a-fA-F_-]+").fullmatch
_WORDS: Final = re.compile(r"[A-Z]?[a-z]{2,}|[A-Z]{4,}")
_WORDS_MAX: Final = 0.7
"""The greatest share of something random that looks like words; names of things have more."""
_SEPARATORS_MAX: Final = 0.12
"""Likewise of hyphens, underscores and slashes: chance gives one in 32."""


def _random(text: str) -> Iterator[Span]:
    if len(text) < ENTROPY_CHARS_MIN:
        return
    exempt: list[tuple[int, int]] | None = None
    for match in _CANDIDATE.finditer(text):
        if not _looks_random(match[0]):
            continue
        if exempt is None:
            exempt = sorted(_marked(text))
        before = bisect.bisect_right(exempt, (match.start(), len(text)))
        if before == 0 or exempt[before - 1][1] <= match.start():
            yield Span(*match.span(), "high_entropy")


def _marked(text: str) -> Iterator[tuple[int, int]]:
    """What says of itself that it is data, a digest, a certificate or a public key."""
    yield from (found.span() for each in (_DATA_URI, _DIGEST) for found in each.finditer(text))
    if "-----BEGIN " in text:
        yield from ((start, end) for start, end, label, whole in _blocks(text) if whole and "PRIVATE" not in label)


def _share_of_words(text: str) -> float:
    return sum(len(word[0]) for word in _WORDS.finditer(text)) / len(text)


def _looks_random(value: str) -> bool:
    """Mixed, evenly spread, and not made of words: what generators make and people do not."""
    text = value.rstrip("=")
    if _HEX(text) is not None:
        return False
    if not _is_mixed(text) or sum(map(text.count, "-_/")) > _SEPARATORS_MAX * len(text):
        return False
    if _share_of_words(text) > _WORDS_MAX:
        return False
    counts = Counter(text).values()
    entropy = -sum(count / len(text) * math.log2(count / len(text)) for count in counts)
    return entropy >= min(4.2, 0.8 * math.log2(len(text)))
