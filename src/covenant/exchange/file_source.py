"""Reads the bytes of a file from any source, in pieces."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from pathlib import Path
from typing import Final

from covenant.ledger.contract.blobs import CHUNK_BYTES

FileSource = bytes | str | os.PathLike[str] | AsyncIterable[bytes] | Iterable[bytes]
"""A file: its bytes, its path, or its pieces."""
_END: Final = object()
"""What an iterator without a further piece gives; a piece that is None is an error."""


async def pieces_of(source: FileSource) -> AsyncIterator[bytes]:
    match source:
        case bytes() | bytearray() | memoryview():
            for start in range(0, len(source), CHUNK_BYTES):
                yield bytes(source[start : start + CHUNK_BYTES])
        case str() | os.PathLike():
            with await asyncio.to_thread(Path(source).open, "rb") as file:
                while piece := await asyncio.to_thread(file.read, CHUNK_BYTES):
                    yield piece
        case AsyncIterable():
            async for piece in source:
                yield _checked(piece)
        case _:
            pieces = iter(source)
            while (each := await asyncio.to_thread(lambda: next(pieces, _END))) is not _END:
                yield _checked(each)


def _checked(piece: object) -> bytes:
    if not isinstance(piece, bytes | bytearray | memoryview):
        raise TypeError(f"the pieces of a file must be bytes, not {type(piece).__name__}")
    return bytes(piece)
