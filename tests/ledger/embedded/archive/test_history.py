"""Reads of the archive: order, filters before limits, who sees what, and what a broken audit chain is told by."""

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from covenant.ledger.contract.tasks import TREE_DEPTH_MAX, LeaseRecord, QueueQuery, TreeNode
from covenant.ledger.embedded.archive import history as sql
from covenant.ledger.embedded.archive.apply_batch import apply_lines
from covenant.ledger.embedded.archive.archive_file import archived_seq_of, open_writer
from covenant.ledger.embedded.archive.history import History
from covenant.ledger.machine.events import (
    AuditPurged,
    LeaseInterrupted,
    LeaseReleased,
    LeaseRenewed,
    ResultDrained,
    TaskContinued,
    TaskFollowed,
    TaskParked,
    TaskRequeued,
    TaskUpdated,
)
from covenant.ledger.machine.view import Archived
from covenant.model.errors import Unavailable
from covenant.model.grant import GENESIS, AuditHead
from covenant.model.ids import PublicKey
from covenant.model.retry_policy import Posture
from covenant.model.task import Cause, Ending
from covenant.model.task_event import Ended, Interruption, MessageUpdate, StatusUpdate, Step
from tests.ledger.embedded.recorded import (
    ALICE,
    BOB,
    BOOT,
    CAROL,
    NODE,
    START_MS,
    Recorded,
    leased,
    result,
    sent,
    settled,
    task,
    task_id,
)
from tests.waits import BOUND_S

NOW_MS = START_MS + 100_000
LOST_BOOT = "boot-1"


class Past:
    """An archive, its history, and the records that a test adds to it."""

    def __init__(self, path: Path) -> None:
        self.recorded = Recorded()
        self.db = open_writer(path, lasting=True)
        self.history = History(path, boot=BOOT)

    def archive(self) -> None:
        after = archived_seq_of(self.db)
        if self.recorded.last_seq > after:
            apply_lines(self.db, self.recorded.read_through(after, self.recorded.last_seq), after)

    async def queue(self, **query: object) -> list[str]:
        """The numbers of the tasks, in order."""
        self.archive()
        found = await self.history.queue(QueueQuery(**query), NOW_MS)  # type: ignore[arg-type]
        return [numbered(entry.task.id) for entry in found.tasks]


def numbered(name: str) -> str:
    return str(int(name.rpartition("-")[2], 16))


@pytest.fixture
async def past(tmp_path: Path) -> AsyncIterator[Past]:
    past = Past(tmp_path / "archive.db")
    yield past
    await past.history.close()
    past.db.close()


# The queue.


@pytest.fixture
def crowd(past: Past) -> Past:
    """One task in each place of the queue: 1 and 2 queued, 3 to 5 leased (4 and 5 lost), 6 parked, 7 following."""
    record = past.recorded.record
    for number in range(1, 7):
        record(sent(number))
    record(leased(3, at_ms=NOW_MS - 10))
    record(leased(4, at_ms=NOW_MS - 5, boot=LOST_BOOT))
    record(leased(5, at_ms=NOW_MS - 1, boot=BOOT))
    record(LeaseInterrupted(task_id(5), leased(5).lease.lease_id, "stopped"))
    record(leased(6))
    record(TaskParked(task_id(6), leased(6).lease.lease_id, 3, Interruption.INPUT_REQUIRED, StatusUpdate("?")))
    record(TaskFollowed(task_id(7), task(7), "digest", task_id(1)))
    return past


async def test_lost_holders_come_first_then_leases_then_the_queue(crowd: Past) -> None:
    assert await crowd.queue() == ["4", "5", "3", "1", "2", "6", "7"]
    found = await crowd.history.queue(QueueQuery(), NOW_MS)
    assert [entry.holder_lost for entry in found.tasks] == [True, True, False, False, False, False, False]
    assert [entry.state for entry in found.tasks] == ["in_flight"] * 3 + ["queued"] * 2 + ["parked", "following"]


async def test_a_lease_of_this_boot_is_not_lost_and_one_of_any_other_boot_is(past: Past, tmp_path: Path) -> None:
    past.recorded.each([sent(1), sent(2), leased(1, boot=BOOT), leased(2)])
    past.archive()
    assert [entry.holder_lost for entry in (await past.history.queue(QueueQuery(), NOW_MS)).tasks] == [False, False]
    later = History(tmp_path / "archive.db", boot="boot-9")
    found = (await later.queue(QueueQuery(), NOW_MS)).tasks
    assert {str(entry.task.id): entry.holder_lost for entry in found} == {task_id(1): True, task_id(2): False}
    await later.close()


async def test_leases_are_ordered_by_when_they_were_last_touched(past: Past) -> None:
    past.recorded.each([sent(1), sent(2), sent(3)])
    past.recorded.each(leased(number, at_ms=NOW_MS - 100 + number) for number in (1, 2, 3))
    past.recorded.record(LeaseRenewed(task_id(1), leased(1).lease.lease_id, NOW_MS - 1))
    assert await past.queue() == ["2", "3", "1"]


async def test_a_requeued_task_is_at_the_end_of_the_queue(past: Past) -> None:
    past.recorded.each([sent(1), sent(2), leased(1)])
    past.recorded.record(TaskRequeued(task_id(1), leased(1).lease.lease_id, "lost", Posture.OPERATOR_ACCEPTED, 1))
    assert await past.queue() == ["2", "1"]


async def test_tasks_queued_by_one_record_keep_its_order(past: Past) -> None:
    past.recorded.record(sent(9), sent(3), sent(5))
    assert await past.queue() == ["9", "3", "5"]


async def test_an_entry_says_who_holds_it_only_while_it_is_held(past: Past) -> None:
    past.recorded.each([sent(1), leased(1, CAROL, at_ms=NOW_MS - 7)])
    past.recorded.record(LeaseRenewed(task_id(1), leased(1).lease.lease_id, NOW_MS - 3))
    past.archive()
    (held,) = (await past.history.queue(QueueQuery(), NOW_MS)).tasks
    assert (held.leased_to, held.lease_id, held.attempt) == (CAROL, leased(1).lease.lease_id, 1)
    assert (held.leased_at_ms, held.renewed_at_ms) == (NOW_MS - 7, NOW_MS - 3)
    past.recorded.record(LeaseReleased(task_id(1), leased(1).lease.lease_id, "busy"))
    past.archive()
    (free,) = (await past.history.queue(QueueQuery(), NOW_MS)).tasks
    assert (free.leased_to, free.lease_id, free.leased_at_ms, free.renewed_at_ms) == (None, None, None, None)
    assert free.attempt == 1


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"state_filter": "queued"}, ["1", "2"]),
        ({"state_filter": "in_flight"}, ["4", "5", "3"]),
        ({"min_lease_age_ms": 5}, ["4", "3", "1", "2", "6", "7"]),
        ({"min_lease_age_ms": 6}, ["3", "1", "2", "6", "7"]),
        ({"min_lease_age_ms": 6, "state_filter": "in_flight"}, ["3"]),
        ({"min_lease_age_ms": 11}, ["1", "2", "6", "7"]),
        ({"limit": 4}, ["4", "5", "3", "1"]),
        ({"limit": 2, "state_filter": "queued"}, ["1", "2"]),
        ({"limit": 0}, []),
    ],
    ids=str,
)
@pytest.mark.parametrize("viewer", [None, ALICE.pubkey, BOB.pubkey])
async def test_the_queue_is_filtered_before_it_is_cut(
    crowd: Past, query: dict[str, object], expected: list[str], viewer: PublicKey | None
) -> None:
    assert await crowd.queue(viewer=viewer, **query) == expected


async def test_a_deadline_filter_keeps_what_is_due_by_then(past: Past) -> None:
    past.recorded.each([sent(1), sent(2, deadline_ms=NOW_MS - 5), sent(3, deadline_ms=NOW_MS + 10)])
    past.recorded.each([sent(4, deadline_ms=NOW_MS + 11), sent(5, deadline_ms=NOW_MS), leased(5)])
    assert await past.queue(deadline_within_ms=10) == ["5", "2", "3"]
    assert await past.queue(deadline_within_ms=10, limit=1, state_filter="queued") == ["2"]


async def test_a_stale_lease_is_not_hidden_behind_any_number_of_queued_tasks(past: Past) -> None:
    past.recorded.record(*(sent(number) for number in range(1, 2_001)))
    past.recorded.record(leased(2_000, at_ms=NOW_MS - 50))
    assert (await past.queue(limit=3))[0] == "2000"
    assert (await past.queue(limit=3, viewer=BOB.pubkey))[0] == "2000"


async def test_a_viewer_sees_what_it_sent_was_sent_or_holds_and_each_once(past: Past) -> None:
    past.recorded.each([sent(1, ALICE, BOB), sent(2, BOB, CAROL), sent(3, CAROL, CAROL), sent(4, ALICE, CAROL)])
    past.recorded.each([sent(5, BOB, BOB), leased(4, BOB)])
    assert await past.queue(viewer=BOB.pubkey) == ["4", "1", "2", "5"]
    assert await past.queue(viewer=CAROL.pubkey, limit=2) == ["4", "2"]
    assert await past.queue(viewer=PublicKey("stranger")) == []
    past.recorded.record(LeaseReleased(task_id(4), leased(4).lease.lease_id, "busy"))
    assert await past.queue(viewer=BOB.pubkey) == ["1", "2", "5", "4"]


async def test_results_wait_for_their_sender_oldest_first(past: Past) -> None:
    past.recorded.each([sent(1, ALICE), sent(2, CAROL), sent(3, ALICE), leased(1), leased(2), leased(3)])
    past.recorded.each([settled(3), settled(2), settled(1)])
    past.archive()

    async def waiting(viewer: PublicKey | None, **query: object) -> list[str]:
        found = await past.history.queue(QueueQuery(viewer=viewer, **query), NOW_MS)  # type: ignore[arg-type]
        return [numbered(one.task_id) for one in found.results]

    assert await waiting(None) == ["3", "2", "1"]
    assert await waiting(ALICE.pubkey) == ["3", "1"]
    assert await waiting(ALICE.pubkey, limit=1, state_filter="in_flight", min_lease_age_ms=1) == ["3"]
    assert await waiting(BOB.pubkey) == []
    assert [one.task_id for one in await past.history.recent_results(ALICE.pubkey, 1)] == [task_id(1)]
    assert [one.task_id for one in await past.history.recent_results(None, 2)] == [task_id(1), task_id(2)]
    past.recorded.record(ResultDrained(task_id(3)))
    past.archive()
    assert await waiting(ALICE.pubkey) == ["1"]


async def test_recent_tasks_are_queued_ones_newest_first(past: Past) -> None:
    past.recorded.each([sent(1, ALICE, BOB), sent(2, CAROL, BOB), sent(3, CAROL, CAROL), sent(4), leased(4)])
    past.archive()
    assert await past.history.recent_tasks(None, 2) == (task(3, CAROL, CAROL), task(2, CAROL, BOB))
    assert await past.history.recent_tasks(BOB.pubkey, 5) == (task(2, CAROL, BOB), task(1, ALICE, BOB))
    assert await past.history.recent_tasks(CAROL.pubkey, 1) == (task(3, CAROL, CAROL),)


# One task.


@pytest.fixture
def story(past: Past) -> Past:
    """A task of two turns and three leases, one of them requeued, that failed and was drained."""
    record, name = past.recorded.record, task_id(1)
    record(sent(1, timeout_ms=5))
    record(leased(1, at_ms=NOW_MS))
    record(TaskRequeued(name, leased(1).lease.lease_id, 'lost\x00"\n', Posture.OPERATOR_ACCEPTED, 1))
    record(leased(1, CAROL, at_ms=NOW_MS + 1, attempt=2))
    record(TaskUpdated(name, leased(1, attempt=2).lease.lease_id, 3, StatusUpdate("half")))
    record(
        TaskParked(name, leased(1, attempt=2).lease.lease_id, 4, Interruption.INPUT_REQUIRED, StatusUpdate("which?"))
    )
    record(TaskContinued(name, 5, MessageUpdate("user"), "message"))
    record(leased(1, BOB, at_ms=NOW_MS + 2, turn=2))
    record(settled(1, 6, text="too hard"))
    record(ResultDrained(name))
    past.archive()
    return past


async def test_a_shown_task_tells_its_whole_story(story: Past) -> None:
    shown = await story.history.show(task_id(1), ALICE.pubkey, 100)
    assert shown is not None
    assert shown.task == task(1, timeout_ms=5)
    assert (shown.state, shown.a2a_state, shown.cause) == ("resolved", "failed", "result")
    assert (shown.attempt, shown.turn, shown.generation, shown.holder_lost) == (1, 2, 6, False)
    assert (shown.created_at_ms, shown.updated_at_ms) == (START_MS + 1, START_MS + 10)
    assert shown.result == result(1, "too hard")
    leases = [leased(1), leased(1, attempt=2), leased(1, turn=2)]
    assert shown.leases == (
        LeaseRecord(
            lease_id=leases[0].lease.lease_id,
            leased_to=BOB,
            leased_at_ms=NOW_MS,
            turn=1,
            attempt=1,
            ended_at_ms=START_MS + 3,
            outcome="requeued",
            reason='lost\x00"\n',
        ),
        LeaseRecord(
            lease_id=leases[1].lease.lease_id,
            leased_to=CAROL,
            leased_at_ms=NOW_MS + 1,
            turn=1,
            attempt=2,
            ended_at_ms=START_MS + 6,
            outcome="parked",
        ),
        LeaseRecord(
            lease_id=leases[2].lease.lease_id,
            leased_to=BOB,
            leased_at_ms=NOW_MS + 2,
            turn=2,
            attempt=1,
            ended_at_ms=START_MS + 9,
            outcome="settled",
        ),
    )
    assert [update.kind for update in shown.updates] == [
        "submitted",
        "working",
        "status",
        "parked",
        "continued",
        "settled",
    ]


async def test_steps_go_on_after_any_generation(story: Past) -> None:
    everything = await story.history.steps(task_id(1), 0, 100)
    assert [step.generation for step in everything] == [1, 2, 3, 4, 5, 6]
    assert everything[2] == Step(3, START_MS + 5, StatusUpdate("half"))
    ended = everything[5].what
    assert isinstance(ended, Ended)
    assert (ended.ending, ended.result.error_message) == (Ending.FAILED, "too hard")
    for after in range(7):
        assert await story.history.steps(task_id(1), after, 100) == everything[after:]
    assert await story.history.steps(task_id(1), 1, 2) == everything[1:3]


async def test_of_the_updates_the_newest_are_shown(story: Past) -> None:
    shown = await story.history.show(task_id(1), None, 2)
    assert shown is not None
    assert [update.generation for update in shown.updates] == [5, 6]


async def test_a_live_lease_has_no_end_yet(past: Past) -> None:
    past.recorded.each([sent(1), leased(1, boot=LOST_BOOT)])
    past.archive()
    shown = await past.history.show(task_id(1), None, 0)
    assert shown is not None
    assert shown.holder_lost
    assert shown.updates == ()
    assert [(lease.ended_at_ms, lease.outcome, lease.reason) for lease in shown.leases] == [(None, None, None)]


async def test_a_task_is_shown_to_those_who_have_part_in_it(past: Past) -> None:
    past.recorded.each([sent(1, ALICE, BOB), leased(1, CAROL)])
    past.archive()
    for viewer in (None, ALICE.pubkey, BOB.pubkey, CAROL.pubkey):
        assert await past.history.show(task_id(1), viewer, 1) is not None
    assert await past.history.show(task_id(1), PublicKey("stranger"), 1) is None
    assert await past.history.show(task_id(2), None, 1) is None


async def test_only_finished_tasks_are_looked_up(past: Past) -> None:
    past.recorded.each([sent(1), leased(1, CAROL)])
    past.archive()
    assert await past.history.lookup(task_id(1)) is None
    past.recorded.record(settled(1))
    past.archive()
    found = Archived(
        digest="digest-1",
        sender=ALICE,
        recipient=BOB,
        leased_to=CAROL.pubkey,
        ending=Ending.COMPLETED,
        cause=Cause.RESULT,
        result=result(1),
    )
    assert await past.history.lookup(task_id(1)) == found
    past.recorded.record(ResultDrained(task_id(1)))
    past.archive()
    assert await past.history.lookup(task_id(1)) == found
    assert await past.history.lookup(task_id(2)) is None


async def test_finished_ids_come_in_the_order_in_which_they_ended(past: Past) -> None:
    past.recorded.each([sent(1), sent(2), sent(3), sent(4), settled(3, 2)])
    past.recorded.record(settled(1, 2), settled(4, 2))
    past.archive()
    first, place = await past.history.finished(0, 2)
    assert first == (task_id(3), task_id(1))
    second, place = await past.history.finished(place, 2)
    assert second == (task_id(4),)
    assert await past.history.finished(place, 2) == ((), place)


# Trees.


def drawn(node: TreeNode) -> object:
    """A tree as its numbers: (number, children…), with None for a task that is not shown."""
    name = numbered(node.task_id) if node.task is not None else None
    return (name, *(drawn(child) for child in node.children))


async def test_a_tree_hangs_every_task_below_its_parent(past: Past) -> None:
    past.recorded.each([sent(1), sent(2, parent=task_id(1)), sent(3, parent=task_id(1)), sent(4, parent=task_id(2))])
    past.recorded.each([sent(5), settled(4, 2, text="no")])
    past.archive()
    tree = await past.history.tree(task_id(1), None)
    assert drawn(tree) == ("1", ("2", ("4",)), ("3",))
    leaf = tree.children[0].children[0]
    assert (leaf.state, leaf.result_status, leaf.attempt) == ("result_pending", "error", 0)
    assert (leaf.created_at_ms, leaf.updated_at_ms) == (START_MS + 4, START_MS + 6)
    assert drawn(await past.history.tree(task_id(4), None)) == ("4",)


async def test_a_tree_whose_root_is_unknown_has_its_children_all_the_same(past: Past) -> None:
    past.recorded.record(sent(2, parent=task_id(1)))
    past.archive()
    assert drawn(await past.history.tree(task_id(1), None)) == (None, ("2",))
    assert drawn(await past.history.tree(task_id(9), None)) == (None,)


async def test_a_viewer_finds_only_its_own_part_of_a_tree(past: Past) -> None:
    past.recorded.each([sent(1, ALICE, BOB), sent(2, BOB, CAROL, parent=task_id(1)), sent(3, parent=task_id(2))])
    past.recorded.record(sent(4, BOB, ALICE, parent=task_id(1)))
    past.archive()
    assert drawn(await past.history.tree(task_id(1), ALICE.pubkey)) == ("1", ("4",))
    assert drawn(await past.history.tree(task_id(1), BOB.pubkey)) == ("1", ("2", ("3",)), ("4",))
    assert drawn(await past.history.tree(task_id(1), CAROL.pubkey)) == (None, ("2",))
    assert drawn(await past.history.tree(task_id(1), PublicKey("stranger"))) == (None,)


async def test_parents_in_a_circle_end(past: Past) -> None:
    past.recorded.each([sent(1, parent=task_id(3)), sent(2, parent=task_id(1)), sent(3, parent=task_id(2))])
    past.recorded.record(sent(4, parent=task_id(4)))
    past.archive()
    assert drawn(await past.history.tree(task_id(1), None)) == ("1", ("2", ("3",)))
    assert drawn(await past.history.tree(task_id(4), None)) == ("4",)


async def test_a_tree_is_bounded_in_depth_number_and_size(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    past.recorded.record(sent(1), *(sent(number, parent=task_id(number - 1)) for number in range(2, 101)))
    past.archive()
    node, depth = await past.history.tree(task_id(1), None), 0
    while node.children:
        (node,), depth = node.children, depth + 1
    assert depth == TREE_DEPTH_MAX
    monkeypatch.setattr(sql, "TREE_NODES_MAX", 3)
    assert drawn(await past.history.tree(task_id(1), None)) == ("1", ("2", ("3",)))
    monkeypatch.setattr(sql, "TREE_BYTES_MAX", 600)
    assert drawn(await past.history.tree(task_id(1), None)) == ("1", ("2",))


# The audit.


@pytest.fixture
def trail(past: Past) -> Past:
    """Twelve rows, by Alice and Bob in turn, one second apart."""
    for number in range(1, 13):
        issuer = BOB if number % 2 == 0 else ALICE
        past.recorded.record(past.recorded.audited(issuer, f"row-{number}", START_MS + 1_000 * number))
    past.archive()
    return past


async def indices(past: Past, issuer: PublicKey | None, limit: int, since_ms: int | None = None) -> list[int]:
    return [row.index for row in await past.history.audit_recent(issuer, limit, since_ms)]


async def test_recent_audit_rows_are_the_newest_that_pass_oldest_first(trail: Past) -> None:
    assert await indices(trail, None, 3) == [10, 11, 12]
    assert await indices(trail, BOB.pubkey, 3) == [8, 10, 12]
    assert await indices(trail, BOB.pubkey, 2, START_MS + 5_000) == [10, 12]
    assert await indices(trail, ALICE.pubkey, 9, START_MS + 9_000) == [9, 11]
    assert await indices(trail, None, 9, START_MS + 99_000) == []
    assert await indices(trail, PublicKey("stranger"), 9) == []
    (row,) = await trail.history.audit_recent(None, 1, None)
    assert (row.timestamp_ms, "row-12" in row.row) == (START_MS + 12_000, True)


async def test_a_clock_that_was_set_back_hides_no_row(past: Past) -> None:
    for second in (5, 9, 2, 7):
        past.recorded.record(past.recorded.audited(ALICE, "row", START_MS + 1_000 * second))
    past.archive()
    assert await indices(past, None, 9, START_MS + 6_000) == [2, 4]
    assert await past.history.audit_before(START_MS + 4_000) is None
    before = await past.history.audit_before(START_MS + 6_000)
    assert before is not None
    assert before[:2] == (1, 1)


async def test_a_purge_would_drop_the_rows_before_a_time(trail: Past) -> None:
    assert await trail.history.audit_before(START_MS) is None
    before = await trail.history.audit_before(START_MS + 4_000)
    (stored,) = trail.db.execute("SELECT chain_hash FROM audit WHERE idx = 3").fetchone()
    assert before == (3, 3, stored)
    assert await trail.history.audit_before(START_MS + 99_000) == (12, 12, trail.recorded.audit_head.chain_hash)


async def purged(past: Past, through: int) -> None:
    (anchor_hash,) = past.db.execute("SELECT chain_hash FROM audit WHERE idx = ?", (through,)).fetchone()
    past.recorded.record(AuditPurged(through, anchor_hash), past.recorded.audited(ALICE, "purged"))
    past.archive()


async def test_an_untouched_chain_is_valid(trail: Past) -> None:
    head = trail.recorded.audit_head
    report = await trail.history.audit_verify(head)
    assert (report.valid, report.events, report.anchors, report.failures) == (True, 12, 12, ())
    assert report.root_hash_hex == head.chain_hash
    await purged(trail, 5)
    report = await trail.history.audit_verify(trail.recorded.audit_head)
    assert (report.valid, report.events, report.anchors) == (True, 8, 8)
    assert await trail.history.audit_before(0) is None


async def test_no_audit_at_all_is_valid(past: Past) -> None:
    report = await past.history.audit_verify(GENESIS)
    assert (report.valid, report.events) == (True, 0)


@pytest.mark.parametrize(
    ("tampering", "failures"),
    [
        ("UPDATE audit SET row = replace(row, 'row-4', 'row-X') WHERE idx = 4", ["row 4 was changed"]),
        ("UPDATE audit SET row = X'FF00' WHERE idx = 4", ["row 4 was changed"]),
        ("UPDATE audit SET row = 'no json' WHERE idx = 1", ["row 1 was changed"]),
        (f"UPDATE audit SET chain_hash = '{'0' * 64}' WHERE idx = 4", ["row 4 was changed", "row 5 was changed"]),
        ("UPDATE audit SET issuer = 'nobody' WHERE idx = 4", ["row 4 has another issuer or time than its text says"]),
        ("UPDATE audit SET ts_ms = 0 WHERE idx = 4", ["row 4 has another issuer or time than its text says"]),
        ("DELETE FROM audit WHERE idx = 4", ["row 4 is missing"]),
        ("DELETE FROM audit WHERE idx BETWEEN 1 AND 3", ["rows 1 to 3 are missing"]),
        ("DELETE FROM audit WHERE idx > 10", ["rows 11 to 12 are missing: the end was cut off"]),
        ("DELETE FROM audit", ["rows 1 to 12 are missing: the end was cut off"]),
        (
            "UPDATE audit SET row = (SELECT row FROM audit WHERE idx = 4) WHERE idx = 3",
            ["row 3 was changed"],
        ),
        (
            "UPDATE meta SET value = 3 WHERE key = 'audit_anchor_index'",
            ["row 1 is before the anchor at 3", "row 4 was changed, or the anchor before it"],
        ),
    ],
)
async def test_tampering_with_the_audit_is_found_and_named(trail: Past, tampering: str, failures: list[str]) -> None:
    trail.db.execute(tampering)
    report = await trail.history.audit_verify(trail.recorded.audit_head)
    assert not report.valid
    assert list(report.failures) == failures


async def test_a_chain_that_was_written_anew_to_its_end_is_not_the_ledgers(trail: Past, tmp_path: Path) -> None:
    forged = Recorded()
    for number in range(1, 13):
        forged.record(forged.audited(CAROL, f"forged-{number}"))
    trail.db.execute("DELETE FROM audit")
    trail.db.execute("UPDATE meta SET value = 0 WHERE key = 'archived_seq'")
    apply_lines(trail.db, forged.read_through(0, 12), 0)
    report = await trail.history.audit_verify(trail.recorded.audit_head)
    assert report.failures == ("row 12 is not the last one that the ledger wrote",)


async def test_a_wrong_anchor_after_a_purge_is_found(trail: Past) -> None:
    await purged(trail, 5)
    trail.db.execute("UPDATE meta SET value = printf('%064d', 7) WHERE key = 'audit_anchor_hash'")
    report = await trail.history.audit_verify(trail.recorded.audit_head)
    assert report.failures == ("row 6 was changed, or the anchor before it",)


async def test_rows_written_while_verifying_are_no_failure(trail: Past) -> None:
    head = trail.recorded.audit_head
    trail.recorded.record(trail.recorded.audited(ALICE, "newer"))
    trail.archive()
    report = await trail.history.audit_verify(head)
    assert (report.valid, report.events) == (True, 13)


async def test_many_findings_are_counted_and_not_all_listed(past: Past) -> None:
    past.recorded.record(*(past.recorded.audited(ALICE, "row") for _ in range(150)))
    past.archive()
    past.db.execute("UPDATE audit SET row = 'changed'")
    report = await past.history.audit_verify(past.recorded.audit_head)
    assert len(report.failures) == 101
    assert report.failures[-1] == "and 50 more"


async def test_what_was_verified_is_not_verified_again(trail: Past) -> None:
    assert (await trail.history.audit_verify_new(trail.recorded.audit_head)).events == 12
    assert (await trail.history.audit_verify_new(trail.recorded.audit_head)).events == 0
    trail.db.execute("UPDATE audit SET row = 'changed' WHERE idx = 4")
    trail.recorded.record(trail.recorded.audited(ALICE, "new"))
    trail.archive()
    report = await trail.history.audit_verify_new(trail.recorded.audit_head)
    assert (report.valid, report.events, report.anchors) == (True, 1, 1)
    assert not (await trail.history.audit_verify(trail.recorded.audit_head)).valid


async def test_new_rows_that_are_wrong_do_not_move_the_mark(trail: Past) -> None:
    await trail.history.audit_verify_new(trail.recorded.audit_head)
    trail.recorded.record(trail.recorded.audited(ALICE, "new"))
    trail.archive()
    trail.db.execute("UPDATE audit SET row = 'changed' WHERE idx = 13")
    for _ in range(2):
        report = await trail.history.audit_verify_new(trail.recorded.audit_head)
        assert report.failures == ("row 13 was changed, or the anchor before it",)


async def test_a_purge_past_the_mark_starts_at_its_anchor(trail: Past) -> None:
    await trail.history.audit_verify_new(AuditHead())
    await purged(trail, 10)
    report = await trail.history.audit_verify_new(trail.recorded.audit_head)
    assert (report.valid, report.events) == (True, 3)


async def test_a_longer_chain_is_verified_page_by_page(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "PAGE_ROWS", 7)
    past.recorded.record(*(past.recorded.audited(ALICE, "row") for _ in range(50)))
    past.archive()
    assert (await past.history.audit_verify(past.recorded.audit_head)).events == 50


# How it reads.


STATEMENTS = {
    "queue": sql.QUEUE[False].sql,
    "queue of a viewer": sql.QUEUE[True].sql,
    "recent tasks": sql.RECENT_TASKS[False].sql,
    "recent tasks of a viewer": sql.RECENT_TASKS[True].sql,
    "recent results": sql.RECENT_RESULTS[False].sql,
    "recent results of a viewer": sql.RECENT_RESULTS[True].sql,
    "show": sql.SHOW.sql,
    "lookup": sql.LOOKUP.sql,
    "parties": sql.PARTIES.sql,
    "steps": sql.STEPS.sql,
    "tree": sql.TREE.sql,
    "finished": sql.FINISHED.sql,
    "audit of an issuer": sql.AUDIT_RECENT[True].sql,
}
VALUES: dict[str, object] = {
    "before_ms": 9_000_000_000_000,
    "below": 9_000_000_000_000,
    "viewer": BOB.pubkey,
    "recipient": BOB.pubkey,
    "sender": None,
    "tenant": None,
    "issuer": BOB.pubkey,
    "limit": 10,
    "state_filter": None,
    "touched_by": None,
    "due_by": None,
    "node": NODE,
    "boot": BOOT,
    "task_id": task_id(1),
    "root": task_id(1),
    "updates_max": 10,
    "until": None,
    "leases_max": 10,
    "depth_max": 64,
    "nodes_max": 100,
    "bytes_max": 1_000_000,
    "after": 1 << 60,
    "since_ms": 0,
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_no_read_walks_a_whole_table(past: Past, name: str) -> None:
    plan = [row[3] for row in past.db.execute("EXPLAIN QUERY PLAN " + STATEMENTS[name], VALUES)]
    assert any("USING" in line for line in plan)
    whole = re.compile(r"SCAN (a2a_tasks|ids_new|ids_recent|ids_old|requests|updates|handovers|audit|[truai])$")
    assert [line for line in plan if whole.match(line)] == []


def cost(db: sqlite3.Connection, statement: str) -> int:
    """How many steps the database's machine takes; the same on any computer."""
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    db.set_progress_handler(count, 1)
    db.execute(statement, VALUES).fetchall()
    db.set_progress_handler(None, 1)
    return steps


async def test_the_cost_of_a_read_does_not_grow_with_history(past: Past) -> None:
    # A few of everything that is live, then the same after a long history.
    past.recorded.each([sent(1), sent(2), leased(2), sent(3), settled(3, 2)])
    past.recorded.record(*(sent(number) for number in range(10, 30)))
    past.archive()
    before = {name: cost(past.db, statement) for name, statement in STATEMENTS.items()}
    for first in range(1_000, 11_000, 1_000):
        numbers = range(first, first + 1_000)
        past.recorded.record(*(sent(number) for number in numbers))
        past.recorded.record(*(settled(number, 2) for number in numbers))
        past.recorded.record(*(ResultDrained(task_id(number)) for number in numbers))
    past.archive()
    after = {name: cost(past.db, statement) for name, statement in STATEMENTS.items()}
    # An id that has become old is two tables further, and no more than that.
    assert past.db.execute("SELECT min(task_id) FROM ids_new").fetchone() > (task_id(1),)
    by_id = {"show", "lookup", "parties", "steps", "tree"}
    assert {name: after[name] - before[name] for name in by_id} == dict.fromkeys(
        by_id, after["lookup"] - before["lookup"]
    )
    assert after["lookup"] - before["lookup"] <= 10
    assert {name: after[name] for name in after if name not in by_id} == {
        name: before[name] for name in before if name not in by_id
    }


async def test_reads_run_beside_a_batch_that_is_being_written(past: Past) -> None:
    past.recorded.record(sent(1))
    past.archive()
    past.db.execute("BEGIN IMMEDIATE")
    past.db.execute("UPDATE a2a_tasks SET ledger_state = 'parked'")
    assert await asyncio.wait_for(past.queue(), BOUND_S) == ["1"]
    past.db.execute("ROLLBACK")


async def test_an_archive_that_cannot_be_read_is_a_refusal(past: Past) -> None:
    past.db.execute("DROP TABLE requests")
    with pytest.raises(Unavailable) as refusal:
        await past.history.recent_tasks(None, 1)
    assert refusal.value.code == "archive_unreadable"


async def test_a_reader_cannot_write(past: Past) -> None:
    def write(db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM audit")

    with pytest.raises(Unavailable, match="readonly"):
        await past.history._run(write)
