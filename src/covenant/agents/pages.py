"""Reading a page of the web for an agent: through the address guard, within limits, as text."""

from __future__ import annotations

import asyncio
import re
from typing import Final

from covenant.agents.html import as_text
from covenant.model.errors import CovenantError
from covenant.outbound.failures import AddressRefused, CallFailed
from covenant.outbound.fetching import Fetcher

PLAIN: Final = ("text/", "application/json", "application/xml", "application/yaml", "application/javascript")
HEAVY_CHARS: Final = 64 * 1024
"""From here on a page is read in a thread: the loop has others to serve."""
_ACCEPT: Final = {"accept": "text/html, text/plain, application/json;q=0.9, */*;q=0.1"}


class PageUnread(CovenantError):
    """Says to the agent why."""


class Pages:
    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    async def read(self, url: str) -> str:
        try:
            fetched = await self._fetcher.fetch("GET", url, headers=_ACCEPT)
        except (AddressRefused, CallFailed) as error:
            raise PageUnread(error.message) from error
        if fetched.status >= 400:
            raise PageUnread(f"HTTP {fetched.status}")
        kind, _, parameters = fetched.headers.get("content-type", "text/plain").partition(";")
        kind = kind.strip().lower()
        found = re.search(r"charset=\"?([\w-]+)", parameters)
        if not kind.startswith(PLAIN) and not kind.endswith(("+json", "+xml")):
            raise PageUnread(f"it is {kind[:80]}, and no text")
        try:
            text = fetched.body.decode(found[1] if found else "utf-8", errors="replace")
        except LookupError:
            text = fetched.body.decode("utf-8", errors="replace")
        if kind not in ("text/html", "application/xhtml+xml"):
            return text
        return as_text(text) if len(text) < HEAVY_CHARS else await asyncio.to_thread(as_text, text)
