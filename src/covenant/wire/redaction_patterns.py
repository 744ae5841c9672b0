"""Patterns of secrets: known shapes, values with a name of a secret, and texts that look random.

Every pattern takes linear time, by three rules. A repetition without a small bound is possessive. A search goes on
behind the last match. A part that must follow a long repetition is optional in its pattern: where it is missing, the
repetition is matched and skipped, instead of being tried again from each of its characters.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

SECRET_CHARS_MIN: Final = 6
VALUE_CHARS_MAX: Final = 4_096
"""The longest value that is a secret because of its name. Its quotes must be no farther apart."""
SEGMENT_CHARS_MAX: Final = 8_192
"""The longest first part of a secret that is recognised by the part after it."""
ENTROPY_CHARS_MIN: Final = 24


class SecretPattern(NamedTuple):
    """`decides` recognises a secret by its first characters; `rest` matches the remaining ones.

    The secret is the group `secret` of `decides` if there is one. A group `whole` must have matched.
    """

    kind: str
    needles: tuple[str, ...]
    """Every text with this shape contains one of these; a text without them is not searched further."""
    decides: re.Pattern[str]
    rest: re.Pattern[str]
    accept: Callable[[str, str], bool] | None = None
    """Decides whether a match is a secret, from its first 32 Ki characters and the text before it."""


_WORDS: Final = re.compile(r"[A-Z]?[a-z]{2,}+|[A-Z]{4,}+")
_WORDS_MAX: Final = 0.7
"""The greatest share of word-like characters in a random text; identifiers have more."""
_SEPARATORS_MAX: Final = 0.12
"""The greatest share of hyphens, underscores and slashes in a random text: chance gives one in 32."""
_HEX: Final = re.compile(r"(?:0x)?[0-9a-fA-F_-]++").fullmatch
_has_digit: Final = re.compile(r"[0-9]").search


def _is_numbered(value: str, _: str) -> bool:
    return _has_digit(value) is not None


def _is_basic(value: str, _: str) -> bool:
    try:
        inside = base64.b64decode(value + "=" * (-len(value) % 4), validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        return False
    return ":" in inside and inside.isprintable()


def _is_mixed(value: str, _: str = "") -> bool:
    return _has_digit(value) is not None and value.upper() != value != value.lower()


def _is_made(value: str, _: str) -> bool:
    """Whether the value has digits and is not made of words."""
    return _has_digit(value) is not None and _share_of_words(value) <= _WORDS_MAX


_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]{1,20}\Z").search


def _has_scheme(_: str, before: str) -> bool:
    return _SCHEME(before) is not None


def _pattern(
    kind: str, needles: str, decides: str, rest: str, accept: Callable[[str, str], bool] | None = None
) -> SecretPattern:
    """`rest` is a class of characters, or a pattern that also matches the empty text."""
    more = f"{rest}*+" if rest.endswith("]") else rest
    return SecretPattern(kind, tuple(needles.split()), re.compile(decides), re.compile(more), accept)


_START = r"(?<![A-Za-z0-9_])"
_WORD = "[A-Za-z0-9_]"
_BASE64URL = "[A-Za-z0-9_-]"
_BASE64 = "[A-Za-z0-9+/=]"
_DOTTED = rf"(?:\.{_BASE64URL}++)*+"
_NOTHING = ""
_JWT = rf"eyJ{_BASE64URL}{{8,{SEGMENT_CHARS_MAX}}}+(?P<whole>\.eyJ{_BASE64URL}{{8,}}+(?:\.{_BASE64URL}*+)?{_DOTTED})?"

# Characters that adjoin a secret are removed with it: they may be a second secret that has no recognisable start.
PATTERNS: Final = (
    _pattern("anthropic_key", "sk-ant-", rf"{_START}sk-ant-{_BASE64URL}{{16,}}+", _BASE64URL),
    _pattern("openai_key", "sk-", rf"{_START}sk-{_BASE64URL}{{20,}}+", _BASE64URL, _is_mixed),
    _pattern("github_token", "gh", rf"{_START}gh[pousr]_[A-Za-z0-9]{{30}}{_WORD}*+", _WORD),
    _pattern("github_token", "github_pat_", rf"{_START}github_pat_{_WORD}{{30,}}+", _WORD),
    _pattern("gitlab_token", "gl", rf"{_START}gl(?:pat|dt|rt|ptt|cbt)-{_BASE64URL}{{20,}}+", _BASE64URL),
    _pattern("aws_key", "AKIA ASIA", _START + r"(?:AKIA|ASIA)[A-Z2-7]{16}(?![A-Za-z0-9])", _NOTHING),
    _pattern("google_key", "AIza", rf"{_START}AIza{_BASE64URL}{{35,}}+", _BASE64URL),
    _pattern("google_token", "ya29.", rf"{_START}ya29\.{_BASE64URL}{{20,}}+", _BASE64URL),
    _pattern(
        "slack_token", "xox xapp-", _START + r"(?:xox[abeoprs]|xapp)-[A-Za-z0-9-]{10,}+", "[A-Za-z0-9-]", _is_numbered
    ),
    _pattern(
        "slack_webhook",
        "hooks.slack.com",
        r"hooks\.slack\.com/(?:services|workflows)/(?P<secret>[A-Za-z0-9/_+-]{20,}+)",
        "[A-Za-z0-9/_+-]",
    ),
    _pattern(
        "stripe_key",
        "_live_ _test_ whsec_",
        rf"{_START}(?:[srp]k_(?:live|test)_|whsec_){_BASE64}{{16}}[A-Za-z0-9+/=_]*+",
        "[A-Za-z0-9+/=_]",
    ),
    _pattern("npm_token", "npm_", rf"{_START}npm_[A-Za-z0-9]{{36}}{_WORD}*+", _WORD),
    _pattern("pypi_token", "pypi-", rf"{_START}pypi-AgE{_BASE64URL}{{30,}}+", _BASE64URL),
    _pattern("huggingface_token", "hf_", rf"{_START}hf_[A-Za-z0-9]{{30}}{_WORD}*+", _WORD),
    _pattern(
        "sendgrid_key",
        "SG.",
        rf"{_START}SG\.{_BASE64URL}{{16,{SEGMENT_CHARS_MAX}}}+\.{_BASE64URL}{{16,}}+{_DOTTED}",
        rf"{_BASE64URL}*+{_DOTTED}",
    ),
    _pattern("digitalocean_token", "_v1_", rf"{_START}do[opr]_v1_[a-f0-9]{{64}}{_WORD}*+", _WORD),
    _pattern("telegram_token", ":AA", rf"{_START}[0-9]{{8,10}}+:AA{_BASE64URL}{{32,}}+", _BASE64URL),
    _pattern("age_key", "AGE-SECRET-KEY-", r"AGE-SECRET-KEY-1[A-Z0-9]{40}[A-Z0-9-]*+", "[A-Z0-9-]"),
    _pattern(
        "azure_key",
        "AccountKey= SharedAccessKey=",
        rf"(?:Account|SharedAccess)Key=(?P<secret>[A-Za-z0-9+/]{{40}}{_BASE64}*+)",
        _BASE64,
    ),
    _pattern("covenant_token", "atr_", rf"{_START}atr_[0-9a-f]{{64}}{_WORD}*+", _WORD),
    _pattern("jwt", "eyJ", _START + _JWT, rf"{_BASE64URL}*+{_DOTTED}"),
    _pattern(
        "basic_auth",
        "asic ",
        r"\b[Bb]asic\s{1,4}+(?P<secret>[A-Za-z0-9+/]{8,}+={0,2})",
        "[A-Za-z0-9+/]*+={0,2}",
        _is_basic,
    ),
    _pattern(
        "bearer_token",
        "earer ",
        r"\b[Bb]earer\s{1,4}+(?P<secret>[A-Za-z0-9._~+/-]{16,}+=*+)",
        "[A-Za-z0-9._~+/-]*+=*+",
        _is_made,
    ),
    _pattern(
        "url_password",
        "://",
        r"://[^\s/:@\"'<>]{0,128}+:(?P<secret>[^\s/@\"'<>]{3,256}+)@",
        _NOTHING,
        _has_scheme,
    ),
)

# Names

_NAMED_SO = (
    r"(?:pass(?:word|wd|phrase)|pwd|secret|credential|token|"
    r"(?:api|access|auth|secret|private|signing|encryption|account)[_\-. ]?key|apikey)s?"
)
_NAME_CHARS: Final = 128
"""The meaning of a name is at its end; only this many characters of it are looked at."""
_SECRET_NAME: Final = re.compile(rf"(?i)(?:.*[_\-. ]|.*[a-z](?=[A-Z]))?{_NAMED_SO}", re.DOTALL).fullmatch
# Tokens that are units of a model's text or positions in a list, and keys that are meant to be public.
_HARMLESS = (
    r"(?:max|min|num|total|page|next|prev|previous|continuation|sync|pad|eos|bos|sep|cls|mask|unk|stop|special|"
    r"prompt|completion|input|output|reasoning|cached)"
)
_HARMLESS_NAME: Final = re.compile(rf"(?i){_HARMLESS}[_\-. ]?tokens?\Z").search
_HARMLESS_BEFORE: Final = re.compile(rf"(?i){_HARMLESS}[_\-.]?\Z").search
_PUBLIC_NAME: Final = re.compile(
    r"(?i:(?:.*[_\-.])?(?:id|ids|uuid|hash|digest|sha(?:1|256|384|512)?|md5|checksum|integrity|fingerprint|etag|signature|"
    r"pubkey|public[_-]?key|kid|commit|revision|cursor|nonce|traceparent|root))|.*(?:Id|Ids|Hash|Digest|PublicKey|Cursor)",
    re.DOTALL,
).fullmatch
_NUMBER: Final = re.compile(r"[-+]?[0-9][0-9_.,]*+(?:[eE][-+]?[0-9]++)?[A-Za-z%]{0,2}").fullmatch
_PLACEHOLDER: Final = re.compile(
    r"(?i)<.*>|\$\{.*\}|\{.*\}|%.*%|(?-i:\$[A-Z_][A-Z0-9_]*)|\*+|\.+|x{3,}|(?:your|example|sample|dummy|changeme|placeholder|redacted)[_\-a-z]*|"
    r"\[redacted:\w+\]|none|null|true|false|undefined|"
    r"pass|password|passwd|secret|token|string"
).fullmatch
# How code refers to the source of a value.
_REFERENCE: Final = re.compile(r"[A-Za-z_]\w*+(?:\.[A-Za-z_]\w*+)++").fullmatch
_has_letter: Final = re.compile(r"[^\W\d_]").search
_has_more_than_letters: Final = re.compile(r"[\d!@#$%^&*+/=~?]").search


class NameHint(NamedTuple):
    """The meaning of a value's name."""

    secret: bool = False
    public: bool = False


NO_HINT: Final = NameHint()


def name_hint(name: str) -> NameHint:
    end = name[-_NAME_CHARS:]
    if not end:
        return NO_HINT
    secret = _SECRET_NAME(end) is not None and _HARMLESS_NAME(end) is None
    return NameHint(secret, _PUBLIC_NAME(end) is not None)


def is_placeholder(value: str) -> bool:
    return len(value) <= VALUE_CHARS_MAX and _PLACEHOLDER(value.strip("`")) is not None


def is_secret_value(value: str) -> bool:
    """Whether a value with the name of a secret can be one: it is no number, reference, placeholder or prose."""
    if not SECRET_CHARS_MIN <= len(value) <= VALUE_CHARS_MAX or len(value.split(None, 1)) != 1:
        return False
    if _NUMBER(value) is not None or _REFERENCE(value) is not None or is_placeholder(value):
        return False
    return _has_letter(value) is not None and _has_more_than_letters(value) is not None


# Both are for texts in lower case: a search with known case is many times faster.
NAMES: Final = ("pass", "pwd", "secret", "credential", "token", "key")
"""The name of every named secret contains one of these."""
ASSIGNED: Final = re.compile(
    rf"(?P<name>{_NAMED_SO})[\"']?\s{{0,4}}+(?:=>|:=|[:=])\s{{0,4}}+"
    rf"(?:\"([^\"\n]{{6,{VALUE_CHARS_MAX}}}+)\"|'([^'\n]{{6,{VALUE_CHARS_MAX}}}+)'"
    r"|(?P<bare>[^\s\"',;(){}\[\]]{6,}+))"
)
BARE: Final = re.compile(r"[^\s\"',;(){}\[\]]*+")


def is_harmless_name(name: str, before: str) -> bool:
    """`name` is the end of a name in a text, in lower case; `before` is the text in front of it."""
    return name in ("token", "tokens") and _HARMLESS_BEFORE(before) is not None


# Random texts

CANDIDATE: Final = re.compile(r"[A-Za-z0-9+/_-]{24,}+={0,2}")
CANDIDATE_REST: Final = re.compile(r"[A-Za-z0-9+/_-]*+={0,2}")


def _share_of_words(text: str) -> float:
    return sum(len(word[0]) for word in _WORDS.finditer(text)) / len(text)


def looks_random(value: str) -> bool:
    """Whether the characters are mixed, evenly spread and not made of words, as in generated texts."""
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
