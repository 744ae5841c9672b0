"""A job: one attempt at a turn of a task, while an agent in this process works on it.

What the agent says is buffered (`job_buffer`). An agent that says everything at once and ends costs one record.

A job ends once, in the first way that was named. What is said after that, or after the job was stopped, is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any, Final, Protocol

import msgspec

from covenant.agents.runtime import turn_files
from covenant.agents.runtime.agent_calls import AgentCalls
from covenant.agents.runtime.agent_spans import begin_attempt
from covenant.agents.runtime.function_threads import AgentThreads, TurnStopped
from covenant.agents.runtime.job_buffer import FAILED, JobBuffer, JobServices
from covenant.agents.runtime.turn_limits import Spending, TurnSlot, recall_usage
from covenant.agents.runtime.turn_steps import StepError, TurnSteps
from covenant.exchange.file_source import FileSource
from covenant.exchange.stored_files import StoredFiles
from covenant.exchange.task_logs import TURN
from covenant.ledger.machine.commands import Advanced, Interrupt, LeasedTask, Release, Renew
from covenant.model.content import Content, File, Text
from covenant.model.errors import Conflict, Forbidden, Invalid, NotFound, OverLimit, Refusal, Unavailable
from covenant.model.ids import AgentId
from covenant.model.sanitizer import named_safely
from covenant.model.task import Ending, Result, ResultStatus, error_result
from covenant.model.task_event import MessageUpdate, StatusUpdate, StepUpdate, TurnUpdate, Wait
from covenant.model.tracing import Span, Tracer

DAEMON_STOPS: Final = "the daemon stops"
WAITS: Final = "waits"
HELD: Final = "held"
# Read through their classes, which have a hook for that, these would take fifty times as long.
_OK, _COMPLETED = ResultStatus.OK, Ending.COMPLETED
log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class RunnableAgent(Protocol):
    """What does an agent's work: one turn a call, any number of turns at once."""

    async def run(self, job: Job) -> None:
        """Say what there is to say, and end the job. To return without a word is to have completed it."""


class Job(JobBuffer):
    __slots__ = (
        "_calls",
        "_ending",
        "_parked",
        "_result",
        "_retry",
        "_spending",
        "_steps",
        "_stored_messages",
        "deadline",
        "failure",
        "parking",
        "runner",
        "slot",
        "span",
        "stopping",
        "threads",
    )

    def __init__(
        self, leased: LeasedTask, holder: AgentId, services: JobServices, threads: AgentThreads, slot: TurnSlot
    ) -> None:
        self.full = False
        """The agent should wait for `room`."""
        self.over = False
        """Nothing more is written."""
        self.finishing = False
        self.parking = False
        """Its last record parks the task until something comes."""
        self.failure = ""
        """Why the agent failed, in one word that its retries can name."""
        self.stopping: str | None = None
        """Why it is being stopped."""
        self.runner: asyncio.Task[None] | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self.span: Span | None = None
        self.unfinished: Callable[[], object] | None = None
        """Closes what is being said."""
        self._spending: Spending | None = None
        self._calls: AgentCalls | None = None
        self._steps: TurnSteps | None = None
        self._stored_messages: tuple[MessageUpdate, ...] | None = None
        self._mute = False
        self._large = False
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
        self._retry: tuple[int, StatusUpdate] | None = None
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
        self._pending: list[TurnUpdate] = []

    @property
    def tracer(self) -> Tracer:
        return self._services.tracer

    @property
    def spending(self) -> Spending:
        if self._spending is None:
            self._spending = Spending(self.task, self.notes)
        return self._spending

    @property
    def tokens_left(self) -> int | None:
        """Of the budget of this task; None if it has none."""
        return self.spending.budget.left if self.spending.budget is not None else None

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
    def steps(self) -> TurnSteps:
        if self._steps is None:
            self._steps = TurnSteps(self)
        return self._steps

    @property
    def files(self) -> StoredFiles | None:
        return self._services.files

    def save_file(self, name: str, source: FileSource, media_type: str | None = None) -> Awaitable[File]:
        return turn_files.save_file(self, name, source, media_type)

    def open_file(self, part: Content) -> AsyncIterator[bytes]:
        return turn_files.open_file(self, part)

    @property
    def stored_messages(self) -> tuple[MessageUpdate, ...]:
        """The messages as the ledger has them."""
        return self.messages if self._stored_messages is None else self._stored_messages

    async def _inline_files(self, files: StoredFiles) -> None:
        """Bytes that came inline are given to the agent as they came."""
        said = self.messages
        if any(type(part) is File for message in said for part in message.parts):
            given = [msgspec.structs.replace(each, parts=await files.inlined(each.parts)) for each in said]
            self._stored_messages = said
            self.leased = msgspec.structs.replace(self.leased, messages=tuple(given))

    @property
    def has_spent(self) -> bool:
        return self._spending is not None

    async def suspend(
        self, wait: Wait, steps: tuple[StepUpdate, ...] = (), told: StatusUpdate | None = None
    ) -> Advanced:
        """The turn stops here, and is run again when what it waits for has come; unless a signal is there already."""
        self.parking = True
        try:
            advanced = await self.write(*steps, wait=wait, told=told)
        finally:
            self.parking = False
        if advanced.signal is None:
            self.over = self._mute = True
            self.stopping = WAITS
        return advanced

    async def hold(self, reason: str) -> None:
        """The turn cannot go on: its task keeps what it has, and an operator decides."""
        log.warning("agent.held", extra=self.fields(reason=reason))
        self.over = self._mute = True
        self.stopping = HELD
        lease_id, hold_ms = self.leased.lease.lease_id, self.limits.hold_ms
        await self.leave(
            Interrupt(task_id=self.task.id, holder=self.holder, lease_id=lease_id, reason=reason, hold_ms=hold_ms)
        )

    @property
    def left_ms(self) -> float | None:
        """The time that is left to it, where it was given one beside its task's own."""
        return None if self.deadline is None else max(0.0, (self.deadline.when() - self._loop.time()) * 1000)

    def complete(self, *content: Content, partial: bool = False, reply: bool = False) -> None:
        """`reply`: the content is a bare message, and whoever sent the task need not hear of a task at all."""
        status = ResultStatus.PARTIAL if partial else _OK
        bare = reply or msgspec.UNSET
        if content and type(content[0]) is not Text:
            self._large = True
        self._end(Result(task_id=self.task.id, status=status, content=content, reply=bare), _COMPLETED)

    def fail(self, message: str, *content: Content, reason: str = "") -> None:
        """`message` is told to the sender: nothing of it may be meant for us alone. `reason`: see `failure`."""
        if not self.ended:
            self.failure = reason
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

    def retry(self, after_s: float, text: str) -> None:
        """This attempt has failed, and the next one begins after a pause; its sender is told."""
        if not self.ended:
            attempt = self.leased.lease.attempt
            told = f"{text or f'attempt {attempt} failed'}; attempt {attempt + 1} begins in {after_s:.3g} s"
            self._retry = (round(after_s * 1000), StatusUpdate(told))
            self._mute = True

    def retry_failed(self, pause_s: float | None, retry_on: Collection[str]) -> None:
        """Begin again what failed for one of these reasons. `pause_s` None: this was the last attempt."""
        if self.over:
            return
        if pause_s is None and self._retry is not None:
            told, self._retry = self._retry[1], None
            self.fail(told.text.rpartition("; attempt")[0])
        elif pause_s is not None and self._result is not None and self.failure in retry_on:
            failed, self._result, self._ending = self._result, None, None
            self.retry(pause_s, failed.error_message or "")

    @property
    def ended(self) -> bool:
        return self._result is not None or self._parked is not None or self._retry is not None

    async def renew(self) -> None:
        """A heartbeat, for work that takes long: its lease stays young, and nobody takes it for stale."""
        if not self.over:
            await self._ledger.commit(
                Renew(task_id=self.task.id, holder=self.holder, lease_id=self.leased.lease.lease_id)
            )

    @property
    def said(self) -> tuple[Content, ...]:
        """Its result's content, once it has one."""
        return self._result.content if self._result is not None else ()

    @property
    def outcome(self) -> tuple[str, bool]:
        """How it ended, in a word, and whether that is a failure."""
        if self._parked is not None:
            return self._parked.state, False
        if self._retry is not None:
            return "retried", True
        if self._ending is None:
            return self.stopping or "stopped", self.stopping != WAITS
        return self._ending.value, self._ending in (Ending.FAILED, Ending.REJECTED)

    async def run(self, agent: RunnableAgent) -> None:
        """Everything from the first word to the last record. Raises nothing. Runs in a context of its own."""
        TURN.set(self.leased)
        try:
            try:
                if self.leased.turn > 1:
                    await recall_usage(self)
                if (self.task.parts or self.leased.messages) and self._services.files is not None:
                    await self._inline_files(self._services.files)
                await agent.run(self)
            except asyncio.CancelledError:
                if self.stopping is None and not self.ended:
                    # Nobody asked it to stop: it waited for something of its own that was canceled.
                    log.warning("agent.failed", exc_info=True, extra=self.fields())
                    self.fail(FAILED)
            except StepError as wrong:
                log.warning("agent.failed", exc_info=True, extra=self.fields())
                self.fail(f"{FAILED}: {wrong.message}")
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
        if self._retry is not None:
            for_ms, told = self._retry
            updates, self._pending = tuple(self._pending), []
            await self._advance(updates, wait=Wait(since_ms=self.now_ms, for_ms=for_ms), told=self._noted(told))
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
        self._result, self._ending, self._parked, self._retry = self._error(message, ()), Ending.FAILED, None, None
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

    async def leave(self, put_down: Release | Interrupt) -> bool:
        """After `stop`: what it had said is written; then the work goes back to the queue, or waits for an operator.

        False: that could not be written, as when the task was canceled meanwhile.
        """
        if self._flusher is not None:
            await asyncio.wait((self._flusher,))
        pending, self._pending = tuple(self._pending), []
        try:
            if pending:
                await self._advance(pending)
            await self._ledger.commit(put_down)
        except Refusal as refusal:
            self._refused(refusal)
            return False
        return True

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

    def _error(self, message: str, content: tuple[Content, ...]) -> Result:
        return Result(task_id=self.task.id, status=ResultStatus.ERROR, error_message=message, content=content)

    def _end(self, result: Result, ending: Ending) -> None:
        if self.unfinished is not None and not self._mute:
            self.unfinished()
        if self._result is None and self._parked is None and self._retry is None:
            self._result, self._ending = named_safely(result), ending
            self._mute = True

    def _close(self) -> None:
        self.over = self._mute = True
        self._make_room()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
