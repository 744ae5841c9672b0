"""What watchers see: every step once and in order, live as later; and a next turn for what was said meanwhile."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from covenant.ledger.contract import Ledger, Watch
from covenant.ledger.machine.commands import Accept, Advance, Advanced, LeasedTask, Starter
from covenant.ledger.machine.states import State
from covenant.ledger.machine.view import Limits
from covenant.model.content import Text
from covenant.model.folding import TaskState, fold
from covenant.model.ids import TaskId
from covenant.model.result import Ending
from covenant.model.step import Began, Continued, Ended, Started, Step
from covenant.model.task import Task, fingerprint
from covenant.model.update import ArtifactUpdate, MessageUpdate, StatusUpdate, Update
from covenant.testing.cast import BOB, CAROL, make_task, ok, task_id
from covenant.testing.desk import Desk, refused
from covenant.testing.engine import Engine
from covenant.testing.suite import Suite

WAIT_S: Final = 20.0
STEPS_MAX: Final = 1_000


async def seen(watch: Watch, last: type[object] = Ended) -> list[Step]:
    """Everything the watch tells, until a step of this kind."""
    steps: list[Step] = []
    while not steps or not isinstance(steps[-1].what, last):
        more = await watch.next(WAIT_S)
        assert more, f"nothing came after {steps}"
        steps += more
    return steps


async def _patiently(watch: Watch) -> list[Step]:
    steps: list[Step] = []
    while not watch.cut and (not steps or not isinstance(steps[-1].what, Ended)):
        steps += await watch.next(WAIT_S, until_rest=True)
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


class WatchingSuite(Suite):
    async def test_a_watcher_sees_every_step_once_and_in_order(self, desk: Desk) -> None:
        with desk.ledger.watch(task_id(1)) as watch:
            leased = await desk.taken(make_task())
            await advance(desk.ledger, leased, StatusUpdate("on it"), text("a"), text("b"), reply="ab")
            steps = await seen(watch)
        assert [step.generation for step in steps] == [1, 2, 3, 4, 5, 6]
        kinds = [type(step.what) for step in steps]
        assert kinds == [Began, Started, StatusUpdate, ArtifactUpdate, ArtifactUpdate, Ended]

    async def test_what_is_read_later_is_what_was_seen_live(self, desk: Desk) -> None:
        with desk.ledger.watch(task_id(1)) as watch:
            leased = await desk.taken(make_task())
            await desk.report(leased, MessageUpdate(parts=(Text("by the way"),)))
            await desk.park(leased)
            await desk.say(task_id(1), "that one")
            leased = await desk.take_one()
            await desk.say(task_id(1), "and this one")
            await advance(desk.ledger, leased, text("x"), reply="done with that one")
            await advance(desk.ledger, await desk.take_one(), reply="done")
            live = await seen(watch)
        assert await desk.ledger.steps(task_id(1), 0, STEPS_MAX) == tuple(live)
        assert await desk.ledger.steps(task_id(1), 3, 2) == tuple(live[3:5])
        assert fold(live) == fold(await desk.ledger.steps(task_id(1), 0, STEPS_MAX))

    async def test_who_comes_later_reads_the_past_and_goes_on_without_a_gap(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        await desk.report(leased, "begun")
        with desk.ledger.watch(task_id(1)) as watch:
            await desk.report(leased, "seen twice")
            past = await desk.ledger.steps(task_id(1), 0, STEPS_MAX)
            await desk.finish(leased, ok(task_id(1)))
            newer = [step for step in await seen(watch) if step.generation > past[-1].generation]
        assert [step.generation for step in (*past, *newer)] == [1, 2, 3, 4, 5]

    async def test_a_watch_of_another_task_sees_nothing_of_this_one(self, desk: Desk) -> None:
        with desk.ledger.watch(task_id(2)) as watch:
            await desk.finish(await desk.taken(make_task(1)), ok(task_id(1)))
            await desk.send(make_task(2))
            assert [step.what for step in await watch.next(WAIT_S)] == [Began(make_task(2))]

    async def test_a_reader_that_is_too_slow_is_cut_off_and_can_begin_again(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        with desk.ledger.watch(task_id(1)) as watch:
            for _ in range(30):
                await advance(desk.ledger, leased, *[text("x")] * 100)
            await desk.queue()  # a turn of the loop later at the latest
            assert watch.cut
        assert len(await desk.ledger.steps(task_id(1), 0, 5_000)) == 3_002

    async def test_a_patient_reader_is_told_everything_when_the_task_rests(self, desk: Desk) -> None:
        with desk.ledger.watch(task_id(1)) as watch:
            reading = asyncio.ensure_future(watch.next(WAIT_S, until_rest=True))
            leased = await desk.taken(make_task())
            await desk.report(leased, "begun")
            await desk.queue()
            assert not reading.done()
            await desk.park(leased)
            asked = await reading
            assert [step.generation for step in asked] == [1, 2, 3, 4]
            assert await watch.next(0.0, until_rest=True) == []
            await desk.say(task_id(1), "that one")
            await advance(desk.ledger, await desk.take_one(), text("x"), reply="done")
            ended = await watch.next(WAIT_S, until_rest=True)
        assert isinstance(ended[-1].what, Ended)
        assert [step.generation for step in ended] == [5, 6, 7]

    async def test_a_patient_reader_is_not_cut_off_by_how_much_is_said(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        with desk.ledger.watch(task_id(1)) as watch:
            reading = asyncio.create_task(_patiently(watch))
            for _ in range(30):
                await advance(desk.ledger, leased, *[text("x")] * 100)
                await desk.queue()  # the reader has its turn
            await advance(desk.ledger, leased, reply="done")
            steps = await asyncio.wait_for(reading, WAIT_S)
            assert not watch.cut
        assert [step.generation for step in steps] == list(range(3, 3_004))

    async def test_a_holder_in_this_process_hears_that_its_task_is_over(self, desk: Desk) -> None:
        over: list[TaskId] = []
        desk.ledger.on_lost(over.append)
        await desk.taken(make_task(1))
        await desk.taken(make_task(2))
        await desk.cancel(task_id(1))
        await desk.requeue(task_id(2))
        await desk.ledger.durable()
        await desk.queue()  # a turn of the loop later at the latest
        assert over == [task_id(1), task_id(2)]

    async def test_what_can_start_at_once_is_accepted_and_leased_in_one_step(self, desk: Desk) -> None:
        leased = await start(desk.ledger, make_task())
        assert leased is not None
        entry = await desk.entry(task_id(1))
        assert (entry.state, entry.lease, entry.generation) == (State.LEASED, leased.lease, 2)
        assert (leased.lease.node, leased.lease.boot) == (desk.ledger.node, desk.ledger.boot)
        assert await start(desk.ledger, make_task()) is None, "the same task again is a duplicate, and not started"

    async def test_nobody_starts_before_those_who_wait(self, desk: Desk) -> None:
        await desk.send(make_task(1))
        assert await start(desk.ledger, make_task(2)) is None
        assert await desk.queued_ids() == [task_id(1), task_id(2)]

    async def test_updates_and_result_of_one_step_are_all_there_or_none(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        with refused("invalid_update", 400):
            await advance(desk.ledger, leased, StatusUpdate("which?", state="input-required"), text("late"))
        with refused("invalid_update", 400):
            await advance(desk.ledger, leased, StatusUpdate("which?", state="input-required"), reply="done")
        assert (await desk.entry(task_id(1))).generation == 2
        assert await advance(desk.ledger, leased, text("a"), reply="a") == Advanced(4)
        with refused("already_settled", 409):
            await advance(desk.ledger, leased, text("b"))

    async def test_a_message_to_a_task_at_work_is_its_next_turn(self, desk: Desk) -> None:
        first = await desk.taken(make_task())
        await desk.say(task_id(1), "and then?")
        await desk.say(task_id(1), "and after that?")
        assert (await advance(desk.ledger, first, reply="first")).goes_on
        second = await desk.take_one()
        assert (second.turn, second.lease.attempt) == (2, 1)
        assert [message.parts for message in second.messages] == [(Text("and then?"),), (Text("and after that?"),)]
        settled = await desk.finish(second, ok(task_id(1), "second"))
        assert not settled.goes_on
        view = fold(await desk.ledger.steps(task_id(1), 0, STEPS_MAX))
        assert view is not None
        assert view.state is TaskState.COMPLETED
        said = [part.text for message in view.history for part in message.parts if isinstance(part, Text)]
        assert said == [make_task().intent_text, "and then?", "and after that?", "first", "second"]

    async def test_the_same_result_again_ends_no_second_turn(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        await desk.say(task_id(1), "and then?")
        assert (await desk.finish(leased, ok(task_id(1)))).goes_on
        assert (await desk.finish(leased, ok(task_id(1)))).duplicate
        assert (await desk.entry(task_id(1))).turn == 2

    async def test_another_result_for_a_turn_that_ended_is_not_taken_for_the_same(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        await desk.say(task_id(1), "and then?")
        assert (await desk.finish(leased, ok(task_id(1), "first"))).goes_on
        assert (await desk.settle(ok(task_id(1), "first"))).duplicate, "without naming the lease, as the first may be"
        with refused("not_leased", 409):
            await desk.finish(leased, ok(task_id(1), "second"))
        with refused("not_leased", 409):
            await desk.settle(ok(task_id(1), "first"), holder=CAROL, lease_id=leased.lease.lease_id)

    async def test_a_result_after_a_question_is_refused_and_not_lost_in_silence(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        await desk.say(task_id(1), "the red one")
        await desk.park(leased)
        with refused("not_leased", 409):
            await desk.finish(leased, ok(task_id(1)))

    async def test_a_failure_ends_the_task_whatever_was_said_meanwhile(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        await desk.say(task_id(1), "and then?")
        failed = Advance(
            task_id=task_id(1),
            holder=BOB,
            lease_id=leased.lease.lease_id,
            result=msgspec.structs.replace(ok(task_id(1)), content=()),
            ending=Ending.REJECTED,
        )
        assert not (await desk.ledger.commit(failed)).goes_on
        assert (await desk.show(task_id(1))).a2a_state == "rejected"

    async def test_what_was_said_before_the_question_answers_it(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        await desk.say(task_id(1), "the red one")
        await desk.park(leased)
        again = await desk.take_one()
        assert (again.turn, [message.parts for message in again.messages]) == (2, [(Text("the red one"),)])

    async def test_how_much_can_be_said_meanwhile_is_bounded(self, engine: Engine) -> None:
        desk = Desk(await engine.open(Limits(messages_kept_max=1)), engine.clock)
        await desk.taken(make_task())
        await desk.say(task_id(1), "one")
        with refused("too_many_messages", 429):
            await desk.say(task_id(1), "two")

    async def test_a_task_at_anothers_door_is_not_found(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        command = Advance(
            task_id=task_id(1), recipient=CAROL.pubkey, holder=BOB, lease_id=leased.lease.lease_id, updates=(text("x"),)
        )
        with refused("unknown_task", 404):
            await desk.ledger.commit(command)

    async def test_steps_tell_a_continued_message(self, desk: Desk) -> None:
        await desk.park(await desk.taken(make_task()))
        await desk.say(task_id(1), "that one")
        (*_, step) = await desk.ledger.steps(task_id(1), 3, STEPS_MAX)
        assert step.what == Continued(MessageUpdate(role="user", parts=(Text("that one"),)))
