"""One timer for all that lasts, and what is done about a caller who has gone."""

import asyncio
import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest

from covenant.doors.a2a.disconnect import Disconnect
from covenant.doors.a2a.late_timer import LateTimer

AFTER_S = 0.1
BOUND_S = 20.0


class Work:
    def __init__(self) -> None:
        self.noticed = asyncio.Event()
        self.times = 0

    def late(self) -> None:
        self.times += 1
        self.noticed.set()


async def test_what_lasts_is_noticed_once_and_what_has_ended_is_not() -> None:
    noticing, loop = LateTimer(AFTER_S), asyncio.get_running_loop()
    short, long, later = Work(), Work(), Work()
    began_s = loop.time()
    for work in (short, long):
        noticing.begin(work, loop)
    await asyncio.sleep(AFTER_S / 2)
    noticing.begin(later, loop)
    noticing.end(short)
    async with asyncio.timeout(BOUND_S):
        await long.noticed.wait()
        assert loop.time() - began_s >= AFTER_S * 0.95
        await later.noticed.wait()
    assert loop.time() - began_s >= AFTER_S * 1.45
    await asyncio.sleep(AFTER_S * 2)
    assert (short.times, long.times, later.times) == (0, 1, 1)
    noticing.end(long)


async def test_there_is_one_timer_and_none_where_nothing_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    noticing, loop = LateTimer(AFTER_S), asyncio.get_running_loop()
    set_for: list[float] = []
    call_later = loop.call_later

    def counted(delay: float, call: Any, *rest: Any) -> asyncio.TimerHandle:
        if call == noticing._look:
            set_for.append(delay)
        return call_later(delay, call, *rest)

    monkeypatch.setattr(loop, "call_later", counted)
    works = [Work() for _ in range(100)]
    for begun in range(100):
        noticing.begin(works[begun], loop)
        noticing.end(works[begun])
    assert set_for == [AFTER_S]
    await asyncio.sleep(AFTER_S * 1.5)
    assert set_for == [AFTER_S], "nothing was left to look at"
    kept = [weakref.ref(work) for work in works]
    del works[:]
    gc.collect()
    assert not any(ref() for ref in kept)


def test_another_loop_begins_anew() -> None:
    noticing = LateTimer(AFTER_S)

    async def leave_behind() -> Work:
        work = Work()
        noticing.begin(work, asyncio.get_running_loop())
        return work

    async def wait() -> Work:
        work = Work()
        noticing.begin(work, asyncio.get_running_loop())
        async with asyncio.timeout(BOUND_S):
            await work.noticed.wait()
        return work

    left = asyncio.run(leave_behind())
    assert asyncio.run(wait()).times == 1
    assert left.times == 0


async def _gone() -> dict[str, Any]:
    return {"type": "http.disconnect"}


@pytest.mark.parametrize("noticing", [None, LateTimer(AFTER_S)], ids=["at once", "after a while"])
async def test_a_caller_who_has_gone_ends_what_is_done_for_it_alone(noticing: LateTimer | None) -> None:
    async with asyncio.timeout(BOUND_S):
        with Disconnect(_gone, noticing=noticing) as departure:
            await asyncio.Event().wait()
    assert departure.gone
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_nobody_listens_for_a_caller_who_is_answered_soon() -> None:
    received: list[str] = []

    async def receive() -> dict[str, Any]:
        received.append("asked")
        return await _gone()

    noticing = LateTimer(AFTER_S)
    with Disconnect(receive, noticing=noticing, session=lambda _: nullcontext()) as departure:
        await asyncio.sleep(0)
    with Disconnect(receive):
        pass
    await asyncio.sleep(AFTER_S * 2)
    assert not departure.gone
    assert received == []
