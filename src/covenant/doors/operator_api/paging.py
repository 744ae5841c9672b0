"""Pages bounded by size as well as by number: one answer fits one frame, and costs no more memory than that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec

from covenant.wire.ipc_frames import FRAME_BYTES_MAX

T = TypeVar("T")

# The rest of the frame is for what stands around the page.
PAGE_BYTES_MAX: Final = FRAME_BYTES_MAX - 64 * 1024

_encode = msgspec.json.Encoder().encode


def fit(items: Sequence[T], bytes_max: int = PAGE_BYTES_MAX) -> tuple[T, ...]:
    """As many of the first items as fit."""
    size = 0
    for index, item in enumerate(items):
        size += len(_encode(item)) + 1
        if size > bytes_max:
            return tuple(items[:index])
    return tuple(items)


def size_of(items: Sequence[object]) -> int:
    return sum(len(_encode(item)) + 1 for item in items)
