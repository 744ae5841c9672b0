"""What an agent delegates is part of its own task: it begins under it, and ends with it, whatever happens between."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from covenant.ledger.machine.commands import CancelOrphans, Command, Starter
from covenant.ledger.machine.peer_commands import (
    DelegationChanges,
    LearnPeer,
    ReceiveFromPeer,
    RemovePeer,
    SendToPeer,
    SucceedPeer,
)
from covenant.model.ids import AgentId, TaskId
from covenant.model.peers.delegation import Challenge, DelegationQuestion, DelegationRole
from covenant.model.peers.delegation_messages import TokenUsage
from covenant.model.peers.usage_by_day import DAY_MS, USAGE_DAYS, PeerUsage, day_of
from covenant.model.task import DELEGATION, Ending, Task
from tests.ledger.machine.peer_commands import (
    add,
    begun,
    bundle_of,
    envelope,
    heard,
    id_of,
    key_of,
    offered,
    offering,
    result_of,
)
from tests.ledger_contract.driver import WAIT_MS, LedgerDriver, check_generations, refused
from tests.ledger_contract.durability import Restart, RestartSuite
from tests.ledger_contract.fake_clock import START_MS
from tests.ledger_contract.samples import ALICE, BOB, CAROL, DAVE, OPERATOR, failed, make_task, ok, task_id
from tests.ledger_contract.suite import Suite
from tests.ledger_contract.tenants import add_tenant


def part(number: int, of: int, *, sender: AgentId = BOB, recipient: AgentId = CAROL, **fields: Any) -> Task:
    return make_task(
        number, sender=sender, recipient=recipient, origin=DELEGATION, parent=task_id(of), depth=1, **fields
    )


async def cancel_orphans(driver: LedgerDriver) -> list[TaskId]:
    """All of them, with what they orphan in turn."""
    ended: list[TaskId] = []
    while (orphaned := await driver.ledger.commit(CancelOrphans(count=2))).more:
        ended += orphaned.task_ids
    return ended


async def endings(driver: LedgerDriver, *numbers: int) -> list[str]:
    return [(await driver.show(task_id(number))).a2a_state for number in numbers]


class DelegationSuite(Suite):
    async def test_nothing_is_delegated_by_a_task_that_is_unknown_or_has_ended(self, driver: LedgerDriver) -> None:
        with refused("parent_ended", 409):
            await driver.send(part(2, of=1))
        await driver.finish(await driver.taken(make_task(1)), ok(task_id(1)))
        with refused("parent_ended", 409):
            await driver.send(part(2, of=1))

    async def test_what_was_delegated_before_is_found_again_although_its_parent_ended(
        self, driver: LedgerDriver
    ) -> None:
        leased = await driver.taken(make_task(1))
        await driver.send(part(2, of=1))
        await driver.finish(leased, ok(task_id(1)))
        assert (await driver.send(part(2, of=1))).duplicate

    @pytest.mark.parametrize("how", ["completed", "failed", "canceled", "forced", "timed out"])
    async def test_a_task_that_ends_takes_what_it_delegated_with_it(self, driver: LedgerDriver, how: str) -> None:
        leased = await driver.taken(make_task(1, timeout_ms=1_000))
        below = await driver.taken(part(2, of=1))
        await driver.send(part(3, of=1, recipient=DAVE))
        await driver.send(part(4, of=2, sender=CAROL, recipient=DAVE))
        await driver.finish(await driver.taken(part(5, of=1)), ok(task_id(5)))
        assert await cancel_orphans(driver) == []
        match how:
            case "completed":
                await driver.finish(leased, ok(task_id(1)))
            case "failed":
                await driver.finish(leased, failed(task_id(1)))
            case "canceled":
                await driver.cancel(task_id(1))
            case "forced":
                await driver.force_error(task_id(1))
            case _:
                driver.clock.advance(1_000)
                await driver.sweep()
        assert await driver.ledger.orphaned(WAIT_MS)
        assert await cancel_orphans(driver) == [task_id(2), task_id(3), task_id(4)]
        assert await endings(driver, 2, 3, 4, 5) == ["canceled", "canceled", "canceled", "completed"]
        assert "has ended" in str((await check_generations(driver, task_id(3))).result)
        with refused("canceled", 409):
            await driver.finish(below, ok(task_id(2)))
        assert await cancel_orphans(driver) == []
        assert not await driver.ledger.orphaned(0)

    async def test_a_parked_and_a_requeued_task_keep_what_they_delegated(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task(1))
        await driver.send(part(2, of=1))
        await driver.requeue(task_id(1))
        assert await cancel_orphans(driver) == []
        leased = await driver.take_one()
        await driver.park(leased)
        assert await cancel_orphans(driver) == []
        assert await endings(driver, 2) == ["submitted"]
        await driver.cancel(task_id(1))
        assert await cancel_orphans(driver) == [task_id(2)]

    async def test_what_was_sent_by_mail_outlives_the_task_it_names_as_its_parent(self, driver: LedgerDriver) -> None:
        leased = await driver.taken(make_task(1))
        await driver.send(make_task(2, sender=BOB, recipient=CAROL, parent=task_id(1)))
        await driver.finish(leased, ok(task_id(1)))
        assert await cancel_orphans(driver) == []
        assert await driver.queued_ids(CAROL) == [task_id(2)]

    async def test_nobody_comes_for_the_result_of_what_was_delegated(self, driver: LedgerDriver) -> None:
        await driver.taken(make_task(1))
        await driver.finish(await driver.taken(part(2, of=1)), ok(task_id(2)))
        assert await driver.drain(BOB) == ()
        shown = await driver.show(task_id(2))
        assert (shown.state, shown.a2a_state) == ("resolved", Ending.COMPLETED)


class DelegationDurabilitySuite(RestartSuite):
    async def test_orphans_are_found_after_a_restart_compacted_or_not(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        first, second = await driver.taken(make_task(1)), await driver.taken(make_task(2))
        for number, parent in ((3, 1), (4, 1), (5, 2)):
            await driver.send(part(number, of=parent))
        await driver.finish(first, ok(task_id(1)))
        for again in range(3):
            if again:
                await driver.ledger.compact()
            driver = await restart(driver)
        assert await driver.ledger.orphaned(WAIT_MS)
        assert sorted(await cancel_orphans(driver)) == [task_id(3), task_id(4)]
        assert await endings(driver, 5) == ["submitted"]
        await driver.cancel(second.task.id, by=ALICE)
        assert await cancel_orphans(driver) == [task_id(5)]

    async def test_the_record_of_an_accepted_offer_leases_its_work_to_a_starter_that_is_free(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        ledger = driver.ledger
        await ledger.commit(add(1))
        starter = Starter(BOB, ledger.node, ledger.boot)
        received = await ledger.commit(offered(1, starter=starter))
        leased = received.leased
        assert leased is not None
        assert (leased.task.id, leased.lease.leased_to, leased.lease.attempt) == (task_id(101), BOB, 1)
        assert await driver.queued_ids() == []
        # The offer comes again while its work is known: nothing is leased a second time.
        again = await ledger.commit(offered(1, jti="again", seq=1, starter=starter))
        assert (again.leased, again.repeated) == (None, True)
        restarted = await restart(driver)
        entry = await restarted.ledger.entry(task_id(101))
        assert entry is not None
        assert entry.lease == leased.lease
        assert entry.holder_lost(restarted.ledger.alive), "the run that had the lease is over"

    async def test_the_work_of_an_offer_waits_behind_other_work_although_its_starter_is_free(
        self, driver: LedgerDriver
    ) -> None:
        ledger = driver.ledger
        await ledger.commit(add(1))
        await driver.send(make_task(1))
        received = await ledger.commit(offered(1, starter=Starter(BOB, ledger.node, ledger.boot)))
        assert received.leased is None
        assert received.moved is not None
        assert await driver.queued_ids() == [task_id(1), task_id(101)]

    async def test_questions_to_peers_and_their_answers_are_in_the_log_of_messages_once(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        challenge = Challenge("n" * 20, START_MS)
        asked = replace(envelope("q"), typ="capability_query")
        commands: tuple[Command[Any], ...] = (
            add(1),
            LearnPeer(id=id_of(1), by=OPERATOR, challenge=challenge),
            LearnPeer(id=id_of(1), by=OPERATOR, told_id=id_of(2), end=(None, 7), void_before_ms=9),
            ReceiveFromPeer(envelope=asked),
            ReceiveFromPeer(envelope=replace(envelope("p"), typ="poll")),
        )
        for command in commands:
            await driver.ledger.commit(command)
        restarted = await restart(driver)
        seen = [(each.direction, each.typ) for each in await restarted.ledger.message_log()]
        assert seen == [
            ("sent", "capability_response"),
            ("received", "capability_query"),
            ("sent", "capability_query"),
        ], "the newest first"
        peer = restarted.ledger.peer(id_of(1))
        assert peer is not None
        assert (peer.told_id, peer.end, peer.void_before_ms) == (id_of(2), (None, 7), 9)

    async def test_a_question_that_was_answered_before_its_report_is_taken_in_is_not_asked_again(
        self, driver: LedgerDriver
    ) -> None:
        first, second = (DelegationQuestion(number=number, text="which?") for number in (1, 2))
        answer = SendToPeer(key=key_of(1), changes=DelegationChanges(question=None, answered=1, answered_turn=2))
        found = []
        commands: tuple[Command[Any], ...] = (
            add(1),
            offering(1),
            heard("accept", seq=1, delegation_id="d"),
            heard("status", seq=2, question=first),
            answer,
            # It was read while the question was open, and says so again.
            heard("status", seq=3, question=first),
            heard("status", seq=4, question=second),
        )
        for command in commands:
            await driver.ledger.commit(command)
            delegation = await driver.ledger.delegation(key_of(1))
            found.append(delegation.question if delegation is not None else None)
        assert found[2:] == [None, first, None, None, second]

    async def test_an_answer_that_a_restored_provider_may_have_forgotten_counts_until_it_accepts_again(
        self, driver: LedgerDriver
    ) -> None:
        asked = DelegationQuestion(number=1, text="which?")
        answer = SendToPeer(key=key_of(1), changes=DelegationChanges(question=None, answered=1, doubted=0))
        found = []
        commands: tuple[Command[Any], ...] = (
            add(1),
            offering(1),
            heard("accept", seq=1, delegation_id="d"),
            heard("status", seq=2, question=asked),
            answer,
            SendToPeer(key=key_of(1), changes=DelegationChanges(doubted=1)),
            heard("status", seq=3, question=asked),
            heard("accept", seq=4),
            heard("status", seq=5, question=asked),
            # An answer after the offer was repeated is not in doubt when the accept comes.
            answer,
            heard("accept", seq=6),
            heard("status", seq=7, question=asked),
        )
        for command in commands:
            await driver.ledger.commit(command)
            delegation = await driver.ledger.delegation(key_of(1))
            found.append(delegation.question if delegation is not None else None)
        assert found[2:] == [None, asked, None, None, None, None, asked, None, None, None]

    async def test_what_peers_used_is_summed_by_day_and_survives_a_restart_compacted_or_not(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        today, used = day_of(START_MS), TokenUsage(prompt=10, completion=5, total=15)
        commands: tuple[Command[Any], ...] = (
            add(1),
            offering(1),
            offering(2),
            heard("accept", seq=1, delegation_id="d"),
            heard("accept", seq=1, jti="again", delegation_id="d"),
            heard("result_completed", seq=2, usage=used, result=result_of()),
            SendToPeer(key=key_of(1), changes=DelegationChanges(result=None)),
            heard("reject", seq=1, jti="no", number=2, code="busy"),
            offered(3),
        )
        for command in commands:
            await driver.ledger.commit(command)
        asked = PeerUsage(
            day=today,
            role=DelegationRole.REQUESTER,
            peer=id_of(1),
            profile="coder",
            offers=2,
            accepted=1,
            rejected=1,
            completed=1,
            tokens=15,
        )
        given = PeerUsage(day=today, role=DelegationRole.PROVIDER, peer=id_of(1), profile="coder", offers=1, accepted=1)
        for again in range(3):
            assert set(await driver.ledger.peer_usage(today)) == {asked, given}
            assert await driver.ledger.peer_usage(today + 1) == ()
            assert await driver.ledger.peer_usage(today, id_of(2)) == ()
            if again:
                await driver.ledger.compact()
            driver = await restart(driver)
        await driver.ledger.commit(
            SucceedPeer(by=OPERATOR, old=id_of(1), keys_shown=bundle_of(4), vouched=True),
        )
        moved = {msgspec.structs.replace(each, peer=id_of(4)) for each in (asked, given)}
        assert set(await driver.ledger.peer_usage(0)) == moved

    async def test_sums_of_long_ago_are_dropped_and_names_that_a_peer_made_up_are_not_kept(
        self, driver: LedgerDriver, restart: Restart
    ) -> None:
        key = key_of(1, role=DelegationRole.PROVIDER)
        refused = ReceiveFromPeer(
            envelope=envelope("made-up", seq=1),
            key=key,
            begin=msgspec.structs.replace(begun(key), profile="made-up"),
            transitions=("offer", "reject"),
            changes=DelegationChanges(code="no_profile"),
        )
        await driver.ledger.commit(add(1))
        await driver.ledger.commit(refused)
        (row,) = await driver.ledger.peer_usage(0)
        assert (row.profile, row.offers, row.rejected) == ("", 1, 1)
        driver = await restart(driver)
        driver.clock.advance(USAGE_DAYS * DAY_MS)
        await driver.ledger.commit(offering(2))
        (row,) = await driver.ledger.peer_usage(0)
        assert (row.day, row.role) == (day_of(START_MS) + USAGE_DAYS, DelegationRole.REQUESTER)

    async def test_what_is_kept_of_a_tenants_peer_goes_with_it(self, driver: LedgerDriver, restart: Restart) -> None:
        with refused("unknown_tenant", 404):
            await driver.ledger.commit(add(1, tenant="acme"))
        await add_tenant(driver, "acme")
        commands: tuple[Command[Any], ...] = (
            add(1, tenant="acme"),
            offering(1),
            heard("accept", seq=1, delegation_id="d"),
            heard("result_completed", seq=2, result=result_of()),
            SendToPeer(key=key_of(1), changes=DelegationChanges(result=None)),
        )
        for command in commands:
            await driver.ledger.commit(command)
        driver = await restart(driver)
        peer = driver.ledger.peer(id_of(1))
        assert peer is not None
        assert (peer.tenant, len(await driver.ledger.delegations())) == ("acme", 1)
        await driver.ledger.commit(RemovePeer(id=id_of(1), by=OPERATOR))
        driver = await restart(driver)
        assert (await driver.ledger.delegations(), await driver.ledger.peer_usage(0)) == ((), ())
