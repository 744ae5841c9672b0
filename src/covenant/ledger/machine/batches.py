"""Batches that fit into one answer."""

from __future__ import annotations

import msgspec

_encode = msgspec.json.Encoder().encode


class Room:
    """What is left of a batch's bytes. The first always fits: somebody accepted it."""

    __slots__ = ("_empty", "_left")

    def __init__(self, bytes_max: int) -> None:
        self._left = bytes_max
        self._empty = True

    def takes(self, item: msgspec.Struct) -> bool:
        self._left -= len(_encode(item))
        fits = self._empty or self._left >= 0
        self._empty = False
        return fits
