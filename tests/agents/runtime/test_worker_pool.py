"""The workers: who may start, who is stopped, and what a stop or a crash leaves behind."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from covenant import Turn
from covenant.agents import remote_agent
from covenant.agents.runtime.job import Job
from covenant.agents.runtime.lost_work import ATTEMPTS_MAX, STOPPED
from covenant.agents.runtime.worker_pool import WorkerPool
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.tasks import QueueQuery
from covenant.ledger.machine.commands import Accept, Repair, Sweep
from covenant.model.agent_definition import OnLost
from covenant.model.content import Text
from covenant.model.ids import TaskId
from covenant.model.retry_policy import ForceError, Posture, Requeue
from covenant.model.task import fingerprint
from covenant.model.task_event import StatusUpdate
from covenant.model.task_view import TaskState
from tests.agents.pool_under_test import (
    PoolUnderTest,
    a_ledger,
    chunks,
    cut_short,
    endings,
    function_agent,
    open_pool,
    told,
)
from tests.ledger_contract.samples import ALICE, BOB, CAROL, OPERATOR, make_task
from tests.waits import BOUND_S, eventually


class Actor:
    """An agent whose turns the test holds in its hands."""

    def __init__(self) -> None:
        self.attempts: list[tuple[str, int]] = []
        self.started = asyncio.Semaphore(0)
        self.go_on = asyncio.Event()
        self.stopped = 0

    async def play(self, turn: Turn) -> AsyncIterator[str]:
        self.attempts.append((turn.text, turn.attempt))
        yield f"attempt {turn.attempt}"
        self.started.release()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        yield ", done"

    async def begun(self) -> None:
        async with asyncio.timeout(BOUND_S):
            await self.started.acquire()


async def test_a_canceled_task_stops_its_agent(pool: PoolUnderTest) -> None:
    actor = Actor()
    pool.serve(actor.play)
    task_id = await pool.send()
    await actor.begun()
    assert (await pool.cancel(task_id)).canceled
    await pool.idle()
    assert actor.stopped == 1
    view = await pool.ended(task_id)
    assert view.state is TaskState.CANCELED
    assert len(endings(await pool.steps(task_id))) == 1


async def test_the_lease_is_renewed_while_an_agent_waits_for_a_call(
    pool: PoolUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_agent, "RENEW_S", 0.001)

    class Caller:
        async def run(self, job: Job) -> None:
            async def renewed() -> bool:
                entry = await pool.ledger.entry(job.task.id)
                return entry is not None and entry.lease is not None and entry.lease.renewed_at_ms > 0

            renewing = asyncio.ensure_future(remote_agent.renew_lease(job))
            await eventually(renewed)
            renewing.cancel()

    pool.serve(Caller())
    view = await pool.ask()
    assert view.state is TaskState.COMPLETED


async def test_cancel_and_completion_race_to_one_winner_whom_both_see(pool: PoolUnderTest) -> None:
    async def brief(turn: Turn) -> AsyncIterator[str]:
        yield "a"
        for _ in range(int(turn.text)):
            await asyncio.sleep(0)
        yield "b"

    pool.serve(brief)
    outcomes = set()
    for round_no in range(500):
        task_id = await pool.send(str(round_no % 8))
        for _ in range(round_no % 5):
            await asyncio.sleep(0)
        canceled = await pool.cancel(task_id)
        steps = await pool.steps(task_id)
        (end,) = endings(steps)
        assert end.ending is canceled.ending
        assert end is steps[-1].what
        assert [step.generation for step in steps] == [*range(1, len(steps) + 1)]
        outcomes.add(end.ending)
    await pool.idle()
    assert len(outcomes) == 2, "one of them always won: the race was not run"


async def test_an_agent_that_ignores_cancellation_is_abandoned_and_not_heard(
    pool: PoolUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    release, heard = asyncio.Event(), asyncio.Event()

    async def stubborn(turn: Turn) -> AsyncIterator[str]:
        if turn.text != "be stubborn":
            yield "fine"
            return
        yield "hm "
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        heard.set()
        yield "too late"

    pool.serve(stubborn, concurrency=1)
    task_id = await pool.send("be stubborn")
    await pool.until(task_id, lambda view: bool(view.artifacts))
    await pool.cancel(task_id)
    await pool.idle()
    assert [r.task_id for r in caplog.records if r.message == "agent.abandoned"] == [task_id]  # type: ignore[attr-defined]
    # Its place is free again, though it is not gone.
    assert told(await pool.ask("work")) == "fine"
    release.set()
    await asyncio.wait_for(heard.wait(), BOUND_S)
    assert told(await pool.ask("work")) == "fine"
    assert "too late" not in str(await pool.steps(task_id))
    assert pool.workers.reserve(BOB.pubkey) is not None
    assert pool.workers.reserve(BOB.pubkey) is None


async def test_a_task_past_its_timeout_stops_its_agent(pool: PoolUnderTest) -> None:
    actor = Actor()
    pool.serve(actor.play)
    task_id = await pool.send(timeout_ms=1)
    await actor.begun()
    swept: tuple[Any, ...] = ()
    async with asyncio.timeout(BOUND_S):
        while not swept:
            swept = (await pool.ledger.commit(Sweep())).timed_out
    await pool.idle()
    view = await pool.ended(task_id)
    assert (view.state, told(view), actor.stopped) == (TaskState.FAILED, "Task timed out", 1)


async def test_an_agents_own_timeout_is_for_tasks_that_have_none(pool: PoolUnderTest) -> None:
    actor = Actor()
    pool.serve(actor.play, timeout_ms=200)
    view = await pool.ask()
    assert (view.state, told(view)) == (TaskState.FAILED, "Task timed out")
    await pool.idle()
    assert actor.stopped == 1
    await actor.begun()
    task_id = await pool.send(timeout_ms=3_600_000)
    await actor.begun()
    # Another one, begun later and without a timeout of its own, is over first.
    assert told(await pool.ask()) == "Task timed out"
    assert pool.workers.jobs == 1
    actor.go_on.set()
    assert (await pool.ended(task_id)).state is TaskState.COMPLETED


async def test_queued_tasks_are_taken_as_places_become_free(pool: PoolUnderTest) -> None:
    running = most = 0
    full = asyncio.Event()

    async def busy(turn: Turn) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            full.set()
        await asyncio.wait_for(full.wait(), BOUND_S)
        await asyncio.sleep(0)
        running -= 1
        return turn.text

    pool.serve(busy, concurrency=3)
    task_ids = [await pool.send(f"{n}", at_once=False) for n in range(20)]
    for n, task_id in enumerate(task_ids):
        assert told(await pool.ended(task_id)) == str(n)
    assert most == 3


async def test_without_a_free_place_nobody_is_reserved_and_the_task_waits_queued(pool: PoolUnderTest) -> None:
    actor = Actor()
    pool.serve(actor.play, concurrency=1)
    first = await pool.send("first")
    await actor.begun()
    assert pool.workers.reserve(BOB.pubkey) is None
    assert pool.workers.reserve(CAROL.pubkey) is None
    second = await pool.send("second")
    (waiting,) = (await pool.ledger.queue(QueueQuery(state_filter="queued"))).tasks
    assert waiting.task.id == second
    actor.go_on.set()
    for task_id in (first, second):
        assert (await pool.ended(task_id)).state is TaskState.COMPLETED
    assert [text for text, _ in actor.attempts] == ["first", "second"]


async def test_a_place_that_is_given_back_can_be_reserved_again(pool: PoolUnderTest) -> None:
    pool.serve(Actor().play, concurrency=1)
    for _ in range(3):
        place = pool.workers.reserve(BOB.pubkey)
        assert place is not None
        assert pool.workers.reserve(BOB.pubkey) is None
        place.give_back()


async def test_an_agent_that_is_replaced_finishes_and_its_successor_goes_on(pool: PoolUnderTest) -> None:
    actor = Actor()
    pool.serve(actor.play, concurrency=1)
    first = await pool.send()
    await actor.begun()

    async def successor(turn: Turn) -> str:
        return "new"

    pool.serve(successor, concurrency=1)
    second = await pool.send(at_once=False)
    assert pool.workers.reserve(BOB.pubkey) is None
    actor.go_on.set()
    assert told(await pool.ended(first)) == "attempt 1, done"
    assert told(await pool.ended(second)) == "new"


async def test_a_dismissed_agent_takes_nothing_more(pool: PoolUnderTest) -> None:
    actor = Actor()
    actor.go_on.set()
    pool.serve(actor.play)
    await pool.ask()
    pool.workers.unregister(BOB)
    assert pool.workers.reserve(BOB.pubkey) is None
    await pool.send()
    assert (await pool.ledger.counts()).queued == 1


async def test_a_stop_lets_what_is_under_way_finish_and_takes_nothing_new(ledger: Ledger) -> None:
    actor, workers = Actor(), WorkerPool(ledger)
    pool = PoolUnderTest(ledger, workers)
    pool.serve(actor.play)
    running = asyncio.create_task(workers.run())
    await asyncio.sleep(0)
    first = await pool.send()
    await actor.begun()
    workers.stop()
    assert workers.reserve(BOB.pubkey) is None
    await pool.send("later", at_once=False)
    actor.go_on.set()
    await asyncio.wait_for(running, BOUND_S)
    assert (await pool.ended(first)).state is TaskState.COMPLETED
    counts = await ledger.counts()
    assert (counts.queued, counts.leased) == (1, 0)


async def test_a_stop_does_not_wait_for_who_only_follows_work_elsewhere_once_nobody_else_is_at_work(
    ledger: Ledger,
) -> None:
    follower, actor, workers = Actor(), Actor(), WorkerPool(ledger)
    pool = PoolUnderTest(ledger, workers)
    pool.serve(follower.play, idempotent=True, on_lost="requeue", follows=True)
    workers.register(CAROL, function_agent(actor.play))
    running = asyncio.create_task(workers.run())
    await asyncio.sleep(0)
    followed = await pool.send()
    task = make_task(1, recipient=CAROL)
    await ledger.commit(Accept(task=task, digest=fingerprint(task)[0]))
    await follower.begun()
    await actor.begun()
    workers.stop()
    # Whoever works here may wait for what the other one hears.
    ended, _ = await asyncio.wait((running,), timeout=0.05)
    assert (len(ended), follower.stopped) == (0, 0)
    actor.go_on.set()
    await asyncio.wait_for(running, BOUND_S)
    assert (follower.stopped, actor.stopped) == (1, 0)
    (entry,) = (await ledger.queue(QueueQuery())).tasks
    assert (entry.task.id, entry.state, entry.holder_lost) == (followed, "queued", False)
    assert endings(await pool.steps(followed)) == []


async def test_a_task_that_was_leased_while_the_crew_stopped_goes_back_to_the_queue(ledger: Ledger) -> None:
    actor, workers = Actor(), WorkerPool(ledger)
    pool = PoolUnderTest(ledger, workers)
    pool.serve(actor.play)
    running = asyncio.create_task(workers.run())
    await asyncio.sleep(0)
    place = workers.reserve(BOB.pubkey)
    assert place is not None
    task = make_task(1)
    accepted = await ledger.commit(Accept(task=task, digest=fingerprint(task)[0], starter=place.starter))
    assert accepted.leased is not None
    workers.stop()
    place.start(accepted.leased)
    await asyncio.wait_for(running, BOUND_S)
    (entry,) = (await ledger.queue(QueueQuery())).tasks
    assert (entry.state, actor.attempts) == ("queued", [])


async def test_a_lease_that_two_requests_have_found_is_begun_once(pool: PoolUnderTest) -> None:
    actor = Actor()
    pool.serve(actor.play, concurrency=2)
    first, second = pool.workers.reserve(BOB.pubkey), pool.workers.reserve(BOB.pubkey)
    assert first is not None
    assert second is not None
    task = make_task(1)
    accepted = await pool.ledger.commit(Accept(task=task, digest=fingerprint(task)[0], starter=first.starter))
    assert accepted.leased is not None
    first.start(accepted.leased)
    await actor.begun()
    second.start(accepted.leased)
    actor.go_on.set()
    assert (await pool.ended(task.id)).state is TaskState.COMPLETED
    assert (len(actor.attempts), actor.stopped) == (1, 0)
    await pool.idle()
    assert all(pool.workers.reserve(BOB.pubkey) is not None for _ in range(2)), "the second place is free again"


@pytest.mark.parametrize("idempotent", [True, False], ids=["idempotent", "unsafe"])
async def test_work_cut_short_by_a_stop_is_released_or_marked_and_never_failed(
    ledger: Ledger, idempotent: bool
) -> None:
    actor, workers = Actor(), WorkerPool(ledger)
    pool = PoolUnderTest(ledger, workers)
    pool.serve(actor.play, idempotent=idempotent)
    running = asyncio.create_task(workers.run())
    await asyncio.sleep(0)
    task_id = await pool.send()
    await actor.begun()
    await cut_short(workers, running)
    assert actor.stopped == 1
    (entry,) = (await ledger.queue(QueueQuery())).tasks
    assert (entry.state, entry.holder_lost) == (("queued", False) if idempotent else ("in_flight", True))
    # What it had said by then was kept.
    assert [chunk.parts for chunk in chunks(await pool.steps(task_id))] == [(Text("attempt 1"),)]
    assert endings(await pool.steps(task_id)) == []


async def test_the_later_turns_of_a_task_leave_no_callback_in_the_ledger(
    pool: PoolUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[object] = []
    monkeypatch.setattr(pool.ledger, "on_erased", left.append)

    async def asks(turn: Turn) -> AsyncIterator[Any]:
        yield turn.need_input("more?") if turn.text == "go" else "done"

    pool.serve(asks)
    task_id = await pool.send()
    await pool.parked(task_id)
    await pool.say(task_id, "more")
    await pool.ended(task_id)
    assert left == []


async def test_a_stop_ends_an_endless_cleanup_and_keeps_what_the_agent_had_decided(ledger: Ledger) -> None:
    cleaning = asyncio.Event()

    async def decides(turn: Turn) -> AsyncIterator[Any]:
        try:
            yield turn.reject("not my work")
        finally:
            cleaning.set()
            await asyncio.Event().wait()

    async with open_pool(ledger) as pool:
        pool.serve(decides)
        task_id = await pool.send()
        await asyncio.wait_for(cleaning.wait(), BOUND_S)
        await pool.cut_short()
        view = (await pool.views.past(task_id)).view()
        assert view is not None
        assert (view.state, told(view)) == (TaskState.REJECTED, "not my work")


async def test_an_agent_that_does_not_stop_with_the_daemon_is_not_begun_again_beside_itself(
    ledger: Ledger,
) -> None:
    release = asyncio.Event()

    async def stubborn(turn: Turn) -> AsyncIterator[str]:
        yield "x"
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    workers = WorkerPool(ledger, stop_s=0.05)
    pool = PoolUnderTest(ledger, workers)
    pool.serve(stubborn, idempotent=True)
    running = asyncio.create_task(workers.run())
    await asyncio.sleep(0)
    task_id = await pool.send()
    await pool.until(task_id, lambda view: bool(view.artifacts))
    await cut_short(workers, running)
    (entry,) = (await ledger.queue(QueueQuery())).tasks
    assert (entry.state, entry.holder_lost) == ("in_flight", True)
    release.set()
    await pool.idle()


async def crash(home: Path, actor: Actor) -> TaskId:
    """A daemon dies with a lease in its hands: nothing is written, nothing is released."""
    async with a_ledger(home, boot="first") as ledger:
        workers = WorkerPool(ledger)
        pool = PoolUnderTest(ledger, workers)
        pool.serve(actor.play)
        running = asyncio.create_task(workers.run())
        await asyncio.sleep(0)
        task_id = await pool.send()
        await actor.begun()
        await pool.until(task_id, lambda view: bool(view.artifacts))
        await ledger.close()
        await cut_short(workers, running)
        return task_id


async def test_a_crash_leaves_the_lease_in_flight_and_a_requeue_is_the_next_attempt(tmp_path: Path) -> None:
    actor = Actor()
    task_id = await crash(tmp_path, actor)
    actor.go_on.set()
    async with (
        a_ledger(tmp_path, boot="second") as ledger,
        open_pool(ledger, setting=lambda pool: pool.serve(actor.play)) as pool,
    ):
        (entry,) = (await ledger.queue(QueueQuery())).tasks
        assert (entry.state, entry.holder_lost, entry.attempt) == ("in_flight", True, 1)
        command = Requeue(Posture.OPERATOR_ACCEPTED)
        await ledger.commit(Repair(task_id=task_id, by=OPERATOR, command=command, reason="looked at it"))
        view = await pool.ended(task_id)
        assert (view.state, told(view)) == (TaskState.COMPLETED, "attempt 2, done")
        # The second attempt's text stands in place of the first one's.
        assert view.artifacts[0].parts == (Text("attempt 2, done"),)
    assert [attempt for _, attempt in actor.attempts] == [1, 2]


@pytest.mark.parametrize(
    ("on_lost", "state", "attempts"),
    [("hold", TaskState.WORKING, 1), ("fail", TaskState.FAILED, 1), ("requeue", TaskState.COMPLETED, 2)],
)
async def test_lost_work_is_held_failed_or_requeued_as_its_agent_says(
    tmp_path: Path, on_lost: str, state: TaskState, attempts: int
) -> None:
    actor = Actor()
    task_id = await crash(tmp_path, actor)
    actor.go_on.set()

    def setting(pool: PoolUnderTest) -> None:
        pool.serve(actor.play, on_lost=on_lost, idempotent=on_lost == "requeue")

    async with a_ledger(tmp_path, boot="second") as ledger, open_pool(ledger, setting=setting) as pool:
        assert (await pool.until(task_id, lambda view: view.state is state)).state is state
        assert (await ledger.counts()).holders_lost == (1 if on_lost == "hold" else 0)
    assert len(actor.attempts) == attempts


async def test_who_watches_held_work_is_told_once_by_when_an_operator_decides(tmp_path: Path) -> None:
    actor = Actor()
    task_id = await crash(tmp_path, actor)
    for boot in ("second", "third"):
        async with (
            a_ledger(tmp_path, boot=boot) as ledger,
            open_pool(ledger, setting=lambda pool: pool.serve(actor.play)) as pool,
        ):
            view = await pool.until(task_id, lambda view: view.message is not None)
            assert (view.state, view.message is not None) == (TaskState.WORKING, True)
            (said,) = [step.what for step in await pool.steps(task_id) if isinstance(step.what, StatusUpdate)]
            assert said.text.startswith(f"interrupted: {STOPPED}; an operator decides by ")
            assert said.metadata == {"covenant.holder_lost": "worker lost, awaiting repair"}
    assert len(actor.attempts) == 1


async def test_work_of_an_agent_that_nobody_serves_any_more_is_held_too(tmp_path: Path) -> None:
    task_id = await crash(tmp_path, Actor())
    async with a_ledger(tmp_path, boot="second") as ledger, open_pool(ledger) as pool:
        view = await pool.until(task_id, lambda view: view.message is not None)
        assert view.state is TaskState.WORKING


async def test_an_agent_that_comes_late_decides_about_work_that_was_held(tmp_path: Path) -> None:
    task_id = await crash(tmp_path, Actor())
    async with a_ledger(tmp_path, boot="second") as ledger, open_pool(ledger) as pool:
        await pool.until(task_id, lambda view: view.message is not None)
        pool.serve(Actor().play, on_lost="fail")
        assert (await pool.ended(task_id)).state is TaskState.FAILED


@pytest.mark.parametrize(
    ("on_lost", "outlook"),
    [("hold", "an operator decides by "), ("fail", "the task fails when the daemon starts again")],
)
async def test_work_cut_short_by_a_stop_says_what_becomes_of_it(ledger: Ledger, on_lost: OnLost, outlook: str) -> None:
    actor, workers = Actor(), WorkerPool(ledger)
    pool = PoolUnderTest(ledger, workers)
    pool.serve(actor.play, on_lost=on_lost)
    running = asyncio.create_task(workers.run())
    await asyncio.sleep(0)
    task_id = await pool.send()
    await actor.begun()
    await cut_short(workers, running)
    (said,) = [step.what for step in await pool.steps(task_id) if isinstance(step.what, StatusUpdate)]
    assert said.text.startswith(f"interrupted: {STOPPED}; {outlook}")


@pytest.mark.parametrize(("attempts", "most"), [(1, ATTEMPTS_MAX), (ATTEMPTS_MAX, ATTEMPTS_MAX), (5, 5)])
async def test_work_that_is_lost_again_and_again_is_left_to_the_operator(
    tmp_path: Path, attempts: int, most: int
) -> None:
    async def never(turn: Turn) -> AsyncIterator[str]:
        yield f"{turn.attempt}"
        await asyncio.Event().wait()

    task_id: Any = None
    for boot in range(most + 1):
        async with a_ledger(tmp_path, boot=f"boot {boot}") as ledger:
            workers = WorkerPool(ledger)
            pool = PoolUnderTest(ledger, workers)
            pool.serve(function_agent(never, attempts=attempts), idempotent=True, on_lost="requeue")
            running = asyncio.create_task(workers.run())
            await asyncio.sleep(0)
            task_id = task_id or await pool.send()
            attempt = min(boot + 1, most)
            await pool.until(task_id, lambda view: view.artifacts and view.artifacts[0].parts == (Text(str(attempt)),))  # type: ignore[arg-type, return-value]  # noqa: B023
            if boot == most:
                (entry,) = (await ledger.queue(QueueQuery())).tasks
                assert (entry.attempt, entry.holder_lost) == (most, True)
            await ledger.close()
            await cut_short(workers, running)


async def test_a_repair_under_a_running_agent_stops_it_and_its_words_are_dropped(pool: PoolUnderTest) -> None:
    actor = Actor()
    pool.serve(actor.play)
    task_id = await pool.send()
    await actor.begun()
    await pool.until(task_id, lambda view: bool(view.artifacts))
    command = ForceError("enough of it")
    await pool.ledger.commit(Repair(task_id=task_id, by=OPERATOR, command=command, reason="stuck"))
    await pool.idle()
    view = await pool.ended(task_id)
    assert (view.state, told(view), actor.stopped) == (TaskState.FAILED, "enough of it", 1)


async def test_a_requeue_under_a_running_agent_stops_it_and_begins_the_next_attempt(pool: PoolUnderTest) -> None:
    actor = Actor()
    pool.serve(actor.play)
    task_id = await pool.send()
    await actor.begun()
    command = Requeue(Posture.OPERATOR_ACCEPTED)
    await pool.ledger.commit(Repair(task_id=task_id, by=OPERATOR, command=command, reason="stuck"))
    await actor.begun()
    actor.go_on.set()
    assert told(await pool.ended(task_id)) == "attempt 2, done"
    await pool.idle()
    assert (actor.stopped, [attempt for _, attempt in actor.attempts]) == (1, [1, 2])


async def test_a_mailbox_sender_gets_the_whole_text_as_its_result(pool: PoolUnderTest) -> None:
    actor = Actor()
    actor.go_on.set()
    pool.serve(actor.play)
    task_id = await pool.send(origin="mailbox", at_once=False)
    await pool.ended(task_id)
    (result,) = await pool.ledger.recent_results(ALICE.pubkey, 10)
    assert result.content == (Text("attempt 1, done"),)


async def test_only_idempotent_agents_may_have_their_lost_work_requeued(pool: PoolUnderTest) -> None:
    with pytest.raises(ValueError, match="idempotent"):
        pool.serve(Actor().play, on_lost="requeue")


async def test_an_agent_with_a_rate_begins_its_turns_one_after_the_other_and_loses_none(pool: PoolUnderTest) -> None:
    begun: list[float] = []

    async def work(turn: Turn) -> str:
        begun.append(asyncio.get_running_loop().time())
        return turn.text

    pool.serve(function_agent(work), rate_per_min=600)
    ids = [await pool.send(str(number)) for number in range(15)]
    for number, task_id in enumerate(ids):
        assert told(await pool.ended(task_id)) == str(number)
    # Ten at once, which is a second's worth, and then one each 100 ms.
    assert len(begun) == 15
    assert begun[-1] - begun[0] >= 0.4
