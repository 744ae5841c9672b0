"""A durable step, as a function uses it: in the daemon, in a thread, or in a process of its own.

A step is done unless the ledger has it. Its result or failure is in the ledger before the function goes on. A cancel
that comes while the step is written comes too late for the step, and takes effect after it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import msgspec

from covenant.agents.runtime.function_threads import TurnStopped
from covenant.agents.runtime.step_failures import exception_of, failure_of
from covenant.agents.runtime.turn_limits import RunOnLoop
from covenant.model.errors import Conflict, WrongType
from covenant.model.question import Question
from covenant.model.task_event import StepFailure, StepUpdate
from covenant.wire.json_input import A2A_NESTING_MAX
from covenant.wire.validation import checked

RESULT_BYTES_MAX: Final = 256 * 1024
CANCELED: Final = StepFailure(type=asyncio.CancelledError.__name__, canceled=True)
T = TypeVar("T")
_encode = msgspec.json.Encoder().encode
_STEP: Final = ContextVar["tuple[DurableSteps, str] | None"]("step", default=None)
"""The running step, here and in the asyncio tasks that it makes: its turn's steps, and its name."""


class StepError(Conflict):
    """An author's use of a step is not possible. It fails the task, unless the function handles it."""


class AskedStep(NamedTuple):
    """A step that the function asked for. `found`: the step in the ledger, if it is there."""

    no: int
    name: str
    found: StepUpdate | None

    @property
    def done(self) -> bool:
        return self.found is not None and not self.found.waits


class DurableSteps(Protocol):
    """`TurnSteps`, or the steps of an isolated program."""

    @property
    def interrupted(self) -> bool: ...
    async def begin(self, name: str) -> AskedStep: ...
    async def end(self, step: AskedStep, value: Any) -> Any: ...
    async def fail(self, step: AskedStep, failure: StepFailure) -> None: ...
    def give_up(self, step: AskedStep) -> None: ...
    async def sleep(self, seconds: float) -> None: ...
    async def wait_for(self, name: str, timeout_s: float | None) -> Any: ...
    async def ask(self, question: Question, timeout_s: float | None) -> dict[str, Any]: ...
    async def check_end(self) -> None: ...


@contextmanager
def inside_step(steps: DurableSteps, name: str) -> Iterator[None]:
    outer = _STEP.set((steps, name))
    try:
        yield
    finally:
        _STEP.reset(outer)


def refuse_nested(steps: DurableSteps) -> None:
    """Refuses a step or wait within a step. A wait would wait for the end of its own step; and a replay skips the outer
    step, so the inner one would be missing. An agent that a step calls is in another turn."""
    outer = step_here(steps)
    if outer:
        raise StepError("step_nested", f"step {outer!r} contains a step or a wait; put it before or after that step")


def step_here(steps: DurableSteps) -> str:
    """The name of this turn's running step; empty if none is running."""
    outer = _STEP.get()
    return outer[1] if outer is not None and outer[0] is steps else ""


async def perform_step(steps: DurableSteps, name: str, function: Callable[[], Any]) -> Any:
    """Does a step, unless the ledger has it. `function` may be async."""
    step = await steps.begin(name)
    if step.found is not None:
        if step.found.failure is not None and step.found.failure.canceled:
            await _wait_for_cancel(steps, step)
        return _kept(step.found)
    try:
        with inside_step(steps, name):
            value = function()
            if inspect.isawaitable(value):
                value = await value
        kept, canceled = await finish(steps.end(step, value))
    except (Exception, asyncio.CancelledError) as error:  # raised again, in the ledger's form
        if isinstance(error, TurnStopped):
            steps.give_up(step)
            raise
        here = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and here is not None and here.cancelling():
            await finish(steps.fail(step, CANCELED))
            raise
        failure = failure_of(error)
        _, canceled = await finish(steps.fail(step, failure))
        if canceled:
            cancel_again()
        raise exception_of(failure) from error
    except BaseException:
        steps.give_up(step)
        raise
    if canceled:
        cancel_again()
    return kept


async def _wait_for_cancel(steps: DurableSteps, step: AskedStep) -> None:
    """Waits until canceled, as in the first run: the function canceled this step then, and does so again."""
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        steps.give_up(step)


def _kept(found: StepUpdate) -> Any:
    if found.failure is not None:
        raise exception_of(found.failure)
    return found.result


def cancel_again() -> None:
    """Cancels the caller again: a cancel came when a step was done already, and must take effect at the next await."""
    here, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert here is not None
    cancels = here.cancelling()

    def cancel() -> None:
        if not here.done() and here.cancelling() >= cancels:  # the cancel was not withdrawn
            here.cancel()
            here.uncancel()  # it was counted when it came

    loop.call_soon(cancel)


def perform_sync_step(steps: DurableSteps, name: str, function: Callable[[], T], ask: RunOnLoop) -> T:
    """`perform_step` for a thread, which asks the event loop to write. Only the end of its turn cancels it."""
    step = ask(lambda: steps.begin(name))
    if step.found is not None:
        done: T = _kept(step.found)
        return done
    try:
        with inside_step(steps, name):
            value = function()
        kept: T = ask(lambda: steps.end(step, value))
    except Exception as error:
        failure = failure_of(error)
        ask(lambda: steps.fail(step, failure))
        raise exception_of(failure) from error
    except BaseException:
        ask(lambda: steps.give_up(step))
        raise
    return kept


async def finish(write: Awaitable[T]) -> tuple[T, bool]:
    """Awaits a write to its end, even if the caller is canceled. Returns its result, and whether a cancel came."""
    writing, canceled = asyncio.ensure_future(write), False
    while not writing.done():
        try:
            await asyncio.wait((writing,))
        except asyncio.CancelledError:
            canceled = True
    if writing.cancelled():
        raise TurnStopped
    return writing.result(), canceled


def as_json(step: AskedStep, value: Any, bytes_max: int = RESULT_BYTES_MAX) -> Any:
    try:
        plain = checked("result", msgspec.to_builtins(value, str_keys=True), Any, A2A_NESTING_MAX)
        size = len(_encode(plain))
    except (TypeError, ValueError, RecursionError, WrongType) as wrong:
        raise StepError("step_result", f"the result of step {step.name!r} cannot be written as JSON: {wrong}") from None
    if size > bytes_max:
        raise StepError("step_result", f"the result of step {step.name!r} has more than {bytes_max} bytes")
    return plain
