"""Schedulers, the daemon's work on timers: sweep, retry, compact, and erase records past their retention.

Most schedulers have a `step` for one round, which `run` repeats until it is canceled. A step that is refused is logged,
and tried again at its next time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, Protocol

import msgspec

from covenant.daemon.settings import RetentionSettings
from covenant.daemon.telemetry import Log, Telemetry
from covenant.exchange.access.identities import IdentityAdmin
from covenant.exchange.access.principals import Principal
from covenant.exchange.repair_service import retry_stale
from covenant.exchange.stored_files import StoredFiles
from covenant.ledger.contract.blobs import BlobUsage, Collected
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.retention import Erased, EraseTasks
from covenant.ledger.machine.commands import Sweep, Swept
from covenant.ledger.machine.identity_commands import WriteAuditRow
from covenant.model.errors import CovenantError, Refusal
from covenant.model.ids import AgentId
from covenant.model.retry_policy import RetryPolicy, RetryReport
from covenant.model.settings import HOUR_MS
from covenant.model.tenants import TenantLimits

SWEEPS_AT_ONCE_MAX: Final = 100
LEAD_CHECK_S: Final = 0.25
BATCHES_IN_PASS_MAX: Final = 2_000
"""Tasks beyond this wait for the next pass."""
BATCH_PAUSE_S: Final = 0.01
"""The pause between two batches, which lets records and reads in between."""


class Scheduler(Protocol):
    async def run(self) -> None:
        """Until canceled."""


class Singleton:
    """A scheduler at one of the daemons that share a ledger. When that daemon is lost, another one goes on with it."""

    def __init__(self, name: str, scheduler: Scheduler, ledger: Ledger) -> None:
        self._name = name
        self.scheduler = scheduler
        self._ledger = ledger

    async def run(self) -> None:
        while True:
            if self._ledger.leads(self._name):
                await self._lead()
            await asyncio.sleep(LEAD_CHECK_S)

    async def _lead(self) -> None:
        """Runs the scheduler while this daemon holds it. Raises the scheduler's faults."""
        running = asyncio.ensure_future(self.scheduler.run())
        try:
            while self._ledger.leads(self._name) and not running.done():
                await asyncio.wait((running,), timeout=LEAD_CHECK_S)
        finally:
            running.cancel()
            await asyncio.wait((running,))
        if not running.cancelled():
            running.result()


class Sweeper:
    """Settles tasks past their deadline, timeout or hold, and wakes tasks whose time has come.

    Does neither while the ledger's clock is paused after a step. Each step of the clock becomes a row in the audit. The
    clock is read in each round, so that a slow drift does not look like a step.
    """

    def __init__(self, ledger: Ledger, operator: AgentId, *, log: Log, interval_ms: int = 1_000) -> None:
        self._ledger = ledger
        self._operator = operator
        self._log = log
        self._interval_ms = interval_ms
        self._steps_noted = 0
        self._refused: str | None = None

    async def step(self) -> Swept | None:
        """One round; None while paused."""
        paused = self._ledger.clock.is_paused()
        await self._note_steps()
        if paused:
            return None
        total = Swept()
        for _ in range(SWEEPS_AT_ONCE_MAX):
            swept = await self._ledger.commit(Sweep())
            total = Swept(
                expired=total.expired + swept.expired,
                timed_out=total.timed_out + swept.timed_out,
                forgotten=total.forgotten + swept.forgotten,
                uncached=total.uncached + swept.uncached,
                more=swept.more,
                interrupted=total.interrupted + swept.interrupted,
                woken=total.woken + swept.woken,
            )
            if not swept.more:
                break
        counts = {
            "expired": len(total.expired),
            "timed_out": len(total.timed_out),
            "interrupted": len(total.interrupted),
            "forgotten": total.forgotten,
        }
        if any(counts.values()):
            self._log.info("sweep.settled", **counts)
        return total

    async def _note_steps(self) -> None:
        clock = self._ledger.clock
        if clock.steps_total == self._steps_noted:
            return
        steps = clock.ages.steps[self._steps_noted - clock.steps_total :]
        self._steps_noted = clock.steps_total - len(steps)
        for step in steps:
            row = {"type": "clock_stepped", "step_ms": step.step_ms, "paused_ms": clock.pause_ms}
            await self._ledger.commit(WriteAuditRow(by=self._operator, row=row))
            self._steps_noted += 1  # only what was written: the clock may step again, or the next row be refused

    async def run(self) -> None:
        """Runs a round at each interval, and whenever a task's time is over."""
        loop, interval_s = asyncio.get_running_loop(), self._interval_ms / 1000
        next_s = loop.time() + interval_s
        while True:
            due = acted = False
            try:
                due = await self._ledger.overdue(max(0, round((next_s - loop.time()) * 1000)))
                if not due and loop.time() < next_s:
                    continue
                swept = await self.step()
                acted = swept is not None and bool(swept.woken or swept.expired or swept.timed_out or swept.interrupted)
                self._refused = None
            except Refusal as refusal:
                # A line each second while a disk is full would say nothing more.
                if refusal.code != self._refused:
                    self._log.warning("sweep.refused", code=refusal.code, reason=refusal.message)
                self._refused = refusal.code
            if self._refused is not None or (due and not acted):
                # Nothing can be done now: the clock is paused, the disk is full, or another node was faster.
                await asyncio.sleep(interval_s)
            next_s = loop.time() + interval_s


class RetryScheduler:
    """Runs the retry gate on a timer, with the operator's capability. Each pass leaves a summary row in the audit."""

    def __init__(self, ledger: Ledger, operator: Principal, policy: RetryPolicy, *, interval_ms: int, log: Log) -> None:
        self._ledger = ledger
        self._operator = operator
        self._policy = policy
        self._interval_ms = interval_ms
        self._log = log

    async def step(self) -> RetryReport | None:
        """One pass; None if it was refused."""
        try:
            report = await retry_stale(self._ledger, self._operator, self._policy, scheduled=True)
        except Refusal as refusal:
            self._log.warning("retry.refused", code=refusal.code, reason=refusal.message)
            return None
        self._log.info(
            "retry.scanned",
            considered=report.considered,
            requeued=len(report.requeued),
            skipped=len(report.skipped),
        )
        return report

    async def run(self) -> None:
        """Sleeps first, so that after a start every lease holder has time to come back."""
        while True:
            await asyncio.sleep(self._interval_ms / 1000)
            await self.step()


class ArchiveReport:
    """Logs when the archive sets a record aside, cannot be written, and can be written again."""

    def __init__(self, ledger: Ledger, *, log: Log, interval_ms: int) -> None:
        self._ledger = ledger
        self._log = log
        self._interval_ms = interval_ms
        self._rejected = 0
        self._failure: str | None = None

    async def step(self) -> None:
        counts = await self._ledger.counts()
        if counts.rejected != self._rejected:
            self._rejected = counts.rejected
            self._log.warning("archive.records_set_aside", count=self._rejected, look="covenant doctor")
        if counts.history_failure == self._failure:
            return
        self._failure = counts.history_failure
        if self._failure is not None:
            self._log.warning("archive.failing", reason=self._failure, archived_seq=counts.gauges["archived_seq"])
        else:
            self._log.info("archive.recovered", archived_seq=counts.gauges["archived_seq"])

    async def run(self) -> None:
        """Begins at once: records that an earlier run set aside are logged at the start."""
        while True:
            await self.step()
            await asyncio.sleep(self._interval_ms / 1000)


class AuditAnchors:
    """Writes the heads of all chains of the audit into this daemon's own, so that a chain whose end is cut shows."""

    def __init__(self, ledger: Ledger, operator: AgentId, *, log: Log, interval_ms: int) -> None:
        self._ledger = ledger
        self._operator = operator
        self._log = log
        self._interval_ms = interval_ms
        self._written: dict[str, int] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_ms / 1000)
            try:
                await self.step()
            except Refusal as refusal:
                self._log.warning("audit.not_anchored", code=refusal.code, reason=refusal.message)

    async def step(self) -> bool:
        """Returns whether there was something new."""
        marks = await self._ledger.audit_heads()
        others = {mark.chain: mark.through for mark in marks if mark.chain != self._ledger.node}
        if others == self._written:
            return False
        heads = [{"chain": mark.chain, "index": mark.through, "chain_hash": mark.anchor_hash} for mark in marks]
        await self._ledger.commit(WriteAuditRow(by=self._operator, row={"type": "audit_anchored", "heads": heads}))
        self._written = others
        return True


class Maintenance:
    """Compacts the ledger. `maintain` compacts if enough is sealed, and returns how many events it dropped."""

    def __init__(self, maintain: Callable[[], Awaitable[int | None]], *, log: Log, interval_ms: int) -> None:
        self._maintain = maintain
        self._log = log
        self._interval_ms = interval_ms

    async def step(self) -> int | None:
        try:
            dropped = await self._maintain()
        except CovenantError as error:
            self._log.warning("compaction.failed", reason=str(error))
            return None
        if dropped is not None:
            self._log.info("compaction.done", dropped=dropped)
        return dropped

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_ms / 1000)
            await self.step()


class FileCollector:
    """Deletes files that no task refers to any more, a bounded number a pass, and counts the rest."""

    def __init__(self, files: StoredFiles, telemetry: Telemetry) -> None:
        self._files = files
        self._log = telemetry.log
        self.usage = BlobUsage()
        """The counts of the last pass."""
        self._collected = BlobUsage()
        meter = telemetry.meter
        meter.gauge("covenant_files", "Files in the blob store.", lambda: self.usage.files)
        meter.gauge("covenant_files_bytes", "Bytes of these files.", lambda: self.usage.bytes)
        meaning = "Files that were deleted, since no task referred to them."
        meter.gauge("covenant_files_collected_total", meaning, lambda: self._collected.files)
        meter.gauge("covenant_files_collected_bytes_total", "Bytes of these files.", lambda: self._collected.bytes)

    async def step(self) -> Collected:
        collected = await self._files.collect()
        before = self._collected
        self._collected = BlobUsage(before.files + collected.blobs, before.bytes + collected.bytes)
        self.usage = await self._files.usage()
        if collected.blobs:
            self._log.info("files.collected", files=collected.blobs, bytes=collected.bytes)
        return collected

    async def run(self) -> None:
        """Runs a pass at once, so that the files are counted, then one after each pause."""
        while True:
            try:
                await self.step()
            except (Refusal, OSError) as error:
                self._log.warning("files.not_collected", reason=str(error))
            await asyncio.sleep(self._files.settings.collect_interval_ms / 1000)


class Retention:
    """Erases finished tasks and audit rows past their retention, a batch at a time.

    Each tenant's tasks are kept as its own limits say, else as the settings do; those of the mailbox as the settings
    do. Nothing is done while the ledger's clock is paused after a step.
    """

    def __init__(
        self, ledger: Ledger, admin: IdentityAdmin, operator: Principal, settings: RetentionSettings, log: Log
    ) -> None:
        self._ledger = ledger
        self._admin = admin
        self._operator = operator
        self._settings = settings
        self._log = log
        self._refused: dict[str | None, str] = {}

    async def step(self) -> Erased:
        """One pass; what it erased."""
        erased = Erased(tasks=0, bytes=0)
        if not self._ledger.clock.is_paused():
            erased = await self._erase(await self._rules())
            await self._purge_audit()
        if erased.tasks:
            self._log.info("retention.erased", tasks=erased.tasks, bytes=erased.bytes)
        return erased

    async def _erase(self, rules: Iterable[EraseTasks]) -> Erased:
        """A batch of each tenant in turn, so that none waits for another that has much to erase, or is refused."""
        waiting, tasks, size = deque(rules), 0, 0
        for _ in range(BATCHES_IN_PASS_MAX):
            if not waiting:
                break
            rule = waiting.popleft()
            try:
                erased = await self._ledger.erase_tasks(rule)
            except Refusal as refusal:
                self._log_refusal(rule.tenant, refusal)
                continue
            self._refused.pop(rule.tenant, None)
            tasks, size = tasks + erased.tasks, size + erased.bytes
            if erased.more:
                waiting.append(msgspec.structs.replace(rule, after_ms=erased.after_ms, after_no=erased.after_no))
            await asyncio.sleep(BATCH_PAUSE_S)
        return Erased(tasks=tasks, bytes=size)

    def _log_refusal(self, tenant: str | None, refusal: Refusal) -> None:
        """Logs a refusal once for as long as it stays the same. `tenant` is None for the audit's."""
        if self._refused.get(tenant) != refusal.code:
            self._log.warning("retention.refused", tenant=tenant, code=refusal.code, reason=refusal.message)
        self._refused[tenant] = refusal.code

    async def _rules(self) -> list[EraseTasks]:
        found = [("", TenantLimits()), *((each.name, each.limits) for each in await self._ledger.tenants())]
        now_ms, rules = self._ledger.now_ms(), []
        for tenant, limits in found:
            hours = limits.kept_hours or self._settings.task_hours
            bytes_max = limits.kept_bytes or self._settings.tenant_bytes
            if hours or bytes_max:
                before_ms = now_ms - hours * HOUR_MS if hours else 0
                rules.append(EraseTasks(tenant=tenant, before_ms=before_ms, bytes_max=bytes_max))
        return rules

    async def _purge_audit(self) -> None:
        hours = self._settings.audit_hours
        if hours:
            purged = await self._admin.audit_purge(self._operator, self._ledger.now_ms() - hours * HOUR_MS)
            if purged:
                self._log.info("retention.audit_purged", rows=purged)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._settings.interval_ms / 1000)
            try:
                await self.step()
                self._refused.pop(None, None)
            except Refusal as refusal:
                self._log_refusal(None, refusal)
