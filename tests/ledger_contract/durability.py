"""Rules 1 and 2 over restarts: whatever was acknowledged is there again, and a crash hands nothing out twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from covenant.ledger.contract.tasks import Parties, QueueEntry
from covenant.ledger.machine.identity_commands import Enroll, RevokeGrant, RevokeIdentity
from covenant.ledger.machine.states import State
from covenant.model.grant import REQUEUE_ACTION, Scope, send_actions
from covenant.model.retry_policy import RetryPolicy
from tests.ledger_contract.driver import LedgerDriver, check_generations, refused
from tests.ledger_contract.engine import DurableEngine
from tests.ledger_contract.grants import give, sending
from tests.ledger_contract.samples import (
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
from tests.ledger_contract.suite import Suite
from tests.ledger_contract.updates import chunk, fold
from tests.matrices import first_of

Restart = Callable[[LedgerDriver], Awaitable[LedgerDriver]]

STALE_MS = 300_000


class RestartSuite(Suite):
    @pytest.fixture
    def engine(self) -> DurableEngine:
        raise NotImplementedError("a subclass for an engine overrides this fixture")

    @pytest.fixture(params=first_of(["crash", "close"]))
    def restart(self, engine: DurableEngine, request: pytest.FixtureRequest) -> Restart:
        """End the ledger, one way or the other, and open it again."""

        async def restarted(driver: LedgerDriver) -> LedgerDriver:
            again = engine.crash_and_reopen if request.param == "crash" else engine.close_and_reopen
            return LedgerDriver(await again(driver.ledger), engine.clock)

        return restarted


class DurabilitySuite(RestartSuite):
    async def test_acknowledged_tasks_survive_in_their_order(self, driver: LedgerDriver, restart: Restart) -> None:
        await driver.send_all([make_task(number) for number in (5, 3, 8)])
        await driver.take_one()
        await driver.requeue(task_id(5))
        driver = await restart(driver)
        assert await driver.queued_ids() == [task_id(3), task_id(8), task_id(5)]
        assert [leased.task for leased in await driver.take(count=5)] == [make_task(3), make_task(8), make_task(5)]

    async def test_tasks_sent_by_many_at_once_survive_together(self, driver: LedgerDriver, restart: Restart) -> None:
        await asyncio.gather(*(driver.send(make_task(number)) for number in range(200)))
        driver = await restart(driver)
        assert {leased.task.id for _ in range(2) for leased in await driver.take(count=100)} == {
            task_id(number) for number in range(200)
        }

    async def test_a_lease_survives_as_it_was_and_its_holder_goes_on(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        leased = await driver.taken(make_task())
        driver.clock.advance(10)
        await driver.renew(leased)
        before = await driver.entry(task_id(1))
        driver = await restart(driver)
        assert await driver.entry(task_id(1)) == before
        assert await driver.take(count=10) == ()
        await driver.report(leased, "still here")
        await driver.finish(leased, ok(task_id(1)))
        assert await driver.drain() == (ok(task_id(1)),)

    async def test_leases_keep_their_order_of_age(self, driver: LedgerDriver, restart: Restart) -> None:
        first = await driver.taken(same_work(1, "a"))
        await driver.taken(same_work(2, "b"))
        await driver.taken(same_work(3, "c"))
        await driver.renew(first)
        driver.clock.advance(STALE_MS)
        driver = await restart(driver)
        report = await driver.retry(RetryPolicy(scan_limit=2, max_requeues=9))
        assert [would.task_id for would in report.would_requeue] == [task_id(2), task_id(3)]

    async def test_attempts_go_on_counting(self, driver: LedgerDriver, restart: Restart) -> None:
        await driver.release(await driver.taken(make_task()))
        driver = await restart(driver)
        second = await driver.take_one()
        assert second.lease.attempt == 2
        await driver.requeue(task_id(1))
        driver = await restart(driver)
        assert (await driver.take_one()).lease.attempt == 3

    async def test_a_lease_of_a_lost_boot_is_marked_and_comes_first(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        await driver.taken(make_task(1, recipient=CAROL))
        await driver.taken_here(make_task(2))
        await driver.send(make_task(3))
        driver = await restart(driver)
        assert _marks(await driver.queue()) == [
            (task_id(2), "in_flight", True),
            (task_id(1), "in_flight", False),
            (task_id(3), "queued", False),
        ]
        assert (await driver.ledger.counts()).holders_lost == 1
        assert (await driver.show(task_id(2))).holder_lost
        assert await driver.take_one() is not None
        assert await driver.take() == ()

    async def test_a_lost_lease_is_repaired_by_an_operator_and_not_by_itself(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        leased = await driver.taken_here(make_task())
        driver = await restart(driver)
        driver.clock.advance(10 * STALE_MS)
        await driver.sweep()
        await driver.retry(RetryPolicy(enabled=True))
        assert (await driver.entry(task_id(1))).lease == leased.lease
        await driver.requeue(task_id(1))
        again = await driver.take_one(node=driver.ledger.node, boot=driver.ledger.boot)
        assert (again.task.id, again.lease.attempt) == (task_id(1), 2)
        assert not any(entry.holder_lost for entry in await driver.queue())

    async def test_an_interrupted_lease_stays_marked(self, driver: LedgerDriver, restart: Restart) -> None:
        await driver.interrupt(await driver.taken(make_task()))
        driver = await restart(driver)
        assert _marks(await driver.queue()) == [(task_id(1), "in_flight", True)]

    async def test_a_requeued_task_can_still_be_answered_by_its_last_lease(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        leased = await driver.taken(make_task())
        await driver.requeue(task_id(1))
        driver = await restart(driver)
        await driver.finish(leased, ok(task_id(1)))
        assert await driver.take() == ()
        assert await driver.drain() == (ok(task_id(1)),)

    async def test_a_stale_lease_stays_stale(self, driver: LedgerDriver, restart: Restart) -> None:
        first = await driver.taken(make_task())
        await driver.requeue(task_id(1))
        await driver.take_one()
        driver = await restart(driver)
        with refused("stale_lease", 409):
            await driver.finish(first, ok(task_id(1)))

    async def test_followers_follow_on_and_are_settled_or_promoted(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        await driver.send_all([same_work(1), same_work(2), same_work(3)])
        leased = await driver.take_one()
        driver = await restart(driver)
        assert (await driver.send(same_work(4))).following == task_id(1)
        await driver.cancel(task_id(1))
        driver = await restart(driver)
        assert (await driver.entry(task_id(2))).state is State.QUEUED
        with refused("canceled", 409):
            await driver.finish(leased, ok(task_id(1)))
        await driver.finish(await driver.take_one(), ok(task_id(2)))
        driver = await restart(driver)
        assert [result.task_id for result in await driver.drain(count=9)] == [task_id(n) for n in (1, 2, 3, 4)]

    async def test_the_cache_replays_on(self, driver: LedgerDriver, restart: Restart) -> None:
        await driver.finish(await driver.taken(same_work(1)), ok(task_id(1), "42"))
        await driver.drain()
        driver = await restart(driver)
        assert (await driver.send(same_work(2))).replayed
        assert await driver.drain() == (ok(task_id(2), "42"),)

    async def test_a_receive_and_a_drain_repeated_after_a_restart_give_the_same(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        for number in (1, 2):
            await driver.finish(await driver.taken(make_task(number)), ok(task_id(number)))
        await driver.send_all([make_task(number) for number in (3, 4, 5)])
        leases = await driver.take(count=2, request_id="r1")
        results = await driver.drain(count=2, request_id="r1")
        for _ in range(2):
            driver = await restart(driver)
            assert await driver.take(count=2, request_id="r1") == leases
            assert await driver.drain(count=2, request_id="r1") == results
        assert [leased.task.id for leased in await driver.take(count=9)] == [task_id(5)]

    async def test_a_finished_task_is_still_a_duplicate(self, driver: LedgerDriver, restart: Restart) -> None:
        leased = await driver.taken(make_task())
        await driver.finish(leased, ok(task_id(1)))
        await driver.drain()
        for _ in range(2):
            driver = await restart(driver)
            assert (await driver.send(make_task())).duplicate
            with refused("duplicate_task_id", 409):
                await driver.send(make_task(intent_text="other"))
            assert (await driver.finish(leased, ok(task_id(1)))).duplicate
            with refused("already_settled", 409):
                await driver.finish(leased, ok(task_id(1), "other"))
            assert await driver.take() == ()
            assert await driver.drain() == ()
            assert await driver.ledger.parties(task_id(1)) == Parties(sender=ALICE, recipient=BOB)

    async def test_an_undrained_result_waits_and_is_drained_once(self, driver: LedgerDriver, restart: Restart) -> None:
        for number in (2, 1):
            await driver.finish(await driver.taken(make_task(number)), ok(task_id(number)))
        driver = await restart(driver)
        assert await driver.drain() == (ok(task_id(2)),)
        driver = await restart(driver)
        assert await driver.drain(count=9) == (ok(task_id(1)),)
        driver = await restart(driver)
        assert await driver.drain(count=9) == ()

    async def test_a_parked_task_goes_on_with_its_next_message(self, driver: LedgerDriver, restart: Restart) -> None:
        leased = await driver.taken(make_task())
        parked = await driver.park(leased, 1)
        driver = await restart(driver)
        assert (await driver.park(leased, 1)).generation == parked.generation
        await driver.say(task_id(1), "that one", message_id="m1")
        driver = await restart(driver)
        assert (await driver.say(task_id(1), "that one", message_id="m1")).duplicate
        await driver.say(task_id(1), "and this one", message_id="m2")
        driver = await restart(driver)
        assert (await driver.say(task_id(1), "that one", message_id="m1")).duplicate
        second = await driver.take_one()
        assert (await driver.entry(task_id(1))).turn == 2
        await driver.finish(second, ok(task_id(1)))
        await check_generations(driver, task_id(1))

    async def test_generations_go_on_without_a_gap(self, driver: LedgerDriver, restart: Restart) -> None:
        leased = await driver.taken(make_task())
        await driver.report(leased, "one", 1)
        await driver.report(leased, chunk("left over", append=False), 2)
        driver = await restart(driver)
        assert (await driver.report(leased, chunk("left over", append=False), 2)).duplicate
        await driver.report(leased, chunk(", and more", append=True), 3)
        assert fold((await check_generations(driver, task_id(1))).updates) == {"report": "left over, and more"}
        await driver.requeue(task_id(1))
        driver = await restart(driver)
        second = await driver.take_one()
        await driver.report(second, chunk("anew", append=True), 1)
        await driver.finish(second, ok(task_id(1)))
        driver = await restart(driver)
        assert fold((await check_generations(driver, task_id(1))).updates) == {"report": "anew"}

    async def test_what_is_shown_of_a_task_is_the_same_before_and_after(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        leased = await driver.taken(make_task(parent=task_id(9)))
        await driver.report(leased, "one")
        await driver.requeue(task_id(1))
        shown = await driver.show(task_id(1))
        tree = await driver.ledger.tree(task_id(9), None)
        driver = await restart(driver)
        assert await driver.show(task_id(1)) == shown
        assert await driver.ledger.tree(task_id(9), None) == tree

    async def test_deadlines_and_timeouts_pass_while_nobody_is_there(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        now_ms = driver.clock()
        await driver.send(make_task(1, deadline_ms=now_ms + 1_000))
        await driver.taken(make_task(2, recipient=CAROL, timeout_ms=1_000))
        driver = await restart(driver)
        driver.clock.advance(999)
        swept = await driver.sweep()
        assert (swept.expired, swept.timed_out) == ((), ())
        driver.clock.advance(1)
        swept = await driver.sweep()
        assert (swept.expired, swept.timed_out) == ((task_id(1),), (task_id(2),))
        driver = await restart(driver)
        messages = [result.error_message for result in await driver.drain(count=9)]
        assert sorted(map(str, messages)) == ["Task timed out", "deadline_exceeded"]

    async def test_a_hold_goes_on_from_where_it_was(self, driver: LedgerDriver, restart: Restart) -> None:
        await driver.interrupt(await driver.taken_here(make_task()), hold_ms=1_000)
        driver.clock.advance(600)
        driver = await restart(driver)
        driver.clock.advance(399)
        assert (await driver.sweep()).interrupted == ()
        driver = await restart(driver)
        driver.clock.advance(1)
        assert (await driver.sweep()).interrupted == (task_id(1),)
        driver = await restart(driver)
        assert (await driver.show(task_id(1))).cause == "interrupted"

    async def test_identities_stay_known_and_revoked_ones_stay_out(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        alice, bob = make_identity(ALICE), make_identity(BOB)
        for identity in (alice, bob):
            await driver.ledger.commit(Enroll(by=OPERATOR, identity=identity))
        await driver.ledger.commit(RevokeIdentity(by=OPERATOR, token_sha256=bob.token_sha256))
        driver = await restart(driver)
        assert driver.ledger.identity(alice.token_sha256) == alice
        revoked = driver.ledger.identity(bob.token_sha256)
        assert revoked is not None
        assert revoked.revoked_at_ms is not None
        assert driver.ledger.enrolled(BOB) is None

    async def test_grants_keep_their_scope_their_uses_and_their_end(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        action = send_actions(BOB)[0]
        await give(driver, make_grant(ALICE, action, nonce="1", max_uses=2, pins=Scope(peer_pubkey_b58=BOB.pubkey)))
        gone = await give(driver, make_grant(OPERATOR, REQUEUE_ACTION))
        await driver.ledger.commit(RevokeGrant(by=OPERATOR, signature_b58=gone.signature_b58))
        await driver.send(make_task(1), access=sending(make_task(1)))
        grants = await driver.ledger.grants()
        driver = await restart(driver)
        assert sorted(await driver.ledger.grants(), key=str) == sorted(grants, key=str)
        await driver.send(make_task(2), access=sending(make_task(2)))
        driver = await restart(driver)
        with refused("capability_missing", 403):
            await driver.send(make_task(3), access=sending(make_task(3)))

    async def test_the_audit_goes_on_as_one_chain_refusals_included(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        await driver.note("before")
        with refused("capability_missing", 403):
            await driver.send(make_task(), access=sending(make_task()))
        rows = await driver.audit_rows()
        driver = await restart(driver)
        assert await driver.audit_rows() == rows
        await driver.note("after")
        report = await driver.ledger.audit_verify()
        assert (report.valid, report.events) == (True, 3)
        assert await driver.audit_types() == ["noted", "capability_check", "noted"]

    async def test_counts_are_the_same_before_and_after(self, driver: LedgerDriver, restart: Restart) -> None:
        await driver.send_all([same_work(1), same_work(2), make_task(3)])
        await driver.taken(make_task(4, recipient=CAROL))
        await driver.park(await driver.taken(make_task(5, recipient=CAROL)))
        await driver.finish(await driver.taken(same_work(6, "k", recipient=CAROL)), ok(task_id(6)))
        before = await driver.ledger.counts()
        after = await (await restart(driver)).ledger.counts()
        for name in ("queued", "leased", "parked", "following", "settled", "cached", "commits"):
            assert getattr(after, name) == getattr(before, name), name

    async def test_an_empty_ledger_opens_empty(self, driver: LedgerDriver, restart: Restart) -> None:
        for _ in range(3):
            driver = await restart(driver)
        assert (await driver.ledger.counts()).commits == 0
        assert await driver.queue() == ()


def _marks(entries: tuple[QueueEntry, ...]) -> list[tuple[str, str, bool]]:
    return [(entry.task.id, entry.state, entry.holder_lost) for entry in entries]
