"""Redacts requests and answers that an operator is shown, and cuts them at a length.

Of a request, only headers that are known to hold no secret keep their values. Of an answer, a header keeps its value
unless its name or value suggests a secret. Secrets that a caller passed are removed from every text, also where the
other side repeats them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from covenant.wire.json_input import NESTING_MAX, deeper_than
from covenant.wire.redaction import find_secrets, redact
from covenant.wire.redaction_patterns import SEGMENT_CHARS_MAX, name_hint

TEXT_CHARS_MAX: Final = 64 * 1024
"""The most characters that are shown of one frame."""
HEADERS_MAX: Final = 100
HEADER_CHARS_MAX: Final = 1_024
CALLER_SECRET_CHARS_MIN: Final = 6
"""A shorter word is no secret, and occurs inside other words."""
HIDDEN: Final = "[redacted]"
PUBLIC_HEADERS: Final = frozenset(
    """
    accept accept-encoding accept-language a2a-extensions a2a-version connection content-length content-type
    covenant-chain covenant-deadline-ms covenant-depth host idempotency-key last-event-id traceparent tracestate
    transfer-encoding user-agent
    """.split()
)
"""Request headers that hold no secret."""
_QUERY: Final = re.compile(r"(https?://[^\s?\"'<>]*+\?)([^\s#\"'<>]++)", re.IGNORECASE)
_PATH: Final = re.compile(r"(?i)^(https?://[^/?#\s]++/)[^?#]++")
_PUSH_MEMBERS: Final = frozenset("authentication taskId task_id token".split())
_PUSH_PLACES: Final = frozenset(
    """
    pushNotification push_notification pushNotificationConfig push_notification_config taskPushNotificationConfig
    task_push_notification_config
    """.split()
)
_PUSH_IN_TEXT: Final = re.compile(r"(?i)push_?notification")
_PATH_IN_TEXT: Final = re.compile(r"(?i)(\"url\"\s*+:\s*+\"https?://[^/?#\s\"]++/)[^?#\s\"]++")
SECRET_HEADERS: Final = frozenset("authorization cookie proxy-authorization set-cookie".split())


def secrets_in(headers: Mapping[str, str]) -> tuple[str, ...]:
    """The secrets in the headers that a caller passed: each value, and each word of a value."""
    values = [value for name, value in headers.items() if name.lower() not in PUBLIC_HEADERS]
    words = [word for value in values for word in (value, *value.split())]
    return tuple(sorted({word for word in words if len(word) >= CALLER_SECRET_CHARS_MIN}, key=len, reverse=True))


def redact_request_headers(headers: Mapping[str, str]) -> dict[str, str]:
    shown = {name: value if name.lower() in PUBLIC_HEADERS else HIDDEN for name, value in _first(headers)}
    return {name: value[:HEADER_CHARS_MAX] for name, value in shown.items()}


def redact_answer_headers(headers: Mapping[str, str], secrets: Iterable[str] = ()) -> dict[str, str]:
    return {name: _hide(_answer_value(name, value[:HEADER_CHARS_MAX]), secrets) for name, value in _first(headers)}


def _first(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    return list(headers.items())[:HEADERS_MAX]


def _answer_value(name: str, value: str) -> str:
    if name.lower() in SECRET_HEADERS or name_hint(name).secret or find_secrets(value):
        return HIDDEN
    return value


def redact_body(
    data: bytes, secrets: Iterable[str] = (), *, chars_max: int = TEXT_CHARS_MAX, public: bool = False
) -> str:
    """The body as redacted text, also of a secret that the cut splits. In a `public` body only `secrets` are hidden."""
    text = data.decode("utf-8", errors="replace")
    cut = text[: chars_max + SEGMENT_CHARS_MAX]
    value = _parsed(data) if len(cut) == len(text) and not public else None
    if public:
        pass
    elif isinstance(value, dict | list):
        clean = _without_queries(redact(value, "redact").value)
        cut = msgspec.json.encode(clean).decode() if clean != value else cut
    else:
        cut = _without_queries(str(redact(cut, "redact").value))
        cut = _PATH_IN_TEXT.sub(rf"\1{HIDDEN}", cut) if _PUSH_IN_TEXT.search(cut) else cut
    return _hide(cut, secrets)[:chars_max]


def _without_queries(value: Any, place: str = "") -> Any:
    """Hides the values of query strings and the paths of webhooks: they hold secrets, which may be short."""
    if isinstance(value, str):
        return _QUERY.sub(lambda found: found[1] + "&".join(map(_hidden, found[2].split("&"))), value)
    if isinstance(value, dict):
        if isinstance(url := value.get("url"), str) and (
            place in _PUSH_PLACES
            or not _PUSH_MEMBERS.isdisjoint(value)
            or (not place and value.keys() <= {"url", "id"})
        ):
            value = {**value, "url": _PATH.sub(rf"\1{HIDDEN}", url)}
        return {name: _without_queries(each, name) for name, each in value.items()}
    return [_without_queries(each, place) for each in value] if isinstance(value, list) else value


def _hidden(pair: str) -> str:
    name, equals, _ = pair.partition("=")
    return f"{name}={HIDDEN}" if equals else HIDDEN


def _parsed(data: bytes) -> Any:
    """The decoded JSON; None for a text that is not JSON, or nested too deeply to be searched."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None if deeper_than(value, NESTING_MAX) else value


def _hide(text: str, secrets: Iterable[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text
