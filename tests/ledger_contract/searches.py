"""Finding tasks: each filter, alone and with others, over live and finished tasks; in order, by pages, and counted."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from covenant.ledger.contract.task_query import AgentLanes, FoundTask, LaneCounts, QueueDepth, TaskQuery
from covenant.ledger.contract.tasks import ListQuery
from covenant.ledger.machine.states import DRAINED, FOLLOWING, LEASED, PARKED, QUEUED, SETTLED
from covenant.model.task import Ending, Target
from covenant.model.task_event import Began, Interruption
from tests.ledger_contract.driver import LedgerDriver, refused
from tests.ledger_contract.samples import (
    ALICE,
    BOB,
    CAROL,
    DAVE,
    OPERATOR,
    failed,
    make_task,
    ok,
    same_work,
    task_id,
    unsafe,
)
from tests.ledger_contract.suite import Suite

STEP_MS: Final = 10
"""Between one task and the next."""


async def course(driver: LedgerDriver) -> int:
    """Ten tasks, one in each state and of each kind; when the first was sent."""
    start_ms = driver.clock()

    async def sent(number: int, **fields: Any) -> None:
        await driver.send(make_task(number, **fields))
        driver.clock.advance(STEP_MS)

    await sent(1, context_id="talk", tenant="acme", origin="a2a")  # drained
    await driver.finish(await driver.take_one(), ok(task_id(1)))
    await driver.drain()
    await sent(2, task_kind="invoice", intent_text="Pay 100% of the INVOICE")  # failed, drained
    await driver.finish(await driver.take_one(), failed(task_id(2), "no money"))
    await driver.drain()
    await sent(3, parent=task_id(1), idempotency=unsafe("key-3"))  # failed, its result waits
    await driver.finish(await driver.take_one(), failed(task_id(3)))
    await sent(4, recipient=CAROL, sender=DAVE, tenant="acme", context_id="talk")  # canceled
    await driver.cancel(task_id(4), by=DAVE)
    await sent(5)  # in flight, a second attempt
    await driver.take_one()
    await driver.requeue(task_id(5))
    await driver.take_one()
    await sent(6, context_id="talk")  # parked
    await driver.park(await driver.take_one())
    await driver.send(same_work(7))  # queued
    driver.clock.advance(STEP_MS)
    await driver.send(same_work(8))  # following
    driver.clock.advance(STEP_MS)
    await sent(9, sender=CAROL, recipient=DAVE, parent=task_id(1), target=Target(name="far"))  # queued
    await sent(10, sender=DAVE, recipient=DAVE, deadline_ms=start_ms + 10_000_000)  # queued
    return start_ms


def numbers(tasks: tuple[FoundTask, ...]) -> list[int]:
    return [int(task.task_id[-12:], 16) for task in tasks]


async def found(driver: LedgerDriver, **query: Any) -> list[int]:
    """The numbers of what a query leaves: on one page, by pages of two and from the other end, and counted."""
    whole = await driver.ledger.find(TaskQuery(limit=200, count=True, **query))
    assert whole.next is None
    assert (whole.total, whole.at_least) == (len(whole.tasks), False)
    paged: list[int] = []
    after = ""
    while True:
        page = await driver.ledger.find(TaskQuery(limit=2, after=after, **query))
        assert len(page.tasks) <= 2
        assert page.total is None
        paged += numbers(page.tasks)
        if page.next is None:
            break
        after = page.next
    turned = await driver.ledger.find(TaskQuery(limit=200, ascending=True, **query))
    assert numbers(whole.tasks) == paged == numbers(turned.tasks)[::-1]
    return paged


class SearchSuite(Suite):
    async def test_every_filter_leaves_what_it_says_newest_first(self, driver: LedgerDriver) -> None:
        start_ms = await course(driver)
        expected: tuple[tuple[dict[str, Any], list[int]], ...] = (
            ({}, [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]),
            ({"states": (QUEUED,)}, [10, 9, 7]),
            ({"states": (LEASED,)}, [5]),
            ({"states": (PARKED,)}, [6]),
            ({"states": (FOLLOWING,)}, [8]),
            ({"states": (SETTLED,)}, [4, 3]),
            ({"states": (DRAINED,)}, [2, 1]),
            ({"states": (PARKED, FOLLOWING, DRAINED)}, [8, 6, 2, 1]),
            ({"outcomes": (Ending.FAILED,)}, [3, 2]),
            ({"outcomes": (Ending.COMPLETED,)}, [1]),
            ({"outcomes": (Ending.FAILED, Ending.CANCELED)}, [4, 3, 2]),
            ({"outcomes": (Ending.REJECTED,)}, []),
            ({"agent": DAVE.display}, [10, 9]),
            ({"agent": "nobody@here"}, []),
            ({"agent": BOB.display, "outcomes": (Ending.FAILED,)}, [3, 2]),
            ({"agent": BOB.display, "states": (QUEUED, FOLLOWING)}, [8, 7]),
            ({"sender": DAVE.display}, [10, 4]),
            ({"tenant": "acme"}, [4, 1]),
            ({"within": "acme"}, [4, 1]),
            ({"within": "acme", "tenant": "other"}, []),
            ({"tenant": "acme", "outcomes": (Ending.COMPLETED,)}, [1]),
            ({"task_kind": "invoice"}, [8, 7, 2]),
            ({"origin": "a2a"}, [1]),
            ({"origin": "mailbox", "states": (DRAINED,)}, [2]),
            ({"parent": task_id(1)}, [9, 3]),
            ({"parent": task_id(2)}, []),
            ({"context": "talk"}, [6, 4, 1]),
            ({"context": "other"}, []),
            ({"key": "key-3"}, [3]),
            ({"key": "invoice-7"}, [8, 7]),
            ({"cause": "cancel"}, [4]),
            ({"cause": "result"}, [3, 2, 1]),
            ({"attempt_min": 2}, [5]),
            ({"attempt_min": 1}, [6, 5, 3, 2, 1]),
            ({"since_ms": start_ms + 4 * STEP_MS}, [10, 9, 8, 7, 6, 5]),
            ({"until_ms": start_ms + 4 * STEP_MS}, [4, 3, 2, 1]),
            ({"since_ms": start_ms + STEP_MS, "until_ms": start_ms + 3 * STEP_MS}, [3, 2]),
            ({"agent": BOB.display, "since_ms": start_ms + 2 * STEP_MS, "states": (SETTLED,)}, [3]),
            ({"interruptions": tuple(Interruption)}, [6]),
            ({"interruptions": (Interruption.AUTH_REQUIRED,)}, []),
            ({"states": (PARKED,), "interruptions": (Interruption.INPUT_REQUIRED,)}, [6]),
            ({"moved_until_ms": start_ms + 2 * STEP_MS}, [1]),
            ({"states": (PARKED,), "moved_until_ms": start_ms}, []),
            ({"id": task_id(10)}, [10]),
            ({"id": task_id(10)[:-1]}, [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]),
            ({"id": task_id(10)[:3], "task_kind": "invoice"}, [8, 7, 2]),
            ({"id": "0000000f"}, []),
            ({"text": "the invoice"}, [2]),
            ({"text": "WORK 1"}, [10, 1]),
            ({"text": "100%"}, [2]),
            ({"text": "1_0"}, []),
            ({"text": "work", "task_kind": "invoice"}, [8, 7]),
        )
        for query, left in expected:
            assert (query, await found(driver, **query)) == (query, sorted(left, reverse=True))

    async def test_a_context_that_is_called_like_a_task_holds_that_task_and_those_that_name_it(
        self, driver: LedgerDriver
    ) -> None:
        """A task that names no context is in one that is called like itself."""
        named = task_id(1)
        for number, context in ((1, named), (2, named), (3, task_id(3)), (4, named), (5, task_id(4))):
            await driver.send(make_task(number, context_id=context, tenant="acme", origin="a2a"))
        of_all = ListQuery(recipient=BOB.pubkey, context_id=named)
        for ended in range(5):  # also while all, or some, of them are live
            assert await found(driver, context=named) == [4, 2, 1]
            assert await found(driver, context=task_id(3)) == [3]
            assert await found(driver, context=task_id(4)) == [5]
            assert (await driver.ledger.listing(of_all)).total == 3, ended
            first = await driver.ledger.listing(msgspec.structs.replace(of_all, limit=2))
            rest = await driver.ledger.listing(msgspec.structs.replace(of_all, limit=2, after=first.next))
            begun = [steps[0].what for page in (first, rest) for steps in page.tasks]
            listed = {step.task.id for step in begun if isinstance(step, Began)}
            assert listed == {task_id(number) for number in (1, 2, 4)}, ended
            (leased,) = await driver.take()
            await driver.finish(leased, ok(leased.task.id))
            await driver.drain()
        assert await found(driver, context=named) == [4, 2, 1]

    async def test_an_identity_finds_what_it_sent_and_what_is_for_it_and_nothing_else(
        self, driver: LedgerDriver
    ) -> None:
        await course(driver)
        carol: dict[str, Any] = {"viewer": CAROL.pubkey, "viewer_names": (CAROL.display,)}
        assert await found(driver, viewer=DAVE.pubkey, viewer_names=(DAVE.display, "dave@before")) == [10, 9, 4]
        assert await found(driver, **carol) == [9, 4]
        assert await found(driver, **carol, states=(QUEUED,)) == [9]
        assert await found(driver, **carol, agent=BOB.display) == []
        assert await found(driver, **carol, id=task_id(5)) == []
        assert await found(driver, viewer=OPERATOR.pubkey, viewer_names=(DAVE.display,)) == []
        renamed = msgspec.structs.replace(CAROL, display="carol@elsewhere")
        await driver.send(make_task(11, recipient=renamed))
        assert await found(driver, viewer=CAROL.pubkey, viewer_names=(renamed.display, CAROL.display)) == [11, 9, 4]

    async def test_what_is_asked_for_may_hold_any_character(self, driver: LedgerDriver) -> None:
        odd = "a\x00b'\"\\%_!é"
        await driver.send(make_task(1, intent_text=f"say {odd} twice", task_kind=odd, idempotency=unsafe(odd)))
        await driver.send(make_task(2, context_id=odd, tenant="acme", origin="a2a"))
        assert await found(driver, task_kind=odd) == [1]
        assert await found(driver, key=odd) == [1]
        assert await found(driver, context=odd) == [2]
        assert await found(driver, text="'\"\\%_!é TWICE") == [1]
        assert await found(driver, text="A\x00B") == [1]
        assert await found(driver, text="A\x00C") == []
        for name in ("agent", "sender", "tenant", "origin", "cause", "parent"):
            assert (name, await found(driver, **{name: odd})) == (name, [])

    async def test_what_is_told_of_a_task_is_not_cut_at_a_character(self, driver: LedgerDriver) -> None:
        odd = "a\x00b\x01é"
        task = make_task(
            1, intent_text=odd, task_kind=odd, context_id=odd, idempotency=unsafe(odd), tenant="acme", origin="a2a"
        )
        await driver.finish(await driver.taken(task), failed(task.id, odd))
        for _ in ("its result waits", "it is drained"):
            (row,) = (await driver.ledger.find(TaskQuery())).tasks
            assert (row.intent, row.task_kind, row.context_id, row.key, row.error_message) == (odd,) * 5
            (row_of_tenant,) = await driver.ledger.of_tenant("acme", 5)
            assert (row_of_tenant.context_id, row_of_tenant.error_message) == (odd, odd)
            await driver.drain()

    async def test_the_last_move_is_an_order_too(self, driver: LedgerDriver) -> None:
        await course(driver)
        assert (await found(driver, order="moved"))[:2] == [10, 9]
        driver.clock.advance(STEP_MS)
        moved_ms = driver.clock()
        await driver.cancel(task_id(6))
        driver.clock.advance(STEP_MS)
        await driver.drain()  # the oldest result
        assert (await found(driver, order="moved"))[:3] == [3, 6, 10]
        assert await found(driver, order="moved", moved_since_ms=moved_ms) == [3, 6]
        assert await found(driver, moved_since_ms=moved_ms) == [6, 3]
        assert await found(driver, order="moved", agent=BOB.display, states=(DRAINED,)) == [3, 2, 1]

    async def test_a_found_task_tells_what_the_ledger_knows_of_it(self, driver: LedgerDriver) -> None:
        start_ms = await course(driver)
        by_number = {int(each.task_id[-12:], 16): each for each in (await driver.ledger.find(TaskQuery())).tasks}
        leased = by_number[5]
        assert (leased.state, leased.a2a_state, leased.attempt, leased.leased_to) == (
            "in_flight",
            "working",
            2,
            BOB.display,
        )
        assert leased.lease_id is not None
        assert leased.leased_at_ms == start_ms + 5 * STEP_MS
        assert (leased.outcome, leased.cause, leased.error_message, leased.holder_lost) == (None, None, None, False)
        done = by_number[2]
        assert (done.state, done.outcome, done.cause, done.error_message) == ("done", "failed", "result", "no money")
        assert (done.intent, done.task_kind, done.lease_id) == ("Pay 100% of the INVOICE", "invoice", None)
        assert (by_number[1].tenant, by_number[1].context_id, by_number[1].origin) == ("acme", "talk", "a2a")
        assert (by_number[3].key, by_number[3].parent, by_number[3].agent, by_number[3].sender) == (
            "key-3",
            task_id(1),
            BOB.display,
            ALICE.display,
        )
        assert (by_number[9].remote, by_number[10].remote) == (True, False)
        assert by_number[10].deadline_ms == start_ms + 10_000_000
        assert (by_number[6].a2a_state, by_number[6].created_at_ms) == ("input-required", start_ms + 5 * STEP_MS)

    async def test_tasks_are_counted_by_lane_and_agent_as_they_move(self, driver: LedgerDriver) -> None:
        await course(driver)
        counts = await driver.ledger.count_lanes(TaskQuery())
        assert counts.lanes == LaneCounts(
            queued=3, in_flight=1, parked=1, following=1, result_pending=2, failed=1, done=1
        )
        assert [(each.agent, each.tenant) for each in counts.by_agent] == [
            (BOB.display, None),
            (DAVE.display, None),
            (BOB.display, "acme"),
            (CAROL.display, "acme"),
        ]
        assert counts.by_agent[0] == AgentLanes(
            agent=BOB.display, tenant=None, queued=1, in_flight=1, parked=1, following=1, result_pending=1, failed=1
        )
        assert (await driver.ledger.count_lanes(TaskQuery(within="acme"))).lanes == LaneCounts(result_pending=1, done=1)
        assert (await driver.ledger.count_lanes(TaskQuery(viewer=DAVE.pubkey))).lanes == LaneCounts(queued=2)
        await driver.drain()
        await driver.drain(DAVE)
        counts = await driver.ledger.count_lanes(TaskQuery())
        assert (counts.lanes.result_pending, counts.lanes.failed, counts.lanes.done) == (0, 2, 2)
        assert sum(msgspec.structs.astuple(counts.lanes)) == 10

    async def test_the_longest_queues_are_told_with_the_age_of_their_oldest(self, driver: LedgerDriver) -> None:
        assert list(await driver.ledger.queue_depths(5)) == []
        start_ms = await course(driver)
        expected = [
            QueueDepth(agent=DAVE.display, depth=2, oldest_at_ms=start_ms + 8 * STEP_MS),
            QueueDepth(agent=BOB.display, depth=1, oldest_at_ms=start_ms + 6 * STEP_MS),
        ]
        assert list(await driver.ledger.queue_depths(5)) == expected
        assert list(await driver.ledger.queue_depths(1)) == expected[:1]

    async def test_an_excerpt_is_short_however_long_the_text(self, driver: LedgerDriver) -> None:
        await driver.finish(
            await driver.taken(make_task(1, intent_text="é" * 100_000)), failed(task_id(1), "x" * 5_000)
        )
        (task,) = (await driver.ledger.find(TaskQuery())).tasks
        assert (task.intent, task.error_message) == ("é" * 200, "x" * 200)

    async def test_pages_by_creation_stay_right_while_tasks_move_and_come(self, driver: LedgerDriver) -> None:
        await driver.send_all([make_task(number) for number in range(1, 9)])  # all in one millisecond
        seen: list[int] = []
        after = ""
        for turn in range(4):
            page = await driver.ledger.find(TaskQuery(limit=2, after=after))
            seen += numbers(page.tasks)
            after = page.next or ""
            driver.clock.advance(1)
            leased = await driver.take_one()
            await driver.finish(leased, ok(leased.task.id))
            await driver.drain()
            await driver.send(make_task(100 + turn))
        assert seen == [8, 7, 6, 5, 4, 3, 2, 1]
        assert not after

    async def test_a_cursor_of_another_order_or_of_nothing_is_refused(self, driver: LedgerDriver) -> None:
        await course(driver)
        page = await driver.ledger.find(TaskQuery(limit=1))
        for query in (
            TaskQuery(order="moved", after=page.next or ""),
            TaskQuery(after="x"),
            TaskQuery(after="c1-1-1"),
            TaskQuery(after="c" + "f" * 40 + "-1"),
        ):
            with refused("invalid_cursor", 400):
                await driver.ledger.find(query)
