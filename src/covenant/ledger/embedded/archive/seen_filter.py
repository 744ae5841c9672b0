"""Ids of finished tasks, as a filter in memory: a send asks it before the archive.

`maybe` is never wrong when it says no. When it says yes the id is in the archive, or (for about one new id in a
thousand) it is not, and the caller pays one read to find out. A Bloom filter in layers, each twice as large as the one
before, whose bits for an id are in two words of each layer: most answers need one word of each. With 24 bits an id a
million ids take 5 MB, and a question a little more than a microsecond.

`covered` is the place in the journal up to which every finished task is in the filter. Only `cover` moves it, fed from
the archive in the order in which tasks finished: a task may leave memory long after it ended, so ids that were added
one by one do not show which are missing.

File: magic, version, covered, number of layers, then for each its capacity, count and words; CRC-32 of it all last. The
words are in the machine's byte order, which is part of the version.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Final, Self
from zlib import crc32

FIRST_CAPACITY: Final = 262_144
# Every wrong yes costs a read, and a caller that waits for one leaves the batch that it would have shared. When one
# send in thirty did, a million finished tasks halved the throughput of 64 callers.
BITS_PER_ID: Final = 24
BITS_SET_IN_WORD: Final = 4

_HEAD: Final = struct.Struct("<8sHQI")
_LAYER: Final = struct.Struct("<QQ")
_CRC: Final = struct.Struct("<I")
_HASHES: Final = struct.Struct("<QQ")
_MAGIC: Final = b"CVNTSEEN"
_VERSION: Final = 2 if sys.byteorder == "little" else 0x8002
_MASK_BITS: Final = 10
_MASK_SHIFT: Final = 64 - _MASK_BITS


def _masks() -> tuple[int, ...]:
    """All patterns of bits that an id sets in a word. The same in every process: the file depends on it."""
    masks: list[int] = []
    for number in range(1 << _MASK_BITS):
        mask, places = 0, iter(blake2b(b"mask %d" % number).digest())
        while mask.bit_count() < BITS_SET_IN_WORD:
            mask |= 1 << (next(places) & 63)
        masks.append(mask)
    return tuple(masks)


_MASKS: Final = _masks()


class _Layer:
    __slots__ = ("capacity", "count", "size", "words")

    def __init__(self, capacity: int, count: int = 0, words: array[int] | None = None) -> None:
        self.capacity = capacity
        self.count = count
        self.size = capacity * BITS_PER_ID // 64
        self.words = array("Q", bytes(8 * self.size)) if words is None else words


class SeenIds:
    """For one thread. `encode` makes a copy, so that another thread can write the file."""

    __slots__ = ("_layers", "covered")

    def __init__(self) -> None:
        self.covered = 0
        self._layers = [_Layer(FIRST_CAPACITY)]
        """The largest first: most ids are there."""

    def __len__(self) -> int:
        """The number of ids; a few that collided with earlier ones are not counted."""
        return sum(layer.count for layer in self._layers)

    def maybe(self, task_id: str) -> bool:
        one, two = _HASHES.unpack(blake2b(task_id.encode(), digest_size=16).digest())
        return self._has(one, two)

    def _has(self, one: int, two: int) -> bool:
        first, second = _MASKS[one >> _MASK_SHIFT], _MASKS[two >> _MASK_SHIFT]
        for layer in self._layers:
            words, size = layer.words, layer.size
            if words[one % size] & first == first and words[two % size] & second == second:
                return True
        return False

    def add(self, task_id: str) -> None:
        one, two = _HASHES.unpack(blake2b(task_id.encode(), digest_size=16).digest())
        if self._has(one, two):
            return
        layer = self._layers[0]
        if layer.count >= layer.capacity:
            layer = _Layer(2 * layer.capacity)
            self._layers.insert(0, layer)
        layer.words[one % layer.size] |= _MASKS[one >> _MASK_SHIFT]
        layer.words[two % layer.size] |= _MASKS[two >> _MASK_SHIFT]
        layer.count += 1

    def cover(self, task_ids: Iterable[str], through: int) -> None:
        """Adds every task that finished after `covered` and up to `through`, as `History.finished` pages them."""
        for task_id in task_ids:
            self.add(task_id)
        self.covered = max(self.covered, through)

    def encode(self) -> bytes:
        parts: list[bytes | array[int]] = [_HEAD.pack(_MAGIC, _VERSION, self.covered, len(self._layers))]
        for layer in self._layers:
            parts += (_LAYER.pack(layer.capacity, layer.count), layer.words)
        content = b"".join(parts)
        return content + _CRC.pack(crc32(content))

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """The saved filter; None if there is none, or it cannot be trusted: then it is built anew."""
        try:
            data = path.read_bytes()
        except OSError:
            return None
        content = memoryview(data)[: -_CRC.size]
        if len(data) < _HEAD.size + _CRC.size or _CRC.unpack(data[-_CRC.size :])[0] != crc32(content):
            return None
        magic, version, covered, count = _HEAD.unpack_from(content)
        if magic != _MAGIC or version != _VERSION:
            return None
        seen = cls()
        seen.covered = covered
        seen._layers = []
        offset = _HEAD.size
        for _ in range(count):
            capacity, held = _LAYER.unpack_from(content, offset)
            offset += _LAYER.size
            size = capacity * BITS_PER_ID // 64 * 8
            if offset + size > len(content):
                return None  # made with another size of layers
            seen._layers.append(_Layer(capacity, held, array("Q", bytes(content[offset : offset + size]))))
            offset += size
        return seen if offset == len(content) else None
