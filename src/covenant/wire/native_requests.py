"""What native clients ask under `/v1`: a message as text or as parts, and for whom."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

import msgspec

from covenant.model.constitution import INDEX
from covenant.model.content import Content, Embedded, Json, Resource, ResourceLink, Text
from covenant.model.errors import Invalid
from covenant.model.file_names import segment
from covenant.wire.decoding import TOLD_NESTING_MAX, decode, deeper_than

PARTS_MAX: Final = 1_000
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text", kw_only=True, forbid_unknown_fields=True):
    text: str


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image", kw_only=True, forbid_unknown_fields=True):
    """By its bytes, in base64, or by where it is."""

    data: str | None = None
    url: str | None = None
    mime_type: Name = "image/png"


class FilePart(msgspec.Struct, frozen=True, tag_field="type", tag="file", kw_only=True, forbid_unknown_fields=True):
    """By its bytes, in base64, or by where it is."""

    name: Name
    data: str | None = None
    url: str | None = None
    mime_type: Name | None = None


class DataPart(msgspec.Struct, frozen=True, tag_field="type", tag="data", kw_only=True, forbid_unknown_fields=True):
    value: Any


NativePart = TextPart | ImagePart | FilePart | DataPart
Spoken = str | Annotated[tuple[NativePart, ...], msgspec.Meta(min_length=1, max_length=PARTS_MAX)]
"""A text, or parts."""


class RunRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`agent_def` is an agent for this request alone, in place of one of the catalogue."""

    message: Spoken
    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = INDEX
    agent_def: dict[str, Any] | None = None
    original_query: str | None = None
    channel: Literal["text", "voice"] | None = None


class NewConversation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = INDEX
    title: Annotated[str, msgspec.Meta(max_length=200)] = ""


class NewMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    message: Spoken


_run: Final = msgspec.json.Decoder(RunRequest)
_conversation: Final = msgspec.json.Decoder(NewConversation)
_message: Final = msgspec.json.Decoder(NewMessage)


def decode_run(body: bytes) -> RunRequest:
    return decode(_run, body)


def decode_conversation(body: bytes) -> NewConversation:
    """Nothing at all is a conversation with the master."""
    return decode(_conversation, body or b"{}")


def decode_message(body: bytes) -> NewMessage:
    return decode(_message, body)


def content_of(message: Spoken) -> tuple[Content, ...]:
    if isinstance(message, str):
        if not message.strip():
            raise Invalid("invalid_request", "message: must not be empty")
        return (Text(message),)
    return tuple(_contents(message))


def _contents(parts: tuple[NativePart, ...]) -> Iterator[Content]:
    for place, part in enumerate(parts):
        match part:
            case TextPart(text=text):
                yield Text(text)
            case DataPart(value=value):
                if deeper_than((value,), TOLD_NESTING_MAX):
                    raise Invalid("invalid_request", f"message[{place}].value: nested too deeply")
                yield Json(value)
            case ImagePart():
                yield _file(place, part, "")
            case FilePart():
                yield _file(place, part, part.name)


def _file(place: int, part: ImagePart | FilePart, name: str) -> Content:
    if (part.data is None) == (part.url is None):
        raise Invalid("invalid_request", f"message[{place}]: give either data or url")
    if part.url is not None:
        return ResourceLink(uri=part.url, name=segment(name) if name else "", mimeType=part.mime_type)
    try:
        base64.b64decode(part.data or "", validate=True)
    except ValueError:
        raise Invalid("invalid_request", f"message[{place}].data: must be base64") from None
    kind = part.mime_type or "application/octet-stream"
    return Resource(Embedded(uri="", mimeType=kind, blob=part.data), filename=segment(name) if name else None)
