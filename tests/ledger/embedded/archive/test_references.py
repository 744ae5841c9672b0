"""Contexts and parents in the archive: numbered as they come, found by their text, whatever it looks like."""

import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from covenant.ledger.contract.tasks import ListQuery
from covenant.ledger.embedded.archive.apply_batch import LiveRows, apply_lines
from covenant.ledger.embedded.archive.archive_file import archived_seq_of, open_writer
from covenant.ledger.embedded.archive.history import History
from covenant.ledger.embedded.archive.sql import of_rows, statement
from tests.ledger.embedded.recorded import ALICE, BOB, BOOT, CAROL, Recorded, leased, sent, settled, task_id


class Archived:
    def __init__(self, path: Path, db: sqlite3.Connection) -> None:
        self.db = db
        self.recorded = Recorded()
        self.history = History(path, boot=BOOT)
        self._live = LiveRows()

    def add(self, number: int, **fields: object) -> None:
        recipient = fields.pop("recipient", BOB)
        self.recorded.record(sent(number, ALICE, recipient, **{"tenant": "acme", **fields}))  # type: ignore[arg-type]
        after = archived_seq_of(self.db)
        apply_lines(self.db, self.recorded.read_through(after, self.recorded.last_seq), after, self._live)

    async def of(self, context_id: str, limit: int = 50, after: str = "") -> tuple[list[int], int, str]:
        """The numbers of a context's tasks for Bob, how many there are, and where to go on."""
        query = ListQuery(recipient=BOB.pubkey, context_id=context_id, limit=limit, after=after)
        listing = await self.history.listing(query)
        names = [steps[0].what.task.id for steps in listing.tasks]  # type: ignore[union-attr]
        return [int(name.rpartition("-")[2], 16) for name in names], listing.total, listing.next

    async def below(self, number: int) -> list[str]:
        return [child.task_id for child in (await self.history.tree(task_id(number), None)).children]


@pytest.fixture
async def archived(tmp_path: Path) -> AsyncIterator[Archived]:
    path = tmp_path / "archive.db"
    with closing(open_writer(path, lasting=True)) as db:
        db.execute("UPDATE shelves SET room = 2, part = 1")
        made = Archived(path, db)
        yield made
        await made.history.close()


async def test_a_context_is_found_by_its_text_wherever_its_number_comes_from(archived: Archived) -> None:
    contexts = ["talk", task_id(2), "talk", task_id(2), "@talk", "a\x00b", "", task_id(1), ">talk", "a\x00b", "a"]
    for number, context in enumerate(contexts, 1):
        archived.add(number, context_id=context)
    for context in {*contexts, "none", task_id(7), "@" + task_id(2)}:
        expected = [number for number, other in enumerate(contexts, 1) if other == context]
        assert await archived.of(context) == (expected[::-1], len(expected), "")


async def test_a_context_that_was_named_before_it_was_a_tasks_id_is_listed_whole_and_in_order(
    archived: Archived,
) -> None:
    for number in (1, 2, 5, 6, 7):
        archived.add(number, context_id=task_id(5))
    assert await archived.of(task_id(5)) == ([7, 6, 5, 2, 1], 5, "")
    seen: list[int] = []
    after, first = "", True
    while first or after:
        numbers, total, after = await archived.of(task_id(5), 2, after)
        seen, first = seen + numbers, False
        assert total == 5
    assert seen == [7, 6, 5, 2, 1]


async def test_a_context_of_several_agents_is_listed_for_each(archived: Archived) -> None:
    archived.add(1, context_id="talk")
    archived.add(2, context_id="talk", recipient=CAROL)
    assert await archived.of("talk") == ([1], 1, "")


async def test_a_name_is_no_tasks_id(archived: Archived) -> None:
    archived.add(1, context_id="talk", parent=task_id(9))
    for name in ("@talk", "talk", f">{task_id(9)}"):
        assert await archived.history.show(name, None, 1) is None  # type: ignore[arg-type]
        assert await archived.history.steps(name, 0, 10) == ()  # type: ignore[arg-type]


async def test_children_are_found_whether_their_parent_came_before_them_or_after(archived: Archived) -> None:
    archived.add(2, parent=task_id(1))
    archived.add(1)
    archived.add(3, parent=task_id(1))
    archived.add(4, parent=task_id(3))
    archived.add(5, parent=task_id(8))
    assert await archived.below(1) == [task_id(2), task_id(3)]
    assert await archived.below(3) == [task_id(4)]
    assert await archived.below(8) == [task_id(5)]
    assert await archived.below(2) == []


def whole(db: sqlite3.Connection, statement: str, values: Any) -> list[str]:
    plan = [row[3] for row in db.execute("EXPLAIN QUERY PLAN " + statement, values)]
    assert any("USING" in line for line in plan)
    pattern = re.compile(r"SCAN (a2a_tasks|ids_new|ids_recent|ids_old|[ti])\b|.*TEMP B-TREE|.*AUTOMATIC")
    return [line for line in plan if pattern.match(line)]


@pytest.mark.parametrize(("name", "columns"), [("known_tasks", 1), ("known_references", 2)])
async def test_what_a_batch_must_know_is_looked_up_one_by_one(archived: Archived, name: str, columns: int) -> None:
    assert whole(archived.db, of_rows(name, 16, columns), ["x"] * 16 * columns) == []


async def test_a_page_of_a_context_is_read_in_its_order_and_counted_by_index(archived: Archived) -> None:
    page = {"updated_at": 1, "task_no": 1, "limit": 1, "bytes_max": 1, "artifacts": False}
    values = {"recipient": BOB.pubkey, "own": None, "named": 1, **page}
    filters = {"filters": "context_no = coalesce(:own, :named)"}
    plan = archived.db.execute("EXPLAIN QUERY PLAN " + statement("listing").format(**filters), values).fetchall()
    assert sum("USING INDEX listed_by_context" in row[3] for row in plan) == 2  # the first, and each next one
    assert sum("TEMP B-TREE" in row[3] for row in plan) == 1  # the page itself, once it is complete
    plan = archived.db.execute("EXPLAIN QUERY PLAN " + statement("listing_count").format(**filters), values).fetchall()
    assert "USING INDEX listed_by_context" in plan[0][3]
    assert whole(archived.db, statement("reference_numbers"), {"id": "talk", "name": b"@talk"}) == []


async def test_a_task_that_ended_is_let_go_and_found_again_in_the_archive(archived: Archived) -> None:
    archived.add(1, context_id="talk")
    archived.recorded.record(leased(1))
    archived.recorded.record(settled(1, text="x" * 10_000))
    archived.add(2, context_id="talk")
    assert all(row.result is None for row in archived._live._rows.values())
    assert await archived.of("talk") == ([2, 1], 2, "")
    shown = await archived.history.show(task_id(1), None, 10)
    assert shown is not None
    assert shown.result is not None
    assert shown.result.error_message == "x" * 10_000
