"""Requests and answers as an operator is shown them: cut at a length, and without secrets.

Of a request only the headers that are known to hold none are told with their values. Of an answer, a header is told
unless its name or its value says that it holds one. Secrets that somebody gave along are taken out of every text, also
where the other side repeats them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from covenant.wire.json_input import NESTING_MAX, deeper_than
from covenant.wire.redaction import find_secrets, redact
from covenant.wire.redaction_patterns import SEGMENT_CHARS_MAX, name_hint

TEXT_CHARS_MAX: Final = 64 * 1024
"""Of one frame."""
HEADERS_MAX: Final = 100
HEADER_CHARS_MAX: Final = 1_024
GIVEN_CHARS_MIN: Final = 6
"""A shorter word is no secret, and stands in other words."""
HIDDEN: Final = "[redacted]"
OPEN: Final = frozenset(
    """
    accept accept-encoding accept-language a2a-extensions a2a-version connection content-length content-type
    covenant-chain covenant-deadline-ms covenant-depth host idempotency-key last-event-id traceparent tracestate
    transfer-encoding user-agent
    """.split()
)
"""Headers of a request that hold no secret."""
CLOSED: Final = frozenset("authorization cookie proxy-authorization set-cookie".split())


def secrets_in(headers: Mapping[str, str]) -> tuple[str, ...]:
    """What must not be told of the headers that somebody gave along: each value, and each word of one."""
    values = [value for name, value in headers.items() if name.lower() not in OPEN]
    words = [word for value in values for word in (value, *value.split())]
    return tuple(sorted({word for word in words if len(word) >= GIVEN_CHARS_MIN}, key=len, reverse=True))


def redact_sent(headers: Mapping[str, str]) -> dict[str, str]:
    shown = {name: value if name.lower() in OPEN else HIDDEN for name, value in _first(headers)}
    return {name: value[:HEADER_CHARS_MAX] for name, value in shown.items()}


def redact_answered(headers: Mapping[str, str], given: Iterable[str] = ()) -> dict[str, str]:
    return {name: _without(_answered(name, value[:HEADER_CHARS_MAX]), given) for name, value in _first(headers)}


def _first(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    return list(headers.items())[:HEADERS_MAX]


def _answered(name: str, value: str) -> str:
    if name.lower() in CLOSED or name_hint(name).secret or find_secrets(value):
        return HIDDEN
    return value


def redact_body(
    data: bytes, given: Iterable[str] = (), *, chars_max: int = TEXT_CHARS_MAX, public: bool = False
) -> str:
    """As text. A secret that the cut goes through is found, too. Of what is `public`, only what was given is hidden."""
    text = data.decode("utf-8", errors="replace")
    cut = text[: chars_max + SEGMENT_CHARS_MAX]
    value = _parsed(data) if len(cut) == len(text) and not public else None
    if public:
        pass
    elif isinstance(value, dict | list):
        clean = redact(value, "redact")
        cut = msgspec.json.encode(clean.value).decode() if clean.findings else cut
    else:
        cut = str(redact(cut, "redact").value)
    return _without(cut, given)[:chars_max]


def _parsed(data: bytes) -> Any:
    """None for what is no JSON, and for what is nested too deeply to be searched by its members."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None if deeper_than(value, NESTING_MAX) else value


def _without(text: str, given: Iterable[str]) -> str:
    for secret in given:
        text = text.replace(secret, HIDDEN)
    return text
