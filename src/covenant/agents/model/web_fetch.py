"""Reads and searches the web for an agent: through the address guard, within limits, as text."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from html import unescape
from typing import Final
from urllib.parse import quote

from covenant.agents.model.mcp_tools import McpTools
from covenant.model.errors import CovenantError
from covenant.outbound.call_errors import AddressRefused, CallFailed
from covenant.outbound.http_fetcher import Fetcher

TEXT_TYPES: Final = ("text/", "application/json", "application/xml", "application/yaml", "application/javascript")
THREAD_CHARS_MIN: Final = 64 * 1024
"""A larger page is converted in a thread, so that the event loop stays free."""
_ACCEPT: Final = {"accept": "text/html, text/plain, application/json;q=0.9, */*;q=0.1"}
QUERY: Final = "{query}"
MCP_PREFIX: Final = "mcp:"
_HIDDEN_TAGS: Final = frozenset({"script", "style", "head", "template", "noscript", "svg"})
_RAW_TAGS: Final = frozenset({"script", "style"})
"""Their content is not HTML, and ends only at their closing tag."""
_BLOCKS: Final = frozenset(
    "address article aside blockquote br dd div dl dt footer h1 h2 h3 h4 h5 h6 header hr li main nav ol p pre section "
    "table td th tr ul".split()
)
_TAG: Final = re.compile(r"</?([A-Za-z][A-Za-z0-9-]{0,63}+)")
_ATTRIBUTES: Final = re.compile(r"(?:[^\"'>]++|\"[^\"]*+\"|'[^']*+')*+>")
_HUGE_NUMBER: Final = re.compile(r"&#[0-9]{8,}+;?|&#[xX][0-9A-Fa-f]{8,}+;?")
"""No character has a number this large, and parsing one takes long."""
_RAW_END: Final = {name: re.compile(rf"</{name}(?![A-Za-z0-9-])", re.IGNORECASE) for name in _RAW_TAGS}


class PageUnreadable(CovenantError):
    """A page cannot be read. The message tells the agent why."""


class WebPages:
    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    async def read(self, url: str) -> str:
        try:
            fetched = await self._fetcher.fetch("GET", url, headers=_ACCEPT)
        except (AddressRefused, CallFailed) as error:
            raise PageUnreadable(error.message) from error
        if fetched.status >= 400:
            raise PageUnreadable(f"HTTP {fetched.status}")
        kind, _, parameters = fetched.headers.get("content-type", "text/plain").partition(";")
        kind = kind.strip().lower()
        found = re.search(r"charset=\"?([\w-]+)", parameters)
        if not kind.startswith(TEXT_TYPES) and not kind.endswith(("+json", "+xml")):
            raise PageUnreadable(f"the page is {kind[:80]}, not text")
        try:
            text = fetched.body.decode(found[1] if found else "utf-8", errors="replace")
        except LookupError:
            text = fetched.body.decode("utf-8", errors="replace")
        if kind not in ("text/html", "application/xhtml+xml"):
            return text
        return html_to_text(text) if len(text) < THREAD_CHARS_MIN else await asyncio.to_thread(html_to_text, text)


class WebSearch:
    """Searches by a page whose address contains `{query}`, or by a tool of an MCP server, `mcp:server.tool`."""

    def __init__(self, address: str, pages: WebPages, tools: McpTools | None) -> None:
        self._address = address
        self._pages = pages
        self._tools = tools
        self._server, _, self._tool = address.removeprefix(MCP_PREFIX).partition(".")

    def serves(self, tenant: str) -> bool:
        """Whether the tenant may search. A search page is open to every tenant, a tool to its server's tenants."""
        if not self._address.startswith(MCP_PREFIX):
            return True
        return self._tools is not None and self._tools.serves(tenant, self._server)

    async def find(self, tenant: str, query: str) -> str:
        if not self._address.startswith(MCP_PREFIX):
            return await self._pages.read(self._address.replace(QUERY, quote(query, safe="")))
        assert self._tools is not None
        answer = await self._tools.call(tenant, None, self._server, self._tool, {"query": query})
        if answer.failed:
            raise PageUnreadable(answer.text or "the search failed")
        return answer.text


def html_to_text(html: str) -> str:
    """The text of a page, a line a block, in linear time.

    The standard library's parser takes minutes for a hundred kilobytes of tags that are never closed. A tag, comment or
    script without an end hides the rest of the page, as it does in a browser.
    """
    text = unescape(_HUGE_NUMBER.sub("\ufffd", "".join(_texts(html))))
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def _texts(html: str) -> Iterator[str]:
    """The texts between tags, and a line break for each block."""
    at = hidden = 0
    while (start := html.find("<", at)) >= 0:
        if not hidden:
            yield html[at:start]
        tag = _TAG.match(html, start)
        if tag is None:
            end = _declaration_end(html, start)
            if end is None and not hidden:
                yield "<"
            at = end if end is not None else start + 1
            continue
        attributes = _ATTRIBUTES.match(html, tag.end())
        if attributes is None:
            return
        at, name, closing = attributes.end(), tag[1].lower(), html[start + 1] == "/"
        if name in _RAW_TAGS and not closing:
            ending = _RAW_END[name].search(html, at)
            if ending is None:
                return
            at, hidden = ending.start(), hidden + 1
        elif name in _HIDDEN_TAGS and not html.endswith("/>", start, at):
            hidden = max(0, hidden - 1) if closing else hidden + 1
        elif name in _BLOCKS and not hidden:
            yield "\n"
    if not hidden:
        yield html[at:]


def _declaration_end(html: str, start: int) -> int | None:
    """The end of the comment or declaration that begins here; None if none begins here."""
    if html.startswith("<!--", start):
        end = html.find("-->", start + 4)
        return end + 3 if end >= 0 else len(html)
    if html.startswith(("<!", "<?"), start):
        end = html.find(">", start)
        return end + 1 if end >= 0 else len(html)
    return None
