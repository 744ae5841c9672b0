"""The API for authors of agents: an agent is one function.

    agent = Agent("summarizer", description="Summarises a text", skills=["summarize"])

    @agent
    async def summarize(turn: Turn):
        yield "Working on it… "                          # text, streamed
        yield turn.file("summary.md", summary.encode())  # an artifact

When the function returns, the task is completed. When it raises, the task fails, and only the log says why. A function
that is no generator returns its answer. `yield turn.need_input("Which language?")` ends the turn: the next turn calls
the function again, with the answer. A plain function (`def`) runs in a thread, with a `SyncTurn`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar, overload

import msgspec

from covenant.agents.runtime import turn_files
from covenant.agents.runtime.agent_calls import Answer, Call, Calling, TurnCalls
from covenant.agents.runtime.durable_step import DurableSteps, perform_step, perform_sync_step, refuse_nested, step_here
from covenant.agents.runtime.turn_limits import HeldTokens, RunOnLoop
from covenant.agents.runtime.turn_steps import SECONDS_MAX
from covenant.exchange.argument_checks import checks_arguments
from covenant.exchange.cron import check_schedules
from covenant.exchange.file_source import FileSource
from covenant.ledger.machine.commands import LeasedTask
from covenant.model.agent_definition import OnLost, Schedule, Skill
from covenant.model.content import Content, File, Text
from covenant.model.errors import OverLimit
from covenant.model.peers.delegation import BUDGET_EXCEEDED
from covenant.model.peers.instance import Whole
from covenant.model.question import Question, QuestionKind
from covenant.model.rate_limits import Backoff
from covenant.model.retry_policy import AttemptPolicy, check_attempts
from covenant.model.task import Task
from covenant.model.task_event import PROGRESS, Interruption, MessageUpdate, StatusUpdate
from covenant.outbound.remote.remote_task import Sendable
from covenant.wire.validation import checked

ATTEMPTS: Final = AttemptPolicy().attempts
T = TypeVar("T")


class Rejection(msgspec.Struct, frozen=True, gc=False):
    text: str


class Retry(msgspec.Struct, frozen=True, gc=False):
    """The turn begins again after a pause. `last`: there is no further attempt, and the task fails."""

    after_s: float
    text: str
    last: bool


class BareReply(msgspec.Struct, frozen=True, gc=False):
    """The answer is a bare A2A message instead of a task."""

    content: tuple[Content, ...]


class Approval(msgspec.Struct, frozen=True, gc=False):
    """A person's decision; true if it is an approval. `reason`: the person's text, if any. `by`: the person's name."""

    approved: bool
    reason: str = ""
    by: str = ""

    def __bool__(self) -> bool:
        return self.approved


TurnValue = str | Content | StatusUpdate | Rejection | Retry | BareReply
Function = Callable[[Any], AsyncIterator[TurnValue] | Awaitable[TurnValue | Iterable[TurnValue] | None] | Any]


class TurnWork(Protocol):
    """A `Job`, or its stand-in in another process."""

    @property
    def task(self) -> Task: ...
    @property
    def leased(self) -> LeasedTask: ...
    @property
    def messages(self) -> tuple[MessageUpdate, ...]: ...
    @property
    def calls(self) -> TurnCalls: ...
    @property
    def steps(self) -> DurableSteps: ...
    def spend(self, amounts: dict[str, float]) -> str | None: ...
    def reserve(self, tokens: int, ask: RunOnLoop | None = None) -> HeldTokens: ...
    def save_file(self, name: str, source: FileSource, media_type: str | None = None) -> Awaitable[File]: ...
    def open_file(self, part: Content) -> AsyncIterator[bytes]: ...
    @property
    def tokens_left(self) -> int | None: ...


class BaseTurn:
    __slots__ = ("_attempts", "_job", "_parts", "history")

    def __init__(self, job: TurnWork, history: tuple[MessageUpdate, ...] = (), attempts: int = ATTEMPTS) -> None:
        self._job = job
        self._attempts = attempts
        self._parts: tuple[Content, ...] | None = None
        self.history: Final = history
        """The messages before this turn, in order, of the sender (`role` "user") and of the agent ("agent")."""

    @property
    def text(self) -> str:
        if self._parts is None and not self._job.leased.messages and not self._job.task.parts:
            return self._job.task.intent_text
        return "\n".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def parts(self) -> tuple[Content, ...]:
        if self._parts is None:
            self._parts = tuple(part for message in self._job.messages for part in message.parts)
        return self._parts

    @property
    def message_id(self) -> str:
        """The sender's own id of this turn's message."""
        return self._job.messages[-1].message_id or ""

    @property
    def metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for message in self._job.messages:
            found |= message.metadata or {}
        return found

    @property
    def task_id(self) -> str:
        return self._job.task.id

    @property
    def context_id(self) -> str:
        """The id that groups tasks into a conversation; the task's own id if it is in none."""
        return self._job.task.context_id or self._job.task.id

    @property
    def task(self) -> Task:
        return self._job.task

    @property
    def turn(self) -> int:
        """1 for the first message of a task."""
        return self._job.leased.turn

    @property
    def attempt(self) -> int:
        """1, unless this turn was begun before and its holder was lost."""
        return self._job.leased.lease.attempt

    @property
    def interrupted(self) -> bool:
        """Whether an attempt was cut short after its last durable step: the next step may have been done, so check
        first."""
        return self._job.steps.interrupted

    @property
    def _steps(self) -> DurableSteps:
        """The durable steps. Refused inside a step: no step may contain another step or a wait."""
        refuse_nested(self._job.steps)
        return self._job.steps

    @property
    def _step_here(self) -> str:
        return step_here(self._job.steps)

    file = staticmethod(checks_arguments(turn_files.file))
    data = staticmethod(turn_files.data)

    @staticmethod
    @checks_arguments
    def status(text: str, *, progress: float | None = None) -> StatusUpdate:
        """Yield it to report progress; it is no part of the answer. `progress`: the share that is done, from 0 to 1."""
        if progress is None:
            return StatusUpdate(text)
        if not 0 <= progress <= 1:
            raise ValueError(f"progress must be from 0 to 1, not {progress}")
        return StatusUpdate(text, metadata={PROGRESS: progress})

    @staticmethod
    @checks_arguments
    def need_input(text: str) -> StatusUpdate:
        """Yield it to end the turn; the next turn begins with the sender's answer."""
        return StatusUpdate(text, Interruption.INPUT_REQUIRED.value)

    @staticmethod
    @checks_arguments
    def need_auth(text: str) -> StatusUpdate:
        """Yield it, like `need_input`, for something that the sender must do outside of the task, such as a login."""
        return StatusUpdate(text, Interruption.AUTH_REQUIRED.value)

    @staticmethod
    @checks_arguments
    def reject(text: str) -> Rejection:
        """Yield it to end the task as rejected, for this reason."""
        return Rejection(text)

    @checks_arguments
    def retry(self, after: float, text: str = "") -> Retry:
        """Yield or return it: the turn begins again `after` seconds later, as a further attempt.

        The sender is told, with `text`. After the last attempt (`Agent(attempts=…)`, 3 by default) the task fails
        instead. Steps that are in the ledger are not done again.
        """
        if not 0 <= after <= SECONDS_MAX:
            raise ValueError("after must be from 0 seconds to ten years")
        return Retry(after, text, self.attempt >= self._attempts)

    @staticmethod
    @checks_arguments
    def reply(*content: str | Content) -> BareReply:
        """Yield it, and nothing else: the answer is a bare message, and the sender need not see a task."""
        return BareReply(tuple(Text(block) if isinstance(block, str) else block for block in content))

    @checks_arguments
    def spend(self, tokens: float = 0, **more: float) -> None:
        """Adds to this turn's usage, which its result reports. Raises OverLimit if the task's budget is exceeded."""
        over = self._job.spend({"tokens": tokens, **more} if tokens else more)
        if over is not None:
            raise OverLimit(BUDGET_EXCEEDED, over)

    def reserve(self, tokens: int) -> HeldTokens:
        """`with turn.reserve(500):` reserves tokens of the budget. Raises OverLimit if fewer are left."""
        return self._job.reserve(checked("tokens", tokens, Whole))

    @property
    def tokens_left(self) -> int | None:
        """The rest of the task's token budget, less what running calls may use. None: no budget."""
        return self._job.tokens_left


def _question(kind: QuestionKind, text: str) -> Question:
    return Question(kind=kind, text=checked("text", text, str))


def approval_of(answered: dict[str, Any]) -> Approval:
    return Approval(answered["approved"], answered["reason"], answered.get("by", ""))


class Turn(BaseTurn):
    """One turn of a task, for an async function."""

    __slots__ = ()

    async def save_file(self, name: str, source: FileSource, *, media_type: str | None = None) -> File:
        """Stores a file of any size: its bytes, its path, or its pieces as they arrive. Yield the returned part.

        The bytes are durable when it returns, and are never in memory as a whole.
        """
        return await self._job.save_file(name, source, media_type)

    def open_file(self, part: Content) -> AsyncIterator[bytes]:
        """The bytes of a part, in pieces: `async for piece in turn.open_file(part)`."""
        return self._job.open_file(part)

    async def call(
        self,
        agent: Agent | str,
        what: Sendable,
        *,
        timeout_ms: int | None = None,
        key: str | None = None,
        idempotent: bool | None = None,
    ) -> Answer:
        """Calls another agent and waits for its answer: one of this tenant by name, or a remote one by name or URL.

        The call is a task of its own, a child of this one. If this turn begins again, the same call (the same text to
        the same agent, or the same `key`) finds that task and its answer; the work is not done twice. A `key` is valid
        for the whole task. The call is canceled after `timeout_ms`, and when this task's time is over. `idempotent`:
        doing the work twice does no harm, so the operator's retry gate may repeat it; by default, as the agent
        declares.

        Raises a `Refusal` if it cannot be called: `unknown_agent`, `loop_detected`, `depth_exceeded`, or `CallLimit`.
        """
        call = Call(agent=agent, what=what, timeout_ms=timeout_ms, key=key, idempotent=idempotent)
        return await self._job.calls.one(call, step=self._step_here)

    async def call_all(self, calls: Sequence[Calling]) -> tuple[Answer, ...]:
        """Calls several agents at once, each by a `Call` or a tuple of agent and text. Answers keep the order."""
        return await self._job.calls.all(calls, step=self._step_here)

    async def call_first(self, calls: Sequence[Calling]) -> Answer:
        """The first answer that completes; the other calls are canceled. Raises `NotEnough` if none does."""
        return (await self._job.calls.quorum(1, calls, step=self._step_here))[0]

    async def call_quorum(self, count: int, calls: Sequence[Calling]) -> tuple[Answer, ...]:
        """The first `count` answers that complete; the other calls are canceled. Raises `NotEnough`."""
        return await self._job.calls.quorum(count, calls, step=self._step_here)

    @overload
    async def step(self, name: str, do: Callable[[], Awaitable[T]]) -> T: ...
    @overload
    async def step(self, name: str, do: Callable[[], T]) -> T: ...
    async def step(self, name: str, do: Callable[[], Any]) -> Any:
        """Does something once: its result is in the ledger before the function goes on.

        If this turn runs again, the same step returns that result, and `do` is not called. `name` must be unique in the
        turn, and a turn must ask for its steps in the same order each time. The result must fit JSON, up to 256 KiB,
        and is returned after a round trip through JSON. An exception of `do` is kept and raised again, too
        (`StepFailed` if its class cannot be made again); a further attempt calls `do` again.
        """
        return await perform_step(self._steps, name, do)

    async def sleep(self, seconds: float) -> None:
        """Waits without holding a worker, also while the daemon is down. The turn runs again when the time is over."""
        await self._steps.sleep(seconds)

    async def wait_for(self, name: str, *, timeout_s: float | None = None) -> Any:
        """Waits for a signal of this name without holding a worker; returns its value. Raises `TimeoutError`."""
        return await self._steps.wait_for(name, timeout_s)

    async def approve(self, text: str, *, timeout_s: float | None = None) -> Approval:
        """Asks a person to approve something, and waits without holding a worker. Raises `TimeoutError`.

        The task is `input-required` until somebody approves or denies it, by any door. Then the turn runs again; the
        decision is in the ledger, and is valid for exactly this text.
        """
        return approval_of(await self._steps.ask(_question("approval", text), timeout_s))

    async def ask(self, text: str, *, timeout_s: float | None = None) -> str:
        """Asks the sender something within a turn; returns the text of the next message. Raises `TimeoutError`.

        Unlike `need_input`, this does not end the turn, and the results of its steps stay.
        """
        answer: str = (await self._steps.ask(_question("input", text), timeout_s))["text"]
        return answer

    async def answer(self, call: Answer | str, what: Sendable) -> Answer:
        """Answers a waiting call (`answer.waits`), given by its answer or task id, and waits for the next answer."""
        return await self._job.calls.answer(call, what, step=self._step_here)


class SyncTurn(BaseTurn):
    """One turn of a task, for a plain function in a thread: the methods of a `Turn`, without `await`.

    They may be used from any thread that the function starts. Methods that need the event loop wait for it; once the
    turn is over they raise `asyncio.CancelledError`.
    """

    __slots__ = ("_ask",)

    def __init__(
        self, job: TurnWork, history: tuple[MessageUpdate, ...], ask: RunOnLoop, attempts: int = ATTEMPTS
    ) -> None:
        super().__init__(job, history, attempts)
        self._ask = ask

    def call(
        self,
        agent: Agent | str,
        what: Sendable,
        *,
        timeout_ms: int | None = None,
        key: str | None = None,
        idempotent: bool | None = None,
    ) -> Answer:
        call = Call(agent=agent, what=what, timeout_ms=timeout_ms, key=key, idempotent=idempotent)
        return self._ask(partial(self._job.calls.one, call, step=self._step_here))

    def call_all(self, calls: Sequence[Calling]) -> tuple[Answer, ...]:
        return self._ask(partial(self._job.calls.all, calls, step=self._step_here))

    def call_first(self, calls: Sequence[Calling]) -> Answer:
        return self.call_quorum(1, calls)[0]

    def call_quorum(self, count: int, calls: Sequence[Calling]) -> tuple[Answer, ...]:
        return self._ask(partial(self._job.calls.quorum, count, calls, step=self._step_here))

    def answer(self, call: Answer | str, what: Sendable) -> Answer:
        return self._ask(partial(self._job.calls.answer, call, what, step=self._step_here))

    def save_file(self, name: str, source: FileSource, *, media_type: str | None = None) -> File:
        return self._ask(lambda: self._job.save_file(name, source, media_type))

    def open_file(self, part: Content) -> Iterator[bytes]:
        pieces = self._job.open_file(part)

        async def more() -> bytes | None:
            return await anext(pieces, None)

        while (piece := self._ask(more)) is not None:
            yield piece

    def step(self, name: str, do: Callable[[], T]) -> T:
        return perform_sync_step(self._steps, name, do, self._ask)

    def sleep(self, seconds: float) -> None:
        self._ask(partial(self._steps.sleep, seconds))

    def wait_for(self, name: str, *, timeout_s: float | None = None) -> Any:
        return self._ask(partial(self._steps.wait_for, name, timeout_s))

    def approve(self, text: str, *, timeout_s: float | None = None) -> Approval:
        return approval_of(self._ask(partial(self._steps.ask, _question("approval", text), timeout_s)))

    def ask(self, text: str, *, timeout_s: float | None = None) -> str:
        answer: str = self._ask(partial(self._steps.ask, _question("input", text), timeout_s))["text"]
        return answer

    def spend(self, tokens: float = 0, **more: float) -> None:
        self._ask(lambda: BaseTurn.spend(self, tokens, **more))

    def reserve(self, tokens: int) -> HeldTokens:
        return self._job.reserve(checked("tokens", tokens, Whole), self._ask)


class Agent:
    """An agent, by name. Used as the decorator of the function that does its work.

    `timeout_ms`: how long a turn may take. `idempotent`: running a turn twice does no harm, so the daemon may begin
    interrupted work again by itself. `on_lost`: what happens to work whose daemon died: held for an operator, failed,
    or (if idempotent) requeued. `concurrency`: turns at once; 0 leaves it to the daemon. `rate_per_min`: turns that
    begin in a minute; the others wait. `default_project`: the simple door uses the first agent that has one.

    `retry_on`: exceptions after which the daemon begins a turn again, up to `attempts` in all, after pauses by
    `backoff` (by default 1 s, 2 s, 4 s … up to 5 minutes). Only an idempotent agent may have it. Lost attempts that
    `on_lost` requeues count as well.

    An `async def` runs on the daemon's event loop, and must not block it; so does one behind a decorator that uses
    `functools.wraps`, and an object whose `__call__` is one. A plain function runs in a thread. `isolate`: each turn
    runs in a process of its own, which imports the agent's file; if the process dies, only its task fails.

    `wraps`: an agent of pydantic-ai instead of a function. `deps`: its dependencies, or a function of the `Turn`.
    """

    @checks_arguments
    def __init__(
        self,
        name: str,
        *,
        description: str = "",
        skills: Sequence[str | Skill] = (),
        input_modes: Sequence[str] = (),
        output_modes: Sequence[str] = (),
        timeout_ms: int | None = None,
        idempotent: bool = False,
        on_lost: OnLost = "hold",
        concurrency: int = 0,
        extensions: Sequence[str] = (),
        default_project: str = "",
        isolate: bool = False,
        attempts: int = ATTEMPTS,
        backoff: Backoff | None = None,
        retry_on: Sequence[type[Exception]] = (),
        schedules: Sequence[Schedule] = (),
        rate_per_min: int = 0,
        wraps: Any = None,
        deps: Any = None,
    ) -> None:
        self.name = name
        if (deps is not None) if wraps is None else isolate:
            raise ValueError("deps need wraps, an agent of pydantic-ai, and such an agent cannot have isolate")
        self.wraps, self.deps = wraps, deps
        self.description = description
        self.skills = tuple(Skill(id=skill) if isinstance(skill, str) else skill for skill in skills)
        self.input_modes, self.output_modes = tuple(input_modes), tuple(output_modes)
        self.timeout_ms = timeout_ms
        self.idempotent = idempotent
        self.on_lost: OnLost = on_lost
        self.concurrency = concurrency
        self.rate_per_min = rate_per_min
        self.extensions = tuple(extensions)
        self.default_project = default_project
        self.isolate = isolate
        self.retries = AttemptPolicy(attempts=attempts, backoff=backoff or AttemptPolicy().backoff)
        check_attempts(self.retries, retry_on, idempotent=idempotent)
        self.retry_on = tuple(retry_on)
        self.schedules = tuple(schedules)
        check_schedules(self.schedules)
        self.function: Function | None = None

    @overload
    def __call__(self, function: Callable[[Turn], AsyncIterator[Any]]) -> Callable[[Turn], AsyncIterator[Any]]: ...
    @overload
    def __call__(self, function: Callable[[Turn], Awaitable[Any]]) -> Callable[[Turn], Awaitable[Any]]: ...
    @overload
    def __call__(self, function: Callable[[SyncTurn], Any]) -> Callable[[SyncTurn], Any]: ...
    def __call__(self, function: Any) -> Any:
        """Registers the function that does this agent's work, and returns it unchanged."""
        if not callable(function):
            raise TypeError(f"agent {self.name!r} needs a function: an `async def`, or a plain one")
        if self.function is not None or self.wraps is not None:
            raise TypeError(f"agent {self.name!r} has a function already, or wraps an agent of pydantic-ai")
        self.function = function
        return function

    def __repr__(self) -> str:
        return f"Agent({self.name!r})"
