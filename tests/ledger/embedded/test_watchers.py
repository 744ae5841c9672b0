"""What arrives wakes one waiter, the longest waiting; how many others wait costs it nothing."""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from statistics import median
from time import process_time
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.ledger.embedded.open import memory_ledger
from covenant.ledger.watchers import DEPARTED_MAX, QueueWaiter, QueueWaiters
from covenant.model.ids import PublicKey
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.fake_clock import FakeClock
from tests.ledger_contract.samples import BOB, CAROL, make_task
from tests.ledger_contract.waiters import WaiterQueue
from tests.waits import BOUND_S

MANY = 10_000
WAIT_MS = 600_000


@pytest.fixture
async def driver() -> AsyncIterator[LedgerDriver]:
    clock = FakeClock()
    ledger = await memory_ledger(clock=clock)
    yield LedgerDriver(ledger, clock)
    await ledger.close()


@asynccontextmanager
async def crowd(driver: LedgerDriver, count: int) -> AsyncIterator[list[asyncio.Task[bool]]]:
    """So many who wait for Bob's tasks, each in a task of its own."""
    with driver.ledger.task_waiter(CAROL.pubkey):
        async with AsyncExitStack() as stack:
            waiters = [stack.enter_context(driver.ledger.task_waiter(BOB.pubkey)) for _ in range(count)]
            tasks = [asyncio.ensure_future(waiter.wait(WAIT_MS)) for waiter in waiters]
            await asyncio.sleep(0)
            yield tasks
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def calls_of(work: Callable[[], Awaitable[Any]]) -> int:
    """How many functions are called, in all, until the work is done and those whom it woke have run."""
    count = 0

    def counted(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        await work()
        for _ in range(5):
            await asyncio.sleep(0)
    finally:
        sys.setprofile(None)
    return count


async def test_one_who_takes_for_anybody_loses_no_wake_of_whom_it_was_woken_for(driver: LedgerDriver) -> None:
    ledger = driver.ledger
    bobs, anybodys, carols = (ledger.task_waiter(identity) for identity in (BOB.pubkey, None, CAROL.pubkey))
    with bobs, carols:
        with anybodys:
            waits = [asyncio.ensure_future(waiter.wait(WAIT_MS)) for waiter in (bobs, anybodys, carols)]
            await asyncio.sleep(0)
            await driver.send(make_task(1, recipient=BOB))
            await driver.send(make_task(2, recipient=CAROL))
            await asyncio.sleep(0)
            assert [wait.done() for wait in waits] == [True, True, False], "anybody's was woken for Carol's task"
            (taken,) = await driver.take(everyone=True)
            assert taken.task.recipient == BOB, "and takes the oldest of all"
            anybodys.served()
        assert await asyncio.wait_for(waits[2], BOUND_S), "Carol's receiver hears of her task"


async def test_a_send_wakes_one_of_ten_thousand_and_calls_as_little_as_with_ten(driver: LedgerDriver) -> None:
    calls = []
    for number, count in ((10, 10), (20, MANY)):
        async with crowd(driver, count) as tasks:
            # The first one sorts out what loads late.
            await driver.send(make_task(number))
            await driver.take_one()
            calls.append(await calls_of(partial(driver.send, make_task(number + 1))))
            assert [task.done() for task in tasks] == [True, True, *([False] * (count - 2))]
            await driver.take_one()
    of_ten, of_many = calls
    # The loop's heap of timers compares a few more; waking all of them would call tens of thousands.
    assert of_many <= of_ten + 200


async def test_a_send_to_ten_thousand_waiters_takes_about_as_long_as_to_none(driver: LedgerDriver) -> None:
    """Far below what waking them all would cost, which was 60 times as long for 900. The bound is generous."""
    numbers = iter(range(1, 10_000))

    async def send() -> float:
        begun = process_time()
        await driver.send(make_task(next(numbers)))
        elapsed = process_time() - begun
        await driver.take_one()
        return elapsed

    none = median([await send() for _ in range(200)])
    async with crowd(driver, MANY):
        many = median([await send() for _ in range(200)])
    assert many < 3 * none


async def test_those_who_wait_are_served_in_their_order(driver: LedgerDriver) -> None:
    served: list[int] = []

    async def receive(number: int) -> None:
        with driver.ledger.task_waiter(BOB.pubkey) as waiter:
            while not (leased := await driver.take()):
                assert await waiter.wait(WAIT_MS)
            waiter.served()
            served.append(number)
            assert len(leased) == 1

    receivers = []
    for number in range(50):
        receivers.append(asyncio.ensure_future(receive(number)))
        await asyncio.sleep(0)
    for number in range(50):
        await driver.send(make_task(number))
    await asyncio.wait_for(asyncio.gather(*receivers), BOUND_S)
    assert served == list(range(50))


async def test_receivers_that_are_cancelled_as_they_are_woken_strand_no_task(driver: LedgerDriver) -> None:
    """Each task that arrives wakes somebody who is cancelled in that moment: somebody else takes it."""
    tasks, leased_ids, all_leased = 30, set[str](), asyncio.Event()
    waiting: list[asyncio.Task[Any] | None] = []

    async def receive() -> None:
        with driver.ledger.task_waiter(BOB.pubkey) as waiter:
            while not (leased := await driver.take()):
                waiting.append(asyncio.current_task())
                await waiter.wait(WAIT_MS)
                waiting.remove(asyncio.current_task())
            waiter.served()
            leased_ids.add(leased[0].task.id)
            if len(leased_ids) == tasks:
                all_leased.set()

    receivers = [asyncio.create_task(receive()) for _ in range(3 * tasks)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(waiting) == len(receivers)
    for number in range(tasks):
        sending = asyncio.create_task(driver.send(make_task(number)))
        await asyncio.sleep(0)
        woken = waiting[0]
        assert woken is not None
        woken.cancel()
        waiting.remove(woken)
        await sending
    await asyncio.wait_for(all_leased.wait(), BOUND_S)
    for receiver in receivers:
        receiver.cancel()
    ended = await asyncio.gather(*receivers, return_exceptions=True)
    assert sum(isinstance(each, asyncio.CancelledError) for each in ended) == 2 * tasks


async def test_waiters_that_come_and_go_leave_nothing_behind() -> None:
    waiters = QueueWaiters(lambda _: False)
    with waiters.waiter(BOB.pubkey) as staying:
        task = asyncio.ensure_future(staying.wait(WAIT_MS))
        await asyncio.sleep(0)
        for _ in range(10 * DEPARTED_MAX):
            with waiters.waiter(BOB.pubkey) as passing:
                leaving = asyncio.ensure_future(passing.wait(WAIT_MS))
                await asyncio.sleep(0)
                leaving.cancel()
        line = waiters.lines[BOB.pubkey]
        assert len(line._order) <= 2 + DEPARTED_MAX + 1
        waiters.wake(BOB.pubkey)
        assert await task
    assert not waiters.lines


async def test_a_wake_and_the_end_of_the_time_in_one_turn_are_one_or_the_other(driver: LedgerDriver) -> None:
    async with WaiterQueue(driver) as line:
        for number in range(20):
            with driver.ledger.task_waiter(BOB.pubkey) as short:
                ending = asyncio.ensure_future(short.wait(1))
                await asyncio.sleep(0)
                heir = await line.wait_for_tasks(BOB)
                await asyncio.sleep(0.001)
                await driver.send(make_task(number))
                woken = await ending
            if not woken:
                assert await heir.woken()
            assert len(await driver.take()) == 1
            heir.cancel()


class Model:
    """Waiters, beside a list that says who must be next."""

    def __init__(self) -> None:
        self.pending: Counter[PublicKey] = Counter()
        self.waiters = QueueWaiters(lambda key: bool(self.pending[key] if key is not None else self.pending.total()))
        self.asleep: list[tuple[QueueWaiter, asyncio.Task[bool]]] = []

    async def wait(self, key: PublicKey | None) -> None:
        waiter = self.waiters.waiter(key).__enter__()
        task = asyncio.ensure_future(waiter.wait(WAIT_MS))
        await asyncio.sleep(0)
        if task.done():
            waiter.__exit__(None, None, None)
        else:
            self.asleep.append((waiter, task))

    async def arrive(self, key: PublicKey) -> None:
        self.pending[key] += 1
        matching = [pair for pair in self.asleep if pair[0].identity in (None, key)]
        self.waiters.wake(key)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [pair for pair in self.asleep if pair[1].done()] == matching[:1]
        if matching:
            waiter, _ = matching[0]
            self.asleep.remove(matching[0])
            self.pending[key] -= 1
            waiter.served()
            waiter.__exit__(None, None, None)

    async def leave(self, index: int) -> None:
        if self.asleep:
            waiter, task = self.asleep.pop(index % len(self.asleep))
            task.cancel()
            waiter.__exit__(None, None, None)
            await asyncio.gather(task, return_exceptions=True)


@given(
    moves=st.lists(
        st.one_of(
            st.tuples(st.just("wait"), st.sampled_from([BOB.pubkey, CAROL.pubkey, None])),
            st.tuples(st.just("arrive"), st.sampled_from([BOB.pubkey, CAROL.pubkey])),
            st.tuples(st.just("leave"), st.integers(0, 50)),
        ),
        max_size=60,
    )
)
def test_whoever_waits_longest_for_it_is_woken_whatever_came_before(moves: list[tuple[str, Any]]) -> None:
    async def play() -> None:
        model = Model()
        for move, what in moves:
            await getattr(model, move)(what)
        while model.asleep:
            await model.leave(0)
        assert not model.waiters.lines

    asyncio.run(play())
