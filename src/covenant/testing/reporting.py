"""Rule 6: what a task's watchers read. Generations without a gap, and turns that follow each other."""

from __future__ import annotations

from typing import Any

import msgspec

from covenant.ledger.contract import UpdateRecord
from covenant.ledger.machine.states import State
from covenant.ledger.machine.view import Limits
from covenant.model.content import Text
from covenant.model.update import ArtifactUpdate, Interruption, StatusUpdate
from covenant.testing.cast import BOB, CAROL, make_task, ok, same_work, task_id
from covenant.testing.desk import Desk, check_generations, refused
from covenant.testing.engine import Engine
from covenant.testing.suite import Suite


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


class ReportingSuite(Suite):
    async def test_generations_have_no_gap_and_say_what_happened(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        assert (await desk.report(leased, "begun")).generation == 3
        assert (await desk.report(leased, chunk("a", append=False))).generation == 4
        assert (await desk.report(leased, chunk("b", append=True))).generation == 5
        await desk.park(leased)
        await desk.say(task_id(1), "that one")
        leased = await desk.take_one()
        assert (await desk.report(leased, "again")).generation == 8
        await desk.finish(leased, ok(task_id(1)))
        shown = await check_generations(desk, task_id(1))
        assert [update.kind for update in shown.updates] == [
            "submitted",
            "working",
            "status",
            "artifact",
            "artifact",
            "parked",
            "continued",
            "status",
            "settled",
        ]

    async def test_leases_renewals_and_requeues_are_no_generations(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        await desk.renew(leased)
        await desk.release(leased)
        await desk.take_one()
        await desk.requeue(task_id(1))
        await desk.interrupt(await desk.take_one())
        assert (await check_generations(desk, task_id(1))).generation == 2

    async def test_a_new_attempt_replaces_what_the_earlier_one_had_written(self, desk: Desk) -> None:
        first = await desk.taken(make_task())
        await desk.report(first, chunk("left over ", append=False))
        await desk.report(first, chunk("from before", append=True))
        await desk.requeue(task_id(1))
        second = await desk.take_one()
        await desk.report(second, chunk("anew ", append=True))
        await desk.report(second, chunk("and whole", append=True))
        assert fold((await check_generations(desk, task_id(1))).updates) == {"report": "anew and whole"}

    async def test_two_artifacts_of_one_attempt_grow_side_by_side(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        for text, name in (("1", "a"), ("x", "b"), ("2", "a"), ("y", "b")):
            await desk.report(leased, chunk(text, append=True, name=name))
        assert fold((await desk.show(task_id(1))).updates) == {"a": "12", "b": "xy"}

    async def test_a_numbered_update_sent_again_is_written_once(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        first = await desk.report(leased, "one", 1)
        again = await desk.report(leased, "one", 1)
        assert (again.duplicate, again.generation) == (True, first.generation)
        assert (await desk.report(leased, "two", 2)).generation == first.generation + 1
        with refused("update_out_of_order", 409):
            await desk.report(leased, "four", 4)
        with refused("update_out_of_order", 409):
            await desk.report(leased, "one", 1)

    async def test_a_numbered_update_said_again_tells_its_own_generation_whatever_was_said_since(
        self, desk: Desk
    ) -> None:
        leased = await desk.taken(make_task())
        first = await desk.report(leased, "one", 1)
        await desk.report(leased, "not counted")
        assert (await desk.report(leased, "one", 1)).generation == first.generation
        await desk.park(leased)
        assert (await desk.report(leased, "one", 1)).generation == first.generation

    async def test_a_new_attempt_counts_its_updates_from_one(self, desk: Desk) -> None:
        await desk.report(await desk.taken(make_task()), "one", 1)
        await desk.requeue(task_id(1))
        second = await desk.take_one()
        with refused("update_out_of_order", 409):
            await desk.report(second, "two", 2)
        assert not (await desk.report(second, "one", 1)).duplicate

    async def test_an_update_counts_only_from_the_holder_of_the_live_lease(self, desk: Desk) -> None:
        first = await desk.taken(make_task())
        with refused("not_lessee", 403):
            await desk.report(first, "mine", holder=CAROL)
        await desk.requeue(task_id(1))
        with refused("not_leased", 409):
            await desk.report(first, "too late")
        second = await desk.take_one()
        with refused("stale_lease", 409):
            await desk.report(first, "too late")
        await desk.finish(second, ok(task_id(1)))
        with refused("already_settled", 409):
            await desk.report(second, "too late")
        assert (await check_generations(desk, task_id(1))).generation == 3

    async def test_a_parked_task_waits_without_a_lease_for_its_next_message(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        await desk.park(leased)
        entry = await desk.entry(task_id(1))
        assert (entry.state, entry.interruption) == (State.PARKED, Interruption.INPUT_REQUIRED)
        assert await desk.take() == ()
        assert (await desk.show(task_id(1))).a2a_state == "input-required"
        with refused("not_leased", 409):
            await desk.report(leased, "more")

    async def test_a_park_reported_again_is_a_duplicate(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        first = await desk.park(leased, 1)
        again = await desk.park(leased, 1)
        assert (again.duplicate, again.generation) == (True, first.generation)

    async def test_authentication_parks_too_and_is_told_apart(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        await desk.report(leased, StatusUpdate(text="sign in", state="auth-required"))
        assert (await desk.show(task_id(1))).a2a_state == "auth-required"

    async def test_a_state_that_no_holder_may_report_is_refused(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        for state in ("completed", "canceled", "submitted", ""):
            with refused("invalid_update", 400):
                await desk.report(leased, StatusUpdate(state=state))

    async def test_the_next_message_starts_a_turn_with_attempts_of_its_own(self, desk: Desk) -> None:
        await desk.park(await desk.taken(make_task()))
        said = await desk.say(task_id(1), "that one", message_id="m1")
        again = await desk.say(task_id(1), "that one", message_id="m1")
        assert (again.duplicate, again.generation) == (True, said.generation)
        leased = await desk.take_one()
        entry = await desk.entry(task_id(1))
        assert (entry.turn, leased.lease.attempt) == (2, 1)

    async def test_a_message_said_again_later_is_still_the_same_message(self, desk: Desk) -> None:
        await desk.park(await desk.taken(make_task()))
        said = await desk.say(task_id(1), "that one", message_id="m1")
        await desk.report(await desk.take_one(), "working on it")
        again = await desk.say(task_id(1), "that one", message_id="m1")
        assert (again.duplicate, again.generation) == (True, said.generation)

    async def test_the_last_sixteen_messages_to_a_task_are_each_said_once(self, desk: Desk) -> None:
        await desk.taken(make_task())
        said = [await desk.say(task_id(1), f"word {number}") for number in range(17)]
        for number in range(1, 17):
            again = await desk.say(task_id(1), f"word {number}")
            assert (again.duplicate, again.generation) == (True, said[number].generation)
        assert not (await desk.say(task_id(1), "word 0")).duplicate

    async def test_a_message_to_what_has_ended_is_refused(self, desk: Desk) -> None:
        leased = await desk.taken(make_task())
        await desk.finish(leased, ok(task_id(1)))
        for _ in range(2):
            with refused("already_settled", 409):
                await desk.say(task_id(1), "one more thing")
            await desk.drain()
            await desk.ledger.audit_verify()  # waits for the archive

    async def test_the_number_of_artifacts_of_an_attempt_is_bounded(self, engine: Engine) -> None:
        desk = Desk(await engine.open(Limits(artifacts_per_attempt_max=2)), engine.clock)
        leased = await desk.taken(make_task())
        await desk.report(leased, chunk("a", append=False, name="1"))
        await desk.report(leased, chunk("b", append=False, name="2"))
        with refused("too_many_artifacts", 429):
            await desk.report(leased, chunk("c", append=False, name="3"))
        await desk.report(leased, chunk("d", append=True, name="2"))

    async def test_updates_of_tasks_side_by_side_keep_to_their_own_count(self, desk: Desk) -> None:
        await desk.send_all([make_task(number) for number in range(4)])
        leases = await desk.take(count=4)
        for round_ in range(5):
            for leased in leases:
                assert (await desk.report(leased, f"round {round_}")).generation == round_ + 3
        for leased in leases:
            await check_generations(desk, leased.task.id)

    async def test_a_followed_task_tells_its_own_story(self, desk: Desk) -> None:
        leased = await desk.taken(same_work(1))
        await desk.send(same_work(2))
        await desk.report(leased, "for the leader")
        assert (await check_generations(desk, task_id(2))).generation == 1
        assert (await desk.show(task_id(2))).a2a_state == "submitted"
        await desk.finish(leased, ok(task_id(1)))
        shown = await check_generations(desk, task_id(2))
        assert [update.kind for update in shown.updates] == ["submitted", "settled"]

    async def test_the_state_told_to_a2a_is_submitted_before_the_first_lease_and_working_ever_after(
        self, desk: Desk
    ) -> None:
        await desk.send(make_task())
        assert (await desk.show(task_id(1))).a2a_state == "submitted"
        leased = await desk.take_one(BOB)
        assert (await desk.show(task_id(1))).a2a_state == "working"
        await desk.release(leased)
        assert (await desk.show(task_id(1))).a2a_state == "working"
