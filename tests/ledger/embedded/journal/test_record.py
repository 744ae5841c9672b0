"""A line is what was written, byte for byte, or it is bad."""

import json
import zlib
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.ledger.embedded.journal.record import BadLine, decode_line, encode_line, seq_of

EVENTS = msgspec.json.encode([{"kind": "task_sent", "text": 'Grüße,\n"crc":"00000000"}'}])
LINE = encode_line(12, 1_700_000_000_000, 9, EVENTS)


def sealed(body: bytes) -> bytes:
    return b'%b,"crc":"%08x"}\n' % (body, zlib.crc32(body))


def test_a_line_is_one_json_object_with_its_fields_in_order() -> None:
    assert LINE.endswith(b"\n")
    assert LINE.count(b"\n") == 1
    fields = json.loads(LINE)
    assert list(fields) == ["seq", "ts_ms", "synced", "events", "crc"]
    assert LINE.startswith(b'{"seq":12,"ts_ms":1700000000000,"synced":9,"events":[')
    body = LINE[: LINE.rindex(b',"crc":')]
    assert fields["crc"] == f"{zlib.crc32(body):08x}"


@given(
    seq=st.integers(1, 2**63 - 1),
    ts_ms=st.integers(0, 2**53),
    back=st.integers(1, 1_000),
    events=st.lists(st.dictionaries(st.text(), st.text() | st.integers(-(2**53), 2**53) | st.none())),
)
def test_what_was_encoded_is_decoded(seq: int, ts_ms: int, back: int, events: list[dict[str, object]]) -> None:
    encoded = msgspec.json.encode(events)
    synced = max(0, seq - back)
    line = encode_line(seq, ts_ms, synced, encoded)
    record = decode_line(line)
    assert (record.seq, record.ts_ms, record.synced) == (seq, ts_ms, synced)
    assert bytes(record.events) == encoded
    assert seq_of(line) == seq


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_anywhere_in_a_line_makes_it_bad(bit: int) -> None:
    for position in range(len(LINE)):
        flipped = bytearray(LINE)
        flipped[position] ^= 1 << bit
        with pytest.raises(BadLine):
            decode_line(bytes(flipped))


def test_every_shorter_or_longer_line_is_bad() -> None:
    for length in range(len(LINE)):
        with pytest.raises(BadLine):
            decode_line(LINE[:length])
        with pytest.raises(BadLine):
            decode_line(LINE[length + 1 :])
    with pytest.raises(BadLine):
        decode_line(LINE + LINE)


def test_a_line_without_its_newline_is_bad_even_if_all_else_is_there() -> None:
    with pytest.raises(BadLine, match="no end"):
        decode_line(LINE[:-1])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"seq":1,"ts_ms":0,"synced":0',
        b'{"seq":"1","ts_ms":0,"synced":0,"events":[]',
        b'{"seq":0,"ts_ms":0,"synced":0,"events":[]',
        b'{"seq":1,"ts_ms":-1,"synced":0,"events":[]',
        b'{"seq":1,"ts_ms":0,"synced":0,"events":[}',
        b'{"seq":1,"ts_ms":0,"synced":1,"events":[]',
    ],
    ids=["empty", "array", "no events", "text seq", "seq 0", "negative time", "not json", "synced itself"],
)
def test_a_line_with_a_right_checksum_over_something_else_is_bad(body: bytes) -> None:
    with pytest.raises(BadLine):
        decode_line(sealed(body))


@given(st.binary(max_size=200))
def test_no_bytes_make_decoding_fail_in_another_way(noise: bytes) -> None:
    for line in (noise, noise + b"\n", sealed(noise)):
        with suppress(BadLine):
            decode_line(line)
