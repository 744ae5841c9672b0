"""Rules 1 and 2 over restarts: whatever was acknowledged is there again, and a crash hands nothing out twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from covenant.ledger.contract import Parties, QueueEntry
from covenant.ledger.machine.commands import Enroll, RevokeGrant, RevokeIdentity
from covenant.ledger.machine.states import State
from covenant.model.grant import REQUEUE_ACTION, Scope, send_actions
from covenant.model.repair import RetryPolicy
from covenant.testing.cast import (
    ALICE,
    BOB,
    CAROL,
    OPERATOR,
    make_grant,
    make_identity,
    make_task,
    ok,
    same_work,
    task_id,
)
from covenant.testing.desk import Desk, check_generations, refused
from covenant.testing.engine import DurableEngine
from covenant.testing.grants import give, sending
from covenant.testing.reporting import chunk, fold
from covenant.testing.suite import Suite

Restart = Callable[[Desk], Awaitable[Desk]]

STALE_MS = 300_000


class RestartSuite(Suite):
    @pytest.fixture
    def engine(self) -> DurableEngine:
        raise NotImplementedError("a subclass for an engine overrides this fixture")

    @pytest.fixture(params=["crash", "close"])
    def restart(self, engine: DurableEngine, request: pytest.FixtureRequest) -> Restart:
        """End the ledger, one way or the other, and open it again."""

        async def restarted(desk: Desk) -> Desk:
            again = engine.crash_and_reopen if request.param == "crash" else engine.close_and_reopen
            return Desk(await again(desk.ledger), engine.clock)

        return restarted


class SurvivingSuite(RestartSuite):
    async def test_acknowledged_tasks_survive_in_their_order(self, desk: Desk, restart: Restart) -> None:
        await desk.send_all([make_task(number) for number in (5, 3, 8)])
        await desk.take_one()
        await desk.requeue(task_id(5))
        desk = await restart(desk)
        assert await desk.queued_ids() == [task_id(3), task_id(8), task_id(5)]
        assert [leased.task for leased in await desk.take(count=5)] == [make_task(3), make_task(8), make_task(5)]

    async def test_tasks_sent_by_many_at_once_survive_together(self, desk: Desk, restart: Restart) -> None:
        await asyncio.gather(*(desk.send(make_task(number)) for number in range(200)))
        desk = await restart(desk)
        assert {leased.task.id for _ in range(2) for leased in await desk.take(count=100)} == {
            task_id(number) for number in range(200)
        }

    async def test_a_lease_survives_as_it_was_and_its_holder_goes_on(self, desk: Desk, restart: Restart) -> None:
        leased = await desk.taken(make_task())
        desk.clock.advance(10)
        await desk.renew(leased)
        before = await desk.entry(task_id(1))
        desk = await restart(desk)
        assert await desk.entry(task_id(1)) == before
        assert await desk.take(count=10) == ()
        await desk.report(leased, "still here")
        await desk.finish(leased, ok(task_id(1)))
        assert await desk.drain() == (ok(task_id(1)),)

    async def test_leases_keep_their_order_of_age(self, desk: Desk, restart: Restart) -> None:
        first = await desk.taken(same_work(1, "a"))
        await desk.taken(same_work(2, "b"))
        await desk.taken(same_work(3, "c"))
        await desk.renew(first)
        desk.clock.advance(STALE_MS)
        desk = await restart(desk)
        report = await desk.retry(RetryPolicy(scan_limit=2, max_requeues=9))
        assert [would.task_id for would in report.would_requeue] == [task_id(2), task_id(3)]

    async def test_attempts_go_on_counting(self, desk: Desk, restart: Restart) -> None:
        await desk.release(await desk.taken(make_task()))
        desk = await restart(desk)
        second = await desk.take_one()
        assert second.lease.attempt == 2
        await desk.requeue(task_id(1))
        desk = await restart(desk)
        assert (await desk.take_one()).lease.attempt == 3

    async def test_a_lease_of_a_lost_boot_is_marked_and_comes_first(self, desk: Desk, restart: Restart) -> None:
        await desk.taken(make_task(1, recipient=CAROL))
        await desk.taken_here(make_task(2))
        await desk.send(make_task(3))
        desk = await restart(desk)
        assert _marks(await desk.queue()) == [
            (task_id(2), "in_flight", True),
            (task_id(1), "in_flight", False),
            (task_id(3), "queued", False),
        ]
        assert (await desk.ledger.counts()).holders_lost == 1
        assert (await desk.show(task_id(2))).holder_lost
        assert await desk.take_one() is not None
        assert await desk.take() == ()

    async def test_a_lost_lease_is_repaired_by_an_operator_and_not_by_itself(
        self, desk: Desk, restart: Restart
    ) -> None:
        leased = await desk.taken_here(make_task())
        desk = await restart(desk)
        desk.clock.advance(10 * STALE_MS)
        await desk.sweep()
        await desk.retry(RetryPolicy(enabled=True))
        assert (await desk.entry(task_id(1))).lease == leased.lease
        await desk.requeue(task_id(1))
        again = await desk.take_one(node=desk.ledger.node, boot=desk.ledger.boot)
        assert (again.task.id, again.lease.attempt) == (task_id(1), 2)
        assert not any(entry.holder_lost for entry in await desk.queue())

    async def test_an_interrupted_lease_stays_marked(self, desk: Desk, restart: Restart) -> None:
        await desk.interrupt(await desk.taken(make_task()))
        desk = await restart(desk)
        assert _marks(await desk.queue()) == [(task_id(1), "in_flight", True)]

    async def test_a_requeued_task_can_still_be_answered_by_its_last_lease(self, desk: Desk, restart: Restart) -> None:
        leased = await desk.taken(make_task())
        await desk.requeue(task_id(1))
        desk = await restart(desk)
        await desk.finish(leased, ok(task_id(1)))
        assert await desk.take() == ()
        assert await desk.drain() == (ok(task_id(1)),)

    async def test_a_stale_lease_stays_stale(self, desk: Desk, restart: Restart) -> None:
        first = await desk.taken(make_task())
        await desk.requeue(task_id(1))
        await desk.take_one()
        desk = await restart(desk)
        with refused("stale_lease", 409):
            await desk.finish(first, ok(task_id(1)))

    async def test_followers_follow_on_and_are_settled_or_promoted(self, desk: Desk, restart: Restart) -> None:
        await desk.send_all([same_work(1), same_work(2), same_work(3)])
        leased = await desk.take_one()
        desk = await restart(desk)
        assert (await desk.send(same_work(4))).following == task_id(1)
        await desk.cancel(task_id(1))
        desk = await restart(desk)
        assert (await desk.entry(task_id(2))).state is State.QUEUED
        with refused("canceled", 409):
            await desk.finish(leased, ok(task_id(1)))
        await desk.finish(await desk.take_one(), ok(task_id(2)))
        desk = await restart(desk)
        assert [result.task_id for result in await desk.drain(count=9)] == [task_id(n) for n in (1, 2, 3, 4)]

    async def test_the_cache_replays_on(self, desk: Desk, restart: Restart) -> None:
        await desk.finish(await desk.taken(same_work(1)), ok(task_id(1), "42"))
        await desk.drain()
        desk = await restart(desk)
        assert (await desk.send(same_work(2))).replayed
        assert await desk.drain() == (ok(task_id(2), "42"),)

    async def test_a_receive_and_a_drain_repeated_after_a_restart_give_the_same(
        self, desk: Desk, restart: Restart
    ) -> None:
        for number in (1, 2):
            await desk.finish(await desk.taken(make_task(number)), ok(task_id(number)))
        await desk.send_all([make_task(number) for number in (3, 4, 5)])
        leases = await desk.take(count=2, request_id="r1")
        results = await desk.drain(count=2, request_id="r1")
        for _ in range(2):
            desk = await restart(desk)
            assert await desk.take(count=2, request_id="r1") == leases
            assert await desk.drain(count=2, request_id="r1") == results
        assert [leased.task.id for leased in await desk.take(count=9)] == [task_id(5)]

    async def test_a_finished_task_is_still_a_duplicate(self, desk: Desk, restart: Restart) -> None:
        leased = await desk.taken(make_task())
        await desk.finish(leased, ok(task_id(1)))
        await desk.drain()
        for _ in range(2):
            desk = await restart(desk)
            assert (await desk.send(make_task())).duplicate
            with refused("duplicate_task_id", 409):
                await desk.send(make_task(intent_text="other"))
            assert (await desk.finish(leased, ok(task_id(1)))).duplicate
            with refused("already_settled", 409):
                await desk.finish(leased, ok(task_id(1), "other"))
            assert await desk.take() == ()
            assert await desk.drain() == ()
            assert await desk.ledger.parties(task_id(1)) == Parties(sender=ALICE, recipient=BOB)

    async def test_an_undrained_result_waits_and_is_drained_once(self, desk: Desk, restart: Restart) -> None:
        for number in (2, 1):
            await desk.finish(await desk.taken(make_task(number)), ok(task_id(number)))
        desk = await restart(desk)
        assert await desk.drain() == (ok(task_id(2)),)
        desk = await restart(desk)
        assert await desk.drain(count=9) == (ok(task_id(1)),)
        desk = await restart(desk)
        assert await desk.drain(count=9) == ()

    async def test_a_parked_task_goes_on_with_its_next_message(self, desk: Desk, restart: Restart) -> None:
        leased = await desk.taken(make_task())
        parked = await desk.park(leased, 1)
        desk = await restart(desk)
        assert (await desk.park(leased, 1)).generation == parked.generation
        await desk.say(task_id(1), "that one", message_id="m1")
        desk = await restart(desk)
        assert (await desk.say(task_id(1), "that one", message_id="m1")).duplicate
        await desk.say(task_id(1), "and this one", message_id="m2")
        desk = await restart(desk)
        assert (await desk.say(task_id(1), "that one", message_id="m1")).duplicate
        second = await desk.take_one()
        assert (await desk.entry(task_id(1))).turn == 2
        await desk.finish(second, ok(task_id(1)))
        await check_generations(desk, task_id(1))

    async def test_generations_go_on_without_a_gap(self, desk: Desk, restart: Restart) -> None:
        leased = await desk.taken(make_task())
        await desk.report(leased, "one", 1)
        await desk.report(leased, chunk("left over", append=False), 2)
        desk = await restart(desk)
        assert (await desk.report(leased, chunk("left over", append=False), 2)).duplicate
        await desk.report(leased, chunk(", and more", append=True), 3)
        assert fold((await check_generations(desk, task_id(1))).updates) == {"report": "left over, and more"}
        await desk.requeue(task_id(1))
        desk = await restart(desk)
        second = await desk.take_one()
        await desk.report(second, chunk("anew", append=True), 1)
        await desk.finish(second, ok(task_id(1)))
        desk = await restart(desk)
        assert fold((await check_generations(desk, task_id(1))).updates) == {"report": "anew"}

    async def test_what_is_shown_of_a_task_is_the_same_before_and_after(self, desk: Desk, restart: Restart) -> None:
        leased = await desk.taken(make_task(parent=task_id(9)))
        await desk.report(leased, "one")
        await desk.requeue(task_id(1))
        shown = await desk.show(task_id(1))
        tree = await desk.ledger.tree(task_id(9), None)
        desk = await restart(desk)
        assert await desk.show(task_id(1)) == shown
        assert await desk.ledger.tree(task_id(9), None) == tree

    async def test_deadlines_and_timeouts_pass_while_nobody_is_there(self, desk: Desk, restart: Restart) -> None:
        now_ms = desk.clock()
        await desk.send(make_task(1, deadline_ms=now_ms + 1_000))
        await desk.taken(make_task(2, recipient=CAROL, timeout_ms=1_000))
        desk = await restart(desk)
        desk.clock.advance(999)
        swept = await desk.sweep()
        assert (swept.expired, swept.timed_out) == ((), ())
        desk.clock.advance(1)
        swept = await desk.sweep()
        assert (swept.expired, swept.timed_out) == ((task_id(1),), (task_id(2),))
        desk = await restart(desk)
        messages = [result.error_message for result in await desk.drain(count=9)]
        assert sorted(map(str, messages)) == ["Task timed out", "deadline_exceeded"]

    async def test_identities_stay_known_and_revoked_ones_stay_out(self, desk: Desk, restart: Restart) -> None:
        alice, bob = make_identity(ALICE), make_identity(BOB)
        for identity in (alice, bob):
            await desk.ledger.commit(Enroll(by=OPERATOR, identity=identity))
        await desk.ledger.commit(RevokeIdentity(by=OPERATOR, token_sha256=bob.token_sha256))
        desk = await restart(desk)
        assert desk.ledger.identity(alice.token_sha256) == alice
        revoked = desk.ledger.identity(bob.token_sha256)
        assert revoked is not None
        assert revoked.revoked_at_ms is not None
        assert desk.ledger.enrolled(BOB) is None

    async def test_grants_keep_their_scope_their_uses_and_their_end(self, desk: Desk, restart: Restart) -> None:
        action = send_actions(BOB)[0]
        await give(desk, make_grant(ALICE, action, nonce="1", max_uses=2, pins=Scope(peer_pubkey_b58=BOB.pubkey)))
        gone = await give(desk, make_grant(OPERATOR, REQUEUE_ACTION))
        await desk.ledger.commit(RevokeGrant(by=OPERATOR, signature_b58=gone.signature_b58))
        await desk.send(make_task(1), access=sending(make_task(1)))
        grants = await desk.ledger.grants()
        desk = await restart(desk)
        assert sorted(await desk.ledger.grants(), key=str) == sorted(grants, key=str)
        await desk.send(make_task(2), access=sending(make_task(2)))
        desk = await restart(desk)
        with refused("capability_missing", 403):
            await desk.send(make_task(3), access=sending(make_task(3)))

    async def test_the_audit_goes_on_as_one_chain_refusals_included(self, desk: Desk, restart: Restart) -> None:
        await desk.note("before")
        with refused("capability_missing", 403):
            await desk.send(make_task(), access=sending(make_task()))
        rows = await desk.audit_rows()
        desk = await restart(desk)
        assert await desk.audit_rows() == rows
        await desk.note("after")
        report = await desk.ledger.audit_verify()
        assert (report.valid, report.events) == (True, 3)
        assert await desk.audit_types() == ["noted", "capability_check", "noted"]

    async def test_counts_are_the_same_before_and_after(self, desk: Desk, restart: Restart) -> None:
        await desk.send_all([same_work(1), same_work(2), make_task(3)])
        await desk.taken(make_task(4, recipient=CAROL))
        await desk.park(await desk.taken(make_task(5, recipient=CAROL)))
        await desk.finish(await desk.taken(same_work(6, "k", recipient=CAROL)), ok(task_id(6)))
        before = await desk.ledger.counts()
        after = await (await restart(desk)).ledger.counts()
        for name in ("queued", "leased", "parked", "following", "settled", "cached", "last_seq", "durable_seq"):
            assert getattr(after, name) == getattr(before, name), name

    async def test_an_empty_ledger_opens_empty(self, desk: Desk, restart: Restart) -> None:
        for _ in range(3):
            desk = await restart(desk)
        assert (await desk.ledger.counts()).last_seq == 0
        assert await desk.queue() == ()


def _marks(entries: tuple[QueueEntry, ...]) -> list[tuple[str, str, bool]]:
    return [(entry.task.id, entry.state, entry.holder_lost) for entry in entries]
