"""Files of a turn: what an agent saves as an artifact, and what it reads of the message, both in pieces.

A saved file is durable, and counted to the tenant, when `save_file` returns. It becomes part of the task when the
agent yields it; a file that it never yields is collected after its task.
"""

from __future__ import annotations

import mimetypes
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from covenant.exchange.file_source import FileSource, pieces_of
from covenant.model.content import Audio, Content, File, Image, Resource, Text
from covenant.model.errors import Unavailable
from covenant.model.sanitizer import file_name_of
from covenant.model.task import account_of

if TYPE_CHECKING:
    from covenant.agents.runtime.job import Job
    from covenant.exchange.stored_files import StoredFiles


async def save_file(job: Job, name: str, source: FileSource, media_type: str | None = None) -> File:
    """Raises a Refusal if the file is too large, or the tenant has too many; OSError if a path cannot be read."""
    if not name:
        raise ValueError("a file needs a name")
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
    from covenant.agents.runtime.turn_output import from_base64  # noqa: PLC0415  (it imports the job)

    match part:
        case Text(text):
            return text.encode()
        case Image(data) | Audio(data):
            return from_base64(data)
        case Resource(inner):
            return from_base64(inner.blob) if inner.blob is not None else (inner.text or "").encode()
        case _:
            raise TypeError(f"{type(part).__name__} has no bytes to read; a link is yours to follow")


def _store(job: Job) -> StoredFiles:
    files = job.files
    if files is None:
        raise Unavailable("no_files", "there is no blob store here")
    return files
