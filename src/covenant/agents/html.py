"""HTML as text: what a person would read of a page, a line a block.

Reading takes time that grows with the page and no faster, whatever the page is: each character is passed over once. The
standard library's parser takes minutes for a hundred kilobytes of tags that are never closed. A tag, comment or script
that has no end hides the rest of the page, as it does in a browser.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from typing import Final

_UNSEEN: Final = frozenset({"script", "style", "head", "template", "noscript", "svg"})
_RAW: Final = frozenset({"script", "style"})
"""What is in these is no HTML: it ends at their closing tag and nowhere else."""
_BLOCKS: Final = frozenset(
    "address article aside blockquote br dd div dl dt footer h1 h2 h3 h4 h5 h6 header hr li main nav ol p pre section "
    "table td th tr ul".split()
)
_TAG: Final = re.compile(r"</?([A-Za-z][A-Za-z0-9-]{0,63}+)")
_ATTRIBUTES: Final = re.compile(r"(?:[^\"'>]++|\"[^\"]*+\"|'[^']*+')*+>")
_HUGE_NUMBER: Final = re.compile(r"&#[0-9]{8,}+;?|&#[xX][0-9A-Fa-f]{8,}+;?")
"""No character has such a number, and reading one takes long."""
_RAW_END: Final = {name: re.compile(rf"</{name}(?![A-Za-z0-9-])", re.IGNORECASE) for name in _RAW}


def as_text(html: str) -> str:
    said = unescape(_HUGE_NUMBER.sub("\ufffd", "".join(_said(html))))
    lines = (" ".join(line.split()) for line in said.splitlines())
    return "\n".join(line for line in lines if line)


def _said(html: str) -> Iterator[str]:
    """The texts between tags, and a line's end for each block."""
    at = hidden = 0
    while (start := html.find("<", at)) >= 0:
        if not hidden:
            yield html[at:start]
        tag = _TAG.match(html, start)
        if tag is None:
            end = _declared(html, start)
            if end is None and not hidden:
                yield "<"
            at = end if end is not None else start + 1
            continue
        attributes = _ATTRIBUTES.match(html, tag.end())
        if attributes is None:
            return
        at, name, closing = attributes.end(), tag[1].lower(), html[start + 1] == "/"
        if name in _RAW and not closing:
            ending = _RAW_END[name].search(html, at)
            if ending is None:
                return
            at, hidden = ending.start(), hidden + 1
        elif name in _UNSEEN and not html.endswith("/>", start, at):
            hidden = max(0, hidden - 1) if closing else hidden + 1
        elif name in _BLOCKS and not hidden:
            yield "\n"
    if not hidden:
        yield html[at:]


def _declared(html: str, start: int) -> int | None:
    """Where a comment or declaration ends; None if none begins here."""
    if html.startswith("<!--", start):
        end = html.find("-->", start + 4)
        return end + 3 if end >= 0 else len(html)
    if html.startswith(("<!", "<?"), start):
        end = html.find(">", start)
        return end + 1 if end >= 0 else len(html)
    return None
