"""What an agent's author writes: one function.

    agent = Agent("summarizer", description="Summarises a text", skills=["summarize"])

    @agent
    async def summarize(turn: Turn):
        yield "Working on it… "                          # text, streamed
        yield turn.file("summary.md", summary.encode())  # an artifact

A function that returns has completed the task; one that raises has failed it, and only the log says why. A function
that is no generator returns its answer. `yield turn.need_input("Which language?")` ends the turn: the next turn calls
the function again, with the answer. A plain function (`def`) runs in a thread, with a `SyncTurn`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeVar, overload

import msgspec

from covenant.agents.runtime import turn_output
from covenant.agents.runtime.agent_calls import Answer, Call, Calling, TurnCalls
from covenant.agents.runtime.turn_steps import SECONDS_MAX, DurableSteps, perform_step
from covenant.exchange.argument_checks import checks_arguments
from covenant.exchange.cron import check_schedules
from covenant.exchange.file_source import FileSource
from covenant.ledger.machine.commands import LeasedTask
from covenant.model.agent_definition import OnLost, Schedule, Skill
from covenant.model.content import Content, File, Text
from covenant.model.question import Question, QuestionKind
from covenant.model.rate_limits import Backoff
from covenant.model.retry_policy import AttemptPolicy
from covenant.model.task import Task
from covenant.model.task_event import PROGRESS, Interruption, MessageUpdate, StatusUpdate
from covenant.outbound.remote.remote_task import Sendable
from covenant.wire.validation import checked


class Rejection(msgspec.Struct, frozen=True, gc=False):
    text: str


class Retry(msgspec.Struct, frozen=True, gc=False):
    """The turn is begun again after a pause; `last`: there is no further attempt, and the task fails."""

    after_s: float
    text: str
    last: bool


class BareReply(msgspec.Struct, frozen=True, gc=False):
    """A bare message: all that the agent has to say, and no task."""

    content: tuple[Content, ...]


class Approval(msgspec.Struct, frozen=True, gc=False):
    """What a person decided. It is true if that was to approve. `by`: who, by name; the sender's words if any."""

    approved: bool
    reason: str = ""
    by: str = ""

    def __bool__(self) -> bool:
        return self.approved


ATTEMPTS: Final = AttemptPolicy().attempts
ATTEMPTS_MAX: Final = 100
T = TypeVar("T")
Sayable = str | Content | StatusUpdate | Rejection | Retry | BareReply
Function = Callable[[Any], AsyncIterator[Sayable] | Awaitable[Sayable | Iterable[Sayable] | None] | Any]


class TurnWork(Protocol):
    """A `Job`, or a job of another process."""

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
    def spend(self, amounts: dict[str, float]) -> None: ...
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
        """What was said before this turn, in order, by the sender (`role` "user") and by the agent ("agent")."""

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
        """The sender's own id of the message that this turn is about."""
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
        """What groups tasks into a conversation; a task that is in none is its own."""
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
        """Whether an attempt before this one was cut short after the last step that the ledger has.

        Nobody knows how far it came. So the first step that is done now may have been done before: look first.
        """
        return self._job.steps.interrupted

    file = staticmethod(checks_arguments(turn_output.file))
    data = staticmethod(turn_output.data)

    @staticmethod
    @checks_arguments
    def status(text: str, *, progress: float | None = None) -> StatusUpdate:
        """Yield it: a word on progress, which is no part of the answer. `progress`: how much is done, from 0 to 1."""
        if progress is None:
            return StatusUpdate(text)
        if not 0 <= progress <= 1:
            raise ValueError(f"progress is from 0 to 1, not {progress}")
        return StatusUpdate(text, metadata={PROGRESS: progress})

    @staticmethod
    @checks_arguments
    def need_input(text: str) -> StatusUpdate:
        """Yield it: the turn ends here, and the next one begins with the sender's answer."""
        return StatusUpdate(text, Interruption.INPUT_REQUIRED.value)

    @staticmethod
    @checks_arguments
    def need_auth(text: str) -> StatusUpdate:
        """Yield it: as `need_input`, for something that only the sender may do elsewhere."""
        return StatusUpdate(text, Interruption.AUTH_REQUIRED.value)

    @staticmethod
    @checks_arguments
    def reject(text: str) -> Rejection:
        """Yield it: the task ends as rejected, for this reason."""
        return Rejection(text)

    @checks_arguments
    def retry(self, after: float, text: str = "") -> Retry:
        """Yield it, or return it: this turn is begun again so many seconds later, as a further attempt.

        The sender is told, with `text`. After the last attempt (`Agent(attempts=…)`, 3 unless said) the task fails
        instead. Steps that are in the ledger are not done again.
        """
        if not 0 <= after <= SECONDS_MAX:
            raise ValueError("after is from 0 seconds to ten years")
        return Retry(after, text, self.attempt >= self._attempts)

    @staticmethod
    @checks_arguments
    def reply(*content: str | Content) -> BareReply:
        """Yield it, and nothing else: the answer is a bare message, and its sender need not hear of a task."""
        return BareReply(tuple(Text(block) if isinstance(block, str) else block for block in content))

    @checks_arguments
    def spend(self, tokens: float = 0, **more: float) -> None:
        """What this turn used up; told with its result, as `usage`, to which what it called is added."""
        self._job.spend({"tokens": tokens, **more} if tokens else more)

    @property
    def tokens_left(self) -> int | None:
        """What is left of the task's token budget, less what calls that have not ended may use. None: no budget."""
        return self._job.tokens_left


def _question(kind: QuestionKind, text: str) -> Question:
    return Question(kind=kind, text=checked("text", text, str))


def approval_of(answered: dict[str, Any]) -> Approval:
    return Approval(answered["approved"], answered["reason"], answered.get("by", ""))


class Turn(BaseTurn):
    """One round of a task, for an async function."""

    __slots__ = ()

    async def save_file(self, name: str, source: FileSource, *, media_type: str | None = None) -> File:
        """Store a file of any size: its bytes, its path, or its pieces as they come. Yield what it returns.

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
        """Ask another agent, and wait for its answer: one of this tenant by name, or one elsewhere by name or URL.

        The call is a task of its own, part of this one. If this turn is begun again, the same call (the same words to
        the same agent, or the same `key`) finds that task and its answer; it is not done twice. `key` holds for the
        whole task. `timeout_ms` after which it is canceled; never more than this task has left. `idempotent`: doing it
        twice does no harm, so that the operator's retry gate may; unless said, as the agent itself declares.

        Raises a `Refusal` if it cannot be asked: `unknown_agent`, `loop_detected`, `depth_exceeded`, or `CallLimit`.
        """
        return await self._job.calls.one(
            Call(agent=agent, what=what, timeout_ms=timeout_ms, key=key, idempotent=idempotent)
        )

    async def call_all(self, calls: Sequence[Calling]) -> tuple[Answer, ...]:
        """Ask several at once, each a `Call` or a tuple of agent and words: all answers, in the order of the calls."""
        return await self._job.calls.all(calls)

    async def call_first(self, calls: Sequence[Calling]) -> Answer:
        """The first answer that completes; the other calls are canceled. Raises `NotEnough` if none does."""
        return (await self._job.calls.quorum(1, calls))[0]

    async def call_quorum(self, count: int, calls: Sequence[Calling]) -> tuple[Answer, ...]:
        """The first `count` that complete, as they come; the others are canceled. Raises `NotEnough`."""
        return await self._job.calls.quorum(count, calls)

    @overload
    async def step(self, name: str, do: Callable[[], Awaitable[T]]) -> T: ...
    @overload
    async def step(self, name: str, do: Callable[[], T]) -> T: ...
    async def step(self, name: str, do: Callable[[], Any]) -> Any:
        """Do it once, whatever happens: its result is in the ledger before the function goes on.

        If this turn is run again, the same step gives that result, and `do` is not called. `name` is its own in the
        turn, and the steps of a turn are asked for in the same order each time. The result is what JSON can hold, up
        to 256 KiB, and is given as JSON has it. What `do` raises is raised here, and is not kept.
        """
        return await perform_step(self._job.steps, name, do)

    async def sleep(self, seconds: float) -> None:
        """Wait without holding a place, also while the daemon is down. The turn is run again when the time is over."""
        await self._job.steps.sleep(seconds)

    async def wait_for(self, name: str, *, timeout_s: float | None = None) -> Any:
        """Wait for a signal of this name, without holding a place; what its sender gave. Raises `TimeoutError`."""
        return await self._job.steps.wait_for(name, timeout_s)

    async def approve(self, text: str, *, timeout_s: float | None = None) -> Approval:
        """Ask a person to approve something, and wait without holding a place. Raises `TimeoutError`.

        The task is `input-required` until somebody approves or denies it, by any door. The turn is run again then; the
        decision is in the ledger, and holds for this very text.
        """
        return approval_of(await self._job.steps.ask(_question("approval", text), timeout_s))

    async def ask(self, text: str, *, timeout_s: float | None = None) -> str:
        """Ask the sender something in the middle of a turn: the text of the next message. Raises `TimeoutError`.

        Unlike `need_input`, it ends neither the turn nor what its steps have done.
        """
        said: str = (await self._job.steps.ask(_question("input", text), timeout_s))["text"]
        return said

    async def answer(self, call: Answer | str, what: Sendable) -> Answer:
        """Say what a call waits for (`answer.waits`), by its answer or its task's id, and wait for the next one."""
        return await self._job.calls.answer(call, what)


class AskLoop(Protocol):
    """From a thread: have the loop do something, and wait for it."""

    @overload
    def __call__(self, do: Callable[[], Awaitable[T]], /) -> T: ...
    @overload
    def __call__(self, do: Callable[[], None], /) -> None: ...


class SyncTurn(BaseTurn):
    """One round of a task, for a plain function, which runs in a thread: the methods of a `Turn`, without `await`.

    They may be used from any thread that the function starts. Those that talk to the loop wait for it; once the turn is
    over they raise `asyncio.CancelledError`.
    """

    __slots__ = ("_ask",)

    def __init__(
        self, job: TurnWork, history: tuple[MessageUpdate, ...], ask: AskLoop, attempts: int = ATTEMPTS
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
        return self._ask(lambda: self._job.calls.one(call))

    def call_all(self, calls: Sequence[Calling]) -> tuple[Answer, ...]:
        return self._ask(lambda: self._job.calls.all(calls))

    def call_first(self, calls: Sequence[Calling]) -> Answer:
        return self.call_quorum(1, calls)[0]

    def call_quorum(self, count: int, calls: Sequence[Calling]) -> tuple[Answer, ...]:
        return self._ask(lambda: self._job.calls.quorum(count, calls))

    def answer(self, call: Answer | str, what: Sendable) -> Answer:
        return self._ask(lambda: self._job.calls.answer(call, what))

    def save_file(self, name: str, source: FileSource, *, media_type: str | None = None) -> File:
        return self._ask(lambda: self._job.save_file(name, source, media_type))

    def open_file(self, part: Content) -> Iterator[bytes]:
        pieces = self._job.open_file(part)

        async def more() -> bytes | None:
            return await anext(pieces, None)

        while (piece := self._ask(more)) is not None:
            yield piece

    def step(self, name: str, do: Callable[[], T]) -> T:
        steps = self._job.steps
        asked = self._ask(lambda: steps.begin(name))
        if asked.found is not None:
            done: T = asked.found.result
            return done
        try:
            value = do()
        except BaseException:
            self._ask(lambda: steps.give_up(asked))
            raise
        kept: T = self._ask(lambda: steps.end(asked, value))
        return kept

    def sleep(self, seconds: float) -> None:
        self._ask(lambda: self._job.steps.sleep(seconds))

    def wait_for(self, name: str, *, timeout_s: float | None = None) -> Any:
        return self._ask(lambda: self._job.steps.wait_for(name, timeout_s))

    def approve(self, text: str, *, timeout_s: float | None = None) -> Approval:
        return approval_of(self._ask(lambda: self._job.steps.ask(_question("approval", text), timeout_s)))

    def ask(self, text: str, *, timeout_s: float | None = None) -> str:
        said: str = self._ask(lambda: self._job.steps.ask(_question("input", text), timeout_s))["text"]
        return said

    def spend(self, tokens: float = 0, **more: float) -> None:
        self._ask(lambda: BaseTurn.spend(self, tokens, **more))


class Agent:
    """An agent, by name. Used as the decorator of the function that does its work.

    `timeout_ms`: how long a turn may take. `idempotent`: running a turn twice does no harm, so work that is cut short
    may be begun again by itself. `on_lost`: what becomes of work whose daemon died: it is held for an operator, failed,
    or (if idempotent) requeued. `concurrency`: turns at once; 0 leaves it to the daemon. `rate_per_min`: turns that
    begin in a minute; the others wait. `default_project`: the simple door gives its tasks to the first agent that has
    one.

    `retry_on`: exceptions after which a turn is begun again by itself, up to `attempts` in all, after pauses by
    `backoff` (1 s, 2 s, 4 s … up to 5 minutes, unless said). Only an idempotent agent may have it.

    An `async def` runs on the daemon's loop, and must not block it; so does one behind a decorator that uses
    `functools.wraps`, and an object whose `__call__` is one. A plain function runs in a thread. `isolate`: each turn
    runs in a process of its own, which imports the file of the agent; if it dies, only its task fails.
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
    ) -> None:
        self.name = name
        self.description = description
        self.skills = tuple(Skill(id=skill) if isinstance(skill, str) else skill for skill in skills)
        self.input_modes = tuple(input_modes)
        self.output_modes = tuple(output_modes)
        self.timeout_ms = timeout_ms
        self.idempotent = idempotent
        self.on_lost: OnLost = on_lost
        self.concurrency = concurrency
        self.rate_per_min = rate_per_min
        self.extensions = tuple(extensions)
        self.default_project = default_project
        self.isolate = isolate
        if not 1 <= attempts <= ATTEMPTS_MAX:
            raise ValueError(f"attempts is from 1 to {ATTEMPTS_MAX}")
        if retry_on and not idempotent:
            raise ValueError(
                "retry_on needs idempotent=True: what failed may have been done; or use turn.retry(after=…)"
            )
        self.retries = AttemptPolicy(attempts=attempts, backoff=backoff or AttemptPolicy().backoff)
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
        """The function does this agent's work. It is given back as it is."""
        if not callable(function):
            raise TypeError(f"agent {self.name!r} needs a function: an `async def`, or a plain one")
        if self.function is not None:
            raise TypeError(f"agent {self.name!r} has a function already")
        self.function = function
        return function

    def __repr__(self) -> str:
        return f"Agent({self.name!r})"
