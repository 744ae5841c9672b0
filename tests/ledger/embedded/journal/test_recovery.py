"""Opening: what is cut as torn, what is refused as damaged, and what is on disk before a record is trusted."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.ledger.embedded import fault_points
from covenant.ledger.embedded.journal.record import Record, decode_line, encode_line
from covenant.ledger.embedded.journal.recovery import CHUNK_BYTES, HomeLock, OpenedJournal, lock_home, open_journal
from covenant.ledger.embedded.journal.segments import Cursor, list_segments, segment_path
from covenant.model.errors import Damaged, HomeLocked
from tests.ledger_contract import fault_plans
from tests.matrices import first_of
from tests.waits import BOUND_S

NOW_MS = 1_700_000_000_000


def line(seq: int, synced: int) -> bytes:
    return encode_line(seq, NOW_MS, synced, msgspec.json.encode([{"kind": "noted", "seq": seq}]))


def fill(folder: Path, first_seq: int, last_seq: int, *, lag: int = 1) -> bytes:
    """A segment in which each record was written when the one `lag` before it had been synced."""
    folder.mkdir(exist_ok=True)
    data = b"".join(line(seq, max(0, seq - lag)) for seq in range(first_seq, last_seq + 1))
    segment_path(folder, first_seq).write_bytes(data)
    return data


def reopen(folder: Path, *, snapshot_seq: int = 0, archived_seq: int = 0) -> tuple[OpenedJournal, list[Record]]:
    records: list[Record] = []
    opened = open_journal(
        folder, snapshot_seq=snapshot_seq, archived_seq=archived_seq, now_ms=NOW_MS, replay=records.append
    )
    return opened, records


def seqs(records: list[Record]) -> list[int]:
    return [record.seq for record in records]


def spoil(folder: Path, segment: int, offset: int, junk: bytes = b"\x00") -> None:
    with segment_path(folder, segment).open("r+b") as file:
        file.seek(offset)
        file.write(junk)


def offset_of(seq: int, first_seq: int, *, lag: int = 1) -> int:
    return sum(len(line(number, max(0, number - lag))) for number in range(first_seq, seq))


def test_a_journal_that_never_was_begins_with_record_one(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    opened, records = reopen(folder)
    assert opened == OpenedJournal(folder, Cursor(0, 1, 0), 0, None)
    assert records == []
    assert [segment.first_seq for segment in list_segments(folder)] == [1]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert reopen(folder)[0] == opened


def test_every_record_after_the_snapshot_is_replayed_once_in_order(tmp_path: Path) -> None:
    for first, last in ((1, 5), (6, 9), (10, 20)):
        fill(tmp_path, first, last)
    for snapshot_seq in range(21):
        opened, records = reopen(tmp_path, snapshot_seq=snapshot_seq)
        assert seqs(records) == list(range(snapshot_seq + 1, 21))
        assert opened.replayed == len(records)
        assert opened.end.seq == 20
        assert opened.torn is None


def test_segments_that_nobody_needs_are_not_read(tmp_path: Path) -> None:
    fill(tmp_path, 1, 5)
    fill(tmp_path, 6, 9)
    segment_path(tmp_path, 1).write_bytes(b"rotten")
    _, records = reopen(tmp_path, snapshot_seq=7, archived_seq=5)
    assert seqs(records) == [8, 9]


@pytest.mark.parametrize("lag", [1, 3])
def test_a_record_torn_at_any_byte_is_cut_kept_aside_and_reported(tmp_path: Path, lag: int) -> None:
    last = line(8, 8 - lag)
    for length in range(1, len(last)):
        folder = tmp_path / str(length)
        good = fill(folder, 1, 7, lag=lag)
        with segment_path(folder, 1).open("ab") as file:
            file.write(last[:length])
        opened, records = reopen(folder)
        assert seqs(records) == list(range(1, 8))
        assert opened.end == Cursor(7, 1, len(good))
        assert segment_path(folder, 1).read_bytes() == good
        torn = opened.torn
        assert torn is not None
        assert (torn.seq, torn.line, torn.length) == (8, 8, length)
        assert torn.file == str(segment_path(folder, 1))
        assert torn.kept == folder / f"torn-8-{NOW_MS}.bin"
        assert torn.kept.read_bytes() == last[:length]
        assert torn.kept.stat().st_mode & 0o777 == 0o600
        assert reopen(folder)[0].torn is None


def test_lines_after_a_torn_one_that_were_not_synced_go_with_it(tmp_path: Path) -> None:
    # One batch of records 5 to 9, written when 4 was synced; a page in its middle never reached the disk.
    fill(tmp_path, 1, 4)
    good = segment_path(tmp_path, 1).read_bytes()
    batch = [line(seq, 4) for seq in range(5, 10)]
    segment_path(tmp_path, 1).write_bytes(good + batch[0] + b"\0" * len(batch[1]) + b"".join(batch[2:]))
    opened, records = reopen(tmp_path)
    assert seqs(records) == [1, 2, 3, 4, 5]
    assert opened.torn is not None
    assert opened.torn.seq == 6
    assert segment_path(tmp_path, 1).read_bytes() == good + batch[0]


@pytest.mark.parametrize("room", [1, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES])
def test_room_that_was_reserved_and_never_used_is_no_torn_tail(tmp_path: Path, room: int) -> None:
    good = fill(tmp_path, 1, 7)
    with segment_path(tmp_path, 1).open("ab") as file:
        file.write(b"\0" * room)
    opened, records = reopen(tmp_path, archived_seq=7)
    assert seqs(records) == list(range(1, 8))
    assert opened.torn is None
    assert opened.end == Cursor(7, 1, len(good))
    assert segment_path(tmp_path, 1).read_bytes() == good


def test_a_segment_of_nothing_but_reserved_room_is_empty(tmp_path: Path) -> None:
    segment_path(tmp_path, 1).write_bytes(b"\0" * CHUNK_BYTES)
    opened, records = reopen(tmp_path)
    assert (opened.end, opened.torn, records) == (Cursor(0, 1, 0), None, [])


def test_a_line_torn_within_reserved_room_is_kept_aside_without_the_room(tmp_path: Path) -> None:
    fill(tmp_path, 1, 7)
    with segment_path(tmp_path, 1).open("ab") as file:
        file.write(line(8, 7)[:30] + b"\0" * CHUNK_BYTES)
    opened, _ = reopen(tmp_path)
    assert opened.torn is not None
    assert (opened.torn.seq, opened.torn.length) == (8, 30)
    assert opened.torn.kept.read_bytes() == line(8, 7)[:30]


def test_zeros_where_a_record_was_are_damage_if_the_archive_has_it_or_a_segment_follows(tmp_path: Path) -> None:
    fill(tmp_path, 1, 7)
    spoil(tmp_path, 1, offset_of(7, 1), b"\0" * len(line(7, 6)))
    with pytest.raises(Damaged, match="the archive holds records up to 7"):
        reopen(tmp_path, archived_seq=7)
    fill(tmp_path, 8, 9)
    with pytest.raises(Damaged, match="a later segment shows that it was synced"):
        reopen(tmp_path)


def test_a_bad_line_is_damage_if_a_later_line_was_written_after_its_sync(tmp_path: Path) -> None:
    fill(tmp_path, 1, 9)
    spoil(tmp_path, 1, offset_of(6, 1) + 20)
    before = segment_path(tmp_path, 1).read_bytes()
    with pytest.raises(Damaged, match="record 7 was written after it had been synced") as caught:
        reopen(tmp_path)
    assert caught.value.file == str(segment_path(tmp_path, 1))
    assert caught.value.line == 6
    assert segment_path(tmp_path, 1).read_bytes() == before
    assert list(tmp_path.iterdir()) == [segment_path(tmp_path, 1)]


def test_a_bad_line_is_damage_even_if_the_only_witness_comes_after_more_bad_lines(tmp_path: Path) -> None:
    fill(tmp_path, 1, 9)
    spoil(tmp_path, 1, offset_of(6, 1) + 20, b"\x00" * (offset_of(9, 1) - offset_of(6, 1) - 22))
    with pytest.raises(Damaged, match="record 9"):
        reopen(tmp_path)


def test_a_lost_newline_is_damage_although_it_hides_where_the_witness_begins(tmp_path: Path) -> None:
    fill(tmp_path, 1, 6)
    spoil(tmp_path, 1, offset_of(6, 1) - 1)
    with pytest.raises(Damaged, match="record 6") as caught:
        reopen(tmp_path)
    assert caught.value.line == 5


def test_a_bad_line_is_damage_if_a_later_segment_exists_even_an_empty_one(tmp_path: Path) -> None:
    fill(tmp_path, 1, 5, lag=99)
    fill(tmp_path, 6, 5)
    spoil(tmp_path, 1, offset_of(5, 1, lag=99) + 20)
    with pytest.raises(Damaged, match="later segment") as caught:
        reopen(tmp_path)
    assert (caught.value.file, caught.value.line) == (str(segment_path(tmp_path, 1)), 5)


@pytest.mark.parametrize(("snapshot_seq", "archived_seq", "what"), [(5, 0, "snapshot"), (0, 5, "archive")])
def test_a_bad_line_is_damage_if_the_snapshot_or_the_archive_has_it(
    tmp_path: Path, snapshot_seq: int, archived_seq: int, what: str
) -> None:
    fill(tmp_path, 1, 5, lag=99)
    spoil(tmp_path, 1, offset_of(5, 1, lag=99) + 20)
    with pytest.raises(Damaged, match=f"the {what} holds records up to 5") as caught:
        reopen(tmp_path, snapshot_seq=snapshot_seq, archived_seq=archived_seq)
    assert caught.value.line == 5


def test_the_same_bad_line_is_torn_if_nothing_shows_that_it_was_synced(tmp_path: Path) -> None:
    fill(tmp_path, 1, 5, lag=99)
    spoil(tmp_path, 1, offset_of(5, 1, lag=99) + 20)
    opened, records = reopen(tmp_path, snapshot_seq=4, archived_seq=4)
    assert records == []
    assert opened.torn is not None
    assert opened.torn.seq == 5


@pytest.mark.parametrize(("snapshot_seq", "archived_seq"), [(6, 0), (0, 6)])
def test_a_journal_that_ends_before_the_snapshot_or_the_archive_is_damage(
    tmp_path: Path, snapshot_seq: int, archived_seq: int
) -> None:
    fill(tmp_path, 1, 5)
    with pytest.raises(Damaged, match="ends here") as caught:
        reopen(tmp_path, snapshot_seq=snapshot_seq, archived_seq=archived_seq)
    assert caught.value.line == 6


def test_a_gap_between_good_lines_is_damage(tmp_path: Path) -> None:
    segment_path(tmp_path, 1).write_bytes(line(1, 0) + line(2, 1) + line(4, 1))
    with pytest.raises(Damaged, match="record 4 is where 3 belongs") as caught:
        reopen(tmp_path)
    assert caught.value.line == 3


def test_a_repeated_line_is_damage(tmp_path: Path) -> None:
    segment_path(tmp_path, 1).write_bytes(line(1, 0) + line(2, 1) + line(2, 1))
    with pytest.raises(Damaged, match="record 2 is where 3 belongs"):
        reopen(tmp_path)


def test_a_segment_that_does_not_begin_with_its_name_is_damage(tmp_path: Path) -> None:
    segment_path(tmp_path, 1).write_bytes(line(2, 1))
    with pytest.raises(Damaged, match="record 2 is where 1 belongs") as caught:
        reopen(tmp_path)
    assert caught.value.line == 1


def test_a_missing_segment_in_the_middle_is_damage_and_is_named(tmp_path: Path) -> None:
    fill(tmp_path, 1, 5)
    fill(tmp_path, 10, 12)
    with pytest.raises(Damaged, match="missing") as caught:
        reopen(tmp_path)
    assert caught.value.file == str(segment_path(tmp_path, 6))


@pytest.mark.parametrize(
    ("snapshot_seq", "archived_seq", "what"), [(0, 0, "snapshot"), (3, 9, "snapshot"), (9, 3, "archive")]
)
def test_a_missing_segment_after_the_snapshot_or_the_archive_is_damage(
    tmp_path: Path, snapshot_seq: int, archived_seq: int, what: str
) -> None:
    fill(tmp_path, 6, 12)
    with pytest.raises(Damaged, match=f"missing: the {what} ends") as caught:
        reopen(tmp_path, snapshot_seq=snapshot_seq, archived_seq=archived_seq)
    assert caught.value.file == str(segment_path(tmp_path, min(snapshot_seq, archived_seq) + 1))


def test_a_home_without_any_segment_but_with_a_snapshot_is_damage(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match="there is no segment"):
        reopen(tmp_path / "journal", snapshot_seq=4, archived_seq=4)


def test_events_that_the_replay_cannot_read_are_damage_with_file_and_line(tmp_path: Path) -> None:
    fill(tmp_path, 1, 3)

    def replay(record: Record) -> None:
        if record.seq == 2:
            msgspec.json.decode(record.events, type=list[int])

    with pytest.raises(Damaged, match="events cannot be read") as caught:
        open_journal(tmp_path, snapshot_seq=0, archived_seq=0, now_ms=NOW_MS, replay=replay)
    assert caught.value.line == 2


def test_the_tail_is_written_anew_and_sealed_segments_are_left_alone(tmp_path: Path) -> None:
    fill(tmp_path, 1, 5)
    good = fill(tmp_path, 6, 9)
    before = [segment.path.stat().st_ino for segment in list_segments(tmp_path)]
    with fault_plans.armed(fault_plans.Plan()) as plan:
        reopen(tmp_path)
    after = [segment.path.stat().st_ino for segment in list_segments(tmp_path)]
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert segment_path(tmp_path, 6).read_bytes() == good
    assert plan.hits["opening.sync_tail"] == plan.hits["opening.rename_tail"] == plan.hits["opening.sync_dir"] == 1


@pytest.mark.parametrize(
    "point",
    ["opening.keep_torn", "opening.copy_tail", "opening.sync_tail", "opening.rename_tail", "opening.sync_dir"],
)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_while_opening_loses_nothing(tmp_path: Path, point: str, code: int) -> None:
    good = fill(tmp_path, 1, 9)
    with segment_path(tmp_path, 1).open("ab") as file:
        file.write(b"torn")
    with (
        fault_plans.armed(fault_plans.Plan(point, fault_plans.fail(code, written=7))),
        pytest.raises(OSError, match=os.strerror(code)) as caught,
    ):
        reopen(tmp_path)
    assert caught.value.errno == code
    opened, records = reopen(tmp_path)
    assert seqs(records) == list(range(1, 10))
    assert segment_path(tmp_path, 1).read_bytes() == good
    assert not (tmp_path / "tail.tmp").exists()
    assert any(path.name.startswith("torn-10-") for path in tmp_path.iterdir())
    assert opened.end == Cursor(9, 1, len(good))


KILLED_WHILE_OPENING = """
import sys
from pathlib import Path
from tests.ledger_contract import fault_plans
from covenant.ledger.embedded.journal.recovery import open_journal
folder, point, action = sys.argv[1:]
actions = {"kill": fault_plans.kill, "tear": fault_plans.tear(9), "lose": fault_plans.lose}
fault_plans.arm(fault_plans.Plan(point, actions[action]))
open_journal(Path(folder), snapshot_seq=0, archived_seq=0, now_ms=5, replay=lambda record: None)
"""


@pytest.mark.faults
@pytest.mark.parametrize("action", first_of(["kill", "tear", "lose"]))
@pytest.mark.parametrize("point", [point for point in fault_points.POINTS if point.startswith("opening.")])
def test_a_process_killed_while_opening_loses_nothing(tmp_path: Path, point: str, action: str) -> None:
    good = fill(tmp_path, 1, 9)
    with segment_path(tmp_path, 1).open("ab") as file:
        file.write(b"torn")
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_OPENING, tmp_path, point, action], check=False, timeout=BOUND_S
    )
    assert done.returncode == -9
    _, records = reopen(tmp_path)
    assert seqs(records) == list(range(1, 10))
    assert segment_path(tmp_path, 1).read_bytes() == good


@st.composite
def broken_tails(draw: st.DrawFn) -> tuple[bytes, int, list[bytes]]:
    """A segment whose last batch was never synced and then met an accident: (bytes, last synced seq, lines)."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    lines: list[bytes] = []
    synced = 0
    for size in sizes:
        synced = len(lines)
        text = draw(st.text(max_size=20))
        events = msgspec.json.encode([{"text": text}])
        lines += [encode_line(synced + number, NOW_MS, synced, events) for number in range(1, size + 1)]
    data = bytearray(b"".join(lines))
    kept = len(b"".join(lines[:synced]))
    for _ in range(draw(st.integers(0, 3))):
        if kept < len(data):
            start = draw(st.integers(kept, len(data) - 1))
            junk = draw(st.binary(max_size=30) | st.integers(1, 200).map(bytes))
            data[start : start + len(junk)] = junk
    if draw(st.booleans()):
        del data[draw(st.integers(kept, len(data))) :]
    return bytes(data), synced, lines


@given(broken_tails())
def test_no_accident_to_the_unsynced_tail_loses_a_synced_record_or_invents_one(
    tmp_path_factory: pytest.TempPathFactory, tail: tuple[bytes, int, list[bytes]]
) -> None:
    data, synced, lines = tail
    folder = tmp_path_factory.mktemp("journal")
    segment_path(folder, 1).write_bytes(data)
    opened, records = reopen(folder, archived_seq=synced)
    assert len(records) >= synced
    assert records == [decode_line(text) for text in lines[: len(records)]]
    good = b"".join(lines[: len(records)])
    assert segment_path(folder, 1).read_bytes() == good
    assert opened.end == Cursor(len(records), 1, len(good))
    cut = opened.torn.kept.read_bytes() if opened.torn else b""
    assert good + cut == data.rstrip(b"\0")


@given(data=st.data())
def test_no_accident_to_a_synced_record_is_ever_taken_for_a_torn_tail(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    whole = fill(folder, 1, 6)
    # Records 1 to 5 are synced, as record 6 shows.
    position = data.draw(st.integers(0, offset_of(6, 1) - 1))
    flipped = whole[position] ^ (1 << data.draw(st.integers(0, 7)))
    spoil(folder, 1, position, bytes([flipped]))
    with pytest.raises(Damaged) as caught:
        reopen(folder)
    assert caught.value.line == whole[:position].count(b"\n") + 1


def test_one_home_is_opened_once_and_the_refusal_names_the_process(tmp_path: Path) -> None:
    with lock_home(tmp_path):
        with pytest.raises(HomeLocked, match=str(os.getpid())):
            lock_home(tmp_path)
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    lock_home(tmp_path).close()


def test_a_home_left_by_a_killed_process_can_be_opened(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; "
        "from covenant.ledger.embedded.journal.recovery import lock_home; "
        "lock = lock_home(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script, tmp_path], check=False, timeout=BOUND_S).returncode == -9
    lock = lock_home(tmp_path)
    assert isinstance(lock, HomeLock)
    lock.close()
    lock.close()
