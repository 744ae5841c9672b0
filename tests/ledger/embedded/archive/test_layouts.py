"""Archives of earlier layouts: opened, they hold the same rows in the layout of today, and go on as if made with it."""

import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from covenant.ledger.embedded.archive import archive_file
from covenant.ledger.embedded.archive.apply_batch import apply_lines
from covenant.ledger.embedded.archive.archive_file import SCHEMA_VERSION, archived_seq_of, open_writer
from covenant.ledger.embedded.archive.history import History
from covenant.ledger.embedded.archive.task_packs import unpack_task
from covenant.ledger.machine.events import ResultDrained, TaskContinued, TaskParked
from covenant.model.errors import Damaged
from covenant.model.task import DuplicateSafety, Idempotency
from covenant.model.task_event import Interruption, MessageUpdate, StatusUpdate
from tests.ledger.embedded.recorded import ALICE, BOB, BOOT, Recorded, lease_id, leased, sent, settled, task_id

LAYOUTS = Path(__file__).parent / "layouts"
KEPT = ("a2a_tasks", "requests", "updates", "handovers", "audit", "meta")
MADE = ("task_counts", "ids", "stored_sizes")
SIZES = "SELECT tenant_id, count(*), sum(bytes) FROM kept_sizes GROUP BY tenant_id"


CONTEXTS: tuple[Callable[[int], str], ...] = (
    task_id,  # its own, an earlier and a later task's, and names
    task_id,
    lambda number: "",
    lambda number: task_id(max(1, number - 2)),
    lambda number: "",
    lambda number: task_id(number + 2),
    lambda number: "",
    lambda number: f"context-{number % 5}",
)


def course() -> Recorded:
    """Tasks in every state, with and without a tenant, contexts, parents, idempotency keys, and an audit."""
    recorded = Recorded()
    for number in range(1, 40):
        fields: dict[str, Any] = {"tenant": "acme", "context_id": CONTEXTS[number % 8](number)} if number % 2 else {}
        if number % 10 == 0:
            fields = {"context_id": task_id(number) if number == 10 else "of the mailbox"}
        if number % 7 == 0:
            fields["idempotency"] = Idempotency(DuplicateSafety.UNSAFE, f"key-{number % 3}")
        if number % 3 == 0:
            fields["parent"] = task_id(number - 1 if number % 2 else number + 2)
        recorded.record(sent(number, ALICE, BOB, **fields))
        if number % 4:
            recorded.record(leased(number))
        if number % 4 > 1:
            recorded.record(settled(number, 3, text="no" if number % 8 == 2 else None))
        if number % 4 == 3:
            recorded.record(ResultDrained(task_id(number)), recorded.audited(ALICE, "drained"))
    recorded.record(TaskParked(task_id(1), lease_id(1), 3, Interruption.INPUT_REQUIRED, StatusUpdate("?")))
    return recorded


def take_in(db: sqlite3.Connection, recorded: Recorded) -> None:
    """As an earlier layout has it: nothing is packed."""
    after = archived_seq_of(db)
    apply_lines(db, recorded.read_through(after, recorded.last_seq), after)
    for (number,) in db.execute("SELECT task_no FROM packs").fetchall():
        unpack_task(db, number)
    db.execute("DELETE FROM stored_sizes")
    db.execute(f"INSERT INTO stored_sizes {SIZES}")


def rows(db: sqlite3.Connection, *tables: str) -> dict[str, list[tuple[Any, ...]]]:
    return {table: db.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall() for table in tables}


def layout(db: sqlite3.Connection) -> list[tuple[str, str, str]]:
    found = db.execute("SELECT type, name, sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY 1, 2").fetchall()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    # A column that was added to a table stands there in a line of its own, and comments are those of their time.
    return [
        ("version", "", str(version)),
        *((kind, name, "".join(re.sub("--.*", "", sql).split())) for kind, name, sql in found),
    ]


def write_old(path: Path, number: int, today: Path) -> None:
    """A file of the given layout with the rows of another, as far as it has columns for them."""
    with closing(sqlite3.connect(path, isolation_level=None)) as old:
        old.executescript((LAYOUTS / f"layout_{number}.sql").read_text(encoding="utf-8"))
        old.execute("ATTACH ? AS today", (str(today),))
        for table in KEPT:
            columns = ", ".join(
                name for _, name, _, _, _, _, hidden in old.execute(f"PRAGMA table_xinfo({table})") if not hidden
            )
            old.execute(f"DELETE FROM main.{table}")
            old.execute(f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM today.{table}")
        counts = ("task_counts",) if number > 7 else ()
        for table in ("ids_new", "ids_recent", "ids_old", "shelves", *counts) if number > 3 else ():
            old.execute(f"DELETE FROM main.{table}")
            old.execute(f"INSERT INTO main.{table} SELECT * FROM today.{table}")
        if 3 < number < 6:  # they had no names of contexts of the mailbox's tasks
            old.execute("UPDATE main.a2a_tasks SET context_no = NULL WHERE tenant_id = ''")
            for table in ("ids_new", "ids_recent", "ids_old"):
                old.execute(
                    f"DELETE FROM main.{table}"
                    " WHERE typeof(task_id) = 'blob' AND substr(task_id, 1, 1) = CAST('@' AS BLOB)"
                    " AND CAST(substr(task_id, 2) AS TEXT) NOT IN"
                    " (SELECT context_id FROM main.a2a_tasks WHERE tenant_id <> '')"
                )
        if number == 3:  # it had tables of ids, and no names of contexts and parents in them
            for table, part in (("ids_new", 0), ("ids_recent", 1), ("ids_old", 2)):
                chosen = f"SELECT task_id, task_no FROM today.a2a_tasks WHERE (task_no >> 20) % 3 = {part}"
                old.execute(f"INSERT INTO main.{table} {chosen}")
            old.execute("UPDATE main.shelves SET held = (SELECT count(*) FROM main.ids_new) WHERE shelf = 'new'")
            old.execute("UPDATE main.shelves SET held = (SELECT count(*) FROM main.ids_recent) WHERE shelf = 'recent'")


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6, 7, 8, 9])
async def test_an_archive_of_an_earlier_layout_keeps_its_rows_and_goes_on(tmp_path: Path, number: int) -> None:
    recorded = course()
    with closing(open_writer(tmp_path / "today.db", lasting=True)) as today:
        take_in(today, recorded)
        write_old(tmp_path / "old.db", number, tmp_path / "today.db")
        with closing(open_writer(tmp_path / "old.db", lasting=True)) as opened:
            assert layout(opened) == layout(today)
            assert rows(opened, *KEPT, *MADE) == rows(today, *KEPT, *MADE)
            assert opened.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            # Old tasks move, new ones come.
            recorded.record(TaskContinued(task_id(1), 4, MessageUpdate("user"), "m1"))
            again = sent(100, BOB, ALICE, tenant="acme", context_id="context-2", parent=task_id(3))
            recorded.record(ResultDrained(task_id(2)), again)
            for db in (today, opened):
                take_in(db, recorded)
            assert rows(opened, *KEPT, *MADE) == rows(today, *KEPT, *MADE)
        histories = [History(tmp_path / name, boot=BOOT) for name in ("today.db", "old.db")]
        shown = [[await history.show(task_id(each), None, 10) for each in (1, 2, 3, 100)] for history in histories]
        trees = [await history.tree(task_id(3), None) for history in histories]
        for history in histories:
            await history.close()
        assert shown[0] == shown[1]
        assert None not in shown[0]
        assert trees[0] == trees[1]


async def test_finished_tasks_of_an_earlier_layout_are_packed_a_few_at_a_time_and_read_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_file, "PACKED_AT_ONCE_MAX", 2)
    path, finished = tmp_path / "archive.db", [task_id(number) for number in range(3, 40, 4)]
    with closing(open_writer(path, lasting=True)) as db:
        take_in(db, course())
        history = History(path, boot=BOOT)
        before = [await history.show(name, None, 10) for name in finished]
        after_no: int | None = 0
        batches = 0
        while after_no is not None:
            after_no = archive_file.pack_batch(db, after_no)
            batches += 1
        assert batches == len(finished) // 2 + 1
        assert db.execute("SELECT count(*) FROM packs").fetchone() == (len(finished),)
        held = "SELECT count(*) FROM requests JOIN a2a_tasks USING (task_no) WHERE ledger_state = 'resolved'"
        assert db.execute(held).fetchone() == (0,)
        assert db.execute("SELECT sum(tasks) FROM stored_sizes").fetchone() == (len(finished),)
        assert rows(db, "stored_sizes")["stored_sizes"] == db.execute(SIZES).fetchall()
        assert [await history.show(name, None, 10) for name in finished] == before
        assert None not in before
        await history.close()


def test_an_archive_that_cannot_be_brought_up_to_date_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    with closing(open_writer(tmp_path / "today.db", lasting=True)) as today:
        take_in(today, course())
        write_old(path, 2, tmp_path / "today.db")
    with closing(sqlite3.connect(path, isolation_level=None)) as old:
        # Something of somebody else's, in the way.
        old.execute("CREATE TABLE ids_old (other)")
        before = (layout(old), rows(old, *KEPT))
    with pytest.raises(sqlite3.Error):
        open_writer(path, lasting=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as old:
        assert (layout(old), rows(old, *KEPT)) == before


def test_a_layout_of_the_future_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "archive.db"
    with closing(open_writer(path, lasting=True)) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(Damaged, match=f"layout {SCHEMA_VERSION + 1}"):
        open_writer(path, lasting=True)
