"""The worker pool: the agents inside this process, and their jobs.

A lease is taken only when its agent can start now, and is durable before the agent does. It is taken when a task is
accepted (`reserve`), or from the queue, as many as there are free slots. When a lease is lost (canceled, timed out,
repaired) its job is stopped. A job that does not stop is abandoned, and its later output is dropped.

A pool that stops takes nothing new and waits for its jobs. Jobs that only follow remote work are waited for only as
long as there are others, which may need their answers. Jobs that still run are then stopped: idempotent work goes back
to the queue, and other work is marked interrupted, for an operator. A stop makes no task failed or canceled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from covenant.agents.runtime.agent_spans import LOST, end_attempt, end_lost, trace_queue
from covenant.agents.runtime.durable_step import finish
from covenant.agents.runtime.function_threads import AgentThreads
from covenant.agents.runtime.job import Job, RunnableAgent
from covenant.agents.runtime.job_buffer import JobServices
from covenant.agents.runtime.lost_work import OUTLOOKS, STOPPED, LostWork
from covenant.agents.runtime.model_calls import ModelCalls
from covenant.agents.runtime.turn_limits import StartRate, TenantSlots, TurnSlot
from covenant.exchange.delegation import Delegations
from covenant.exchange.stored_files import StoredFiles
from covenant.ledger.contract.identities import Register, RegisterChange
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.machine.commands import Interrupt, LeasedTask, Release, Starter, Take
from covenant.model.agent_definition import OnLost
from covenant.model.errors import Refusal
from covenant.model.ids import AgentId, PublicKey, TaskId
from covenant.model.settings import A2aSettings
from covenant.model.task import TIMED_OUT
from covenant.model.tenants import host_of
from covenant.model.tracing import OFF, Span, Tracer

CONCURRENCY: Final = 64
WAIT_MS: Final = 60_000
RESTART_S: Final = 1.0
STOP_S: Final = 2.0
"""How long a job may take to stop."""

log = logging.getLogger(__name__)


class PoolAgent:
    """An agent of the pool: its identity, the object that runs it, and its free slots. Also one reserved slot."""

    agent: RunnableAgent
    concurrency: int
    timeout_ms: int | None
    idempotent: bool
    on_lost: OnLost
    follows: bool

    def __init__(self, pool: WorkerPool, identity: AgentId, starter: Starter, slots: TenantSlots) -> None:
        self.identity = identity
        self.slots = slots
        self.starter = starter
        self.free = 0
        self.freed = asyncio.Event()
        self.rate = StartRate()
        self.threads = AgentThreads(0)
        self.start: Callable[[LeasedTask], None] = partial(pool.start, self)

    def give_back(self, count: int = 1) -> None:
        """Frees reserved slots that were not used."""
        self.slots.release(count)
        self.add_free(count)

    def add_free(self, count: int = 1) -> None:
        """Frees slots after jobs, which have given their tenant's slots back themselves."""
        self.free += count
        if 0 < self.free <= count:
            self.freed.set()


class PoolRegister:
    """The agents and the running jobs of a pool, for services that are made before it."""

    def __init__(self) -> None:
        self.agents: Final[dict[PublicKey, PoolAgent]] = {}
        self.jobs: Final[dict[TaskId, Job]] = {}
        self.running = False

    def usage_of(self, task_id: TaskId) -> dict[str, float] | None:
        """The usage so far of a task that runs here; None if it does not."""
        job = self.jobs.get(task_id)
        return job.spending.usage if job is not None else None

    def reserve(self, recipient: PublicKey) -> PoolAgent | None:
        worker = self.agents.get(recipient)
        if worker is None or worker.free <= 0 or not self.running or not worker.slots.try_acquire():
            return None
        if worker.rate.per_min and worker.rate.take() is not None:
            worker.slots.release()
            return None
        worker.free -= 1
        return worker


class WorkerPool:
    """Must be made on its event loop. `run` and `stop` are called once each."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        limits: A2aSettings | None = None,
        concurrency: int = CONCURRENCY,
        tenant_concurrency: int = 0,
        stop_s: float = STOP_S,
        delegations: Callable[[WorkerPool], Delegations] | None = None,
        register: PoolRegister | None = None,
        tracer: Tracer = OFF,
        files: StoredFiles | None = None,
        model_calls: ModelCalls | None = None,
    ) -> None:
        """`tenant_concurrency`: turns at once of a tenant that has no limit of its own; 0: no limit.

        `delegations` makes the service by which jobs call other agents; None: they cannot. `files`: None keeps all
        bytes in the ledger.
        """
        self._ledger = ledger
        self._tenant_concurrency = tenant_concurrency
        self._slots: dict[str, TenantSlots] = {}
        self._loop: Final = asyncio.get_running_loop()
        self._tracer = tracer
        self._concurrency = concurrency
        self._stop_s = stop_s
        self._register = register if register is not None else PoolRegister()
        self._registered, self._by_task = self._register.agents, self._register.jobs
        self.reserve = self._register.reserve
        limits = limits or A2aSettings()
        self._hold_ms = limits.hold_ms
        self._lost_work = LostWork(ledger, self._registered, limits.hold_ms)
        self._jobs: dict[Job, PoolAgent] = {}
        self._takers: dict[PoolAgent, asyncio.Task[None]] = {}
        self._waiting: set[PoolAgent] = set()
        self._stopping = asyncio.Event()
        self._draining = False
        self.handed_back = 0
        """Turns that a stop interrupted. Those that only follow remote work are not counted."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._job_ended = asyncio.Event()
        """Set while the pool drains or stops, when a job has ended."""
        self._background: set[asyncio.Task[None]] = set()
        self._abandoned: dict[asyncio.Task[None], Job] = {}
        """Jobs that have ended although their agents still run, by the agent's asyncio task."""
        self.delegations: Final = delegations(self) if delegations is not None else None
        calls = model_calls or ModelCalls(tracer)
        self._services = JobServices(ledger, self._loop, limits, self._done, self.delegations, tracer, files, calls)
        ledger.on_lost(self._lost, self._usage_metadata)
        ledger.on_registers(self._tenant_changed)

    def register(
        self,
        identity: AgentId,
        agent: RunnableAgent,
        *,
        concurrency: int = 0,
        timeout_ms: int | None = None,
        idempotent: bool = False,
        on_lost: OnLost = "hold",
        follows: bool = False,
        rate_per_min: int = 0,
    ) -> None:
        """From now on this agent works on the tasks of this identity, at most `concurrency` at once (0: the default).

        `timeout_ms` is for tasks that have no timeout of their own; the ledger times the others. `follows`: the agent
        only follows remote work, which goes on without it. So it begins again as often as it is lost, and a stop does
        not wait for it. `rate_per_min`: turns that begin in a minute; the others wait in the queue.
        """
        if on_lost == "requeue" and not idempotent:
            raise ValueError('on_lost="requeue" needs idempotent=True: the lost work may have been done')
        known = self._registered.get(identity.pubkey)
        if known is not None:
            # The slots stay the same, including those in use.
            known.free += (concurrency or self._concurrency) - known.concurrency
            known.freed.set()
        else:
            starter = Starter(identity, self._ledger.node, self._ledger.boot)
            known = PoolAgent(self, identity, starter, self._slots_of(host_of(identity.display)))
            known.free = concurrency or self._concurrency
            self._registered[identity.pubkey] = known
            if self._register.running:
                self._begin_taking(known)
        known.agent = agent
        known.concurrency = concurrency or self._concurrency
        known.threads.resize(known.concurrency)
        known.timeout_ms = timeout_ms
        known.idempotent = idempotent
        known.on_lost = on_lost
        known.follows = follows
        known.rate.per_min = rate_per_min
        self._lost_work.check_again()

    def _slots_of(self, tenant: str) -> TenantSlots:
        slots = self._slots.setdefault(tenant, TenantSlots(0, self._ledger.living))
        known = self._ledger.tenant(tenant)
        slots.most = (known.limits.concurrency if known is not None else 0) or self._tenant_concurrency
        return slots

    def _tenant_changed(self, change: RegisterChange) -> None:
        if change.register is Register.TENANTS and change.name in self._slots:
            self._slots_of(change.name)

    def turns(self, tenant: str) -> int:
        return slots.used if (slots := self._slots.get(tenant)) is not None else 0

    def unregister(self, identity: AgentId) -> None:
        """Takes no more work for this agent; its running jobs go on."""
        worker = self._registered.pop(identity.pubkey, None)
        if worker in self._waiting:
            self._takers[worker].cancel()

    def start(self, worker: PoolAgent, leased: LeasedTask) -> None:
        """Starts a job in a reserved slot. If the pool was stopped meanwhile, the task goes back to the queue."""
        before = self._by_task.get(leased.task.id)
        if before is not None and before.leased.lease.lease_id == leased.lease.lease_id:
            worker.give_back()  # it has started: two requests for one task have found the same lease
            return
        if not self._register.running:
            worker.give_back()
            self._spawn(self._release(worker, leased))
            return
        job = Job(leased, worker.identity, self._services, worker.threads, TurnSlot(worker.slots))
        if before is not None:
            before.lose("stale_lease")
        self._by_task[job.task.id] = job
        if not self._jobs:
            self._idle.clear()
        self._jobs[job] = worker
        if job.span is None:
            job.runner = asyncio.Task(job.run(worker.agent), loop=self._loop, name="job")
        else:
            # Spans that the agent makes by itself are below the attempt's.
            with job.span.current():
                job.runner = self._loop.create_task(job.run(worker.agent))
        if worker.timeout_ms is not None and job.task.timeout_ms is None:
            job.deadline = self._loop.call_later(worker.timeout_ms / 1000, self._time_out, job)

    @property
    def jobs(self) -> int:
        return len(self._jobs)

    @property
    def abandoned(self) -> tuple[str, ...]:
        """The agents of async functions that still run although their turns are over."""
        still_running = [job for runner, job in self._abandoned.items() if not runner.done()]
        return tuple(sorted({job.holder.display for job in still_running}))

    @property
    def threads_abandoned(self) -> int:
        """The number of threads of plain functions that still run although their turns are over."""
        return sum(worker.threads.abandoned for worker in self._registered.values())

    def _usage_metadata(self, task_id: TaskId) -> dict[str, Any] | None:
        job = self._by_task.get(task_id)
        return job.spending.usage_metadata if job is not None else None

    async def idle(self) -> None:
        await self._idle.wait()

    def _done(self, job: Job) -> None:
        worker = self._jobs.pop(job, None)
        if worker is None:
            return
        if job.span is not None:
            self._end_span(job.span, job)
        if job.deadline is not None:
            job.deadline.cancel()
        if self._by_task.get(job.task.id) is job:
            del self._by_task[job.task.id]
        job.slot.end()
        worker.add_free()
        if not self._jobs:
            self._idle.set()
        if self._draining or not self._register.running:
            self._job_ended.set()

    def _end_span(self, span: Span, job: Job) -> None:
        if job.stopping == LOST:
            self._spawn(end_lost(span, job, self._ledger))
        else:
            end_attempt(span, job)

    def _lost(self, task_id: TaskId) -> None:
        job = self._by_task.get(task_id)
        if job is not None and not job.finishing:
            log.info("agent.stopped", extra=job.fields())
            job.lose(LOST)
            self._loop.call_later(self._stop_s, self._abandon, job)

    def _time_out(self, job: Job) -> None:
        if job in self._jobs and not job.finishing:
            job.notes["code"] = "timeout"
            job.fail_now(TIMED_OUT)
            self._loop.call_later(self._stop_s, self._abandon, job)

    def _abandon(self, job: Job) -> None:
        if job not in self._jobs or job.finishing:
            return
        self._note_abandoned(job)
        self._spawn(self._end_abandoned(job))

    def _note_abandoned(self, job: Job) -> None:
        log.warning("agent.abandoned", extra=job.fields(why=job.stopping))
        if job.runner is not None:
            self._abandoned[job.runner] = job
            job.runner.add_done_callback(lambda runner: self._abandoned.pop(runner, None))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _end_abandoned(self, job: Job) -> None:
        await job.abandon()
        self._done(job)

    async def run(self) -> None:
        """Runs until `stop` and the end of all work here. When canceled, the remaining work is handed back."""
        self._register.running = True
        for worker in self._registered.values():
            self._begin_taking(worker)
        lost_work = asyncio.create_task(self._lost_work.run())
        try:
            await self._stopping.wait()
            await self._stop_taking()
            await self._finished()
        finally:
            self._register.running = False
            self._stopping.set()
            lost_work.cancel()
            # However often this is canceled: all of it is bounded, and leases depend on it.
            await finish(self._stop_taking())
            await finish(self._stop_jobs())

    async def drain(self) -> None:
        """Takes nothing from the queue any more, and waits for running jobs. Their calls still begin at once."""
        self._draining = True
        await self._stop_taking()
        await self._finished()

    async def hand_back(self) -> None:
        """Stops running jobs, and records the outcome of each. Nothing starts any more."""
        self._register.running = False
        await finish(self._stop_jobs())

    def stop(self) -> None:
        """Takes nothing new. `run` returns when the running jobs have ended."""
        self._register.running = False
        self._stopping.set()

    async def _finished(self) -> None:
        """Waits until no job runs, except those that only follow remote work."""
        while not all(worker.follows for worker in self._jobs.values()):
            self._job_ended.clear()
            await self._job_ended.wait()

    def _begin_taking(self, worker: PoolAgent) -> None:
        taker = asyncio.create_task(self._take_all(worker))
        self._takers[worker] = taker
        taker.add_done_callback(lambda _: self._takers.pop(worker, None))

    async def _stop_taking(self) -> None:
        """Stops the takers. A taker that is not idle finishes its round: its leases must not be forgotten."""
        takers = dict(self._takers)
        for worker, taker in takers.items():
            if worker in self._waiting:
                taker.cancel()
        if takers:
            await asyncio.wait(takers.values())

    async def _take_all(self, worker: PoolAgent) -> None:
        pubkey = worker.identity.pubkey
        while self._register.running and not self._draining and self._registered.get(pubkey) is worker:
            try:
                await self._take(worker)
            except Refusal as refusal:
                log.warning("agent.take_refused", extra={"code": refusal.code, "reason": refusal.message})
                await self._pause(worker)
            except Exception:
                log.exception("agent.take_failed", extra={"agent": worker.identity.display})
                await self._pause(worker)

    async def _pause(self, worker: PoolAgent) -> None:
        self._waiting.add(worker)
        try:
            await asyncio.sleep(RESTART_S)
        finally:
            self._waiting.discard(worker)

    async def _take(self, worker: PoolAgent) -> None:
        """Waits for a slot and for work; takes tasks that can start now."""
        with self._ledger.task_waiter(worker.identity.pubkey) as waiter:
            self._waiting.add(worker)
            try:
                while worker.free <= 0:
                    worker.freed.clear()
                    await worker.freed.wait()
                if not await waiter.wait(WAIT_MS):
                    return
                await worker.rate.wait()
                await worker.slots.acquire()
            finally:
                self._waiting.discard(worker)
            taken = await self._lease(worker)
            if taken:
                waiter.served()
        for leased in taken:
            self.start(worker, leased)
        if self._tracer.on:
            for leased in taken:
                await trace_queue(self._tracer, leased, self._ledger)

    async def _lease(self, worker: PoolAgent) -> tuple[LeasedTask, ...]:
        """Leases as many tasks as there are slots. The caller has acquired one of the tenant's slots already."""
        ledger, identity = self._ledger, worker.identity
        # The agent's own slots may have been taken while the caller waited for the tenant's slot.
        most = 1 if worker.rate.per_min else ledger.limits.batch_max
        more = max(0, min(worker.free - 1, worker.slots.free, most - 1))
        if worker.free <= 0 or not worker.slots.try_acquire(more):
            worker.slots.release()
            return ()
        count = more + 1
        worker.free -= count
        taken: tuple[LeasedTask, ...] = ()
        try:
            take = Take(holder=identity, recipient=identity.pubkey, count=count, node=ledger.node, boot=ledger.boot)
            taken = (await ledger.commit(take)).tasks
        finally:
            if unused := count - len(taken):
                worker.give_back(unused)
        return taken

    async def _release(self, worker: PoolAgent, leased: LeasedTask) -> None:
        release = Release(
            task_id=leased.task.id,
            holder=worker.identity,
            lease_id=leased.lease.lease_id,
            reason="the daemon stopped before the work began",
        )
        try:
            await self._ledger.commit(release)
        except Refusal as refusal:
            log.warning("agent.release_refused", extra={"task_id": leased.task.id, "code": refusal.code})

    def _end_of_lease(self, job: Job, worker: PoolAgent, *, release: bool) -> Release | Interrupt:
        """The command for work that a stop interrupts."""
        task_id, holder, lease_id = job.task.id, worker.identity, job.leased.lease.lease_id
        if release:
            return Release(task_id=task_id, holder=holder, lease_id=lease_id, reason="the daemon was stopped")
        return Interrupt(
            task_id=task_id,
            holder=holder,
            lease_id=lease_id,
            reason=STOPPED,
            hold_ms=self._hold_ms,
            outlook=OUTLOOKS[worker.on_lost],
        )

    async def _stop_jobs(self) -> None:
        """Stops running jobs, waits for their end, and records what happens to their work."""
        if self._background:
            await asyncio.wait(self._background, timeout=self._stop_s)
        stopped = [(job, worker) for job, worker in self._jobs.items() if job.stop()]
        runners = [job.runner for job in self._jobs if job.runner is not None]
        for abandoned in self._abandoned:
            abandoned.cancel()
            runners.append(abandoned)
        if not runners:
            return
        await asyncio.wait(runners, timeout=self._stop_s)
        writes = []
        for job, worker in stopped:
            ended = job.runner is not None and job.runner.done()
            if not ended:
                self._note_abandoned(job)
            # Work whose agent still runs must not begin a second time beside it.
            release = worker.idempotent and ended
            writes.append(job.end_lease(self._end_of_lease(job, worker, release=release)))
            log.info("agent.put_down", extra=job.fields(released=release))
        written = await asyncio.gather(*writes)
        self.handed_back += sum(ok and not worker.follows for ok, (_, worker) in zip(written, stopped, strict=True))
        for job, _ in stopped:
            self._done(job)
