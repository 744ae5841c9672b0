"""ASGI, for what is no hot route: how a request is described, and an application as a door."""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp

from covenant.doors.http.server.exchange import Exchange

URLS_MAX: Final = 1_024
"""How many URLs are kept as they were read: most requests are for the same few."""
URL_BYTES_MAX: Final = 512
"""Longer ones are not kept."""

Url = tuple[str, bytes, bytes]
"""The path, the path as it was written, and the query."""


class AsgiDoor:
    """An ASGI application behind the server."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def serve(self, exchange: Exchange) -> None:
        await self._app(exchange.scope, exchange.receive, exchange)


class Urls:
    """The URLs that one server has read."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: dict[bytes, Url] = {}

    def read(self, url: bytes) -> Url:
        """Raises httptools.HttpParserInvalidURLError, or UnicodeDecodeError."""
        return self._kept.get(url) or self._read(url)

    def _read(self, url: bytes) -> Url:
        parsed = httptools.parse_url(url)
        raw_path: bytes = parsed.path or b"/"
        path = raw_path.decode("ascii")
        read = (unquote(path) if "%" in path else path, raw_path, parsed.query or b"")
        if len(url) <= URL_BYTES_MAX:
            if len(self._kept) >= URLS_MAX:
                self._kept.clear()
            self._kept[url] = read
        return read
