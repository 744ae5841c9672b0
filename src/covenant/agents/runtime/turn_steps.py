"""Durable steps of a turn: what a function has done is in its task's ledger, and is not done again.

A step is an update of the task (`StepUpdate`), numbered in the order in which the function asks. The function goes on
when the update is synced. When a turn is run again, its function asks for the same steps in the same order, and each
one that the ledger has gives its result without being done. A function that asks for other steps has been changed
meanwhile: its task is held for an operator.

A sleep, a wait for a signal and a question to a person are steps that end the lease: the task is parked, and holds no
place. What ends the wait is the result of the step. Waits that a function begins at once (`asyncio.gather`) are parked
together; a wait begins when no other step is being done.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

import msgspec

from covenant.agents.runtime.function_threads import TurnStopped
from covenant.model.errors import Conflict, Invalid, WrongType
from covenant.model.question import QUESTION, QUESTION_CHARS_MAX, Question, question_id
from covenant.model.task_event import SIGNAL_CHARS_MAX, Interruption, StatusUpdate, StepKind, StepUpdate, Wait
from covenant.model.usage import add_usage
from covenant.wire.json_input import TOLD_NESTING_MAX
from covenant.wire.validation import checked

if TYPE_CHECKING:
    from covenant.agents.runtime.job import Job

SECONDS_MAX: Final = 10 * 366 * 86_400
SLEEP: Final = "sleep"
RESULT_BYTES_MAX: Final = 256 * 1024
_encode = msgspec.json.Encoder().encode


class StepError(Conflict):
    """What an author asks of a step is not possible. It fails the task, unless the function handles it."""


class AskedStep(NamedTuple):
    """`found`: what the ledger has of it."""

    no: int
    name: str
    found: StepUpdate | None

    @property
    def done(self) -> bool:
        return self.found is not None and not self.found.waits


StepVerb = Literal["begin", "end", "give_up", "sleep", "wait_for", "ask", "check_end"]


class DurableSteps(Protocol):
    """`TurnSteps`, or the steps of an isolated program."""

    @property
    def interrupted(self) -> bool: ...
    async def begin(self, name: str) -> AskedStep: ...
    async def end(self, asked: AskedStep, value: Any) -> Any: ...
    def give_up(self, asked: AskedStep) -> None: ...
    async def sleep(self, seconds: float) -> None: ...
    async def wait_for(self, name: str, timeout_s: float | None) -> Any: ...
    async def ask(self, question: Question, timeout_s: float | None) -> dict[str, Any]: ...
    async def check_end(self) -> None: ...


async def perform_step(steps: DurableSteps, name: str, function: Callable[[], Any]) -> Any:
    """Do it, unless the ledger has it. `function` may be async."""
    asked = await steps.begin(name)
    if asked.found is not None:
        return asked.found.result
    try:
        value = function()
        if inspect.isawaitable(value):
            value = await value
    except BaseException:
        steps.give_up(asked)
        raise
    return await steps.end(asked, value)


class TurnSteps:
    """Of one job. Used on the loop."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._asked = 0
        self._names: set[str] = set()
        self._loading: asyncio.Future[None] | None = None
        self._ledger_has: dict[int, StepUpdate] = {}
        self._doing: set[int] = set()
        self._done = asyncio.Event()
        self._waits: list[Wait] = []
        self._questions: dict[int, StatusUpdate] = {}
        """Of the steps that wait for an answer: what is asked."""
        self._written = 0
        """Steps that this attempt has written."""
        self._usage: dict[str, float] = {}
        """How much of what the task used is told by its steps."""

    @property
    def interrupted(self) -> bool:
        """Whether an attempt was cut short, after the last step that the ledger has: nobody knows what it did then."""
        return self._job.leased.cut and not self._written

    async def begin(self, name: str) -> AskedStep:
        checked("name", name, str)
        if not 0 < len(name) <= SIGNAL_CHARS_MAX or not name.isprintable():
            raise Invalid("invalid_step", f"a step needs a name of at most {SIGNAL_CHARS_MAX} printable characters")
        if name in self._names:
            raise StepError(
                "step_repeated", f"step {name!r} was asked for twice in one turn; give each step its own name"
            )
        self._names.add(name)
        asked = await self._ask(name, "step")
        if asked.found is None:
            self._doing.add(asked.no)
        return asked

    async def end(self, asked: AskedStep, value: Any, *, bytes_max: int = RESULT_BYTES_MAX) -> Any:
        """What it came to, as it will be read. Returns when that is durable."""
        try:
            plain = as_json(asked, value, bytes_max)
            await self._job.write(self._update(asked, "step", plain))
        finally:
            self.give_up(asked)
        self._written += 1
        return plain

    def give_up(self, asked: AskedStep) -> None:
        """It is not being done any more."""
        self._doing.discard(asked.no)
        if not self._doing:
            self._done.set()

    async def sleep(self, seconds: float) -> None:
        checked("seconds", seconds, float | int)
        if not 0 <= seconds <= SECONDS_MAX:
            raise Invalid("invalid_sleep", "a sleep takes from 0 seconds to ten years")
        asked = await self._ask(SLEEP, "sleep")
        if not asked.done:
            wait = Wait(since_ms=self._job.now_ms, for_ms=round(seconds * 1000), step=asked.no, name=SLEEP)
            await self._wait(asked, wait)

    async def wait_for(self, name: str, timeout_s: float | None) -> Any:
        checked("name", name, str)
        if not 0 < len(name) <= SIGNAL_CHARS_MAX or not name.isprintable():
            raise Invalid("invalid_step", f"a signal needs a name of at most {SIGNAL_CHARS_MAX} printable characters")
        for_ms = _timeout_ms(timeout_s)
        asked = await self._ask(name, "wait")
        found = asked.found
        if found is None or found.waits:
            found = await self._wait(
                asked, Wait(since_ms=self._job.now_ms, for_ms=for_ms, signal=name, step=asked.no, name=name)
            )
        if found.timed_out:
            raise TimeoutError(f"nobody has signaled {name!r} within {timeout_s} seconds")
        return found.result

    async def ask(self, question: Question, timeout_s: float | None) -> dict[str, Any]:
        """Ask a person, and wait for the answer without holding a place; what the answer says. Raises `TimeoutError`.

        The answer holds for what was asked: a function that asks something else in its place has been changed.
        """
        if not 0 < len(question.text.strip()) <= QUESTION_CHARS_MAX:
            raise Invalid("invalid_question", f"a question has a text of at most {QUESTION_CHARS_MAX} characters")
        for_ms, digest = _timeout_ms(timeout_s), question.digest
        asked = await self._ask(question.kind, "ask")
        found = asked.found
        if found is not None and _asked_before(found) not in (None, digest):
            await self._changed(found, "the function asks something else")
        if found is None or found.waits:
            about = {"id": question_id(self._job.leased.turn, asked.no), "kind": question.kind}
            if question.tool:
                about |= {"tool": question.tool, "arguments": question.arguments}
            self._questions[asked.no] = StatusUpdate(
                question.text, Interruption.INPUT_REQUIRED.value, metadata={QUESTION: about}
            )
            wait = Wait(
                since_ms=self._job.now_ms,
                for_ms=for_ms,
                step=asked.no,
                name=question.kind,
                asks=question.kind,
                question=digest,
            )
            found = await self._wait(asked, wait)
        if found.timed_out:
            raise TimeoutError(f"nobody has answered within {timeout_s} seconds")
        answered: dict[str, Any] = found.result
        return answered

    async def check_end(self) -> None:
        """The function has completed: has it asked for all that the ledger has?"""
        await self._load()
        left = [step for no, step in sorted(self._ledger_has.items()) if no > self._asked]
        if left:
            await self._changed(left[0], "the function has ended")

    async def _ask(self, name: str, kind: StepKind) -> AskedStep:
        self._asked += 1
        no = self._asked
        await self._load()
        found = self._ledger_has.get(no)
        if found is not None and (found.name, found.kind) != (name, kind):
            await self._changed(found, f"the function asks for {name!r}")
        return AskedStep(no, name, found)

    async def _changed(self, found: StepUpdate, instead: str) -> None:
        reason = (
            f"the function was changed: step {found.no} of this turn is {found.name!r} in the ledger, and {instead}"
        )
        await self._job.hold(reason)
        raise TurnStopped

    async def _load(self) -> None:
        if not self._job.begun_before:
            return
        if self._loading is None:
            self._loading = asyncio.ensure_future(self._read())
        await asyncio.shield(self._loading)

    async def _read(self) -> None:
        for step in await self._job.durable_steps():
            self._ledger_has[step.no] = step
            add_usage(self._usage, step.usage or {})
        if self._usage:
            self._job.spend(dict(self._usage))

    def _update(self, asked: AskedStep, kind: StepKind, value: Any) -> StepUpdate:
        used = self._job.spending.own_usage if self._job.has_spent else {}
        new = {name: amount - self._usage.get(name, 0) for name, amount in used.items()}
        new = {name: amount for name, amount in new.items() if amount > 0}
        add_usage(self._usage, new)
        return StepUpdate(asked.name, asked.no, self._job.leased.turn, kind, value, usage=new or None)

    async def _wait(self, asked: AskedStep, wait: Wait) -> StepUpdate:
        """Returns what came of it, if that is known at once. Otherwise the turn stops here, and is run again then."""
        if asked.found is not None and asked.found.wait is not None:
            wait = asked.found.wait  # it began in an earlier lease
        self._waits.append(wait)
        await asyncio.sleep(0)  # those that begin together are parked together
        while self._doing:
            self._done.clear()
            await self._done.wait()
        while (found := self._ledger_has.get(wait.step)) is None or found.waits:
            await self._park()
        return found

    async def _park(self) -> None:
        job, turn = self._job, self._job.leased.turn
        if job.over or job.parking:
            raise TurnStopped
        now_ms = job.now_ms
        first = min(self._waits, key=lambda wait: _end_ms(wait, now_ms))
        others = [
            StepUpdate(wait.name, wait.step, turn, wait.kind, wait=wait)
            for wait in self._waits
            if wait is not first and wait.step not in self._ledger_has
        ]
        advanced = await job.suspend(first, tuple(others), self._questions.get(first.step))
        if advanced.signal is None:
            raise TurnStopped
        self._written += 1
        self._waits.remove(first)
        self._ledger_has |= {other.no: other for other in others}
        value = advanced.signal.value
        self._ledger_has[first.step] = StepUpdate(first.name, first.step, turn, first.kind, value)


def _asked_before(step: StepUpdate) -> str | None:
    """The digest of the question that it asked. None: nobody answered."""
    if step.wait is not None:
        return step.wait.question
    return step.result["question"] if step.result is not None else None


def _timeout_ms(timeout_s: float | None) -> int | None:
    checked("timeout_s", timeout_s, float | int | None)
    if timeout_s is not None and not 0 <= timeout_s <= SECONDS_MAX:
        raise Invalid("invalid_sleep", "a timeout is from 0 seconds to ten years")
    return round(timeout_s * 1000) if timeout_s is not None else None


def _end_ms(wait: Wait, now_ms: int) -> int:
    end_ms = wait.ends_at_ms(now_ms)
    return end_ms if end_ms is not None else 1 << 62


def as_json(asked: AskedStep, value: Any, bytes_max: int = RESULT_BYTES_MAX) -> Any:
    try:
        plain = checked("result", msgspec.to_builtins(value, str_keys=True), Any, TOLD_NESTING_MAX)
        size = len(_encode(plain))
    except (TypeError, ValueError, RecursionError, WrongType) as wrong:
        raise StepError(
            "step_result", f"the result of step {asked.name!r} cannot be written as JSON: {wrong}"
        ) from None
    if size > bytes_max:
        raise StepError("step_result", f"the result of step {asked.name!r} has more than {bytes_max} bytes")
    return plain
