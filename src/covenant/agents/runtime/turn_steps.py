"""Durable steps of a turn: a step that a function has done is in the ledger, and is not done again.

A step is an update of the task (`StepUpdate`), numbered in the order in which the function asks. The function goes on
when the update is synced. When a turn runs again, its function asks for the same steps in the same order, and each step
that the ledger has returns its result without being done. A function that asks for other steps has been changed
meanwhile: its task is held for an operator.

A sleep, a wait for a signal and a question to a person are steps that end the lease: the task is parked, and holds no
worker. The step's result is the event that ends the wait. Waits that a function begins together (`asyncio.gather`) are
parked together, and the first one that ends wakes the task; a wait begins when no other step is running.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec

from covenant.agents.runtime.durable_step import RESULT_BYTES_MAX, AskedStep, StepError, as_json, cancel_again, finish
from covenant.agents.runtime.function_threads import TurnStopped
from covenant.model.errors import Invalid
from covenant.model.question import QUESTION, QUESTION_CHARS_MAX, Question, question_id
from covenant.model.task_event import (
    SIGNAL_CHARS_MAX,
    WAITS_MAX,
    Interruption,
    StatusUpdate,
    StepFailure,
    StepKind,
    StepUpdate,
    Wait,
)
from covenant.model.usage import add_usage
from covenant.wire.validation import checked

if TYPE_CHECKING:
    from covenant.agents.runtime.job import Job

SECONDS_MAX: Final = 10 * 366 * 86_400
SLEEP: Final = "sleep"
IDLE_TURNS: Final = 16
"""A function that takes no action in this many turns of the event loop is idle. `asyncio.wait` takes three turns to
return after one of its futures is done; each level that awaits it takes three more."""


class TurnSteps:
    """The steps of one job. Must be used on the event loop."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._steps_begun = 0
        self._names: set[str] = set()
        self._loading: asyncio.Future[None] | None = None
        self._stored: dict[int, StepUpdate] = {}
        self._running: set[int] = set()
        self._none_running = asyncio.Event()
        self._actions = 0
        """The number of the function's actions: asking for a step or a wait, and ending or giving up one."""
        self._waits: dict[int, Wait] = {}
        """The function's current waits, by the number of the step."""
        self._questions: dict[int, StatusUpdate] = {}
        """The questions of steps that wait for an answer."""
        self._written = 0
        """The number of steps that this attempt has written."""
        self._usage: dict[str, float] = {}
        """The part of the turn's usage that its steps have recorded."""

    @property
    def interrupted(self) -> bool:
        """Whether an attempt was cut short after its last durable step: nobody knows what it did then."""
        return self._job.leased.cut and not self._written

    async def begin(self, name: str) -> AskedStep:
        _check_name(name, "step")
        if name in self._names:
            raise StepError(
                "step_repeated", f"step {name!r} was asked for twice in one turn; give each step its own name"
            )
        self._names.add(name)
        step = await self._ask(name, "step")
        failed = step.found.failure if step.found is not None else None
        if failed is not None and self._is_retried(failed):
            step = step._replace(found=None)
        if step.found is None or (failed is not None and failed.canceled):
            self._running.add(step.no)
        return step

    def _is_retried(self, failed: StepFailure) -> bool:
        """Whether a failed step is done again: in a further attempt, unless the function went on after it."""
        return failed.attempt < self._job.leased.lease.attempt and max(self._stored) <= failed.asked

    async def end(self, step: AskedStep, value: Any, *, bytes_max: int = RESULT_BYTES_MAX) -> Any:
        """Writes the step's result; returns it as it will be read, once it is durable."""
        try:
            plain = as_json(step, value, bytes_max)
            await self._write(self._update(step, "step", plain))
        finally:
            self.give_up(step)
        return plain

    async def fail(self, step: AskedStep, failure: StepFailure) -> None:
        """Writes the step's failure. Returns when it is durable."""
        attempt = self._job.leased.lease.attempt
        failure = msgspec.structs.replace(failure, attempt=attempt, asked=self._steps_begun)
        try:
            await self._write(msgspec.structs.replace(self._update(step, "step", None), failure=failure))
        finally:
            self.give_up(step)

    async def _write(self, step: StepUpdate) -> None:
        await self._job.write(step)
        self._written += 1

    def give_up(self, step: AskedStep) -> None:
        """Notes that the step is not running any more."""
        self._actions += 1
        self._running.discard(step.no)
        if not self._running:
            self._none_running.set()

    async def sleep(self, seconds: float) -> None:
        checked("seconds", seconds, float | int)
        if not 0 <= seconds <= SECONDS_MAX:
            raise Invalid("invalid_sleep", "a sleep must be from 0 seconds to ten years")
        step = await self._ask(SLEEP, "sleep")
        await self._wait(step, Wait(since_ms=self._job.now_ms, for_ms=round(seconds * 1000), step=step.no, name=SLEEP))

    async def wait_for(self, name: str, timeout_s: float | None) -> Any:
        _check_name(name, "signal")
        for_ms = _timeout_ms(timeout_s)
        step = await self._ask(name, "wait")
        found = await self._wait(
            step, Wait(since_ms=self._job.now_ms, for_ms=for_ms, signal=name, step=step.no, name=name)
        )
        if found.timed_out:
            raise TimeoutError(f"no signal {name!r} came within {timeout_s} seconds")
        return found.result

    async def ask(self, question: Question, timeout_s: float | None, signal: str | None = None) -> dict[str, Any]:
        """Asks a person, and waits for the answer without holding a worker; returns the answer. Raises `TimeoutError`.

        The answer is valid for this question only: a function that asks another question in its place was changed.
        `signal`: a signal that ends the wait as well; then the answer is empty.
        """
        if not 0 < len(question.text.strip()) <= QUESTION_CHARS_MAX:
            raise Invalid("invalid_question", f"a question needs a text of at most {QUESTION_CHARS_MAX} characters")
        for_ms, digest = _timeout_ms(timeout_s), question.digest
        step = await self._ask(question.kind, "ask")
        found = step.found
        if found is not None and _question_digest(found) not in (None, digest):
            await self._changed(found, "the function asks something else")
        if found is None or found.waits:
            begun = found.wait if found is not None else None  # in an earlier lease
            wait = begun or Wait(
                since_ms=self._job.now_ms,
                for_ms=for_ms,
                step=step.no,
                name=question.kind,
                signal=signal,
                asks=question.kind,
                question=digest,
            )
            about: dict[str, Any] = {"id": question_id(self._job.leased.turn, step.no), "kind": question.kind}
            if question.tool:
                about |= {"tool": question.tool, "arguments": question.arguments}
            if (until_ms := wait.ends_at_ms(wait.since_ms)) is not None:
                about["until_ms"] = until_ms
            self._questions[step.no] = StatusUpdate(
                question.text, Interruption.INPUT_REQUIRED.value, metadata={QUESTION: about}
            )
            found = await self._wait(step, wait)
        if found.timed_out:
            raise TimeoutError(f"no answer came within {timeout_s} seconds")
        answered: dict[str, Any] = found.result or {}
        return answered

    async def check_end(self) -> None:
        """Checks, when the function has completed, that it has asked for every step in the ledger."""
        await self._load()
        await self._job.ensure_running()
        unasked = [step for no, step in sorted(self._stored.items()) if no > self._steps_begun]
        if unasked:
            await self._changed(unasked[0], "the function has ended")

    async def _ask(self, name: str, kind: StepKind) -> AskedStep:
        self._steps_begun += 1
        self._actions += 1
        no = self._steps_begun
        canceled = await self._load()
        found = self._stored.get(no)
        if found is not None and (found.name, found.kind) != (name, kind):
            await self._changed(found, f"the function asks for {name!r}")
        await self._job.ensure_running()
        step = AskedStep(no, name, found)
        if canceled and not step.done:
            raise asyncio.CancelledError
        if canceled:
            cancel_again()
        return step

    async def _changed(self, found: StepUpdate, instead: str) -> None:
        reason = (
            f"the function was changed: step {found.no} of this turn is {found.name!r} in the ledger, and {instead}"
        )
        await self._job.hold(reason)
        raise TurnStopped

    async def _load(self) -> bool:
        """Reads the ledger's steps, even if the caller is canceled; returns whether it was."""
        if not self._job.begun_before:
            return False
        if self._loading is None:
            self._loading = asyncio.ensure_future(self._read())
        _, canceled = await finish(self._loading)
        return canceled

    async def _read(self) -> None:
        for step in await self._job.durable_steps():
            self._stored[step.no] = step
            add_usage(self._usage, step.usage or {})
        if self._usage:
            self._job.spend(dict(self._usage))

    def _update(self, step: AskedStep, kind: StepKind, value: Any) -> StepUpdate:
        used = self._job.spending.turn_usage if self._job.has_spent else {}
        new = {name: amount - self._usage.get(name, 0) for name, amount in used.items()}
        new = {name: amount for name, amount in new.items() if amount > 0}
        add_usage(self._usage, new)
        return StepUpdate(step.name, step.no, self._job.leased.turn, kind, value, usage=new or None)

    async def _wait(self, step: AskedStep, wait: Wait) -> StepUpdate:
        """The wait's result, if it is known at once. Otherwise the turn stops here, and runs again when the wait ends.

        A canceled caller does not wait any more, and the task is not parked for it.
        """
        if step.found is not None and not step.found.waits:
            return step.found
        if step.found is not None and step.found.wait is not None:
            wait = step.found.wait  # begun in an earlier lease
        self._waits[wait.step] = wait
        canceled = False
        try:
            while (found := self._stored.get(wait.step)) is None or found.waits:
                if canceled:
                    raise asyncio.CancelledError
                await self._wait_until_idle()
                canceled = await self._park()
            if canceled:
                cancel_again()
            return found
        finally:
            self._actions += 1
            del self._waits[wait.step]
            self._questions.pop(wait.step, None)

    async def _wait_until_idle(self) -> None:
        """Waits until no step is running and the function takes no further action by itself.

        Waits that begin together are parked together. A function that has a result goes on first, and may cancel the
        other waits, or do steps.
        """
        actions, turns = self._actions, 0
        while turns < IDLE_TURNS and self._job.parking is None:
            if self._running:
                self._none_running.clear()
                await self._none_running.wait()
            else:
                await asyncio.sleep(0)
            turns = turns + 1 if self._actions == actions else 0
            actions = self._actions

    async def _park(self) -> bool:
        """Parks the task, which raises `TurnStopped`. Else returns whether the caller was canceled meanwhile."""
        job = self._job
        if job.parking is None:
            if job.over:
                raise TurnStopped
            job.parking = asyncio.ensure_future(self._suspend())
        _, canceled = await finish(job.parking)
        if job.over:
            raise TurnStopped
        return canceled

    async def _suspend(self) -> None:
        """Parks the task for all current waits at once; of several questions, for the first."""
        job, turn = self._job, self._job.leased.turn
        first, *later = sorted(self._waits.values(), key=lambda wait: (wait.asks is None, wait.step))
        together = tuple(wait for wait in later if wait.asks is None)[: WAITS_MAX - 1]
        new = (first, *later) if first.asks is not None and together else later
        others = [
            StepUpdate(wait.name, wait.step, turn, wait.kind, wait=wait)
            for wait in new
            if wait.step not in self._stored
        ]
        wait = msgspec.structs.replace(first, others=together)
        try:
            advanced = await job.suspend(wait, tuple(others), self._questions.get(first.step))
        finally:
            job.parking = None
        if advanced.signal is not None:
            self._written += 1
            self._stored |= {other.no: other for other in others}
            signaled = next(each for each in wait.all_waits if each.signal == advanced.signal.name)
            self._stored[signaled.step] = StepUpdate(
                signaled.name, signaled.step, turn, signaled.kind, advanced.signal.value
            )


def _question_digest(step: StepUpdate) -> str | None:
    """The digest of the question that the step asked. None: there was no answer."""
    if step.wait is not None:
        return step.wait.question
    return step.result["question"] if step.result is not None else None


def _check_name(name: str, what: str) -> None:
    checked("name", name, str)
    if not 0 < len(name) <= SIGNAL_CHARS_MAX or not name.isprintable():
        raise Invalid("invalid_step", f"a {what} needs a name of at most {SIGNAL_CHARS_MAX} printable characters")


def _timeout_ms(timeout_s: float | None) -> int | None:
    checked("timeout_s", timeout_s, float | int | None)
    if timeout_s is not None and not 0 <= timeout_s <= SECONDS_MAX:
        raise Invalid("invalid_sleep", "a timeout must be from 0 seconds to ten years")
    return round(timeout_s * 1000) if timeout_s is not None else None
