"""The group commit: what is durable when, what is shared, and what a failing disk makes of it."""

import asyncio
import errno
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest

from covenant.ledger.embedded import fault_points
from covenant.ledger.embedded.journal import journal as journal_module
from covenant.ledger.embedded.journal.journal import GATHER_TURNS, TRY_AFTER_BATCHES, Journal, MemoryJournal
from covenant.ledger.embedded.journal.record import Record, decode_line
from covenant.ledger.embedded.journal.recovery import OpenedJournal, open_journal
from covenant.ledger.embedded.journal.segments import RESERVED_BYTES, Cursor, Lines, list_segments, segment_path
from covenant.model.errors import Unavailable
from tests.ledger_contract import fault_plans
from tests.matrices import first_of
from tests.waits import BOUND_S

EVENTS = b'[{"kind":"noted","text":"' + b"x" * 500 + b'"}]'
NOW_MS = 1_700_000_000_000


def reopen(home: Path) -> tuple[OpenedJournal, list[Record]]:
    records: list[Record] = []
    opened = open_journal(home / "journal", snapshot_seq=0, archived_seq=0, now_ms=NOW_MS, replay=records.append)
    return opened, records


@asynccontextmanager
async def journal_in(
    home: Path, *, durability: Literal["fsync", "os"] = "fsync", segment_bytes: int = 16 << 20
) -> AsyncIterator[Journal]:
    journal = Journal(reopen(home)[0], durability=durability, segment_bytes=segment_bytes)
    try:
        yield journal
    finally:
        await journal.close()
        journal.release()


def seqs(data: bytes) -> list[int]:
    return [decode_line(line).seq for line in data.splitlines(keepends=True)]


def on_disk(home: Path) -> list[int]:
    """Every record in the files as they are, without opening (and mending) anything."""
    return seqs(b"".join(segment.path.read_bytes().rstrip(b"\0") for segment in list_segments(home / "journal")))


async def callers(journal: Journal, count: int, each: int) -> None:
    async def caller() -> None:
        for _ in range(each):
            seq = journal.append(EVENTS, NOW_MS)
            await journal.wait()
            assert journal.durable_seq >= seq

    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*(caller() for _ in range(count)))


class Gate:
    """Holds whoever comes to a crash point until it is opened: a disk that is slow for exactly as long as wanted."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, step: fault_points.FaultPoint) -> None:
        self.reached.set()
        assert self._open.wait(BOUND_S)

    def open(self) -> None:
        self._open.set()

    async def wait_until_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, BOUND_S)


async def test_what_was_waited_for_is_in_the_file_and_comes_back(tmp_path: Path) -> None:
    async with journal_in(tmp_path) as journal:
        for number in range(1, 20):
            assert journal.append(EVENTS, NOW_MS + number) == number
            await journal.wait()
            assert journal.durable_seq == journal.last_seq == number
            assert on_disk(tmp_path) == list(range(1, number + 1))
    opened, records = reopen(tmp_path)
    assert [(record.seq, record.ts_ms) for record in records] == [(n, NOW_MS + n) for n in range(1, 20)]
    assert all(bytes(record.events) == EVENTS for record in records)
    assert opened.torn is None


async def test_nothing_is_durable_before_it_is_synced(tmp_path: Path) -> None:
    gate = Gate()
    async with journal_in(tmp_path) as journal:
        with fault_plans.armed(fault_plans.Plan("journal.sync", gate)):
            journal.append(EVENTS, NOW_MS)
            waiting = asyncio.ensure_future(journal.wait())
            await gate.wait_until_reached()
            assert on_disk(tmp_path) == [1]
            assert journal.durable_seq == 0
            assert not waiting.done()
            assert journal.read(Cursor(0, 1, 0), 1 << 20).data == b""
            gate.open()
            await asyncio.wait_for(waiting, BOUND_S)
        assert journal.durable_seq == 1
        assert seqs(journal.read(Cursor(0, 1, 0), 1 << 20).data) == [1]


async def test_a_wait_for_what_is_durable_returns_without_a_turn_of_the_loop(tmp_path: Path) -> None:
    async with journal_in(tmp_path) as journal:
        journal.append(EVENTS, NOW_MS)
        await journal.wait()
        for seq in (None, 0, 1):
            with pytest.raises(StopIteration):
                journal.wait(seq).send(None)


async def test_a_wait_for_an_earlier_record_does_not_wait_for_a_later_one(tmp_path: Path) -> None:
    gate, next_gate = Gate(), Gate()
    async with journal_in(tmp_path) as journal:
        with fault_plans.armed(fault_plans.Plan("journal.sync", gate)):
            first = journal.append(EVENTS, NOW_MS)
            await gate.wait_until_reached()
            second = journal.append(EVENTS, NOW_MS)
            later = asyncio.ensure_future(journal.wait())
            await asyncio.sleep(0)
            fault_plans.arm(fault_plans.Plan("journal.sync", next_gate))
            gate.open()
            await asyncio.wait_for(journal.wait(first), BOUND_S)
            assert journal.durable_seq == first
            next_gate.open()
            await asyncio.wait_for(later, BOUND_S)
            assert journal.durable_seq == second


async def test_a_wait_for_a_record_that_was_never_appended_is_refused(tmp_path: Path) -> None:
    async with journal_in(tmp_path) as journal:
        with pytest.raises(ValueError, match="record 1"):
            await journal.wait(1)


async def test_a_record_that_would_not_be_one_line_is_refused(tmp_path: Path) -> None:
    async with journal_in(tmp_path) as journal:
        with pytest.raises(ValueError, match="one line"):
            journal.append(b'["a",\n"b"]', NOW_MS)
        assert journal.last_seq == 0


@pytest.mark.parametrize("count", [2, 16, 64])
async def test_callers_who_wait_together_share_a_sync(tmp_path: Path, count: int) -> None:
    async with journal_in(tmp_path) as journal:
        with fault_plans.armed(fault_plans.Plan()) as plan:
            await callers(journal, count, each=50)
        appends = count * 50
        assert journal.durable_seq == appends
        assert plan.hits["journal.sync"] == plan.hits["journal.write"] == journal.batches
        # Not one for each, also when the loop writes and every caller could have synced alone: it may take each
        # caller a few rounds to be found out as not alone, and to end.
        assert plan.hits["journal.sync"] < appends / count * 2 + 100
    assert on_disk(tmp_path) == list(range(1, appends + 1))


async def test_callers_who_come_one_turn_after_another_share_a_batch(tmp_path: Path) -> None:
    async def caller(journal: Journal, after: int) -> None:
        journal.append(EVENTS, NOW_MS)
        following = asyncio.ensure_future(caller(journal, after - 1)) if after else None
        await journal.wait()
        if following is not None:
            await following

    async with journal_in(tmp_path) as journal:
        await asyncio.wait_for(caller(journal, GATHER_TURNS - 1), BOUND_S)
        assert journal.last_seq == GATHER_TURNS
        assert journal.batches == 1


async def test_the_loop_takes_over_again_when_only_the_thread_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As beside a busy loop, where the thread waits for the interpreter's lock and the disk is quick all the same.
    monkeypatch.setattr(journal_module, "INLINE_BATCH_S", 0.02)
    monkeypatch.setattr(journal_module, "TRY_BATCH_S", 10.0)
    passed_s = 0.0
    monkeypatch.setattr(journal_module, "perf_counter", lambda: passed_s)
    writers: list[int] = []

    class Slow(fault_plans.Plan):
        def hit(self, step: fault_points.FaultPoint) -> None:
            nonlocal passed_s
            if step.name == "journal.sync":
                writers.append(threading.get_ident())
                if writers[-1] != threading.main_thread().ident:
                    passed_s += 0.025

    async with journal_in(tmp_path) as journal:
        with fault_plans.armed(Slow()):
            await callers(journal, 4, each=60)
    here = [writer == threading.main_thread().ident for writer in writers]
    assert not any(here[:TRY_AFTER_BATCHES])
    assert all(here[-10:])


async def test_a_caller_who_is_alone_lets_others_come_to_their_turn(tmp_path: Path) -> None:
    turns = 0
    async with journal_in(tmp_path) as journal:
        done = False

        async def other() -> None:
            nonlocal turns
            while not done:
                turns += 1
                await asyncio.sleep(0)

        bystander = asyncio.ensure_future(other())
        await callers(journal, 1, each=400)
        done = True
        await bystander
        # Every millisecond of writing at most: 400 syncs take longer than that many turns, on any disk.
        assert turns > 5


async def test_a_stream_that_does_not_wait_is_written_several_records_at_a_time(tmp_path: Path) -> None:
    async with journal_in(tmp_path) as journal:
        await callers(journal, 1, each=50)
        before = journal.batches
        gate = Gate()
        with fault_plans.armed(fault_plans.Plan("journal.sync", gate)):
            journal.append(EVENTS, NOW_MS)
            await gate.wait_until_reached()
            for _ in range(99):
                journal.append(EVENTS, NOW_MS)
                await asyncio.sleep(0)
            gate.open()
            await asyncio.wait_for(journal.wait(), BOUND_S)
        assert journal.batches - before == 2


async def test_canceling_one_waiting_caller_does_not_touch_the_others(tmp_path: Path) -> None:
    gate = Gate()
    async with journal_in(tmp_path) as journal:
        with fault_plans.armed(fault_plans.Plan("journal.sync", gate)):
            journal.append(EVENTS, NOW_MS)
            waiting = [asyncio.ensure_future(journal.wait()) for _ in range(3)]
            await gate.wait_until_reached()
            waiting[1].cancel()
            await asyncio.wait([waiting[1]], timeout=BOUND_S)
            assert waiting[1].cancelled()
            gate.open()
            await asyncio.wait_for(asyncio.gather(waiting[0], waiting[2]), BOUND_S)
        assert journal.durable_seq == 1


async def test_whoever_follows_hears_of_every_batch_in_order_and_never_too_early(tmp_path: Path) -> None:
    heard: list[int] = []
    async with journal_in(tmp_path) as journal:

        def durable(seq: int) -> None:
            assert seq == journal.durable_seq
            assert seq in on_disk(tmp_path)
            heard.append(seq)

        journal.on_durable = durable
        await callers(journal, 5, each=10)
        assert len(heard) == journal.batches
    assert heard == sorted(set(heard))
    assert heard[-1] == 50


async def test_each_line_says_how_far_the_disk_was_known_to_be(tmp_path: Path) -> None:
    async with journal_in(tmp_path) as journal:
        await callers(journal, 3, each=10)
    _, records = reopen(tmp_path)
    assert records[0].synced == 0
    batches = sorted({record.synced for record in records})
    for record in records:
        assert record.synced < record.seq
        assert record.synced == max(synced for synced in batches if synced < record.seq)


async def test_with_os_durability_nothing_is_synced_until_somebody_copies_it(tmp_path: Path) -> None:
    async with journal_in(tmp_path, durability="os") as journal:
        with fault_plans.armed(fault_plans.Plan()) as plan:
            await callers(journal, 4, each=25)
            assert journal.durable_seq == 100
            assert on_disk(tmp_path) == list(range(1, 101))
            assert plan.hits["journal.sync"] == 0
            lines = await asyncio.to_thread(journal.read, journal.cursor(0), 1 << 20)
            assert seqs(lines.data) == list(range(1, 101))
            assert plan.hits["journal.sync"] == 1
            journal.append(EVENTS, NOW_MS)
            await journal.wait()
    synced = [record.synced for record in reopen(tmp_path)[1]]
    assert synced == [0] * 100 + [100]


async def test_with_os_durability_a_sync_that_fails_for_the_reader_ends_the_writer(tmp_path: Path) -> None:
    async with journal_in(tmp_path, durability="os") as journal:
        await callers(journal, 1, each=3)
        with fault_plans.armed(fault_plans.Plan("journal.sync", fault_plans.fail(errno.EIO))):
            with pytest.raises(OSError, match="Input/output"):
                await asyncio.to_thread(journal.read, journal.cursor(0), 1 << 20)
            with pytest.raises(Unavailable, match="Input/output"):
                await asyncio.to_thread(journal.read, journal.cursor(0), 1 << 20)
        with pytest.raises(Unavailable) as caught:
            journal.append(EVENTS, NOW_MS)
        assert caught.value.code == "storage_failed"


async def test_segments_rotate_under_load_and_every_record_is_in_one_of_them(tmp_path: Path) -> None:
    async with journal_in(tmp_path, segment_bytes=20_000) as journal:
        await callers(journal, 16, each=40)
        segments = list_segments(tmp_path / "journal")
        assert len(segments) > 10
        for segment in segments[:-1]:
            assert 20_000 <= segment.path.stat().st_size < 20_000 + 17 * 640
    opened, records = reopen(tmp_path)
    assert [record.seq for record in records] == list(range(1, 641))
    assert opened.end.segment == segments[-1].first_seq


async def test_room_is_reserved_behind_the_last_line_and_given_back_when_a_segment_ends(tmp_path: Path) -> None:
    first, second = (segment_path(tmp_path / "journal", seq) for seq in (1, 4))
    async with journal_in(tmp_path) as journal:
        await callers(journal, 1, each=3)
        lines = first.read_bytes().rstrip(b"\0")
        assert seqs(lines) == [1, 2, 3]
        assert first.stat().st_size > RESERVED_BYTES
        await journal.rotate()
        assert first.read_bytes() == lines
        await callers(journal, 1, each=1)
        assert second.stat().st_size > RESERVED_BYTES
    assert seqs(second.read_bytes()) == [4]


async def test_a_disk_without_room_to_reserve_is_written_to_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    async with journal_in(tmp_path) as journal:
        await callers(journal, 4, each=3)
        assert seqs(segment_path(tmp_path / "journal", 1).read_bytes()) == list(range(1, 13))


async def test_rotating_on_request_seals_what_was_appended_before(tmp_path: Path) -> None:
    async with journal_in(tmp_path) as journal:
        assert await journal.rotate() == 0
        for _ in range(3):
            journal.append(EVENTS, NOW_MS)
        assert await journal.rotate() == 3
        assert journal.durable_seq == 3
        assert await journal.rotate() == 3
        assert [segment.first_seq for segment in list_segments(tmp_path / "journal")] == [1, 4]
        journal.append(EVENTS, NOW_MS)
        await journal.wait()
        assert [segment.first_seq for segment in journal.drop_through(3)] == [1]
    assert on_disk(tmp_path) == [4]


async def test_rotating_and_appending_at_the_same_time_loses_nothing(tmp_path: Path) -> None:
    async with journal_in(tmp_path) as journal:

        async def rotations() -> None:
            for _ in range(20):
                sealed = await journal.rotate()
                assert sealed <= journal.durable_seq
                await asyncio.sleep(0)

        await asyncio.wait_for(asyncio.gather(rotations(), callers(journal, 8, each=30)), BOUND_S)
    assert on_disk(tmp_path) == list(range(1, 241))


async def test_a_reader_beside_a_busy_journal_gets_every_line_once_and_never_passes_durable(tmp_path: Path) -> None:
    async with journal_in(tmp_path, segment_bytes=30_000) as journal:
        found: list[int] = []
        last = 16 * 60

        def follow() -> None:
            cursor = journal.cursor(0)
            while cursor.seq < last:
                lines: Lines = journal.read(cursor, 5_000)
                assert lines.last_seq <= journal.durable_seq
                found.extend(seqs(lines.data))
                cursor = lines.cursor

        await asyncio.wait_for(asyncio.gather(asyncio.to_thread(follow), callers(journal, 16, each=60)), BOUND_S)
        assert found == list(range(1, last + 1))


async def test_a_reader_can_begin_anywhere_and_reads_on_after_older_segments_are_dropped(tmp_path: Path) -> None:
    async with journal_in(tmp_path, segment_bytes=5_000) as journal:
        await callers(journal, 1, each=100)
        cursor = journal.cursor(57)
        journal.drop_through(57)
        assert seqs(journal.read(cursor, 1).data) == [58]
        with pytest.raises(LookupError):
            journal.cursor(3)


async def test_a_closed_journal_has_everything_and_takes_nothing_more(tmp_path: Path) -> None:
    async with journal_in(tmp_path) as journal:
        for _ in range(10):
            journal.append(EVENTS, NOW_MS)
    assert on_disk(tmp_path) == list(range(1, 11))
    with pytest.raises(Unavailable, match="closed"):
        journal.append(EVENTS, NOW_MS)
    with pytest.raises(Unavailable, match="closed"):
        await journal.rotate()
    await journal.close()
    assert not journal._thread.is_alive()


async def test_closing_waits_for_a_rotation_that_is_under_way(tmp_path: Path) -> None:
    async with journal_in(tmp_path) as journal:
        journal.append(EVENTS, NOW_MS)
        rotation = asyncio.ensure_future(journal.rotate())
        await asyncio.sleep(0)
    assert await asyncio.wait_for(rotation, BOUND_S) == 1


async def test_closing_syncs_what_os_durability_left(tmp_path: Path) -> None:
    async with journal_in(tmp_path, durability="os") as journal:
        await callers(journal, 1, each=3)
        with fault_plans.armed(fault_plans.Plan()) as plan:
            await journal.close()
        assert plan.hits["journal.sync"] == 1


FAILURES = [
    pytest.param(point, fault_plans.fail(code, written=written), id=f"{point}-{errno.errorcode[code]}-{written}")
    for point in ("journal.write", "journal.sync")
    for code, written in ((errno.EIO, 0), (errno.ENOSPC, 0), (errno.ENOSPC, 700))
]


@pytest.mark.faults
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(("point", "action"), FAILURES)
async def test_after_a_failed_write_or_sync_nothing_is_acknowledged_again(
    tmp_path: Path, point: str, action: fault_plans.Action, alone: bool
) -> None:
    async with journal_in(tmp_path) as journal:
        await callers(journal, 1 if alone else 4, each=30)
        durable = journal.durable_seq
        with fault_plans.armed(fault_plans.Plan(point, action)) as plan:
            waits = []
            for _ in range(3):
                journal.append(EVENTS, NOW_MS)
                waits.append(journal.wait())
            outcomes = await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), BOUND_S)
        assert plan.fired
        for outcome in outcomes:
            assert isinstance(outcome, Unavailable)
            assert outcome.code == "outcome_unknown"
        assert journal.failure
        with pytest.raises(Unavailable) as caught:
            journal.append(EVENTS, NOW_MS)
        assert caught.value.code == "storage_failed"
        assert journal.failure in caught.value.message
        with pytest.raises(Unavailable) as caught:
            await journal.wait()
        assert caught.value.code == "outcome_unknown"
        with pytest.raises(Unavailable):
            await journal.rotate()
        # What was durable is still answered and still read; nothing else is.
        await journal.wait(durable)
        assert journal.durable_seq == durable
        assert seqs(journal.read(journal.cursor(0), 1 << 20).data) == list(range(1, durable + 1))
    _, records = reopen(tmp_path)
    assert durable <= len(records) <= durable + 3
    assert [record.seq for record in records] == list(range(1, len(records) + 1))


@pytest.mark.faults
async def test_records_that_wait_behind_a_failing_batch_fail_with_it(tmp_path: Path) -> None:
    gate = Gate()

    def fail_late(step: fault_points.FaultPoint) -> None:
        gate(step)
        fault_plans.fail(errno.EIO)(step)

    async with journal_in(tmp_path) as journal:
        with fault_plans.armed(fault_plans.Plan("journal.sync", fail_late)):
            journal.append(EVENTS, NOW_MS)
            first = asyncio.ensure_future(journal.wait())
            await gate.wait_until_reached()
            journal.append(EVENTS, NOW_MS)
            second = asyncio.ensure_future(journal.wait())
            rotation = asyncio.ensure_future(journal.rotate())
            await asyncio.sleep(0)
            gate.open()
            outcomes = await asyncio.wait_for(asyncio.gather(first, second, rotation, return_exceptions=True), BOUND_S)
        assert [getattr(outcome, "code", None) for outcome in outcomes] == ["outcome_unknown"] * 3
    assert on_disk(tmp_path) == [1]


@pytest.mark.faults
@pytest.mark.parametrize("point", ["journal.seal", "journal.create_segment", "journal.sync_dir"])
async def test_a_rotation_that_fails_ends_the_writer_and_loses_nothing(tmp_path: Path, point: str) -> None:
    async with journal_in(tmp_path) as journal:
        await callers(journal, 1, each=5)
        with (
            fault_plans.armed(fault_plans.Plan(point, fault_plans.fail(errno.ENOSPC))),
            pytest.raises(Unavailable) as caught,
        ):
            await asyncio.wait_for(journal.rotate(), BOUND_S)
        assert caught.value.code == "outcome_unknown"
        with pytest.raises(Unavailable, match="No space left"):
            journal.append(EVENTS, NOW_MS)
    assert [record.seq for record in reopen(tmp_path)[1]] == [1, 2, 3, 4, 5]


async def test_a_full_disk_is_told_by_the_system_itself(tmp_path: Path) -> None:
    """A limit on the file's size stops a write in its middle, as a full disk does; no fault is injected."""
    script = f"""
import asyncio, resource, signal, sys
from pathlib import Path
from covenant.ledger.embedded.journal.journal import Journal
from covenant.ledger.embedded.journal.recovery import open_journal
from covenant.model.errors import Unavailable
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
async def main():
    opened = open_journal(Path(sys.argv[1]), snapshot_seq=0, archived_seq=0, now_ms=0, replay=print)
    journal = Journal(opened)
    try:
        while True:
            journal.append({EVENTS!r}, 1)
            await journal.wait()
    except Unavailable as refusal:
        print(refusal.code, journal.durable_seq)
    await journal.close()
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "journal"],
        capture_output=True,
        check=True,
        timeout=BOUND_S,
        text=True,
    )
    code, durable = done.stdout.split()
    assert code == "outcome_unknown"
    opened, records = reopen(tmp_path)
    assert len(records) == int(durable) > 0
    assert opened.torn is not None


KILLED_WHILE_WRITING = f"""
import asyncio, os, sys
from pathlib import Path
from tests.ledger_contract import fault_plans
from covenant.ledger.embedded.journal.journal import Journal
from covenant.ledger.embedded.journal.recovery import open_journal
folder, point, action, nth = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
async def main():
    opened = open_journal(folder, snapshot_seq=0, archived_seq=0, now_ms=0, replay=lambda record: None)
    journal = Journal(opened, segment_bytes=5_000)
    act = {{"kill": fault_plans.kill, "tear": fault_plans.tear(1_000), "lose": fault_plans.lose}}[action]
    fault_plans.arm(fault_plans.Plan(point, act, nth=nth))
    async def caller():
        while True:
            seq = journal.append({EVENTS!r}, 1)
            await journal.wait()
            os.write(1, b"%d\\n" % seq)
            if seq > 60:
                journal.drop_through(seq - 30)
    await asyncio.gather(*(caller() for _ in range(6)))
asyncio.run(main())
"""


@pytest.mark.faults
@pytest.mark.parametrize("action", first_of(["kill", "tear", "lose"]))
@pytest.mark.parametrize("point", [point for point in fault_points.POINTS if point.startswith("journal.")])
def test_an_acknowledged_record_survives_a_kill_at_every_step(tmp_path: Path, point: str, action: str) -> None:
    nth = "40" if point in {"journal.write", "journal.sync", "journal.acknowledge"} else "3"
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_WRITING, tmp_path / "journal", point, action, nth],
        capture_output=True,
        check=False,
        timeout=BOUND_S,
    )
    assert done.returncode == -9, done.stderr
    acknowledged = max(int(seq) for seq in done.stdout.split())
    first = list_segments(tmp_path / "journal")[0].first_seq
    records: list[Record] = []
    opened = open_journal(
        tmp_path / "journal",
        snapshot_seq=first - 1,
        archived_seq=first - 1,
        now_ms=NOW_MS,
        replay=records.append,
    )
    assert opened.end.seq >= acknowledged
    assert [record.seq for record in records] == list(range(first, opened.end.seq + 1))


@pytest.mark.parametrize("kind", ["file", "memory"])
async def test_a_reader_does_not_care_whether_there_is_a_file(tmp_path: Path, kind: str) -> None:
    journal = Journal(reopen(tmp_path)[0]) if kind == "file" else MemoryJournal()
    heard: list[int] = []
    journal.on_durable = heard.append
    for _ in range(10):
        journal.append(EVENTS, NOW_MS)
    await journal.wait()
    await asyncio.sleep(0)
    assert journal.durable_seq == journal.last_seq == heard[-1] == 10
    first = journal.read(journal.cursor(0), 2_000)
    assert seqs(first.data) == [1, 2, 3]
    rest = journal.read(first.cursor, 1 << 20)
    assert seqs(rest.data) == list(range(4, 11))
    assert journal.read(rest.cursor, 1 << 20) == (b"", 10, rest.cursor)
    assert seqs(journal.read(journal.cursor(9), 1).data) == [10]
    assert await journal.rotate() == 10
    journal.trim(4)
    assert seqs(journal.read(journal.cursor(4), 1).data) == [5]
    journal.drop_through(10)
    assert journal.read(journal.cursor(10), 1).data == b""
    with pytest.raises(LookupError):
        journal.cursor(3)
    with pytest.raises(ValueError, match="one line"):
        journal.append(b"[\n]", NOW_MS)
    with pytest.raises(ValueError, match="record 11"):
        await journal.wait(11)
    journal.release()
    await journal.close()
    with pytest.raises(Unavailable, match="closed"):
        journal.append(EVENTS, NOW_MS)
