"""Names of files that come from others: one segment each, so that whoever saves a file saves it where it means to.

What comes before the last slash or backslash is left out, and so is what cannot be printed. A name that says nothing
then, or that means a folder, is `file`.
"""

from __future__ import annotations

import re
from typing import Final, TypeVar

import msgspec

from covenant.model.content import Content, Json, Resource, ResourceLink, Text
from covenant.model.result import Result
from covenant.model.update import ArtifactUpdate, MessageUpdate, StatusUpdate

NAME_CHARS_MAX: Final = 255
NAMELESS: Final = "file"

S = TypeVar("S", bound=ArtifactUpdate | MessageUpdate | StatusUpdate | Result)
_PLAIN: Final = re.compile(r"[A-Za-z0-9_](?:[\w.,+@() -]{0,98}[\w)])?", re.ASCII).fullmatch
_replace = msgspec.structs.replace


def is_segment(name: str) -> bool:
    return _PLAIN(name) is not None or segment(name) == name


def segment(name: str) -> str:
    last = name[-4 * NAME_CHARS_MAX :].replace("\\", "/").rpartition("/")[2]
    kept = "".join(filter(str.isprintable, last)).strip()[-NAME_CHARS_MAX:]
    return kept if kept.strip(". ") else NAMELESS


def named_safely(said: S) -> S:
    """With such names alone; the very same where they are so already."""
    changed: dict[str, object] = {}
    member = "content" if isinstance(said, Result) else "parts"
    blocks: tuple[Content, ...] = getattr(said, member)
    if (safe := blocks_named_safely(blocks)) is not blocks:
        changed[member] = safe
    if isinstance(said, ArtifactUpdate) and said.name and not is_segment(said.name):
        changed["name"] = segment(said.name)
    return _replace(said, **changed) if changed else said


def name_of(block: Content) -> str | None:
    """What a block calls the file that it is."""
    if isinstance(block, ResourceLink):
        return block.name or None
    return block.filename if isinstance(block, Text | Json | Resource) else None


def blocks_named_safely(blocks: tuple[Content, ...]) -> tuple[Content, ...]:
    if all((name := name_of(block)) is None or is_segment(name) for block in blocks):
        return blocks
    return tuple(map(_named_safely, blocks))


def _named_safely(block: Content) -> Content:
    name = name_of(block)
    if name is None or is_segment(name):
        return block
    if isinstance(block, ResourceLink):
        return _replace(block, name=segment(name))
    return _replace(block, filename=segment(name))
