"""Finding tasks in the archive: how far one request goes, and that it comes to the end all the same."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from covenant.ledger.contract.task_query import FoundPage, LaneCounts, TaskQuery
from covenant.ledger.embedded.archive import task_finder
from covenant.ledger.embedded.archive.apply_batch import apply_lines
from covenant.ledger.embedded.archive.archive import open_writer
from covenant.ledger.embedded.archive.history import History
from covenant.ledger.machine.events import ResultDrained
from covenant.ledger.machine.states import DRAINED
from tests.ledger.embedded.recorded import ALICE, BOB, BOOT, CAROL, NODE, Recorded, leased, sent, settled, task_id

TASKS = 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Tasks that are done with, every tenth for Carol; by number, the intent says it."""
    recorded = Recorded()
    for number in range(1, TASKS + 1):
        recorded.record(sent(number, ALICE, BOB if number % 10 else CAROL, origin="a2a" if number % 15 else "simple"))
        recorded.record(leased(number))
        recorded.record(settled(number, 3), ResultDrained(task_id(number)))
    found = tmp_path / "archive.db"
    with closing(open_writer(found, lasting=True)) as db:
        apply_lines(db, recorded.read_through(0, recorded.last_seq), 0)
    return found


def pages(path: Path, **query: Any) -> Iterator[FoundPage]:
    async def page(after: str) -> FoundPage:
        history = History(path, node=NODE, boot=BOOT)
        try:
            return await history.find(TaskQuery(after=after, **query))
        finally:
            await history.close()

    after: str | None = ""
    while after is not None:
        found = asyncio.run(page(after))
        yield found
        after = found.next


def numbers(found: Iterator[FoundPage]) -> list[list[str]]:
    return [[task.intent.removeprefix("do ") for task in page.tasks] for page in found]


def test_a_walk_passes_over_a_bounded_number_of_tasks_and_says_where_to_go_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_finder, "FEW", 2)
    monkeypatch.setattr(task_finder, "SCAN_MAX", 20)
    monkeypatch.setattr(task_finder, "TEXT_SCAN_MAX", 30)
    # No index has origins: a page ends after 20 tasks, whatever it has found.
    assert numbers(pages(path, origin="simple")) == [["60", "45"], ["30"], ["15"], []]
    assert numbers(pages(path, origin="simple", limit=1)) == [["60"], ["45"], ["30"], ["15"]]
    assert numbers(pages(path, origin="simple", ascending=True)) == [["15"], ["30"], ["45", "60"], []]
    assert numbers(pages(path, text="do 7")) == [[], ["7"], []]
    # An identity's two walks end together at the one that came less far.
    carol = {"viewer": CAROL.pubkey, "viewer_names": (CAROL.display,)}
    assert list(chain(*numbers(pages(path, **carol, origin="simple")))) == ["60", "30"]
    moved = chain(*numbers(pages(path, order="moved", agent=CAROL.display)))
    assert list(moved) == ["60", "50", "40", "30", "20", "10"]


def test_a_filter_that_leaves_few_is_read_whole_however_little_a_walk_may_pass(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_finder, "SCAN_MAX", 1)
    assert numbers(pages(path, agent=CAROL.display, origin="simple")) == [["60", "30"]]
    assert numbers(pages(path, agent=CAROL.display, order="moved", limit=4)) == [["60", "50", "40", "30"], ["20", "10"]]


def test_a_count_is_exact_by_running_totals_and_otherwise_as_far_as_it_went(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_finder, "FEW", 2)
    monkeypatch.setattr(task_finder, "COUNT_MAX", 40)
    for query, total, at_least in (
        ({}, 60, False),
        ({"agent": BOB.display}, 54, False),
        ({"agent": BOB.display, "states": (DRAINED,)}, 54, False),
        ({"sender": ALICE.display}, 41, True),
        ({"sender": ALICE.display, "agent": CAROL.display}, 4, True),
    ):
        page = next(pages(path, count=True, limit=1, **query))
        assert (query, page.total, page.at_least) == (query, total, at_least)


async def test_lanes_are_counted_from_what_is_written_with_each_batch(path: Path) -> None:
    history = History(path, node=NODE, boot=BOOT)
    counts = await history.count_lanes(TaskQuery())
    await history.close()
    assert counts.lanes == LaneCounts(done=60)
    assert [(each.agent, each.done) for each in counts.by_agent] == [(BOB.display, 54), (CAROL.display, 6)]
