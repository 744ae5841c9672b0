"""The archive's writer: what it makes of records, and that nothing (order, repetition, failure) changes that."""

import asyncio
import errno
import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.ledger.embedded import fault_points
from covenant.ledger.embedded.archive import apply_batch, archive_writer
from covenant.ledger.embedded.archive import archive as archive_module
from covenant.ledger.embedded.archive.apply_batch import Batch, KnownRows, LiveRows, apply_lines
from covenant.ledger.embedded.archive.archive import Archive
from covenant.ledger.embedded.archive.archive_file import LAYOUTS, archived_seq_of, open_writer
from covenant.ledger.embedded.archive.row_updates import Rows, TaskRowUpdate
from covenant.ledger.embedded.archive.sql import statement
from covenant.ledger.embedded.archive.task_packs import unpack_task
from covenant.ledger.embedded.journal.record import encode_line
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.events import (
    AnyTaskEvent,
    AuditPurged,
    CacheDropped,
    LeaseInterrupted,
    LeaseReleased,
    LeaseRenewed,
    LedgerEvent,
    MessageKept,
    ResultDrained,
    ResultReturned,
    SignalKept,
    SignalTaken,
    TaskClosed,
    TaskContinued,
    TaskFollowed,
    TaskLeased,
    TaskParked,
    TaskPromoted,
    TaskRequeued,
    TaskResumed,
    TaskSent,
    TaskSettled,
    TaskSuspended,
    TaskUpdated,
    TurnEnded,
)
from covenant.ledger.machine.states import DRAINED, TRANSITIONS, State
from covenant.model.content import Json, Text
from covenant.model.errors import CovenantError, Damaged, Unavailable
from covenant.model.ids import AgentId
from covenant.model.rate_limits import Backoff
from covenant.model.retry_policy import Posture
from covenant.model.task import Cause, Ending, Lease, Result, ResultStatus
from covenant.model.task_event import (
    ArtifactUpdate,
    Interruption,
    MessageUpdate,
    Signal,
    StatusUpdate,
    StepUpdate,
    Wait,
)
from tests.ledger.embedded.recorded import (
    ALICE,
    BOB,
    CAROL,
    START_MS,
    Recorded,
    encode,
    lease_id,
    leased,
    sent,
    settled,
    task,
    task_id,
)
from tests.ledger_contract import fault_plans
from tests.waits import BOUND_S

TABLES = ("a2a_tasks", "packs", "requests", "updates", "handovers", "audit", "meta", "ids")

WAIT = Wait(since_ms=START_MS, signal="paid", step=1, name="paid")
STEP = StepUpdate("paid", 1, kind="wait")

agents = st.sampled_from([ALICE, BOB, CAROL])
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
reasons = st.one_of(st.just('a\x00b"\\\n'), texts)
times_ms = st.integers(START_MS, START_MS + 1_000)


@st.composite
def histories(draw: st.DrawFn) -> Recorded:
    """Records of any legal course of a few tasks, several events in some of them; the clock may step back."""
    recorded = Recorded()
    recorded.record(CacheDropped(1))
    for _ in range(draw(st.integers(1, 30))):
        ts_ms = draw(times_ms)
        events: list[LedgerEvent] = []
        # Numbers ascend within a record, so that each task's next event is judged by the state before it.
        for number in sorted(draw(st.sets(st.integers(1, 4), min_size=1, max_size=3))):
            entry = recorded.entries.get(task_id(number))
            state = None if entry is None else entry.state
            types = sorted(name for before, name in TRANSITIONS if before is state and may_follow(name, entry))
            if types:
                events.append(draw(an_event(draw(st.sampled_from(types)), number, entry)))
        if draw(st.booleans()):
            events.append(recorded.audited(draw(agents), draw(texts), ts_ms))
        recorded.record(*events, ts_ms=ts_ms)
    return recorded


def may_follow(kind: str, entry: Entry | None) -> bool:
    """What the table of states does not say: a wait ends once, and a signal is there before it is taken."""
    if entry is None:  # A result is returned only to a task that was drained, which is always known here.
        return kind != "result_returned"
    if kind == "signal_taken":
        return bool(entry.signals)
    if kind in ("task_resumed", "task_continued"):
        return (entry.wait is not None) == (kind == "task_resumed")
    return True


@st.composite
def an_event(draw: st.DrawFn, kind: str, number: int, entry: Entry | None) -> LedgerEvent:
    """One event of the given type that may follow what the entry says."""
    name = task_id(number)
    if entry is None:
        made = task(
            number,
            draw(agents),
            draw(agents),
            parent=draw(st.none() | st.builds(task_id, st.integers(1, 9))),
            deadline_ms=draw(st.none() | times_ms),
            task_kind=draw(st.none() | st.just("kind")),
            parts=tuple(draw(st.lists(st.builds(Text, texts) | st.builds(Json, st.none() | texts), max_size=2))),
            tenant=draw(st.none() | st.just("acme")),
            context_id=draw(
                st.none() | st.sampled_from(["context", "@context", "a\x00b"]) | st.builds(task_id, st.integers(1, 9))
            ),
            origin=draw(st.sampled_from(["mailbox", "a2a"])),
        )
        if kind == "task_sent":
            return TaskSent(name, made, f"digest-{number}")
        return TaskFollowed(name, made, f"digest-{number}", task_id(99))
    lease = entry.lease.lease_id if entry.lease else lease_id(1)
    after = entry.generation + 1
    makers: dict[str, Callable[[], LedgerEvent]] = {
        "task_promoted": lambda: TaskPromoted(name),
        "task_leased": lambda: TaskLeased(
            name,
            draw(leases(entry.attempt + 1, number + 1_000 * entry.generation)),
            after if entry.attempt == 0 and entry.turn == 1 else 0,
        ),
        "lease_renewed": lambda: LeaseRenewed(name, lease, draw(times_ms)),
        "lease_released": lambda: LeaseReleased(name, lease, draw(reasons), draw(st.booleans())),
        "lease_interrupted": lambda: LeaseInterrupted(name, lease, draw(reasons)),
        "task_updated": lambda: TaskUpdated(name, lease, after, draw(updates)),
        "task_requeued": lambda: TaskRequeued(name, lease, draw(reasons), Posture.IDEMPOTENT, entry.attempt),
        "task_parked": lambda: TaskParked(name, lease, after, draw(st.sampled_from(Interruption)), StatusUpdate("?")),
        "task_suspended": lambda: draw(
            st.sampled_from([TaskSuspended(name, WAIT), TaskSuspended(name, WAIT, lease, after, STEP)])
        ),
        "task_resumed": lambda: draw(st.sampled_from([TaskResumed(name), TaskResumed(name, after, STEP, "s1")])),
        "signal_kept": lambda: SignalKept(name, Signal("paid", f"s{entry.events}")),
        "signal_taken": lambda: SignalTaken(name, entry.signals[0].id),
        "task_continued": lambda: TaskContinued(name, after, MessageUpdate("user"), "message"),
        "message_kept": lambda: MessageKept(name, after, MessageUpdate("user"), "message"),
        "turn_ended": lambda: draw(
            st.sampled_from([TurnEnded(name, lease), TurnEnded(name, lease, MessageUpdate(), after)])
        ),
        "task_closed": lambda: draw(endings(TaskClosed, name, after)),
        "task_settled": lambda: draw(endings(TaskSettled, name, after)),
        "result_drained": lambda: ResultDrained(name),
        "result_returned": lambda: returned(entry, draw(reasons)),
    }
    return makers[kind]()


def returned(entry: Entry, reason: str) -> LedgerEvent:
    assert entry.result is not None
    assert entry.ending is not None
    assert entry.cause is not None
    told = (entry.task, entry.digest, entry.result, entry.ending, entry.cause, entry.generation, entry.accepted_at_ms)
    return ResultReturned(entry.task.id, reason, *told, entry.lease)


@st.composite
def endings(draw: st.DrawFn, kind: type[TaskSettled], name: Any, generation: int) -> LedgerEvent:
    return kind(
        name,
        Result(
            task_id=name,
            status=draw(st.sampled_from(ResultStatus)),
            error_message=draw(st.just(msgspec.UNSET) | texts),
        ),
        draw(st.sampled_from(Ending)),
        draw(st.sampled_from(Cause)),
        generation,
        reason=draw(st.none() | reasons),
    )


@st.composite
def leases(draw: st.DrawFn, attempt: int, number: int) -> Lease:
    return Lease(
        lease_id=lease_id(number),
        leased_to=draw(agents),
        leased_at_ms=draw(times_ms),
        attempt=attempt,
        node=draw(st.none() | st.just("node")),
        boot=draw(st.none() | st.just("boot")),
    )


updates = (
    st.builds(StatusUpdate, texts)
    | st.builds(ArtifactUpdate, st.just("artifact"), st.just((Text("chunk"),)))
    | st.builds(MessageUpdate)
)


def in_memory() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:", isolation_level=None)
    for name in (*LAYOUTS[0], "shelving"):
        db.executescript(statement(name))
    return db


def dump(db: sqlite3.Connection) -> dict[str, list[tuple[Any, ...]]]:
    found = {table: db.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall() for table in TABLES}
    return found | {
        "task_counts": db.execute("SELECT * FROM task_counts WHERE tasks <> 0 ORDER BY 1, 2, 3, 4, 5").fetchall()
    }


def apply_in_steps(db: sqlite3.Connection, recorded: Recorded, ends: list[int], live: LiveRows | None = None) -> None:
    for end in [*ends, recorded.last_seq]:
        after = archived_seq_of(db)
        if end > after:
            apply_lines(db, recorded.read_through(after, end), after, live)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "archive.db"


@pytest.fixture
def db(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(open_writer(path, lasting=True)) as connection:
        yield connection


def unpack_all(db: sqlite3.Connection) -> None:
    for (number,) in db.execute("SELECT task_no FROM packs").fetchall():
        unpack_task(db, number)


def row_of(db: sqlite3.Connection, number: int) -> dict[str, Any]:
    cursor = db.execute("SELECT * FROM a2a_tasks WHERE task_id = ?", (task_id(number),))
    return dict(zip([column[0] for column in cursor.description], cursor.fetchone(), strict=True))


# What it makes of records.


def entry_in(db: sqlite3.Connection, entry: Entry) -> Entry:
    """The entry that the archive's row comes to; fields that it does not keep are taken from the other."""
    cursor = db.execute("SELECT * FROM a2a_tasks JOIN requests USING (task_no) WHERE task_id = ?", (entry.task.id,))
    row = dict(zip([column[0] for column in cursor.description], cursor.fetchone(), strict=True))
    lease = None
    # A lease that nobody was told of is none to the machine; the row tells it as history.
    if row["lease_id"] is not None and (entry.lease is not None or not entry.undelivered):
        lease = Lease(
            lease_id=row["lease_id"],
            leased_to=AgentId(row["leased_to_display"], row["leased_to_pubkey"]),
            leased_at_ms=row["leased_at_ms"],
            attempt=row["attempt"],
            renewed_at_ms=row["renewed_at_ms"],
            node=row["node"],
            boot=row["boot"],
        )
        assert row["touched_at_ms"] == max(lease.leased_at_ms, lease.renewed_at_ms)
    kept = msgspec.structs.replace(
        entry,
        task=msgspec.json.decode(row["task"], type=type(entry.task)),
        digest=row["digest"],
        state=State(row["ledger_state"]),
        accepted_at_ms=row["created_at"],
        updated_at_ms=row["updated_at"],
        generation=row["generation"],
        turn=row["turn"],
        attempt=row["attempt"],
        lease=lease,
        interrupted=bool(row["interrupted"]),
        interruption=None if row["interruption"] is None else Interruption(row["interruption"]),
        result=None if row["result"] is None else msgspec.json.decode(row["result"], type=Result),
        ending=None if row["ending"] is None else Ending(row["ending"]),
        cause=None if row["cause"] is None else Cause(row["cause"]),
    )
    assert (row["settled_place"] is not None) == entry.finished
    assert (row["sender_pubkey"], row["recipient_pubkey"]) == (entry.task.sender.pubkey, entry.task.recipient.pubkey)
    return kept


def updates_expected(recorded: Recorded) -> list[tuple[str, int, str, int, Any]]:
    """(task, generation, kind, time, body) of every event that is an update."""
    rows: list[tuple[str, int, str, int, Any]] = []
    for ts_ms, events in recorded.records:
        for event in events:
            match event:
                case TaskSent() | TaskFollowed():
                    rows.append((event.task_id, 1, "submitted", ts_ms, None))
                case TaskLeased() if event.generation:
                    rows.append((event.task_id, event.generation, "working", ts_ms, None))
                case TaskUpdated():
                    kind = event.update.__struct_config__.tag
                    rows.append((event.task_id, event.generation, str(kind), ts_ms, event.update))
                case TaskParked():
                    rows.append((event.task_id, event.generation, "parked", ts_ms, event.update))
                case TaskSuspended() | TaskResumed() if event.generation:
                    rows.append((event.task_id, event.generation, "step", ts_ms, event.update))
                case TaskContinued():
                    rows.append((event.task_id, event.generation, "continued", ts_ms, event.message))
                case MessageKept():
                    rows.append((event.task_id, event.generation, "continued", ts_ms, event.message))
                case TurnEnded() if event.generation:
                    rows.append((event.task_id, event.generation, "message", ts_ms, event.reply))
                case TaskSettled():
                    rows.append((event.task_id, event.generation, "settled", ts_ms, None))
                case _:
                    pass
    return sorted(
        (name, generation, kind, ts_ms, None if body is None else msgspec.json.decode(encode(body)))
        for name, generation, kind, ts_ms, body in rows
    )


@given(histories())
def test_the_rows_are_what_the_machine_makes_of_the_events(recorded: Recorded) -> None:
    with closing(in_memory()) as db:
        apply_in_steps(db, recorded, [])
        done = {str(name) for name, entry in recorded.entries.items() if entry.state is DRAINED}
        packed = db.execute("SELECT task_id FROM packs JOIN a2a_tasks USING (task_no)").fetchall()
        assert {name for (name,) in packed} == done
        unpack_all(db)
        for entry in recorded.entries.values():
            assert entry_in(db, entry) == entry
        found = db.execute(
            "SELECT task_id, u.generation, kind, ts_ms, body FROM updates AS u JOIN a2a_tasks USING (task_no)"
        ).fetchall()
        assert sorted((*row[:4], row[4] and msgspec.json.decode(row[4])) for row in found) == updates_expected(recorded)
        (rows,) = db.execute("SELECT count(*) FROM a2a_tasks").fetchone()
        assert rows == len(recorded.entries)
        assert archived_seq_of(db) == recorded.last_seq


REFERENCES = (
    ("context_id", "context_no", "@", "tenant_id <> '' OR context_id <> ''"),
    ("parent", "parent_no", ">", "parent IS NOT NULL"),
)


@given(histories())
def test_what_tasks_refer_to_has_numbers_of_its_own(recorded: Recorded) -> None:
    with closing(in_memory()) as db:
        apply_in_steps(db, recorded, [])
        for name, number, prefix, where in REFERENCES:
            pairs = db.execute(f"SELECT {name}, {number}, task_no FROM a2a_tasks WHERE {where}").fetchall()
            for text in {text for text, _, _ in pairs}:
                found = db.execute(
                    f"SELECT task_no FROM a2a_tasks WHERE {number} IN"
                    " ((SELECT 2 * task_no FROM ids WHERE task_id = :text),"
                    " (SELECT 2 * task_no + 1 FROM ids WHERE task_id = CAST(:prefix || :text AS BLOB))) ORDER BY 1",
                    {"text": text, "prefix": prefix},
                ).fetchall()
                assert [task_no for (task_no,) in found] == sorted(n for other, _, n in pairs if other == text)
        counted = (
            "SELECT recipient_pubkey, recipient_display, tenant_id, ledger_state, state, count(*) FROM a2a_tasks"
            " GROUP BY 1, 2, 3, 4, 5"
        )
        assert dump(db)["task_counts"] == db.execute(counted).fetchall()


@given(histories(), st.data())
def test_the_rows_do_not_depend_on_how_records_fall_into_batches(recorded: Recorded, data: st.DataObject) -> None:
    ends = sorted(data.draw(st.sets(st.integers(1, recorded.last_seq))))
    live = data.draw(st.none() | st.builds(LiveRows))
    with closing(in_memory()) as one, closing(in_memory()) as many:
        apply_in_steps(one, recorded, [])
        apply_in_steps(many, recorded, ends, live)
        assert dump(many) == dump(one)
        # The same records again, from an earlier place: each is applied once.
        apply_lines(many, recorded.read_through(0, recorded.last_seq), recorded.last_seq)
        assert dump(many) == dump(one)


MOVES: dict[str, LedgerEvent] = {
    str(event.__struct_config__.tag): event
    for event in (
        sent(1),
        TaskFollowed(task_id(1), task(1), "digest", task_id(99)),
        TaskPromoted(task_id(1)),
        leased(1),
        LeaseRenewed(task_id(1), lease_id(1), START_MS),
        LeaseReleased(task_id(1), lease_id(1), "busy"),
        LeaseInterrupted(task_id(1), lease_id(1), "stopped"),
        TaskUpdated(task_id(1), lease_id(1), 3, StatusUpdate("half")),
        TaskParked(task_id(1), lease_id(1), 3, Interruption.INPUT_REQUIRED, StatusUpdate("?")),
        TaskSuspended(task_id(1), WAIT, lease_id(1), 3, STEP),
        TaskResumed(task_id(1), 4, STEP),
        SignalKept(task_id(1), Signal("paid", "s1")),
        SignalTaken(task_id(1), "s1"),
        TaskContinued(task_id(1), 4, MessageUpdate("user"), "m"),
        MessageKept(task_id(1), 4, MessageUpdate("user"), "m"),
        TurnEnded(task_id(1), lease_id(1)),
        TaskRequeued(task_id(1), lease_id(1), "again", Posture.IDEMPOTENT, 1),
        settled(1),
        TaskClosed(task_id(1), settled(1).result, Ending.COMPLETED, Cause.RESULT, 3),
        ResultDrained(task_id(1)),
        ResultReturned(
            task_id(1), "gone", task(1), "digest", settled(1).result, Ending.COMPLETED, Cause.RESULT, 3, START_MS
        ),
    )
}


def rows_of(event: LedgerEvent, seq: int, known: KnownRows) -> Rows:
    return Batch(encode_line(seq, START_MS, seq - 1, encode([event])), seq - 1).rows(known)


@pytest.mark.parametrize(("before", "kind"), TRANSITIONS)
def test_every_move_of_the_machine_leads_to_the_same_state(before: State | None, kind: str) -> None:
    tasks: dict[str, TaskRowUpdate] = {}
    # A result that comes back to a state which has forgotten its task: the archive never forgets.
    remembered = State.DRAINED if before is None and kind == "result_returned" else before
    if remembered is not None:
        tasks = rows_of(sent(1), 1, KnownRows({}, {}, {})).tasks
        tasks[task_id(1)].ledger_state = remembered.wire_name
    moved = rows_of(MOVES[kind], 2, KnownRows(tasks, {}, {})).tasks[task_id(1)]
    assert moved.ledger_state == TRANSITIONS[before, kind].wire_name


def test_every_event_of_a_task_is_a_move() -> None:
    assert MOVES.keys() == {kind.__struct_config__.tag for kind in get_args(AnyTaskEvent)}


def test_a_task_that_passes_through_in_one_batch_is_one_finished_row(db: sqlite3.Connection) -> None:
    recorded = Recorded()
    recorded.each([sent(1), leased(1), settled(1, text="no"), ResultDrained(task_id(1))])
    apply_in_steps(db, recorded, [])
    row = row_of(db, 1)
    assert (row["state"], row["ledger_state"], row["error_message"]) == ("failed", "resolved", "no")
    unpack_all(db)
    assert msgspec.json.decode(row_of(db, 1)["final_message_json"])["status"] == "error"
    assert (row["agent_id"], row["tenant_id"], row["context_id"]) == ("bob", "", "")
    assert (row["created_at"], row["updated_at"]) == (START_MS + 1, START_MS + 4)


def test_tasks_that_are_no_longer_at_hand_move_all_the_same(
    db: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply_batch, "LIVE_MAX", 2)
    recorded, live, numbers = Recorded(), LiveRows(), range(1, 8)
    for events in (map(sent, numbers), map(leased, numbers), map(settled, numbers)):
        recorded.each(events)
        apply_in_steps(db, recorded, [], live)
    assert {row_of(db, number)["ledger_state"] for number in numbers} == {"result_pending"}


def test_after_a_failure_nothing_is_at_hand(db: sqlite3.Connection) -> None:
    recorded, live = Recorded(), LiveRows()
    recorded.record(sent(1))
    apply_in_steps(db, recorded, [], live)
    recorded.record(leased(1))
    with (
        fault_plans.armed(fault_plans.Plan("archive.commit", fault_plans.fail(errno.EIO))),
        pytest.raises(OSError, match="error"),
    ):
        apply_in_steps(db, recorded, [], live)
    recorded.record(LeaseReleased(task_id(1), lease_id(1), "busy"))
    apply_in_steps(db, recorded, [2], live)
    row = row_of(db, 1)
    assert (row["ledger_state"], row["attempt"], row["turn"]) == ("queued", 1, 1)
    assert db.execute("SELECT event FROM handovers ORDER BY place").fetchall() == [("leased",), ("released",)]


def test_a_clients_state_is_told_in_a2a_words(db: sqlite3.Connection) -> None:
    recorded = Recorded()
    told: list[str] = []
    parked = TaskParked(task_id(1), lease_id(1), 3, Interruption.AUTH_REQUIRED, StatusUpdate("?"))
    steps: list[LedgerEvent] = [
        sent(1),
        leased(1),
        parked,
        TaskContinued(task_id(1), 4, MessageUpdate(), "m"),
        leased(1, turn=2),
        LeaseReleased(task_id(1), lease_id(1), "busy"),
        settled(1, 5),
    ]
    for step in steps:
        recorded.record(step)
        apply_in_steps(db, recorded, [])
        told.append(row_of(db, 1)["state"])
    assert told == ["submitted", "working", "auth-required", "working", "working", "working", "completed"]


def test_events_that_are_no_business_of_the_archive_pass_by(db: sqlite3.Connection) -> None:
    recorded = Recorded()
    recorded.record(CacheDropped(3))
    recorded.record(sent(1), CacheDropped(1))
    apply_in_steps(db, recorded, [])
    assert row_of(db, 1)["ledger_state"] == "queued"
    assert archived_seq_of(db) == 2


def test_a_purge_leaves_the_rows_after_it_and_an_anchor(db: sqlite3.Connection) -> None:
    recorded = Recorded()
    recorded.record(recorded.audited(ALICE, "one"))
    through = recorded.audited(ALICE, "two")
    recorded.record(through)
    recorded.record(AuditPurged(2, through.chain_hash), recorded.audited(BOB, "purged"))
    apply_in_steps(db, recorded, [1])
    assert db.execute("SELECT idx, issuer FROM audit").fetchall() == [(3, BOB.pubkey)]
    meta = dict(db.execute("SELECT key, value FROM meta"))
    assert (meta["audit_anchor_index"], meta["audit_anchor_hash"]) == (2, through.chain_hash)


def test_an_audit_row_in_the_way_gives_way_to_the_journals(db: sqlite3.Connection) -> None:
    recorded = Recorded()
    row = recorded.audited(ALICE, "one")
    recorded.record(row)
    db.execute("INSERT INTO audit VALUES (1, 0, 'forged', '', '')")
    apply_in_steps(db, recorded, [])
    assert db.execute("SELECT row, issuer FROM audit").fetchall() == [(row.row, ALICE.pubkey)]


def test_a_record_larger_than_a_batch_is_applied(db: sqlite3.Connection) -> None:
    recorded = Recorded()
    recorded.record(sent(1, intent_text="x" * (2 * archive_writer.BATCH_BYTES)))
    lines = recorded.read(recorded.cursor(0), archive_writer.BATCH_BYTES)
    apply_lines(db, lines, 0)
    (length,) = db.execute("SELECT length(task) FROM requests").fetchone()
    assert length > 2 * archive_writer.BATCH_BYTES


def test_deep_content_is_kept_as_it_was_sent(db: sqlite3.Connection) -> None:
    value: Any = "bottom"
    for _ in range(200):
        value = {"\x00\u2028": [value]}
    recorded = Recorded()
    recorded.record(sent(1, parts=(Json(value),)))
    apply_in_steps(db, recorded, [])
    (kept,) = db.execute("SELECT task FROM requests").fetchone()
    assert kept.encode() == encode(task(1, parts=(Json(value),)))


# What it refuses.


def test_a_missing_record_is_refused_and_nothing_changes(db: sqlite3.Connection) -> None:
    recorded = Recorded()
    recorded.each([sent(1), sent(2), sent(3)])
    apply_in_steps(db, recorded, [1, 1])
    before = dump(db)
    with pytest.raises(CovenantError, match="record 4 is missing"):
        apply_lines(db, recorded.read_through(4, 5)._replace(data=b'{"seq":5,"ts_ms":1}\n'), 3)
    assert dump(db) == before


def test_an_event_of_a_task_that_was_never_sent_is_refused_with_its_whole_batch(db: sqlite3.Connection) -> None:
    recorded = Recorded()
    recorded.record(sent(1))
    orphan = Recorded()
    orphan.lines = [recorded.lines[0], recorded.lines[0].replace(b'"seq":1', b'"seq":2')]
    orphan.lines[1] = orphan.lines[1].replace(b'"type":"task_sent"', b'"type":"task_promoted"')
    orphan.lines[1] = orphan.lines[1].replace(task_id(1).encode(), task_id(7).encode())
    before = dump(db)
    with pytest.raises(CovenantError, match="never sent"):
        apply_lines(db, orphan.read_through(0, 2), 0)
    assert dump(db) == before


@pytest.mark.parametrize("point", ["archive.apply", "archive.commit"])
def test_a_batch_that_fails_halfway_leaves_nothing(db: sqlite3.Connection, point: str) -> None:
    recorded = Recorded()
    recorded.each([sent(1), leased(1)])
    before = dump(db)
    with (
        fault_plans.armed(fault_plans.Plan(point, fault_plans.fail(errno.ENOSPC))),
        pytest.raises(OSError, match="space"),
    ):
        apply_in_steps(db, recorded, [])
    assert dump(db) == before
    apply_in_steps(db, recorded, [])
    assert row_of(db, 1)["ledger_state"] == "in_flight"


def test_a_file_that_is_no_archive_is_named_as_damaged(path: Path) -> None:
    path.write_bytes(b"this is not a database" * 100)
    with pytest.raises(Damaged, match=r"archive\.db.*not a database"):
        Archive(path)


def test_an_archive_of_another_layout_is_refused(path: Path, db: sqlite3.Connection) -> None:
    db.execute("PRAGMA user_version = 99")
    with pytest.raises(Damaged, match="layout 99"):
        Archive(path)


# The thread that follows the journal.


@asynccontextmanager
async def following(path: Path | None, recorded: Recorded) -> AsyncIterator[tuple[Archive, list[int]]]:
    heard: list[int] = []
    archive = Archive(path)
    archive.start(recorded, heard.append)
    try:
        yield archive, heard
    finally:
        await archive.close()


async def test_notified_records_are_archived_and_told_on_the_loop(path: Path) -> None:
    recorded = Recorded()
    recorded.each([sent(1), leased(1), settled(1)])
    threads: list[int] = []
    archive = Archive(path)
    archive.start(recorded, lambda seq: threads.append(threading.get_ident()))
    archive.notify(3)
    await archive.caught_up(3, BOUND_S)
    assert archive.archived_seq == 3
    assert threads == [threading.get_ident()]
    assert recorded.trimmed == 3
    await archive.close()


async def test_catching_up_waits_only_for_what_it_needs(path: Path) -> None:
    recorded = Recorded()
    recorded.record(sent(1))
    async with following(path, recorded) as (archive, _):
        await archive.caught_up(0, 0)
        archive.notify(1)
        await asyncio.gather(*(archive.caught_up(1, BOUND_S) for _ in range(3)))
        with pytest.raises(Unavailable) as refusal:
            await archive.caught_up(2, 0.01)
        assert refusal.value.code == "history_lagging"
        recorded.record(sent(2))
        archive.notify(2)
        await archive.caught_up(2, BOUND_S)


async def test_callers_that_gave_up_are_forgotten_while_the_archive_gets_no_further(path: Path) -> None:
    recorded = Recorded()
    async with following(path, recorded) as (archive, _):
        waiting = [asyncio.ensure_future(archive.caught_up(seq, 0.01)) for seq in range(1, 100)]
        patient = asyncio.ensure_future(archive.caught_up(1, BOUND_S))
        assert all(isinstance(end, Unavailable) for end in await asyncio.gather(*waiting, return_exceptions=True))
        assert len(archive._waiting) <= 2
        recorded.record(sent(1))
        archive.notify(1)
        await patient


async def test_a_backlog_larger_than_a_batch_is_worked_off(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_writer, "BATCH_BYTES", 2_000)
    recorded = Recorded()
    recorded.each(sent(number) for number in range(1, 51))
    async with following(path, recorded) as (archive, heard):
        archive.notify(50)
        await archive.caught_up(50, BOUND_S)
        assert heard[-1] == 50
        assert len(heard) > 5
        assert heard == sorted(set(heard))


@pytest.mark.parametrize("point", ["archive.apply", "archive.commit"])
async def test_a_failed_batch_shows_and_is_tried_again(path: Path, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_module, "RETRIES", Backoff(0.01, 5.0))
    recorded = Recorded()
    recorded.each([sent(1), sent(2)])
    failed = threading.Event()
    mended = threading.Event()

    def fail_until_mended(step: fault_points.FaultPoint) -> None:
        failed.set()
        assert mended.wait(BOUND_S)
        raise OSError(errno.ENOSPC, "No space left on device")

    async with following(path, recorded) as (archive, _):
        with fault_plans.armed(fault_plans.Plan(point, fail_until_mended)):
            archive.notify(2)
            await asyncio.to_thread(failed.wait, BOUND_S)
            with pytest.raises(Unavailable):
                await archive.caught_up(2, 0.01)
            assert archive.archived_seq == 0
            mended.set()
            await archive.caught_up(2, BOUND_S)
        assert archive.failure is None
    with closing(open_writer(path, lasting=True)) as db:
        assert archived_seq_of(db) == 2


async def test_while_it_fails_the_reason_is_told_and_closing_does_not_wait(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_module, "RETRIES", Backoff(3_600.0, 3_600.0))
    recorded = Recorded()
    recorded.record(sent(1))
    async with following(path, recorded) as (archive, heard):
        with fault_plans.armed(fault_plans.Plan("archive.commit", fault_plans.fail(errno.EIO))) as plan:
            archive.notify(1)
            with pytest.raises(Unavailable) as refusal:
                await archive.caught_up(1, 0.5)
        assert plan.fired
        assert "Input/output error" in refusal.value.message
        assert archive.failure is not None
        assert heard == []


async def test_closing_archives_what_was_notified(path: Path) -> None:
    recorded = Recorded()
    recorded.each(sent(number) for number in range(1, 101))
    async with following(path, recorded) as (archive, _):
        archive.notify(100)
    assert Archive(path).archived_seq == 100


async def test_a_reopened_archive_goes_on_where_it_was(path: Path) -> None:
    recorded = Recorded()
    recorded.each([sent(1), leased(1)])
    async with following(path, recorded) as (archive, _):
        archive.notify(2)
    recorded.each([settled(1), sent(2)])
    async with following(path, recorded) as (archive, _):
        assert archive.archived_seq == 2
        archive.notify(4)
        await archive.caught_up(4, BOUND_S)
    with closing(open_writer(path, lasting=True)) as db:
        assert row_of(db, 1)["ledger_state"] == "result_pending"


async def test_what_a_checkpoint_promises_survives_without_the_write_ahead_log(path: Path, tmp_path: Path) -> None:
    recorded = Recorded()
    recorded.each(sent(number) for number in range(1, 11))
    async with following(path, recorded) as (archive, _):
        assert await archive.checkpoint() == 0
        archive.notify(10)
        await archive.caught_up(10, BOUND_S)
        assert await archive.checkpoint() == 10
        recorded.each(leased(number) for number in range(1, 11))
        archive.notify(20)
        await archive.caught_up(20, BOUND_S)
        # The power fails now: commits after the checkpoint were never synced, and the journal still has them.
        left = tmp_path / "left.db"
        shutil.copyfile(path, left)
        with closing(sqlite3.connect(path)) as read:
            after_all = dump(read)
    with closing(open_writer(left, lasting=True)) as db:
        assert 10 <= archived_seq_of(db) <= 20
        apply_in_steps(db, recorded, [])
        assert dump(db) == after_all


async def test_an_archive_without_a_path_leaves_nothing_behind() -> None:
    recorded = Recorded()
    recorded.record(sent(1))
    async with following(None, recorded) as (archive, _):
        archive.notify(1)
        await archive.caught_up(1, BOUND_S)
        assert archive.path.exists()
    assert not archive.path.parent.exists()


async def test_nobody_is_left_waiting_when_it_closes(path: Path) -> None:
    recorded = Recorded()
    async with following(path, recorded) as (archive, _):
        waiting = asyncio.ensure_future(archive.caught_up(1, BOUND_S))
    with pytest.raises(Unavailable):
        await waiting
    assert await archive.checkpoint() == 0


def test_only_its_owner_can_read_the_file(path: Path, db: sqlite3.Connection) -> None:
    assert path.stat().st_mode & 0o077 == 0
