"""What limits a turn: the slots of its tenant, and the token budget of its task, with all that the task delegates.

`Spending` writes into the notes of its job, which become the metadata of the result: `usage`, and as `delegated` how
much of that others have used; with a budget also `spent`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from covenant.model.errors import OverLimit
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import BUDGET_EXCEEDED, budget_of
from covenant.model.rate_limits import TokenBucket
from covenant.model.task import Task
from covenant.model.usage import add_usage, read_usage, tokens_of

if TYPE_CHECKING:
    from covenant.agents.runtime.job import Job


LOOK_S: Final = 1.0
"""How often somebody who waits looks whether the limit was raised meanwhile."""
UNLIMITED: Final = 1_000_000


class TenantSlots:
    """The slots for turns of one tenant. `limit` is asked each time; 0: no limit.

    A turn that waits for what it delegated gives its slot up, and takes one again before it goes on, so that a tenant
    with a single slot can delegate. Waiters are served in order.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._used = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def used(self) -> int:
        return self._used

    @property
    def free(self) -> int:
        """How many can be taken at once; none while somebody waits."""
        return 0 if self._waiting else max(0, (self._limit() or UNLIMITED) - self._used)

    def take(self, count: int = 1) -> bool:
        if self.free < count:
            return False
        self._used += count
        return True

    def give_back(self) -> None:
        self._used -= 1
        if self._waiting:
            self._serve()

    async def wait(self) -> None:
        """Return with a place. Canceled, it has none."""
        if self.take():
            return
        loop = asyncio.get_running_loop()
        place: asyncio.Future[None] = loop.create_future()
        self._waiting.append(place)
        try:
            while not place.done():
                await asyncio.wait((place,), timeout=LOOK_S)
                self._serve()
        except asyncio.CancelledError:
            if place.done():
                self.give_back()
            else:
                self._waiting.remove(place)
            raise

    def _serve(self) -> None:
        limit = self._limit() or UNLIMITED
        while self._waiting and self._used < limit:
            self._used += 1
            self._waiting.popleft().set_result(None)


class StartRate:
    """How often turns of an agent begin: `per_min`, a second's worth of them at once. 0: as often as they come."""

    __slots__ = ("_bucket", "per_min")

    def __init__(self) -> None:
        self.per_min = 0
        self._bucket: TokenBucket | None = None

    def take(self) -> int | None:
        """Begin a turn. None, or in how many milliseconds one may begin."""
        if not self.per_min:
            return None
        now_ms, burst = int(monotonic() * 1_000), max(1, self.per_min // 60)
        if self._bucket is None:
            self._bucket = TokenBucket(burst, now_ms)
        return self._bucket.take(now_ms, self.per_min, burst)

    async def wait(self) -> None:
        """Until one may begin, and begin it."""
        while True:
            wait_ms = self.take()
            if wait_ms is None:
                return
            await asyncio.sleep(wait_ms / 1000)


class TurnSlot:
    """The slot of one turn, which holds it from the start."""

    __slots__ = ("_held", "_left", "_places", "_resuming")

    def __init__(self, places: TenantSlots) -> None:
        self._places = places
        self._held = True
        self._left = False
        self._resuming: asyncio.Lock | None = None

    def leave(self) -> None:
        self._left = True
        self._let_go()

    def _check_left(self) -> None:
        """The turn may have ended while it waited."""
        if self._left:
            self._let_go()

    def _let_go(self) -> None:
        if self._held:
            self._held = False
            self._places.give_back()

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """While the turn only waits for others. It goes on when it has a place again.

        A turn that is canceled meanwhile is not kept waiting for one.
        """
        self._let_go()
        try:
            yield
        except asyncio.CancelledError:
            raise
        except Exception:
            await self._resume()
            raise
        await self._resume()

    async def _resume(self) -> None:
        """Calls that a turn makes at once may end at once: one of them waits for the place."""
        if self._resuming is None:
            self._resuming = asyncio.Lock()
        async with self._resuming:
            if self._held or self._left:
                return
            await self._places.wait()
            self._held = True
            self._check_left()


USAGE: Final = "usage"
DELEGATED: Final = "delegated"
"""In a result's metadata, beside `usage`: how much of that was used by what the task had delegated."""


class TokenBudget:
    """`reserved`: the shares of calls that have not ended, by their tasks. What they do not use comes back."""

    __slots__ = ("_released", "reserved", "spent", "tokens")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.spent = 0.0
        self.reserved: dict[TaskId, int] = {}
        self._released = asyncio.Event()

    @property
    def left(self) -> int:
        return max(0, int(self.tokens - self.spent) - sum(self.reserved.values()))

    async def reserve(self, calls: Sequence[TaskId]) -> int:
        """An equal share of what is left for each of these. Waits while other calls have it all."""
        while (share := self.left // len(calls)) < 1:
            if not self.reserved:
                left = f"{self.left} of {self.tokens} tokens are left for {len(calls)} more calls"
                raise OverLimit(BUDGET_EXCEEDED, f"{BUDGET_EXCEEDED}: {left}")
            self._released.clear()
            await self._released.wait()
        self.reserved |= dict.fromkeys(calls, share)
        return share

    def release(self, call: TaskId) -> None:
        self.reserved.pop(call, None)
        self._released.set()

    def take(self, amounts: Mapping[str, float], notes: dict[str, Any]) -> str | None:
        """Why the job is over, if it is by this; said once. `notes` are the job's, for its result."""
        notes["spent"] = self.spent = self.spent + tokens_of(amounts)
        if self.spent <= self.tokens or notes.get("code") == BUDGET_EXCEEDED:
            return None
        notes["code"] = BUDGET_EXCEEDED
        return f"{BUDGET_EXCEEDED}: {self.spent:.0f} tokens were used, and {self.tokens} were agreed"


class Spending:
    """`running`: what is being used just now, and is not in the notes yet."""

    __slots__ = ("_notes", "budget", "running")

    def __init__(self, task: Task, notes: dict[str, Any]) -> None:
        self._notes = notes
        tokens = budget_of(task)
        self.budget = TokenBudget(tokens) if tokens is not None else None
        self.running: Callable[[], Mapping[str, float]] | None = None

    def add(self, amounts: Mapping[str, Any], *, delegated: bool = False) -> str | None:
        """Why the job is over, if it is by this. `delegated`: others used it, whom the job had asked."""
        counted = read_usage(amounts)
        if not counted:
            return None
        for name in (USAGE, DELEGATED) if delegated else (USAGE,):
            add_usage(self._notes.setdefault(name, {}), counted)
        return self.budget.take(counted, self._notes) if self.budget is not None else None

    def end_running(self) -> dict[str, float]:
        """What `running` came to, for `add`; it is counted no other way from now on."""
        running, self.running = self.running, None
        return read_usage(running()) if running is not None else {}

    @property
    def usage(self) -> dict[str, float]:
        used = dict(self._notes.get(USAGE, {}))
        if self.running is not None:
            add_usage(used, read_usage(self.running()))
        return used

    @property
    def own_usage(self) -> dict[str, float]:
        """Without what others used, whom the task had asked."""
        others = self._notes.get(DELEGATED, {})
        return {name: amount - others.get(name, 0) for name, amount in self.usage.items()}

    @property
    def told(self) -> dict[str, Any] | None:
        """For the metadata of a result that somebody else writes; None if nothing was used."""
        used = self.usage
        if not used:
            return None
        delegated = self._notes.get(DELEGATED)
        return {USAGE: used, DELEGATED: dict(delegated)} if delegated else {USAGE: used}


async def recall_usage(job: Job) -> None:
    """What earlier turns used counts on: usage and limits are a task's, and not a turn's."""
    used = read_usage(await job.noted(USAGE))
    if used:
        delegated = read_usage(await job.noted(DELEGATED))
        job.notes[USAGE] = used
        if delegated:
            job.notes[DELEGATED] = delegated
