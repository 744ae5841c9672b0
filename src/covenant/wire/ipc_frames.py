"""Frames of the local socket: four bytes of length, most significant first, then JSON.

Standard library only: the command line uses it too, and must start fast.
"""

from __future__ import annotations

import struct
from typing import Final

FRAME_BYTES_MAX: Final = 8 * 1024 * 1024
HEADER_BYTES: Final = 4

_LENGTH = struct.Struct(">I")


def frame_length(header: bytes | bytearray) -> int:
    """The length that the first four bytes announce."""
    length: int = _LENGTH.unpack_from(header)[0]
    return length


def encode_frame(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def canonical_kind(kind: str) -> str:
    """One spelling of a frame's kind: `send_a2a_task`, `send_a2_a_task` and `SendA2ATask` are the same."""
    return kind.replace("_", "").lower()
