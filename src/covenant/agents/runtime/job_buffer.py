"""The records of a job: its updates, buffered until they are written, and its end.

Updates are written several a record. The agent does not wait for the disk, and nobody sees an update before it is
durable. The buffer is bounded: an agent that is faster than the disk waits for `room`. The output of a turn is bounded,
too (`A2aSettings`). A durable step is written at once, with the output before it.

Each record is written once, and in order, even if the ledger goes away meanwhile: the work is done and the lease is
held, so the job waits until the ledger accepts records again. If the outcome of a write is unknown, the job renews its
lease: once that succeeds, the write has happened or never will, and the steps of the task show which. A result needs
no such check: it may be written twice, and the ledger keeps one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from covenant.agents.runtime.function_threads import TurnStopped
from covenant.agents.runtime.model_calls import ModelCalls
from covenant.exchange.delegation import Delegations
from covenant.exchange.native import earlier_messages, kept_files
from covenant.exchange.stored_files import StoredFiles
from covenant.exchange.tasks.reader import PAGE, read_past
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.machine.commands import Advance, Advanced, LeasedTask, Renew
from covenant.model.errors import OUTCOME_UNKNOWN, Invalid, Refusal, Unavailable
from covenant.model.ids import AgentId
from covenant.model.sanitizer import named_safely
from covenant.model.settings import A2aSettings
from covenant.model.task import NATIVE, Ending, Result, Task, account_of
from covenant.model.task_event import (
    ArtifactUpdate,
    MessageUpdate,
    Signal,
    StatusUpdate,
    Step,
    StepUpdate,
    TurnUpdate,
    Update,
    Wait,
)
from covenant.model.task_view import TaskView, first_message
from covenant.model.tracing import Tracer

if TYPE_CHECKING:
    from covenant.agents.runtime.job import Job

FAILED: Final = "the agent failed"
BUFFERED_MAX: Final = 256
BUFFERED_BYTES_MAX: Final = 256 * 1024
# A job writes at most once in this time, except for its end: faster updates share a record.
PAUSE_S: Final = 0.001
WRITE_AGAIN_MS_MAX: Final = 5_000

log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class JobServices(NamedTuple):
    """The services that the jobs of a worker pool share. The pool's `done` is called once for each job, at its end."""

    ledger: Ledger
    loop: asyncio.AbstractEventLoop
    limits: A2aSettings
    done: Callable[[Job], None]
    delegations: Delegations | None
    tracer: Tracer
    files: StoredFiles | None = None
    """None: bytes stay in the ledger."""
    model_calls: ModelCalls = ModelCalls()


class JobBuffer:
    __slots__ = (
        "_again",
        "_bytes",
        "_flusher",
        "_generation",
        "_large",
        "_ledger",
        "_loop",
        "_mute",
        "_next_flush",
        "_pending",
        "_pending_bytes",
        "_room",
        "_services",
        "_timer",
        "_updates",
        "files",
        "finishing",
        "full",
        "holder",
        "leased",
        "notes",
        "over",
        "task",
        "unfinished",
    )

    # Implemented by the job.
    fail: Callable[[str], None]
    fail_now: Callable[[str], None]
    _refused: Callable[[Refusal], None]

    def __init__(self, services: JobServices, leased: LeasedTask, holder: AgentId) -> None:
        self._services = services
        self._ledger = services.ledger
        self._loop = services.loop
        self.files = services.files
        self.leased = leased
        self.task: Task = leased.task
        self.holder = holder
        self.notes: dict[str, Any] = {}
        """The metadata of the result."""
        self.over = False
        """Nothing more is written."""
        self._mute = False
        """Further output is dropped: the job has ended, or is over."""
        self.finishing = False
        """The last record is being written."""
        self.full = False
        """The buffer is full: the agent should wait for `room`."""
        self.unfinished: Callable[[], object] | None = None
        """Closes the open text artifact."""
        self._large = False
        """The output may have bytes for the blob store."""
        self._pending: list[TurnUpdate] = []
        self._pending_bytes = 0
        self._updates = 0
        self._bytes = 0
        self._timer: asyncio.Handle | None = None
        self._flusher: asyncio.Task[None] | None = None
        self._next_flush = 0.0
        self._room: asyncio.Future[None] | None = None
        self._generation = leased.generation
        """The generation of the last record that was acknowledged, or found written."""
        self._again: asyncio.Lock | None = None
        """Held while a record is written again: later ones wait for it."""

    def fields(self, **more: Any) -> dict[str, Any]:
        return {"task_id": self.task.id, "agent": self.holder.display, "attempt": self.leased.lease.attempt, **more}

    async def write_record(
        self,
        updates: tuple[TurnUpdate, ...],
        result: Result | None = None,
        ending: Ending | None = None,
        *,
        wait: Wait | None = None,
        status: StatusUpdate | None = None,
    ) -> Advanced:
        """Returns when the record is durable.

        Raises the ledger's refusal if it names no time to retry, or if the lease is lost meanwhile.
        """
        if result is not None and self.notes:
            result = msgspec.structs.replace(result, metadata=self.notes)
        advance = Advance(
            task_id=self.task.id,
            holder=self.holder,
            lease_id=self.leased.lease.lease_id,
            updates=updates,
            result=result,
            ending=ending,
            wait=wait,
            status=status,
        )
        if self._again is not None and self._again.locked():
            async with self._again:
                pass
        stored = await self._store(self.files, advance) if self._large and self.files is not None else advance
        try:
            advanced = await self._ledger.commit(stored)
        except Unavailable as refusal:
            if self._again is None:
                self._again = asyncio.Lock()
            async with self._again:
                advanced = await self._write_again(refusal, stored)
        self._generation = max(self._generation, advanced.generation)
        return advanced

    async def _write_again(self, refusal: Unavailable, advance: Advance) -> Advanced:
        doubtful = False
        while refusal.retry_after_ms is not None:
            log.warning("agent.write_delayed", extra=self.fields(code=refusal.code, reason=refusal.message))
            doubtful = doubtful or (refusal.code == OUTCOME_UNKNOWN and advance.result is None)
            await asyncio.sleep(min(refusal.retry_after_ms, WRITE_AGAIN_MS_MAX) / 1_000)
            if self.over:
                break
            try:
                if doubtful:
                    found = await self._find(advance)
                    if found is not None:
                        return found
                    doubtful = False
                return await self._ledger.commit(advance)
            except Unavailable as again:
                refusal = again
        raise refusal

    async def _find(self, advance: Advance) -> Advanced | None:
        """The outcome of a record, if it was written. If not, it never will be.

        All records that were acknowledged by now were sent before this one, since the ledger writes those of a job in
        order: this one is after them. Their content may be the same.
        """
        await self._ledger.commit(Renew(task_id=self.task.id, holder=self.holder, lease_id=advance.lease_id))
        steps = [step async for step in self.steps_after(self._generation)]
        if advance.wait is not None:
            # The lease is still held: the task was parked only if a signal that had already arrived ended the wait.
            return _signaled(advance.wait, steps)
        wanted = [_comparable(update) for update in advance.updates]
        written = [_comparable(step.what) for step in steps]
        count = len(wanted)
        at = next((at for at in range(len(steps)) if count and written[at : at + count] == wanted), None)
        return Advanced(steps[at + count - 1].generation) if at is not None else None

    async def steps_after(self, generation: int) -> AsyncIterator[Step]:
        while steps := await self._ledger.steps(self.task.id, generation, PAGE):
            for step in steps:
                yield step
            generation = steps[-1].generation

    async def _store(self, files: StoredFiles, advance: Advance) -> Advance:
        """Stores large bytes in the blob store first. A failure to store fails the turn, and does not lose it."""
        account, task_id, kept = account_of(self.task), self.task.id, list(advance.updates)
        try:
            for at, update in enumerate(kept):
                if not isinstance(update, StepUpdate) and files.may_store(update.parts):
                    parts = await files.store(update.parts, account, task_id)
                    kept[at] = msgspec.structs.replace(update, parts=parts)
            result = advance.result
            if result is not None:
                result = await files.store_result(result, account)
        except Refusal as refusal:
            raise Invalid(refusal.code, refusal.message) from refusal
        return msgspec.structs.replace(advance, updates=tuple(kept), result=result)

    def exempt(self, size: int) -> None:
        """Exempts this many bytes from the limit of a turn: the daemon writes them, not the agent."""
        self._bytes -= size

    def add_update(self, update: Update, size: int | None = None, *, last: bool = False) -> None:
        """Adds an update; never waits. `size`: its approximate bytes, if known. `last`: the job ends with it."""
        if self._mute:
            if self.over:
                raise TurnStopped
            return
        if size is None:
            if update.parts or isinstance(update, ArtifactUpdate):  # most updates of a state have nothing to name
                update = named_safely(update)
                if self.files is not None and self.files.may_store(update.parts):
                    self._large = True
            size = len(_encode(update))
        self._updates += 1
        self._bytes += size
        limits = self._services.limits
        if self._updates > limits.turn_updates_max or self._bytes > limits.turn_bytes_max:
            self._refuse_output()
        pending = self._pending
        pending.append(update)
        self._pending_bytes += size
        if len(pending) >= BUFFERED_MAX or self._pending_bytes >= BUFFERED_BYTES_MAX:
            self.full = True
        if self._timer is None and self._flusher is None and not last:
            self._schedule()

    async def room(self) -> None:
        """Waits until there is room for more: until the earlier output is being written."""
        while self.full and not self.over:
            if self._flusher is None:
                self._flush()
            if self._room is None:
                self._room = self._loop.create_future()
            await self._room

    @property
    def limits(self) -> A2aSettings:
        return self._services.limits

    @property
    def now_ms(self) -> int:
        return self._ledger.now_ms()

    async def write(self, *steps: StepUpdate, wait: Wait | None = None, status: StatusUpdate | None = None) -> Advanced:
        """Writes the earlier output and these steps in one record. Returns when it is durable."""
        if self._mute:
            raise TurnStopped
        self._updates += len(steps)
        self._bytes += sum(len(_encode(step)) for step in steps)
        limits = self._services.limits
        if self._updates > limits.turn_updates_max or self._bytes > limits.turn_bytes_max:
            self._refuse_output()
        updates, self._pending, self._pending_bytes = (*self._pending, *steps), [], 0
        self._make_room()
        try:
            return await self.write_record(updates, wait=wait, status=status)
        except Refusal as refusal:
            self._refused(refusal)
            raise TurnStopped from None

    def _schedule(self) -> None:
        if self._loop.time() >= self._next_flush:
            self._timer = self._loop.call_soon(self._flush)
        else:
            self._timer = self._loop.call_at(self._next_flush, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pending and self._flusher is None and not self.finishing and not self.over:
            self._flusher = self._loop.create_task(self._write())

    async def _write(self) -> None:
        updates, self._pending, self._pending_bytes = tuple(self._pending), [], 0
        self._next_flush = self._loop.time() + PAUSE_S
        self._make_room()
        try:
            await self.write_record(updates)
        except Refusal as refusal:
            self._refused(refusal)
        except Exception:
            log.exception("agent.unwritten", extra=self.fields())
            self.fail_now(FAILED)
        finally:
            self._flusher = None
            if self.full:
                self._flush()
            elif self._pending and not self.finishing and not self.over:
                self._schedule()

    def _make_room(self) -> None:
        self.full = False
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def _refuse_output(self) -> None:
        """Fails the job, whose output exceeds a limit. Raises `TurnStopped`."""
        limits = self._services.limits
        too_many = self._updates > limits.turn_updates_max
        limit = f"{limits.turn_updates_max} updates" if too_many else f"{limits.turn_bytes_max} bytes"
        message = f"the agent's output in one turn exceeds {limit}"
        log.warning("agent.flooded", extra=self.fields(limit=limit))
        self.unfinished = None
        self.fail(message)
        # Canceled a moment later, and only if it still runs: this very asyncio task may have to write the end.
        self._loop.call_soon(self.fail_now, message)
        raise TurnStopped

    # Reads of the task, and of its conversation.

    @property
    def messages(self) -> tuple[MessageUpdate, ...]:
        return self.leased.messages or (first_message(self.task),)

    async def stored_note(self, name: str, *, parked: bool = False) -> Any:
        """The newest value under this name in the metadata of a stored status, of this turn or an earlier one.

        `parked`: only of statuses that ended a turn.
        """
        found = None
        async for step in self.steps_after(0):
            status = step.what
            if isinstance(status, StatusUpdate) and name in (status.metadata or {}):
                if parked and status.state == "working":
                    continue
                assert status.metadata is not None
                found = status.metadata[name]
        return found

    async def durable_steps(self) -> list[StepUpdate]:
        """The durable steps of this turn, as they were written."""
        turn = self.leased.turn
        return [
            step.what
            async for step in self.steps_after(0)
            if isinstance(step.what, StepUpdate) and step.what.turn == turn
        ]

    async def thread(self, *, context: bool = False) -> tuple[MessageUpdate, ...]:
        """The messages before this task in its conversation, if it is in one. `context`: also in its A2A context."""
        wanted = self.task.origin == NATIVE or (context and self.limits.context_history)
        return await earlier_messages(self._ledger, self.task) if wanted else ()

    async def kept_files(self) -> dict[str, str]:
        return await kept_files(self._ledger, self.task)

    async def view(self) -> TaskView | None:
        """The task in its current state, with the messages of earlier turns."""
        return (await read_past(self._ledger, self.task.id)).view()


def _comparable(update: object) -> bytes:
    """The ledger begins an artifact anew where an update adds to one that this attempt has not begun.

    Decoded, as the ledger returns it: a whole number of a `float` field is then another text.
    """
    update = msgspec.json.decode(_encode(update), type=type(update))
    return _encode(msgspec.structs.replace(update, append=False) if type(update) is ArtifactUpdate else update)


def _signaled(wait: Wait, steps: list[Step]) -> Advanced | None:
    waits = {each.step: each for each in wait.all_waits if each.signal is not None}
    for step in steps:
        update = step.what
        if type(update) is StepUpdate and update.no in waits and not update.waits:
            signal = waits[update.no].signal
            assert signal is not None
            return Advanced(step.generation, signal=Signal(signal, "", update.result))
    return None
