"""What people see: the queue, recent tasks and results, one task in full, the tree under a task."""

from __future__ import annotations

from typing import Final

from covenant.ledger.contract.task_query import TaskQuery
from covenant.ledger.contract.tasks import Parties, QueueQuery, TaskScope
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.samples import ALICE, BOB, CAROL, DAVE, make_task, ok, same_work, task_id, unsafe
from tests.ledger_contract.suite import Suite

LARGE: Final = 3 << 20


class LargePageSuite(Suite):
    async def test_what_is_looked_at_is_bounded_in_bytes_whatever_the_limit(self, driver: LedgerDriver) -> None:
        """One more than fits is read, so that a door knows that there are more."""
        for number in range(1, 7):
            await driver.send(make_task(number, intent_text="x" * LARGE))
        expected = [task_id(number) for number in (6, 5, 4)]
        assert [task.id for task in await driver.ledger.recent_tasks(None, 100)] == expected
        assert [line.task.id for line in (await driver.ledger.queue(QueueQuery(limit=100))).tasks] == [
            task_id(number) for number in (1, 2, 3)
        ]
        for number in range(1, 7):
            await driver.finish(await driver.take_one(), ok(task_id(number), "y" * LARGE))
        assert [result.task_id for result in await driver.ledger.recent_results(None, 100)] == expected
        queue = await driver.ledger.queue(QueueQuery(limit=100))
        assert [result.task_id for result in queue.results] == [task_id(number) for number in (1, 2, 3)]
        assert len((await driver.ledger.find(TaskQuery(limit=100))).tasks) == 6

    async def test_a_found_task_tells_the_beginning_of_what_its_sender_named(self, driver: LedgerDriver) -> None:
        long = "n" * 5_000
        task = make_task(1, task_kind=long, context_id=long, idempotency=unsafe(long))
        await driver.finish(await driver.taken(task), ok(task.id))
        await driver.send(make_task(2, task_kind=long, context_id=long, idempotency=unsafe(long)))
        for found in (await driver.ledger.find(TaskQuery(task_kind=long))).tasks:
            assert {found.task_kind, found.context_id, found.key} == {long[:1_000]}
        assert len((await driver.ledger.find(TaskQuery(key=long, context=long))).tasks) == 2

    async def test_a_found_task_tells_its_deadline_however_late_it_is(self, driver: LedgerDriver) -> None:
        deadlines = {
            task_id(number): late for number, late in enumerate((None, 2**63 - 2, 2**63 - 1, 2**63, 2**64 - 1), 1)
        }
        for number, late in enumerate(deadlines.values(), 1):
            await driver.send(make_task(number, deadline_ms=late))

        async def told() -> dict[str, int | None]:
            return {found.task_id: found.deadline_ms for found in (await driver.ledger.find(TaskQuery())).tasks}

        assert await told() == deadlines
        for _ in deadlines:
            leased = await driver.take_one()
            await driver.finish(leased, ok(leased.task.id))
            await driver.drain()
        assert await told() == deadlines


class QuerySuite(Suite):
    async def test_a_task_outside_the_scope_has_no_steps_and_one_inside_has_all_live_or_finished(
        self, driver: LedgerDriver
    ) -> None:
        task = make_task(1, tenant="acme")
        await driver.taken(task)
        for ended in (False, True):
            if ended:
                await driver.settle(ok(task.id))
                await driver.drain()
            known = await driver.ledger.steps(task.id, 0, 100)
            assert known
            inside = (
                TaskScope(recipient=BOB.pubkey),
                TaskScope(recipient=BOB.pubkey, sender=ALICE.pubkey),
                TaskScope(tenant="acme", sender=ALICE.pubkey),
            )
            outside = (
                TaskScope(recipient=CAROL.pubkey),
                TaskScope(recipient=BOB.pubkey, sender=CAROL.pubkey),
                TaskScope(tenant="other"),
            )
            assert [await driver.ledger.steps(task.id, 0, 100, scope) for scope in inside] == [known] * 3
            assert [list(await driver.ledger.steps(task.id, 0, 100, scope)) for scope in outside] == [[]] * 3
            parties = Parties(sender=ALICE, recipient=BOB, tenant="acme")
            assert (await driver.ledger.parties(task.id), driver.ledger.may_know(task.id)) == (parties, True)
            await driver.send(make_task(2 + ended))
            tenants = await driver.ledger.tenants_of([task.id, task_id(2), task_id(404)])
            assert tenants == {task.id: "acme", task_id(2): None}
        assert await driver.ledger.tenants_of([]) == {}

    async def test_the_queue_shows_the_longest_held_leases_first_and_then_what_waits(
        self, driver: LedgerDriver
    ) -> None:
        await driver.send_all([make_task(number) for number in (1, 2, 3, 4)])
        for _ in (1, 2):
            await driver.take_one()
            driver.clock.advance(1)
        entries = await driver.queue()
        assert [(entry.task.id, entry.state) for entry in entries] == [
            (task_id(1), "in_flight"),
            (task_id(2), "in_flight"),
            (task_id(3), "queued"),
            (task_id(4), "queued"),
        ]
        assert [entry.attempt for entry in entries] == [1, 1, 0, 0]
        assert entries[0].leased_to == BOB
        assert entries[2].lease_id is None

    async def test_a_queue_limit_applies_after_the_filters_and_after_who_may_see(self, driver: LedgerDriver) -> None:
        await driver.send_all([make_task(number, recipient=CAROL) for number in range(1, 30)])
        await driver.send(make_task(30, sender=DAVE, recipient=BOB, deadline_ms=driver.clock() + 50))
        await driver.take(CAROL, 15)
        assert [entry.task.id for entry in await driver.queue(viewer=DAVE.pubkey, limit=1)] == [task_id(30)]
        assert [entry.task.id for entry in await driver.queue(deadline_within_ms=50, limit=1)] == [task_id(30)]
        assert len(await driver.queue(state_filter="queued", limit=100)) == 15
        assert len(await driver.queue(state_filter="in_flight", limit=100)) == 15
        assert len(await driver.queue(state_filter="queued", limit=3)) == 3

    async def test_a_deadline_filter_keeps_what_is_due_within_and_what_is_past(self, driver: LedgerDriver) -> None:
        await driver.send_all([make_task(n, deadline_ms=driver.clock() + 100 * n) for n in (1, 2, 3)])
        await driver.send(make_task(4))
        driver.clock.advance(150)
        assert [entry.task.id for entry in await driver.queue(deadline_within_ms=50)] == [task_id(1), task_id(2)]

    async def test_an_age_filter_binds_leases_and_lets_what_waits_pass(self, driver: LedgerDriver) -> None:
        await driver.send_all([make_task(number) for number in (1, 2, 3)])
        await driver.take_one()
        driver.clock.advance(1_000)
        await driver.take_one()
        assert [entry.task.id for entry in await driver.queue(min_lease_age_ms=1_000)] == [task_id(1), task_id(3)]

    async def test_a_viewer_sees_tasks_it_sent_received_or_holds_and_no_others(self, driver: LedgerDriver) -> None:
        await driver.send(make_task(1, sender=ALICE, recipient=BOB))
        await driver.send(make_task(2, sender=CAROL, recipient=ALICE))
        await driver.send(make_task(3, sender=CAROL, recipient=BOB))
        await driver.take(DAVE, 1, everyone=True)
        seen = {
            who.display: {entry.task.id for entry in await driver.queue(viewer=who.pubkey)}
            for who in (ALICE, BOB, CAROL, DAVE)
        }
        assert seen == {
            ALICE.display: {task_id(1), task_id(2)},
            BOB.display: {task_id(1), task_id(3)},
            CAROL.display: {task_id(2), task_id(3)},
            DAVE.display: {task_id(1)},
        }

    async def test_undrained_results_are_listed_beside_the_queue_to_their_sender(self, driver: LedgerDriver) -> None:
        for number, sender in ((1, ALICE), (2, CAROL)):
            await driver.finish(await driver.taken(make_task(number, sender=sender)), ok(task_id(number)))
        queue = await driver.ledger.queue(QueueQuery(viewer=CAROL.pubkey))
        assert queue.results == (ok(task_id(2)),)
        assert len((await driver.ledger.queue(QueueQuery())).results) == 2

    async def test_recent_lists_take_nothing_and_limit_after_who_may_see(self, driver: LedgerDriver) -> None:
        await driver.send(make_task(1, sender=DAVE))
        await driver.send_all([make_task(number) for number in range(2, 20)])
        for _ in range(2):
            assert [task.id for task in await driver.ledger.recent_tasks(DAVE.pubkey, 1)] == [task_id(1)]
        assert [task.id for task in await driver.ledger.recent_tasks(None, 2)] == [task_id(19), task_id(18)]
        for leased in await driver.take(count=3):
            await driver.finish(leased, ok(leased.task.id))
        for _ in range(2):
            assert [result.task_id for result in await driver.ledger.recent_results(DAVE.pubkey, 1)] == [task_id(1)]
        results = await driver.ledger.recent_results(ALICE.pubkey, 5)
        assert [result.task_id for result in results] == [task_id(3), task_id(2)]

    async def test_a_task_is_shown_with_all_its_leases_and_how_each_ended(self, driver: LedgerDriver) -> None:
        await driver.release(await driver.taken(make_task()), "no room")
        await driver.take_one()
        await driver.requeue(task_id(1), reason="gone")
        driver.clock.advance(5)
        leased = await driver.take_one()
        shown = await driver.show(task_id(1))
        assert [(lease.attempt, lease.turn) for lease in shown.leases] == [(1, 1), (2, 1), (3, 1)]
        assert shown.leases[-1].outcome is None
        assert shown.leases[-1].leased_at_ms == driver.clock()
        await driver.finish(leased, ok(task_id(1)))
        shown = await driver.show(task_id(1))
        assert all(lease.outcome is not None for lease in shown.leases)
        assert [lease.reason for lease in shown.leases[:2]] == ["no room", "gone"]
        assert (shown.state, shown.result, shown.attempt) == ("result_pending", ok(task_id(1)), 3)

    async def test_a_finished_task_is_shown_as_before_when_only_history_knows_it(self, driver: LedgerDriver) -> None:
        await driver.finish(await driver.taken(make_task()), ok(task_id(1)))
        before = await driver.show(task_id(1))
        await driver.drain()
        after = await driver.show(task_id(1))
        assert await driver.ledger.parties(task_id(1)) == Parties(sender=ALICE, recipient=BOB)
        assert (after.state, after.result, after.leases, after.updates) == (
            "resolved",
            before.result,
            before.leases,
            before.updates,
        )

    async def test_an_unknown_task_shows_nothing(self, driver: LedgerDriver) -> None:
        assert await driver.ledger.show(task_id(404), None, 10) is None

    async def test_the_tree_under_a_task_holds_its_children_and_theirs(self, driver: LedgerDriver) -> None:
        await driver.send(make_task(1))
        await driver.send_all([make_task(2, parent=task_id(1)), make_task(3, parent=task_id(1))])
        await driver.send(make_task(4, parent=task_id(3)))
        tree = await driver.ledger.tree(task_id(1), None)
        assert tree.task == make_task(1)
        assert [child.task_id for child in tree.children] == [task_id(2), task_id(3)]
        assert [child.task_id for child in tree.children[1].children] == [task_id(4)]

    async def test_the_tree_under_an_unknown_root_has_no_task_at_its_top(self, driver: LedgerDriver) -> None:
        await driver.send(make_task(1, parent=task_id(99)))
        tree = await driver.ledger.tree(task_id(99), None)
        assert (tree.task, tree.state) == (None, None)
        assert [child.task_id for child in tree.children] == [task_id(1)]

    async def test_a_tree_of_tasks_that_name_each_other_as_parents_ends(self, driver: LedgerDriver) -> None:
        await driver.send(make_task(1, parent=task_id(2)))
        await driver.send(make_task(2, parent=task_id(1)))
        tree = await driver.ledger.tree(task_id(1), None)
        assert tree.task_id == task_id(1)

    async def test_counts_say_how_many_are_where(self, driver: LedgerDriver) -> None:
        await driver.send_all([same_work(1), same_work(2), make_task(3)])
        await driver.taken(make_task(4, recipient=CAROL))
        await driver.park(await driver.taken(make_task(5, recipient=CAROL)))
        await driver.finish(await driver.taken(same_work(6, "k", recipient=CAROL)), ok(task_id(6)))
        driver.clock.advance(7)
        counts = await driver.ledger.counts()
        assert (counts.queued, counts.following, counts.leased) == (2, 1, 1)
        assert (counts.parked, counts.settled, counts.cached) == (1, 1, 1)
        assert counts.oldest_lease_age_ms == 7
        assert counts.failure is None

    async def test_a_tenant_lists_its_own_tasks_whoever_they_are_for_the_newest_first(
        self, driver: LedgerDriver
    ) -> None:
        await driver.send(make_task(1, tenant="a", origin="a2a", recipient=BOB))
        await driver.send(make_task(2, tenant="b", origin="a2a", recipient=BOB))
        await driver.send(make_task(3, tenant="a", origin="simple", recipient=CAROL, context_id="c"))
        await driver.send(make_task(4))
        await driver.take_one()
        listed = await driver.ledger.of_tenant("a", 10)
        assert [(row.task_id, row.state, row.origin) for row in listed] == [
            (task_id(3), "submitted", "simple"),
            (task_id(1), "working", "a2a"),
        ]
        assert (listed[0].agent_id, listed[0].context_id) == (CAROL.display.partition("@")[0], "c")
        assert [row.task_id for row in await driver.ledger.of_tenant("a", 1)] == [task_id(3)]
        assert [row.task_id for row in await driver.ledger.of_tenant("a", 10, simple=True)] == [task_id(3)]
        assert await driver.ledger.of_tenant("", 10) == ()
