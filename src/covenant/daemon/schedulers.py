"""What the daemon does by itself, on a timer: sweep, retry, compact.

Each scheduler has a `step` that does one round and can be called without waiting, and a `run` that repeats it until
canceled. A step that is refused is logged and tried again at its next time; none has a way of its own to change the
ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from covenant.daemon.logs import Log
from covenant.exchange.mailbox import MailboxExchange
from covenant.exchange.principal import Principal
from covenant.ledger.contract import Ledger
from covenant.ledger.machine.commands import Note, Sweep, Swept
from covenant.model.errors import CovenantError, Refusal
from covenant.model.ids import AgentId
from covenant.model.repair import RetryPolicy, RetryReport

CLOCK_STEP_MS: Final = 60_000
"""Wall clock and monotonic clock may disagree by this much between two sweeps: more is a step, not drift."""
PAUSE_MS: Final = 60_000
"""How long deadlines are left alone after a step: time for the clock to be set right, or for somebody to look."""
SWEEPS_AT_ONCE_MAX: Final = 100


class Scheduler(Protocol):
    async def run(self) -> None:
        """Until canceled."""


class Sweeper:
    """Settles what is past its deadline or timeout. A clock that jumps expires nothing until it has been steady."""

    def __init__(
        self,
        ledger: Ledger,
        operator: AgentId,
        *,
        monotonic_ms: Callable[[], int],
        log: Log,
        interval_ms: int = 1_000,
    ) -> None:
        self._ledger = ledger
        self._operator = operator
        self._monotonic_ms = monotonic_ms
        self._log = log
        self._interval_ms = interval_ms
        self._seen = (ledger.now_ms(), monotonic_ms())
        self._paused_until_ms = 0
        self._refused: str | None = None

    async def step(self) -> Swept | None:
        """One round; None while paused. What comes in bulk is swept in bulk, with turns of the loop in between."""
        await self._watch_clock()
        if self._monotonic_ms() < self._paused_until_ms:
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
            )
            if not swept.more:
                break
        self._tell(total)
        return total

    def _tell(self, swept: Swept) -> None:
        counts = {"expired": len(swept.expired), "timed_out": len(swept.timed_out), "forgotten": swept.forgotten}
        if any(counts.values()):
            self._log.info("sweep.settled", **counts)

    async def _watch_clock(self) -> None:
        wall_ms, monotonic_ms = self._ledger.now_ms(), self._monotonic_ms()
        step_ms = (wall_ms - self._seen[0]) - (monotonic_ms - self._seen[1])
        self._seen = (wall_ms, monotonic_ms)
        if abs(step_ms) <= CLOCK_STEP_MS:
            return
        self._paused_until_ms = monotonic_ms + PAUSE_MS
        self._log.warning("clock.stepped", step_ms=step_ms, paused_ms=PAUSE_MS)
        row = {"type": "clock_stepped", "step_ms": step_ms, "paused_ms": PAUSE_MS}
        await self._ledger.commit(Note(by=self._operator, row=row))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_ms / 1000)
            try:
                await self.step()
                self._refused = None
            except Refusal as refusal:
                # Once a second for as long as a disk is full would say nothing more.
                if refusal.code != self._refused:
                    self._log.warning("sweep.refused", code=refusal.code, reason=refusal.message)
                self._refused = refusal.code


class RetryScheduler:
    """The retry gate on a timer: the same gate, the same capability, a summary row in the audit each pass."""

    def __init__(
        self, exchange: MailboxExchange, operator: Principal, policy: RetryPolicy, *, interval_ms: int, log: Log
    ) -> None:
        self._exchange = exchange
        self._operator = operator
        self._policy = policy
        self._interval_ms = interval_ms
        self._log = log

    async def step(self) -> RetryReport | None:
        """One pass; None if it was refused."""
        try:
            report = await self._exchange.retry_stale(self._operator, self._policy, scheduled=True)
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
        """Sleeps first: right after a start every holder deserves a chance to come back."""
        while True:
            await asyncio.sleep(self._interval_ms / 1000)
            await self.step()


class ArchiveReport:
    """Says in the log when the archive sets a record aside, cannot be written, and can be again."""

    def __init__(self, ledger: Ledger, *, log: Log, interval_ms: int) -> None:
        self._ledger = ledger
        self._log = log
        self._interval_ms = interval_ms
        self._rejected = 0
        self._failure: str | None = None

    async def step(self) -> None:
        counts = await self._ledger.counts()
        if counts.archive_rejected != self._rejected:
            self._rejected = counts.archive_rejected
            self._log.warning("archive.records_set_aside", count=self._rejected, look="covenant doctor")
        if counts.archive_failure == self._failure:
            return
        self._failure = counts.archive_failure
        if self._failure is not None:
            self._log.warning("archive.failing", reason=self._failure, archived_seq=counts.archived_seq)
        else:
            self._log.info("archive.recovered", archived_seq=counts.archived_seq)

    async def run(self) -> None:
        """At once: what an earlier run has set aside is told at the start."""
        while True:
            await self.step()
            await asyncio.sleep(self._interval_ms / 1000)


class Maintenance:
    """Compaction without being asked. `maintain` compacts if enough is sealed, and says what that dropped."""

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
