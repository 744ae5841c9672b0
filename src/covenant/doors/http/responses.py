"""Replies: a status and a JSON body that no cache may keep (receiving is a GET)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from email.utils import formatdate, parsedate_to_datetime
from typing import Any, Final, NamedTuple

import msgspec
from starlette.types import Scope

from covenant.doors.http.server.http_exchange import HEADERS_BY_NAME, Header, HttpExchange
from covenant.doors.http.server.http_refusals import JSON, method_not_allowed
from covenant.doors.operator_api.operation import encode, error_of
from covenant.exchange.access.tenants import REASONS
from covenant.model.errors import Conflict, Refusal, Unauthenticated

TRANSPORT: Final = "http"
"""The name of this transport in metrics and in the audit."""
MCP_PATH: Final = "/mcp"

NO_STORE: Final[Header] = (b"cache-control", b"no-store")
_CHALLENGE: Final[Header] = (b"www-authenticate", b"Bearer")

# For refusals without a time of their own.
_RETRY_AFTER_MS: Final = {429: 1_000, 503: 5_000}
MAX_AGE_S: Final = 300


def reply(
    exchange: HttpExchange,
    status: int,
    body: bytes,
    headers: Sequence[Header] = (),
    *,
    content_type: Header = JSON,
    cache_control: Header = NO_STORE,
) -> None:
    exchange.answer(status, (content_type, cache_control, *headers), body)


async def send_answer(exchange: HttpExchange, status: int, headers: list[Header], body: bytes = b"") -> None:
    """Sends a whole answer with exactly these headers. They are not cached, so they may hold a secret."""
    await exchange({"type": "http.response.start", "status": status, "headers": headers})
    await exchange({"type": "http.response.body", "body": body})


class Style(NamedTuple):
    """A protocol's way to refuse: the body of a refusal, and the names under which it is counted and logged."""

    refusal_body: Callable[[Refusal], bytes]
    transport: str = TRANSPORT
    failed: str = "http.failed"
    """The log event of a request that failed by an internal error."""


class Problem(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A refusal under `/v1`. `existing` is the object that is in the way."""

    error: str
    code: str
    reason: str | None = None
    retry_after_seconds: int | None = None
    existing: Any = None


class AlreadyExists(Conflict):
    """A refusal that shows the existing object."""

    def __init__(self, refusal: Refusal, existing: Any) -> None:
        super().__init__(refusal.code, refusal.message)
        self.existing = existing


def problem_body(refusal: Refusal) -> bytes:
    problem = Problem(
        error=refusal.message,
        code=refusal.code,
        reason=refusal.code if refusal.code in REASONS else None,
        retry_after_seconds=_retry_after_s(refusal),
        existing=refusal.existing if isinstance(refusal, AlreadyExists) else None,
    )
    return msgspec.json.encode(problem)


MAILBOX: Final = Style(lambda refusal: encode(error_of(refusal)))
PROBLEM: Final = Style(problem_body)


def style_of(path: str) -> Style:
    """The style of refusals at this path: problems, except at the mailbox."""
    return PROBLEM if path.startswith(("/v1/", "/api/v1/")) or path == MCP_PATH else MAILBOX


def reply_refused(exchange: HttpExchange, style: Style, refusal: Refusal, headers: Sequence[Header] = ()) -> None:
    reply(exchange, refusal.status, style.refusal_body(refusal), (*refusal_headers(refusal), *headers))


def reply_not_allowed(exchange: HttpExchange, style: Style, methods: Iterable[str]) -> None:
    allowed = ", ".join(methods)
    reply_refused(exchange, style, method_not_allowed(allowed), [(b"allow", allowed.encode())])


def refusal_form(style: Style, refusal: Refusal) -> tuple[tuple[Header, ...], bytes]:
    """The headers and body of a refusal, for the server, which refuses in place of a door."""
    return (JSON, NO_STORE, *refusal_headers(refusal)), style.refusal_body(refusal)


def refusal_headers(refusal: Refusal) -> list[Header]:
    if isinstance(refusal, Unauthenticated):
        return [_CHALLENGE]
    retry_after_s = _retry_after_s(refusal)
    return [] if retry_after_s is None else [(b"retry-after", b"%d" % retry_after_s)]


def _retry_after_s(refusal: Refusal) -> int | None:
    """When to try again, in whole seconds; None if the refusal has no such time."""
    retry_after_ms = refusal.retry_after_ms or _RETRY_AFTER_MS.get(refusal.status)
    return None if retry_after_ms is None else max(1, -(-retry_after_ms // 1000))


class Document(NamedTuple):
    """`public` documents may be kept by shared caches, others only by the caller's. `varies` names request headers."""

    body: bytes
    modified_ms: int
    public: bool
    varies: Sequence[str] = ()
    content_type: bytes = b"application/json"


async def reply_document(scope: Scope, exchange: HttpExchange, document: Document) -> None:
    etag = b'"%s"' % hashlib.sha256(document.body).hexdigest()[:32].encode()
    modified_s = document.modified_ms // 1000
    headers: list[Header] = [
        (b"etag", etag),
        (b"last-modified", formatdate(modified_s, usegmt=True).encode()),
        (b"cache-control", b"%s, max-age=%d" % (b"public" if document.public else b"private", MAX_AGE_S)),
    ]
    if document.varies:
        headers.append((b"vary", ", ".join(document.varies).encode()))
    if _is_current(scope, etag, modified_s):
        await send_answer(exchange, 304, headers)
        return
    headers += [(b"content-type", document.content_type), (b"content-length", b"%d" % len(document.body))]
    await send_answer(exchange, 200, headers, b"" if scope["method"] == "HEAD" else document.body)


def _is_current(scope: Scope, etag: bytes, modified_s: int) -> bool:
    """Whether the caller has the document already. By RFC 9110, the date does not count beside tags."""
    headers = scope[HEADERS_BY_NAME]
    if (tags := headers.get(b"if-none-match")) is not None:
        return names_etag(tags, etag)
    since = _parse_date(headers.get(b"if-modified-since", b"").decode("latin-1"))
    return since is not None and modified_s <= since.timestamp()


def names_etag(if_none_match: bytes, etag: bytes) -> bool:
    """Whether `If-None-Match` names this tag or `*`. By RFC 9110, tags are compared weakly."""
    return any(each.strip().removeprefix(b"W/") in (b"*", etag) for each in if_none_match.split(b","))


def _parse_date(text: str) -> datetime | None:
    try:
        found = parsedate_to_datetime(text)
    except ValueError:
        return None
    return found if found.tzinfo is not None else None
