"""One journal record as one line of bytes, and its events as JSON. Pure: bytes in, bytes out.

    {"seq":12,"ts_ms":1700000000000,"synced":9,"events":[...],"crc":"5f3a0c11"}\n

`seq` has no gaps; `synced` is the highest seq that was known to be on disk when this line was written, so it is
always lower than `seq`. `crc` is the CRC-32 of every byte before `,"crc":`, as 8 lowercase hex digits. Field
order and spacing are part of the format: the checksum is checked on the raw bytes, before anything is parsed.
"""

from __future__ import annotations

from typing import Annotated, Final
from zlib import crc32

import msgspec

from covenant.model.errors import CovenantError

SEAL_LENGTH: Final = len(b',"crc":"00000000"}\n')


class BadLine(CovenantError, ValueError):
    """These bytes are not a line that `encode_line` wrote. Opening decides what that means."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Record(msgspec.Struct, frozen=True, gc=False):
    seq: Annotated[int, msgspec.Meta(ge=1)]
    ts_ms: Annotated[int, msgspec.Meta(ge=0)]
    synced: Annotated[int, msgspec.Meta(ge=0)]
    events: msgspec.Raw  # a JSON array, still encoded: decoded once, by the types of events


_decode: Final = msgspec.json.Decoder(Record).decode


def encode_line(seq: int, ts_ms: int, synced: int, events: bytes) -> bytes:
    """Encodes a record. `events` is an encoded JSON array without raw newlines, which is not checked here."""
    return b"".join(line_parts(seq, ts_ms, synced, events))


def line_parts(seq: int, ts_ms: int, synced: int, events: bytes) -> tuple[bytes, bytes, bytes]:
    """The same in three parts, for a caller that joins many lines: events are copied once, which is half the cost."""
    head = f'{{"seq":{seq},"ts_ms":{ts_ms},"synced":{synced},"events":'.encode()
    return head, events, b',"crc":"%08x"}\n' % crc32(events, crc32(head))


def decode_line(line: bytes) -> Record:
    """Decodes a record. Raises BadLine unless every byte is as it was written."""
    if line[-1:] != b"\n":
        raise BadLine("the line has no end")
    body = line[:-SEAL_LENGTH]
    if line[-SEAL_LENGTH:] != b',"crc":"%08x"}\n' % crc32(body):
        raise BadLine("the checksum does not match")
    try:
        record = _decode(line)
    except msgspec.MsgspecError as error:  # the checksum is right: another program wrote this line
        raise BadLine(f"the line is not a journal record: {error}") from None
    if record.synced >= record.seq:
        raise BadLine("the line claims to have been synced before it was written")
    return record


def seq_of(line: bytes) -> int:
    """The seq of a line that is known to be good, without checking or decoding the rest."""
    return int(line[7 : line.index(b",", 7)])
