"""Receives of the library that are cancelled: every task is received once, every result is drained once.

The ledger is on files and syncs. What was given back is so after a SIGKILL, too.
"""

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from covenant import Mailbox, Result, Task, local_agent
from covenant.ledger.machine.commands import LeasedTask
from covenant.model.errors import Conflict
from covenant.model.ids import TaskId
from tests.waits import BOUND_S

T = TypeVar("T")

ALICE, BOB = local_agent("alice@here"), local_agent("bob@here")
MOMENTS = 400


async def cancelled(receiving: Coroutine[Any, Any, T], wait: Callable[[], Awaitable[None]]) -> T | None:
    task = asyncio.ensure_future(receiving)
    await wait()
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None


def turns(count: int) -> Callable[[], Awaitable[None]]:
    """So many turns of the loop: a receive is cancelled at each of its awaits in turn."""

    async def wait() -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    return wait


async def sent(mailbox: Mailbox, count: int) -> list[TaskId]:
    tasks = [mailbox.new_task(ALICE, BOB, f"task {number}") for number in range(count)]
    await asyncio.gather(*(mailbox.send_task(task) for task in tasks))
    return [task.id for task in tasks]


async def received(mailbox: Mailbox, receive: Callable[[], Coroutine[Any, Any, T]], count: int) -> list[T]:
    """`count` of them, most of the receives being cancelled."""
    found: list[T] = []
    chance = random.Random(count)
    moment = 0
    while len(found) < count:
        moment += 1
        steps = moment % 12 if moment < MOMENTS else 10_000
        wait = turns(steps) if chance.random() < 0.7 else lambda: asyncio.sleep(chance.random() * 0.003)
        one = await cancelled(receive(), wait)
        found += [one] if one is not None else []
    return found


async def test_tasks_and_results_are_received_once_however_often_a_receive_is_cancelled(tmp_path: Path) -> None:
    async with Mailbox.open(tmp_path / "home") as mailbox:
        ids = await sent(mailbox, 60)
        tasks = await received(mailbox, lambda: mailbox.recv_task_for(BOB), 40)
        tasks += [await mailbox.recv_task_for(BOB) for _ in range(20)]
        assert [leased.task.id for leased in tasks] == ids
        for leased in tasks:
            assert not (await mailbox.send_result(Result.ok(leased.task.id, "done"), leased.lease.lease_id)).duplicate
        results = await received(mailbox, mailbox.recv_result, 60)
        assert [result.task_id for result in results] == ids
    async with Mailbox.open(tmp_path / "home") as mailbox:
        assert await mailbox.task_queue(10) == ()
        assert await mailbox.recent_results(10) == ()


@pytest.mark.parametrize("several", [1, 8])
async def test_receivers_side_by_side_that_are_cancelled_lose_nothing(tmp_path: Path, several: int) -> None:
    async with Mailbox.open(tmp_path / "home") as mailbox:
        ids = await sent(mailbox, 80)
        found: list[Task] = []

        async def receiver(seed: int) -> None:
            chance = random.Random(seed)
            while len(found) < len(ids):
                try:
                    found.append(await asyncio.wait_for(mailbox.recv_task(), chance.random() * 0.004))
                except TimeoutError:
                    continue

        await asyncio.wait_for(asyncio.gather(*(receiver(seed) for seed in range(several))), BOUND_S)
        assert sorted(task.id for task in found) == sorted(ids)


@pytest.mark.parametrize("steps", range(8))
async def test_another_receiver_gets_what_a_cancelled_one_gives_back(tmp_path: Path, steps: int) -> None:
    async with Mailbox.open(tmp_path / "home") as mailbox:
        first, second = (asyncio.ensure_future(mailbox.recv_task()) for _ in range(2))
        await turns(2)()
        sending = asyncio.ensure_future(sent(mailbox, 1))
        await turns(steps)()
        first.cancel()
        ids = await sending
        await asyncio.wait((first, second), timeout=BOUND_S, return_when=asyncio.FIRST_COMPLETED)
        if first.cancelled():
            await asyncio.wait((second,), timeout=BOUND_S)
        second.cancel()
        ended = await asyncio.gather(first, second, return_exceptions=True)
        assert [each.id for each in ended if isinstance(each, Task)] == ids


async def test_a_receive_that_gets_nothing_ends_with_its_time(tmp_path: Path) -> None:
    async with Mailbox.open(tmp_path / "home") as mailbox:
        for receive in (mailbox.recv_task, lambda **how: mailbox.recv_task_for(BOB, **how), mailbox.recv_result):
            with pytest.raises(TimeoutError):
                await receive(timeout_s=0.01)
        ids = await sent(mailbox, 1)
        assert (await mailbox.recv_task(timeout_s=BOUND_S)).id == ids[0]


async def test_a_receive_repeated_under_its_request_id_returns_the_same(tmp_path: Path) -> None:
    async with Mailbox.open(tmp_path / "home") as mailbox:
        ids = await sent(mailbox, 3)
        for count in range(6):
            await cancelled(mailbox.recv_task_for(BOB, request_id="mine"), turns(count))
            await cancelled(mailbox.recv_task(request_id="anyones"), turns(count))
        mine: LeasedTask = await mailbox.recv_task_for(BOB, request_id="mine")
        assert await mailbox.recv_task_for(BOB, request_id="mine") == mine
        anyones = await mailbox.recv_task(request_id="anyones")
        assert await mailbox.recv_task(request_id="anyones") == anyones
        assert {mine.task.id, anyones.id} == set(ids[:2])
        await mailbox.send_result(Result.ok(mine.task.id, "done"))
        for count in range(6):
            await cancelled(mailbox.recv_result(request_id="result"), turns(count))
        assert await mailbox.recv_result(request_id="result") == await mailbox.recv_result(request_id="result")
        assert await mailbox.try_recv_result_for(ALICE) is None
        with pytest.raises(Conflict) as over:
            await mailbox.recv_task_for(BOB, request_id="mine")
        assert over.value.code == "request_over"


PROGRAM = """
import asyncio, os, random, signal, sys
from covenant import Mailbox, Result, local_agent

ALICE, BOB = local_agent("alice@here"), local_agent("bob@here")


async def main():
    async with Mailbox.open(sys.argv[1]) as mailbox:
        for number in range(30):
            await mailbox.send_task(mailbox.new_task(ALICE, BOB, f"task {number}"))
        for _ in range(15):
            task = await mailbox.recv_task()
            await mailbox.send_result(Result.ok(task.id, "done"))
        for moment in range(200):
            receiving = asyncio.ensure_future(mailbox.recv_task() if moment % 2 else mailbox.recv_result())
            for _ in range(moment % 7):
                await asyncio.sleep(0)
            receiving.cancel()
            try:
                got = await receiving
            except asyncio.CancelledError:
                continue
            print("task" if moment % 2 else "result", got.id if moment % 2 else got.task_id, flush=True)
        print("end", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


asyncio.run(main())
"""


async def test_what_was_given_back_is_there_after_a_kill(tmp_path: Path) -> None:
    program = [sys.executable, "-c", PROGRAM, str(tmp_path / "home")]
    ended = await asyncio.to_thread(
        subprocess.run, program, capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    told = [line.split() for line in ended.stdout.splitlines()]
    assert told[-1] == ["end"]
    tasks = [line[1] for line in told if line[0] == "task"]
    results = [line[1] for line in told if line[0] == "result"]
    async with Mailbox.open(tmp_path / "home") as mailbox:
        while (left := await mailbox.try_recv_task_for(BOB)) is not None:
            tasks.append(left.id)
        while (result := await mailbox.try_recv_result_for(ALICE)) is not None:
            results.append(result.task_id)
    assert (len(tasks), len(set(tasks))) == (15, 15)
    assert (len(results), len(set(results))) == (15, 15)
