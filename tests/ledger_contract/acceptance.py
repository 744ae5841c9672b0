"""Rule 4: a task is accepted once per id, whatever state it has reached. And what is refused at the door."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from covenant.ledger.contract.tasks import Parties
from covenant.ledger.machine.commands import Accept
from covenant.model.content import Text
from covenant.model.settings import Limits
from covenant.model.task import A2A
from tests.ledger_contract.driver import LedgerDriver, refused
from tests.ledger_contract.engine import Engine
from tests.ledger_contract.samples import ALICE, BOB, CAROL, idempotent, make_task, ok, task_id
from tests.ledger_contract.suite import Suite


class AcceptanceSuite(Suite):
    async def test_an_accepted_task_is_queued_for_its_recipient_as_it_was_sent(self, driver: LedgerDriver) -> None:
        task = make_task(task_kind="sum", parent=task_id(77), parts=(Text("1 + 1"),), depth=3, context_id="c")
        accepted = await driver.send(task)
        assert (accepted.task_id, accepted.duplicate, accepted.replayed, accepted.following) == (
            task.id,
            False,
            False,
            None,
        )
        assert (await driver.entry(task.id)).task == task
        assert await driver.queued_ids() == [task.id]

    async def test_a_task_sent_again_is_acknowledged_again_and_queued_once(self, driver: LedgerDriver) -> None:
        await driver.send(make_task())
        assert (await driver.send(make_task())).duplicate
        assert len(await driver.take(count=10)) == 1

    async def test_a_task_that_has_a_digest_of_earlier_rules_is_known_by_it(self, driver: LedgerDriver) -> None:
        task = make_task()
        await driver.ledger.commit(Accept(task=task, digest="before"))

        async def check() -> None:
            again = Accept(task=task, digest="now", former=("between", "before"))
            assert (await driver.ledger.commit(again)).duplicate
            with refused("duplicate_task_id", 409):
                await driver.ledger.commit(Accept(task=task, digest="now", former=("between",)))

        await check()
        await driver.finish(await driver.take_one(), ok(task.id))
        await driver.drain(ALICE)
        await check()

    async def test_equal_sends_at_the_same_moment_make_one_task(self, driver: LedgerDriver) -> None:
        answers = await asyncio.gather(*(driver.send(make_task()) for _ in range(20)))
        assert [answer.duplicate for answer in answers].count(False) == 1
        assert len(await driver.take(count=100)) == 1

    @pytest.mark.parametrize(
        "changed",
        [
            {"intent_text": "something else"},
            {"sender": CAROL},
            {"recipient": CAROL},
            {"task_kind": "sum"},
            {"deadline_ms": 2_000_000_000_000},
            {"idempotency": idempotent()},
            {"parts": (Text("more"),)},
            {"parent": task_id(9)},
            {"timeout_ms": 5},
        ],
        ids=lambda changed: next(iter(changed)),
    )
    async def test_a_known_id_with_other_content_is_refused_and_binds_nobody(
        self, driver: LedgerDriver, changed: dict[str, Any]
    ) -> None:
        await driver.send(make_task())
        with refused("duplicate_task_id", 409):
            await driver.send(make_task(**changed))
        assert await driver.ledger.parties(task_id(1)) == Parties(sender=ALICE, recipient=BOB)
        leased = await driver.take_one()
        assert leased.task == make_task()
        await driver.finish(leased, ok(leased.task.id))
        assert await driver.drain(CAROL) == ()
        assert len(await driver.drain(ALICE)) == 1

    async def test_a_duplicate_is_recognised_in_every_state_of_the_task(self, driver: LedgerDriver) -> None:
        task = make_task()

        async def both() -> None:
            assert (await driver.send(task)).duplicate
            with refused("duplicate_task_id", 409):
                await driver.send(make_task(intent_text="other"))

        await driver.send(task)
        await both()
        leased = await driver.take_one()
        await both()
        await driver.park(leased)
        await both()
        await driver.say(task.id, "that one")
        leased = await driver.take_one()
        await driver.finish(leased, ok(task.id))
        await both()
        await driver.drain()
        await both()
        await driver.ledger.audit_verify()  # waits for the archive: from here on only history knows the task
        await both()
        assert await driver.take() == ()
        assert await driver.drain() == ()

    async def test_a_deadline_that_is_past_is_refused_and_the_next_millisecond_is_not(
        self, driver: LedgerDriver
    ) -> None:
        now_ms = driver.clock()
        for deadline_ms in (1, now_ms - 1, now_ms):
            with refused("deadline_past", 400):
                await driver.send(make_task(deadline_ms=deadline_ms))
        await driver.send(make_task(deadline_ms=now_ms + 1))

    async def test_a_duplicate_is_acknowledged_though_its_deadline_is_past_by_now(self, driver: LedgerDriver) -> None:
        task = make_task(deadline_ms=driver.clock() + 10)
        await driver.send(task)
        driver.clock.advance(1_000)
        assert (await driver.send(task)).duplicate

    async def test_a_full_queue_refuses_its_recipient_and_nobody_else(self, engine: Engine) -> None:
        driver = LedgerDriver(await engine.open(Limits(queued_per_recipient_max=3)), engine.clock)
        await driver.send_all([make_task(number) for number in range(3)])
        with refused("queue_full", 429):
            await driver.send(make_task(3))
        assert (await driver.send(make_task(0))).duplicate
        await driver.send(make_task(4, recipient=CAROL))
        await driver.take(BOB)
        await driver.send(make_task(3))

    async def test_a_sender_that_never_drains_is_refused_until_it_does(self, engine: Engine) -> None:
        driver = LedgerDriver(await engine.open(Limits(undrained_per_sender_max=2)), engine.clock)
        for number in (1, 2):
            await driver.finish(await driver.taken(make_task(number)), ok(task_id(number)))
        with refused("results_undrained", 429):
            await driver.send(make_task(3))
        await driver.send(make_task(4, sender=CAROL))
        await driver.send(make_task(5, origin=A2A))  # leaves no result that waits
        assert len(await driver.drain()) == 1
        await driver.send(make_task(3))

    async def test_tasks_of_one_recipient_are_received_oldest_first(self, driver: LedgerDriver) -> None:
        await driver.send_all([make_task(number) for number in (3, 1, 2)])
        assert [leased.task.id for leased in await driver.take(count=10)] == [task_id(3), task_id(1), task_id(2)]

    async def test_a_task_to_oneself_is_a_task_like_any_other(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task(recipient=ALICE))
        await driver.finish(leased, ok(leased.task.id))
        assert len(await driver.drain(ALICE)) == 1

    async def test_an_unknown_task_has_no_sender(self, driver: LedgerDriver) -> None:
        assert await driver.ledger.parties(task_id(404)) is None
        assert await driver.ledger.entry(task_id(404)) is None

    async def test_a_recipient_is_matched_by_its_key_and_not_by_its_name(self, driver: LedgerDriver) -> None:
        renamed = type(BOB)("robert@elsewhere", BOB.pubkey)
        await driver.send(make_task(recipient=renamed))
        leased = await driver.take_one(BOB)
        await driver.finish(leased, ok(leased.task.id))
        assert len(await driver.drain(type(ALICE)("al@elsewhere", ALICE.pubkey))) == 1
