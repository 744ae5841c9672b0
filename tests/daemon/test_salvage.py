"""A ledger that lost records, and whose operator accepted it: every verb works, and all that was not cut is there."""

import asyncio
import errno
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import pytest

from covenant.daemon.doctor.ledger_check import check_ledger
from covenant.daemon.doctor.ledger_repair import carry_out, rebuild_archive
from covenant.ledger.embedded.archive.archive_file import PAGE_BYTES
from covenant.ledger.embedded.journal.recovery import lock_home
from covenant.ledger.embedded.journal.segments import segment_path
from covenant.ledger.machine.events import AnyEvent
from covenant.model.ids import TaskId
from tests.daemon.home_history import (
    LIMITS,
    HomeHistory,
    begun_in,
    check_agreement,
    exercise,
    fill_home,
    kinds_of,
    records,
)
from tests.ledger_contract import fault_plans
from tests.matrices import first_of

KINDS = sorted(str(kind.__struct_config__.tag) for kind in get_args(AnyEvent))
NOW_MS = 1_700_000_000_000


@pytest.fixture(scope="module", params=["compacted", "whole"])
def history(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HomeHistory:
    history = HomeHistory(tmp_path_factory.mktemp("life"))
    asyncio.run(fill_home(history, compacted=request.param == "compacted"))
    return history


def flip(home: Path, seq: int) -> None:
    segment, line = records(home)[seq]
    data = segment.path.read_bytes()
    at = data.index(line) + len(line) // 2
    segment.path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def tear(home: Path, seq: int) -> None:
    segment, line = records(home)[seq]
    data = segment.path.read_bytes()
    segment.path.write_bytes(data[: data.index(line) + len(line) // 2])


def lose_segment(home: Path, seq: int) -> None:
    records(home)[seq][0].path.unlink()


WAYS: dict[str, Callable[[Path, int], None]] = {"flipped": flip, "torn": tear, "missing": lose_segment}


def accept(home: Path) -> set[int]:
    """Look at a home, and give up what doctor says is lost; the numbers of those records."""
    found = check_ledger(home, {}, LIMITS)
    assert not found.well
    assert found.repair_plan is not None, found.findings
    lost = {seq for loss in found.repair_plan.losses for seq in range(loss.seq, max(loss.seq, loss.through) + 1)}
    with lock_home(home):
        carry_out(home, found.repair_plan, NOW_MS)
    after = check_ledger(home, {}, LIMITS)
    assert after.repair_plan is None, after.findings
    assert not after.rebuild, after.findings
    return lost


def begun_before(history: HomeHistory, lost: set[int]) -> set[TaskId]:
    """The tasks whose beginning is in no lost record."""
    told = records(history.home)
    gone = {which for seq in lost if seq in told for which in begun_in(told[seq][1])}
    return set(history.tasks) - gone


async def check_loss(history: HomeHistory, home: Path, spoil: Callable[[Path], Any]) -> None:
    shutil.copytree(history.home, home, ignore=shutil.ignore_patterns("lock"))
    spoil(home)
    lost = accept(home)
    driver = await history.open(home)
    try:
        for which in begun_before(history, lost):
            assert await driver.ledger.show(which, None, 10) is not None, f"{which} was acknowledged and not cut"
    finally:
        await driver.ledger.close()
    await exercise(history, home)


def test_the_life_tells_of_every_kind_of_event(history: HomeHistory) -> None:
    told = {kind for _, line in records(history.home).values() for kind in kinds_of(line)}
    assert told == set(KINDS)


def places(history: HomeHistory, kind: str) -> list[int]:
    """The first and the last record that tell of it."""
    told = [seq for seq, (_, line) in sorted(records(history.home).items()) if kind in kinds_of(line)]
    return sorted({told[0], told[-1]})


@pytest.mark.matrix
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["task_sent", "task_leased", "task_settled", "result_drained", "grant_made"])
async def test_after_an_accepted_loss_every_verb_works(
    history: HomeHistory, tmp_path: Path, kind: str, way: str
) -> None:
    await check_loss(history, tmp_path / "home", lambda home: WAYS[way](home, places(history, kind)[0]))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
async def test_after_any_accepted_loss_every_verb_works(
    history: HomeHistory, tmp_path: Path, kind: str, way: str
) -> None:
    for seq in places(history, kind):
        await check_loss(history, tmp_path / f"home-{seq}", lambda home, seq=seq: WAYS[way](home, seq))  # type: ignore[misc]


def flip_last_before_rotation(history: HomeHistory, home: Path) -> None:
    """The archive had not come to the last record of a segment, and the next segment is still empty."""
    restore_old_archive(history, home)
    last = max(records(home))
    flip(home, last)
    segment_path(home / "journal", last + 1).touch()


def leave_stray_segment(history: HomeHistory, home: Path) -> None:
    segment_path(home / "journal", max(records(home)) + 1_000).touch()


def leave_segment_of_no_journal(_: HomeHistory, home: Path) -> None:
    segment_path(home / "journal", 10**20 - 1).touch()


@pytest.mark.parametrize(
    "spoil", first_of([flip_last_before_rotation, leave_stray_segment, leave_segment_of_no_journal])
)
async def test_an_empty_segment_behind_a_loss_does_not_stay_in_the_way(
    history: HomeHistory, tmp_path: Path, spoil: Callable[[HomeHistory, Path], None]
) -> None:
    await check_loss(history, tmp_path / "home", lambda home: spoil(history, home))


def test_the_last_record_before_an_empty_segment_is_told_as_lost(history: HomeHistory, tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(history.home, home, ignore=shutil.ignore_patterns("lock"))
    flip_last_before_rotation(history, home)
    assert max(records(history.home)) in accept(home)


def lose_journal(_: HomeHistory, home: Path) -> None:
    shutil.rmtree(home / "journal")


def lose_archive(_: HomeHistory, home: Path) -> None:
    (home / "archive.db").unlink()


def restore_old_archive(history: HomeHistory, home: Path) -> None:
    shutil.copy(history.folder / "early" / "archive.db", home / "archive.db")


def restore_old_journal(history: HomeHistory, home: Path) -> None:
    shutil.rmtree(home / "journal")
    shutil.copytree(history.folder / "early" / "journal", home / "journal")


def overwrite_page(_: HomeHistory, home: Path) -> None:
    data = bytearray((home / "archive.db").read_bytes())
    data[2 * PAGE_BYTES : 3 * PAGE_BYTES] = b"\xa5" * PAGE_BYTES
    (home / "archive.db").write_bytes(data)


@pytest.mark.parametrize("spoil", first_of([lose_journal, restore_old_journal, overwrite_page]))
async def test_a_ledger_of_which_one_part_is_lost_or_of_yesterday_works_again(
    history: HomeHistory, tmp_path: Path, spoil: Callable[[HomeHistory, Path], None]
) -> None:
    home = tmp_path / "home"
    shutil.copytree(history.home, home, ignore=shutil.ignore_patterns("lock"))
    spoil(history, home)
    accept(home)
    await exercise(history, home)


@pytest.mark.parametrize("spoil", [restore_old_archive, lose_archive])
async def test_an_archive_of_yesterday_is_brought_up_to_date_where_the_journal_can(
    history: HomeHistory, tmp_path: Path, spoil: Callable[[HomeHistory, Path], None]
) -> None:
    home = tmp_path / "home"
    shutil.copytree(history.home, home, ignore=shutil.ignore_patterns("lock"))
    spoil(history, home)
    if check_ledger(home, {}, LIMITS).repair_plan is not None:
        assert min(records(home)) > 1, "the journal has everything, and nothing need be given up"
        accept(home)
    await exercise(history, home)


def ended(home: Path) -> set[str]:
    with closing(sqlite3.connect(home / "archive.db")) as db:
        return {row[0] for row in db.execute("SELECT task_id FROM a2a_tasks WHERE ledger_state = 'resolved'")}


async def test_history_that_is_only_in_the_archive_outlives_the_journal(history: HomeHistory, tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(history.home, home, ignore=shutil.ignore_patterns("lock"))
    before = ended(home)
    lose_journal(history, home)
    accept(home)
    assert ended(home) == before
    driver = await history.open(home)
    try:
        for which in before & set(history.tasks):
            again = await driver.send(history.tasks[TaskId(which)])
            assert again.duplicate, "an ended task began again"
    finally:
        await driver.ledger.close()


@pytest.mark.parametrize(
    "point", first_of(["snapshot.rename", "snapshot.write", "snapshot.sync_dir", "journal.create_segment"])
)
async def test_a_mending_that_was_cut_off_is_done_again(history: HomeHistory, tmp_path: Path, point: str) -> None:
    home = tmp_path / "home"
    shutil.copytree(history.home, home, ignore=shutil.ignore_patterns("lock"))
    flip(home, places(history, "task_leased")[0])
    repair_plan = check_ledger(home, {}, LIMITS).repair_plan
    assert repair_plan is not None
    with (
        fault_plans.armed(fault_plans.Plan(point, fault_plans.fail(errno.ENOSPC))) as plan,
        lock_home(home),
        pytest.raises(OSError, match="No space"),
    ):
        carry_out(home, repair_plan, NOW_MS - 1)
    assert plan.fired
    if not check_ledger(home, {}, LIMITS).well:
        accept(home)
    await exercise(history, home)


ODDS = {
    "a live task under another id": "UPDATE a2a_tasks SET task_id = task_id || 'x' WHERE settled_place IS NULL",
    "a task that is missing": "DELETE FROM a2a_tasks WHERE task_no = (SELECT max(task_no) FROM a2a_tasks)",
    "a record set aside": "INSERT INTO rejects VALUES (1000, 'it does not fit', x'7b7d0a')",
}


@pytest.mark.parametrize("odds", first_of(ODDS))
async def test_an_archive_at_odds_with_its_journal_is_rebuilt_without_a_loss(
    history: HomeHistory, tmp_path: Path, odds: str
) -> None:
    home = tmp_path / "home"
    shutil.copytree(history.home, home, ignore=shutil.ignore_patterns("lock"))
    driver = await history.open(home)
    before = await check_agreement(driver, history.tasks)
    await driver.ledger.close()
    with closing(sqlite3.connect(home / "archive.db")) as db:
        assert db.execute(ODDS[odds]).rowcount > 0
        db.commit()
    assert check_ledger(home, {}, LIMITS).rebuild
    with lock_home(home):
        rebuild_archive(home, LIMITS, NOW_MS)
    assert not check_ledger(home, {}, LIMITS).rebuild
    driver = await history.open(home)
    assert await check_agreement(driver, history.tasks) == before
    await driver.ledger.close()
    await exercise(history, home)
