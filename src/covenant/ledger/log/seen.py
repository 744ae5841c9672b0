"""Ids of tasks that are finished, as a filter in memory: a send asks it before it would ask the archive.

`maybe` is never wrong when it says no. When it says yes the id is in the archive, or (for about one new id in five
hundred) it is not, and the caller pays one read to know. A Bloom filter in layers, each twice as large as the one
before, sixteen bits an id: a million ids take 3 MB, and a question two microseconds.

`covered` is the place in the journal up to which every task that finished is in it. It moves only by `cover`, fed from
the archive in the order in which tasks finished: a task may leave memory long after it ended, so ids that were added
one by one say nothing about which are missing.

File: magic, version, covered, number of layers, then for each its capacity, count and bits; CRC-32 of it all last.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Final, Self
from zlib import crc32

from covenant.ledger.log.segments import sync_dir

FIRST_CAPACITY: Final = 262_144
# Every wrong yes costs a read, and the caller that waits for it leaves the batch it would have shared. With ten bits,
# one send in thirty did, and a million finished tasks halved the throughput of 64 callers.
BITS_PER_ID: Final = 16
PROBES: Final = 7

_HEAD: Final = struct.Struct("<8sHQI")
_LAYER: Final = struct.Struct("<QQ")
_CRC: Final = struct.Struct("<I")
_HASHES: Final = struct.Struct("<QQ")
_MAGIC: Final = b"CVNTSEEN"
_VERSION: Final = 1


class _Layer:
    __slots__ = ("bits", "capacity", "count", "size")

    def __init__(self, capacity: int, count: int = 0, bits: bytearray | None = None) -> None:
        self.capacity = capacity
        self.count = count
        self.size = capacity * BITS_PER_ID
        self.bits = bytearray(self.size // 8) if bits is None else bits

    def has(self, start: int, step: int) -> bool:
        bits, size = self.bits, self.size
        for _ in range(PROBES):
            place = start % size
            if not bits[place >> 3] >> (place & 7) & 1:
                return False
            start += step
        return True

    def set(self, start: int, step: int) -> None:
        bits, size = self.bits, self.size
        for _ in range(PROBES):
            place = start % size
            bits[place >> 3] |= 1 << (place & 7)
            start += step
        self.count += 1


class SeenIds:
    """For one thread. Saving takes a copy first (`encode`), so that the file can be written by another."""

    __slots__ = ("_layers", "covered")

    def __init__(self) -> None:
        self.covered = 0
        self._layers = [_Layer(FIRST_CAPACITY)]
        """The largest first: most ids are there."""

    def __len__(self) -> int:
        """How many ids it took; a few that it held already by chance are not counted."""
        return sum(layer.count for layer in self._layers)

    def maybe(self, task_id: str) -> bool:
        start, step = _HASHES.unpack(blake2b(task_id.encode(), digest_size=16).digest())
        for layer in self._layers:  # noqa: SIM110  `any` would cost a generator, and every send asks
            if layer.has(start, step):
                return True
        return False

    def add(self, task_id: str) -> None:
        start, step = _HASHES.unpack(blake2b(task_id.encode(), digest_size=16).digest())
        for layer in self._layers:
            if layer.has(start, step):
                return
        layer = self._layers[0]
        if layer.count >= layer.capacity:
            layer = _Layer(2 * layer.capacity)
            self._layers.insert(0, layer)
        layer.set(start, step)

    def cover(self, task_ids: Iterable[str], through: int) -> None:
        """Every task that finished after `covered` and up to `through`, as `History.finished` pages them."""
        for task_id in task_ids:
            self.add(task_id)
        self.covered = max(self.covered, through)

    def encode(self) -> bytes:
        parts: list[bytes | bytearray] = [_HEAD.pack(_MAGIC, _VERSION, self.covered, len(self._layers))]
        for layer in self._layers:
            parts += (_LAYER.pack(layer.capacity, layer.count), layer.bits)
        content = b"".join(parts)
        return content + _CRC.pack(crc32(content))

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """What was saved; None if there is nothing, or nothing that can be trusted: then it is made anew."""
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
            size = capacity * BITS_PER_ID // 8
            seen._layers.append(_Layer(capacity, held, bytearray(content[offset : offset + size])))
            offset += size
        return seen if offset == len(content) else None  # else it was made with another size of layers


def save(path: Path, encoded: bytes) -> None:
    """Replace the file, wholly or not at all. Blocks on the disk."""
    copy = path.with_suffix(".tmp")
    with open(copy, "wb", opener=_private) as file:
        file.write(encoded)
        file.flush()
        os.fsync(file.fileno())
    os.replace(copy, path)
    sync_dir(path.parent)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
