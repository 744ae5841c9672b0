"""What watchers see: every step once and in order, live as later; and a next turn for what was said meanwhile."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from covenant.ledger.change_log import LATEST_MAX
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.machine.commands import Accept, Advance, Advanced, LeasedTask, Starter
from covenant.ledger.machine.states import State
from covenant.ledger.watchers import TaskWatch
from covenant.model.content import Text
from covenant.model.ids import TaskId
from covenant.model.settings import Limits
from covenant.model.task import Ending, Task, fingerprint
from covenant.model.task_event import (
    ArtifactUpdate,
    Began,
    Continued,
    Ended,
    MessageUpdate,
    Started,
    StatusUpdate,
    Step,
    Update,
)
from covenant.model.task_view import TaskState, fold
from tests.ledger_contract.driver import LedgerDriver, refused
from tests.ledger_contract.engine import Engine
from tests.ledger_contract.samples import BOB, CAROL, make_task, ok, task_id
from tests.ledger_contract.suite import Suite
from tests.waits import BOUND_S

STEPS_MAX: Final = 1_000


async def seen(watch: TaskWatch, last: type[object] = Ended) -> list[Step]:
    """Everything the watch tells, until a step of this kind."""
    steps: list[Step] = []
    while not steps or not isinstance(steps[-1].what, last):
        more = await watch.next(BOUND_S)
        assert more, f"nothing came after {steps}"
        steps += more
    return steps


async def _patiently(watch: TaskWatch) -> list[Step]:
    steps: list[Step] = []
    while not watch.cut and (not steps or not isinstance(steps[-1].what, Ended)):
        steps += await watch.next(BOUND_S, until_rest=True)
    return steps


def text(said: str, *, append: bool = True) -> ArtifactUpdate:
    return ArtifactUpdate("answer", (Text(said),), append=append)


async def advance(ledger: Ledger, leased: LeasedTask, *updates: Update, reply: str | None = None) -> Advanced:
    task, lease = leased.task, leased.lease
    result = None if reply is None else ok(task.id, reply)
    return await ledger.commit(
        Advance(task_id=task.id, holder=lease.leased_to, lease_id=lease.lease_id, updates=tuple(updates), result=result)
    )


async def start(ledger: Ledger, task: Task) -> LeasedTask | None:
    """Send a task to a recipient who can begin at once."""
    starter = Starter(task.recipient, ledger.node, ledger.boot)
    accepted = await ledger.commit(Accept(task=task, digest=fingerprint(task)[0], starter=starter))
    return accepted.leased


class WatchSuite(Suite):
    async def test_a_watcher_sees_every_step_once_and_in_order(self, driver: LedgerDriver) -> None:
        with driver.ledger.watch(task_id(1)) as watch:
            leased = await driver.taken(make_task())
            await advance(driver.ledger, leased, StatusUpdate("on it"), text("a"), text("b"), reply="ab")
            steps = await seen(watch)
        assert [step.generation for step in steps] == [1, 2, 3, 4, 5, 6]
        kinds = [type(step.what) for step in steps]
        assert kinds == [Began, Started, StatusUpdate, ArtifactUpdate, ArtifactUpdate, Ended]

    async def test_what_is_read_later_is_what_was_seen_live(self, driver: LedgerDriver) -> None:
        with driver.ledger.watch(task_id(1)) as watch:
            leased = await driver.taken(make_task())
            await driver.report(leased, MessageUpdate(parts=(Text("by the way"),)))
            await driver.park(leased)
            await driver.say(task_id(1), "that one")
            leased = await driver.take_one()
            await driver.say(task_id(1), "and this one")
            await advance(driver.ledger, leased, text("x"), reply="done with that one")
            await advance(driver.ledger, await driver.take_one(), reply="done")
            live = await seen(watch)
        assert await driver.ledger.steps(task_id(1), 0, STEPS_MAX) == tuple(live)
        assert await driver.ledger.steps(task_id(1), 3, 2) == tuple(live[3:5])
        assert fold(live) == fold(await driver.ledger.steps(task_id(1), 0, STEPS_MAX))

    async def test_who_comes_later_reads_the_past_and_goes_on_without_a_gap(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        await driver.report(leased, "begun")
        with driver.ledger.watch(task_id(1)) as watch:
            await driver.report(leased, "seen twice")
            past = await driver.ledger.steps(task_id(1), 0, STEPS_MAX)
            await driver.finish(leased, ok(task_id(1)))
            newer = [step for step in await seen(watch) if step.generation > past[-1].generation]
        assert [step.generation for step in (*past, *newer)] == [1, 2, 3, 4, 5]

    async def test_whoever_asks_is_told_once_which_tasks_changed_and_how_they_are(self, driver: LedgerDriver) -> None:
        changes = driver.ledger.changes
        await driver.send(make_task(3))
        changes.begin()
        before = changes.take().position
        await driver.send(make_task(1))
        await driver.finish(await driver.take_one(), ok(task_id(3)))
        await driver.send(make_task(2))
        told = changes.take()
        assert [(each, change.state) for each, change in told.latest.items()] == [
            (task_id(2), State.QUEUED),
            (task_id(3), State.SETTLED),
            (task_id(1), State.QUEUED),
        ]
        assert told.latest[task_id(1)].agent == BOB.display
        assert (told.position > before, told.complete, told.others) == (True, True, {})
        assert not changes.take()
        for number in range(10, 10 + LATEST_MAX + 2):
            await driver.send(make_task(number))
        told = changes.take()
        assert list(told.latest) == [task_id(9 + LATEST_MAX + 2 - each) for each in range(LATEST_MAX)]
        assert list(told.others) == [task_id(11), task_id(10)]
        changes.end()
        await driver.send(make_task(4))
        assert changes.position > told.position, "who comes back must see that it missed something"
        assert not changes.take()

    async def test_a_watch_of_another_task_sees_nothing_of_this_one(self, driver: LedgerDriver) -> None:
        with driver.ledger.watch(task_id(2)) as watch:
            await driver.finish(await driver.taken(make_task(1)), ok(task_id(1)))
            await driver.send(make_task(2))
            assert [step.what for step in await watch.next(BOUND_S)] == [Began(make_task(2))]

    async def test_a_reader_that_is_too_slow_is_cut_off_and_can_begin_again(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        with driver.ledger.watch(task_id(1)) as watch:
            for _ in range(30):
                await advance(driver.ledger, leased, *[text("x")] * 100)
            await driver.queue()  # a turn of the loop later at the latest
            assert watch.cut
        assert len(await driver.ledger.steps(task_id(1), 0, 5_000)) == 3_002

    async def test_a_patient_reader_is_told_everything_when_the_task_rests(self, driver: LedgerDriver) -> None:
        with driver.ledger.watch(task_id(1)) as watch:
            reading = asyncio.ensure_future(watch.next(BOUND_S, until_rest=True))
            leased = await driver.taken(make_task())
            await driver.report(leased, "begun")
            await driver.queue()
            assert not reading.done()
            await driver.park(leased)
            asked = await reading
            assert [step.generation for step in asked] == [1, 2, 3, 4]
            assert await watch.next(0.0, until_rest=True) == []
            await driver.say(task_id(1), "that one")
            await advance(driver.ledger, await driver.take_one(), text("x"), reply="done")
            ended = await watch.next(BOUND_S, until_rest=True)
        assert isinstance(ended[-1].what, Ended)
        assert [step.generation for step in ended] == [5, 6, 7]

    async def test_a_patient_reader_is_not_cut_off_by_how_much_is_said(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        with driver.ledger.watch(task_id(1)) as watch:
            reading = asyncio.create_task(_patiently(watch))
            for _ in range(30):
                await advance(driver.ledger, leased, *[text("x")] * 100)
                await driver.queue()  # the reader has its turn
            await advance(driver.ledger, leased, reply="done")
            steps = await asyncio.wait_for(reading, BOUND_S)
            assert not watch.cut
        assert [step.generation for step in steps] == list(range(3, 3_004))

    async def test_a_holder_in_this_process_hears_that_its_task_is_over(self, driver: LedgerDriver) -> None:
        over: list[TaskId] = []
        driver.ledger.on_lost(over.append)
        await driver.taken(make_task(1))
        await driver.taken(make_task(2))
        await driver.cancel(task_id(1))
        await driver.requeue(task_id(2))
        await driver.ledger.durable()
        await driver.queue()  # a turn of the loop later at the latest
        assert over == [task_id(1), task_id(2)]

    async def test_what_can_start_at_once_is_accepted_and_leased_in_one_step(self, driver: LedgerDriver) -> None:
        leased = await start(driver.ledger, make_task())
        assert leased is not None
        entry = await driver.entry(task_id(1))
        assert (entry.state, entry.lease, entry.generation) == (State.LEASED, leased.lease, 2)
        assert (leased.lease.node, leased.lease.boot) == (driver.ledger.node, driver.ledger.boot)
        assert await start(driver.ledger, make_task()) is None, "the same task again is a duplicate, and not started"

    async def test_nobody_starts_before_those_who_wait(self, driver: LedgerDriver) -> None:
        await driver.send(make_task(1))
        assert await start(driver.ledger, make_task(2)) is None
        assert await driver.queued_ids() == [task_id(1), task_id(2)]

    async def test_updates_and_result_of_one_step_are_all_there_or_none(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        with refused("invalid_update", 400):
            await advance(driver.ledger, leased, StatusUpdate("which?", state="input-required"), text("late"))
        with refused("invalid_update", 400):
            await advance(driver.ledger, leased, StatusUpdate("which?", state="input-required"), reply="done")
        assert (await driver.entry(task_id(1))).generation == 2
        assert await advance(driver.ledger, leased, text("a"), reply="a") == Advanced(4)
        with refused("already_settled", 409):
            await advance(driver.ledger, leased, text("b"))

    async def test_a_message_to_a_task_at_work_is_its_next_turn(self, driver: LedgerDriver) -> None:
        first = await driver.taken(make_task())
        await driver.say(task_id(1), "and then?")
        await driver.say(task_id(1), "and after that?")
        assert (await advance(driver.ledger, first, reply="first")).goes_on
        second = await driver.take_one()
        assert (second.turn, second.lease.attempt) == (2, 1)
        assert [message.parts for message in second.messages] == [(Text("and then?"),), (Text("and after that?"),)]
        settled = await driver.finish(second, ok(task_id(1), "second"))
        assert not settled.goes_on
        view = fold(await driver.ledger.steps(task_id(1), 0, STEPS_MAX))
        assert view is not None
        assert view.state is TaskState.COMPLETED
        said = [part.text for message in view.history for part in message.parts if isinstance(part, Text)]
        assert said == [make_task().intent_text, "and then?", "and after that?", "first", "second"]

    async def test_the_same_result_again_ends_no_second_turn(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        await driver.say(task_id(1), "and then?")
        assert (await driver.finish(leased, ok(task_id(1)))).goes_on
        assert (await driver.finish(leased, ok(task_id(1)))).duplicate
        assert (await driver.entry(task_id(1))).turn == 2

    async def test_another_result_for_a_turn_that_ended_is_not_taken_for_the_same(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        await driver.say(task_id(1), "and then?")
        assert (await driver.finish(leased, ok(task_id(1), "first"))).goes_on
        assert (await driver.settle(ok(task_id(1), "first"))).duplicate, "without naming the lease, as the first may be"
        with refused("not_leased", 409):
            await driver.finish(leased, ok(task_id(1), "second"))
        with refused("not_leased", 409):
            await driver.settle(ok(task_id(1), "first"), holder=CAROL, lease_id=leased.lease.lease_id)

    async def test_a_result_after_a_question_is_refused_and_not_lost_in_silence(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        await driver.say(task_id(1), "the red one")
        await driver.park(leased)
        with refused("not_leased", 409):
            await driver.finish(leased, ok(task_id(1)))

    async def test_a_failure_ends_the_task_whatever_was_said_meanwhile(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        await driver.say(task_id(1), "and then?")
        failed = Advance(
            task_id=task_id(1),
            holder=BOB,
            lease_id=leased.lease.lease_id,
            result=msgspec.structs.replace(ok(task_id(1)), content=()),
            ending=Ending.REJECTED,
        )
        assert not (await driver.ledger.commit(failed)).goes_on
        assert (await driver.show(task_id(1))).a2a_state == "rejected"

    async def test_what_was_said_before_the_question_answers_it(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        await driver.say(task_id(1), "the red one")
        await driver.park(leased)
        again = await driver.take_one()
        assert (again.turn, [message.parts for message in again.messages]) == (2, [(Text("the red one"),)])

    async def test_how_much_can_be_said_meanwhile_is_bounded(self, engine: Engine) -> None:
        driver = LedgerDriver(await engine.open(Limits(messages_kept_max=1)), engine.clock)
        await driver.taken(make_task())
        await driver.say(task_id(1), "one")
        with refused("too_many_messages", 429):
            await driver.say(task_id(1), "two")

    async def test_a_task_at_anothers_door_is_not_found(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        command = Advance(
            task_id=task_id(1), recipient=CAROL.pubkey, holder=BOB, lease_id=leased.lease.lease_id, updates=(text("x"),)
        )
        with refused("unknown_task", 404):
            await driver.ledger.commit(command)

    async def test_steps_tell_a_continued_message(self, driver: LedgerDriver) -> None:
        await driver.park(await driver.taken(make_task()))
        await driver.say(task_id(1), "that one")
        (*_, step) = await driver.ledger.steps(task_id(1), 3, STEPS_MAX)
        assert step.what == Continued(MessageUpdate(role="user", parts=(Text("that one"),)))
