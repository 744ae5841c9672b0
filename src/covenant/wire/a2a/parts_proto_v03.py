"""Parts and messages of A2A 0.3 as protocol buffers (over HTTP+JSON and gRPC), converted to and from content.

The same parts as in JSON-RPC (`parts_v03`), spelt differently: the present member tells the kind of a part, a file's
bytes and URI have their own names, and a message has `content`.

The official SDKs put a file's bytes into their field as base64 text, which the field then encodes once more. So do we;
bytes that are not base64 text are taken as they are.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import msgspec

from covenant.model.a2a_requests import Message
from covenant.model.content import Content
from covenant.model.errors import InvalidParams
from covenant.model.task_event import MessageUpdate
from covenant.wire.a2a import parts_v03
from covenant.wire.a2a.parts_v03 import FileV03, PartV03
from covenant.wire.a2a.parts_v1 import ROLE_NAMES, Link, unlinked
from covenant.wire.a2a.protojson import standard_base64


class FileProtoV03(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    file_with_uri: str | None = None
    file_with_bytes: str | None = None
    mime_type: str | None = None
    name: str | None = None


class DataProtoV03(msgspec.Struct, frozen=True, gc=False):
    data: Any = msgspec.UNSET


class PartProtoV03(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    text: str | None = None
    file: FileProtoV03 | None = None
    data: DataProtoV03 | None = None
    metadata: dict[str, Any] | None = None


class MessageProtoV03(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True, kw_only=True):
    message_id: str | None = None
    context_id: str | None = None
    task_id: str | None = None
    role: str | int | None = None
    content: list[PartProtoV03] | None = None
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] | None = None

    @property
    def parts(self) -> list[PartProtoV03] | None:
        return self.content

    @property
    def reference_task_ids(self) -> tuple[str, ...]:
        """Always empty: this form of a message has no such field."""
        return ()

    def contents(self, where: str) -> tuple[Content, ...]:
        """The message's content. `where` is the place of the parts, for errors."""
        return contents_of(self.content or (), where)


def contents_of(parts: Iterable[PartProtoV03], where: str) -> tuple[Content, ...]:
    """Converts parts to content. `where` is their place, for errors."""
    return tuple(
        [parts_v03.content_of(_part_v03(part, f"{where}[{at}]"), f"{where}[{at}]") for at, part in enumerate(parts)]
    )


def _part_v03(part: PartProtoV03, where: str) -> PartV03:
    present = [name for name in ("text", "file", "data") if getattr(part, name) is not None]
    if len(present) != 1:
        raise InvalidParams(where, "must have one of text, file and data")
    file, data, found = part.file, part.data, None
    if file is not None:
        blob = file.file_with_bytes
        inner = _unwrapped(standard_base64(blob, f"{where}.file.fileWithBytes")) if blob is not None else None
        found = FileV03(inner, file.file_with_uri, file.name, file.mime_type)
    return PartV03(
        present[0],
        part.text,
        found,
        data.data if data is not None else msgspec.UNSET,
        part.metadata,
    )


def _unwrapped(blob: str) -> str:
    """The base64 text that was encoded twice, or `blob` itself if it was encoded once."""
    data = base64.b64decode(blob)
    try:
        base64.b64decode(data, validate=True)
    except ValueError:
        return blob
    return data.decode("ascii")


def part_of(block: Content, link: Link = unlinked) -> PartProtoV03:
    part = parts_v03.part_of(block, link)
    file, data = part.file, part.data
    return PartProtoV03(
        part.text,
        FileProtoV03(file.uri, _wrapped(file.bytes), file.mime_type, file.name) if file is not None else None,
        DataProtoV03(data) if data is not msgspec.UNSET else None,
        part.metadata,
    )


def _wrapped(blob: str | None) -> str | None:
    return base64.b64encode(blob.encode()).decode() if blob is not None else None


def parts_of(content: Iterable[Content], link: Link = unlinked) -> list[PartProtoV03]:
    """Converts content to parts. The protocol requires at least one: empty content is an empty text."""
    return [part_of(block, link) for block in content] or [PartProtoV03("")]


def message_of(
    message: MessageUpdate | Message, task_id: str | None, context_id: str | None, unnamed: str, link: Link = unlinked
) -> MessageProtoV03:
    """`unnamed` is the id for a message that has none."""
    return MessageProtoV03(
        message_id=message.message_id or unnamed,
        context_id=context_id,
        task_id=task_id,
        role=ROLE_NAMES.get(message.role, "ROLE_AGENT"),
        content=parts_of(message.parts, link),
        metadata=message.metadata,
        extensions=message.extensions or None,
    )
