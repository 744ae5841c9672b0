"""What the daemon does by itself: sweeping with an eye on the clock, retrying through the gate, compacting."""

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from covenant.daemon.environment import now_ms
from covenant.daemon.keystore import OPERATOR_DISPLAY, admit_operator
from covenant.daemon.schedulers import ArchiveReport, Maintenance, RetryScheduler, Sweeper
from covenant.daemon.telemetry import Log
from covenant.exchange.access.identities import IdentityAdmin, operator_agent
from covenant.exchange.access.principals import IdentityAuth, Principal
from covenant.exchange.mailbox import MailboxExchange
from covenant.ledger.clock import PAUSE_MS
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.embedded.open import memory_ledger, open_ledger
from covenant.ledger.machine.commands import Accept, Swept
from covenant.model.clock_steps import STEP_MS
from covenant.model.errors import CovenantError, Unavailable
from covenant.model.ids import AgentId, TaskId
from covenant.model.retry_policy import RetryPolicy
from covenant.model.task import DuplicateSafety, Idempotency, Task, fingerprint
from covenant.seal.keys import new_private_key, new_token, public_key
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.fake_clock import FakeClock
from tests.ledger_contract.samples import make_task, task_id
from tests.waits import BOUND_S

BOB = AgentId("bob@host", public_key(new_private_key()))


class Clocks:
    """A wall clock that can be set, beside a steady one."""

    def __init__(self) -> None:
        self.wall_ms = 1_800_000_000_000
        self.steady_ms = 5_000

    def pass_time(self, ms: int) -> None:
        self.wall_ms += ms
        self.steady_ms += ms

    def set_wall(self, ms: int) -> None:
        self.wall_ms += ms


class SchedulersUnderTest:
    """An operator who may send to bob, on a ledger in memory."""

    def __init__(self, ledger: EmbeddedLedger, clocks: Clocks, operator: Principal, registry: IdentityAdmin) -> None:
        self.ledger = ledger
        self.clocks = clocks
        self.operator = operator
        self.registry = registry
        self.exchange = MailboxExchange(ledger, operator.agent)
        self._sent = 0

    async def send(self, *, deadline_in_ms: int | None = None, key: str | None = None) -> TaskId:
        self._sent += 1
        task = Task(
            id=TaskId(f"00000000-0000-4000-8000-{self._sent:012d}"),
            sender=self.operator.agent,
            recipient=BOB,
            intent_text="work",
            deadline_ms=None if deadline_in_ms is None else self.clocks.wall_ms + deadline_in_ms,
            idempotency=Idempotency(DuplicateSafety.IDEMPOTENT, key) if key else None,
        )
        return (await self.exchange.accept(self.operator, task)).task_id

    async def state(self, task_id: TaskId) -> str:
        return (await self.exchange.show(self.operator, task_id)).state

    async def audit_types(self) -> list[str]:
        rows = await self.ledger.audit_recent(None, 100, None)
        return [row.row for row in rows]


@pytest.fixture
async def under_test() -> AsyncIterator[SchedulersUnderTest]:
    clocks = Clocks()
    ledger = await memory_ledger(clock=lambda: clocks.wall_ms, monotonic_ms=lambda: clocks.steady_ms)
    key = new_private_key()
    operator = operator_agent(OPERATOR_DISPLAY, key)
    saved: list[str] = []
    principal = await admit_operator(ledger, operator, new_token(), saved.append)
    registry = IdentityAdmin(ledger, IdentityAuth(ledger, operator), operator, key, saved.append)
    await registry.grant(principal, "a2a.send.bob@host")
    yield SchedulersUnderTest(ledger, clocks, principal, registry)
    await ledger.close()


def sweeper(under_test: SchedulersUnderTest) -> Sweeper:
    return Sweeper(under_test.ledger, under_test.operator.agent, log=Log())


async def test_a_queued_task_past_its_deadline_is_settled_by_the_next_sweep(under_test: SchedulersUnderTest) -> None:
    task_id = await under_test.send(deadline_in_ms=1_000)
    sweep = sweeper(under_test)
    swept = await sweep.step()
    assert swept is not None
    assert swept.expired == ()
    under_test.clocks.pass_time(2_000)
    swept = await sweep.step()
    assert swept is not None
    assert swept.expired == (task_id,)
    assert await under_test.state(task_id) == "result_pending"


async def test_a_backlog_is_swept_in_one_step(under_test: SchedulersUnderTest) -> None:
    sent = [await under_test.send(deadline_in_ms=1_000) for _ in range(250)]
    sweep = sweeper(under_test)
    under_test.clocks.pass_time(2_000)
    swept = await sweep.step()
    assert swept is not None
    assert not swept.more
    assert [await under_test.state(task_id) for task_id in sent] == ["result_pending"] * 250


@pytest.mark.parametrize("step_ms", [STEP_MS + 1, -STEP_MS - 1], ids=["forward", "back"])
async def test_a_step_of_the_clock_pauses_the_sweep_and_is_reported(
    under_test: SchedulersUnderTest, step_ms: int
) -> None:
    task_id = await under_test.send(deadline_in_ms=1_000)
    sweep = sweeper(under_test)
    under_test.clocks.set_wall(step_ms)
    assert await sweep.step() is None
    assert await under_test.state(task_id) == "queued"
    rows = [row for row in await under_test.audit_types() if "clock_stepped" in row]
    assert len(rows) == 1
    assert f'"step_ms":{step_ms}' in rows[0]
    under_test.clocks.pass_time(PAUSE_MS - 1)
    assert await sweep.step() is None
    under_test.clocks.pass_time(1)
    assert await sweep.step() is not None


async def test_a_step_of_the_clock_while_a_row_is_written_has_a_row_too(
    under_test: SchedulersUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, sweep = under_test.ledger.commit, sweeper(under_test)

    async def step_and_commit(command: Any) -> Any:
        monkeypatch.undo()
        under_test.clocks.set_wall(-2 * STEP_MS)
        under_test.ledger.now_ms()
        return await commit(command)

    monkeypatch.setattr(under_test.ledger, "commit", step_and_commit)
    under_test.clocks.set_wall(3 * STEP_MS)
    for _ in range(2):
        assert await sweep.step() is None
    assert await steps_in_audit(under_test) == [3 * STEP_MS, -2 * STEP_MS]


async def test_a_step_whose_row_was_written_is_not_written_again_after_a_refusal(
    under_test: SchedulersUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, sweep, rows = under_test.ledger.commit, sweeper(under_test), list[object]()

    async def refuse_the_second(command: Any) -> Any:
        rows.append(command)
        if len(rows) == 2:
            raise Unavailable("storage_failed", "the disk is full")
        return await commit(command)

    monkeypatch.setattr(under_test.ledger, "commit", refuse_the_second)
    for step_ms in (3 * STEP_MS, -2 * STEP_MS):
        under_test.clocks.set_wall(step_ms)
        under_test.ledger.now_ms()
    with pytest.raises(Unavailable):
        await sweep.step()
    assert await sweep.step() is None
    assert await steps_in_audit(under_test) == [3 * STEP_MS, -2 * STEP_MS]


async def steps_in_audit(under_test: SchedulersUnderTest) -> list[int]:
    """The steps that have a row, in the order of their rows."""
    return [int(found[1]) for row in await under_test.audit_types() if (found := re.search(r'"step_ms":(-?\d+)', row))]


async def test_a_clock_that_is_set_right_again_has_expired_nothing(under_test: SchedulersUnderTest) -> None:
    task_id = await under_test.send(deadline_in_ms=PAUSE_MS * 10)
    sweep = sweeper(under_test)
    under_test.clocks.set_wall(PAUSE_MS * 60)
    assert await sweep.step() is None
    under_test.clocks.set_wall(-PAUSE_MS * 60)
    assert await sweep.step() is None
    under_test.clocks.pass_time(PAUSE_MS)
    swept = await sweep.step()
    assert swept is not None
    assert swept.expired == ()
    assert await under_test.state(task_id) == "queued"


async def test_a_drift_below_a_minute_is_no_step(under_test: SchedulersUnderTest) -> None:
    sweep = sweeper(under_test)
    under_test.clocks.set_wall(STEP_MS)
    assert await sweep.step() is not None


def retries(under_test: SchedulersUnderTest, **policy: int) -> RetryScheduler:
    return RetryScheduler(
        under_test.ledger, under_test.operator, RetryPolicy(enabled=True, **policy), interval_ms=1, log=Log()
    )


async def test_a_scheduled_retry_needs_the_capability_and_leaves_its_row_without_it(
    under_test: SchedulersUnderTest,
) -> None:
    assert await retries(under_test).step() is None
    rows = [row for row in await under_test.audit_types() if "a2a_auto_retry_scheduler_scan" in row]
    assert len(rows) == 1
    assert "a2a.repair.requeue" in rows[0]


async def test_a_scheduled_retry_requeues_stale_idempotent_work_only(under_test: SchedulersUnderTest) -> None:
    await under_test.registry.grant(under_test.operator, "a2a.repair.requeue")
    unsafe, safe = await under_test.send(), await under_test.send(key="k")
    await under_test.exchange.take(under_test.operator, everyone=True, count=2)
    report = await retries(under_test, min_lease_age_ms=1_000).step()
    assert report is not None
    assert report.requeued == ()
    under_test.clocks.pass_time(1_000)
    report = await retries(under_test, min_lease_age_ms=1_000).step()
    assert report is not None
    assert [each.task_id for each in report.requeued] == [safe]
    assert [(each.task_id, each.reason) for each in report.skipped] == [(unsafe, "missing_idempotency")]


async def test_the_retry_scheduler_sleeps_before_its_first_pass(under_test: SchedulersUnderTest) -> None:
    scheduler = RetryScheduler(under_test.ledger, under_test.operator, RetryPolicy(), interval_ms=3_600_000, log=Log())
    running = asyncio.ensure_future(scheduler.run())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not any("scheduler_scan" in row for row in await under_test.audit_types())


async def test_maintenance_reports_what_was_dropped_and_survives_a_failure() -> None:
    outcomes: list[int | CovenantError | None] = [None, 3, CovenantError("no room")]

    async def maintain() -> int | None:
        outcome = outcomes.pop(0)
        if isinstance(outcome, CovenantError):
            raise outcome
        return outcome

    maintenance = Maintenance(maintain, log=Log(), interval_ms=1)
    assert [await maintenance.step() for _ in range(3)] == [None, 3, None]


async def test_a_stopping_mailbox_hands_out_nothing_and_takes_results(under_test: SchedulersUnderTest) -> None:
    await under_test.registry.grant(under_test.operator, "a2a.respond.operator@local")
    await under_test.send()
    await under_test.send()
    leased = (await under_test.exchange.take(under_test.operator, everyone=True)).tasks[0]
    under_test.exchange.leasing = False
    with pytest.raises(Unavailable) as refused:
        await under_test.exchange.take(under_test.operator, everyone=True)
    assert refused.value.code == "stopping"
    assert (await under_test.exchange.renew(under_test.operator, leased.task.id, leased.lease.lease_id)).attempt == 1


async def test_what_the_archive_sets_aside_is_in_the_log_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock = FakeClock()
    ledger = await open_ledger(tmp_path, clock=clock)
    await ledger.close()
    with closing(sqlite3.connect(tmp_path / "archive.db")) as db:
        db.execute("INSERT INTO ids_new VALUES (?, 1)", (task_id(1),))
        db.commit()
    ledger = await open_ledger(tmp_path, clock=clock)
    driver, report = LedgerDriver(ledger, clock), ArchiveReport(ledger, log=Log(), interval_ms=1)
    try:
        await report.step()
        assert caplog.records == []
        await driver.send(make_task(1))
        await driver.queue()
        await report.step()
        await report.step()
        assert sum("archive.records_set_aside" in record.getMessage() for record in caplog.records) == 1
    finally:
        await ledger.close()


async def test_a_wait_ends_at_its_time_and_not_at_the_next_round() -> None:
    """The rounds of this sweeper are an hour apart, so that nothing but the timer of the first wait can end these."""
    ledger = await memory_ledger(clock=now_ms)
    running = asyncio.create_task(Sweeper(ledger, BOB, log=Log(), interval_ms=3_600_000).run())
    try:
        for number, later_ms in enumerate((3_000_000, 60, 30), 1):
            # Each is earlier than those before, which the sweeper waits for already.
            task = make_task(number, recipient=BOB, not_before_ms=now_ms() + later_ms)
            await ledger.commit(Accept(task=task, digest=fingerprint(task)[0]))
            await asyncio.sleep(0.01)
        async with asyncio.timeout(BOUND_S):
            while (await ledger.counts()).queued < 2:  # noqa: ASYNC110  (time must pass)
                await asyncio.sleep(0.01)
        assert (await ledger.counts()).parked == 1
    finally:
        running.cancel()
        await asyncio.wait((running,))
        await ledger.close()


async def test_what_cannot_be_acted_on_is_tried_again_at_the_next_round_and_not_at_once(
    under_test: SchedulersUnderTest,
) -> None:
    await under_test.send(deadline_in_ms=1_000)
    under_test.clocks.set_wall(STEP_MS + 1)
    steps = 0

    class CountedSweeper(Sweeper):
        async def step(self) -> Swept | None:
            nonlocal steps
            steps += 1
            return await super().step()

    running = asyncio.create_task(
        CountedSweeper(under_test.ledger, under_test.operator.agent, log=Log(), interval_ms=3_600_000).run()
    )
    await asyncio.sleep(0.2)
    running.cancel()
    assert steps <= 1
