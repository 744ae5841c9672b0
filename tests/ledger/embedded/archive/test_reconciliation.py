"""An archive that is reconciled with a snapshot after a loss: every task that ended keeps its id for ever."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from covenant.ledger.contract.retention import EraseTasks
from covenant.ledger.embedded.archive.apply_batch import apply_lines
from covenant.ledger.embedded.archive.archive_file import END, erase_batch, open_writer
from covenant.ledger.embedded.archive.history import History
from covenant.ledger.embedded.archive.reconciliation import ExpectedArchive, reconcile
from covenant.ledger.embedded.state import LedgerState
from covenant.model.ids import TaskId
from covenant.model.settings import Limits
from tests.ledger.embedded.recorded import BOOT, Recorded, sent, settled, task_id

COUNT = 7


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "archive.db"


@pytest.fixture
def db(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(open_writer(path, lasting=True)) as db:
        yield db


async def finished(path: Path) -> list[TaskId]:
    """As the filter of ids pages them."""
    history, found, through = History(path, boot=BOOT), list[TaskId](), 0
    while (page := await history.finished(through, 2))[0]:
        found += page[0]
        through = page[1]
    await history.close()
    return sorted(found)


async def test_tasks_whose_end_was_lost_are_all_found_among_the_finished_and_the_erased(
    path: Path, db: sqlite3.Connection
) -> None:
    recorded = Recorded()
    recorded.each(sent(number, tenant="acme") for number in range(1, COUNT + 1))
    apply_lines(db, recorded.read_through(0, COUNT), 0)
    known = [task_id(number) for number in range(1, COUNT + 1)]
    for _ in range(2):  # a repeated reconciliation changes nothing
        nothing = LedgerState(Limits())
        assert reconcile(db, ExpectedArchive(COUNT, nothing, nothing, (), (), COUNT)) == 0
        assert await finished(path) == known
    assert erase_batch(db, EraseTasks(tenant="acme", before_ms=END, limit=100)).tasks == COUNT
    assert await finished(path) == known


async def test_undrained_results_whose_record_was_lost_are_all_found_among_the_finished(
    path: Path, db: sqlite3.Connection
) -> None:
    recorded = Recorded()
    recorded.each(sent(number) for number in range(1, COUNT + 1))
    apply_lines(db, recorded.read_through(0, COUNT), 0)
    recorded.each(settled(number, 2) for number in range(1, COUNT + 1))
    state = LedgerState(Limits())
    events: Any
    for seq, (at_ms, events) in enumerate(recorded.records, 1):
        state.apply(events, at_ms, seq)
    for _ in range(2):
        reconcile(db, ExpectedArchive(recorded.last_seq, state, state, (), (), recorded.last_seq))
        assert await finished(path) == [task_id(number) for number in range(1, COUNT + 1)]
