"""Content blocks: what tasks carry and results return. MCP's blocks, and plain JSON.

`filename`, `mimeType` and `metadata` say more about a block where its sender did; an A2A part keeps all three. What
only MCP has (`annotations`, `_meta`, `title`, `size`, `icons`) is kept as it came; an A2A part has it in its metadata.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeGuard

import msgspec

Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Of a linked resource, in bytes."""


class Text(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="text", omit_defaults=True):
    text: str
    mimeType: str | None = None  # noqa: N815  (MCP's spelling, kept on the wire and inside)
    filename: str | None = None
    metadata: dict[str, Any] | None = None
    annotations: dict[str, Any] | None = None
    meta: dict[str, Any] | None = msgspec.field(name="_meta", default=None)


class Json(msgspec.Struct, frozen=True, tag_field="type", tag="json", omit_defaults=True):
    value: Any
    mimeType: str | None = None  # noqa: N815
    filename: str | None = None
    metadata: dict[str, Any] | None = None


class Image(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="image", omit_defaults=True):
    """`data` is base64."""

    data: str
    mimeType: str  # noqa: N815
    annotations: dict[str, Any] | None = None
    meta: dict[str, Any] | None = msgspec.field(name="_meta", default=None)


class Audio(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="audio", omit_defaults=True):
    data: str
    mimeType: str  # noqa: N815
    annotations: dict[str, Any] | None = None
    meta: dict[str, Any] | None = msgspec.field(name="_meta", default=None)


class Embedded(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What a `resource` block holds: text, or base64 in `blob`."""

    uri: str
    mimeType: str | None = None  # noqa: N815
    text: str | None = None
    blob: str | None = None
    meta: dict[str, Any] | None = msgspec.field(name="_meta", default=None)


class Resource(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="resource", omit_defaults=True):
    resource: Embedded
    filename: str | None = None
    metadata: dict[str, Any] | None = None
    annotations: dict[str, Any] | None = None
    meta: dict[str, Any] | None = msgspec.field(name="_meta", default=None)


class ResourceLink(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="resource_link", omit_defaults=True):
    uri: str
    name: str = ""
    mimeType: str | None = None  # noqa: N815
    description: str | None = None
    metadata: dict[str, Any] | None = None
    title: str | None = None
    size: Size | None = None
    icons: tuple[dict[str, Any], ...] | None = None
    annotations: dict[str, Any] | None = None
    meta: dict[str, Any] | None = msgspec.field(name="_meta", default=None)


class File(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="file", omit_defaults=True, kw_only=True):
    """Bytes that are in the blob store. Only the daemon makes one: no request can say it."""

    sha256: str
    size: Size
    space: str
    """Where it is: no other space knows it."""
    task_id: str
    """The task that refers to it."""
    mimeType: str | None = None  # noqa: N815
    filename: str | None = None
    metadata: dict[str, Any] | None = None
    came_as: Literal["", "image", "audio", "resource"] = ""
    """The block that its bytes were in; empty: they were uploaded."""
    uri: str = ""
    """Of what a `resource` block held, as are `resource_meta`."""
    resource_meta: dict[str, Any] | None = None
    annotations: dict[str, Any] | None = None
    meta: dict[str, Any] | None = msgspec.field(name="_meta", default=None)


SentContent = Text | Json | Image | Audio | Resource | ResourceLink
"""What somebody else may say."""
Content = SentContent | File


def is_plain(block: Content) -> TypeGuard[Text]:
    """Whether a block is text and nothing else."""
    return (
        type(block) is Text
        and block.metadata is None
        and block.mimeType is None
        and block.filename is None
        and block.annotations is None
        and block.meta is None
    )
