"""Durable steps of a function: each is done once, a wait holds no place, and a changed function is told."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from covenant import Agent, SyncTurn, Turn
from covenant.agents.runtime.job import Job
from covenant.agents.runtime.lost_work import STOPPED, LostWork
from covenant.ledger.machine.commands import SignalTask, Sweep
from covenant.model.agent_definition import OnLost
from covenant.model.errors import Invalid, Refusal
from covenant.model.ids import AgentId
from covenant.model.rate_limits import Backoff
from covenant.model.task_event import Signal, StatusUpdate, StepUpdate
from covenant.model.task_view import TaskState
from tests.agents.pool_under_test import PoolUnderTest, a_ledger, cut_short, function_agent, open_pool, statuses, told
from tests.agents.runtime.steps_under_test import Done, requeue, swept, waiting
from tests.ledger_contract.samples import BOB
from tests.waits import BOUND_S, LOOK_S


@pytest.fixture
async def pool() -> AsyncIterator[PoolUnderTest]:
    async with a_ledger(None) as ledger, open_pool(ledger) as opened:
        yield opened


async def test_a_step_gives_its_result_as_json_has_it(pool: PoolUnderTest) -> None:
    async def work(turn: Turn) -> str:
        async def later() -> Any:
            return ("a", 1)

        plain = await turn.step("plain", lambda: {"n": (1, 2)})
        return f"{plain} {await turn.step('later', later)}"

    pool.serve(work)
    assert told(await pool.ask()) == "{'n': [1, 2]} ['a', 1]"


async def test_a_plain_function_has_steps_too(pool: PoolUnderTest) -> None:
    done = Done()

    def work(turn: SyncTurn) -> str:
        first = turn.step("first", lambda: done.do("first", 1))
        turn.sleep(0.01)
        return f"{first} {turn.step('second', lambda: done.do('second', 2))} {turn.wait_for('go')}"

    pool.serve(work)
    task_id = await pool.send()
    await pool.ledger.commit(SignalTask(task_id=task_id, signal=Signal("go", "s1", "!")))
    assert told(await swept(pool, task_id)) == "1 2 !"
    assert done == ["first", "second"]


async def test_a_turn_that_is_run_again_does_no_step_twice_and_tells_what_was_interrupted(pool: PoolUnderTest) -> None:
    done, hung, interrupted = Done(), asyncio.Event(), list[tuple[str, bool]]()

    async def work(turn: Turn) -> str:
        async def hang() -> int:
            interrupted.append(("hang", turn.interrupted))
            if not hung.is_set():
                hung.set()
                await asyncio.Event().wait()
            return 2

        first = await turn.step("first", lambda: done.do("first", 1))
        second = await turn.step("second", hang)
        await turn.step("third", lambda: interrupted.append(("third", turn.interrupted)))
        return f"{first} {second} {turn.attempt}"

    pool.serve(work)
    task_id = await pool.send()
    await asyncio.wait_for(hung.wait(), BOUND_S)
    await requeue(pool, task_id)
    assert told(await pool.ended(task_id)) == "1 2 2"
    assert done == ["first"]
    assert interrupted == [("hang", False), ("hang", True), ("third", False)]


async def test_a_sleep_ends_the_lease_and_the_turn_goes_on_after_it(pool: PoolUnderTest) -> None:
    done = Done()

    async def work(turn: Turn) -> AsyncIterator[str]:
        yield "begun, "
        await turn.step("one", lambda: done.do("one"))
        await turn.sleep(0.05)
        await turn.step("two", lambda: done.do("two"))
        await turn.sleep(0.05)
        yield f"done in attempt {turn.attempt}"

    pool.serve(work, concurrency=1)
    task_id = await pool.send()
    await waiting(pool, task_id)
    assert pool.workers.jobs == 0
    view = await swept(pool, task_id)
    assert told(view) == "begun, done in attempt 1"
    assert done == ["one", "two"]
    kinds = [step.what.kind for step in await pool.steps(task_id) if isinstance(step.what, StepUpdate)]
    assert kinds == ["step", "sleep", "sleep", "step", "sleep", "sleep"]


async def test_waits_that_begin_at_once_wait_at_once(pool: PoolUnderTest) -> None:
    done = Done()

    async def slow() -> str:
        await asyncio.sleep(0.02)
        return str(done.do("slow", "s"))

    async def work(turn: Turn) -> str:
        found = await asyncio.gather(
            turn.sleep(0.03), turn.step("slow", slow), turn.wait_for("go", timeout_s=60), turn.sleep(0.01)
        )
        return str(found)

    pool.serve(work)
    task_id = await pool.send()
    await waiting(pool, task_id)
    await pool.ledger.commit(SignalTask(task_id=task_id, signal=Signal("go", "s1", 7)))
    assert told(await swept(pool, task_id)) == "[None, 's', 7, None]"
    assert done == ["slow"]


async def _gather(wait: Coroutine[Any, Any, Any]) -> None:
    await asyncio.gather(wait, return_exceptions=True)


async def _group(wait: Coroutine[Any, Any, Any]) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(wait)


async def _wait(wait: Coroutine[Any, Any, Any]) -> None:
    await asyncio.wait({asyncio.create_task(wait)})


async def _catch(wait: Coroutine[Any, Any, Any]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await wait


@pytest.mark.parametrize("swallow", [_gather, _group, _wait, _catch])
async def test_nothing_is_done_before_the_end_of_a_wait_whose_stop_was_swallowed(
    pool: PoolUnderTest, swallow: Callable[[Coroutine[Any, Any, Any]], Awaitable[None]]
) -> None:
    done = Done()

    async def work(turn: Turn) -> AsyncIterator[str]:
        try:
            await swallow(turn.wait_for("go"))
        finally:
            await turn.step("charge", lambda: done.do("charge"))
        yield "charged"

    pool.serve(work)
    task_id = await pool.send()
    await waiting(pool, task_id)
    assert done == []
    await pool.ledger.commit(SignalTask(task_id=task_id, signal=Signal("go", "s1", 7)))
    assert told(await pool.ended(task_id)) == "charged"
    assert done == ["charge"]


async def test_a_function_whose_task_waits_does_not_go_on_with_what_is_no_step(pool: PoolUnderTest) -> None:
    went_on, cleaned = list[str](), list[str]()

    async def work(turn: Turn) -> str:
        try:
            await asyncio.gather(turn.wait_for("go"), return_exceptions=True)
            went_on.append("outside of a step")
        finally:
            await asyncio.sleep(0)
            cleaned.append("closed")
        return "done"

    pool.serve(work)
    task_id = await pool.send()
    await waiting(pool, task_id)
    assert went_on == []
    assert cleaned == ["closed"], "what the author closes is closed"
    await pool.ledger.commit(SignalTask(task_id=task_id, signal=Signal("go", "s1", 7)))
    assert told(await pool.ended(task_id)) == "done"
    assert len(went_on) == 1


async def test_a_branch_goes_on_when_the_signal_of_another_one_is_there_already(pool: PoolUnderTest) -> None:
    begun = asyncio.Event()

    async def work(turn: Turn) -> str:
        async def steps() -> str:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return await turn.step("one", lambda: "one") + await turn.step("two", lambda: "two")

        await begun.wait()
        return str(await asyncio.gather(turn.wait_for("go"), steps(), turn.wait_for("on")))

    pool.serve(work)
    task_id = await pool.send()
    for name in ("go", "on"):
        await pool.ledger.commit(SignalTask(task_id=task_id, signal=Signal(name, name, name)))
    begun.set()
    assert told(await swept(pool, task_id)) == "['go', 'onetwo', 'on']"


@pytest.mark.parametrize("inner", ["sleep", "wait_for", "approve", "ask", "step"])
@pytest.mark.parametrize("plain", [False, True])
async def test_a_step_contains_neither_a_step_nor_a_wait(pool: PoolUnderTest, inner: str, *, plain: bool) -> None:
    given: dict[str, tuple[Any, ...]] = {"sleep": (0.01,), "step": ("inner", lambda: 1)}

    async def work(turn: Turn) -> str:
        async def within() -> Any:
            (found,) = await asyncio.gather(getattr(turn, inner)(*given.get(inner, ("go?",))))
            return found

        return str(await turn.step("outer", within))

    def plain_work(turn: SyncTurn) -> str:
        return str(turn.step("outer", lambda: getattr(turn, inner)(*given.get(inner, ("go?",)))))

    pool.serve(plain_work if plain else work)
    view = await pool.ask()
    assert view.state is TaskState.FAILED
    assert "step 'outer' contains a step or a wait" in told(view)


async def test_a_signal_that_does_not_come_raises_a_timeout(pool: PoolUnderTest) -> None:
    async def work(turn: Turn) -> str:
        try:
            await turn.wait_for("go", timeout_s=0.01)
        except TimeoutError:
            return await turn.step("instead", lambda: "nobody came")
        return "?"

    pool.serve(work)
    assert told(await swept(pool, await pool.send())) == "nobody came"


@pytest.mark.parametrize(
    ("result", "says"),
    [(object(), "cannot be written as JSON"), ({1j}, "cannot be written as JSON"), ("x" * 300_000, "more than 262144")],
)
async def test_a_result_that_cannot_be_kept_fails_the_task_and_says_why(
    pool: PoolUnderTest, result: Any, says: str
) -> None:
    async def work(turn: Turn) -> None:
        await turn.step("odd", lambda: result)

    pool.serve(work)
    view = await pool.ask()
    assert view.state is TaskState.FAILED
    assert "step 'odd'" in told(view)
    assert says in told(view)


async def test_a_turn_in_an_event_loop_of_the_author_is_refused(pool: PoolUnderTest) -> None:
    """The ledger is not made for two loops."""

    async def runs_a_loop(turn: Turn) -> None:
        await asyncio.to_thread(lambda: asyncio.run(turn.step("one", lambda: 1)))

    pool.serve(runs_a_loop)
    assert "can be used on the daemon's event loop only" in told(await pool.ask())


async def test_a_name_that_is_used_twice_fails_the_task_and_says_so(pool: PoolUnderTest) -> None:
    async def work(turn: Turn) -> None:
        await turn.step("same", lambda: 1)
        await turn.step("same", lambda: 2)

    pool.serve(work)
    assert "step 'same' was asked for twice" in told(await pool.ask())


@pytest.mark.parametrize("name", ["", "x" * 129, "a\nb"])
async def test_a_name_that_is_none_is_refused(pool: PoolUnderTest, name: str) -> None:
    async def work(turn: Turn) -> str:
        try:
            await turn.step(name, lambda: 1)
        except Invalid as error:
            return str(error)
        return "?"

    pool.serve(work)
    assert "printable characters" in told(await pool.ask())


@pytest.mark.parametrize("seconds", [-1, 1e12, float("nan"), "long"])
async def test_a_sleep_that_makes_no_sense_is_refused(pool: PoolUnderTest, seconds: Any) -> None:
    async def work(turn: Turn) -> str:
        try:
            await turn.sleep(seconds)
        except Refusal as error:
            return type(error).__name__
        return "?"

    pool.serve(work)
    assert told(await pool.ask()) in ("Invalid", "WrongType")


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("end", ["need_input", "reject", "reply", "listed", "yielded"])
async def test_a_changed_function_that_ends_its_turn_in_another_way_holds_the_task_too(
    pool: PoolUnderTest, end: str, *, plain: bool
) -> None:
    done, old = Done(), True

    def last(turn: Turn | SyncTurn) -> Any:
        ends = {"need_input": turn.need_input("how many?"), "reject": turn.reject("no"), "reply": turn.reply("yes")}
        return [ends["reject"]] if end == "listed" else ends.get(end, ends["need_input"])

    async def work(turn: Turn) -> Any:
        if old:
            await turn.step("charge", lambda: done.do("charge"))
            await turn.sleep(0)
            return "done"
        return last(turn)

    def work_in_a_thread(turn: SyncTurn) -> Any:
        if old:
            turn.step("charge", lambda: done.do("charge"))
            turn.sleep(0)
            return "done"
        return last(turn)

    async def work_and_yield(turn: Turn) -> AsyncIterator[Any]:
        yield await work(turn)

    def work_in_a_thread_and_yield(turn: SyncTurn) -> Iterator[Any]:
        yield work_in_a_thread(turn)

    yields: Any = work_in_a_thread_and_yield if plain else work_and_yield
    returns: Any = work_in_a_thread if plain else work
    pool.serve(yields if end == "yielded" else returns)
    task_id = await pool.send()
    await waiting(pool, task_id)
    old = False
    await pool.ledger.commit(Sweep())
    view = await pool.until(task_id, lambda view: view.state.terminal or bool(told(view)))
    assert "step 1 of this turn is 'charge' in the ledger, and the function has ended" in told(view)
    await pool.idle()
    old = True
    await requeue(pool, task_id)
    assert told(await swept(pool, task_id)) == "done"
    assert done == ["charge"], "it is charged once"


@pytest.mark.parametrize("change", ["renamed", "removed", "kind"])
async def test_a_function_that_was_changed_meanwhile_holds_the_task_and_goes_on_when_it_is_put_right(
    pool: PoolUnderTest, change: str
) -> None:
    done, old = Done(), True

    async def work(turn: Turn) -> str:
        if old or change == "kind":
            first = "sleep" if change == "kind" else "charge"
            await (turn.step(first, lambda: done.do(first)) if old else turn.sleep(0))
        elif change == "renamed":
            await turn.step("charge card", lambda: done.do("charge card"))
        if len(done) == 1 and old:
            await turn.sleep(0)
        return "done"

    pool.serve(work)
    task_id = await pool.send()
    await waiting(pool, task_id)
    old = False
    await pool.ledger.commit(Sweep())
    view = await pool.until(task_id, lambda view: "was changed" in told(view))
    await pool.idle()
    assert not view.state.terminal
    entry = await pool.ledger.entry(task_id)
    assert entry is not None
    assert entry.interrupted, "it is held for an operator"
    assert len(done) == 1, "nothing was done that the ledger does not have"
    old = True
    await requeue(pool, task_id)
    assert told(await swept(pool, task_id)) == "done"
    assert len(done) == 1
    assert any("step 1 of this turn is" in text for text in statuses(await pool.steps(task_id)))


class _Policy(NamedTuple):
    on_lost: OnLost
    identity: AgentId = BOB
    follows: bool = False
    agent: object = None


async def test_work_that_its_own_turn_holds_is_held_whatever_its_words(
    pool: PoolUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, names = Job.hold, ["charge"]
    monkeypatch.setattr(Job, "hold", lambda job, _: hold(job, STOPPED))

    async def work(turn: Turn) -> str:
        await turn.step(names[-1], lambda: None)
        await turn.wait_for("go")
        return "done"

    pool.serve(work, idempotent=True, on_lost="requeue")
    task_id = await pool.send()
    await waiting(pool, task_id)
    names.append("charge card")
    await pool.ledger.commit(SignalTask(task_id=task_id, signal=Signal("go", "s1")))
    await pool.until(task_id, lambda view: STOPPED in told(view))
    await pool.idle()
    await LostWork(pool.ledger, {BOB.pubkey: _Policy("requeue")}, 0).step()
    entry = await pool.ledger.entry(task_id)
    assert entry is not None
    assert (entry.attempt, entry.interrupted) == (1, True)


@pytest.mark.parametrize("on_lost", ["requeue", "fail"])
async def test_a_task_whose_function_was_changed_is_held_whatever_becomes_of_lost_work(
    pool: PoolUnderTest, on_lost: OnLost
) -> None:
    done, names = Done(), ["charge"]

    async def work(turn: Turn) -> str:
        await turn.step(names[-1], lambda: done.do(names[-1]))
        await turn.wait_for("go")
        return "done"

    pool.serve(work, idempotent=True, on_lost=on_lost)
    task_id = await pool.send()
    await waiting(pool, task_id)
    names.append("charge card")
    await pool.ledger.commit(SignalTask(task_id=task_id, signal=Signal("go", "s1")))
    await pool.until(task_id, lambda view: "was changed" in told(view))
    await pool.idle()
    lost = LostWork(pool.ledger, {BOB.pubkey: _Policy(on_lost)}, 0)
    await lost.step()
    lost.check_again()
    await lost.step()
    entry = await pool.ledger.entry(task_id)
    assert entry is not None
    assert (entry.attempt, entry.interrupted, entry.ending) == (1, True, None)
    names.pop()
    await requeue(pool, task_id)
    assert told(await pool.ended(task_id)) == "done"
    assert done == ["charge"]


async def test_usage_of_steps_is_counted_once(pool: PoolUnderTest) -> None:
    async def work(turn: Turn) -> str:
        await turn.step("think", lambda: turn.spend(tokens=10))
        await turn.sleep(0)
        await turn.step("more", lambda: turn.spend(tokens=5))
        await turn.sleep(0)
        return "done"

    pool.serve(work)
    view = await swept(pool, await pool.send())
    assert view.result is not None
    assert view.result.metadata == {"usage": {"tokens": 15}}


async def test_usage_of_earlier_turns_is_counted_once_with_that_of_steps(pool: PoolUnderTest) -> None:
    async def work(turn: Turn) -> AsyncIterator[Any]:
        turn.spend(tokens=40)
        if turn.turn == 1:
            yield turn.need_input("which?")
        await turn.step("think", lambda: turn.spend(tokens=10))
        await turn.sleep(0)
        yield "done"

    pool.serve(work)
    task_id = await pool.send("a")
    await pool.parked(task_id)
    await pool.say(task_id, "b")
    view = await swept(pool, task_id)
    assert view.result is not None
    # What a function spends outside of its steps is spent again by each attempt.
    assert view.result.metadata == {"usage": {"tokens": 40 + 40 + 10 + 40}}


async def test_a_later_turn_counts_the_turns_before_it_and_not_its_own_failed_attempts(pool: PoolUnderTest) -> None:
    async def work(turn: Turn) -> AsyncIterator[Any]:
        turn.spend(tokens=40)
        if turn.turn == 1:
            yield turn.need_input("which?")
        await turn.step("think", lambda: turn.spend(tokens=10))
        if turn.attempt == 1:
            raise ConnectionError
        yield "done"

    pool.serve(function_agent(work, idempotent=True, attempts=2, backoff=FAST, retry_on=(ConnectionError,)))
    task_id = await pool.send("a")
    await pool.parked(task_id)
    await pool.say(task_id, "b")
    view = await swept(pool, task_id)
    assert view.result is not None
    # The step brings what the attempt that did it had used by then.
    assert view.result.metadata == {"usage": {"tokens": 40 + (40 + 10) + 40}}


async def test_a_turn_that_asks_its_sender_begins_its_steps_anew(pool: PoolUnderTest) -> None:
    done = Done()

    async def work(turn: Turn) -> AsyncIterator[Any]:
        await turn.step("read", lambda: done.do(f"read {turn.text}"))
        if turn.turn == 1:
            yield turn.need_input("which?")
        await turn.sleep(0)
        yield "done"

    pool.serve(work)
    task_id = await pool.send("a")
    await pool.parked(task_id)
    await pool.say(task_id, "b")
    assert told(await swept(pool, task_id)) == "done"
    assert done == ["read a", "read b"]


async def test_steps_outlive_a_stop_of_the_pool(tmp_path: Path) -> None:
    done, hung = Done(), asyncio.Event()

    async def work(turn: Turn) -> str:
        await turn.step("one", lambda: done.do("one"))
        await turn.sleep(0.01)
        await turn.step("two", lambda: done.do("two"))
        if not hung.is_set():
            hung.set()
            await asyncio.Event().wait()
        return f"{turn.attempt} {turn.interrupted}"

    def setting(pool: PoolUnderTest) -> None:
        pool.serve(work, idempotent=True)

    async with a_ledger(tmp_path) as ledger, open_pool(ledger, setting=setting) as pool:
        task_id = await pool.send()
        await waiting(pool, task_id)
        while not hung.is_set():
            await ledger.commit(Sweep())
            await asyncio.sleep(LOOK_S)
        assert pool.running is not None
        await cut_short(pool.workers, pool.running)
    async with a_ledger(tmp_path) as ledger, open_pool(ledger, setting=setting) as pool:
        assert told(await swept(pool, task_id)) == "2 True"
    assert done == ["one", "two"]


FAST = Backoff(0.01, 0.02)


async def test_a_turn_that_fails_is_begun_again_after_a_pause_and_its_sender_is_told(pool: PoolUnderTest) -> None:
    done = Done()

    async def work(turn: Turn) -> AsyncIterator[str]:
        yield f"attempt {turn.attempt}"
        await turn.step("once", lambda: done.do("once"))
        if turn.attempt < 3:
            raise ConnectionError("the other side is gone")

    pool.serve(function_agent(work, idempotent=True, attempts=3, backoff=FAST, retry_on=(ConnectionError,)))
    task_id = await pool.send()
    view = await swept(pool, task_id)
    assert (view.state, told(view)) == (TaskState.COMPLETED, "attempt 3")
    assert done == ["once"]
    steps = await pool.steps(task_id)
    assert [text.partition(" begins")[0] for text in statuses(steps)] == [
        "attempt 1 failed; attempt 2",
        "attempt 2 failed; attempt 3",
    ]
    shown = await pool.ledger.show(task_id, None, 100)
    assert shown is not None
    assert [(lease.attempt, lease.outcome) for lease in shown.leases] == [
        (1, "suspended"),
        (2, "suspended"),
        (3, "settled"),
    ]


@pytest.mark.parametrize("error", [ConnectionError, KeyError])
async def test_the_last_attempt_and_another_failure_fail_the_task(pool: PoolUnderTest, error: type[Exception]) -> None:
    attempts = list[int]()

    async def work(turn: Turn) -> None:
        attempts.append(turn.attempt)
        raise error

    pool.serve(function_agent(work, idempotent=True, attempts=2, backoff=FAST, retry_on=(ConnectionError,)))
    view = await swept(pool, await pool.send())
    assert view.state is TaskState.FAILED
    assert attempts == ([1, 2] if error is ConnectionError else [1])


@pytest.mark.parametrize("plain", [False, True])
async def test_a_function_may_ask_for_a_further_attempt(pool: PoolUnderTest, *, plain: bool) -> None:
    async def work(turn: Turn) -> Any:
        return turn.retry(after=0.01, text="the shop is closed") if turn.attempt < 3 else "open"

    def work_in_a_thread(turn: SyncTurn) -> Any:
        return turn.retry(after=0.01, text="the shop is closed") if turn.attempt < 3 else "open"

    pool.serve(work_in_a_thread if plain else work)
    task_id = await pool.send()
    assert told(await swept(pool, task_id)) == "open"
    assert statuses(await pool.steps(task_id))[0] == "the shop is closed; attempt 2 begins in 0.01 s"


@pytest.mark.parametrize(
    ("after", "words"), [(90, "90 s"), (3_470, "57.8 min"), (90_000, "25 h"), (10 * 365 * 86_400, "3650 d")]
)
async def test_a_long_pause_is_told_in_words_and_as_the_moment_at_which_it_ends(
    pool: PoolUnderTest, after: float, words: str
) -> None:
    async def work(turn: Turn) -> Any:
        return turn.retry(after=after, text="closed")

    pool.serve(work)
    task_id = await pool.send()
    await waiting(pool, task_id)
    steps, entry = await pool.steps(task_id), await pool.ledger.entry(task_id)
    (said,) = [step.what for step in steps if isinstance(step.what, StatusUpdate)]
    assert said.text == f"closed; attempt 2 begins in {words}"
    assert entry is not None
    assert entry.wait is not None
    ends_ms = entry.wait.ends_at_ms(entry.wait.since_ms)
    assert said.metadata == {"covenant.next_attempt": {"attempt": 2, "at_ms": ends_ms}}


async def test_a_question_tells_until_when_it_can_be_answered(pool: PoolUnderTest) -> None:
    async def work(turn: Turn) -> str:
        return "yes" if await turn.approve("may I?", timeout_s=3_600) else "no"

    pool.serve(work)
    task_id = await pool.send()
    await waiting(pool, task_id)
    steps, entry = await pool.steps(task_id), await pool.ledger.entry(task_id)
    (said,) = [step.what for step in steps if isinstance(step.what, StatusUpdate)]
    assert entry is not None
    assert entry.wait is not None
    until_ms = entry.wait.since_ms + 3_600_000
    assert said.metadata == {"covenant.question": {"id": "1-1", "kind": "approval", "until_ms": until_ms}}


async def test_who_asks_for_one_attempt_too_many_has_failed(pool: PoolUnderTest) -> None:
    async def work(turn: Turn) -> AsyncIterator[Any]:
        yield turn.retry(after=0, text="closed for ever")

    pool.serve(work)
    view = await swept(pool, await pool.send())
    assert (view.state, told(view)) == (TaskState.FAILED, "closed for ever")
    assert view.generation == 5, "submitted, working, two pauses, and the end"


def test_retries_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="idempotent"):
        Agent("a", retry_on=(OSError,))
    for attempts in (0, 101):
        with pytest.raises(ValueError, match="attempts"):
            Agent("a", attempts=attempts)
    kinds: Any
    for kinds in (("ConnectionError",), (ValueError("x"),), (KeyboardInterrupt,)):
        with pytest.raises(TypeError, match="classes of exceptions"):
            Agent("a", idempotent=True, retry_on=kinds)


@pytest.mark.parametrize(
    ("backoff", "why"),
    [
        (Backoff(-1, 5), "at least 0 seconds"),
        (Backoff(1, -5), "at least 0 seconds"),
        (Backoff(1, 5, jitter=3), "jitter"),
        (Backoff(1, 5, factor=0.5), "factor"),
        (Backoff(1, 5, factor=1e10), "factor"),
        (Backoff(1, 1e12), "ten years"),
    ],
)
def test_pauses_that_nobody_could_wait_for_are_refused(backoff: Backoff, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Agent("a", backoff=backoff)


async def test_an_attempt_whose_output_cannot_be_kept_ends_its_task(pool: PoolUnderTest) -> None:
    async def work(turn: Turn) -> list[Any]:
        return [*(turn.data(number) for number in range(1_001)), turn.retry(after=0)]

    pool.serve(work)
    view = await pool.ended(await pool.send())
    assert view.state is TaskState.FAILED, "nobody would ever end it, or begin it again"
    assert "too many artifacts" in told(view)
