"""The buffer of a job: what its agent says, in order, on its way to the ledger.

Updates are written several a record. The agent does not wait for the disk, and nobody sees an update before it is
durable. The buffer is bounded: an agent that is faster than the disk waits for `room`. So is the output of a turn
(`A2aSettings`). A durable step is written at once, with what was said before it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from covenant.agents.runtime.function_threads import TurnStopped
from covenant.agents.runtime.task_past import TaskPast
from covenant.exchange.delegation import Delegations
from covenant.exchange.stored_files import StoredFiles
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.machine.commands import Advance, Advanced
from covenant.model.errors import Invalid, Refusal
from covenant.model.ids import AgentId
from covenant.model.sanitizer import named_safely
from covenant.model.settings import A2aSettings
from covenant.model.task import Ending, Result, account_of
from covenant.model.task_event import StatusUpdate, StepUpdate, TurnUpdate, Update, Wait
from covenant.model.tracing import Tracer

if TYPE_CHECKING:
    from covenant.agents.runtime.job import Job

FAILED: Final = "the agent failed"
BUFFERED_MAX: Final = 256
BUFFERED_BYTES_MAX: Final = 256 * 1024
# A job writes at most once in this time, except for its end: what comes faster than that shares a record.
PAUSE_S: Final = 0.001

log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class JobServices(NamedTuple):
    """What the jobs of a worker pool share. `done` is called once for each job, when it has ended."""

    ledger: Ledger
    loop: asyncio.AbstractEventLoop
    limits: A2aSettings
    done: Callable[[Job], None]
    delegations: Delegations | None
    tracer: Tracer
    files: StoredFiles | None = None
    """None: bytes stay in the ledger."""


class JobBuffer(TaskPast):
    __slots__ = (
        "_bytes",
        "_flusher",
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
        "finishing",
        "full",
        "holder",
        "leased",
        "notes",
        "over",
        "task",
        "unfinished",
    )

    full: bool
    over: bool
    finishing: bool
    holder: AgentId
    notes: dict[str, Any]
    unfinished: Callable[[], object] | None
    _bytes: int
    _updates: int
    _pending: list[TurnUpdate]
    _pending_bytes: int
    _mute: bool
    _next_flush: float
    _loop: asyncio.AbstractEventLoop
    _services: JobServices
    _timer: asyncio.Handle | None
    _flusher: asyncio.Task[None] | None
    _large: bool
    _room: asyncio.Future[None] | None

    def fail(self, message: str) -> None:
        raise NotImplementedError

    def cut(self, message: str) -> None:
        raise NotImplementedError

    def _refused(self, refusal: Refusal) -> None:
        raise NotImplementedError

    def allow(self, size: int) -> None:
        """So many bytes more may be said: they are no output of the agent."""
        self._bytes -= size

    def say(self, update: Update, size: int | None = None, *, last: bool = False) -> None:
        """Never waits. `size` is about how many bytes it has, where the caller knows. `last`: the job ends with it."""
        if self._mute:
            if self.over:
                raise TurnStopped
            return
        if size is None:
            update = named_safely(update)
            size = len(_encode(update))
            if self._services.files is not None and self._services.files.concerns(update.parts):
                self._large = True
        self._updates += 1
        self._bytes += size
        limits = self._services.limits
        if self._updates > limits.turn_updates_max or self._bytes > limits.turn_bytes_max:
            self._flooded()
        pending = self._pending
        pending.append(update)
        self._pending_bytes += size
        if len(pending) >= BUFFERED_MAX or self._pending_bytes >= BUFFERED_BYTES_MAX:
            self.full = True
        if self._timer is None and self._flusher is None and not last:
            self._schedule()

    async def room(self) -> None:
        """Wait until there is room for more: that is, until what was said is being written."""
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

    async def write(self, *steps: StepUpdate, wait: Wait | None = None, told: StatusUpdate | None = None) -> Advanced:
        """What was said before, and these steps, in one record. Returns when it is durable."""
        if self._mute:
            raise TurnStopped
        self._updates += len(steps)
        self._bytes += sum(len(_encode(step)) for step in steps)
        limits = self._services.limits
        if self._updates > limits.turn_updates_max or self._bytes > limits.turn_bytes_max:
            self._flooded()
        updates, self._pending, self._pending_bytes = (*self._pending, *steps), [], 0
        self._make_room()
        try:
            return await self._advance(updates, wait=wait, told=told)
        except Refusal as refusal:
            self._refused(refusal)
            raise TurnStopped from None

    def _advance(
        self,
        updates: tuple[TurnUpdate, ...],
        result: Result | None = None,
        ending: Ending | None = None,
        *,
        wait: Wait | None = None,
        told: StatusUpdate | None = None,
    ) -> Awaitable[Advanced]:
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
            told=told,
        )
        if self._large and self._services.files is not None:
            return self._advance_files(self._services.files, advance)
        return self._ledger.commit(advance)

    async def _advance_files(self, files: StoredFiles, advance: Advance) -> Advanced:
        """With large bytes in the blob store, first. What cannot be stored fails the turn, and does not lose it."""
        account, task_id, kept = account_of(self.task), self.task.id, list(advance.updates)
        try:
            for at, update in enumerate(kept):
                if not isinstance(update, StepUpdate) and files.concerns(update.parts):
                    parts = await files.store(update.parts, account, task_id)
                    kept[at] = msgspec.structs.replace(update, parts=parts)
            result = advance.result
            if result is not None:
                result = await files.store_result(result, account)
        except Refusal as refusal:
            raise Invalid(refusal.code, refusal.message) from refusal
        return await self._ledger.commit(msgspec.structs.replace(advance, updates=tuple(kept), result=result))

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
            await self._advance(updates)
        except Refusal as refusal:
            self._refused(refusal)
        except Exception:
            log.exception("agent.unwritten", extra=self.fields())
            self.cut(FAILED)
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

    def _flooded(self) -> None:
        limits = self._services.limits
        many = self._updates > limits.turn_updates_max
        much = f"{limits.turn_updates_max} updates" if many else f"{limits.turn_bytes_max} bytes"
        message = f"the agent said more than {much} in one turn"
        log.warning("agent.flooded", extra=self.fields(limit=much))
        self.unfinished = None
        self.fail(message)
        # Canceled a moment later, and only if it is still at it: the end of this very task must still be written.
        self._loop.call_soon(self.cut, message)
        raise TurnStopped

    def fields(self, **more: Any) -> dict[str, Any]:
        return {"task_id": self.task.id, "agent": self.holder.display, "attempt": self.leased.lease.attempt, **more}
