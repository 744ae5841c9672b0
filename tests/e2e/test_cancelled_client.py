"""A client and a worker whose receives are cancelled: the daemon has every task and result for whoever asks next."""

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from covenant import AgentId, Client, Json, Result, Task, Text, Worker
from covenant.model.errors import Conflict
from covenant.model.ids import PublicKey, TaskId
from covenant.worker import WorkerJob
from tests.cli.daemons import Daemon
from tests.places import short_folder
from tests.waits import BOUND_S

T = TypeVar("T")
TASKS = 30


class Site:
    """A daemon with one who sends and one who works, both new to it."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        name = uuid.uuid4().hex[:8]
        sender = daemon.json("identities", "enroll", f"s-{name}@here", "--grant", f"a2a.send.w-{name}@here")
        worker = daemon.json("identities", "enroll", f"w-{name}@here", "--grant", f"a2a.respond.s-{name}@here")
        self.sender, self.sender_token = _agent(sender), str(sender["token_b58"])
        self.worker, self.worker_token = _agent(worker), str(worker["token_b58"])

    async def send(self, count: int) -> list[TaskId]:
        ids = [TaskId(str(uuid.uuid4())) for _ in range(count)]
        async with Client(self.daemon.url, self.sender_token) as client:
            for task_id in ids:
                task = Task(id=task_id, sender=self.sender, recipient=self.worker, intent_text="do this")
                await client.send(task)
        return ids


def _agent(enrolled: dict[str, Any]) -> AgentId:
    return AgentId(enrolled["display"], PublicKey(enrolled["pubkey_b58"]))


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with short_folder() as folder:
        started = Daemon(folder / "home")
        try:
            yield started
        finally:
            started.stop()


@pytest.fixture
def site(daemon: Daemon) -> Site:
    return Site(daemon)


async def received(receive: Callable[[], Coroutine[Any, Any, tuple[T, ...]]], count: int) -> list[T]:
    """So many, by calls of which most are cancelled on their way."""
    chance = random.Random(7)
    found: list[T] = []
    tries = 0
    while len(found) < count:
        tries += 1
        receiving = asyncio.ensure_future(receive())
        await asyncio.sleep(chance.random() * (0.006 if tries < 3 * count else 1.0))
        receiving.cancel()
        await asyncio.wait((receiving,))
        if not receiving.cancelled():
            found += receiving.result()
    return found


async def test_a_client_that_is_cancelled_loses_no_lease_and_no_result(site: Site) -> None:
    ids = await site.send(TASKS)
    async with asyncio.timeout(BOUND_S), Client(site.daemon.url, site.worker_token) as client:
        taken = await received(lambda: client.take(2), TASKS)
        assert sorted(each.task.id for each in taken) == sorted(ids)
        for each in taken:
            await client.settle(Result.ok(each.task.id, "done"), each.lease.lease_id)
    async with asyncio.timeout(BOUND_S), Client(site.daemon.url, site.sender_token) as client:
        results = await received(lambda: client.results(2), TASKS)
        assert sorted(result.task_id for result in results) == sorted(ids)
        (one,) = await site.send(1)
    async with asyncio.timeout(BOUND_S), Client(site.daemon.url, site.worker_token) as client:
        (each,) = await client.take(request_id="mine")
        assert await client.take(request_id="mine") == (each,)
        await client.withdraw("mine")
        assert await client.take(request_id="mine") == ()
        (again,) = await client.take()
        assert again.task.id == one
        with pytest.raises(Conflict):
            await client.renew(one, each.lease.lease_id)


async def test_a_worker_that_is_cancelled_gives_back_what_it_has_not_begun(site: Site) -> None:
    ids = await site.send(TASKS)
    begun: list[TaskId] = []
    chance = random.Random(3)
    tries = 0
    async with asyncio.timeout(BOUND_S):
        while len(begun) < TASKS:
            tries += 1
            worker = Worker(site.daemon.url, site.worker_token, concurrency=2)

            @worker
            async def do(job: WorkerJob) -> str:
                begun.append(job.task.id)
                return "done"

            running = asyncio.create_task(worker.run())
            # After many tries longer, so that a slow machine gets through as well.
            await asyncio.sleep(chance.random() * (0.15 if tries < 3 * TASKS else 2.0))
            running.cancel()
            await asyncio.wait((running,))
    assert sorted(begun) == sorted(ids)


async def test_an_update_that_was_cancelled_does_not_break_the_order_of_the_next(site: Site) -> None:
    await site.send(1)
    said: list[str] = []
    async with asyncio.timeout(BOUND_S):
        worker = Worker(site.daemon.url, site.worker_token)

        @worker
        async def do(job: WorkerJob) -> str:
            for number in range(10):
                saying = asyncio.ensure_future(job.say(f"{number} "))
                await asyncio.sleep(0.0005 * number)
                saying.cancel()
                await asyncio.wait((saying,))
            await job.status("all is said")
            said.append("all")
            worker.stop()
            return "done"

        await worker.run()
    assert said == ["all"]


async def test_a_worker_that_returns_what_cannot_be_kept_ends_its_task_and_goes_on(site: Site) -> None:
    returned: list[Any] = [5, b"bytes", "\ud800", "y" * 4_000_000, Text(5), Json(float("nan")), "done"]  # type: ignore[arg-type]
    ids = await site.send(len(returned))
    worker = Worker(site.daemon.url, site.worker_token)

    @worker
    async def do(job: WorkerJob) -> Any:
        number = ids.index(job.task.id)
        if number == len(returned) - 1:
            worker.stop()
        return returned[number]

    async with asyncio.timeout(BOUND_S), Client(site.daemon.url, site.sender_token) as client:
        await worker.run()
        statuses = [result.status async for result in _results(client, ids)]
    assert statuses == ["error"] * (len(returned) - 1) + ["ok"]


async def _results(client: Client, ids: list[TaskId]) -> AsyncIterator[Result]:
    for task_id in ids:
        result = await client.result(task_id, wait_ms=10_000)
        assert result is not None
        yield result
