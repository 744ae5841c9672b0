"""Content blocks: what tasks carry and results return. MCP's blocks, and plain JSON.

`filename`, `mimeType` and `metadata` say more about a block where its sender did; an A2A part keeps all three.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import msgspec


class Text(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="text", omit_defaults=True):
    text: str
    mimeType: str | None = None  # noqa: N815  (MCP's spelling, kept on the wire and inside)
    filename: str | None = None
    metadata: dict[str, Any] | None = None


class Json(msgspec.Struct, frozen=True, tag_field="type", tag="json", omit_defaults=True):
    value: Any
    mimeType: str | None = None  # noqa: N815
    filename: str | None = None
    metadata: dict[str, Any] | None = None


class Image(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="image", omit_defaults=True):
    """`data` is base64."""

    data: str
    mimeType: str  # noqa: N815


class Audio(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="audio", omit_defaults=True):
    data: str
    mimeType: str  # noqa: N815


class Embedded(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What a `resource` block holds: text, or base64 in `blob`."""

    uri: str
    mimeType: str | None = None  # noqa: N815
    text: str | None = None
    blob: str | None = None


class Resource(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="resource", omit_defaults=True):
    resource: Embedded
    filename: str | None = None
    metadata: dict[str, Any] | None = None


class ResourceLink(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="resource_link", omit_defaults=True):
    uri: str
    name: str = ""
    mimeType: str | None = None  # noqa: N815
    description: str | None = None
    metadata: dict[str, Any] | None = None


Content = Text | Json | Image | Audio | Resource | ResourceLink


def is_plain(block: Content) -> TypeGuard[Text]:
    """Whether a block is text without a media type, file name or metadata."""
    return type(block) is Text and block.metadata is None and block.mimeType is None and block.filename is None
