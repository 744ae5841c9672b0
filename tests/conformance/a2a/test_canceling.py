"""CancelTask: one winner, whoever else was about to end the task, and everybody hears of it."""

import asyncio

import pytest

from covenant.model.task_event import Ended
from tests.conformance.a2a.bindings import Binding, Refused, words
from tests.conformance.a2a.http_bindings import Rest
from tests.conformance.a2a.server_under_test import ServerUnderTest, unique
from tests.conformance.a2a.spoken import BINDINGS
from tests.waits import BOUND_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_running_task_is_canceled_and_its_blocked_sender_gets_the_canceled_task(
    me: Binding, under_test: ServerUnderTest
) -> None:
    context, gate = unique(), unique()
    async with asyncio.timeout(BOUND_S):
        blocked = asyncio.create_task(me.task(words(f"gate {gate}", context=context)))
        await under_test.gates.reached(gate)
        (running,) = (await me.page(contextId=context)).tasks
        async with me.subscribe(running.id, after=1) as frames:
            canceled = await me.cancel(running.id)
            assert canceled.state == "canceled"
            assert [frame.state async for frame in frames][-1] == "canceled"
        got = await blocked
    assert (got.id, got.state) == (running.id, "canceled")
    assert (await me.get(running.id)).state == "canceled"


@pytest.mark.parametrize("verb", ["echo", "refuse", "raise"])
async def test_what_has_ended_cannot_be_canceled_and_the_refusal_says_how_it_ended(me: Binding, verb: str) -> None:
    done = await me.task(verb)
    with pytest.raises(Refused, match="TASK_NOT_CANCELABLE") as refused:
        await me.cancel(done.id)
    assert done.state in refused.value.message
    assert (await me.get(done.id)) == done


@pytest.mark.parametrize("body", [b"", b" ", b"null", b"{}"])
async def test_a_body_that_says_nothing_is_no_body(me: Binding, body: bytes) -> None:
    assert isinstance(me, Rest)
    parked = await me.task("ask")
    headers = {"authorization": f"Bearer {me.token}", "content-type": "application/json"}
    reply = await me.http.post(f"{me.url}/tasks/{parked.id}:cancel", content=body, headers=headers)
    assert reply.status_code == 200
    assert (await me.get(parked.id)).state == "canceled"


async def test_canceling_twice_is_refused_the_second_time_and_changes_nothing(me: Binding) -> None:
    parked = await me.task("ask")
    canceled = await me.cancel(parked.id)
    assert canceled.state == "canceled"
    with pytest.raises(Refused, match="TASK_NOT_CANCELABLE"):
        await me.cancel(parked.id)
    assert await me.get(parked.id) == canceled


async def test_a_task_that_waits_in_the_queue_can_be_canceled(me: Binding, under_test: ServerUnderTest) -> None:
    busy, gate = me.with_(agent="busy"), unique()
    first = await busy.task(f"gate {gate}", blocking=False)
    await under_test.gates.reached(gate)
    waiting = await busy.task("echo", blocking=False)
    assert waiting.state == "submitted"
    assert (await busy.cancel(waiting.id)).state == "canceled"
    under_test.gates.open(gate)
    assert (await busy.followed(first.id, after=1))[-1].state == "completed"


async def test_what_an_agent_says_after_it_was_canceled_is_not_heard(me: Binding, under_test: ServerUnderTest) -> None:
    gate = unique()
    task = await me.task(f"linger {gate}", blocking=False)
    await under_test.gates.reached(gate)
    canceled = await me.cancel(task.id)
    under_test.gates.open(gate)
    await me.task("echo")
    assert await me.get(task.id) == canceled
    assert "too late" not in repr(canceled)


async def race(under_test: ServerUnderTest, me: Binding, number: int) -> str:
    """Cancel a task at the moment it completes: how it ended, in the words of everybody who was told."""
    gate, context = unique(), unique()
    blocked = asyncio.create_task(me.task(words(f"gate {gate}", context=context)))
    await under_test.gates.reached(gate)
    (running,) = (await me.page(contextId=context)).tasks

    async def cancel() -> str:
        try:
            return (await me.cancel(running.id)).state
        except Refused as refused:
            return refused.name + refused.message.rpartition(" ")[2]

    canceling = asyncio.create_task(cancel())
    # Sooner or later in the life of the request, by turns: so that either may win.
    for _ in range(number % 40):
        await asyncio.sleep(0)
    under_test.gates.open(gate)
    said, got = await asyncio.gather(canceling, blocked)
    steps = await under_test.steps(running.id)
    (end,) = [step.what for step in steps if isinstance(step.what, Ended)]
    assert end is steps[-1].what
    ended = end.ending.value
    assert said == (ended if ended == "canceled" else f"TASK_NOT_CANCELABLE{ended}")
    assert got.state == ended == (await me.get(running.id)).state
    return ended


async def test_cancel_and_completion_race_to_one_end_that_both_callers_see(under_test: ServerUnderTest) -> None:
    # Who wins is up to the machine; over a thousand of them, both do.
    assert await races(under_test, 60) <= {"canceled", "completed"}


@pytest.mark.slow
async def test_a_thousand_races_have_one_end_each(under_test: ServerUnderTest) -> None:
    assert await races(under_test, 1_000) == {"canceled", "completed"}


async def races(under_test: ServerUnderTest, count: int) -> set[str]:
    clients = [under_test.client(kind) for kind in BINDINGS.values()]
    ends: set[str] = set()
    async with asyncio.timeout(BOUND_S * max(1, count / 50)):
        for at in range(0, count, 10):
            ends |= set(
                await asyncio.gather(
                    *(race(under_test, clients[number % len(clients)], number) for number in range(at, at + 10))
                )
            )
    return ends
