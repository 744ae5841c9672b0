"""Parts and messages of A2A 1.0, converted to and from content.

A part is a text, raw bytes, a URL or data, with a media type and a file name.

Fields that only MCP's blocks have travel in the part's metadata under `covenant.mcp`, in every dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from covenant.model.a2a_requests import Message
from covenant.model.content import Audio, Content, Embedded, File, Image, Json, Resource, ResourceLink, Size, Text
from covenant.model.errors import InvalidParams
from covenant.model.sanitizer import file_name_of
from covenant.model.task_event import MessageUpdate
from covenant.wire.a2a.protojson import standard_base64

ROLES: Final[dict[str | int, str | None]] = {
    "ROLE_USER": "user",
    "ROLE_AGENT": "agent",
    "ROLE_UNSPECIFIED": None,
    0: None,
    1: "user",
    2: "agent",
}
MCP: Final = "covenant.mcp"
"""The key in a part's metadata for the fields of `McpFields`."""
ROLE_NAMES: Final = {"user": "ROLE_USER", "agent": "ROLE_AGENT"}
_BY_MEDIA: Final[dict[str, type[Image | Audio]]] = {"image": Image, "audio": Audio}


class McpFields(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    annotations: dict[str, Any] | None = None
    meta: dict[str, Any] | None = msgspec.field(name="_meta", default=None)
    title: str | None = None
    description: str | None = None
    size: Size | None = None
    icons: tuple[dict[str, Any], ...] | None = None
    resource_meta: dict[str, Any] | None = None
    """`_meta` of the resource in a `resource` block."""
    uri: str | None = None
    """The URI of the resource in a `resource` block."""


class PartV1(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """A part has one of the first four fields. Null is a valid `data`, so an absent `data` is UNSET."""

    text: str | None = None
    raw: str | None = None
    url: str | None = None
    data: Any = msgspec.UNSET
    metadata: dict[str, Any] | None = None
    filename: str | None = None
    media_type: str | None = None


class MessageV1(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True, kw_only=True):
    message_id: str | None = None
    context_id: str | None = None
    task_id: str | None = None
    role: str | int | None = None
    parts: list[PartV1] | None = None
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] | None = None
    reference_task_ids: tuple[str, ...] | None = None

    def contents(self, where: str) -> tuple[Content, ...]:
        """The message's content. `where` is the place of the parts, for errors."""
        return contents_of(self.parts or (), where)


def contents_of(parts: Iterable[PartV1], where: str) -> tuple[Content, ...]:
    """Converts parts to content. `where` is their place, for errors."""
    found: list[Content] = []
    for at, part in enumerate(parts):
        found.append(_content_of(part, where, at))
    return tuple(found)


def _content_of(part: PartV1, parts: str, at: int) -> Content:
    """Converts a part to content. `parts` is the place of the list that it is in, for errors."""
    text, data, metadata = part.text, part.data, part.metadata
    media_type, filename = part.media_type or None, file_name_of(part.filename) if part.filename else None
    # Next to another member, null means absent.
    holds_data = data is not msgspec.UNSET and data is not None
    if text is not None and part.raw is None and part.url is None and not holds_data:
        block = Text(text, media_type, filename, metadata)
        return block if metadata is None else with_mcp_fields(block)
    where = f"{parts}[{at}]"
    if (text is not None) + (part.raw is not None) + (part.url is not None) + holds_data > 1:
        raise InvalidParams(where, "must have one of text, raw, url and data, not several")
    if part.raw is not None:
        return bytes_block(standard_base64(part.raw, f"{where}.raw"), media_type, filename, metadata)
    if part.url is not None:
        if not part.url:
            raise InvalidParams(f"{where}.url", "is empty")
        return with_mcp_fields(ResourceLink(part.url, filename or "", media_type, metadata=metadata))
    if data is msgspec.UNSET:
        raise InvalidParams(where, "must have one of text, raw, url and data")
    return Json(data, media_type, filename, metadata)


def bytes_block(blob: str, media_type: str | None, filename: str | None, metadata: dict[str, Any] | None) -> Content:
    """An image or audio block, as MCP has them; a resource if there is a URI, a file name or metadata."""
    block = with_mcp_fields(Resource(Embedded("", media_type, blob=blob), filename, metadata))
    kind = _BY_MEDIA.get(media_type.partition("/")[0].lower()) if media_type is not None else None
    if kind is None or media_type is None or not isinstance(block, Resource):
        return block
    if block.filename or block.metadata or block.resource.uri or block.resource.meta:
        return block
    return kind(blob, media_type, block.annotations, block.meta)


def with_mcp_fields(block: Text | Resource | ResourceLink) -> Content:
    """The block with the MCP fields from its metadata; unchanged if those are invalid."""
    metadata = block.metadata
    if metadata is None or MCP not in metadata:
        return block
    try:
        found = msgspec.convert(metadata[MCP], McpFields)
    except msgspec.ValidationError:
        return block
    rest = {key: value for key, value in metadata.items() if key != MCP} or None
    if isinstance(block, Text) and found.uri is not None:
        inner = Embedded(found.uri, block.mimeType, text=block.text, meta=found.resource_meta)
        return Resource(inner, block.filename, rest, found.annotations, found.meta)
    names = [name for name in _BLOCK_FIELDS if name in block.__struct_fields__]
    fields = {name: getattr(found, name) for name in names}
    if isinstance(block, Resource):
        fields["resource"] = msgspec.structs.replace(block.resource, uri=found.uri or "", meta=found.resource_meta)
    return msgspec.structs.replace(block, metadata=rest, **fields)


_BLOCK_FIELDS: Final = tuple(name for name in McpFields.__struct_fields__ if name not in ("resource_meta", "uri"))


def metadata_of(block: Content) -> dict[str, Any] | None:
    """The block's metadata, with its MCP fields under `covenant.mcp`."""
    fields = {name: getattr(block, name, None) for name in _BLOCK_FIELDS}
    if isinstance(block, Resource):
        fields["resource_meta"], fields["uri"] = block.resource.meta, block.resource.uri or None
    metadata: dict[str, Any] | None = getattr(block, "metadata", None)
    if not any(value is not None for value in fields.values()):
        return metadata
    return {**(metadata or {}), MCP: msgspec.to_builtins(McpFields(**fields))}


Link = Callable[[File], str]
"""Returns the URL under which a file can be downloaded."""


def unlinked(file: File) -> str:
    """A path without host and signature, for callers that know the host and have a token."""
    return f"/v1/files/{file.space}/{file.task_id}/{file.sha256}"


def part_of(block: Content, link: Link = unlinked) -> PartV1:
    metadata = metadata_of(block)
    match block:
        case Text(text, media_type, filename):
            return PartV1(text, metadata=metadata, filename=filename, media_type=media_type)
        case Json(value, media_type, filename):
            return PartV1(data=value, metadata=metadata, filename=filename, media_type=media_type)
        case ResourceLink(uri=uri, name=name, mimeType=media_type):
            return PartV1(url=uri, metadata=metadata, filename=name or None, media_type=media_type)
        case Resource(resource, filename):
            if resource.blob is None:
                return PartV1(resource.text or "", metadata=metadata, filename=filename, media_type=resource.mimeType)
            return PartV1(raw=resource.blob, metadata=metadata, filename=filename, media_type=resource.mimeType)
        case Image(data, media_type) | Audio(data, media_type):
            return PartV1(raw=data, metadata=metadata, media_type=media_type)
        case File(mimeType=media_type, filename=filename):
            return PartV1(url=link(block), metadata=metadata, filename=filename, media_type=media_type)


def parts_of(content: Iterable[Content], link: Link = unlinked) -> list[PartV1]:
    """Converts content to parts. The protocol requires at least one: empty content is an empty text."""
    parts: list[PartV1] = []
    for block in content:
        if type(block) is Text and block.annotations is None and block.meta is None:  # nothing that only MCP has
            text, metadata = block.text, block.metadata
            parts.append(PartV1(text, metadata=metadata, filename=block.filename, media_type=block.mimeType))
        else:
            parts.append(part_of(block, link))
    return parts or [PartV1("")]


def message_of(
    message: MessageUpdate | Message, task_id: str | None, context_id: str | None, unnamed: str, link: Link = unlinked
) -> MessageV1:
    """`unnamed` is the id for a message that has none."""
    return MessageV1(
        message_id=message.message_id or unnamed,
        context_id=context_id,
        task_id=task_id,
        role=ROLE_NAMES.get(message.role, "ROLE_AGENT"),
        parts=parts_of(message.parts, link),
        metadata=message.metadata,
        extensions=message.extensions or None,
        reference_task_ids=message.reference_task_ids or None,
    )
