"""Push configurations: facts of a task, for its door alone, with a cursor that only goes on until nothing is owed."""

from __future__ import annotations

import msgspec

from covenant.ledger.machine.commands import Accept, DropPush, MovePushes, PutPush, RetryPush
from covenant.model.a2a_requests import PushAuthentication, PushConfig
from covenant.model.ids import AgentId, TaskId
from covenant.model.push import Push, move_of
from covenant.model.settings import Limits
from covenant.model.task import Task, fingerprint
from covenant.model.task_event import Step
from tests.ledger_contract.driver import LedgerDriver, refused
from tests.ledger_contract.durability import Restart, RestartSuite
from tests.ledger_contract.engine import Engine
from tests.ledger_contract.samples import BOB, CAROL, OPERATOR, make_task, ok, same_work, task_id
from tests.ledger_contract.suite import Suite

replace = msgspec.structs.replace

HOOK = PushConfig(
    url="https://hooks.example/1",
    token="the token",
    authentication=PushAuthentication(scheme="Bearer", credentials="the credentials"),
)
LINGER_MS = 600_000


async def put(driver: LedgerDriver, which: TaskId, config: PushConfig = HOOK, *, once: bool = False) -> Push:
    return await driver.ledger.commit(PutPush(task_id=which, recipient=BOB.pubkey, config=config, once=once))


async def drop(driver: LedgerDriver, which: TaskId, push_id: str) -> bool:
    return await driver.ledger.commit(DropPush(task_id=which, recipient=BOB.pubkey, id=push_id))


async def move(driver: LedgerDriver, push: Push, **changes: object) -> Push | None:
    """Tell how far it has come; what the ledger then knows of it."""
    await driver.ledger.commit(MovePushes(moves=(replace(move_of(push), **changes),)))
    return next((known for known in await driver.ledger.pushes(push.task_id) if known.id == push.id), None)


async def sent_with(driver: LedgerDriver, task: Task, config: PushConfig = HOOK) -> Push:
    await driver.ledger.commit(Accept(task=task, digest=fingerprint(task)[0], push=config))
    (push,) = await driver.ledger.pushes(task.id)
    return push


class PushSuite(Suite):
    async def test_a_configuration_begins_where_its_task_is_and_gets_an_id(self, driver: LedgerDriver) -> None:
        await driver.taken(make_task())
        push = await put(driver, task_id(1))
        assert push.id
        assert (push.delivered, push.ended, push.attempts) == (2, None, 0)
        assert push.config == replace(HOOK, id=push.id)
        assert await driver.ledger.pushes(task_id(1)) == (push,)
        assert await driver.ledger.outbox() == (push,)
        assert (await driver.ledger.counts()).pushes == 1

    async def test_one_that_comes_with_its_task_is_told_from_the_first_step_on(self, driver: LedgerDriver) -> None:
        push = await sent_with(driver, make_task())
        assert (push.delivered, push.recipient) == (0, BOB)

    async def test_the_same_task_again_makes_no_second_one(self, driver: LedgerDriver) -> None:
        push = await sent_with(driver, make_task())
        assert await sent_with(driver, make_task()) == push

    async def test_one_of_a_task_that_nobody_drains_ends_with_it_too(self, driver: LedgerDriver) -> None:
        push = await sent_with(driver, make_task(1, origin="a2a"))
        await driver.finish(await driver.take_one(), ok(task_id(1)))
        (ended,) = await driver.ledger.pushes(task_id(1))
        assert ended.ended == 3
        assert await move(driver, push, delivered=3) is None

    async def test_one_for_work_that_is_done_already_knows_its_end(self, driver: LedgerDriver) -> None:
        await driver.finish(await driver.taken(same_work(1)), ok(task_id(1)))
        push = await sent_with(driver, same_work(2))
        assert (push.delivered, push.ended) == (0, 2)

    async def test_one_of_a_follower_ends_with_its_leader(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(same_work(1))
        await sent_with(driver, same_work(2))
        await driver.finish(leased, ok(task_id(1)))
        (push,) = await driver.ledger.pushes(task_id(2))
        assert push.ended == 2

    async def test_a_known_id_replaces_and_keeps_the_cursor(self, driver: LedgerDriver) -> None:
        await driver.taken(make_task())
        first = await put(driver, task_id(1), replace(HOOK, id="mine"))
        await move(driver, first, attempts=3, next_ms=99, failure="HTTP 500", dead=True)
        second = await put(driver, task_id(1), replace(HOOK, id="mine", url="https://hooks.example/2"))
        assert (second.key, second.delivered, second.attempts) == (first.key, 2, 0)
        assert (second.dead_at_ms, second.failure) == (None, None)
        assert second.revision > first.revision
        assert await driver.ledger.pushes(task_id(1)) == (second,)

    async def test_the_same_again_under_its_id_changes_nothing(self, driver: LedgerDriver) -> None:
        await driver.send(make_task())
        first = await put(driver, task_id(1), replace(HOOK, id="mine"))
        assert await put(driver, task_id(1), replace(HOOK, id="mine")) == first

    async def test_without_an_id_each_is_another_unless_it_is_wanted_once(self, driver: LedgerDriver) -> None:
        await driver.send(make_task())
        first = await put(driver, task_id(1))
        assert await put(driver, task_id(1), once=True) == first
        assert (await put(driver, task_id(1))).id != first.id
        assert (await put(driver, task_id(1), replace(HOOK, token=None), once=True)).id != first.id
        assert len(await driver.ledger.pushes(task_id(1))) == 3

    async def test_deleting_is_as_good_as_deleting_twice(self, driver: LedgerDriver) -> None:
        await driver.send(make_task())
        push = await put(driver, task_id(1))
        assert await drop(driver, task_id(1), push.id)
        assert not await drop(driver, task_id(1), push.id)
        assert await driver.ledger.pushes(task_id(1)) == ()
        assert (await driver.ledger.counts()).pushes == 0

    async def test_a_task_at_anothers_door_is_not_found(self, driver: LedgerDriver) -> None:
        await driver.send(make_task())
        push = await put(driver, task_id(1))
        with refused("unknown_task", 404):
            await driver.ledger.commit(PutPush(task_id=task_id(1), recipient=CAROL.pubkey, config=HOOK))
        with refused("unknown_task", 404):
            await driver.ledger.commit(DropPush(task_id=task_id(1), recipient=CAROL.pubkey, id=push.id))
        with refused("unknown_task", 404):
            await put(driver, task_id(404))
        assert await driver.ledger.outbox() == (push,)

    async def test_a_cursor_goes_on_and_never_back(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        push = await put(driver, task_id(1))
        await driver.report(leased, "three")
        moved = await move(driver, push, delivered=3)
        assert moved is not None
        assert moved.delivered == 3
        moved = await move(driver, push, delivered=2, attempts=1, failure="HTTP 500", next_ms=7)
        assert moved is not None
        assert (moved.delivered, moved.attempts, moved.failure, moved.next_ms) == (3, 1, "HTTP 500", 7)

    async def test_what_is_said_of_an_older_configuration_is_not_heard(self, driver: LedgerDriver) -> None:
        await driver.taken(make_task())
        old = await put(driver, task_id(1), replace(HOOK, id="mine"))
        new = await put(driver, task_id(1), replace(HOOK, id="mine", url="https://hooks.example/2"))
        assert await move(driver, old, delivered=9, dead=True) == new
        await drop(driver, task_id(1), "mine")
        assert await move(driver, new, delivered=9) is None
        again = await put(driver, task_id(1), replace(HOOK, id="mine"))
        assert again.key != old.key
        assert await move(driver, old, delivered=9) == again

    async def test_the_last_delivery_ends_the_configuration_and_not_an_earlier_one(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        push = await put(driver, task_id(1))
        await driver.finish(leased, ok(task_id(1)))
        await driver.drain()
        (ended,) = await driver.ledger.pushes(task_id(1))
        assert ended.ended == 3
        assert await move(driver, push, delivered=2) is not None
        assert await move(driver, push, delivered=3) is None
        assert await driver.ledger.outbox() == ()

    async def test_what_is_delivered_before_the_task_ends_does_not_end_it(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        push = await sent_with(driver, make_task(2))
        assert await move(driver, push, delivered=1) is not None
        await driver.finish(leased, ok(task_id(1)))
        assert len(await driver.ledger.outbox()) == 1

    async def test_one_given_up_is_counted_and_the_operator_tries_it_again_on_record(
        self, driver: LedgerDriver
    ) -> None:
        await driver.taken(make_task())
        push = await put(driver, task_id(1))
        dead = await move(driver, push, attempts=8, failure="HTTP 500", dead=True)
        assert dead is not None
        assert dead.dead_at_ms == driver.clock()
        assert (await driver.ledger.counts()).pushes_dead == 1
        fresh = await driver.ledger.commit(RetryPush(task_id=task_id(1), by=OPERATOR, id=push.id))
        assert (fresh.dead_at_ms, fresh.attempts, fresh.delivered) == (None, 0, 2)
        assert (await driver.ledger.counts()).pushes_dead == 0
        (row,) = await driver.audit_rows()
        assert row["kind"] == {
            "type": "push_retried",
            "task_id": task_id(1),
            "push_id": push.id,
            "delivered": 2,
            "dead": True,
        }
        with refused("unknown_push", 404):
            await driver.ledger.commit(RetryPush(task_id=task_id(1), by=OPERATOR, id="other"))
        with refused("unknown_push", 404):
            await driver.ledger.commit(RetryPush(task_id=task_id(404), by=OPERATOR, id=push.id))

    async def test_configurations_are_bounded_for_a_task_and_for_all(self, engine: Engine) -> None:
        driver = LedgerDriver(await engine.open(Limits(pushes_per_task_max=2, pushes_max=6)), engine.clock)
        for number in (1, 2):
            await driver.send(make_task(number))
        await put(driver, task_id(1), replace(HOOK, id="a"))
        await put(driver, task_id(1), replace(HOOK, id="b"))
        await put(driver, task_id(1), replace(HOOK, id="b", token=None))
        with refused("too_many_pushes", 429):
            await put(driver, task_id(1))
        await put(driver, task_id(2))
        with refused("too_many_pushes", 429):
            await put(driver, task_id(2))
        with refused("too_many_pushes", 429):
            await sent_with(driver, make_task(3))
        assert await driver.ledger.entry(task_id(3)) is None, "a task is accepted with its configuration or not at all"
        elsewhere = AgentId("worker@elsewhere", BOB.pubkey)
        await driver.send(make_task(4, recipient=elsewhere))
        await put(driver, task_id(4))  # one tenant has at most half of them

    async def test_one_of_an_ended_task_can_be_read_for_a_while(self, driver: LedgerDriver) -> None:
        await driver.finish(await driver.taken(make_task()), ok(task_id(1)))
        await driver.drain()
        push = await put(driver, task_id(1))
        assert push.done
        assert await driver.ledger.pushes(task_id(1)) == (push,)
        assert (await driver.sweep()).pushes == 0
        driver.clock.advance(LINGER_MS)
        assert (await driver.sweep()).pushes == 1
        assert await driver.ledger.outbox() == ()

    async def test_what_is_owed_waits_as_long_as_results_do(self, engine: Engine) -> None:
        driver = LedgerDriver(await engine.open(Limits(retention_ms=10 * LINGER_MS)), engine.clock)
        leased = await driver.taken(make_task())
        push = await put(driver, task_id(1))
        await driver.finish(leased, ok(task_id(1)))
        driver.clock.advance(9 * LINGER_MS)
        await move(driver, push, attempts=8, failure="HTTP 500", dead=True)
        driver.clock.advance(9 * LINGER_MS)
        assert (await driver.sweep()).pushes == 0
        driver.clock.advance(LINGER_MS)
        assert (await driver.sweep()).pushes == 1

    async def test_a_listener_hears_of_every_step_that_may_be_owed(self, driver: LedgerDriver) -> None:
        heard: list[TaskId] = []
        steps: list[Step] = []

        def hear(task_id: TaskId, step: Step | None) -> None:
            heard.append(task_id)
            if step is not None:
                steps.append(step)

        driver.ledger.on_push(hear)

        async def news() -> int:
            await driver.ledger.durable()
            await driver.queue()  # a turn of the loop later at the latest
            count = len(heard)
            assert set(heard) <= {task_id(1)}
            heard.clear()
            return count

        await driver.taken(make_task(2))
        leased = await driver.taken(make_task(1))
        assert not await news()
        push = await put(driver, task_id(1))
        assert await news()
        await driver.report(leased, "on it")
        assert await news()
        await move(driver, push, delivered=3)
        assert not await news(), "what the deliveries say themselves is no news to them"
        await driver.finish(leased, ok(task_id(1)))
        assert await news()
        await drop(driver, task_id(1), push.id)
        assert await news()
        told = await driver.ledger.steps(task_id(1), 0, 10)
        assert steps == list(told[-2:]), "the report and the end, as history tells them"

    async def test_no_secret_is_in_the_audit_or_in_history_or_shows_when_printed(self, driver: LedgerDriver) -> None:
        await driver.taken(make_task())
        push = await put(driver, task_id(1))
        await driver.ledger.commit(RetryPush(task_id=task_id(1), by=OPERATOR, id=push.id))
        steps = await driver.ledger.steps(task_id(1), 0, 9)
        told = f"{await driver.audit_rows()} {await driver.show(task_id(1))} {push!r} {steps}"
        for secret in ("the token", "the credentials", "hooks.example"):
            assert secret not in told


class PushDurabilitySuite(RestartSuite):
    async def test_configurations_and_their_cursors_survive_compacted_or_not(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        leased = await driver.taken(make_task(1))
        await sent_with(driver, make_task(2), replace(HOOK, id="inline"))
        first, second = [await put(driver, task_id(1), replace(HOOK, id=name)) for name in ("a", "b")]
        await driver.report(leased, "three")
        await move(driver, first, delivered=3)
        await move(driver, second, attempts=8, failure="HTTP 500", next_ms=5, dead=True)
        gone = await put(driver, task_id(1))
        await drop(driver, task_id(1), gone.id)
        await driver.finish(leased, ok(task_id(1)))
        known = {push.id: push for push in await driver.ledger.outbox()}
        assert set(known) == {"a", "b", "inline"}
        for again in range(3):
            if again:
                await driver.drain()
                await driver.ledger.compact()
            driver = await restart(driver)
            assert {push.id: push for push in await driver.ledger.outbox()} == known
            assert (await driver.ledger.counts()).pushes_dead == 1
        assert await move(driver, known["a"], delivered=4) is None
        driver = await restart(driver)
        assert {push.id for push in await driver.ledger.outbox()} == {"b", "inline"}
        assert len(await driver.ledger.steps(task_id(1), 3, 10)) == 1, "what is owed can still be read"
        driver.clock.advance(driver.ledger.limits.retention_ms)
        assert (await driver.sweep()).pushes == 1
