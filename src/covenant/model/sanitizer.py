"""Sanitises input from others: file names, and metadata with reserved keys.

A file name becomes one printable path segment, so that saving the file cannot write to another folder; a name that is
then empty, or means a folder, becomes `file`. Metadata keys under `covenant.` and `x-arbiter.`, and those of a trace,
are reserved: doors read the documented ones into typed fields and drop them all, so only the daemon writes them to the
ledger.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import is_
from typing import Any, Final, TypeVar

import msgspec

from covenant.model.content import Audio, Content, File, Image, Json, Resource, ResourceLink, Text
from covenant.model.task import Result
from covenant.model.task_event import ArtifactUpdate, MessageUpdate, StatusUpdate, Update

NAME_CHARS_MAX: Final = 255
NAMELESS: Final = "file"

S = TypeVar("S", bound=ArtifactUpdate | MessageUpdate | StatusUpdate | Result)
_PLAIN: Final = re.compile(r"[A-Za-z0-9_](?:[\w.,+@() -]{0,98}[\w)])?", re.ASCII).fullmatch
_replace = msgspec.structs.replace
PREFIXES: Final = ("covenant.", "x-arbiter.")
TRACE_KEYS: Final = frozenset({"traceparent", "tracestate"})


def is_file_name(name: str) -> bool:
    return _PLAIN(name) is not None or file_name_of(name) == name


def file_name_of(name: str) -> str:
    last = name[-4 * NAME_CHARS_MAX :].replace("\\", "/").rpartition("/")[2]
    kept = "".join(filter(str.isprintable, last)).strip()[-NAME_CHARS_MAX:]
    return kept if kept.strip(". ") else NAMELESS


def named_safely(value: S) -> S:
    """Returns `value` with safe file names; the same object if all names are safe."""
    if isinstance(value, Result) and blocks_named_safely(value.content) is value.content:
        return value
    changed: dict[str, object] = {}
    member = "content" if isinstance(value, Result) else "parts"
    blocks: tuple[Content, ...] = getattr(value, member)
    if (safe := blocks_named_safely(blocks)) is not blocks:
        changed[member] = safe
    if isinstance(value, ArtifactUpdate) and value.name and not is_file_name(value.name):
        changed["name"] = file_name_of(value.name)
    return _replace(value, **changed) if changed else value


def name_of(block: Content) -> str | None:
    if isinstance(block, ResourceLink):
        return block.name or None
    return block.filename if isinstance(block, Text | Json | Resource | File) else None


def blocks_named_safely(blocks: tuple[Content, ...]) -> tuple[Content, ...]:
    for block in blocks:
        if type(block) is Text and block.filename is None:
            continue  # most of them
        if (name := name_of(block)) is not None and not is_file_name(name):
            return tuple(map(_named_safely, blocks))
    return blocks


def _named_safely(block: Content) -> Content:
    name = name_of(block)
    if name is None or is_file_name(name):
        return block
    if isinstance(block, ResourceLink):
        return _replace(block, name=file_name_of(name))
    return _replace(block, filename=file_name_of(name))


def is_reserved(key: str) -> bool:
    return key.startswith(PREFIXES) or key in TRACE_KEYS


def without_reserved(metadata: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The metadata without reserved keys; None if no key is left."""
    if not metadata:
        return None
    return {key: value for key, value in metadata.items() if not is_reserved(key)} or None


def unreserved_parts(parts: tuple[Content, ...]) -> tuple[Content, ...]:
    """The parts without reserved keys in their metadata; the same tuple if there are none."""
    kept = tuple(map(_unreserved, parts))
    return parts if all(map(is_, kept, parts)) else kept


def unreserved_update(update: Update) -> Update:
    parts, metadata = unreserved_parts(update.parts), update.metadata
    if metadata is not None and any(map(is_reserved, metadata)):
        metadata = without_reserved(metadata)
    if parts is update.parts and metadata is update.metadata:
        return update
    changed: Update = _replace(update, parts=parts, metadata=metadata)
    return changed


def _unreserved(part: Content) -> Content:
    metadata = None if isinstance(part, Image | Audio) else part.metadata
    if metadata is None or not any(map(is_reserved, metadata)):
        return part
    return _replace(part, metadata=without_reserved(metadata))
