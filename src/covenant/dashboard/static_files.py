"""The files that the dashboard is made of, as they stand in the package. Each has its hash as its tag."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
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
# Kept by the browser, and asked for each time whether it is still the same: a new version is seen at once.
_REVALIDATED: Final[Header] = (b"cache-control", b"no-cache")


class StaticFile(NamedTuple):
    body: bytes
    kind: bytes
    tag: bytes


class StaticFiles:
    """Read once. `pages` are the HTML shells by name without ending, `assets` the other files by name."""

    def __init__(self) -> None:
        self.pages: dict[str, StaticFile] = {}
        self.assets: dict[str, StaticFile] = {}
        for file in files("covenant.dashboard").joinpath(FOLDER).iterdir():
            stem, _, ending = file.name.rpartition(".")
            if ending not in CONTENT_TYPES:
                continue
            body = file.read_bytes()
            made = StaticFile(body, CONTENT_TYPES[ending], b'"%s"' % hashlib.sha256(body).hexdigest()[:32].encode())
            if ending == PAGE:
                self.pages[stem] = made
            else:
                self.assets[file.name] = made


async def reply_file(scope: Scope, send: Send, file: StaticFile) -> None:
    headers: tuple[Header, ...] = ((b"etag", file.tag),)
    known = next((value for name, value in scope["headers"] if name == b"if-none-match"), b"")
    tags = [tag.strip().removeprefix(b"W/") for tag in known.split(b",")]
    status, body = (304, b"") if file.tag in tags else (200, file.body)
    await reply(send, status, body, headers, kind=(b"content-type", file.kind), store=_REVALIDATED)
