"""Content blocks of tasks and results: MCP's blocks, and plain JSON.

`filename`, `mimeType` and `metadata` are optional; an A2A part keeps all three. Fields that only MCP has
(`annotations`, `_meta`, `title`, `size`, `icons`) are kept as they came; an A2A part carries them in its metadata.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeGuard

import msgspec

Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""The size of a linked resource in bytes."""


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
    """The content of a `resource` block: text, or base64 in `blob`."""

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
    """A file in the blob store. Only the daemon makes this block: no request can contain one."""

    sha256: str
    size: Size
    space: str
    """The blob space that holds the bytes. No other space can read them."""
    task_id: str
    """The task that refers to the file."""
    mimeType: str | None = None  # noqa: N815
    filename: str | None = None
    metadata: dict[str, Any] | None = None
    came_as: Literal["", "image", "audio", "resource"] = ""
    """The type of the block whose bytes these were; empty: the file was uploaded."""
    uri: str = ""
    """The URI of the `resource` block; `resource_meta` is that block's `_meta`."""
    resource_meta: dict[str, Any] | None = None
    annotations: dict[str, Any] | None = None
    meta: dict[str, Any] | None = msgspec.field(name="_meta", default=None)


SentContent = Text | Json | Image | Audio | Resource | ResourceLink
"""The blocks that a request may contain."""
Content = SentContent | File


def is_plain(block: Content) -> TypeGuard[Text]:
    """Whether a block is text and nothing else."""
    return type(block) is Text and block == Text(block.text)
