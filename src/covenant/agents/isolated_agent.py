"""Isolated functions: a function agent whose turns run in processes of their own, one process a turn.

The process is `python -m covenant.agents.isolated_program FILE AGENT`: it reads the turn, imports the author's file,
runs the function, and writes the lines of a process agent (see `process_agent`) and calls of other agents. If it dies,
only its task fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from covenant.agents.api import Agent
from covenant.agents.function_agent import turn_history
from covenant.agents.process_agent import OUTPUT_BYTES_MAX, ProcessAgent
from covenant.agents.runtime.agent_calls import Answer, Call, CallLimit, NotEnough, TurnCalls
from covenant.agents.runtime.durable_step import AskedStep, StepError, StepVerb
from covenant.agents.runtime.function_threads import TurnStopped
from covenant.agents.runtime.job import Job
from covenant.ledger.machine.commands import LeasedTask
from covenant.model.content import Content
from covenant.model.errors import REFUSALS, Refusal, Unavailable
from covenant.model.question import Question
from covenant.model.task_event import MessageUpdate, StepFailure

CALLS_MAX: Final = 256
REFUSAL_KINDS: Final = {kind.__name__: kind for kind in REFUSALS}

log = logging.getLogger(__name__)
replace = msgspec.structs.replace
PROGRAM: Final = "covenant.agents.isolated_program"
PROCESSES_MAX: Final = 8
"""The default number of turns of one isolated agent at once: each is a whole interpreter."""
_encode = msgspec.json.Encoder().encode


class ProgramCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="call"):
    """`verb`: a method of `TurnCalls` or `DurableSteps`. For the verb `answer`, `child` is the task and `parts` the
    message; for a call, `what` holds parts. `name`: the step or signal, or the step that makes the call."""

    id: int
    verb: Literal["one", "all", "quorum", "answer"] | StepVerb
    calls: tuple[Call, ...] = ()
    wanted: int = 0
    child: str = ""
    parts: tuple[Content, ...] = ()
    name: str = ""
    step: AskedStep | None = None
    value: Any = None
    failure: StepFailure | None = None
    seconds: float | None = None
    question: Question | None = None


class ProgramCallRefusal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    kind: str
    code: str
    message: str
    detail: str = ""
    """A call limit's message without its reason."""
    retry_after_ms: int | None = None
    wanted: int = 0


class ProgramCallAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="answer"):
    id: int
    answers: tuple[Answer, ...] = ()
    refused: ProgramCallRefusal | None = None
    step: AskedStep | None = None
    value: Any = None
    timed_out: bool = False


def describe_refusal(refusal: Refusal, wanted: int = 0) -> ProgramCallRefusal:
    kind = type(refusal).__name__
    if kind not in REFUSAL_KINDS and not isinstance(refusal, CallLimit | NotEnough | StepError):
        kind = next(name for name, base in REFUSAL_KINDS.items() if isinstance(refusal, base))
    return ProgramCallRefusal(
        kind=kind,
        code=refusal.code,
        message=refusal.message,
        detail=refusal.detail if isinstance(refusal, CallLimit) else "",
        retry_after_ms=refusal.retry_after_ms,
        wanted=wanted,
    )


def refusal_of(answered: ProgramCallAnswer) -> Refusal:
    refusal = answered.refused
    assert refusal is not None
    if refusal.kind == CallLimit.__name__:
        reason = refusal.code.upper()
        return CallLimit(reason, refusal.detail, retry_after_ms=refusal.retry_after_ms)
    if refusal.kind == StepError.__name__:
        return StepError(refusal.code, refusal.message)
    if refusal.kind == NotEnough.__name__:
        return NotEnough(refusal.wanted, answered.answers)
    return REFUSAL_KINDS[refusal.kind](refusal.code, refusal.message, retry_after_ms=refusal.retry_after_ms)


class ProgramCalls:
    """In the daemon: performs the calls that a program asks for.

    A line `{"type": "call", "id", "verb", …}` is a `ProgramCall`; its `ProgramCallAnswer` goes to standard input.
    `{"type": "call_off", "id"}` cancels a call. At most `CALLS_MAX` calls run at once; all of them end with the turn.
    """

    def __init__(self, job: Job, stdin: asyncio.StreamWriter) -> None:
        self._job = job
        self._stdin = stdin
        self._running: dict[int, asyncio.Task[None]] = {}

    def begin(self, event: dict[str, Any]) -> None:
        """Starts a call. Raises `msgspec.ValidationError` for an event that is no valid call."""
        request = msgspec.convert(event, ProgramCall)
        calls = [replace(call, what=msgspec.convert(call.what, tuple[Content, ...])) for call in request.calls]
        request = replace(request, calls=tuple(calls))
        if request.id in self._running or len(self._running) >= CALLS_MAX:
            raise msgspec.ValidationError(f"at most {CALLS_MAX} calls at once, each with an id of its own")
        task = asyncio.create_task(self._perform(request))
        self._running[request.id] = task
        task.add_done_callback(lambda _: self._running.pop(request.id, None))

    def cancel(self, event: dict[str, Any]) -> None:
        task = self._running.get(event.get("id", -1))
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        running = [*self._running.values()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    async def _perform(self, request: ProgramCall) -> None:
        try:
            answered = await _answer(self._job, request)
        except TurnStopped:
            # The turn has stopped: its task waits, or is held. The program ends with the turn.
            if self._job.runner is not None and not self._job.over:  # a job that is over has stopped its runner
                self._job.runner.cancel()
            return
        except NotEnough as not_enough:
            answered = ProgramCallAnswer(
                id=request.id, answers=not_enough.answers, refused=describe_refusal(not_enough, request.wanted)
            )
        except Refusal as refusal:
            answered = ProgramCallAnswer(id=request.id, refused=describe_refusal(refusal))
        except Exception:  # without an answer the program would wait for ever
            log.exception("program.call_failed", extra=self._job.fields())
            internal = Unavailable("internal", "the call failed in the daemon; its log says why")
            answered = ProgramCallAnswer(id=request.id, refused=describe_refusal(internal))
        with contextlib.suppress(ConnectionError):  # the program is gone
            self._stdin.write(_encode(answered) + b"\n")
            await self._stdin.drain()


async def _answer(job: Job, request: ProgramCall) -> ProgramCallAnswer:
    match request.verb:
        case "begin":
            return ProgramCallAnswer(id=request.id, step=await job.steps.begin(request.name))
        case "end":
            assert request.step is not None
            return ProgramCallAnswer(id=request.id, value=await job.steps.end(request.step, request.value))
        case "fail":
            assert request.step is not None
            assert request.failure is not None
            await job.steps.fail(request.step, request.failure)
        case "give_up":
            assert request.step is not None
            job.steps.give_up(request.step)
        case "sleep":
            await job.steps.sleep(request.seconds or 0)
        case "wait_for":
            try:
                return ProgramCallAnswer(id=request.id, value=await job.steps.wait_for(request.name, request.seconds))
            except TimeoutError:
                return ProgramCallAnswer(id=request.id, timed_out=True)
        case "ask":
            assert request.question is not None
            try:
                return ProgramCallAnswer(id=request.id, value=await job.steps.ask(request.question, request.seconds))
            except TimeoutError:
                return ProgramCallAnswer(id=request.id, timed_out=True)
        case "check_end":
            await job.steps.check_end()
        case _:
            return ProgramCallAnswer(id=request.id, answers=await _make_calls(job.calls, request))
    return ProgramCallAnswer(id=request.id)


async def _make_calls(calls: TurnCalls, request: ProgramCall) -> tuple[Answer, ...]:
    one: Awaitable[Answer]
    match request.verb:
        case "all":
            return await calls.all(request.calls, step=request.name)
        case "quorum":
            return await calls.quorum(request.wanted, request.calls, step=request.name)
        case "answer":
            one = calls.answer(request.child, request.parts, step=request.name)
        case _:
            one = calls.one(request.calls[0], step=request.name)
    return (await one,)


class IsolatedTurn(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="turn"):
    leased: LeasedTask
    history: tuple[MessageUpdate, ...]


class IsolatedAgent(ProcessAgent):
    """The program sees the daemon's environment, as a function in the daemon would."""

    def __init__(self, agent: Agent, path: Path) -> None:
        if agent.function is None:
            raise TypeError(f"agent {agent.name!r} has no function: decorate one with it")
        self.attempts: Final = agent.retries.attempts
        command = (sys.executable, "-P", "-m", PROGRAM, str(path.resolve()), agent.name)
        super().__init__(command, environment=None, line_bytes_max=OUTPUT_BYTES_MAX)

    async def turn_input(self, job: Job) -> bytes:
        return _encode(IsolatedTurn(leased=job.leased, history=await turn_history(job))) + b"\n"

    def calls(self, job: Job, stdin: asyncio.StreamWriter) -> ProgramCalls:
        return ProgramCalls(job, stdin)
