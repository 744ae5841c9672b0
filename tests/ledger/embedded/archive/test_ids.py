"""Where the archive keeps the ids of tasks: each in one of three tables, and found there, however many there are."""

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.ledger.embedded.archive.apply_batch import apply_lines
from covenant.ledger.embedded.archive.archive_file import LAYOUTS, archived_seq_of, open_writer
from covenant.ledger.embedded.archive.history import LOOKUP
from covenant.ledger.embedded.archive.sql import statement
from covenant.ledger.machine.events import ResultDrained
from tests.ledger.embedded.recorded import Recorded, leased, sent, settled, task_id


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(open_writer(tmp_path / "archive.db", lasting=True)) as connection:
        yield connection


def take_in(db: sqlite3.Connection, recorded: Recorded) -> None:
    after = archived_seq_of(db)
    apply_lines(db, recorded.read_through(after, recorded.last_seq), after)


def held(db: sqlite3.Connection) -> tuple[int, int, int]:
    new, recent, old = (
        db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("ids_new", "ids_recent", "ids_old")
    )
    return new, recent, old


def check(db: sqlite3.Connection) -> None:
    tasks = db.execute("SELECT task_id, task_no FROM a2a_tasks ORDER BY 1").fetchall()
    assert db.execute("SELECT task_id, task_no FROM ids ORDER BY 1").fetchall() == tasks
    counted = dict(db.execute("SELECT shelf, held FROM shelves"))
    new, recent, _ = held(db)
    assert counted == {"new": new, "recent": recent}
    assert db.execute("SELECT count(*) FROM shelves WHERE emptying <> ''").fetchone() == (0,)


@given(
    rooms=st.tuples(st.integers(0, 12), st.integers(0, 40)),
    parts=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    sizes=st.lists(st.integers(0, 15), max_size=40),
    seed=st.integers(0, 1_000),
)
def test_every_id_is_in_one_of_the_tables_and_no_table_but_the_last_outgrows_its_room(
    rooms: tuple[int, int], parts: tuple[int, int], sizes: list[int], seed: int
) -> None:
    numbers = list(range(1, sum(sizes) + 1))
    random.Random(seed).shuffle(numbers)
    recorded = Recorded()
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        for name in (*LAYOUTS[0], "shelving"):
            db.executescript(statement(name))
        for shelf, room, part in zip(("new", "recent"), rooms, parts, strict=True):
            db.execute("UPDATE shelves SET room = ?, part = ? WHERE shelf = ?", (room, part, shelf))
        for size in sizes:
            recorded.record(*(sent(numbers.pop()) for _ in range(size)))
            take_in(db, recorded)
            check(db)
        # At the end of the ids a part may be short; what is left of it goes with the next batches.
        for _ in range(4):
            recorded.record()
            take_in(db, recorded)
        check(db)
        new, recent, _ = held(db)
        assert new < rooms[0] + parts[0]
        assert recent < rooms[1] + parts[1]


def test_a_task_moves_and_is_looked_up_wherever_its_id_is(db: sqlite3.Connection) -> None:
    db.execute("UPDATE shelves SET room = 2, part = 1")
    recorded = Recorded()
    for number in range(1, 31):
        recorded.record(sent(number))
        take_in(db, recorded)
    assert all(held(db))
    for table in ("ids_new", "ids_recent", "ids_old"):
        (name,) = db.execute(f"SELECT max(task_id) FROM {table}").fetchone()
        number = int(name.rpartition("-")[2], 16)
        recorded.each([leased(number), settled(number), ResultDrained(task_id(number))])
        take_in(db, recorded)
        assert db.execute(LOOKUP.sql, {"task_id": name, "viewer": None, "recipient": None}).fetchone() is not None
        assert db.execute("SELECT ledger_state FROM a2a_tasks WHERE task_id = ?", (name,)).fetchone() == ("resolved",)
    check(db)


def test_a_second_task_of_one_id_is_refused_while_the_first_is_new(db: sqlite3.Connection) -> None:
    recorded = Recorded()
    recorded.record(sent(1))
    take_in(db, recorded)
    recorded.lines.append(recorded.lines[0].replace(b'"seq":1', b'"seq":2'))
    with pytest.raises(sqlite3.IntegrityError):
        take_in(db, recorded)
    check(db)
