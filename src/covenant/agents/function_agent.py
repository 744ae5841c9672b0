"""Function agents: calls the author's function and sends what it yields or returns.

An async function runs on the event loop. A plain one runs in a thread of its own (see `function_threads`). A function
is async if it, the function that its decorator wraps (`functools.wraps`), or an object's `__call__` is an `async def`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from functools import partial
from types import CoroutineType
from typing import Any, Final, Protocol

from covenant.agents.api import Agent, BareReply, Rejection, Retry, SyncTurn, Turn, TurnWork
from covenant.agents.retried_agent import chance_of
from covenant.agents.runtime.durable_step import StepError
from covenant.agents.runtime.function_threads import AgentThreads, ThreadChannel, TurnStopped
from covenant.agents.runtime.job import Job
from covenant.agents.runtime.job_buffer import FAILED
from covenant.agents.runtime.step_failures import StepFailed
from covenant.agents.runtime.turn_output import TurnOutput
from covenant.model.content import Audio, Content, File, Image, Json, Resource, ResourceLink, Text
from covenant.model.errors import WrongType
from covenant.model.ids import AgentId
from covenant.model.retry_policy import AttemptPolicy
from covenant.model.task import NATIVE
from covenant.model.task_event import MessageUpdate, StatusUpdate
from covenant.wire.json_input import A2A_NESTING_MAX
from covenant.wire.validation import checked

SENDABLE: Final = "text, turn.file(…), turn.data(…), turn.status(…) or another value of the turn"
_CONTENT: Final = (Text, Json, Image, Audio, Resource, ResourceLink, File)
_VALUES: Final = (*_CONTENT, StatusUpdate, Rejection, Retry, BareReply)
log = logging.getLogger(__name__)
_WRAPPING_LEVELS: Final = 4
"""Levels of nesting that our own value adds around the author's data."""


class FunctionJob(TurnWork, Protocol):
    """The turn that a function does: a `Job`, or its stand-in in another process."""

    full: bool

    @property
    def ended(self) -> bool: ...
    @property
    def begun_before(self) -> bool: ...
    @property
    def holder(self) -> AgentId: ...
    @property
    def threads(self) -> AgentThreads: ...
    async def room(self) -> None: ...
    def complete(self, *content: Content, reply: bool = False) -> None: ...
    def fail(self, message: str) -> None: ...
    def reject(self, message: str) -> None: ...
    def retry(self, after_s: float, text: str) -> None: ...
    def park(self, update: StatusUpdate) -> None: ...


class FunctionOutput(Protocol):
    """The output of a function: a `TurnOutput`, or its stand-in in another process."""

    @property
    def text(self) -> str: ...
    def write_text(self, chunk: str) -> None: ...
    def write_whole_text(self, text: str) -> None: ...
    def write_content(self, content: Content) -> None: ...
    def write_status(self, update: StatusUpdate) -> None: ...
    def close(self) -> tuple[Content, ...]: ...


class FunctionAgent:
    def __init__(self, agent: Agent) -> None:
        if agent.function is None:
            raise TypeError(f"agent {agent.name!r} has no function: decorate one with it")
        self._function: Any = agent.function
        self._in_thread = not _is_async(agent.function)
        self._retries = agent.retries
        self.attempts: Final = agent.retries.attempts
        self._retry_on = agent.retry_on

    def run(self, job: Job) -> Coroutine[Any, Any, None]:
        if job.leased.turn > 1 or job.task.origin == NATIVE:
            return self._run_with_history(job)
        return self.perform(job, TurnOutput(job), ())

    async def _run_with_history(self, job: Job) -> None:
        await self.perform(job, TurnOutput(job), await turn_history(job))

    async def perform(self, job: FunctionJob, output: FunctionOutput, history: tuple[MessageUpdate, ...]) -> None:
        try:
            if self._in_thread:
                await self._run_in_thread(job, output, history)
            else:
                # A decorator may turn an async function into something else: the returned object decides.
                returned: Any = self._function(Turn(job, history, self._retries.attempts))
                if inspect.isasyncgen(returned):
                    await self._write_yielded(returned, job, output)
                else:
                    await _write_returned(await returned if inspect.isawaitable(returned) else returned, job, output)
        except Exception as error:
            cause = error.__cause__ if isinstance(error, StepFailed) else error
            if not isinstance(cause, self._retry_on) or not begin_again(job, self._retries, cause):
                raise
        if not job.ended:
            if job.begun_before:
                await job.steps.check_end()
            job.complete(*output.close())

    async def _write_yielded(
        self, generator: AsyncGenerator[Any, Any], job: FunctionJob, output: FunctionOutput
    ) -> None:
        try:
            async for item in generator:
                if type(item) is str:
                    output.write_text(item)
                else:
                    if job.begun_before:
                        await _check_changed(item, job)
                    _write_checked(item, job, output, "yielded")
                    if job.ended:
                        return
                if job.full:
                    await job.room()
        finally:
            await generator.aclose()

    async def _run_in_thread(
        self, job: FunctionJob, output: FunctionOutput, history: tuple[MessageUpdate, ...]
    ) -> None:
        def write(chunk: str) -> Awaitable[None] | None:
            output.write_text(chunk)
            return job.room() if job.full else None

        async def write_yielded(item: Any) -> None:
            if job.begun_before:
                await _check_changed(item, job)
            _write_checked(item, job, output, "yielded")
            if job.ended:
                raise TurnStopped

        def work(channel: ThreadChannel) -> None:
            returned = self._function(SyncTurn(job, history, channel.ask, self._retries.attempts))
            if inspect.isgenerator(returned):
                _send_all(returned, channel, write_yielded)
            else:
                channel.ask(lambda: _write_returned(returned, job, output))

        try:
            await job.threads.run(work, write, job.holder.display)
        except TurnStopped:
            if not job.ended:
                raise


def begin_again(job: FunctionJob, retries: AttemptPolicy, error: Exception) -> bool:
    """Begins the turn again after a pause. False: no attempt is left, or the next one would fail, too."""
    lease = job.leased.lease
    pause_s = retries.pause_s(lease.attempt, chance_of(lease.lease_id))
    if job.ended or pause_s is None or isinstance(error, StepError):
        return False
    log.warning("agent.retried", exc_info=error, extra={"task_id": job.task.id, "pause_s": pause_s})
    job.retry(pause_s, "")
    return True


def _is_async(function: Any) -> bool:
    while isinstance(function, partial):
        function = function.func
    return any(_is_async_def(inspect.unwrap(each, stop=_is_async_def)) for each in (function, type(function).__call__))


def _is_async_def(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def _send_all(items: Generator[Any, Any, Any], channel: ThreadChannel, write: Callable[[Any], Awaitable[None]]) -> None:
    """Runs in the thread. Sends texts without waiting; waits for any other value, since that may end the turn."""
    try:
        for item in items:
            if type(item) is str:
                channel.send(item)
            else:
                channel.ask(partial(write, item))
    finally:
        items.close()


async def turn_history(job: Job, *, context: bool = False) -> tuple[MessageUpdate, ...]:
    """The messages before this turn, without the messages that began it.

    `context`: includes the messages of earlier tasks of the same A2A context.
    """
    before = await job.thread(context=context)
    view = await job.view() if job.leased.turn > 1 else None
    return (
        (*before, *(each for each in view.history if each not in job.stored_messages)) if view is not None else before
    )


async def _write_returned(returned: Any, job: FunctionJob, output: FunctionOutput) -> None:
    if job.begun_before:
        for item in returned if isinstance(returned, list | tuple) else (returned,):
            await _check_changed(item, job)
    if type(returned) is CoroutineType:
        returned.close()  # a plain function has returned a coroutine of an async one
    if isinstance(returned, str):
        output.write_whole_text(str.__str__(returned))
    elif returned is not None:
        for item in returned if isinstance(returned, list | tuple) else (returned,):
            if not job.ended:
                _write_checked(item, job, output, "returned")


async def _check_changed(item: Any, job: FunctionJob) -> None:
    """Checks, before a value that ends the turn, that the function has asked for every step in the ledger."""
    asks = isinstance(item, StatusUpdate) and item.state != "working"
    if asks or isinstance(item, Rejection | BareReply):
        await job.steps.check_end()


def _write_checked(item: Any, job: FunctionJob, output: FunctionOutput, how: str) -> None:
    """Sends a value. A value of our own types may be made by hand, so its fields are checked."""
    try:
        if isinstance(item, _VALUES):
            item = checked(type(item).__name__, item, type(item), A2A_NESTING_MAX + _WRAPPING_LEVELS)
    except WrongType as wrong:
        job.fail(f"the agent {how} an invalid value: {wrong.message}")
    else:
        _write_value(item, job, output, how)


def _write_value(item: Any, job: FunctionJob, output: FunctionOutput, how: str) -> None:
    match item:
        case str():
            output.write_text(str.__str__(item))
        case StatusUpdate(state="working"):
            output.write_status(item)
        case StatusUpdate():
            output.close()
            job.park(item)
        case Rejection(text):
            job.reject(text)
        case Retry(after_s, text, last):
            if last:
                job.fail(text or FAILED)
            else:
                job.retry(after_s, text)
        case BareReply(content):
            _reply(content, job, output)
        case _ if isinstance(item, _CONTENT):
            output.write_content(item)
        case _:
            job.fail(f"the agent {how} {_article(type(item).__name__)}, which cannot be sent; it may be {SENDABLE}")


def _reply(content: tuple[Any, ...], job: FunctionJob, output: FunctionOutput) -> None:
    if output.text:
        job.fail("the agent replied with a bare message after it had streamed text; a reply must be the only output")
    elif not all(isinstance(block, _CONTENT) for block in content):
        job.fail("the agent replied with something that is neither text nor content")
    else:
        # From the second turn on the sender knows the task.
        job.complete(*content, reply=job.leased.turn == 1)


def _article(name: str) -> str:
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"
