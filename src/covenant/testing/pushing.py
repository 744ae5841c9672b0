"""Push configurations: facts of a task, for its door alone, with a cursor that only goes on until nothing is owed."""

from __future__ import annotations

import msgspec

from covenant.ledger.machine.commands import Accept
from covenant.ledger.machine.push_commands import DropPush, MovePushes, PutPush, RetryPush
from covenant.ledger.machine.view import Limits
from covenant.model.asking import PushAuthentication, PushConfig
from covenant.model.ids import AgentId, TaskId
from covenant.model.push import Push, move_of
from covenant.model.task import Task, fingerprint
from covenant.testing.cast import BOB, CAROL, OPERATOR, make_task, ok, same_work, task_id
from covenant.testing.desk import Desk, refused
from covenant.testing.engine import Engine
from covenant.testing.suite import Suite
from covenant.testing.surviving import Restart, RestartSuite

replace = msgspec.structs.replace

HOOK = PushConfig(
    url="https://hooks.example/1",
    token="the token",  # noqa: S106  (looked for where it must not be)
    authentication=PushAuthentication(scheme="Bearer", credentials="the credentials"),
)
LINGER_MS = 600_000


async def put(desk: Desk, which: TaskId, config: PushConfig = HOOK, *, once: bool = False) -> Push:
    return await desk.ledger.commit(PutPush(task_id=which, recipient=BOB.pubkey, config=config, once=once))


async def drop(desk: Desk, which: TaskId, push_id: str) -> bool:
    return await desk.ledger.commit(DropPush(task_id=which, recipient=BOB.pubkey, id=push_id))


async def move(desk: Desk, push: Push, **changes: object) -> Push | None:
    """Tell how far it has come; what the ledger then knows of it."""
    await desk.ledger.commit(MovePushes(moves=(replace(move_of(push), **changes),)))
    return next((known for known in desk.ledger.pushes(push.task_id) if known.id == push.id), None)


async def sent_with(desk: Desk, task: Task, config: PushConfig = HOOK) -> Push:
    await desk.ledger.commit(Accept(task=task, digest=fingerprint(task)[0], push=config))
    (push,) = desk.ledger.pushes(task.id)
    return push


class PushingSuite(Suite):
    async def test_a_configuration_begins_where_its_task_is_and_gets_an_id(self, desk: Desk) -> None:
        await desk.taken(make_task())
        push = await put(desk, task_id(1))
        assert push.id
        assert (push.delivered, push.ended, push.attempts) == (2, None, 0)
        assert push.config == replace(HOOK, id=push.id)
        assert desk.ledger.pushes(task_id(1)) == (push,)
        assert await desk.ledger.outbox() == (push,)
        assert (await desk.ledger.counts()).pushes == 1

    async def test_one_that_comes_with_its_task_is_told_from_the_first_step_on(self, desk: Desk) -> None:
        push = await sent_with(desk, make_task())
        assert (push.delivered, push.recipient) == (0, BOB)

    async def test_the_same_task_again_makes_no_second_one(self, desk: Desk) -> None:
        push = await sent_with(desk, make_task())
        assert await sent_with(desk, make_task()) == push

    async def test_one_of_a_task_that_nobody_drains_ends_with_it_too(self, desk: Desk) -> None:
        push = await sent_with(desk, make_task(1, origin="a2a"))
        await desk.finish(await desk.take_one(), ok(task_id(1)))
        (ended,) = desk.ledger.pushes(task_id(1))
        assert ended.ended == 3
        assert await move(desk, push, delivered=3) is None

    async def test_one_for_work_that_is_done_already_knows_its_end(self, desk: Desk) -> None:
        await desk.finish(await desk.taken(same_work(1)), ok(task_id(1)))
        push = await sent_with(desk, same_work(2))
        assert (push.delivered, push.ended) == (0, 2)

    async def test_one_of_a_follower_ends_with_its_leader(self, desk: Desk) -> None:
        leased = await desk.taken(same_work(1))
        await sent_with(desk, same_work(2))
        await desk.finish(leased, ok(task_id(1)))
        (push,) = desk.ledger.pushes(task_id(2))
        assert push.ended == 2

    async def test_a_known_id_replaces_and_keeps_the_cursor(self, desk: Desk) -> None:
        await desk.taken(make_task())
        first = await put(desk, task_id(1), replace(HOOK, id="mine"))
        await move(desk, first, attempts=3, next_ms=99, failure="HTTP 500", dead=True)
        second = await put(desk, task_id(1), replace(HOOK, id="mine", url="https://hooks.example/2"))
        assert (second.key, second.delivered, second.attempts) == (first.key, 2, 0)
        assert (second.dead_at_ms, second.failure) == (None, None)
        assert second.revision > first.revision
        assert desk.ledger.pushes(task_id(1)) == (second,)

    async def test_the_same_again_under_its_id_changes_nothing(self, desk: Desk) -> None:
        await desk.send(make_task())
        first = await put(desk, task_id(1), replace(HOOK, id="mine"))
        assert await put(desk, task_id(1), replace(HOOK, id="mine")) == first

    async def test_without_an_id_each_is_another_unless_it_is_wanted_once(self, desk: Desk) -> None:
        await desk.send(make_task())
        first = await put(desk, task_id(1))
        assert await put(desk, task_id(1), once=True) == first
        assert (await put(desk, task_id(1))).id != first.id
        assert (await put(desk, task_id(1), replace(HOOK, token=None), once=True)).id != first.id
        assert len(desk.ledger.pushes(task_id(1))) == 3

    async def test_deleting_is_as_good_as_deleting_twice(self, desk: Desk) -> None:
        await desk.send(make_task())
        push = await put(desk, task_id(1))
        assert await drop(desk, task_id(1), push.id)
        assert not await drop(desk, task_id(1), push.id)
        assert desk.ledger.pushes(task_id(1)) == ()
        assert (await desk.ledger.counts()).pushes == 0

    async def test_a_task_at_anothers_door_is_not_found(self, desk: Desk) -> None:
        await desk.send(make_task())
        push = await put(desk, task_id(1))
        with refused("unknown_task", 404):
            await desk.ledger.commit(PutPush(task_id=task_id(1), recipient=CAROL.pubkey, config=HOOK))
        with refused("unknown_task", 404):
            await desk.ledger.commit(DropPush(task_id=task_id(1), recipient=CAROL.pubkey, id=push.id))
        with refused("unknown_task", 404):
            await put(desk, task_id(404))
        assert await desk.ledger.outbox() == (push,)

    async def test_a_cursor_goes_on_and_never_back(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        push = await put(desk, task_id(1))
        await desk.report(leased, "three")
        moved = await move(desk, push, delivered=3)
        assert moved is not None
        assert moved.delivered == 3
        moved = await move(desk, push, delivered=2, attempts=1, failure="HTTP 500", next_ms=7)
        assert moved is not None
        assert (moved.delivered, moved.attempts, moved.failure, moved.next_ms) == (3, 1, "HTTP 500", 7)

    async def test_what_is_said_of_an_older_configuration_is_not_heard(self, desk: Desk) -> None:
        await desk.taken(make_task())
        old = await put(desk, task_id(1), replace(HOOK, id="mine"))
        new = await put(desk, task_id(1), replace(HOOK, id="mine", url="https://hooks.example/2"))
        assert await move(desk, old, delivered=9, dead=True) == new
        await drop(desk, task_id(1), "mine")
        assert await move(desk, new, delivered=9) is None
        again = await put(desk, task_id(1), replace(HOOK, id="mine"))
        assert again.key != old.key
        assert await move(desk, old, delivered=9) == again

    async def test_the_last_delivery_ends_the_configuration_and_not_an_earlier_one(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        push = await put(desk, task_id(1))
        await desk.finish(leased, ok(task_id(1)))
        await desk.drain()
        (ended,) = desk.ledger.pushes(task_id(1))
        assert ended.ended == 3
        assert await move(desk, push, delivered=2) is not None
        assert await move(desk, push, delivered=3) is None
        assert await desk.ledger.outbox() == ()

    async def test_what_is_delivered_before_the_task_ends_does_not_end_it(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        push = await sent_with(desk, make_task(2))
        assert await move(desk, push, delivered=1) is not None
        await desk.finish(leased, ok(task_id(1)))
        assert len(await desk.ledger.outbox()) == 1

    async def test_one_given_up_is_counted_and_the_operator_tries_it_again_on_record(self, desk: Desk) -> None:
        await desk.taken(make_task())
        push = await put(desk, task_id(1))
        dead = await move(desk, push, attempts=8, failure="HTTP 500", dead=True)
        assert dead is not None
        assert dead.dead_at_ms == desk.clock()
        assert (await desk.ledger.counts()).pushes_dead == 1
        fresh = await desk.ledger.commit(RetryPush(task_id=task_id(1), by=OPERATOR, id=push.id))
        assert (fresh.dead_at_ms, fresh.attempts, fresh.delivered) == (None, 0, 2)
        assert (await desk.ledger.counts()).pushes_dead == 0
        (row,) = await desk.audit_rows()
        assert row["kind"] == {
            "type": "push_retried",
            "task_id": task_id(1),
            "push_id": push.id,
            "delivered": 2,
            "dead": True,
        }
        with refused("unknown_push", 404):
            await desk.ledger.commit(RetryPush(task_id=task_id(1), by=OPERATOR, id="other"))
        with refused("unknown_push", 404):
            await desk.ledger.commit(RetryPush(task_id=task_id(404), by=OPERATOR, id=push.id))

    async def test_configurations_are_bounded_for_a_task_and_for_all(self, engine: Engine) -> None:
        desk = Desk(await engine.open(Limits(pushes_per_task_max=2, pushes_max=6)), engine.clock)
        for number in (1, 2):
            await desk.send(make_task(number))
        await put(desk, task_id(1), replace(HOOK, id="a"))
        await put(desk, task_id(1), replace(HOOK, id="b"))
        await put(desk, task_id(1), replace(HOOK, id="b", token=None))
        with refused("too_many_pushes", 429):
            await put(desk, task_id(1))
        await put(desk, task_id(2))
        with refused("too_many_pushes", 429):
            await put(desk, task_id(2))
        with refused("too_many_pushes", 429):
            await sent_with(desk, make_task(3))
        assert await desk.ledger.entry(task_id(3)) is None, "a task is accepted with its configuration or not at all"
        elsewhere = AgentId("worker@elsewhere", BOB.pubkey)
        await desk.send(make_task(4, recipient=elsewhere))
        await put(desk, task_id(4))  # one tenant has at most half of them

    async def test_one_of_an_ended_task_can_be_read_for_a_while(self, desk: Desk) -> None:
        await desk.finish(await desk.taken(make_task()), ok(task_id(1)))
        await desk.drain()
        push = await put(desk, task_id(1))
        assert push.done
        assert desk.ledger.pushes(task_id(1)) == (push,)
        assert (await desk.sweep()).pushes == 0
        desk.clock.advance(LINGER_MS)
        assert (await desk.sweep()).pushes == 1
        assert await desk.ledger.outbox() == ()

    async def test_what_is_owed_waits_as_long_as_results_do(self, engine: Engine) -> None:
        desk = Desk(await engine.open(Limits(retention_ms=10 * LINGER_MS)), engine.clock)
        leased = await desk.taken(make_task())
        push = await put(desk, task_id(1))
        await desk.finish(leased, ok(task_id(1)))
        desk.clock.advance(9 * LINGER_MS)
        await move(desk, push, attempts=8, failure="HTTP 500", dead=True)
        desk.clock.advance(9 * LINGER_MS)
        assert (await desk.sweep()).pushes == 0
        desk.clock.advance(LINGER_MS)
        assert (await desk.sweep()).pushes == 1

    async def test_a_listener_hears_of_every_step_that_may_be_owed(self, desk: Desk) -> None:
        heard: list[TaskId] = []
        desk.ledger.on_push(heard.append)

        async def news() -> int:
            await desk.ledger.durable()
            await desk.queue()  # a turn of the loop later at the latest
            count = len(heard)
            assert set(heard) <= {task_id(1)}
            heard.clear()
            return count

        await desk.taken(make_task(2))
        leased = await desk.taken(make_task(1))
        assert not await news()
        push = await put(desk, task_id(1))
        assert await news()
        await desk.report(leased, "on it")
        assert await news()
        await move(desk, push, delivered=3)
        assert not await news(), "what the deliveries say themselves is no news to them"
        await desk.finish(leased, ok(task_id(1)))
        assert await news()
        await drop(desk, task_id(1), push.id)
        assert await news()

    async def test_no_secret_is_in_the_audit_or_in_history_or_shows_when_printed(self, desk: Desk) -> None:
        await desk.taken(make_task())
        push = await put(desk, task_id(1))
        await desk.ledger.commit(RetryPush(task_id=task_id(1), by=OPERATOR, id=push.id))
        steps = await desk.ledger.steps(task_id(1), 0, 9)
        told = f"{await desk.audit_rows()} {await desk.show(task_id(1))} {push!r} {steps}"
        for secret in ("the token", "the credentials", "hooks.example"):
            assert secret not in told


class PushKeepingSuite(RestartSuite):
    async def test_configurations_and_their_cursors_survive_compacted_or_not(
        self, desk: Desk, restart: Restart
    ) -> None:
        leased = await desk.taken(make_task(1))
        await sent_with(desk, make_task(2), replace(HOOK, id="inline"))
        first, second = [await put(desk, task_id(1), replace(HOOK, id=name)) for name in ("a", "b")]
        await desk.report(leased, "three")
        await move(desk, first, delivered=3)
        await move(desk, second, attempts=8, failure="HTTP 500", next_ms=5, dead=True)
        gone = await put(desk, task_id(1))
        await drop(desk, task_id(1), gone.id)
        await desk.finish(leased, ok(task_id(1)))
        known = {push.id: push for push in await desk.ledger.outbox()}
        assert set(known) == {"a", "b", "inline"}
        for again in range(3):
            if again:
                await desk.drain()
                await desk.ledger.compact()
            desk = await restart(desk)
            assert {push.id: push for push in await desk.ledger.outbox()} == known
            assert (await desk.ledger.counts()).pushes_dead == 1
        assert await move(desk, known["a"], delivered=4) is None
        desk = await restart(desk)
        assert {push.id for push in await desk.ledger.outbox()} == {"b", "inline"}
        assert len(await desk.ledger.steps(task_id(1), 3, 10)) == 1, "what is owed can still be read"
        desk.clock.advance(desk.ledger.limits.retention_ms)
        assert (await desk.sweep()).pushes == 1
