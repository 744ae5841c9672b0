"""The one writer of tasks, for every service: accepts them, and makes the spans of accepting and of attempts."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol, TypeVar

import msgspec

from covenant.exchange.stored_files import StoredFiles
from covenant.exchange.tasks.builder import check_size, within_deadline, without_reserved_keys, without_transport
from covenant.ledger.contract.tasks import TaskLedger
from covenant.ledger.machine.commands import Accept, Accepted, Canceled, Command, LeasedTask, Starter
from covenant.ledger.machine.decisions.context import key_reused
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.states import State
from covenant.model.a2a_requests import PushConfig
from covenant.model.errors import OUTCOME_UNKNOWN, Conflict, Refusal, Unavailable
from covenant.model.ids import PublicKey, TaskId
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
RETRY_S: Final = 1.0
"""The pause between two queries to a ledger whose database is down."""
RETRY_MS: Final = 5_000
"""When to send again: about when another daemon, or this one after a restart, is ready."""
_encode = msgspec.json.Encoder().encode
replace = msgspec.structs.replace


class DrainStatus(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The progress of a drain. `running`: turns of this daemon's own agents. Other tasks stay as they are."""

    draining: bool
    running: int
    left_ms: int
    """How long running turns still have."""
    drained: bool
    """The drain is over: no turn runs any more, and the daemon stops."""
    handed_back: int


class Intake:
    """Admits new work until a drain begins. `running` counts running turns. Must be used on one event loop."""

    def __init__(self, running: Callable[[], int] = lambda: 0, monotonic_ms: Callable[[], int] = lambda: 0) -> None:
        self.closed: Unavailable | None = None
        """The refusal for new work; None while work is admitted."""
        self.drain_requested = asyncio.Event()
        self.stops = asyncio.Event()
        """The drain is over, or the daemon stops for another reason: nobody waits for the drain any more."""
        self.outcome_read = asyncio.Event()
        """Set once a caller has got the outcome of the drain."""
        self.running = running
        self._handed_back: int | None = None
        self._monotonic_ms = monotonic_ms
        self._until_ms = 0

    def close(self, timeout_ms: int) -> None:
        """Refuses new work. A second call changes how long running turns have."""
        self._until_ms = self._monotonic_ms() + timeout_ms
        self.closed = Unavailable(
            DRAINING,
            "the daemon is draining and takes nothing new; send to another, or when it has started again",
            retry_after_ms=RETRY_MS,
        )
        self.drain_requested.set()

    @property
    def left_ms(self) -> int:
        return max(0, self._until_ms - self._monotonic_ms()) if self.drain_requested.is_set() else 0

    def end(self, handed_back: int) -> None:
        """Ends the drain. `handed_back` turns ran too long, and were handed back."""
        self._handed_back = handed_back
        self.stops.set()

    def status(self) -> DrainStatus:
        return DrainStatus(
            draining=self.drain_requested.is_set(),
            running=self.running(),
            left_ms=self.left_ms,
            drained=self._handed_back is not None,
            handed_back=self._handed_back or 0,
        )


class WorkerSlot(Protocol):
    """A free slot of the pool, reserved for one task. Used once: start the task, or give the slot back."""

    @property
    def starter(self) -> Starter: ...
    def start(self, leased: LeasedTask) -> None:
        """Starts the work: the lease is durable. Does not wait."""

    def give_back(self) -> None:
        """Frees the slot: the task was not leased, since it is queued, known already, or refused."""


class LocalWorkers(Protocol):
    def reserve(self, recipient: PublicKey) -> WorkerSlot | None:
        """A reserved slot; None if no agent here works for this recipient, or none is free."""


class AcceptOutcome(Protocol):
    """The answer to a command that accepts a task: its lease, if it was leased in the same record."""

    @property
    def leased(self) -> LeasedTask | None: ...


L = TypeVar("L", bound=AcceptOutcome)


class TaskWriter:
    """Accepts tasks, for every service. An accepted task is leased in the same record to an agent of this process that
    can start on it."""

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
        bytes_max: int | None = MESSAGE_BYTES_MAX,
        push: PushConfig | None = None,
        minted: bool = False,
        sent: Task | None = None,
    ) -> Awaitable[Accepted]:
        """Accepts a client's task. The digest covers the request, not its transport.

        A task with a minted id has no digest: nobody knows the id yet, so nobody can send the task again. `sent`: the
        task as its client sent it, where its files are stored already; the digest covers that one.
        """
        if sent is None and task.parts and self.files is not None and self.files.may_store(task.parts):
            return self._submit_files(self.files, task, bytes_max=bytes_max, push=push, minted=minted)
        former: tuple[str, ...] = ()
        body_bytes: int | None = None
        if minted:
            digest, size = "", (body_bytes := weigh(task))
        else:
            digest, size, former = self._digests(sent or task, push)
            size = size if sent is None else weigh(task)
        if bytes_max is not None and size > bytes_max:
            check_size(size, bytes_max)
        if task.origin == A2A and (task.parts or task.metadata is not None or task.request_metadata is not None):
            # After the digest: the same request must have the same digest, even if more keys are reserved by now.
            task, body_bytes = without_reserved_keys(task), None
        if task.deadline_ms is not None and task.origin != SIMPLE:
            task = within_deadline(task, self._ledger.clock.left_ms(task.deadline_ms))
        command = Accept(task=task, digest=digest, former=former, push=push, minted=minted, body_bytes=body_bytes)
        return (self._accept_traced if self._tracer.on else self._accept)(command, submitted=True)

    async def _submit_files(
        self, files: StoredFiles, task: Task, *, bytes_max: int | None, push: PushConfig | None, minted: bool
    ) -> Accepted:
        if self.intake.closed is not None:
            raise self.intake.closed
        if not minted and await self._ledger.parties(task.id) is not None:
            # The task is known, with this content or another: nothing is stored for it, and its URLs may have expired.
            return await self.submit(task, bytes_max=None, push=push, minted=minted, sent=task)
        kept = await files.store_task(task)
        return await self.submit(kept, bytes_max=bytes_max, push=push, minted=minted, sent=task)

    async def with_files(self, task: Task) -> Task:
        """The task with its large bytes in the blob store, for callers that have its digest already."""
        return task if not task.parts or self.files is None else await self.files.store_task(task)

    def _digests(self, sent: Task, push: PushConfig | None) -> tuple[str, int, tuple[str, ...]]:
        """The digest of a request, its size, and the digests that it had by earlier rules."""
        former: tuple[str, ...] = ()
        plain = without_transport(sent)
        digest, size = _digest(plain, push)
        if plain.message_id is not None:
            # Clients make a new message id for each try: the key says that it is the same message.
            plain = replace(plain, message_id=None)
            former, (digest, _) = (digest,), _digest(plain, push)
        if plain.parts and self.files is not None:
            parts = self.files.named_by_hash(plain.parts)
            if parts is not plain.parts:
                named = replace(plain, parts=parts)
                former, (digest, _) = (digest, *former), _digest(named, push)
        return digest, size, former

    def accept(self, task: Task, digest: str) -> Awaitable[Accepted]:
        """Accepts a task of this daemon's own, which has its digest already."""
        command = Accept(task=task, digest=digest)
        return (self._accept_traced if self._tracer.on else self._accept)(command, submitted=False)

    async def _accept_traced(self, command: Accept, *, submitted: bool) -> Accepted:
        task = command.task
        with accept_span(self._tracer, task, trace_of(task)) as span:
            accepted = await self._accept(replace(command, task=traced(task, span.trace)), submitted=submitted)
            span.note({DUPLICATE: accepted.duplicate})
        return accepted

    async def _accept(self, command: Accept, *, submitted: bool) -> Accepted:
        """`submitted`: a client's task, whose id was made from an idempotency key."""
        if self.intake.closed is not None:
            raise self.intake.closed
        try:
            return await self.begin(
                command.task, lambda starter: command if starter is None else replace(command, starter=starter)
            )
        except Conflict as refusal:
            if submitted and refusal.code == "duplicate_task_id":
                raise key_reused() from None
            raise

    async def begin(self, task: Task, command: Callable[[Starter | None], Command[L]]) -> L:
        """Commits a command that accepts this task, and starts the task if it was leased in the same record."""
        slot, started = self._workers.reserve(task.recipient.pubkey), False
        try:
            answer = await self._ledger.commit(command(slot.starter if slot is not None else None))
            if slot is not None and answer.leased is not None:
                slot.start(answer.leased)
                started = True
        except (asyncio.CancelledError, Unavailable) as error:
            # The caller has left, or nobody knows whether it was decided. If it was, the decision stands: a reserved
            # worker must still start the task.
            is_open = not isinstance(error, Unavailable) or error.code == OUTCOME_UNKNOWN
            if slot is not None and is_open:
                started = True
                self._starting.add(starting := asyncio.ensure_future(self._start_later(task, slot)))
                starting.add_done_callback(self._starting.discard)
            raise
        finally:
            if slot is not None and not started:
                slot.give_back()
        return answer

    async def _start_later(self, task: Task, slot: WorkerSlot) -> None:
        """Starts a task that was leased to this run of the daemon and not started. Otherwise frees the slot."""
        entry = await self._entry_when_available(task.id)
        lease = entry.lease if entry is not None and entry.state is State.LEASED else None
        starter = slot.starter
        if (
            lease is not None
            and (lease.leased_to, lease.boot, lease.attempt) == (starter.holder, starter.boot, 1)
            and self._ledger.alive(lease.node, starter.boot)
        ):
            slot.start(LeasedTask(task, lease))
        else:
            slot.give_back()

    async def _entry_when_available(self, task_id: TaskId) -> Entry | None:
        """Asks the ledger until it answers, however long its database is down."""
        while True:
            try:
                return await self._ledger.entry(task_id)
            except Unavailable:
                await asyncio.sleep(RETRY_S)


def _digest(task: Task, push: PushConfig | None) -> tuple[str, int]:
    """The digest of a client's request, and the size of the task."""
    digest, size = fingerprint(task)
    if push is not None:
        # The same key with another webhook is another request, as with another message.
        digest = hashlib.sha256(digest.encode() + _encode(push)).hexdigest()
    return digest, size


def refuse_ended(task_id: TaskId, canceled: Canceled) -> None:
    """Refuses a cancel that came too late, for callers that must be told."""
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
    """Records the spans of an external worker's attempt when it is over: it may have outlived this daemon."""
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
