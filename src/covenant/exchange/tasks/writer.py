"""The one writer of tasks, for every service: accepting and canceling them, and the spans of both."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import msgspec

from covenant.exchange.stored_files import StoredFiles
from covenant.exchange.tasks.builder import (
    check_size,
    within_deadline,
    without_reserved_keys,
    without_way,
)
from covenant.ledger.contract.tasks import TaskLedger
from covenant.ledger.machine.commands import Accept, Accepted, Cancel, Canceled, LeasedTask, Starter
from covenant.ledger.machine.decisions.context import key_reused
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.states import State
from covenant.model.a2a_requests import PushConfig
from covenant.model.errors import Conflict, Refusal, Unavailable
from covenant.model.ids import AgentId, PublicKey, TaskId
from covenant.model.settings import MESSAGE_BYTES_MAX
from covenant.model.task import A2A, SIMPLE, Result, ResultStatus, Task, fingerprint, weigh
from covenant.model.tracing import (
    AGENT_NAME,
    ATTEMPT,
    DUPLICATE,
    ENDING,
    INVOKE_AGENT,
    LEASE,
    OFF,
    OPERATION,
    TURN,
    Span,
    Trace,
    Tracer,
    attributes_of,
    trace_of,
    traced,
)

DRAINING: Final = "draining"
RETRY_MS: Final = 5_000
"""When to send again: about when another daemon, or the next start of this one, is there."""


class DrainStatus(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`running`: turns of this daemon's own agents. What is leased to others, queued, parked or undrained stays."""

    draining: bool
    running: int
    left_ms: int
    """How long running turns still have."""
    drained: bool
    """The drain is over: nothing runs any more, and the daemon stops."""
    handed_back: int


class Intake:
    """`running` counts the turns under way. Belongs to the loop."""

    def __init__(self, running: Callable[[], int] = lambda: 0, monotonic_ms: Callable[[], int] = lambda: 0) -> None:
        self.closed: Unavailable | None = None
        """What new work is refused with."""
        self.asked = asyncio.Event()
        self.stops = asyncio.Event()
        """The drain is over, or the daemon stops for another reason: nobody waits for the drain any more."""
        self.heard = asyncio.Event()
        """Somebody was told how the drain ended."""
        self.running = running
        self._handed_back: int | None = None
        self._monotonic_ms = monotonic_ms
        self._until_ms = 0

    def close(self, timeout_ms: int) -> None:
        """Take nothing new. A second call changes how long running turns have."""
        self._until_ms = self._monotonic_ms() + timeout_ms
        self.closed = Unavailable(
            DRAINING,
            "the daemon is draining and takes nothing new; send to another, or when it has started again",
            retry_after_ms=RETRY_MS,
        )
        self.asked.set()

    @property
    def left_ms(self) -> int:
        return max(0, self._until_ms - self._monotonic_ms()) if self.asked.is_set() else 0

    def end(self, handed_back: int) -> None:
        """The drain is over: so many turns ran too long, and were handed back."""
        self._handed_back = handed_back
        self.stops.set()

    def status(self) -> DrainStatus:
        return DrainStatus(
            draining=self.asked.is_set(),
            running=self.running(),
            left_ms=self.left_ms,
            drained=self._handed_back is not None,
            handed_back=self._handed_back or 0,
        )


_encode = msgspec.json.Encoder().encode


class WorkerSlot(Protocol):
    """A free place in the pool, reserved for one task. Used once: start the task, or give the place back."""

    @property
    def starter(self) -> Starter: ...
    def start(self, leased: LeasedTask) -> None:
        """Begin to work: the lease is durable. Does not wait."""

    def give_back(self) -> None:
        """The task was not leased: it is queued, known already, or refused."""


class LocalWorkers(Protocol):
    def reserve(self, recipient: PublicKey) -> WorkerSlot | None:
        """None if nobody here works for this recipient, or nobody is free."""


class TaskWriter:
    """Accepts tasks, and cancels them, for every service. An accepted task is leased in the same record to whoever can
    start on it in this process."""

    def __init__(
        self,
        ledger: TaskLedger,
        workers: LocalWorkers,
        tracer: Tracer = OFF,
        intake: Intake | None = None,
        files: StoredFiles | None = None,
    ) -> None:
        self.intake = intake or Intake()
        self._ledger = ledger
        self._workers = workers
        self._tracer = tracer
        self.files = files
        """None: bytes stay in the ledger."""
        self._starting: set[asyncio.Future[None]] = set()

    def submit(
        self,
        task: Task,
        *,
        bytes_max: int = MESSAGE_BYTES_MAX,
        push: PushConfig | None = None,
        minted: bool = False,
    ) -> Awaitable[Accepted]:
        """Accept what a client asked for. The digest covers what it asked, and not how the request came here.

        A task with a minted id has no digest: nobody knows the id yet, so nobody can send the task again.
        """
        if task.parts and self.files is not None and self.files.concerns(task.parts):
            return self._submit_files(self.files, task, bytes_max=bytes_max, push=push, minted=minted)
        return self._submit(task, task, bytes_max=bytes_max, push=push, minted=minted)

    async def _submit_files(
        self, files: StoredFiles, task: Task, *, bytes_max: int, push: PushConfig | None, minted: bool
    ) -> Accepted:
        if self.intake.closed is not None:
            raise self.intake.closed
        kept = await files.store_task(task)
        return await self._submit(kept, task, bytes_max=bytes_max, push=push, minted=minted)

    async def with_files(self, task: Task) -> Task:
        """The task with its large bytes in the blob store. For those who have its digest already."""
        return task if not task.parts or self.files is None else await self.files.store_task(task)

    def _submit(
        self, task: Task, said: Task, *, bytes_max: int, push: PushConfig | None, minted: bool
    ) -> Awaitable[Accepted]:
        """`said`: the task as its client sent it, which is what the digest covers."""
        former = None
        if minted:
            digest, size = "", weigh(task)
        else:
            asked = said if said.traceparent is None and said.metadata is None else without_way(said)
            digest, size = _digest(asked, push)
            if said is not task:
                size = weigh(task)
            if asked.message_id is not None:
                # Clients make a new id when they try again: the key says that it is the same message.
                former, (digest, _) = digest, _digest(msgspec.structs.replace(asked, message_id=None), push)
        check_size(size, bytes_max)
        if task.origin == A2A:
            # After the digest: the same request has the same digest, whichever keys are reserved by now.
            task = without_reserved_keys(task)
        if task.deadline_ms is not None and task.origin != SIMPLE:
            task = within_deadline(task, self._ledger.clock.left_ms(task.deadline_ms))
        if former is not None:
            return self._accept_keyed(task, digest, former, push)
        if self._tracer.on:
            return self._accept_traced(task, digest, push, minted=minted, submitted=True)
        return self._accept(task, digest, push, minted=minted, submitted=True)

    def accept(
        self,
        task: Task,
        digest: str,
        push: PushConfig | None = None,
        *,
        minted: bool = False,
        submitted: bool = False,
    ) -> Awaitable[Accepted]:
        """`minted`: the task's id is new, and from here. `submitted`: if not, it was made of an idempotency key."""
        accept = self._accept_traced if self._tracer.on else self._accept
        return accept(task, digest, push, minted=minted, submitted=submitted)

    async def _accept_keyed(self, task: Task, digest: str, former: str, push: PushConfig | None) -> Accepted:
        """`former`: the digest with the message's id, which tasks have that were accepted before it was left out."""
        try:
            return await self.accept(task, digest, push, submitted=True)
        except Conflict as refusal:
            if refusal.code != key_reused().code:
                raise
        return await self.accept(task, former, push, submitted=True)

    async def _accept_traced(
        self, task: Task, digest: str, push: PushConfig | None, *, minted: bool, submitted: bool
    ) -> Accepted:
        with accept_span(self._tracer, task, trace_of(task)) as span:
            accepted = await self._accept(traced(task, span.trace), digest, push, minted=minted, submitted=submitted)
            span.note({DUPLICATE: accepted.duplicate})
        return accepted

    async def _accept(
        self, task: Task, digest: str, push: PushConfig | None, *, minted: bool, submitted: bool
    ) -> Accepted:
        if self.intake.closed is not None:
            raise self.intake.closed
        slot = self._workers.reserve(task.recipient.pubkey)
        starter, started = slot.starter if slot is not None else None, False
        try:
            accepted = await self._ledger.commit(
                Accept(task=task, digest=digest, starter=starter, push=push, minted=minted)
            )
            if slot is not None and accepted.leased is not None:
                slot.start(accepted.leased)
                started = True
        except Conflict as refusal:
            if submitted and refusal.code == "duplicate_task_id":
                raise key_reused() from None
            raise
        except asyncio.CancelledError:
            # The caller has left, and what was decided stands: whoever was to start must hear of it all the same.
            if slot is not None:
                started = True
                self._starting.add(starting := asyncio.ensure_future(self._start_later(task, slot)))
                starting.add_done_callback(self._starting.discard)
            raise
        finally:
            if slot is not None and not started:
                slot.give_back()
        return accepted

    def cancel(
        self,
        task_id: TaskId,
        *,
        by: AgentId,
        reason: str,
        recipient: PublicKey | None = None,
        viewer: PublicKey | None = None,
    ) -> Awaitable[Canceled]:
        """A task that has ended stays as it is: `Canceled.before` says so, with the result that it has.

        `recipient` and `viewer`: whose the task must be, and who must have part in it.
        """
        return self._ledger.commit(Cancel(task_id=task_id, viewer=viewer, recipient=recipient, by=by, reason=reason))

    async def _start_later(self, task: Task, slot: WorkerSlot) -> None:
        entry = await self._ledger.entry(task.id)
        lease = entry.lease if entry is not None and entry.state is State.LEASED else None
        starter = slot.starter
        if lease is not None and (lease.leased_to, lease.boot, lease.attempt) == (starter.holder, starter.boot, 1):
            slot.start(LeasedTask(task, lease))
        else:
            slot.give_back()


def _digest(asked: Task, push: PushConfig | None) -> tuple[str, int]:
    """Of what a client asks for, and the size of the task."""
    digest, size = fingerprint(asked)
    if push is not None:
        # The same key with another webhook is another request, as with another message.
        digest = hashlib.sha256(digest.encode() + _encode(push)).hexdigest()
    return digest, size


def refuse_ended(task_id: TaskId, canceled: Canceled) -> None:
    """For callers who must be told that there was nothing left to cancel."""
    if canceled.before:
        raise Conflict("not_cancelable", f"task {task_id} has ended already: it is {canceled.ending}")


@contextmanager
def accept_span(tracer: Tracer, task: Task, parent: Trace | None) -> Iterator[Span]:
    """A span around making a task durable."""
    attributes = attributes_of(task)
    span = tracer.begin(f"accept {attributes[AGENT_NAME]}", "server", attributes, parent=parent)
    failed: str | None = "canceled"
    try:
        yield span
        failed = None
    except Refusal as refusal:
        failed = refusal.code
        raise
    finally:
        span.end(failed=failed)


def record_attempt(tracer: Tracer, before: Entry, result: Result) -> None:
    """The spans of an attempt by an external worker, recorded when it is over: it may have outlived this daemon."""
    task, lease = before.task, before.lease
    if lease is None:
        return
    attributes = {**attributes_of(task), TURN: before.turn, ATTEMPT: lease.attempt}
    parent, name, leased_ms = trace_of(task), str(attributes[AGENT_NAME]), lease.leased_at_ms
    if before.turn == lease.attempt == 1:
        waited = tracer.begin(f"queue {name}", "internal", attributes, parent=parent, at_ms=before.accepted_at_ms)
        waited.end(at_ms=leased_ms)
    attributes |= {OPERATION: INVOKE_AGENT, LEASE: lease.lease_id, ENDING: result.status.value}
    span = tracer.begin(f"{INVOKE_AGENT} {name}", "internal", attributes, parent=parent, at_ms=leased_ms)
    span.end(failed="error" if result.status is ResultStatus.ERROR else None)
