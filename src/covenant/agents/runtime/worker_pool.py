"""The workers: the agents inside this process, and the jobs they are at.

A lease is taken only when its body can start now, and is durable before it does: by whoever accepts a task (`reserve`),
or from the queue, as many as there are free places. When a lease is lost (canceled, timed out, repaired) its body is
stopped; one that does not stop is abandoned, and nothing it says later is heard.

Stopping takes nothing new and waits for what is under way; for jobs that only follow work elsewhere no longer than
there are others, which may need what they hear. What is then still running is stopped: idempotent work goes back to the
queue, the rest is marked interrupted, for an operator. None of it becomes failed or canceled by that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any, Final

from covenant.agents.runtime.agent_spans import end_attempt, trace_queue
from covenant.agents.runtime.function_threads import AgentThreads
from covenant.agents.runtime.job import TIMED_OUT, Job, JobLimits, RunnableAgent
from covenant.agents.runtime.turn_limits import TenantSlots, TurnSlot
from covenant.exchange.delegation import Delegations, tenant_of
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.tasks import QueueEntry, QueueQuery
from covenant.ledger.machine.commands import LeasedTask, Release, Repair, Starter, Take
from covenant.model.agent_definition import OnLost
from covenant.model.errors import Refusal
from covenant.model.ids import AgentId, PublicKey, TaskId
from covenant.model.retry_policy import ForceError, Posture, RepairCommand, Requeue
from covenant.model.tracing import OFF, Tracer

CONCURRENCY: Final = 64
ATTEMPTS_MAX: Final = 3
"""How often lost work is begun again by itself; after that an operator decides."""
LOST_AT_ONCE_MAX: Final = 1_000
WAIT_MS: Final = 60_000
RESTART_S: Final = 1.0
STOP_S: Final = 2.0
"""How long a body may take to stop."""

log = logging.getLogger(__name__)


class PoolAgent:
    """An identity, what works for it, and how many places it has left. It is the slot of each place that is kept."""

    __slots__ = (
        "_workers",
        "body",
        "concurrency",
        "follows",
        "free",
        "freed",
        "idempotent",
        "identity",
        "on_lost",
        "places",
        "starter",
        "threads",
        "timeout_ms",
    )

    body: RunnableAgent
    concurrency: int
    timeout_ms: int | None
    idempotent: bool
    on_lost: OnLost
    follows: bool

    def __init__(self, workers: WorkerPool, identity: AgentId, starter: Starter, places: TenantSlots) -> None:
        self._workers = workers
        self.identity = identity
        self.places = places
        self.starter = starter
        self.free = 0
        self.freed = asyncio.Event()
        self.threads = AgentThreads(0)

    def start(self, leased: LeasedTask) -> None:
        self._workers.start(self, leased)

    def give_back(self) -> None:
        """A place that was kept, and not used."""
        self.places.give_back()
        self.leave()

    def leave(self) -> None:
        """Somebody has ended here, and given its tenant's place back itself."""
        self.free += 1
        if self.free == 1:
            self.freed.set()


class WorkerPool:
    """Made on the loop it works on. `run` it; `stop` it; both may be called once."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        limits: JobLimits | None = None,
        concurrency: int = CONCURRENCY,
        tenant_concurrency: int = 0,
        stop_s: float = STOP_S,
        tracer: Tracer = OFF,
    ) -> None:
        """`tenant_concurrency`: turns at once of a tenant that has no limit of its own; 0: as many as come."""
        self._ledger = ledger
        self._tenant_concurrency = tenant_concurrency
        self._places: dict[str, TenantSlots] = {}
        self._loop: Final = asyncio.get_running_loop()
        self._tracer = tracer
        self._limits = limits or JobLimits()
        self._concurrency = concurrency
        self._stop_s = stop_s
        self._employed: dict[PublicKey, PoolAgent] = {}
        self._jobs: dict[Job, PoolAgent] = {}
        self._by_task: dict[TaskId, Job] = {}
        self._takers: dict[PoolAgent, asyncio.Task[None]] = {}
        self._waiting: set[PoolAgent] = set()
        self._running = False
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._fewer = asyncio.Event()
        """While it stops: somebody is done."""
        self._others: set[asyncio.Task[None]] = set()
        self._abandoned: dict[asyncio.Task[None], Job] = {}
        """Jobs that have ended without their bodies, by the body's task, for as long as that goes on."""
        self.delegations: Delegations | None = None
        """By which jobs call other agents; it needs the workers itself, so it is set afterwards. None: they cannot."""
        ledger.on_lost(self._lost, self._told)

    def register(
        self,
        identity: AgentId,
        body: RunnableAgent,
        *,
        concurrency: int = 0,
        timeout_ms: int | None = None,
        idempotent: bool = False,
        on_lost: OnLost = "hold",
        follows: bool = False,
    ) -> None:
        """From now on this body does the work that is sent to this identity, `concurrency` (0: as usual) at once.

        `timeout_ms` is for tasks that have none of their own; the ledger sees to those that do. `follows`: it only
        follows work elsewhere, which goes on without it. So it is begun again as often as it is lost, and a stop does
        not wait for it.
        """
        if on_lost == "requeue" and not idempotent:
            raise ValueError('on_lost="requeue" needs idempotent=True: the lost work may have been done')
        known = self._employed.get(identity.pubkey)
        if known is not None:
            # The same places, whoever is in them now.
            known.free += (concurrency or self._concurrency) - known.concurrency
            known.freed.set()
        else:
            starter = Starter(identity, self._ledger.node, self._ledger.boot)
            known = PoolAgent(self, identity, starter, self._places_of(tenant_of(identity)))
            known.free = concurrency or self._concurrency
            self._employed[identity.pubkey] = known
            if self._running:
                self._hire(known)
        known.body = body
        known.concurrency = known.threads.most = concurrency or self._concurrency
        known.timeout_ms = timeout_ms
        known.idempotent = idempotent
        known.on_lost = on_lost
        known.follows = follows

    def _places_of(self, tenant: str) -> TenantSlots:
        def limit() -> int:
            known = self._ledger.tenant(tenant)
            return (known.limits.concurrency if known is not None else 0) or self._tenant_concurrency

        places = self._places.get(tenant)
        if places is None:
            places = self._places[tenant] = TenantSlots(limit)
        return places

    def unregister(self, identity: AgentId) -> None:
        """Takes no more work; what it is at goes on."""
        employment = self._employed.pop(identity.pubkey, None)
        if employment in self._waiting:
            self._takers[employment].cancel()

    def reserve(self, recipient: PublicKey) -> PoolAgent | None:
        employment = self._employed.get(recipient)
        if employment is None or employment.free <= 0 or not self._running or not employment.places.take():
            return None
        employment.free -= 1
        return employment

    def start(self, employment: PoolAgent, leased: LeasedTask) -> None:
        """In a place that was kept for it. If the workers was stopped meanwhile, the task goes back to the queue."""
        if self._running:
            self._begin(employment, leased)
        else:
            employment.give_back()
            self._beside(self._release(employment, leased))

    def _begin(self, employment: PoolAgent, leased: LeasedTask) -> None:
        job = Job(
            leased,
            employment.identity,
            ledger=self._ledger,
            loop=self._loop,
            limits=self._limits,
            done=self._done,
            threads=employment.threads,
            delegations=self.delegations,
            tracer=self._tracer,
            place=TurnSlot(employment.places),
        )
        before = self._by_task.get(leased.task.id)
        if before is not None:
            before.lose("stale_lease")
        self._by_task[leased.task.id] = job
        self._jobs[job] = employment
        self._idle.clear()
        if job.span is None:
            job.runner = self._loop.create_task(job.run(employment.body))
        else:
            # Whatever spans the body begins by itself are below the attempt's.
            with job.span.current():
                job.runner = self._loop.create_task(job.run(employment.body))
        if employment.timeout_ms is not None and leased.task.timeout_ms is None:
            job.deadline = self._loop.call_later(employment.timeout_ms / 1000, self._time_out, job)

    @property
    def jobs(self) -> int:
        return len(self._jobs)

    @property
    def abandoned(self) -> tuple[str, ...]:
        """The agents of async functions that go on although their turns are over."""
        going_on = [job for runner, job in self._abandoned.items() if not runner.done()]
        return tuple(sorted({job.holder.display for job in going_on}))

    @property
    def threads_abandoned(self) -> int:
        """Threads of plain functions that go on although their turns are over."""
        return sum(employment.threads.abandoned for employment in self._employed.values())

    def used(self, task_id: TaskId) -> dict[str, float] | None:
        """What a task at work here has used so far; None if nobody here is at it."""
        job = self._by_task.get(task_id)
        return job.spending.usage if job is not None else None

    def _told(self, task_id: TaskId) -> dict[str, Any] | None:
        job = self._by_task.get(task_id)
        return job.spending.told if job is not None else None

    async def idle(self) -> None:
        """Return when nobody is at work."""
        await self._idle.wait()

    def _done(self, job: Job) -> None:
        employment = self._jobs.pop(job, None)
        if employment is None:
            return
        if job.span is not None:
            end_attempt(job.span, job)
        if job.deadline is not None:
            job.deadline.cancel()
        if self._by_task.get(job.task.id) is job:
            del self._by_task[job.task.id]
        job.place.leave()
        employment.leave()
        if not self._jobs:
            self._idle.set()
        if not self._running:
            self._fewer.set()

    # Stopping one job

    def _lost(self, task_id: TaskId) -> None:
        job = self._by_task.get(task_id)
        if job is not None and not job.finishing:
            log.info("agent.stopped", extra=job.fields())
            job.lose("lost")
            self._see_it_stop(job)

    def _time_out(self, job: Job) -> None:
        if job in self._jobs and not job.finishing:
            job.notes["code"] = "timeout"
            job.cut(TIMED_OUT)
            self._see_it_stop(job)

    def _see_it_stop(self, job: Job) -> None:
        self._loop.call_later(self._stop_s, self._abandon, job)

    def _abandon(self, job: Job) -> None:
        if job not in self._jobs or job.finishing:
            return
        self._note_abandoned(job)
        self._beside(self._end_without(job))

    def _note_abandoned(self, job: Job) -> None:
        log.warning("agent.abandoned", extra=job.fields(why=job.stopping))
        if job.runner is not None:
            self._abandoned[job.runner] = job
            job.runner.add_done_callback(lambda runner: self._abandoned.pop(runner, None))

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        doing = asyncio.create_task(work)
        self._others.add(doing)
        doing.add_done_callback(self._others.discard)

    async def _end_without(self, job: Job) -> None:
        await job.abandon()
        self._done(job)

    # Taking work

    async def run(self) -> None:
        """Until `stop`, and until all work here has ended. Canceled, or once it has: what is left is put down."""
        self._running = True
        for employment in self._employed.values():
            self._hire(employment)
        try:
            await self._stopping.wait()
            await self._leave_queues()
            await self._finished()
        finally:
            self._running = False
            self._stopping.set()
            await _see_through(self._leave_queues())
            await _see_through(self._put_down())

    def stop(self) -> None:
        """Take nothing new. `run` returns when what is under way here has ended."""
        self._running = False
        self._stopping.set()

    async def _finished(self) -> None:
        """Until nobody is at work, but for those who follow what goes on without them."""
        while not all(employment.follows for employment in self._jobs.values()):
            self._fewer.clear()
            await self._fewer.wait()

    def _hire(self, employment: PoolAgent) -> None:
        taker = asyncio.create_task(self._take_all(employment))
        self._takers[employment] = taker
        taker.add_done_callback(lambda _: self._takers.pop(employment, None))

    async def _leave_queues(self) -> None:
        """A taker that is not just waiting finishes its round: a lease that it was given must not be forgotten."""
        takers = dict(self._takers)
        for employment, taker in takers.items():
            if employment in self._waiting:
                taker.cancel()
        if takers:
            await asyncio.wait(takers.values())

    async def _take_all(self, employment: PoolAgent) -> None:
        pubkey = employment.identity.pubkey
        if employment.on_lost != "hold":
            await self._deal_with_lost(employment)
        while self._running and self._employed.get(pubkey) is employment:
            try:
                await self._take(employment)
            except Refusal as refusal:
                log.warning("agent.take_refused", extra={"code": refusal.code, "reason": refusal.message})
                await self._pause(employment)
            except Exception:
                log.exception("agent.take_failed", extra={"agent": employment.identity.display})
                await self._pause(employment)

    async def _pause(self, employment: PoolAgent) -> None:
        self._waiting.add(employment)
        try:
            await asyncio.sleep(RESTART_S)
        finally:
            self._waiting.discard(employment)

    async def _take(self, employment: PoolAgent) -> None:
        """Wait for a place and for work; take what can start now."""
        with self._ledger.task_waiter(employment.identity.pubkey) as waiter:
            self._waiting.add(employment)
            try:
                while employment.free <= 0:
                    employment.freed.clear()
                    await employment.freed.wait()
                if not await waiter.wait(WAIT_MS):
                    return
                await employment.places.wait()
            finally:
                self._waiting.discard(employment)
            taken = await self._lease(employment)
            if taken:
                waiter.served()
        for leased in taken:
            self.start(employment, leased)
        if self._tracer.on:
            for leased in taken:
                await self._trace_queue(leased)

    async def _lease(self, employment: PoolAgent) -> tuple[LeasedTask, ...]:
        """As many tasks as there are places; each holds one, and the caller has the first of its tenant's."""
        ledger, identity = self._ledger, employment.identity
        # One place is its own by now, and its agent's may have been taken meanwhile.
        more = max(0, min(employment.free - 1, employment.places.free, ledger.limits.batch_max - 1))
        if employment.free <= 0 or not employment.places.take(more):
            employment.places.give_back()
            return ()
        count = more + 1
        employment.free -= count
        taken: tuple[LeasedTask, ...] = ()
        try:
            take = Take(holder=identity, recipient=identity.pubkey, count=count, node=ledger.node, boot=ledger.boot)
            taken = (await ledger.commit(take)).tasks
        finally:
            for _ in range(count - len(taken)):
                employment.give_back()
        return taken

    async def _trace_queue(self, leased: LeasedTask) -> None:
        """How long a first attempt waited. When a later one was queued again, nobody has noted."""
        entry = await self._ledger.entry(leased.task.id)
        if entry is not None and leased.turn == 1 and leased.lease.attempt == 1:
            trace_queue(self._tracer, leased, entry.accepted_at_ms)

    async def _release(self, employment: PoolAgent, leased: LeasedTask) -> None:
        release = Release(
            task_id=leased.task.id,
            holder=employment.identity,
            lease_id=leased.lease.lease_id,
            reason="the daemon stops before it was begun",
        )
        try:
            await self._ledger.commit(release)
        except Refusal as refusal:
            log.warning("agent.release_refused", extra={"task_id": leased.task.id, "code": refusal.code})

    # What a stop leaves, and what a crash left

    async def _put_down(self) -> None:
        """Stop what is still running, see what becomes of it, and write that down."""
        if self._others:
            await asyncio.wait(self._others, timeout=self._stop_s)
        stopped = [(job, at) for job, at in self._jobs.items() if job.stop()]
        runners = [job.runner for job in self._jobs if job.runner is not None]
        for abandoned in self._abandoned:
            abandoned.cancel()
            runners.append(abandoned)
        if not runners:
            return
        await asyncio.wait(runners, timeout=self._stop_s)
        leaving = []
        for job, employment in stopped:
            ended = job.runner is not None and job.runner.done()
            if not ended:
                self._note_abandoned(job)
            # Work that goes on regardless must not be begun a second time beside it.
            release = employment.idempotent and ended
            leaving.append(job.leave(release=release, reason="the daemon was stopped"))
            log.info("agent.put_down", extra=job.fields(released=release))
        await asyncio.gather(*leaving)

    async def _deal_with_lost(self, employment: PoolAgent) -> None:
        """What an earlier run of this daemon had leased: as the agent's `on_lost` says."""
        identity = employment.identity
        query = QueueQuery(viewer=identity.pubkey, limit=LOST_AT_ONCE_MAX, state_filter="in_flight")
        try:
            for entry in (await self._ledger.queue(query)).tasks:
                if entry.holder_lost and entry.task.recipient.pubkey == identity.pubkey:
                    await self._deal_with(employment, entry)
        except Refusal as refusal:
            log.warning("agent.lost_refused", extra={"code": refusal.code, "reason": refusal.message})

    async def _deal_with(self, employment: PoolAgent, entry: QueueEntry) -> None:
        command: RepairCommand = Requeue(Posture.IDEMPOTENT, entry.lease_id)
        if employment.on_lost == "fail":
            command = ForceError("the agent was lost while it worked on this", entry.lease_id)
        elif not employment.follows and entry.attempt >= ATTEMPTS_MAX:
            log.warning("agent.lost_held", extra={"task_id": entry.task.id, "attempts": entry.attempt})
            return
        reason = f"its holder was lost, and the agent says on_lost={employment.on_lost}"
        await self._ledger.commit(Repair(task_id=entry.task.id, by=employment.identity, command=command, reason=reason))
        log.info("agent.lost", extra={"task_id": entry.task.id, "on_lost": employment.on_lost})


async def _see_through(work: Coroutine[Any, Any, None]) -> None:
    """To its end, however often somebody cancels: all of it is bounded, and a lease hangs on it."""
    doing = asyncio.create_task(work)
    while not doing.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((doing,))
    doing.result()
