"""A job: one attempt at a turn of a task, while an agent in this process works on it.

The agent's output is buffered (`job_buffer`). An agent that sends everything at once and ends costs one record.

A job ends once: the first call that ends it counts. Output after that, or after the job was stopped, is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Collection
from typing import Final, Protocol

import msgspec

from covenant.agents.runtime import turn_files
from covenant.agents.runtime.agent_calls import AgentCalls
from covenant.agents.runtime.agent_spans import begin_attempt
from covenant.agents.runtime.durable_step import StepError
from covenant.agents.runtime.function_threads import AgentThreads, TurnStopped
from covenant.agents.runtime.job_buffer import FAILED, JobBuffer, JobServices
from covenant.agents.runtime.model_calls import ModelCalls
from covenant.agents.runtime.turn_limits import HeldTokens, RunOnLoop, Spending, TurnSlot, recall_usage
from covenant.agents.runtime.turn_output import announce_attempt
from covenant.agents.runtime.turn_steps import TurnSteps
from covenant.exchange.file_source import FileSource
from covenant.exchange.stored_files import StoredFiles
from covenant.exchange.task_logs import TURN
from covenant.ledger.machine.commands import Advanced, Interrupt, LeasedTask, Release, Renew
from covenant.model.content import Content, File, Text
from covenant.model.errors import Conflict, Forbidden, Invalid, NotFound, OverLimit, Refusal, Unavailable
from covenant.model.ids import AgentId
from covenant.model.peers.delegation import BUDGET_EXCEEDED
from covenant.model.sanitizer import named_safely
from covenant.model.task import Ending, Result, ResultStatus, error_result
from covenant.model.task_event import MessageUpdate, StatusUpdate, StepUpdate, Wait
from covenant.model.tracing import Span, Tracer

DAEMON_STOPS: Final = "the daemon stops"
WAITS: Final = "waits"
HELD: Final = "held"
# Read through their classes, whose metaclass has a hook, these would take fifty times as long.
_OK, _COMPLETED = ResultStatus.OK, Ending.COMPLETED
log = logging.getLogger(__name__)


class RunnableAgent(Protocol):
    """Does an agent's work: one turn a call, any number of turns at once."""

    async def run(self, job: Job) -> None:
        """Writes the output and ends the job. Returning without ending the job completes it."""


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
        "begun_before",
        "deadline",
        "ended",
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
        self.ended = False
        """The end of the job is decided: a result, a question, or a further attempt."""
        self.parking: asyncio.Future[None] | None = None
        """Set while the task is being parked, and a signal that lets the turn go on may still be found."""
        self.failure = ""
        """Why the agent failed: a code that `retry_on` can name."""
        self.stopping: str | None = None
        """Why the job is being stopped."""
        self.runner: asyncio.Task[None] | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self.span: Span | None = None
        self._spending: Spending | None = None
        self._calls: AgentCalls | None = None
        self._steps: TurnSteps | None = None
        self._stored_messages: tuple[MessageUpdate, ...] | None = None
        self._result: Result | None = None
        self._ending: Ending | None = None
        self._parked: StatusUpdate | None = None
        self._retry: tuple[float, str] | None = None
        if services.tracer.on:
            self.span, leased = begin_attempt(services.tracer, leased)
        super().__init__(services, leased, holder)
        self.begun_before: Final = leased.continues or leased.lease.attempt > 1
        """An earlier lease of this turn may have written steps or output."""
        self.threads: Final = threads
        self.slot = slot

    @property
    def tracer(self) -> Tracer:
        return self._services.tracer

    @property
    def model_calls(self) -> ModelCalls:
        return self._services.model_calls

    @property
    def spending(self) -> Spending:
        if self._spending is None:
            self._spending = Spending(self.task, self.notes, self.model_calls.task_tokens_max)
        return self._spending

    @property
    def tokens_left(self) -> int | None:
        """The rest of this task's token budget; None if it has none."""
        return self.spending.budget.left if self.spending.budget is not None else None

    def spend(self, amounts: dict[str, float], *, delegated: bool = False) -> str | None:
        """Adds to the usage. Returns why the job is over, if it is. `delegated`: other agents used it for this task."""
        code_before = self.notes.get("code")
        over = self.spending.add(amounts, delegated=delegated)
        if over is not None and code_before != BUDGET_EXCEEDED:
            self.fail(over)
            self._loop.call_soon(self.fail_now, over)
        return over

    def reserve(self, tokens: int, ask: RunOnLoop | None = None) -> HeldTokens:
        return HeldTokens(self.spending.budget, tokens, ask)

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

    def save_file(self, name: str, source: FileSource, media_type: str | None = None) -> Awaitable[File]:
        return turn_files.save_file(self, name, source, media_type)

    def open_file(self, part: Content) -> AsyncIterator[bytes]:
        return turn_files.open_file(self, part)

    @property
    def stored_messages(self) -> tuple[MessageUpdate, ...]:
        """The messages as the ledger has them."""
        return self.messages if self._stored_messages is None else self._stored_messages

    async def _inline_files(self, files: StoredFiles) -> None:
        """Replaces stored files by their bytes where the sender sent them inline."""
        messages = self.messages
        if any(type(part) is File for message in messages for part in message.parts):
            inlined = [msgspec.structs.replace(each, parts=await files.inlined(each.parts)) for each in messages]
            self._stored_messages = messages
            self.leased = msgspec.structs.replace(self.leased, messages=tuple(inlined))

    @property
    def has_spent(self) -> bool:
        return self._spending is not None

    async def suspend(
        self, wait: Wait, steps: tuple[StepUpdate, ...] = (), status: StatusUpdate | None = None
    ) -> Advanced:
        """Parks the task and stops the turn until its wait ends; unless the signal is there already."""
        advanced = await self.write(*steps, wait=wait, status=status)
        if advanced.signal is None:
            self.over = self._mute = True
            if self.stopping is None:
                self.stopping = WAITS
                self._stop_runner()
        return advanced

    async def hold(self, reason: str) -> None:
        """Holds the task for an operator: the turn cannot go on."""
        log.warning("agent.held", extra=self.fields(reason=reason))
        self.over = self._mute = True
        self.stopping = HELD
        lease_id, hold_ms = self.leased.lease.lease_id, self.limits.hold_ms
        await self.end_lease(
            Interrupt(
                task_id=self.task.id,
                holder=self.holder,
                lease_id=lease_id,
                reason=reason,
                hold_ms=hold_ms,
                by_agent=True,
            )
        )
        self._stop_runner()

    def _stop_runner(self) -> None:
        """Stops the runner, if another of the agent's asyncio tasks stopped the turn."""
        if self.runner is not None and self.runner is not asyncio.current_task():
            self.runner.cancel()

    async def ensure_running(self) -> None:
        """Raises `TurnStopped` if the job is over. Called before any effect beyond the job's own records.

        So a function that caught the stop of its turn, as `asyncio.gather` and `TaskGroup` do, is stopped again.
        """
        if asyncio.get_running_loop() is not self._loop:
            raise StepError("wrong_loop", "a turn can be used on the daemon's event loop only; use a plain function")
        while self.parking is not None:
            await asyncio.wait((self.parking,))
        if self.over:
            raise TurnStopped

    @property
    def left_ms(self) -> float | None:
        """The time left until the pool's deadline; None if it set none."""
        return None if self.deadline is None else max(0.0, (self.deadline.when() - self._loop.time()) * 1000)

    def complete(self, *content: Content, partial: bool = False, reply: bool = False) -> None:
        """Ends as completed. `reply`: the content is a bare message, and the sender need not see a task."""
        status = ResultStatus.PARTIAL if partial else _OK
        bare = reply or msgspec.UNSET
        if content and type(content[0]) is not Text:
            self._large = True
        self._end(Result(task_id=self.task.id, status=status, content=content, reply=bare), _COMPLETED)

    def fail(self, message: str, *content: Content, reason: str = "") -> None:
        """Ends as failed. The sender sees `message`, so nothing internal may be in it. `reason`: see `failure`."""
        if not self.ended:
            self.failure = reason
        self._end(self._error(message, content), Ending.FAILED)

    def reject(self, message: str, *content: Content) -> None:
        self._end(self._error(message, content), Ending.REJECTED)

    def end_canceled(self, message: str, *content: Content) -> None:
        """Ends as canceled by the agent itself."""
        self._end(self._error(message, content), Ending.CANCELED)

    def park(self, update: StatusUpdate) -> None:
        """Ends the turn; the task waits for its sender."""
        if not self.ended:
            self._parked = named_safely(update)
            self.ended = self._mute = True

    def retry(self, after_s: float, text: str) -> None:
        """Ends this attempt as failed; the next one begins after a pause, and the sender is told."""
        if not self.ended:
            self._retry = (after_s, text or f"attempt {self.leased.lease.attempt} failed")
            self.ended = self._mute = True

    def retry_failed(self, pause_s: float | None, retry_on: Collection[str]) -> None:
        """Begins again after a failure for one of these reasons. `pause_s` None: this was the last attempt.

        A job that was failed without its agent, as after its time, does not begin again.
        """
        if self.over or self.stopping not in (None, DAEMON_STOPS):
            return
        if pause_s is None and self._retry is not None:
            text, self._retry, self.ended = self._retry[1], None, False
            self.fail(text)
        elif pause_s is not None and self._result is not None and self.failure in retry_on:
            failed, self._result, self._ending, self.ended = self._result, None, None, False
            self.retry(pause_s, failed.error_message or "")

    async def renew(self) -> None:
        """Renews the lease, for long work, so that nobody takes it for stale."""
        if not self.over:
            await self._ledger.commit(
                Renew(task_id=self.task.id, holder=self.holder, lease_id=self.leased.lease.lease_id)
            )

    @property
    def result_content(self) -> tuple[Content, ...]:
        """The result's content, once there is a result."""
        return self._result.content if self._result is not None else ()

    @property
    def outcome(self) -> tuple[str, bool]:
        """The outcome's name, and whether it is a failure."""
        if self._parked is not None:
            return self._parked.state, False
        if self._retry is not None:
            return "retried", True
        if self._ending is None:
            return self.stopping or "stopped", self.stopping != WAITS
        return self._ending.value, self._ending in (Ending.FAILED, Ending.REJECTED)

    async def run(self, agent: RunnableAgent) -> None:
        """Runs the whole job, to its last record. Raises nothing. Runs in a context of its own."""
        TURN.set(self.leased)
        try:
            try:
                if self.leased.turn > 1:
                    await recall_usage(self)
                if (self.task.parts or self.leased.messages) and self.files is not None:
                    await self._inline_files(self.files)
                await agent.run(self)
            except asyncio.CancelledError:
                if self.stopping is None and not self.ended:
                    # Nobody stopped the job: the agent awaited a task of its own that was canceled.
                    log.warning("agent.failed", exc_info=True, extra=self.fields())
                    self.fail(FAILED)
            except StepError as wrong:
                log.warning("agent.failed", exc_info=True, extra=self.fields())
                self.fail(f"{FAILED}: {wrong.message}")
            except BaseException:  # an exception of an agent fails its task, and nothing else
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
        """Writes the last record: the buffered output, and the outcome."""
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
        if self._result is None and self._parked is None and self._retry is None:
            self.complete()
        updates, self._pending = tuple(self._pending), []
        wait: Wait | None = None
        status: StatusUpdate | None = None
        if self._retry is not None:
            (after_s, text), now_ms = self._retry, self.now_ms
            wait = Wait(since_ms=now_ms, for_ms=round(after_s * 1000))
            status = self._with_notes(announce_attempt(text, self.leased.lease.attempt + 1, after_s, now_ms))
        elif self._parked is not None:
            updates = (*updates, self._with_notes(self._parked))
        try:
            await self.write_record(updates, self._result, self._ending, wait=wait, status=status)
        except (Invalid, OverLimit) as refusal:
            await self._finish_refused(refusal)

    async def _finish_refused(self, refusal: Refusal) -> None:
        """Records a failure in place of output that the ledger refuses; at last without the agent's metadata, too."""
        log.warning("agent.refused", extra=self.fields(code=refusal.code, reason=refusal.message))
        self._parked, self._retry, self._ending = None, None, Ending.FAILED
        try:
            await self.write_record((), error_result(self.task.id, f"{FAILED}: {refusal.message}"), Ending.FAILED)
        except (Invalid, OverLimit) as again:
            log.warning("agent.refused", extra=self.fields(code=again.code, reason=again.message))
            self.notes.clear()
            await self.write_record((), error_result(self.task.id, FAILED), Ending.FAILED)

    def _with_notes(self, parked: StatusUpdate) -> StatusUpdate:
        if not self.notes:
            return parked
        return msgspec.structs.replace(parked, metadata={**(parked.metadata or {}), **self.notes})

    def lose(self, why: str) -> None:
        """Stops the job because its lease is lost: nothing more is written."""
        self.over = self._mute = True
        self._pending = []
        self._cancel(why)

    def fail_now(self, message: str) -> None:
        """Fails the job at once, without waiting for its agent."""
        if self.over:
            return
        self.fail(message)  # closes the open text artifact
        self._result, self._ending, self._parked, self._retry = self._error(message, ()), Ending.FAILED, None, None
        self.ended = self._mute = True
        self._cancel(message)

    def stop(self) -> bool:
        """Stops the job because the process ends; `end_lease` then decides about its work. False: the job has ended.

        An agent that has ended its job, and cleans up without end, is canceled: the outcome is written nevertheless.
        """
        if self.over or self.finishing:
            return False
        if not self.ended:
            self.over = self._mute = True
        self._cancel(DAEMON_STOPS)
        return self.over

    def _cancel(self, why: str) -> None:
        if self.stopping is None:
            self.stopping = why
        if self.runner is not None and not self.finishing:
            self.runner.cancel()
        self._make_room()

    async def abandon(self) -> None:
        """Ends the job without its agent, which does not stop."""
        if not self.over:
            self.spending.add(self.spending.end_running())
            try:
                await self._finish()
            except Refusal as refusal:
                self._refused(refusal)
        self._close()

    async def end_lease(self, command: Release | Interrupt) -> bool:
        """After `stop`: writes the output so far; then the work goes back to the queue, or waits for an operator.

        False: that could not be written, as when the task was canceled meanwhile.
        """
        if self._flusher is not None:
            await asyncio.wait((self._flusher,))
        pending, self._pending = tuple(self._pending), []
        try:
            if pending:
                await self.write_record(pending)
            await self._ledger.commit(command)
        except Refusal as refusal:
            self._refused(refusal)
            return False
        return True

    def _refused(self, refusal: Refusal) -> None:
        if isinstance(refusal, Invalid | OverLimit):
            log.warning("agent.refused", extra=self.fields(code=refusal.code, reason=refusal.message))
            self._pending, self.unfinished = [], None
            self.fail_now(f"{FAILED}: {refusal.message}")
            return
        if not isinstance(refusal, Conflict | NotFound | Forbidden):
            log.error("agent.unwritten", extra=self.fields(code=refusal.code, reason=refusal.message))
            if not self.finishing and not self.over:
                self.fail_now(f"{FAILED}: {refusal.message}")  # written if the ledger accepts records again
                return
        self.lose(refusal.code)

    def _error(self, message: str, content: tuple[Content, ...]) -> Result:
        return Result(task_id=self.task.id, status=ResultStatus.ERROR, error_message=message, content=content)

    def _end(self, result: Result, ending: Ending) -> None:
        if self.unfinished is not None and not self._mute:
            with contextlib.suppress(TurnStopped):  # raised if the closing chunk is over a limit, which ends the job
                self.unfinished()
        if not self.ended:
            content = result.content
            nameless = len(content) == 1 and type(content[0]) is Text and content[0].filename is None
            self._result, self._ending = result if nameless else named_safely(result), ending
            self.ended = self._mute = True

    def _close(self) -> None:
        self.over = self._mute = True
        if self.full or self._room is not None:
            self._make_room()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
