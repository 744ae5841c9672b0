"""One journal record as one line of bytes, and its events as JSON. Pure: bytes in, bytes out.

    {"seq":12,"ts_ms":1700000000000,"synced":9,"events":[...],"crc":"5f3a0c11"}\n

`seq` has no gaps; `synced` is the highest seq that was known to be on disk when this line was written, so it is
always lower than `seq`. `crc` is the CRC-32 of every byte before `,"crc":`, as 8 lowercase hex digits. Field
order and spacing are part of the format: the checksum is checked on the raw bytes, before anything is parsed.

`encode_events` stands before every append: nothing becomes a record that could not be read back from it. It decodes
what it has encoded with the decoder that opening uses, so the check is as strict as the reader by construction. The
decoded events are the ones to apply: memory holds what the journal holds, whatever its caller does to a dictionary
afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Final
from zlib import crc32

import msgspec

from covenant.ledger.machine.events import AnyEvent
from covenant.model.errors import CovenantError, WrongType
from covenant.wire.validation import encode, read_back

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
    events: msgspec.Raw  # a JSON array, still encoded: whoever knows the events decodes it once, by type


_decode: Final = msgspec.json.Decoder(Record).decode


def encode_line(seq: int, ts_ms: int, synced: int, events: bytes) -> bytes:
    """`events` is an encoded JSON array without raw newlines: the caller's promise, not checked here."""
    return b"".join(line_parts(seq, ts_ms, synced, events))


def line_parts(seq: int, ts_ms: int, synced: int, events: bytes) -> tuple[bytes, bytes, bytes]:
    """The same in three parts, for whoever joins many lines: the events are copied once, which is half the cost."""
    head = b'{"seq":%d,"ts_ms":%d,"synced":%d,"events":' % (seq, ts_ms, synced)
    return head, events, b',"crc":"%08x"}\n' % crc32(events, crc32(head))


def decode_line(line: bytes) -> Record:
    """Raises BadLine unless every byte is as it was written."""
    if line[-1:] != b"\n":
        raise BadLine("the line has no end")
    body = line[:-SEAL_LENGTH]
    if line[-SEAL_LENGTH:] != b',"crc":"%08x"}\n' % crc32(body):
        raise BadLine("the checksum does not match")
    try:
        record = _decode(line)
    except msgspec.MsgspecError as error:  # the checksum is right: this line was written by something else
        raise BadLine(f"the line is not a journal record: {error}") from None
    if record.synced >= record.seq:
        raise BadLine("the line claims to have been synced before it was written")
    return record


def seq_of(line: bytes) -> int:
    """The seq of a line that is already known to be good, without checking or decoding the rest."""
    return int(line[7 : line.index(b",", 7)])


NESTING_MAX: Final = 256
"""Levels in a record. Doors stop at 64; the interpreter, and SQLite's JSON, carry some 900."""

_EVENT: Final = re.compile(r"\[(?P<index>\d+)\](?P<inside>.*)", re.DOTALL)

decode_events = msgspec.json.Decoder(list[AnyEvent]).decode


def encode_events(events: Sequence[AnyEvent]) -> tuple[bytes, list[AnyEvent]]:
    """A record's bytes, and its events as they will be read back.

    Raises `WrongType` with the field's name if the journal's decoder would refuse them, or read something else.
    """
    try:
        encoded = encode(events)
        decoded = decode_events(encoded)
        # A level takes two brackets, and a line break can only come from what was encoded elsewhere (`msgspec.Raw`).
        if decoded == events and encoded.count(b"{") + encoded.count(b"[") <= NESTING_MAX and b"\n" not in encoded:
            return encoded, decoded
    except Exception:  # noqa: BLE001, S110  objects of all kinds are encoded here: `read_back` says what is wrong
        pass
    try:
        encoded, decoded = read_back(events, decode_events, NESTING_MAX)
    except WrongType as wrong:
        raise WrongType(_field_name(wrong.field, events), wrong.what) from None
    return (encode(decoded) if b"\n" in encoded else encoded), decoded


def _field_name(place: str, events: Sequence[AnyEvent]) -> str:
    """`[0].task.parent` as `task_sent.task.parent`."""
    found = _EVENT.match(place)
    return f"{events[int(found['index'])].__struct_config__.tag}{found['inside']}" if found else f"events{place}"
