"""Rule 7: unsafe work is never redelivered by the system; people repair, and a gate retries what was declared safe."""

from __future__ import annotations

import asyncio

import pytest

from covenant.ledger.machine.commands import Access, Cancel, Release
from covenant.ledger.machine.states import State
from covenant.model.grant import REQUEUE_ACTION, Scope
from covenant.model.ids import LeaseId, TaskId
from covenant.model.retry_policy import Posture, RetryPolicy, SkipReason
from tests.ledger_contract.driver import LedgerDriver, refused
from tests.ledger_contract.grants import give
from tests.ledger_contract.samples import (
    ALICE,
    BOB,
    CAROL,
    OPERATOR,
    make_grant,
    make_task,
    ok,
    same_work,
    task_id,
    unsafe,
)
from tests.ledger_contract.suite import Suite

OTHER_LEASE = LeaseId("99999999-9999-4999-8999-999999999999")
STALE_MS = 300_000
ENABLED = RetryPolicy(enabled=True, max_requeues=100)
DRY = RetryPolicy(max_requeues=100)


def requeue_access(which: TaskId | None = None) -> Access:
    return Access(caller=OPERATOR, actions=(REQUEUE_ACTION,), scope_id="a2a-auto-retry", what="retry", task_id=which)


class RepairSuite(Suite):
    @pytest.mark.parametrize("posture", list(Posture))
    async def test_a_requeue_puts_leased_work_back_and_says_which_attempt_it_ended(
        self, driver: LedgerDriver, posture: Posture
    ) -> None:
        leased = await driver.taken(make_task())
        outcome = await driver.requeue(task_id(1), posture=posture, lease_id=leased.lease.lease_id)
        assert (outcome.action, outcome.state, outcome.attempt) == ("requeued", State.QUEUED, 1)
        assert (await driver.take_one()).lease.attempt == 2

    async def test_a_forced_error_settles_and_is_drained_as_an_error(self, driver: LedgerDriver) -> None:
        await driver.taken(make_task())
        outcome = await driver.force_error(task_id(1), "the holder burned down")
        assert (outcome.action, outcome.state, outcome.attempt) == ("forced_error", State.SETTLED.wire_name, 1)
        (result,) = await driver.drain()
        assert result == outcome.result
        assert (result.status, result.error_message) == ("error", "the holder burned down")

    async def test_a_repair_that_names_another_lease_changes_nothing(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        for repair in (
            driver.requeue(task_id(1), lease_id=OTHER_LEASE),
            driver.force_error(task_id(1), lease_id=OTHER_LEASE),
        ):
            with refused("lease_mismatch", 409):
                await repair
        assert (await driver.entry(task_id(1))).lease == leased.lease

    @pytest.mark.parametrize("state", ["queued", "parked", "result_pending", "resolved", "archived"])
    async def test_only_a_lease_can_be_repaired(self, driver: LedgerDriver, state: str) -> None:
        await driver.send(make_task())
        if state != "queued":
            leased = await driver.take_one()
            await (driver.park(leased) if state == "parked" else driver.finish(leased, ok(task_id(1))))
        if state in ("resolved", "archived"):
            await driver.drain()
        if state == "archived":
            await driver.ledger.audit_verify()  # waits for the archive
        for repair in (driver.requeue(task_id(1)), driver.force_error(task_id(1))):
            with refused("not_leased", 409):
                await repair

    async def test_a_repair_of_an_unknown_task_is_refused(self, driver: LedgerDriver) -> None:
        with refused("unknown_task", 404):
            await driver.requeue(task_id(404))

    async def test_a_repairs_audit_row_names_the_lease_also_when_the_request_named_none(
        self, driver: LedgerDriver
    ) -> None:
        first = await driver.taken(make_task(1))
        await driver.requeue(task_id(1), reason="gone")
        second = await driver.taken(make_task(2, recipient=CAROL))
        await driver.force_error(task_id(2))
        requeued, forced = [
            row["kind"] for row in await driver.audit_rows() if row["kind"]["type"] == "a2a_repair_applied"
        ]
        assert (requeued["action"], requeued["lease_id"]) == ("requeue", first.lease.lease_id)
        assert (requeued["reason"], requeued["duplicate_risk"]) == ("gone", "operator_accepted")
        assert (forced["action"], forced["lease_id"]) == ("force_error", second.lease.lease_id)

    async def test_a_release_and_a_cancel_that_are_audited_name_the_lease(self, driver: LedgerDriver) -> None:
        first = await driver.taken(make_task(1))
        lease_id = first.lease.lease_id
        await driver.ledger.commit(
            Release(task_id=task_id(1), holder=BOB, lease_id=lease_id, reason="not begun", audited=True)
        )
        second = await driver.take_one()
        await driver.ledger.commit(Cancel(task_id=task_id(1), by=ALICE, reason="not needed", audited=True))
        rows = [row["kind"] for row in await driver.audit_rows() if row["kind"]["type"] == "a2a_repair_applied"]
        assert [(row["action"], row["reason"], row["lease_id"], row["attempt"]) for row in rows] == [
            ("release", "not begun", lease_id, 1),
            ("cancel", "not needed", second.lease.lease_id, 2),
        ]

    async def test_a_dry_run_says_what_an_enabled_run_then_does(self, driver: LedgerDriver) -> None:
        await driver.taken(same_work(1, "a"))
        await driver.taken(make_task(2))
        await driver.taken(make_task(3, idempotency=unsafe()))
        driver.clock.advance(STALE_MS)
        dry = await driver.retry(DRY)
        assert dry.requeued == ()
        assert [requeued.task_id for requeued in dry.would_requeue] == [task_id(1)]
        assert (await driver.entry(task_id(1))).state is State.LEASED
        enabled = await driver.retry(ENABLED)
        assert enabled.requeued == dry.would_requeue
        assert enabled.would_requeue == ()
        reasons = {skip.task_id: skip.reason for skip in enabled.skipped}
        assert reasons == {
            task_id(2): SkipReason.MISSING_IDEMPOTENCY,
            task_id(3): SkipReason.UNSAFE_DUPLICATE_SAFETY,
        }
        dry_reasons = {skip.task_id: skip.reason for skip in dry.skipped}
        assert dry_reasons == {**reasons, task_id(1): SkipReason.DISABLED}

    async def test_unsafe_work_is_never_redelivered_however_old_and_often_asked(self, driver: LedgerDriver) -> None:
        await driver.taken(make_task(1))
        await driver.taken(make_task(2, idempotency=unsafe()))
        for _ in range(5):
            driver.clock.advance(10 * STALE_MS)
            await driver.sweep()
            assert (await driver.retry(ENABLED)).requeued == ()
            assert await driver.take(count=10) == ()

    async def test_a_young_lease_is_left_alone_and_a_renewed_one_is_young(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(same_work(1))
        driver.clock.advance(STALE_MS - 1)
        (skip,) = (await driver.retry(ENABLED)).skipped
        assert (skip.reason, skip.lease_age_ms) == (SkipReason.LEASE_TOO_YOUNG, STALE_MS - 1)
        await driver.renew(leased)
        driver.clock.advance(1)
        (skip,) = (await driver.retry(ENABLED)).skipped
        assert (skip.reason, skip.lease_age_ms) == (SkipReason.LEASE_TOO_YOUNG, 1)

    async def test_the_gate_gives_up_after_so_many_attempts(self, driver: LedgerDriver) -> None:
        await driver.send(same_work(1))
        for attempt in (1, 2):
            assert (await driver.take_one()).lease.attempt == attempt
            driver.clock.advance(STALE_MS)
            assert len((await driver.retry(ENABLED)).requeued) == 1
        await driver.take_one()
        driver.clock.advance(STALE_MS)
        report = await driver.retry(ENABLED)
        assert report.requeued == ()
        assert [skip.reason for skip in report.skipped] == [SkipReason.MAX_ATTEMPTS_REACHED]

    async def test_one_pass_requeues_at_most_so_many_and_the_oldest_first(self, driver: LedgerDriver) -> None:
        for number in (1, 2, 3):
            await driver.taken(same_work(number, f"key-{number}"))
            driver.clock.advance(1)
        driver.clock.advance(STALE_MS)
        report = await driver.retry(RetryPolicy(enabled=True, max_requeues=2))
        assert [requeued.task_id for requeued in report.requeued] == [task_id(1), task_id(2)]
        assert [skip.reason for skip in report.skipped] == [SkipReason.LIMIT_REACHED]

    async def test_queued_work_never_hides_a_stale_lease_from_the_gate_or_from_the_queue(
        self, driver: LedgerDriver
    ) -> None:
        await driver.taken(same_work(1))
        await asyncio.gather(*(driver.send(make_task(number)) for number in range(10, 310)))
        driver.clock.advance(STALE_MS)
        report = await driver.retry(RetryPolicy(scan_limit=5))
        assert (report.considered, [would.task_id for would in report.would_requeue]) == (1, [task_id(1)])
        assert (await driver.queue())[0].task.id == task_id(1)

    async def test_a_pass_looks_at_so_many_leases_and_begins_with_the_longest_untouched(
        self, driver: LedgerDriver
    ) -> None:
        first = await driver.taken(same_work(1, "a"))
        await driver.taken(same_work(2, "b"))
        driver.clock.advance(1)
        await driver.renew(first)
        driver.clock.advance(STALE_MS)
        report = await driver.retry(RetryPolicy(scan_limit=1))
        assert (report.considered, [would.task_id for would in report.would_requeue]) == (1, [task_id(2)])

    async def test_a_grant_pinned_to_one_task_lets_the_gate_touch_only_that_one(self, driver: LedgerDriver) -> None:
        await give(driver, make_grant(OPERATOR, REQUEUE_ACTION, pins=Scope(task_id=task_id(2))))
        await driver.taken(same_work(1, "a"))
        await driver.taken(same_work(2, "b"))
        driver.clock.advance(STALE_MS)
        report = await driver.retry(ENABLED, access=requeue_access())
        assert [requeued.task_id for requeued in report.requeued] == [task_id(2)]
        assert [skip.reason for skip in report.skipped] == [SkipReason.CAPABILITY_SCOPE_MISMATCH]

    async def test_an_enabled_pass_needs_the_capability(self, driver: LedgerDriver) -> None:
        await driver.taken(same_work(1))
        driver.clock.advance(STALE_MS)
        with refused("capability_missing", 403):
            await driver.retry(ENABLED, access=requeue_access())
        assert (await driver.entry(task_id(1))).state is State.LEASED

    async def test_each_requeue_of_the_gate_and_each_scheduled_pass_leaves_a_row(self, driver: LedgerDriver) -> None:
        await driver.taken(same_work(1))
        driver.clock.advance(STALE_MS)
        await driver.retry(ENABLED, scheduled=True)
        await driver.retry(ENABLED, scheduled=True)
        rows = [row["kind"] for row in await driver.audit_rows()]
        assert [row["action"] for row in rows if row["type"] == "a2a_repair_applied"] == ["auto_requeue"]
        scans = [row for row in rows if row["type"] == "a2a_auto_retry_scheduler_scan"]
        assert [scan["requeued"] for scan in scans] == [1, 0]

    async def test_work_requeued_by_the_gate_can_be_answered_by_whoever_held_it(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(same_work(1))
        driver.clock.advance(STALE_MS)
        await driver.retry(ENABLED)
        await driver.finish(leased, ok(task_id(1)))
        assert await driver.take(BOB) == ()
        assert len(await driver.drain()) == 1

    async def test_a_repair_is_for_whoever_has_part_in_the_task(self, driver: LedgerDriver) -> None:
        await driver.taken(make_task())
        shown = await driver.ledger.show(task_id(1), CAROL.pubkey, 10)
        assert shown is None
