"""Files in a folder: what they are called, how they are written, followed and dropped."""

import os
from pathlib import Path

import pytest

from covenant.ledger.embedded import fault_points
from covenant.ledger.embedded.journal.record import decode_line, encode_line
from covenant.ledger.embedded.journal.segments import (
    Cursor,
    SegmentReader,
    SegmentWriter,
    create_segment,
    cursor_after,
    drop_through,
    list_segments,
    segment_path,
)
from tests.ledger_contract import fault_plans


def line(seq: int, length: int = 100) -> bytes:
    return encode_line(seq, 1_000 + seq, 0, b'["' + b"x" * length + b'"]')


def seqs(data: bytes) -> list[int]:
    return [decode_line(text).seq for text in data.splitlines(keepends=True)]


def write_segments(folder: Path, *runs: range) -> Cursor:
    """One sealed segment a run, the last one active; where the next record goes."""
    os.close(create_segment(folder, runs[0].start))
    writer = SegmentWriter(folder, Cursor(runs[0].start - 1, runs[0].start, 0), segment_bytes=1 << 20, sync=True)
    for number, run in enumerate(runs):
        if number:
            writer.seal()
        for seq in run:
            writer.write(line(seq), seq)
    writer.close()
    return writer.end


def test_segments_are_named_by_their_first_record_and_listed_oldest_first(tmp_path: Path) -> None:
    write_segments(tmp_path, range(1, 4), range(4, 6), range(6, 12))
    for other in ("torn-4-17.bin", "notes.jsonl", "tail.tmp", "1.jsonl"):
        (tmp_path / other).write_bytes(b"not the journal")
    assert [segment.first_seq for segment in list_segments(tmp_path)] == [1, 4, 6]
    assert list_segments(tmp_path)[1].path.name == "00000000000000000004.jsonl"


def test_a_segment_is_private_to_its_owner(tmp_path: Path) -> None:
    write_segments(tmp_path, range(1, 2))
    assert segment_path(tmp_path, 1).stat().st_mode & 0o777 == 0o600


def test_sealing_an_empty_segment_does_nothing(tmp_path: Path) -> None:
    os.close(create_segment(tmp_path, 1))
    writer = SegmentWriter(tmp_path, Cursor(0, 1, 0), segment_bytes=1 << 20, sync=True)
    assert writer.seal() == Cursor(0, 1, 0)
    writer.close()
    assert len(list_segments(tmp_path)) == 1


def test_sealing_syncs_before_the_next_segment_exists_and_names_it_before_it_is_written(tmp_path: Path) -> None:
    os.close(create_segment(tmp_path, 1))
    order: list[str] = []

    class Noting(fault_plans.Plan):
        def hit(self, step: fault_points.FaultPoint) -> None:
            super().hit(step)
            order.append(step.name)

    writer = SegmentWriter(tmp_path, Cursor(0, 1, 0), segment_bytes=1, sync=False)
    with fault_plans.armed(Noting()):
        writer.write(line(1), 1)
        writer.write(line(2), 2)
    writer.close()
    assert order == [
        "journal.write",
        "journal.acknowledge",
        "journal.seal",
        "journal.create_segment",
        "journal.sync_dir",
        "journal.write",
        "journal.acknowledge",
    ]


def test_a_reader_crosses_segments_and_gets_every_line_once(tmp_path: Path) -> None:
    end = write_segments(tmp_path, range(1, 8), range(8, 9), range(9, 30))
    reader = SegmentReader(tmp_path)
    for max_bytes in (1, 130, 1_000, 1 << 20):
        cursor, found = cursor_after(tmp_path, 0), []
        while (lines := reader.read(cursor, end, max_bytes)).data:
            assert lines.last_seq == lines.cursor.seq == seqs(lines.data)[-1]
            found += seqs(lines.data)
            cursor = lines.cursor
        assert found == list(range(1, 30))
        assert reader.read(cursor, end, max_bytes) == (b"", 29, cursor)
    reader.close()


def test_a_reader_returns_at_most_what_it_was_asked_for_but_always_a_whole_line(tmp_path: Path) -> None:
    end = write_segments(tmp_path, range(1, 10))
    reader = SegmentReader(tmp_path)
    size = len(line(1))
    assert seqs(reader.read(Cursor(0, 1, 0), end, 3 * size).data) == [1, 2, 3]
    assert seqs(reader.read(Cursor(0, 1, 0), end, 3 * size - 1).data) == [1, 2]
    assert seqs(reader.read(Cursor(0, 1, 0), end, 1).data) == [1]
    reader.close()


def test_a_reader_stops_at_the_end_it_is_given_although_the_file_goes_on(tmp_path: Path) -> None:
    write_segments(tmp_path, range(1, 10))
    reader = SegmentReader(tmp_path)
    size = len(line(1))
    assert seqs(reader.read(Cursor(0, 1, 0), Cursor(4, 1, 4 * size), 1 << 20).data) == [1, 2, 3, 4]
    reader.close()


def test_a_reader_waits_at_a_new_and_empty_segment(tmp_path: Path) -> None:
    end = write_segments(tmp_path, range(1, 4), range(4, 4))
    assert end == Cursor(3, 4, 0)
    reader = SegmentReader(tmp_path)
    lines = reader.read(Cursor(0, 1, 0), end, 1 << 20)
    assert seqs(lines.data) == [1, 2, 3]
    assert reader.read(lines.cursor, end, 1 << 20).data == b""
    reader.close()


def test_a_segment_that_lost_its_bytes_is_an_error_and_not_silence(tmp_path: Path) -> None:
    end = write_segments(tmp_path, range(1, 4))
    os.truncate(segment_path(tmp_path, 1), 50)
    reader = SegmentReader(tmp_path)
    with pytest.raises(OSError, match="shorter"):
        reader.read(Cursor(0, 1, 0), end, 1 << 20)
    reader.close()


@pytest.mark.parametrize("after", range(30))
def test_a_cursor_can_be_found_for_any_record(tmp_path: Path, after: int) -> None:
    end = write_segments(tmp_path, range(1, 8), range(8, 9), range(9, 30))
    reader = SegmentReader(tmp_path)
    lines = reader.read(cursor_after(tmp_path, after), end, 1)
    assert seqs(lines.data) == ([after + 1] if after < 29 else [])
    reader.close()


def test_dropping_takes_only_sealed_segments_that_are_wholly_covered(tmp_path: Path) -> None:
    write_segments(tmp_path, range(1, 8), range(8, 9), range(9, 30), range(30, 32))
    assert drop_through(tmp_path, 6) == []
    assert [segment.first_seq for segment in drop_through(tmp_path, 8)] == [1, 8]
    assert drop_through(tmp_path, 28) == []
    assert [segment.first_seq for segment in drop_through(tmp_path, 1_000)] == [9]
    assert [segment.first_seq for segment in list_segments(tmp_path)] == [30]
    with pytest.raises(LookupError, match="record 29"):
        cursor_after(tmp_path, 28)


def test_dropping_goes_from_the_oldest_and_a_failure_leaves_one_run(tmp_path: Path) -> None:
    write_segments(tmp_path, range(1, 8), range(8, 9), range(9, 30), range(30, 32))
    plan = fault_plans.Plan("journal.drop_segment", fault_plans.fail(5), nth=3)
    with fault_plans.armed(plan), pytest.raises(OSError, match="Input/output"):
        drop_through(tmp_path, 29)
    assert [segment.first_seq for segment in list_segments(tmp_path)] == [9, 30]


def test_an_unknown_crash_point_is_refused() -> None:
    with pytest.raises(ValueError, match="is not a crash point"):
        fault_plans.Plan("journal.wrote", fault_plans.kill)
