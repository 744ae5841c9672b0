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

from starlette.types import Scope, Send

from covenant.doors.http.responses import Header, reply

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
    tag: bytes
    headers: tuple[Header, ...]


class StaticFile(NamedTuple):
    kind: bytes
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
    tag, kind = hashlib.sha256(body).hexdigest()[:32].encode(), CONTENT_TYPES[ending]
    plain = FileForm(body, b'"%b"' % tag, ((b"etag", b'"%b"' % tag),))
    if ending not in COMPRESSED:
        return StaticFile(kind, plain, None)
    # The two encodings have two ETags, so that a cache between daemon and browser keeps them apart.
    packed = b'"%b-gz"' % tag
    small = FileForm(gzip.compress(body, mtime=0), packed, ((b"etag", packed), _VARY, _GZIP))
    return StaticFile(kind, plain._replace(headers=(*plain.headers, _VARY)), small)


async def reply_file(scope: Scope, send: Send, file: StaticFile) -> None:
    headers: dict[bytes, bytes] = dict(scope["headers"])
    form = file.plain
    if file.compressed is not None and _takes_gzip(headers.get(b"accept-encoding", b"")):
        form = file.compressed
    tags = [tag.strip().removeprefix(b"W/") for tag in headers.get(b"if-none-match", b"").split(b",")]
    status, body = (304, b"") if form.tag in tags else (200, form.body)
    await reply(send, status, body, form.headers, kind=(b"content-type", file.kind), store=_REVALIDATED)


def _takes_gzip(accepted: bytes) -> bool:
    """Whether a browser accepts gzip: it names gzip, and not with the weight 0."""
    for each in accepted.lower().split(b","):
        name, _, weight = each.partition(b";")
        if name.strip() == b"gzip":
            return weight.replace(b" ", b"").rstrip(b"0").rstrip(b".") not in (b"q=", b"q=0")
    return False
