"""Backups of a ledger in files, restores of them, and restores to a later moment from shipped segments."""

import asyncio
import io
import shutil
import tarfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from covenant import Mailbox
from covenant.daemon.home_backup import CannotRestore, Restored, Until, parse_until, restore
from covenant.ledger.embedded import fault_points
from covenant.ledger.embedded.backup_file import (
    MANIFEST_NAME,
    ORIGINAL,
    STAGED_MAX,
    BadBackup,
    StagedBackups,
    read_incarnation,
    write_backup,
)
from covenant.ledger.embedded.blob_folder import FOLDER_NAME as BLOBS_NAME
from covenant.ledger.embedded.blob_folder import BlobFolder
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.embedded.journal.segments import list_segments
from covenant.ledger.embedded.journal.shipped_segments import ShippedSegments, read_status, sealed_segments
from covenant.ledger.embedded.open import RESTORING_NAME, open_ledger
from covenant.model.errors import HomeLocked, HomeUnusable, Unavailable
from tests.ledger.embedded.recorded import task, task_id
from tests.ledger_contract import fault_plans
from tests.ledger_contract.blobs import ACME, PIECE, get, put
from tests.ledger_contract.fake_clock import FakeClock
from tests.ledger_contract.fault_plans import Plan
from tests.waits import BOUND_S

SEGMENT_BYTES = 2_000
SETTINGS = b"[http]\nport = 1\n"
PRICES = b"{}"


def made_ids() -> str:
    made_ids.count += 1  # type: ignore[attr-defined]
    return f"backup-{made_ids.count}"  # type: ignore[attr-defined]


made_ids.count = 0  # type: ignore[attr-defined]


@asynccontextmanager
async def opened(home: Path, clock: FakeClock, shipped: ShippedSegments | None = None) -> AsyncIterator[EmbeddedLedger]:
    ledger = await open_ledger(home, clock=clock, segment_bytes=SEGMENT_BYTES, shipped=shipped)
    try:
        yield ledger
    finally:
        await ledger.close()


async def send(ledger: EmbeddedLedger, *numbers: int) -> None:
    for number in numbers:
        await Mailbox(ledger).send_task(task(number))


async def back_up(home: Path, ledger: EmbeddedLedger) -> bytes:
    backups = StagedBackups(home, ledger, made_ids)
    staged = await backups.begin()
    out = io.BytesIO()
    write_backup(out, home, staged, "0")
    assert await backups.end(staged.id)
    return out.getvalue()


async def known(home: Path, clock: FakeClock, numbers: range) -> list[int]:
    async with opened(home, clock) as ledger:
        return [number for number in numbers if await ledger.show(task_id(number), None, 10) is not None]


async def restored(
    made: bytes, home: Path, clock: FakeClock, segments: Path | None = None, until: str = ""
) -> Restored:
    end = parse_until(until) if until else None
    return await restore(io.BytesIO(made), home, now_ms=clock, segments=segments, until=end)


async def test_a_backup_has_what_was_acknowledged_before_it_and_nothing_of_later(tmp_path: Path) -> None:
    clock = FakeClock()
    home = tmp_path / "home"
    async with opened(home, clock) as ledger:
        (home / "settings.toml").write_bytes(SETTINGS)
        (home / "model_prices.json").write_bytes(PRICES)
        await send(ledger, *range(1, 31))
        made = await back_up(home, ledger)
        await send(ledger, *range(31, 41))
        again = await back_up(home, ledger)
    done = await restored(made, tmp_path / "first", clock)
    assert await known(tmp_path / "first", clock, range(1, 41)) == list(range(1, 31))
    assert done.counts.queued == 30
    assert (tmp_path / "first" / "settings.toml").read_bytes() == SETTINGS
    assert (tmp_path / "first" / "model_prices.json").read_bytes() == PRICES
    await restored(again, tmp_path / "second", clock)
    assert await known(tmp_path / "second", clock, range(1, 41)) == list(range(1, 41))


async def test_what_was_compacted_before_is_in_it(tmp_path: Path) -> None:
    clock = FakeClock()
    async with opened(tmp_path / "home", clock) as ledger:
        await send(ledger, *range(1, 31))
        await ledger.compact()
        assert len(list_segments(tmp_path / "home" / "journal")) == 1
        made = await back_up(tmp_path / "home", ledger)
    await restored(made, tmp_path / "copy", clock)
    assert await known(tmp_path / "copy", clock, range(1, 31)) == list(range(1, 31))


async def test_a_ledger_without_a_record_can_be_restored(tmp_path: Path) -> None:
    clock = FakeClock()
    async with opened(tmp_path / "home", clock) as ledger:
        made = await back_up(tmp_path / "home", ledger)
    done = await restored(made, tmp_path / "copy", clock)
    assert done.incarnation.position == 0
    assert await known(tmp_path / "copy", clock, range(1, 3)) == []


async def test_the_journal_of_a_backup_holds_what_its_archive_does_not_have_yet(tmp_path: Path) -> None:
    clock = FakeClock()
    reached, gate = threading.Event(), threading.Event()

    def hold(_step: fault_points.FaultPoint) -> None:
        reached.set()
        assert gate.wait(BOUND_S)

    async with opened(tmp_path / "home", clock) as ledger:
        await send(ledger, 1)
        with fault_plans.armed(Plan("archive.apply", hold)):
            await send(ledger, 2)
            assert await asyncio.to_thread(reached.wait, BOUND_S)
            await send(ledger, *range(3, 31))
            made = await back_up(tmp_path / "home", ledger)
            gate.set()
    await restored(made, tmp_path / "copy", clock)
    assert await known(tmp_path / "copy", clock, range(1, 31)) == list(range(1, 31))


async def test_a_restored_ledger_knows_that_it_is_one(tmp_path: Path) -> None:
    clock = FakeClock()
    async with opened(tmp_path / "home", clock) as ledger:
        await send(ledger, 1, 2)
        made = await back_up(tmp_path / "home", ledger)
    assert read_incarnation(tmp_path / "home").id == ORIGINAL
    first = await restored(made, tmp_path / "a", clock)
    second = await restored(made, tmp_path / "b", clock)
    assert len({ORIGINAL, first.incarnation.id, second.incarnation.id}) == 3
    assert read_incarnation(tmp_path / "a") == first.incarnation
    async with opened(tmp_path / "a", clock) as ledger:
        (row,) = [each for each in await ledger.audit_recent(None, 10, None) if "ledger_restored" in str(each)]
        assert first.incarnation.id in str(row)
        assert (await ledger.audit_verify()).valid
        assert "original" in str(first.manifest)
        of_restored = await back_up(tmp_path / "a", ledger)
    assert (await restored(of_restored, tmp_path / "c", clock)).manifest.incarnation == first.incarnation.id


async def test_files_of_a_restored_home_are_for_their_owner_alone(tmp_path: Path) -> None:
    clock, home = FakeClock(), tmp_path / "home"
    async with opened(home, clock) as ledger:
        await send(ledger, 1)
        (home / "identity").mkdir()
        (home / "identity" / "local.key").write_text("ab" * 32)
        (home / "elsewhere").write_text("not ours")
        (home / "agents").mkdir()
        (home / "agents" / "link.json").symlink_to(home / "elsewhere")
        made = await back_up(home, ledger)
    await restored(made, tmp_path / "copy", clock)
    for path in (tmp_path / "copy").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert (tmp_path / "copy" / "identity" / "local.key").read_text() == "ab" * 32
    assert not (tmp_path / "copy" / "elsewhere").exists()
    assert not (tmp_path / "copy" / "agents").exists()


@pytest.fixture
async def made(tmp_path: Path) -> bytes:
    async with opened(tmp_path / "made", FakeClock()) as ledger:
        await send(ledger, *range(1, 11))
        return await back_up(tmp_path / "made", ledger)


@pytest.mark.parametrize("at", [0.02, 0.3, 0.6, 0.9])
async def test_a_changed_byte_is_refused(tmp_path: Path, made: bytes, at: float) -> None:
    with tarfile.open(fileobj=io.BytesIO(made)) as tar:
        members = [member for member in tar if member.size]
    member = members[int(at * len(members))]
    place = member.offset_data + member.size // 2
    changed = made[:place] + bytes([made[place] ^ 1]) + made[place + 1 :]
    with pytest.raises(BadBackup):
        await restored(changed, tmp_path / "home", FakeClock())
    with pytest.raises(HomeUnusable, match="cut off"):
        await open_ledger(tmp_path / "home", clock=FakeClock())


@pytest.mark.parametrize("part", [0.1, 0.5, 0.95])
async def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, made: bytes, part: float) -> None:
    with tarfile.open(fileobj=io.BytesIO(made)) as tar:
        end = tar.getmember(MANIFEST_NAME).offset
    with pytest.raises(BadBackup):
        await restored(made[: int(end * part)], tmp_path / "home", FakeClock())


@pytest.mark.parametrize("name", ["../out", "/out", "journal/../../out", "a//b"])
async def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    (tmp_path / "in").mkdir()
    with pytest.raises(BadBackup, match="no file of a home"):
        await restored(out.getvalue(), tmp_path / "in" / "home", FakeClock())
    assert not list(tmp_path.rglob("out"))


async def test_a_home_that_is_in_use_or_not_empty_is_left_alone(tmp_path: Path, made: bytes) -> None:
    home = tmp_path / "home"
    async with opened(home, FakeClock()):
        with pytest.raises(HomeLocked):
            await restored(made, home, FakeClock())
    with pytest.raises(CannotRestore, match="not empty"):
        await restored(made, home, FakeClock())
    assert not (home / RESTORING_NAME).exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    await restored(made, empty, FakeClock())
    assert await known(empty, FakeClock(), range(1, 11)) == list(range(1, 11))


async def test_the_oldest_of_too_many_copies_is_removed(tmp_path: Path) -> None:
    async with opened(tmp_path / "home", FakeClock()) as ledger:
        await send(ledger, 1)
        backups = StagedBackups(tmp_path / "home", ledger, made_ids)
        folders = [Path((await backups.begin()).folder) for _ in range(STAGED_MAX + 1)]
        assert [folder.exists() for folder in folders] == [False] + [True] * STAGED_MAX
        await backups.clear()
        assert not any(folder.exists() for folder in folders)


class Shipped:
    """A ledger that goes on after its backup, and the segments that were shipped since."""

    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.folder = folder
        self.segments = folder / "segments"
        self.segments.mkdir()
        self.made = b""
        self.position = 0

    async def run(self) -> None:
        home = self.folder / "home"
        async with opened(home, self.clock) as ledger:
            await send(ledger, *range(1, 11))
            self.made = await back_up(home, ledger)
            self.position = (await ledger.counts()).gauges["durable_seq"]
            for number in range(11, 41):
                self.clock.advance(1_000)
                await send(ledger, number)
            await ledger.seal()
            for segment in sealed_segments(home / "journal"):
                shutil.copy(segment.path, self.segments)

    async def restore(self, name: str, until: str = "") -> list[int]:
        await restored(self.made, self.folder / name, self.clock, self.segments, until)
        return await known(self.folder / name, self.clock, range(1, 41))


@pytest.fixture
async def shipped(tmp_path: Path) -> Shipped:
    made = Shipped(tmp_path)
    await made.run()
    return made


async def test_shipped_segments_bring_a_backup_to_their_end(shipped: Shipped) -> None:
    assert await shipped.restore("copy") == list(range(1, 41))


async def test_a_restore_ends_with_the_position_that_was_asked_for(shipped: Shipped) -> None:
    for more in (0, 1, 7, 30):
        assert await shipped.restore(f"copy{more}", str(shipped.position + more)) == list(range(1, 11 + more))


async def test_a_restore_ends_before_the_first_record_that_is_later_than_the_time(shipped: Shipped) -> None:
    at_ms = shipped.clock() - 20_000
    until = Until(time_ms=at_ms)
    await restore(
        io.BytesIO(shipped.made),
        shipped.folder / "copy",
        now_ms=shipped.clock,
        segments=shipped.segments,
        until=until,
    )
    assert await known(shipped.folder / "copy", shipped.clock, range(1, 41)) == list(range(1, 21))


async def test_what_cannot_be_reached_is_refused_and_says_why(shipped: Shipped) -> None:
    with pytest.raises(CannotRestore, match="take an older"):
        await shipped.restore("early", str(shipped.position - 1))
    with pytest.raises(CannotRestore, match="--until is later"):
        await shipped.restore("late", str(shipped.position + 31))
    found = [path for path in sorted(shipped.segments.iterdir()) if int(path.stem) > shipped.position]
    found[1].rename(shipped.folder / "kept")
    with pytest.raises(CannotRestore, match="is missing"):
        await shipped.restore("gap")
    (shipped.folder / "kept").rename(found[1])
    data = found[1].read_bytes()
    found[1].write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])
    with pytest.raises(CannotRestore, match="line 1: the checksum does not match"):
        await shipped.restore("damaged")


@pytest.mark.parametrize(("text", "until"), [("17", Until(17)), ("1970-01-01T00:00:01Z", Until(time_ms=1_000))])
def test_an_end_is_a_position_or_a_time(text: str, until: Until) -> None:
    assert parse_until(text) == until


@pytest.mark.parametrize("text", ["1970-01-01T00:00:01", "soon", "-1", ""])
def test_an_end_that_is_neither_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_until(text)


async def test_compaction_keeps_what_was_not_shipped(tmp_path: Path) -> None:
    home, clock = tmp_path / "home", FakeClock()
    shipped = ShippedSegments(home, kept_bytes_max=1 << 30)
    async with opened(home, clock, shipped) as ledger:
        await send(ledger, *range(1, 31))
        await ledger.compact()
        waiting = shipped.pending()
        assert len(waiting) > 3
        for segment in waiting[:2]:
            shipped.note_shipped(segment)
        await send(ledger, 31)
        await ledger.compact()
        assert [each.first_seq for each in shipped.pending()][: len(waiting) - 2] == [
            each.first_seq for each in waiting[2:]
        ]
        assert not waiting[0].path.exists()
        assert shipped.status.warning is None
    assert await known(home, clock, range(1, 32)) == list(range(1, 32))


async def test_above_the_bound_the_oldest_go_unshipped_and_a_new_backup_closes_the_gap(tmp_path: Path) -> None:
    home, clock = tmp_path / "home", FakeClock()
    shipped = ShippedSegments(home, kept_bytes_max=2 * SEGMENT_BYTES)
    async with opened(home, clock, shipped) as ledger:
        await send(ledger, *range(1, 31))
        await ledger.compact()
        kept = shipped.pending()
        assert 0 < sum(each.path.stat().st_size for each in kept) <= 2 * SEGMENT_BYTES
        assert read_status(home).gap == kept[0].first_seq - 1
        assert "take a new backup" in str(shipped.status.warning)
        await StagedBackups(home, ledger, made_ids, shipped=shipped).begin()
        assert read_status(home).warning is None


async def test_a_ledger_in_memory_has_no_backup(tmp_path: Path) -> None:
    async with Mailbox.memory() as mailbox:
        ledger = mailbox._ledger
        assert isinstance(ledger, EmbeddedLedger)
        with pytest.raises(Unavailable, match="no backup"):
            await ledger.copy_to(tmp_path)


async def test_a_backup_has_the_files_of_tasks_and_their_references(tmp_path: Path) -> None:
    clock, home = FakeClock(), tmp_path / "home"
    async with opened(home, clock) as ledger:
        store = BlobFolder(home / BLOBS_NAME, made_ids)
        blob = await put(store, PIECE, task_id(1))
        (home / BLOBS_NAME / "incoming" / "half").mkdir()
        made = await back_up(home, ledger)
        await store.erase(ACME)
    await restored(made, tmp_path / "copy", clock)
    copy = BlobFolder(tmp_path / "copy" / BLOBS_NAME, made_ids)
    assert await get(copy, blob) == PIECE
    assert await copy.find(ACME, blob.sha256, task_id(1)) == blob.size
    assert not (tmp_path / "copy" / BLOBS_NAME / "incoming" / "half").exists()
