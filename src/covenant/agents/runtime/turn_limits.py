"""The limits of a turn: the slots of its tenant, and the token budget of its task, with all that the task delegates.

`Spending` writes into the notes of its job, which become the metadata of the result: `usage`, and as `delegated` the
part of it that other agents have used; with a budget also `spent`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, overload

import msgspec

from covenant.exchange.access.tenants import share
from covenant.model.errors import OverLimit
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import BUDGET_EXCEEDED, budget_of
from covenant.model.rate_limits import TokenBucket
from covenant.model.task import Task
from covenant.model.usage import USAGE, add_usage, read_usage, tokens_of

if TYPE_CHECKING:
    from covenant.agents.runtime.job import Job


LOOK_S: Final = 1.0
"""How often a waiting turn checks whether the limit was raised meanwhile."""
UNLIMITED: Final = 1_000_000
DELEGATED: Final = "delegated"
"""Key in a result's metadata, beside `usage`: the part of it that delegated work has used."""
T = TypeVar("T")


class TenantSlots:
    """The slots for turns of one tenant: `most` of them, of which each of `living` daemons has its share.

    `most` may be changed at any time; 0: no limit. Waiters are served in order.
    """

    def __init__(self, most: int, living: Callable[[], int]) -> None:
        self.most = most
        self._living = living
        self._used = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def used(self) -> int:
        return self._used

    @property
    def free(self) -> int:
        """How many slots can be taken at once; none while somebody waits."""
        return 0 if self._waiters else max(0, self._limit() - self._used)

    def _limit(self) -> int:
        living, most = self._living(), self.most or UNLIMITED
        return most if living == 1 else share(most, living)

    def try_acquire(self, count: int = 1) -> bool:
        if count and (self._waiters or (self.most and self._used + count > self._limit())):
            return False
        self._used += count
        return True

    def release(self, count: int = 1) -> None:
        self._used -= count
        if self._waiters:
            self._serve()

    async def acquire(self) -> None:
        """Waits for a slot, and takes it. A canceled call takes none."""
        if self.try_acquire():
            return
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.append(waiter)
        try:
            while not waiter.done():
                await asyncio.wait((waiter,), timeout=LOOK_S)
                self._serve()
        except asyncio.CancelledError:
            if waiter.done():
                self.release()
            else:
                self._waiters.remove(waiter)
            raise

    def _serve(self) -> None:
        limit = self._limit()
        while self._waiters and self._used < limit:
            self._used += 1
            self._waiters.popleft().set_result(None)


class StartRate:
    """Limits how often turns of an agent begin: `per_min`, a second's worth of them at once. 0: no limit."""

    __slots__ = ("_bucket", "per_min")

    def __init__(self) -> None:
        self.per_min = 0
        self._bucket: TokenBucket | None = None

    def take(self) -> int | None:
        """Takes the right to begin a turn: None; or in how many milliseconds one may begin."""
        if not self.per_min:
            return None
        now_ms, burst = int(monotonic() * 1_000), max(1, self.per_min // 60)
        if self._bucket is None:
            self._bucket = TokenBucket(burst, now_ms)
        return self._bucket.take(now_ms, self.per_min, burst)

    async def wait(self) -> None:
        """Waits until a turn may begin, and takes that right."""
        while True:
            wait_ms = self.take()
            if wait_ms is None:
                return
            await asyncio.sleep(wait_ms / 1000)


class TurnSlot(msgspec.Struct, eq=False):
    """The slot of one turn. The turn holds it from the start, except while it waits for delegated work."""

    _slots: TenantSlots
    _held: bool = True
    _ended: bool = False
    _acquiring: asyncio.Lock | None = None

    def end(self) -> None:
        self._ended = True
        self._release()

    def _release(self) -> None:
        if self._held:
            self._held = False
            self._slots.release()

    @asynccontextmanager
    async def released(self) -> AsyncIterator[None]:
        """Releases the slot while the turn waits for other agents; acquires one again before the turn goes on.

        So a tenant with a single slot can delegate. A turn that is canceled meanwhile does not wait for a slot.
        """
        self._release()
        try:
            yield
        except asyncio.CancelledError:
            raise
        except Exception:
            await self._acquire_again()
            raise
        await self._acquire_again()

    async def _acquire_again(self) -> None:
        """Acquires a slot again. Parallel calls of a turn may end together: only one of them waits for the slot."""
        if self._acquiring is None:
            self._acquiring = asyncio.Lock()
        async with self._acquiring:
            if self._held or self._ended:
                return
            await self._slots.acquire()
            self._held = not self._ended
            if not self._held:  # the turn has ended while it waited
                self._slots.release()


class RunOnLoop(Protocol):
    """Called in a thread: runs a function on the event loop, and returns its result."""

    @overload
    def __call__(self, do: Callable[[], Awaitable[T]], /) -> T: ...
    @overload
    def __call__(self, do: Callable[[], None], /) -> None: ...


class HeldTokens:
    """Tokens that a turn has reserved for itself, as a context. Unspent tokens come back at its end."""

    __slots__ = ("_ask", "_budget", "_wanted", "tokens")

    def __init__(self, budget: TokenBudget | None, wanted: int, ask: RunOnLoop | None) -> None:
        """Without a budget any number is granted. `ask`: set if a thread enters it."""
        self._budget = budget
        self._wanted = wanted
        self._ask = ask
        self.tokens = 0.0

    def __enter__(self) -> None:
        self._begin() if self._ask is None else self._ask(self._begin)

    def __exit__(self, *_: object) -> None:
        self._end() if self._ask is None else self._ask(self._end)

    def _begin(self) -> None:
        budget = self._budget
        if budget is not None and self._wanted > budget.left:
            left = f"{budget.left} of {budget.tokens} tokens are left, but {self._wanted} are needed"
            raise OverLimit(BUDGET_EXCEEDED, f"{BUDGET_EXCEEDED}: {left}")
        if budget is not None:
            self.tokens = self._wanted
            budget.held.append(self)
            _own_reservations.set((*_own_reservations.get(), self))

    def _end(self) -> None:
        if self._budget is not None and self in self._budget.held:
            self._budget.held.remove(self)
            _own_reservations.set(tuple(each for each in _own_reservations.get() if each is not self))
            self._budget.wake_waiters()


_own_reservations: ContextVar[tuple[HeldTokens, ...]] = ContextVar("own", default=())
"""The reservations of this part of a turn: waiting for their release would never end. The loop sets a thread's."""


class TokenBudget:
    """`reserved`: the shares of running calls, by their tasks. Unused tokens come back.

    `held`: the turn's own reservations, newest last.
    """

    __slots__ = ("_released", "held", "reserved", "spent", "tokens")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.spent = 0.0
        self.reserved: dict[TaskId, int] = {}
        self.held: list[HeldTokens] = []
        self._released = asyncio.Event()

    @property
    def left(self) -> int:
        held = sum(each.tokens for each in self.held)
        return max(0, int(self.tokens - self.spent - held) - sum(self.reserved.values()))

    async def reserve(self, calls: Sequence[TaskId]) -> int:
        """Reserves an equal share of the rest for each call. Waits while other parts of the turn hold all of it."""
        while (each_share := self.left // len(calls)) < 1:
            if not self.reserved and all(each in _own_reservations.get() for each in self.held):
                left = f"{self.left} of {self.tokens} tokens are left for {len(calls)} more calls"
                raise OverLimit(BUDGET_EXCEEDED, f"{BUDGET_EXCEEDED}: {left}")
            self._released.clear()
            await self._released.wait()
        self.reserved |= dict.fromkeys(calls, each_share)
        return each_share

    def release(self, call: TaskId) -> None:
        self.reserved.pop(call, None)
        self.wake_waiters()

    def wake_waiters(self) -> None:
        self._released.set()

    def spend(self, amounts: Mapping[str, float], notes: dict[str, Any]) -> str | None:
        """Spends tokens. Returns why the job is over, if it is. `notes` are the job's, for its result."""
        used = tokens_of(amounts)
        notes["spent"] = self.spent = self.spent + used
        for held in reversed(self.held):
            taken = min(held.tokens, used)
            held.tokens, used = held.tokens - taken, used - taken
        if self.spent <= self.tokens:
            return None
        notes["code"] = BUDGET_EXCEEDED
        return f"{BUDGET_EXCEEDED}: {self.spent:.0f} tokens were used of a budget of {self.tokens}"


class Spending:
    """`running`: the current usage that is not in the notes yet. `earlier`: what the turns before this one used."""

    __slots__ = ("_notes", "budget", "earlier", "running", "tokens_max")

    def __init__(self, task: Task, notes: dict[str, Any], tokens_max: int = 0) -> None:
        """`tokens_max`: the most tokens of models for a task, with all that it delegates; 0: no limit."""
        self._notes = notes
        tokens = budget_of(task)
        self.budget = TokenBudget(tokens) if tokens is not None else None
        self.tokens_max = min(filter(None, (tokens_max, tokens)), default=0)
        """This task's limit: lower than the general one if its sender asked for that."""
        self.earlier: Mapping[str, float] = {}
        self.running: Callable[[], Mapping[str, float]] | None = None

    def add(self, amounts: Mapping[str, Any], *, delegated: bool = False) -> str | None:
        """Adds to the usage. Returns why the job is over, if it is. `delegated`: other agents used it for this job."""
        counted = read_usage(amounts)
        if not counted:
            return None
        for name in (USAGE, DELEGATED) if delegated else (USAGE,):
            add_usage(self._notes.setdefault(name, {}), counted)
        return self.budget.spend(counted, self._notes) if self.budget is not None else None

    def end_running(self) -> dict[str, float]:
        """The final value of `running`, for `add`; it is not counted otherwise any more."""
        running, self.running = self.running, None
        return read_usage(running()) if running is not None else {}

    @property
    def tokens_left(self) -> int | None:
        """Tokens left for models, less the reservations of running calls. None: there is no limit."""
        if not self.tokens_max:
            return None
        reserved = sum(self.budget.reserved.values()) if self.budget is not None else 0
        return int(self.tokens_max - tokens_of(self.usage)) - reserved

    @property
    def used_up(self) -> str | None:
        """Why models may use nothing more; None if they may."""
        most = self.tokens_max
        return f"the token budget of this task, {most}, is used up" if 0 < most <= tokens_of(self.usage) else None

    @property
    def usage(self) -> dict[str, float]:
        used = dict(self._notes.get(USAGE, {}))
        if self.running is not None:
            add_usage(used, read_usage(self.running()))
        return used

    @property
    def turn_usage(self) -> dict[str, float]:
        """The usage of this turn, without that of delegated work."""
        delegated, earlier = self._notes.get(DELEGATED, {}), self.earlier
        return {name: used - delegated.get(name, 0) - earlier.get(name, 0) for name, used in self.usage.items()}

    @property
    def usage_metadata(self) -> dict[str, Any] | None:
        """The usage as metadata for a result that somebody else writes; None if nothing was used."""
        used = self.usage
        if not used:
            return None
        delegated = self._notes.get(DELEGATED)
        return {USAGE: used, DELEGATED: dict(delegated)} if delegated else {USAGE: used}


async def recall_usage(job: Job) -> None:
    """Counts what was used before: usage, budget and limits belong to the task, not to a turn.

    In a later turn that is the usage of the turns before it, and not that of its own earlier attempts.
    """
    later_turn = job.leased.turn > 1
    used = read_usage(await job.stored_note(USAGE, parked=later_turn))
    if not used:
        return
    delegated = read_usage(await job.stored_note(DELEGATED, parked=later_turn))
    job.notes[USAGE] = used
    if delegated:
        job.notes[DELEGATED] = delegated
    spending = job.spending
    if later_turn:
        spending.earlier = spending.turn_usage
    if spending.budget is not None:
        spending.budget.spent = tokens_of(used)
