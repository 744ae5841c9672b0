"""Rule 6: what a task's watchers read. Generations without a gap, and turns that follow each other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from covenant.ledger.contract.tasks import UpdateRecord
from covenant.ledger.machine.states import State
from covenant.model.content import Text
from covenant.model.settings import Limits
from covenant.model.task_event import ArtifactUpdate, Interruption, StatusUpdate
from tests.ledger_contract.driver import LedgerDriver, check_generations, refused
from tests.ledger_contract.engine import Engine
from tests.ledger_contract.samples import BOB, CAROL, make_task, ok, same_work, task_id
from tests.ledger_contract.suite import Suite


def chunk(text: str, *, append: bool, name: str = "report") -> ArtifactUpdate:
    return ArtifactUpdate(name, (Text(text),), append=append)


def fold(updates: tuple[UpdateRecord, ...]) -> dict[str, str]:
    """The artifacts as a watcher puts them together."""
    artifacts: dict[str, str] = {}
    for update in updates:
        if update.kind != "artifact":
            continue
        body: dict[str, Any] = msgspec.to_builtins(update.body)
        text = "".join(part["text"] for part in body["parts"])
        before = artifacts.get(body["artifact_id"], "") if body.get("append") else ""
        artifacts[body["artifact_id"]] = before + text
    return artifacts


class UpdateSuite(Suite):
    async def test_generations_have_no_gap_and_say_what_happened(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        assert (await driver.report(leased, "begun")).generation == 3
        assert (await driver.report(leased, chunk("a", append=False))).generation == 4
        assert (await driver.report(leased, chunk("b", append=True))).generation == 5
        await driver.park(leased)
        await driver.say(task_id(1), "that one")
        leased = await driver.take_one()
        assert (await driver.report(leased, "again")).generation == 9
        await driver.finish(leased, ok(task_id(1)))
        shown = await check_generations(driver, task_id(1))
        assert [update.kind for update in shown.updates] == [
            "submitted",
            "working",
            "status",
            "artifact",
            "artifact",
            "artifact",  # the last chunk
            "parked",
            "continued",
            "status",
            "settled",
        ]

    @pytest.mark.parametrize("ended", [False, True])
    async def test_a_long_story_is_told_page_by_page_after_a_generation(
        self, driver: LedgerDriver, *, ended: bool
    ) -> None:
        leased = await driver.taken(make_task())
        for number in range(5):
            await driver.report(leased, f"step {number}")
        if ended:
            await driver.finish(leased, ok(task_id(1)))
        whole, seen = await driver.show(task_id(1)), 0
        told: list[UpdateRecord] = []
        while seen < whole.generation:
            page = await driver.ledger.show(task_id(1), None, 3, seen)
            assert page is not None
            assert [update.generation for update in page.updates[:1]] == [seen + 1]
            assert len(page.updates) == min(3, whole.generation - seen)
            told += page.updates
            seen = page.updates[-1].generation
        assert tuple(told) == whole.updates
        newest = await driver.ledger.show(task_id(1), None, 3)
        assert newest is not None
        assert newest.updates == whole.updates[-3:]

    async def test_leases_renewals_and_requeues_are_no_generations(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        await driver.renew(leased)
        await driver.release(leased)
        await driver.take_one()
        await driver.requeue(task_id(1))
        leased = await driver.take_one()
        assert (await check_generations(driver, task_id(1))).generation == 2
        await driver.interrupt(leased)  # that its holder is gone is told to those who watch
        assert (await check_generations(driver, task_id(1))).generation == 3

    async def test_a_new_attempt_replaces_what_the_earlier_one_had_written(self, driver: LedgerDriver) -> None:
        first = await driver.taken(make_task())
        await driver.report(first, chunk("left over ", append=False))
        await driver.report(first, chunk("from before", append=True))
        await driver.requeue(task_id(1))
        second = await driver.take_one()
        await driver.report(second, chunk("anew ", append=True))
        await driver.report(second, chunk("and whole", append=True))
        assert fold((await check_generations(driver, task_id(1))).updates) == {"report": "anew and whole"}

    async def test_two_artifacts_of_one_attempt_grow_side_by_side(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        for text, name in (("1", "a"), ("x", "b"), ("2", "a"), ("y", "b")):
            await driver.report(leased, chunk(text, append=True, name=name))
        assert fold((await driver.show(task_id(1))).updates) == {"a": "12", "b": "xy"}

    async def test_a_numbered_update_sent_again_is_written_once(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        first = await driver.report(leased, "one", 1)
        again = await driver.report(leased, "one", 1)
        assert (again.duplicate, again.generation) == (True, first.generation)
        assert (await driver.report(leased, "two", 2)).generation == first.generation + 1
        with refused("update_out_of_order", 409):
            await driver.report(leased, "four", 4)
        with refused("update_out_of_order", 409):
            await driver.report(leased, "one", 1)

    async def test_a_numbered_update_said_again_tells_its_own_generation_whatever_was_said_since(
        self, driver: LedgerDriver
    ) -> None:
        leased = await driver.taken(make_task())
        first = await driver.report(leased, "one", 1)
        await driver.report(leased, "not counted")
        assert (await driver.report(leased, "one", 1)).generation == first.generation
        await driver.park(leased)
        assert (await driver.report(leased, "one", 1)).generation == first.generation

    async def test_a_new_attempt_counts_its_updates_from_one(self, driver: LedgerDriver) -> None:
        await driver.report(await driver.taken(make_task()), "one", 1)
        await driver.requeue(task_id(1))
        second = await driver.take_one()
        with refused("update_out_of_order", 409):
            await driver.report(second, "two", 2)
        assert not (await driver.report(second, "one", 1)).duplicate

    async def test_an_update_counts_only_from_the_holder_of_the_live_lease(self, driver: LedgerDriver) -> None:
        first = await driver.taken(make_task())
        with refused("not_lessee", 403):
            await driver.report(first, "mine", holder=CAROL)
        await driver.requeue(task_id(1))
        with refused("not_leased", 409):
            await driver.report(first, "too late")
        second = await driver.take_one()
        with refused("stale_lease", 409):
            await driver.report(first, "too late")
        await driver.finish(second, ok(task_id(1)))
        with refused("already_settled", 409):
            await driver.report(second, "too late")
        assert (await check_generations(driver, task_id(1))).generation == 3

    async def test_a_parked_task_waits_without_a_lease_for_its_next_message(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        await driver.park(leased)
        entry = await driver.entry(task_id(1))
        assert (entry.state, entry.interruption) == (State.PARKED, Interruption.INPUT_REQUIRED)
        assert await driver.take() == ()
        assert (await driver.show(task_id(1))).a2a_state == "input-required"
        with refused("not_leased", 409):
            await driver.report(leased, "more")

    async def test_a_park_reported_again_is_a_duplicate(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        first = await driver.park(leased, 1)
        again = await driver.park(leased, 1)
        assert (again.duplicate, again.generation) == (True, first.generation)

    async def test_authentication_parks_too_and_is_told_apart(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        await driver.report(leased, StatusUpdate(text="sign in", state="auth-required"))
        assert (await driver.show(task_id(1))).a2a_state == "auth-required"

    async def test_a_state_that_no_holder_may_report_is_refused(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        for state in ("completed", "canceled", "submitted", ""):
            with refused("invalid_update", 400):
                await driver.report(leased, StatusUpdate(state=state))

    async def test_the_next_message_starts_a_turn_with_attempts_of_its_own(self, driver: LedgerDriver) -> None:
        await driver.park(await driver.taken(make_task()))
        said = await driver.say(task_id(1), "that one", message_id="m1")
        again = await driver.say(task_id(1), "that one", message_id="m1")
        assert (again.duplicate, again.generation) == (True, said.generation)
        leased = await driver.take_one()
        entry = await driver.entry(task_id(1))
        assert (entry.turn, leased.lease.attempt) == (2, 1)

    async def test_a_message_said_again_later_is_still_the_same_message(self, driver: LedgerDriver) -> None:
        await driver.park(await driver.taken(make_task()))
        said = await driver.say(task_id(1), "that one", message_id="m1")
        await driver.report(await driver.take_one(), "working on it")
        again = await driver.say(task_id(1), "that one", message_id="m1")
        assert (again.duplicate, again.generation) == (True, said.generation)

    async def test_the_last_sixteen_messages_to_a_task_are_each_said_once(self, driver: LedgerDriver) -> None:
        await driver.taken(make_task())
        said = [await driver.say(task_id(1), f"word {number}") for number in range(17)]
        for number in range(1, 17):
            again = await driver.say(task_id(1), f"word {number}")
            assert (again.duplicate, again.generation) == (True, said[number].generation)
        assert not (await driver.say(task_id(1), "word 0")).duplicate

    async def test_a_message_to_what_has_ended_is_refused(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task())
        await driver.finish(leased, ok(task_id(1)))
        for _ in range(2):
            with refused("already_settled", 409):
                await driver.say(task_id(1), "one more thing")
            await driver.drain()
            await driver.ledger.audit_verify()  # waits for the archive

    async def test_the_number_of_artifacts_of_an_attempt_is_bounded(self, engine: Engine) -> None:
        driver = LedgerDriver(await engine.open(Limits(artifacts_per_attempt_max=2)), engine.clock)
        leased = await driver.taken(make_task())
        await driver.report(leased, chunk("a", append=False, name="1"))
        await driver.report(leased, chunk("b", append=False, name="2"))
        with refused("too_many_artifacts", 429):
            await driver.report(leased, chunk("c", append=False, name="3"))
        await driver.report(leased, chunk("d", append=True, name="2"))

    async def test_updates_of_tasks_side_by_side_keep_to_their_own_count(self, driver: LedgerDriver) -> None:
        await driver.send_all([make_task(number) for number in range(4)])
        leases = await driver.take(count=4)
        for round_ in range(5):
            for leased in leases:
                assert (await driver.report(leased, f"round {round_}")).generation == round_ + 3
        for leased in leases:
            await check_generations(driver, leased.task.id)

    async def test_a_followed_task_tells_its_own_story(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(same_work(1))
        await driver.send(same_work(2))
        await driver.report(leased, "for the leader")
        assert (await check_generations(driver, task_id(2))).generation == 1
        assert (await driver.show(task_id(2))).a2a_state == "submitted"
        await driver.finish(leased, ok(task_id(1)))
        shown = await check_generations(driver, task_id(2))
        assert [update.kind for update in shown.updates] == ["submitted", "settled"]

    async def test_the_state_told_to_a2a_is_submitted_before_the_first_lease_and_working_ever_after(
        self, driver: LedgerDriver
    ) -> None:
        await driver.send(make_task())
        assert (await driver.show(task_id(1))).a2a_state == "submitted"
        leased = await driver.take_one(BOB)
        assert (await driver.show(task_id(1))).a2a_state == "working"
        await driver.release(leased)
        assert (await driver.show(task_id(1))).a2a_state == "working"
