"""Isolated functions: a function agent whose turns run in processes of their own, one process a turn.

The process is `python -m covenant.agents.isolated_program FILE AGENT`: it reads the turn, imports the author's file,
runs the function, and writes the lines of a process agent (see `process_agent`) and calls of other agents. If it dies,
only its task fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from covenant.agents.api import Agent
from covenant.agents.function_agent import turn_history
from covenant.agents.process_agent import OUTPUT_BYTES_MAX, ProcessAgent
from covenant.agents.runtime.agent_calls import Answer, Call, CallLimit, NotEnough
from covenant.agents.runtime.durable_step import AskedStep, StepError
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
PROGRAM: Final = "covenant.agents.isolated_program"
PROCESSES_MAX: Final = 8
"""The default number of turns of one isolated agent at once: each is a whole interpreter."""
_encode = msgspec.json.Encoder().encode


class ProgramVerb(NamedTuple):
    """A method of `TurnCalls` or `DurableSteps`: the types of its arguments, and of its answer."""

    arguments: Any
    answer: Any = None


class _SentCall(Call, frozen=True, kw_only=True):
    what: tuple[Content, ...]


CALL_VERBS: Final = {
    "one": ProgramVerb(tuple[_SentCall], Answer),
    "all": ProgramVerb(tuple[tuple[_SentCall, ...]], tuple[Answer, ...]),
    "quorum": ProgramVerb(tuple[int, tuple[_SentCall, ...]], tuple[Answer, ...]),
    "answer": ProgramVerb(tuple[str, tuple[Content, ...]], Answer),
}
STEP_VERBS: Final = {
    "begin": ProgramVerb(tuple[str], AskedStep),
    "end": ProgramVerb(tuple[AskedStep, Any], Any),
    "fail": ProgramVerb(tuple[AskedStep, StepFailure]),
    "give_up": ProgramVerb(tuple[AskedStep]),
    "sleep": ProgramVerb(tuple[float]),
    "wait_for": ProgramVerb(tuple[str, float | None], Any),
    "ask": ProgramVerb(tuple[Question, float | None], dict[str, Any]),
    "check_end": ProgramVerb(tuple[()]),
}


class ProgramCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="call"):
    """`step`: the name of the step that calls another agent."""

    id: int
    verb: str
    arguments: Any = ()
    step: str = ""


class ProgramCallRefusal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    kind: str
    code: str
    message: str
    detail: str = ""
    """A call limit's message without its reason."""
    retry_after_ms: int | None = None
    wanted: int = 0
    answers: tuple[Answer, ...] = ()
    """What came when there were fewer answers than `wanted`."""


class ProgramCallAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="answer"):
    id: int
    value: msgspec.Raw = msgspec.Raw(b"null")
    refused: ProgramCallRefusal | None = None


def describe_refusal(refusal: Refusal | TimeoutError, wanted: int = 0) -> ProgramCallRefusal:
    if isinstance(refusal, TimeoutError):
        return ProgramCallRefusal(kind=TimeoutError.__name__, code="", message=str(refusal))
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
        answers=refusal.answers if isinstance(refusal, NotEnough) else (),
    )


def refusal_of(refusal: ProgramCallRefusal) -> Refusal | TimeoutError:
    match refusal.kind:
        case TimeoutError.__name__:
            return TimeoutError(refusal.message)
        case CallLimit.__name__:
            return CallLimit(refusal.code.upper(), refusal.detail, retry_after_ms=refusal.retry_after_ms)
        case StepError.__name__:
            return StepError(refusal.code, refusal.message)
        case NotEnough.__name__:
            return NotEnough(refusal.wanted, refusal.answers)
        case kind:
            return REFUSAL_KINDS[kind](refusal.code, refusal.message, retry_after_ms=refusal.retry_after_ms)


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
        verb = CALL_VERBS.get(request.verb) or STEP_VERBS.get(request.verb)
        if verb is None:
            raise msgspec.ValidationError(f"there is no verb {request.verb[:40]!r}")
        arguments: tuple[Any, ...] = msgspec.convert(request.arguments, verb.arguments)
        if request.id in self._running or len(self._running) >= CALLS_MAX:
            raise msgspec.ValidationError(f"at most {CALLS_MAX} calls at once, each with an id of its own")
        task = asyncio.create_task(self._answer(request, arguments))
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

    async def _answer(self, request: ProgramCall, arguments: tuple[Any, ...]) -> None:
        try:
            value = await self._perform(request, arguments)
            answered = ProgramCallAnswer(id=request.id, value=msgspec.Raw(_encode(value)))
        except TurnStopped:
            # The turn has stopped: its task waits, or is held. The program ends with the turn.
            if self._job.runner is not None and not self._job.over:  # a job that is over has stopped its runner
                self._job.runner.cancel()
            return
        except (Refusal, TimeoutError) as refusal:
            wanted = arguments[0] if request.verb == "quorum" else 0
            answered = ProgramCallAnswer(id=request.id, refused=describe_refusal(refusal, wanted))
        except Exception:  # without an answer the program would wait for ever
            log.exception("program.call_failed", extra=self._job.fields())
            internal = Unavailable("internal", "the call failed in the daemon; its log says why")
            answered = ProgramCallAnswer(id=request.id, refused=describe_refusal(internal))
        with contextlib.suppress(ConnectionError):  # the program is gone
            self._stdin.write(_encode(answered) + b"\n")
            await self._stdin.drain()

    async def _perform(self, request: ProgramCall, arguments: tuple[Any, ...]) -> Any:
        if request.verb in CALL_VERBS:
            return await getattr(self._job.calls, request.verb)(*arguments, step=request.step)
        done = getattr(self._job.steps, request.verb)(*arguments)
        return await done if inspect.isawaitable(done) else done


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
