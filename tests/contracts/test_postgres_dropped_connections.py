"""Connections that are dropped at each moment at which their user waits, or is about to go on: nothing fails by it."""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncIterator, Coroutine, Generator, Iterable
from typing import Any, Final

import asyncpg
import pytest

from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.postgres_engine import PostgresEngine
from tests.ledger_contract.postgres_server import Databases
from tests.ledger_contract.samples import make_task, task_id
from tests.waits import BOUND_S, eventually

MOMENTS_MAX: Final = 1_000
BEATS: Final = 40


class Dropper:
    """Drops all connections of a ledger at chosen moments of one of its tasks."""

    def __init__(self, task_name: str) -> None:
        self.task_name = task_name
        self.connections: Iterable[asyncpg.Connection[Any]] = ()
        self._passed = 0
        self._chosen: set[int] = set()
        self.is_over = asyncio.Event()
        """Nothing more will be dropped."""

    def choose(self, *moments: int) -> None:
        """Counts from now on."""
        self._passed, self._chosen = 0, set(moments)
        self.is_over.clear()

    def pass_moment(self) -> None:
        self._passed += 1
        if self._passed in self._chosen:
            self._chosen.remove(self._passed)
            self.drop()
            if not self._chosen:
                self.is_over.set()

    def drop(self) -> None:
        for connection in tuple(self.connections):
            connection.terminate()

    def make_task(self, loop: asyncio.AbstractEventLoop, doing: Any, **named: Any) -> asyncio.Task[Any]:
        if doing.__qualname__ == self.task_name:
            doing = self._follow(doing)
        return asyncio.Task(doing, loop=loop, **named)

    async def _follow(self, doing: Coroutine[Any, Any, Any]) -> Any:
        return await _followed(doing, self)


@types.coroutine
def _followed(doing: Coroutine[Any, Any, Any], dropper: Dropper) -> Generator[Any, None, Any]:
    """Two moments a wait: when it begins, and when it is over and the task is about to go on."""
    error: BaseException | None = None
    while True:
        try:
            awaited = doing.send(None) if error is None else doing.throw(error)
        except StopIteration as over:
            return over.value
        dropper.pass_moment()
        try:
            yield awaited
            error = None
        except BaseException as thrown:  # noqa: BLE001  (it belongs to the task)
            error = thrown
        dropper.pass_moment()


@pytest.fixture
async def engine(databases: Databases) -> AsyncIterator[PostgresEngine]:
    url = await databases.borrow()
    # The heartbeat's connection is dropped all the time, too: on a busy machine it may be silent for long.
    engine = PostgresEngine(url, lease_ms=60_000)
    yield engine
    asyncio.get_running_loop().set_task_factory(None)
    await engine.close()
    await databases.give_back(url)


async def open_followed(engine: PostgresEngine, dropper: Dropper) -> PostgresLedger:
    asyncio.get_running_loop().set_task_factory(dropper.make_task)
    ledger = await engine.join("a")
    dropper.connections = ledger._connections._open_connections
    return ledger


def defects(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.name.partition(".")[0] == "covenant"]
    return [str(record.exc_info) for record in records if record.exc_info or record.levelname == "ERROR"]


@pytest.mark.parametrize("again_after", [None, 3, 8])
async def test_a_writer_whose_connection_is_dropped_finds_out_and_writes_once(
    engine: PostgresEngine, caplog: pytest.LogCaptureFixture, again_after: int | None
) -> None:
    dropper = Dropper("BatchWriter._run")
    driver = LedgerDriver(await open_followed(engine, dropper), engine.clock)
    for number in range(1, MOMENTS_MAX):
        dropper.drop()  # a new connection has no statement prepared
        dropper.choose(number, *(() if again_after is None else (number + again_after,)))
        await driver.send(make_task(number))  # a batch that one statement writes
        await driver.send(make_task(number))  # one that is decided in a transaction, as its task is there already
        (leased,) = await driver.take()
        assert leased.task.id == task_id(number)
        if not dropper.is_over.is_set():
            break
    assert 30 < number < MOMENTS_MAX - 1, "the moments of three batches"
    dropper.choose()
    assert not await driver.take()
    assert defects(caplog) == []
    assert (await driver.ledger.audit_verify()).valid


async def test_a_heartbeat_whose_connection_is_dropped_goes_on_with_another(
    engine: PostgresEngine, caplog: pytest.LogCaptureFixture
) -> None:
    dropper = Dropper("Membership._run")
    ledger = await open_followed(engine, dropper)
    membership = ledger._membership
    for number in range(1, BEATS):
        dropper.choose(number)
        membership.beat_now()
        await asyncio.wait_for(dropper.is_over.wait(), BOUND_S)
        dropped_s = asyncio.get_running_loop().time()

        async def is_heard_again(dropped_s: float = dropped_s) -> bool:
            return membership._fresh_s > dropped_s

        await eventually(is_heard_again)
    assert defects(caplog) == []
    assert membership.trouble is None
