"""Finding tasks in the archive: how far one request goes, and that it comes to the end all the same."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import pytest

from covenant.ledger.contract.task_query import FoundPage, LaneCounts, Place, TaskQuery
from covenant.ledger.embedded.archive import task_finder
from covenant.ledger.embedded.archive.apply_batch import apply_lines
from covenant.ledger.embedded.archive.archive_file import open_writer
from covenant.ledger.embedded.archive.history import History
from covenant.ledger.embedded.archive.task_finder import find_tasks
from covenant.ledger.machine.events import ResultDrained
from covenant.ledger.machine.states import DRAINED, PARKED, QUEUED
from covenant.model.task import Ending
from tests.ledger.embedded.recorded import ALICE, BOB, BOOT, CAROL, Recorded, leased, sent, settled, task_id

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
        history = History(path, boot=BOOT)
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
    # Neither origin nor sender leaves few: a page ends after 20 tasks of one of them, whatever it has found.
    both = {"origin": "simple", "sender": ALICE.display}
    assert numbers(pages(path, **both)) == [["60", "45"], ["30"], ["15"], []]
    assert numbers(pages(path, **both, limit=1)) == [["60"], ["45"], ["30"], ["15"]]
    assert numbers(pages(path, **both, ascending=True)) == [["15"], ["30"], ["45", "60"], []]
    assert numbers(pages(path, origin="simple")) == [["60", "45", "30", "15"]]
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


def test_a_tenants_page_is_not_cut_short_by_the_tasks_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty page with a cursor would tell the tenant how many tasks of others there are."""
    monkeypatch.setattr(task_finder, "FEW", 2)
    monkeypatch.setattr(task_finder, "SCAN_MAX", 5)
    monkeypatch.setattr(task_finder, "TEXT_SCAN_MAX", 5)
    recorded = Recorded()
    for number in range(1, TASKS + 1):
        recorded.record(sent(number, origin="a2a", tenant="acme" if number % 15 == 1 else "globex"))
    path = tmp_path / "archive.db"
    with closing(open_writer(path, lasting=True)) as db:
        apply_lines(db, recorded.read_through(0, recorded.last_seq), 0)
    for query in ({"order": "moved"}, {"order": "moved", "text": "do"}, {"origin": "a2a"}):
        assert (query, numbers(pages(path, within="acme", **query))) == (query, [["46", "31", "16", "1"]])
    newest_first = numbers(pages(path, within="acme", order="moved", limit=1))
    assert newest_first == [["46"], ["31"], ["16"], ["1"]]
    assert numbers(pages(path, within="acme", order="moved", ascending=True, limit=3)) == [["1", "16", "31"], ["46"]]


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
    history = History(path, boot=BOOT)
    counts = await history.count_lanes(TaskQuery())
    await history.close()
    assert counts.lanes == LaneCounts(done=60)
    assert [(each.agent, each.done) for each in counts.by_agent] == [(BOB.display, 54), (CAROL.display, 6)]


FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"states": (DRAINED,)},
    {"states": (QUEUED,)},
    {"states": (QUEUED, PARKED)},
    {"outcomes": (Ending.COMPLETED,)},
    {"outcomes": (Ending.FAILED,)},
    {"outcomes": (Ending.FAILED, Ending.CANCELED)},
    {"agent": BOB.display},
    {"agent": BOB.display, "outcomes": (Ending.FAILED,)},
    {"sender": ALICE.display},
    {"tenant": "acme"},
    {"within": "acme"},
    {"task_kind": "invoice"},
    {"origin": "a2a"},
    {"parent": task_id(1)},
    {"context": "talk"},
    {"key": "key-9"},
    {"cause": "timeout"},
    {"cause": "result"},
    {"attempt_min": 1},
    {"attempt_min": 2},
    {"attempt_min": 3},
    {"since_ms": 1},
    {"until_ms": 1 << 60},
    {"moved_since_ms": 1},
    {"id": task_id(1)},
    {"id": task_id(1)[:2]},
    {"text": "do"},
    {"viewer": CAROL.pubkey, "viewer_names": (CAROL.display,)},
)


USUAL: tuple[dict[str, Any], ...] = (
    {"cause": "result"},
    {"attempt_min": 1},
    {"since_ms": 1},
    {"until_ms": 1 << 60},
    {"id": task_id(1)[:2]},
    {"text": "do"},
)
"""What almost all tasks are is counted one by one, up to COUNT_MAX."""


@pytest.mark.parametrize("order", ["created", "moved"])
@pytest.mark.parametrize("few", [0, 1_000])
def test_no_filter_looks_through_the_table(
    path: Path, monkeypatch: pytest.MonkeyPatch, order: Literal["created", "moved"], few: int
) -> None:
    monkeypatch.setattr(task_finder, "FEW", few)
    after = Place(1 << 40, 1).cursor(order)
    with closing(open_writer(path, lasting=True)) as db:
        for given in FILTERS:
            for at in ("", after):
                asked: list[str] = []
                db.set_trace_callback(asked.append)
                count = given not in USUAL
                find_tasks(db, TaskQuery(order=order, after=at, count=count, **given), {"boot": BOOT})
                db.set_trace_callback(None)
                looked = [sql for sql in asked if "a2a_tasks" in sql]
                assert looked or given.get("context") or given.get("parent")
                for sql in looked:
                    plan = [row[3] for row in db.execute("EXPLAIN QUERY PLAN " + sql)]
                    bare = [line for line in plan if re.match("SCAN (t|a2a_tasks)\\b(?!.*INDEX)", line)]
                    # The rows that a walk came past have the table's name, too.
                    walked = [line for line in plan if line in ("CO-ROUTINE t", "MATERIALIZE t")]
                    assert (given, sql, len(bare)) == (given, sql, len(walked))
