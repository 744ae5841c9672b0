"""Reading a page of the web for an agent: through the address guard, within limits, as text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Final

from covenant.model.errors import CovenantError
from covenant.outbound.failures import AddressRefused, CallFailed
from covenant.outbound.fetching import Fetcher

PLAIN: Final = ("text/", "application/json", "application/xml", "application/yaml", "application/javascript")
_UNSEEN: Final = frozenset({"script", "style", "head", "template", "noscript", "svg"})
_BLOCKS: Final = frozenset(
    "address article aside blockquote br dd div dl dt footer h1 h2 h3 h4 h5 h6 header hr li main nav ol p pre section "
    "table td th tr ul".split()
)
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
        return as_text(text) if kind in ("text/html", "application/xhtml+xml") else text


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.said: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        if tag in _UNSEEN:
            self._hidden += 1
        elif tag in _BLOCKS:
            self.said.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in _UNSEEN:
            self._hidden = max(0, self._hidden - 1)
        elif tag in _BLOCKS:
            self.said.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.said.append(data)


def as_text(html: str) -> str:
    """What a person would read of it, a line a block."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    lines = (" ".join(line.split()) for line in "".join(reader.said).splitlines())
    return "\n".join(line for line in lines if line)
