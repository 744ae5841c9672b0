"""Rule 4: a task is accepted once per id, whatever state it has reached. And what is refused at the door."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from covenant.ledger.contract import Parties
from covenant.ledger.machine.view import Limits
from covenant.model.content import Text
from covenant.testing.cast import ALICE, BOB, CAROL, idempotent, make_task, ok, task_id
from covenant.testing.desk import Desk, refused
from covenant.testing.engine import Engine
from covenant.testing.suite import Suite


class SendingSuite(Suite):
    async def test_an_accepted_task_is_queued_for_its_recipient_as_it_was_sent(self, desk: Desk) -> None:
        task = make_task(task_kind="sum", parent=task_id(77), parts=(Text("1 + 1"),), depth=3, context_id="c")
        accepted = await desk.send(task)
        assert (accepted.task_id, accepted.duplicate, accepted.replayed, accepted.following) == (
            task.id,
            False,
            False,
            None,
        )
        assert (await desk.entry(task.id)).task == task
        assert await desk.queued_ids() == [task.id]

    async def test_a_task_sent_again_is_acknowledged_again_and_queued_once(self, desk: Desk) -> None:
        await desk.send(make_task())
        assert (await desk.send(make_task())).duplicate
        assert len(await desk.take(count=10)) == 1

    async def test_equal_sends_at_the_same_moment_make_one_task(self, desk: Desk) -> None:
        answers = await asyncio.gather(*(desk.send(make_task()) for _ in range(20)))
        assert [answer.duplicate for answer in answers].count(False) == 1
        assert len(await desk.take(count=100)) == 1

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
        self, desk: Desk, changed: dict[str, Any]
    ) -> None:
        await desk.send(make_task())
        with refused("duplicate_task_id", 409):
            await desk.send(make_task(**changed))
        assert await desk.ledger.parties(task_id(1)) == Parties(sender=ALICE, recipient=BOB)
        leased = await desk.take_one()
        assert leased.task == make_task()
        await desk.finish(leased, ok(leased.task.id))
        assert await desk.drain(CAROL) == ()
        assert len(await desk.drain(ALICE)) == 1

    async def test_a_duplicate_is_recognised_in_every_state_of_the_task(self, desk: Desk) -> None:
        task = make_task()

        async def both() -> None:
            assert (await desk.send(task)).duplicate
            with refused("duplicate_task_id", 409):
                await desk.send(make_task(intent_text="other"))

        await desk.send(task)
        await both()
        leased = await desk.take_one()
        await both()
        await desk.park(leased)
        await both()
        await desk.say(task.id, "that one")
        leased = await desk.take_one()
        await desk.finish(leased, ok(task.id))
        await both()
        await desk.drain()
        await both()
        await desk.ledger.audit_verify()  # waits for the archive: from here on only history knows the task
        await both()
        assert await desk.take() == ()
        assert await desk.drain() == ()

    async def test_a_deadline_that_is_past_is_refused_and_the_next_millisecond_is_not(self, desk: Desk) -> None:
        now_ms = desk.clock()
        for deadline_ms in (1, now_ms - 1, now_ms):
            with refused("deadline_past", 400):
                await desk.send(make_task(deadline_ms=deadline_ms))
        await desk.send(make_task(deadline_ms=now_ms + 1))

    async def test_a_duplicate_is_acknowledged_though_its_deadline_is_past_by_now(self, desk: Desk) -> None:
        task = make_task(deadline_ms=desk.clock() + 10)
        await desk.send(task)
        desk.clock.advance(1_000)
        assert (await desk.send(task)).duplicate

    async def test_a_full_queue_refuses_its_recipient_and_nobody_else(self, engine: Engine) -> None:
        desk = Desk(await engine.open(Limits(queued_per_recipient_max=3)), engine.clock)
        await desk.send_all([make_task(number) for number in range(3)])
        with refused("queue_full", 429):
            await desk.send(make_task(3))
        assert (await desk.send(make_task(0))).duplicate
        await desk.send(make_task(4, recipient=CAROL))
        await desk.take(BOB)
        await desk.send(make_task(3))

    async def test_a_sender_that_never_drains_is_refused_until_it_does(self, engine: Engine) -> None:
        desk = Desk(await engine.open(Limits(undrained_per_sender_max=2)), engine.clock)
        for number in (1, 2):
            await desk.finish(await desk.taken(make_task(number)), ok(task_id(number)))
        with refused("results_undrained", 429):
            await desk.send(make_task(3))
        await desk.send(make_task(4, sender=CAROL))
        assert len(await desk.drain()) == 1
        await desk.send(make_task(3))

    async def test_tasks_of_one_recipient_are_received_oldest_first(self, desk: Desk) -> None:
        await desk.send_all([make_task(number) for number in (3, 1, 2)])
        assert [leased.task.id for leased in await desk.take(count=10)] == [task_id(3), task_id(1), task_id(2)]

    async def test_a_task_to_oneself_is_a_task_like_any_other(self, desk: Desk) -> None:
        leased = await desk.taken(make_task(recipient=ALICE))
        await desk.finish(leased, ok(leased.task.id))
        assert len(await desk.drain(ALICE)) == 1

    async def test_an_unknown_task_has_no_sender(self, desk: Desk) -> None:
        assert await desk.ledger.parties(task_id(404)) is None
        assert await desk.ledger.entry(task_id(404)) is None

    async def test_a_recipient_is_matched_by_its_key_and_not_by_its_name(self, desk: Desk) -> None:
        renamed = type(BOB)("robert@elsewhere", BOB.pubkey)
        await desk.send(make_task(recipient=renamed))
        leased = await desk.take_one(BOB)
        await desk.finish(leased, ok(leased.task.id))
        assert len(await desk.drain(type(ALICE)("al@elsewhere", ALICE.pubkey))) == 1
