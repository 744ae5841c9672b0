"""The dashboard's files, read from the package. A file's ETag is its hash.

Text is compressed once, when it is read, for browsers that accept gzip.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple

from starlette.types import Scope

from covenant.doors.http.responses import names_etag, reply, send_answer
from covenant.doors.http.server.http_exchange import HEADERS_BY_NAME, Header, HttpExchange

FOLDER: Final = "static"
PAGE: Final = "html"
CONTENT_TYPES: Final[Mapping[str, bytes]] = {
    PAGE: b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
    "png": b"image/png",
    "ico": b"image/x-icon",
    "woff2": b"font/woff2",
}
COMPRESSED: Final = frozenset({PAGE, "css", "js", "svg"})
# The browser keeps the file and revalidates it each time, so a new version is seen at once.
_REVALIDATED: Final[Header] = (b"cache-control", b"no-cache")
_VARY: Final[Header] = (b"vary", b"accept-encoding")
_GZIP: Final[Header] = (b"content-encoding", b"gzip")


class FileForm(NamedTuple):
    """One encoding of a file, as it is sent."""

    body: bytes
    etag: bytes
    headers: tuple[Header, ...]


class StaticFile(NamedTuple):
    content_type: Header
    plain: FileForm
    compressed: FileForm | None

    @property
    def body(self) -> bytes:
        return self.plain.body


class StaticFiles:
    """All files, read once. `pages` are the HTML shells by name without ending, `assets` the others by name."""

    def __init__(self) -> None:
        self.pages: dict[str, StaticFile] = {}
        self.assets: dict[str, StaticFile] = {}
        for file in files("covenant.dashboard").joinpath(FOLDER).iterdir():
            stem, _, ending = file.name.rpartition(".")
            if ending not in CONTENT_TYPES:
                continue
            made = _file(file.read_bytes(), ending)
            if ending == PAGE:
                self.pages[stem] = made
            else:
                self.assets[file.name] = made


@cache
def _file(body: bytes, ending: str) -> StaticFile:
    digest, content_type = hashlib.sha256(body).hexdigest()[:32].encode(), (b"content-type", CONTENT_TYPES[ending])
    etag = b'"%b"' % digest
    plain = FileForm(body, etag, ((b"etag", etag),))
    if ending not in COMPRESSED:
        return StaticFile(content_type, plain, None)
    # The two encodings have two ETags, so that a cache between daemon and browser keeps them apart.
    gzip_etag = b'"%b-gz"' % digest
    compressed = FileForm(gzip.compress(body, mtime=0), gzip_etag, ((b"etag", gzip_etag), _VARY, _GZIP))
    return StaticFile(content_type, plain._replace(headers=(*plain.headers, _VARY)), compressed)


async def reply_file(scope: Scope, exchange: HttpExchange, file: StaticFile) -> None:
    headers: dict[bytes, bytes] = scope[HEADERS_BY_NAME]
    form = file.plain
    if file.compressed is not None and _takes_gzip(headers.get(b"accept-encoding", b"")):
        form = file.compressed
    if names_etag(headers.get(b"if-none-match", b""), form.etag):
        await send_answer(exchange, 304, [_REVALIDATED, *form.headers])
    else:
        reply(exchange, 200, form.body, form.headers, content_type=file.content_type, cache_control=_REVALIDATED)


def _takes_gzip(accepted: bytes) -> bool:
    """Whether a browser accepts gzip: it names gzip, and not with the weight 0."""
    for each in accepted.lower().split(b","):
        name, _, weight = each.partition(b";")
        if name.strip() == b"gzip":
            return weight.replace(b" ", b"").rstrip(b"0").rstrip(b".") not in (b"q=", b"q=0")
    return False
