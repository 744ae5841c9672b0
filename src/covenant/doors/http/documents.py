"""Documents that callers and caches may keep: an ETag of the content, when it changed, and 304 for whoever has it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime
from email.utils import formatdate, parsedate_to_datetime
from typing import Final, NamedTuple

from starlette.types import Scope, Send

from covenant.doors.http.reply import Header

MAX_AGE_S: Final = 300


class Document(NamedTuple):
    """`public` documents may be kept by shared caches; the others only by who asked. `varies` names request headers."""

    body: bytes
    modified_ms: int
    public: bool
    varies: Sequence[str] = ()
    content_type: bytes = b"application/json"


async def reply_document(scope: Scope, send: Send, document: Document) -> None:
    tag = b'"%s"' % hashlib.sha256(document.body).hexdigest()[:32].encode()
    modified_s = document.modified_ms // 1000
    headers: list[Header] = [
        (b"etag", tag),
        (b"last-modified", formatdate(modified_s, usegmt=True).encode()),
        (b"cache-control", b"%s, max-age=%d" % (b"public" if document.public else b"private", MAX_AGE_S)),
    ]
    if document.varies:
        headers.append((b"vary", ", ".join(document.varies).encode()))
    if _has_it(scope, tag, modified_s):
        await _send(send, 304, headers, b"")
        return
    headers += [(b"content-type", document.content_type), (b"content-length", b"%d" % len(document.body))]
    await _send(send, 200, headers, b"" if scope["method"] == "HEAD" else document.body)


async def _send(send: Send, status: int, headers: list[Header], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _has_it(scope: Scope, tag: bytes, modified_s: int) -> bool:
    """As RFC 9110 says: tags are compared weakly, and where there are tags, the date does not count."""
    since = None
    for name, value in scope["headers"]:
        if name == b"if-none-match":
            tags = [one.strip().removeprefix(b"W/") for one in value.split(b",")]
            return tag in tags or tags == [b"*"]
        if name == b"if-modified-since":
            since = _date(value.decode("latin-1"))
    return since is not None and modified_s <= since.timestamp()


def _date(text: str) -> datetime | None:
    try:
        found = parsedate_to_datetime(text)
    except ValueError:
        return None
    return found if found.tzinfo is not None else None
