"""A job: one attempt at a turn of a task, while an agent in this process works on it.

What the agent says is buffered, and written in order, several updates a record. The agent does not wait for the disk,
and nobody sees an update before it is durable. An agent that says everything at once and ends costs one record. The
buffer is bounded: an agent that is faster than the disk waits for `room`. So is the output of a turn (`A2aSettings`).

A job ends once, in the first way that was named. What is said after that, or after the job was stopped, is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from covenant.agents.runtime.agent_calls import AgentCalls
from covenant.agents.runtime.agent_spans import begin_attempt
from covenant.agents.runtime.function_threads import AgentThreads, TurnStopped
from covenant.agents.runtime.turn_limits import Spending, TurnSlot, recall_usage
from covenant.exchange.delegation import Delegations
from covenant.exchange.native import earlier_messages, kept_files
from covenant.exchange.task_logs import TURN
from covenant.exchange.tasks.reader import PAGE, TaskReader
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.machine.commands import Advance, Advanced, Interrupt, LeasedTask, Release, Renew
from covenant.model.content import Content
from covenant.model.errors import Conflict, Forbidden, Invalid, NotFound, OverLimit, Refusal, Unavailable
from covenant.model.ids import AgentId
from covenant.model.sanitizer import named_safely
from covenant.model.settings import A2aSettings
from covenant.model.task import NATIVE, Ending, Result, ResultStatus, error_result
from covenant.model.task_event import MessageUpdate, StatusUpdate, Update
from covenant.model.task_view import TaskView, first_message
from covenant.model.tracing import Span, Tracer

FAILED: Final = "the agent failed"
DAEMON_STOPS: Final = "the daemon stops"
BUFFERED_MAX: Final = 256
BUFFERED_BYTES_MAX: Final = 256 * 1024
# A job writes at most once in this time, except for its end: what comes faster than that shares a record.
PAUSE_S: Final = 0.001

# Read through their classes, which have a hook for that, these would take fifty times as long.
_OK, _COMPLETED = ResultStatus.OK, Ending.COMPLETED
log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class RunnableAgent(Protocol):
    """What does an agent's work: one turn a call, any number of turns at once."""

    async def run(self, job: Job) -> None:
        """Say what there is to say, and end the job. To return without a word is to have completed it."""


class JobServices(NamedTuple):
    """What the jobs of a worker pool share. `done` is called once for each job, when it has ended."""

    ledger: Ledger
    loop: asyncio.AbstractEventLoop
    limits: A2aSettings
    done: Callable[[Job], None]
    delegations: Delegations | None
    tracer: Tracer


class Job:
    __slots__ = (
        "_bytes",
        "_calls",
        "_ending",
        "_flusher",
        "_ledger",
        "_loop",
        "_mute",
        "_next_flush",
        "_parked",
        "_pending",
        "_pending_bytes",
        "_result",
        "_room",
        "_services",
        "_spending",
        "_timer",
        "_updates",
        "deadline",
        "finishing",
        "full",
        "holder",
        "leased",
        "notes",
        "over",
        "runner",
        "slot",
        "span",
        "stopping",
        "task",
        "threads",
        "unfinished",
    )

    def __init__(
        self, leased: LeasedTask, holder: AgentId, services: JobServices, threads: AgentThreads, slot: TurnSlot
    ) -> None:
        self.full = False
        """The agent should wait for `room`."""
        self.over = False
        """Nothing more is written."""
        self.finishing = False
        self.stopping: str | None = None
        """Why it is being stopped."""
        self.runner: asyncio.Task[None] | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self.span: Span | None = None
        self.unfinished: Callable[[], object] | None = None
        """Closes what is being said."""
        self._spending: Spending | None = None
        self._calls: AgentCalls | None = None
        self._mute = False
        self._pending_bytes = 0
        self._updates = 0
        self._bytes = 0
        self._timer: asyncio.Handle | None = None
        self._flusher: asyncio.Task[None] | None = None
        self._next_flush = 0.0
        self._room: asyncio.Future[None] | None = None
        self._result: Result | None = None
        self._ending: Ending | None = None
        self._parked: StatusUpdate | None = None
        if services.tracer.on:
            self.span, leased = begin_attempt(services.tracer, leased)
        self.leased = leased
        self.task = leased.task
        self.holder = holder
        self.threads: Final = threads
        self.slot = slot
        self.notes: dict[str, Any] = {}
        """What goes into the result's metadata."""
        self._services = services
        self._ledger = services.ledger
        self._loop = services.loop
        self._pending: list[Update] = []

    def say(self, update: Update, size: int | None = None, *, last: bool = False) -> None:
        """Never waits. `size` is about how many bytes it has, where the caller knows. `last`: the job ends with it."""
        if self._mute:
            if self.over:
                raise TurnStopped
            return
        if size is None:
            update = named_safely(update)
            size = len(_encode(update))
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
    def tracer(self) -> Tracer:
        return self._services.tracer

    @property
    def spending(self) -> Spending:
        if self._spending is None:
            self._spending = Spending(self.task, self.notes)
        return self._spending

    def spend(self, amounts: dict[str, float], *, delegated: bool = False) -> None:
        """`delegated`: others used it, whom this task had asked."""
        over = self.spending.add(amounts, delegated=delegated)
        if over is not None:
            self.fail(over)
            self._loop.call_soon(self.cut, over)

    @property
    def calls(self) -> AgentCalls:
        if self._calls is None:
            delegations = self._services.delegations
            if delegations is None:
                raise Unavailable("no_delegation", "this agent cannot call other agents")
            self._calls = AgentCalls(self, delegations)
        return self._calls

    @property
    def left_ms(self) -> float | None:
        """The time that is left to it, where it was given one beside its task's own."""
        return None if self.deadline is None else max(0.0, (self.deadline.when() - self._loop.time()) * 1000)

    def complete(self, *content: Content, partial: bool = False, reply: bool = False) -> None:
        """`reply`: the content is a bare message, and whoever sent the task need not hear of a task at all."""
        status = ResultStatus.PARTIAL if partial else _OK
        bare = reply or msgspec.UNSET
        self._end(Result(task_id=self.task.id, status=status, content=content, reply=bare), _COMPLETED)

    def fail(self, message: str, *content: Content) -> None:
        """`message` is told to the sender: nothing of it may be meant for us alone."""
        self._end(self._error(message, content), Ending.FAILED)

    def reject(self, message: str, *content: Content) -> None:
        self._end(self._error(message, content), Ending.REJECTED)

    def give_up(self, message: str, *content: Content) -> None:
        """The agent itself calls the task canceled."""
        self._end(self._error(message, content), Ending.CANCELED)

    def park(self, update: StatusUpdate) -> None:
        """The turn is over, and the task waits for its sender."""
        if not self.ended:
            self._parked = named_safely(update)
            self._mute = True

    @property
    def ended(self) -> bool:
        return self._result is not None or self._parked is not None

    async def renew(self) -> None:
        """A heartbeat, for work that takes long: its lease stays young, and nobody takes it for stale."""
        if not self.over:
            await self._ledger.commit(
                Renew(task_id=self.task.id, holder=self.holder, lease_id=self.leased.lease.lease_id)
            )

    async def noted(self, name: str) -> Any:
        """What was last said under this name in the metadata of a status, in this turn or before it."""
        found, after = None, 0
        while steps := await self._ledger.steps(self.task.id, after, PAGE):
            for step in steps:
                if isinstance(step.what, StatusUpdate) and name in (step.what.metadata or {}):
                    assert step.what.metadata is not None
                    found = step.what.metadata[name]
            after = steps[-1].generation
        return found

    async def thread(self, *, context: bool = False) -> tuple[MessageUpdate, ...]:
        """What was said in its conversation before this task, if it is part of one; `context`: or in its context."""
        wanted = self.task.origin == NATIVE or (context and self._services.limits.context_history)
        return await earlier_messages(self._ledger, self.task) if wanted else ()

    async def kept_files(self) -> dict[str, str]:
        return await kept_files(self._ledger, self.task)

    @property
    def said(self) -> tuple[Content, ...]:
        """Its result's content, once it has one."""
        return self._result.content if self._result is not None else ()

    @property
    def outcome(self) -> tuple[str, bool]:
        """How it ended, in a word, and whether that is a failure."""
        if self._parked is not None:
            return self._parked.state, False
        if self._ending is None:
            return self.stopping or "stopped", True
        return self._ending.value, self._ending in (Ending.FAILED, Ending.REJECTED)

    async def view(self) -> TaskView | None:
        """The task as it stands: what was said in earlier turns."""
        return (await TaskReader(self._ledger).past(self.task.id)).view()

    @property
    def messages(self) -> tuple[MessageUpdate, ...]:
        return self.leased.messages or (first_message(self.task),)

    async def run(self, agent: RunnableAgent) -> None:
        """Everything from the first word to the last record. Raises nothing. Runs in a context of its own."""
        TURN.set(self.leased)
        try:
            try:
                if self.leased.turn > 1:
                    await recall_usage(self)
                await agent.run(self)
            except asyncio.CancelledError:
                if self.stopping is None and not self.ended:
                    # Nobody asked it to stop: it waited for something of its own that was canceled.
                    log.warning("agent.failed", exc_info=True, extra=self.fields())
                    self.fail(FAILED)
            except BaseException:  # agents raise what they like: it fails the task, and no more
                if self.stopping is None:
                    log.warning("agent.failed", exc_info=True, extra=self.fields())
                self.fail(FAILED)
            if not self.over:
                await self._finish()
        except asyncio.CancelledError:
            pass
        except Refusal as refusal:
            self._refused(refusal)
        except Exception:
            log.exception("agent.unwritten", extra=self.fields())
        finally:
            self._close()
            self._services.done(self)

    async def _finish(self) -> None:
        """The last record: what is buffered, and how it ended."""
        if self.finishing:
            return
        self.finishing = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._flusher is not None:
            await asyncio.wait((self._flusher,))
            if self.over:
                return
        if self._result is None and self._parked is None:
            self.complete()
        updates, self._pending = tuple(self._pending), []
        if self._parked is not None:
            updates = (*updates, self._noted(self._parked))
        try:
            await self._advance(updates, self._result, self._ending)
        except (Invalid, OverLimit) as refusal:
            await self._finish_refused(refusal)

    async def _finish_refused(self, refusal: Refusal) -> None:
        """What the agent said cannot be kept. That it ended must be: at last with nothing that is the agent's."""
        log.warning("agent.refused", extra=self.fields(code=refusal.code, reason=refusal.message))
        try:
            await self._advance((), error_result(self.task.id, f"{FAILED}: {refusal.message}"), Ending.FAILED)
        except (Invalid, OverLimit) as again:
            log.warning("agent.refused", extra=self.fields(code=again.code, reason=again.message))
            self.notes.clear()
            await self._advance((), error_result(self.task.id, FAILED), Ending.FAILED)

    def _noted(self, parked: StatusUpdate) -> StatusUpdate:
        if not self.notes:
            return parked
        return msgspec.structs.replace(parked, metadata={**(parked.metadata or {}), **self.notes})

    def _advance(
        self, updates: tuple[Update, ...], result: Result | None = None, ending: Ending | None = None
    ) -> Awaitable[Advanced]:
        if result is not None and self.notes:
            result = msgspec.structs.replace(result, metadata=self.notes)
        return self._ledger.commit(
            Advance(
                task_id=self.task.id,
                holder=self.holder,
                lease_id=self.leased.lease.lease_id,
                updates=updates,
                result=result,
                ending=ending,
            )
        )

    def lose(self, why: str) -> None:
        """The lease is somebody else's: nothing of it is written any more."""
        self.over = self._mute = True
        self._pending = []
        self._cancel(why)

    def cut(self, message: str) -> None:
        """The job has failed, whatever its agent says or does."""
        if self.over:
            return
        with contextlib.suppress(TurnStopped):
            self.fail(message)  # which closes what is being said
        self._result, self._ending, self._parked = self._error(message, ()), Ending.FAILED, None
        self._mute = True
        self._cancel(message)

    def stop(self) -> bool:
        """The process ends, and so does the body: `leave` says what becomes of its work. False: it has ended."""
        if self.over or self.ended or self.finishing:
            return False
        self.over = self._mute = True
        self._cancel(DAEMON_STOPS)
        return True

    def _cancel(self, why: str) -> None:
        if self.stopping is None:
            self.stopping = why
        if self.runner is not None and not self.finishing:
            self.runner.cancel()
        self._make_room()

    async def abandon(self) -> None:
        """The agent does not stop. Its job ends without it."""
        if not self.over:
            self.spending.add(self.spending.end_running())
            try:
                await self._finish()
            except Refusal as refusal:
                self._refused(refusal)
        self._close()

    async def leave(self, put_down: Release | Interrupt) -> None:
        """After `stop`: what it had said is written; then the work goes back to the queue, or waits for an operator."""
        if self._flusher is not None:
            await asyncio.wait((self._flusher,))
        pending, self._pending = tuple(self._pending), []
        try:
            if pending:
                await self._advance(pending)
            await self._ledger.commit(put_down)
        except Refusal as refusal:
            self._refused(refusal)

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

    def _refused(self, refusal: Refusal) -> None:
        if isinstance(refusal, Invalid | OverLimit):
            log.warning("agent.refused", extra=self.fields(code=refusal.code, reason=refusal.message))
            self._pending, self.unfinished = [], None
            self.cut(f"{FAILED}: {refusal.message}")
            return
        if not isinstance(refusal, Conflict | NotFound | Forbidden):
            # The disk: what was not written is still leased, and an operator will see it.
            log.error("agent.unwritten", extra=self.fields(code=refusal.code, reason=refusal.message))
        self.lose(refusal.code)

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

    def _error(self, message: str, content: tuple[Content, ...]) -> Result:
        return Result(task_id=self.task.id, status=ResultStatus.ERROR, error_message=message, content=content)

    def _end(self, result: Result, ending: Ending) -> None:
        if self.unfinished is not None and not self._mute:
            self.unfinished()
        if self._result is None and self._parked is None:
            self._result, self._ending = named_safely(result), ending
            self._mute = True

    def _close(self) -> None:
        self.over = self._mute = True
        self._make_room()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def fields(self, **more: Any) -> dict[str, Any]:
        return {"task_id": self.task.id, "agent": self.holder.display, "attempt": self.leased.lease.attempt, **more}
