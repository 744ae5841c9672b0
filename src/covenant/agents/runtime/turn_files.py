"""Files and data of a turn: artifacts that an agent makes or saves, and files of the message that it reads in pieces.

A saved file is durable, and counted for the tenant, when `save_file` returns. It becomes part of the task when the
agent yields it; a file that is never yielded is collected after its task.
"""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import msgspec

from covenant.exchange.file_source import FileSource, pieces_of
from covenant.model.content import Audio, Content, Embedded, File, Image, Json, Resource, ResourceLink, Text
from covenant.model.errors import Unavailable, WrongType
from covenant.model.sanitizer import file_name_of
from covenant.model.task import account_of
from covenant.wire.json_input import A2A_NESTING_MAX
from covenant.wire.validation import checked

if TYPE_CHECKING:
    from covenant.agents.runtime.job import Job
    from covenant.exchange.stored_files import StoredFiles


async def save_file(job: Job, name: str, source: FileSource, media_type: str | None = None) -> File:
    """Raises a Refusal if the file is too large or the tenant has too many; OSError if a path cannot be read."""
    if not name:
        raise ValueError("a file needs a name")
    await job.ensure_running()
    kind = media_type or mimetypes.guess_type(name)[0]
    return await _store(job).save(pieces_of(source), account_of(job.task), job.task.id, file_name_of(name), kind)


async def open_file(job: Job, part: Content) -> AsyncIterator[bytes]:
    """The bytes of a part, in pieces. Raises NotFound if they are not those that were stored."""
    if isinstance(part, File):
        async for piece in _store(job).open(part):
            yield piece
    else:
        yield inline_bytes(part)


def inline_bytes(part: Content) -> bytes:
    match part:
        case Text(text):
            return text.encode()
        case Image(data) | Audio(data):
            return from_base64(data)
        case Resource(inner):
            return from_base64(inner.blob) if inner.blob is not None else (inner.text or "").encode()
        case _:
            raise TypeError(f"{type(part).__name__} has no bytes here; fetch a link yourself")


def _store(job: Job) -> StoredFiles:
    files = job.files
    if files is None:
        raise Unavailable("no_files", "there is no blob store here")
    return files


def file(name: str, data: bytes | None = None, *, url: str | None = None, media_type: str | None = None) -> Content:
    """Yield it: an artifact, by its bytes or by their URL. The media type is guessed from the name."""
    if not name:
        raise ValueError("a file needs a name")
    if (data is None) == (url is None):
        raise ValueError("a file needs either its bytes or a url")
    kind = media_type or mimetypes.guess_type(name)[0]
    if url is not None:
        return ResourceLink(uri=url, name=name, mimeType=kind)
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"a file's data must be bytes, not {type(data).__name__}")
    blob = base64.b64encode(data).decode("ascii")
    return Resource(Embedded(uri="", mimeType=kind or "application/octet-stream", blob=blob), filename=name)


def data(value: Any) -> Json:
    """Yield it: an artifact of any value that JSON can hold."""
    try:
        plain = msgspec.to_builtins(value, str_keys=True)
    except (TypeError, ValueError, RecursionError) as wrong:
        raise WrongType("value", str(wrong)) from None
    return Json(checked("value", plain, Any, A2A_NESTING_MAX))


def from_base64(text: str) -> bytes:
    """Decodes base64. Raises `ValueError` if it is invalid."""
    return base64.b64decode(text, validate=True)


def written(value: Any) -> str:
    """Data as JSON text, for receivers that take only text."""
    return msgspec.json.encode(value).decode()
