"""Rules 3 and 5: whose result counts, once; and a settled task stays settled."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import msgspec
import pytest

from covenant.ledger.machine.commands import LeasedTask, Reported
from covenant.ledger.machine.states import State
from covenant.model.content import Json, Text
from covenant.model.errors import Refusal
from covenant.model.ids import AgentId, LeaseId
from covenant.model.task import Ending
from covenant.model.task_event import ArtifactUpdate, Ended, StatusUpdate
from tests.ledger_contract.driver import LedgerDriver, check_generations, refused
from tests.ledger_contract.samples import ALICE, BOB, CAROL, failed, make_task, ok, partial, same_work, task_id
from tests.ledger_contract.suite import Suite

NO_LEASE = LeaseId("99999999-9999-4999-8999-999999999999")


class Late(NamedTuple):
    """A row of rule 3: what happened to the task, which lease the result names, who posts it, what becomes of it."""

    story: str
    names: str
    by: AgentId
    answer: str


LATE_RESULTS = [
    Late("leased", "live", BOB, "settles"),
    Late("leased", "none", BOB, "settles"),
    Late("leased", "unknown", BOB, "stale_lease"),
    Late("leased", "live", CAROL, "not_lessee"),
    Late("leased", "none", CAROL, "not_lessee"),
    Late("requeued", "last", BOB, "settles"),
    Late("requeued", "none", BOB, "settles"),
    Late("requeued", "unknown", BOB, "stale_lease"),
    Late("requeued", "last", CAROL, "not_lessee"),
    Late("released", "last", BOB, "settles"),
    Late("leased again", "live", BOB, "settles"),
    Late("leased again", "last", BOB, "stale_lease"),
    Late("leased again", "none", BOB, "lease_id_required"),
    Late("requeued twice", "live", BOB, "settles"),
    Late("requeued twice", "last", BOB, "stale_lease"),
    Late("requeued twice", "none", BOB, "lease_id_required"),
    Late("queued", "none", BOB, "not_leased"),
    Late("queued", "unknown", BOB, "not_leased"),
    Late("parked", "live", BOB, "not_leased"),
    Late("parked", "none", BOB, "not_leased"),
    Late("next turn", "last", BOB, "not_leased"),
    Late("next turn", "none", BOB, "not_leased"),
    Late("next turn leased", "last", BOB, "stale_lease"),
    Late("next turn leased", "live", BOB, "settles"),
    Late("next turn leased", "none", BOB, "settles"),
    Late("settled", "live", BOB, "already_settled"),
    Late("settled", "live", CAROL, "not_lessee"),
    Late("forced", "live", BOB, "already_settled"),
    Late("forced", "none", BOB, "already_settled"),
    Late("canceled", "live", BOB, "canceled"),
    Late("canceled", "none", BOB, "canceled"),
    Late("canceled unleased", "none", BOB, "not_lessee"),
    Late("drained", "live", BOB, "already_settled"),
    Late("drained", "live", CAROL, "not_lessee"),
    Late("archived", "live", BOB, "already_settled"),
    Late("archived", "none", CAROL, "not_lessee"),
]


async def _tell(driver: LedgerDriver, story: str) -> dict[str, LeaseId | None]:
    """Bring task 1 to where the story ends; what `last` (the first lease) and `live` (the newest one) then are."""
    task = make_task()
    await driver.send(task)
    if story == "queued":
        return {}
    if story == "canceled unleased":
        await driver.cancel(task.id)
        return {}
    first = newest = await driver.take_one()
    if story in ("requeued", "leased again", "requeued twice"):
        await driver.requeue(task.id)
    if story == "released":
        await driver.release(first)
    if story in ("leased again", "requeued twice"):
        newest = await driver.take_one()
    if story == "requeued twice":
        await driver.requeue(task.id)
    if story in ("parked", "next turn", "next turn leased"):
        await driver.park(first)
    if story.startswith("next turn"):
        await driver.say(task.id, "that one")
    if story == "next turn leased":
        newest = await driver.take_one()
    await _end(driver, story, newest)
    return {"last": first.lease.lease_id, "live": newest.lease.lease_id}


async def _end(driver: LedgerDriver, story: str, leased: LeasedTask) -> None:
    if story in ("settled", "drained", "archived"):
        await driver.finish(leased, ok(task_id(1), "the first answer"))
    if story in ("drained", "archived"):
        await driver.drain()
    if story == "archived":
        await driver.ledger.audit_verify()  # waits for the archive
    if story == "forced":
        await driver.force_error(task_id(1))
    if story == "canceled":
        await driver.cancel(task_id(1))


class ResultSuite(Suite):
    @pytest.mark.parametrize("late", LATE_RESULTS, ids=lambda late: f"{late.story}-{late.names}-{late.by.display}")
    async def test_a_result_counts_only_from_the_lease_that_may_answer(self, driver: LedgerDriver, late: Late) -> None:
        leases = await _tell(driver, late.story)
        before = await driver.ledger.entry(task_id(1))
        lease_id = {"none": None, "unknown": NO_LEASE, **leases}[late.names]
        result = ok(task_id(1), "the late answer")
        if late.answer == "settles":
            assert not (await driver.settle(result, holder=late.by, lease_id=lease_id)).duplicate
            assert (await driver.entry(task_id(1))).state is State.SETTLED
            assert await driver.take(count=10) == ()
            assert await driver.drain(count=10) == (result,)
            assert (await driver.settle(result, holder=late.by, lease_id=lease_id)).duplicate
            assert await driver.drain(count=10) == ()
        else:
            with refused(late.answer, 403 if late.answer == "not_lessee" else 409):
                await driver.settle(result, holder=late.by, lease_id=lease_id)
            assert await driver.ledger.entry(task_id(1)) == before
            assert result not in await driver.drain(count=10)
        await check_generations(driver, task_id(1))

    async def test_a_stale_result_never_clears_the_live_lease(self, driver: LedgerDriver) -> None:
        first = await driver.taken(make_task())
        await driver.requeue(task_id(1))
        second = await driver.take_one()
        with refused("stale_lease", 409):
            await driver.finish(first, ok(task_id(1), "old"))
        assert (await driver.entry(task_id(1))).lease == second.lease
        await driver.finish(second, ok(task_id(1), "new"))
        assert await driver.drain(count=10) == (ok(task_id(1), "new"),)

    async def test_the_same_result_again_is_a_duplicate_and_another_is_refused(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        result = ok(task_id(1))
        assert not (await driver.finish(leased, result)).duplicate
        assert (await driver.finish(leased, result)).duplicate
        for other in (ok(task_id(1), "else"), failed(task_id(1)), partial(task_id(1), "done")):
            with refused("already_settled", 409):
                await driver.finish(leased, other)
        await driver.drain()
        assert (await driver.finish(leased, result)).duplicate
        await driver.ledger.audit_verify()  # waits for the archive
        assert (await driver.finish(leased, result)).duplicate
        assert await driver.drain() == ()

    async def test_equal_results_at_the_same_moment_settle_once(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        answers = await asyncio.gather(*(driver.finish(leased, ok(task_id(1))) for _ in range(10)))
        assert [answer.duplicate for answer in answers].count(False) == 1
        assert len(await driver.drain(count=10)) == 1

    async def test_a_result_for_an_unknown_task_is_refused_and_audited(self, driver: LedgerDriver) -> None:
        with refused("unknown_task", 404):
            await driver.settle(ok(task_id(404)))
        rows = await driver.audit_rows()
        assert rows[-1]["kind"] == {
            "type": "a2a_result_rejected",
            "task_id": task_id(404),
            "reason": "unknown_task",
        }

    async def test_a_task_is_unknown_to_whoever_has_no_part_in_it(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        with refused("unknown_task", 404):
            await driver.settle(ok(task_id(1)), holder=CAROL, viewer=CAROL, lease_id=leased.lease.lease_id)
        with refused("unknown_task", 404):
            await driver.cancel(task_id(1), by=CAROL)
        assert await driver.ledger.show(task_id(1), CAROL.pubkey, 10) is None

    @pytest.mark.parametrize("state", ["queued", "leased", "parked", "following"])
    async def test_canceling_settles_at_once_in_every_state(self, driver: LedgerDriver, state: str) -> None:
        number = 1
        if state == "following":
            await driver.send_all([same_work(1), same_work(2)])
            number = 2
        elif state == "queued":
            await driver.send(make_task())
        else:
            leased = await driver.taken(make_task())
            if state == "parked":
                await driver.park(leased)
        assert (await driver.entry(task_id(number))).state == state
        canceled = await driver.cancel(task_id(number), reason="changed my mind")
        assert (canceled.canceled, canceled.ending) == (True, Ending.CANCELED)
        (result,) = await driver.drain()
        assert result == canceled.result
        assert result.error_message == "canceled: changed my mind"
        assert (await check_generations(driver, task_id(number))).a2a_state == "canceled"

    @pytest.mark.parametrize("end", ["result", "cancel", "timeout", "park"])
    @pytest.mark.parametrize("closed", [False, True])
    async def test_a_text_that_its_holder_leaves_open_is_closed_once(
        self, driver: LedgerDriver, end: str, closed: bool
    ) -> None:
        leased = await driver.taken(make_task(timeout_ms=1_000))
        await driver.report(leased, ArtifactUpdate("words", (Text("a"),)), 1)
        await driver.report(leased, ArtifactUpdate("words", (Text("b"),), append=True, last_chunk=closed), 2)
        await driver.report(leased, ArtifactUpdate("data", (Json({}),)), 3)
        if end == "result":
            await driver.finish(leased, ok(task_id(1)))
        elif end == "cancel":
            await driver.cancel(task_id(1))
        elif end == "park":
            parked = await driver.park(leased, 4)
            assert await driver.park(leased, 4) == Reported(parked.generation, duplicate=True)
        else:
            driver.clock.advance(2_000)
            await driver.sweep()
        await check_generations(driver, task_id(1))
        steps = await driver.ledger.steps(task_id(1), 0, 100)
        said = [step.what for step in steps if isinstance(step.what, ArtifactUpdate)]
        last = ArtifactUpdate("words", (Text(""),), append=True, last_chunk=True)
        assert said[3:] == ([] if closed else [last])
        assert isinstance(steps[-1].what, StatusUpdate if end == "park" else Ended)

    async def test_a_holder_learns_of_a_cancel_by_whatever_it_says_next(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        await driver.cancel(task_id(1))
        for said in (driver.renew(leased), driver.report(leased, "still at it"), driver.finish(leased, ok(task_id(1)))):
            with refused("canceled", 409):
                await said
        await driver.drain()
        await driver.ledger.audit_verify()  # waits for the archive
        for said in (driver.renew(leased), driver.report(leased, "still at it"), driver.finish(leased, ok(task_id(1)))):
            with refused("canceled", 409):
                await said

    async def test_a_holder_of_an_earlier_turn_hears_the_same_of_an_ended_task_from_memory_and_from_history(
        self, driver: LedgerDriver
    ) -> None:
        leased = await driver.taken(make_task())
        await driver.park(leased)
        await driver.say(task_id(1), "that one")
        await driver.cancel(task_id(1))
        for _ in range(2):
            with refused("canceled", 409):
                await driver.renew(leased)
            with refused("not_lessee", 403):
                await driver.finish(leased, ok(task_id(1)))
            await driver.drain()
            await driver.ledger.audit_verify()  # waits for the archive

    async def test_cancel_and_result_race_to_one_winner_that_both_callers_see(self, driver: LedgerDriver) -> None:
        for number in range(20):
            leased = await driver.taken(make_task(number))
            result = ok(task_id(number))
            pair = [driver.cancel(task_id(number)), driver.finish(leased, result)]
            canceled, settled = None, None
            for answer in await asyncio.gather(*(pair if number % 2 else reversed(pair)), return_exceptions=True):
                if isinstance(answer, Refusal):
                    assert answer.code == "canceled"
                elif isinstance(answer, BaseException):
                    raise answer
                elif hasattr(answer, "canceled"):
                    canceled = answer
                else:
                    settled = answer
            assert canceled is not None
            assert canceled.canceled is (settled is None)
            (drained,) = await driver.drain(count=10)
            assert drained == canceled.result
            assert (drained == result) is (settled is not None)
            shown = await check_generations(driver, task_id(number))
            assert [update.kind for update in shown.updates].count("settled") == 1

    async def test_canceling_what_has_ended_tells_how_it_ended(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        await driver.finish(leased, ok(task_id(1)))
        for _ in range(2):
            canceled = await driver.cancel(task_id(1))
            assert (canceled.canceled, canceled.ending, canceled.result) == (False, Ending.COMPLETED, ok(task_id(1)))
            await driver.drain()
            await driver.ledger.audit_verify()  # waits for the archive

    async def test_only_the_sender_cancels(self, driver: LedgerDriver) -> None:
        await driver.taken(make_task())
        with refused("not_sender", 403):
            await driver.cancel(task_id(1), by=BOB)
        assert (await driver.entry(task_id(1))).state is State.LEASED

    async def test_the_sender_drains_each_result_once_and_nobody_elses(self, driver: LedgerDriver) -> None:
        for number, sender in ((1, ALICE), (2, CAROL), (3, ALICE)):
            await driver.finish(await driver.taken(make_task(number, sender=sender)), ok(task_id(number)))
        assert [result.task_id for result in await driver.drain(ALICE, 10)] == [task_id(1), task_id(3)]
        assert await driver.drain(ALICE, 10) == ()
        assert [result.task_id for result in await driver.drain(CAROL, 10)] == [task_id(2)]

    async def test_results_are_drained_in_the_order_they_came(self, driver: LedgerDriver) -> None:
        await driver.send_all([make_task(number) for number in (1, 2, 3)])
        leases = {leased.task.id: leased for leased in await driver.take(count=3)}
        for number in (2, 3, 1):
            await driver.finish(leases[task_id(number)], ok(task_id(number)))
        everyone = await driver.drain(CAROL, 10, everyone=True)
        assert [result.task_id for result in everyone] == [task_id(2), task_id(3), task_id(1)]

    async def test_a_task_of_another_door_is_settled_without_anyone_draining_it(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task(origin="a2a"))
        await driver.finish(leased, ok(task_id(1)))
        assert await driver.drain(everyone=True) == ()
        shown = await check_generations(driver, task_id(1))
        assert (shown.a2a_state, shown.result) == ("completed", ok(task_id(1)))

    async def test_followers_of_another_door_are_settled_without_anyone_draining_them(
        self, driver: LedgerDriver
    ) -> None:
        leased = await driver.taken(same_work(1))
        await driver.send(same_work(2, origin="a2a"))
        await driver.finish(leased, ok(task_id(1)))
        assert [result.task_id for result in await driver.drain(count=10)] == [task_id(1)]
        assert (await driver.show(task_id(2))).result == msgspec.structs.replace(ok(task_id(1)), task_id=task_id(2))
