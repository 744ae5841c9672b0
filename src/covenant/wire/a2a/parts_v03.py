"""Parts and messages of the slash methods (A2A 0.3), converted to and from content.

A text part and a data part have no field for a media type or a file name, and data must be an object. So that nothing
is lost between the dialects, these travel in the part's metadata; a value that is not an object travels as `{"value":
…}` under the mark that the official SDK reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from covenant.model.a2a_requests import Message
from covenant.model.content import Audio, Content, File, Image, Json, Resource, ResourceLink, Text, is_plain
from covenant.model.errors import InvalidParams
from covenant.model.sanitizer import file_name_of
from covenant.model.task_event import MessageUpdate
from covenant.wire.a2a.parts_v1 import Link, bytes_block, metadata_of, unlinked, with_mcp_fields
from covenant.wire.a2a.protojson import standard_base64

MEDIA_TYPE: Final = "covenant.media_type"
FILENAME: Final = "covenant.filename"
WRAPPED: Final = "data_part_compat"
ROLES: Final[dict[str | int, str | None]] = {"user": "user", "agent": "agent"}


class FileV03(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    bytes: str | None = None
    uri: str | None = None
    name: str | None = None
    mime_type: str | None = None


class PartV03(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    kind: str | None = None
    text: str | None = None
    file: FileV03 | None = None
    data: Any = msgspec.UNSET
    metadata: dict[str, Any] | None = None


class MessageV03(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True, kw_only=True):
    kind: str | None = None
    message_id: str | None = None
    context_id: str | None = None
    task_id: str | None = None
    role: str | None = None
    parts: list[PartV03] | None = None
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] | None = None
    reference_task_ids: tuple[str, ...] | None = None

    def contents(self, where: str) -> tuple[Content, ...]:
        """The message's content. `where` is the place of the parts, for errors."""
        return tuple([content_of(part, f"{where}[{at}]") for at, part in enumerate(self.parts or ())])


def content_of(part: PartV03, where: str) -> Content:
    match part.kind:
        case "text":
            if part.text is None:
                raise InvalidParams(f"{where}.text", "is required")
            if part.metadata is None:
                return Text(part.text)
            media_type, filename, metadata = _split_metadata(part.metadata)
            return with_mcp_fields(Text(part.text, media_type, filename, metadata))
        case "file":
            if part.file is None:
                raise InvalidParams(f"{where}.file", "is required")
            return _file(part.file, part.metadata, f"{where}.file")
        case "data":
            return _data(part, f"{where}.data")
        case None:
            raise InvalidParams(f"{where}.kind", "is required")
        case other:
            raise InvalidParams(f"{where}.kind", f"{other[:40]!r} is not one of text, file, data")


def _file(file: FileV03, metadata: dict[str, Any] | None, where: str) -> Content:
    if (file.bytes is None) == (file.uri is None):
        raise InvalidParams(where, "must have either bytes or uri")
    media_type, name = file.mime_type or None, file_name_of(file.name) if file.name else None
    if file.bytes is not None:
        return bytes_block(standard_base64(file.bytes, f"{where}.bytes"), media_type, name, metadata)
    if not file.uri:
        raise InvalidParams(f"{where}.uri", "is empty")
    return with_mcp_fields(ResourceLink(file.uri, name or "", media_type, metadata=metadata))


def _data(part: PartV03, where: str) -> Json:
    value, metadata = part.data, part.metadata
    if value is msgspec.UNSET or value is None:
        raise InvalidParams(where, "is required")
    if not metadata:
        return Json(value, metadata=metadata)
    if metadata.get(WRAPPED) is True and isinstance(value, dict) and "value" in value:
        value = value["value"]
        metadata = {key: kept for key, kept in metadata.items() if key != WRAPPED} or None
    media_type, filename, metadata = _split_metadata(metadata)
    return Json(value, media_type, filename, metadata)


def _split_metadata(metadata: dict[str, Any] | None) -> tuple[str | None, str | None, dict[str, Any] | None]:
    """The media type and file name from the metadata, and the rest of it."""
    if not metadata or (MEDIA_TYPE not in metadata and FILENAME not in metadata):
        return None, None, metadata
    rest = dict(metadata)
    media_type, filename = rest.pop(MEDIA_TYPE, None), rest.pop(FILENAME, None)
    if not isinstance(media_type, str | None) or not isinstance(filename, str | None):
        return None, None, metadata
    return media_type, file_name_of(filename) if filename else filename, rest or None


def part_of(block: Content, link: Link = unlinked) -> PartV03:
    if is_plain(block):
        return PartV03("text", block.text)
    metadata = metadata_of(block)
    match block:
        case Text(text, media_type, filename):
            return PartV03("text", text, metadata=_with_file_fields(metadata, media_type, filename))
        case Json(value, media_type, filename):
            noted = _with_file_fields(metadata, media_type, filename)
            if isinstance(value, dict):
                return PartV03("data", data=value, metadata=noted)
            return PartV03("data", data={"value": value}, metadata={**(noted or {}), WRAPPED: True})
        case ResourceLink(uri=uri, name=name, mimeType=media_type):
            return PartV03("file", file=FileV03(uri=uri, name=name or None, mime_type=media_type), metadata=metadata)
        case Resource(resource, filename):
            if resource.blob is None:
                return PartV03(
                    "text", resource.text or "", metadata=_with_file_fields(metadata, resource.mimeType, filename)
                )
            file = FileV03(bytes=resource.blob, name=filename, mime_type=resource.mimeType)
            return PartV03("file", file=file, metadata=metadata)
        case Image(data, media_type) | Audio(data, media_type):
            return PartV03("file", file=FileV03(bytes=data, mime_type=media_type), metadata=metadata)
        case File(mimeType=media_type, filename=filename):
            file = FileV03(uri=link(block), name=filename, mime_type=media_type)
            return PartV03("file", file=file, metadata=metadata)


def _with_file_fields(
    metadata: dict[str, Any] | None, media_type: str | None, filename: str | None
) -> dict[str, Any] | None:
    if media_type is None and filename is None:
        return metadata
    noted = dict(metadata or {})
    if media_type is not None:
        noted[MEDIA_TYPE] = media_type
    if filename is not None:
        noted[FILENAME] = filename
    return noted


def parts_of(content: Iterable[Content], link: Link = unlinked) -> list[PartV03]:
    """Converts content to parts. The protocol requires at least one: empty content is an empty text."""
    return [part_of(block, link) for block in content] or [PartV03("text", "")]


def message_of(
    message: MessageUpdate | Message, task_id: str | None, context_id: str | None, unnamed: str, link: Link = unlinked
) -> MessageV03:
    """`unnamed` is the id for a message that has none."""
    return MessageV03(
        kind="message",
        message_id=message.message_id or unnamed,
        context_id=context_id,
        task_id=task_id,
        role="user" if message.role == "user" else "agent",
        parts=parts_of(message.parts, link),
        metadata=message.metadata,
        extensions=message.extensions or None,
        reference_task_ids=message.reference_task_ids or None,
    )
