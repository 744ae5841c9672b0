"""A file is read to its end, or not at all."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from covenant.exchange.file_source import pieces_of


async def _in_turn(*pieces: Any) -> AsyncIterator[Any]:
    for piece in pieces:
        yield piece


@pytest.mark.parametrize("piece", [None, "text", 5], ids=repr)
async def test_a_piece_that_is_no_bytes_ends_no_file_silently(piece: Any) -> None:
    for source in ([b"one", piece, b"two"], _in_turn(b"one", piece, b"two")):
        with pytest.raises(TypeError, match="the pieces of a file must be bytes"):
            [each async for each in pieces_of(source)]
