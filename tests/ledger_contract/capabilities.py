"""Capabilities and the audit: denied by default, every check on record, no use spent in vain."""

from __future__ import annotations

import asyncio

import pytest

from covenant.ledger.machine.commands import Access
from covenant.ledger.machine.identity_commands import (
    Enroll,
    PurgeAudit,
    PurgeGrants,
    PurgeIdentities,
    RevokeGrant,
    RevokeIdentity,
    RotateToken,
)
from covenant.model.grant import REQUEUE_ACTION, Scope, recv_actions, send_actions
from covenant.model.ids import AgentId, LeaseId
from covenant.model.settings import Limits
from tests.ledger_contract.driver import LedgerDriver, refused
from tests.ledger_contract.engine import Engine
from tests.ledger_contract.grants import give, responding, sending
from tests.ledger_contract.samples import (
    ALICE,
    BOB,
    CAROL,
    OPERATOR,
    make_grant,
    make_identity,
    make_task,
    ok,
    task_id,
)
from tests.ledger_contract.suite import Suite
from tests.waits import BOUND_S

SEND_TO_BOB = send_actions(BOB)[0]


class CapabilitySuite(Suite):
    async def test_without_a_grant_nothing_is_sent_and_the_refusal_is_on_record(self, driver: LedgerDriver) -> None:
        task = make_task()
        with refused("capability_missing", 403):
            await driver.send(task, access=sending(task))
        assert await driver.ledger.entry(task.id) is None
        (row,) = await driver.audit_rows()
        assert row["issuer"]["display"] == ALICE.display
        assert row["kind"] == {
            "type": "capability_check",
            "agent_id": f"a2a-send:{BOB.display}",
            "required_actions": [SEND_TO_BOB],
            "missing_actions": [SEND_TO_BOB],
            "passed": False,
            "authorized_by": [],
        }

    @pytest.mark.parametrize("form", [0, 1], ids=["by name", "by key"])
    async def test_a_grant_by_name_or_by_key_lets_a_task_in_and_the_check_is_on_record(
        self, driver: LedgerDriver, form: int
    ) -> None:
        grant = await give(driver, make_grant(ALICE, send_actions(BOB)[form]))
        task = make_task()
        await driver.send(task, access=sending(task))
        kind = (await driver.audit_rows())[-1]["kind"]
        assert kind["passed"] is True
        assert [by["signature_b58"] for by in kind["authorized_by"]] == [grant.signature_b58]

    async def test_a_grant_is_for_its_subject_and_its_action_alone(self, driver: LedgerDriver) -> None:
        await give(driver, make_grant(ALICE, SEND_TO_BOB))
        for task in (make_task(1, sender=CAROL), make_task(2, recipient=CAROL)):
            with refused("capability_missing", 403):
                await driver.send(task, access=sending(task))

    async def test_an_expired_grant_is_none(self, driver: LedgerDriver) -> None:
        await give(driver, make_grant(ALICE, SEND_TO_BOB, expires_at=driver.clock() + 10))
        await driver.send(make_task(1), access=sending(make_task(1)))
        driver.clock.advance(11)
        with refused("capability_missing", 403):
            await driver.send(make_task(2), access=sending(make_task(2)))

    @pytest.mark.parametrize(
        "pins",
        [
            Scope(task_id=task_id(9)),
            Scope(peer_pubkey_b58=CAROL.pubkey),
            Scope(lease_id="x"),
            Scope(duplicate_risk="x"),
        ],
        ids=["task", "peer", "lease", "risk"],
    )
    async def test_a_pinned_field_that_differs_or_is_left_out_refuses(self, driver: LedgerDriver, pins: Scope) -> None:
        await give(driver, make_grant(ALICE, SEND_TO_BOB, pins=pins))
        task = make_task()
        with refused("scope_rejected", 403):
            await driver.send(task, access=sending(task))
        assert (await driver.audit_types())[-1] == "capability_scope_rejected"

    async def test_one_grant_that_fits_is_enough_among_many_that_do_not(self, driver: LedgerDriver) -> None:
        await give(driver, make_grant(ALICE, SEND_TO_BOB, nonce="1", pins=Scope(task_id=task_id(9))))
        await give(driver, make_grant(ALICE, SEND_TO_BOB, nonce="2", expires_at=1))
        await give(driver, make_grant(ALICE, send_actions(BOB)[1], nonce="3", pins=Scope(task_id=task_id(1))))
        await driver.send(make_task(), access=sending(make_task()))

    async def test_a_grant_is_used_as_often_as_it_says(self, driver: LedgerDriver) -> None:
        await give(driver, make_grant(ALICE, SEND_TO_BOB, max_uses=2))
        for number in (1, 2):
            await driver.send(make_task(number), access=sending(make_task(number)))
        with refused("capability_missing", 403):
            await driver.send(make_task(3), access=sending(make_task(3)))
        assert (await driver.audit_types())[-2:] == ["capability_budget_exhausted", "capability_check"]

    async def test_uses_are_counted_right_by_callers_at_the_same_moment(self, driver: LedgerDriver) -> None:
        await give(driver, make_grant(ALICE, SEND_TO_BOB, max_uses=3))
        answers = await asyncio.gather(
            *(driver.send(make_task(number), access=sending(make_task(number))) for number in range(10)),
            return_exceptions=True,
        )
        assert len([answer for answer in answers if not isinstance(answer, BaseException)]) == 3
        assert len(await driver.take(count=100)) == 3

    async def test_a_call_rejected_by_scope_spends_no_use(self, driver: LedgerDriver) -> None:
        await give(driver, make_grant(ALICE, SEND_TO_BOB, max_uses=1, pins=Scope(task_id=task_id(7))))
        for number in (1, 2, 3):
            with refused("scope_rejected", 403):
                await driver.send(make_task(number), access=sending(make_task(number)))
        await driver.send(make_task(7), access=sending(make_task(7)))
        with refused("capability_missing", 403):
            await driver.send(make_task(7, intent_text="other"), access=sending(make_task(7)))

    async def test_a_call_refused_for_whatever_reason_spends_no_use(self, engine: Engine) -> None:
        driver = LedgerDriver(await engine.open(Limits(queued_per_recipient_max=1)), engine.clock)
        await give(driver, make_grant(ALICE, SEND_TO_BOB, max_uses=1))
        await give(driver, make_grant(OPERATOR, REQUEUE_ACTION, max_uses=1))
        await driver.taken(make_task(1))
        await driver.send(make_task(2))
        unwanted = Access(caller=BOB, actions=recv_actions(ALICE), scope_id="a2a-recv-gate:bob", what="send")
        for task, admission, code in (
            (make_task(3, deadline_ms=1), None, "deadline_past"),
            (make_task(1, intent_text="other"), None, "duplicate_task_id"),
            (make_task(4), unwanted, "capability_missing"),
            (make_task(5), None, "queue_full"),
        ):
            with refused(code):
                await driver.send(task, access=sending(task), admission=admission)
        repair = Access(caller=OPERATOR, actions=(REQUEUE_ACTION,), scope_id="a2a-repair", what="repair")
        with refused("lease_mismatch", 409):
            await driver.requeue(task_id(1), lease_id=LeaseId("99999999-9999-4999-8999-999999999999"), access=repair)
        assert [grant.used for grant in await driver.ledger.grants()] == [0, 0]
        await driver.requeue(task_id(1), access=repair)
        await driver.take(count=2)
        await driver.send(make_task(5), access=sending(make_task(5)))
        assert [grant.used for grant in await driver.ledger.grants()] == [1, 1]

    async def test_a_repeated_send_or_result_is_answered_as_the_first_was_and_spends_no_second_use(
        self, driver: LedgerDriver
    ) -> None:
        task = make_task()
        await give(driver, make_grant(ALICE, SEND_TO_BOB, max_uses=1))
        await give(driver, make_grant(BOB, f"a2a.respond.{ALICE.display}", max_uses=1))
        for duplicate in (False, True, True):
            assert (await driver.send(task, access=sending(task))).duplicate is duplicate
        leased = await driver.take_one()
        for duplicate in (False, True, True):
            settled = await driver.settle(
                ok(task.id), lease_id=leased.lease.lease_id, access=responding(task, BOB), holder=BOB
            )
            assert settled.duplicate is duplicate
        assert {grant.used for grant in await driver.ledger.grants()} == {1}

    async def test_a_result_needs_the_capability_to_respond(self, driver: LedgerDriver) -> None:
        task = make_task()
        leased = await driver.taken(task)
        with refused("capability_missing", 403):
            await driver.settle(ok(task.id), lease_id=leased.lease.lease_id, access=responding(task, BOB))
        assert (await driver.entry(task.id)).lease == leased.lease

    async def test_an_unknown_task_is_refused_before_any_capability_is_checked(self, driver: LedgerDriver) -> None:
        with refused("unknown_task", 404):
            await driver.settle(ok(task_id(1)), access=responding(make_task(), BOB))
        assert await driver.audit_types() == ["a2a_result_rejected"]
        access = Access(caller=OPERATOR, actions=(REQUEUE_ACTION,), scope_id="a2a-repair", what="repair")
        with refused("unknown_task", 404):
            await driver.requeue(task_id(1), access=access)
        assert "capability_check" not in await driver.audit_types()

    async def test_a_repair_needs_its_capability_with_the_posture_it_is_pinned_to(self, driver: LedgerDriver) -> None:
        await driver.taken(make_task())

        def access(risk: str) -> Access:
            return Access(caller=OPERATOR, actions=(REQUEUE_ACTION,), scope_id="r", what="repair", duplicate_risk=risk)

        with refused("capability_missing", 403):
            await driver.requeue(task_id(1), access=access("idempotent"))
        await give(driver, make_grant(OPERATOR, REQUEUE_ACTION, pins=Scope(duplicate_risk="idempotent")))
        with refused("scope_rejected", 403):
            await driver.requeue(task_id(1), access=access("operator_accepted"))
        await driver.requeue(task_id(1), access=access("idempotent"))

    async def test_a_recipients_admission_is_checked_as_its_own(self, driver: LedgerDriver) -> None:
        task = make_task()
        admission = Access(
            caller=BOB, actions=recv_actions(ALICE), scope_id="a2a-recv-gate:bob", what="send", peer=ALICE.pubkey
        )
        await give(driver, make_grant(ALICE, SEND_TO_BOB))
        with refused("capability_missing", 403):
            await driver.send(task, access=sending(task), admission=admission)
        await give(driver, make_grant(BOB, recv_actions(ALICE)[0]))
        await driver.send(task, access=sending(task), admission=admission)

    async def test_equal_grants_are_two_and_revoking_one_leaves_the_other(self, driver: LedgerDriver) -> None:
        first = await give(driver, make_grant(ALICE, SEND_TO_BOB, nonce="1"))
        second = await give(driver, make_grant(ALICE, SEND_TO_BOB, nonce="2"))
        assert await driver.ledger.commit(RevokeGrant(by=OPERATOR, signature_b58=first.signature_b58))
        await driver.send(make_task(1), access=sending(make_task(1)))
        known = {grant.signature_b58: grant for grant in driver.ledger.grants_of(ALICE.pubkey, SEND_TO_BOB)}
        assert known.keys() == {first.signature_b58, second.signature_b58}
        assert not known[first.signature_b58].live(driver.clock())
        assert known[second.signature_b58].live(driver.clock())
        assert driver.ledger.grants_of(BOB.pubkey, SEND_TO_BOB) == ()
        assert await driver.ledger.commit(RevokeGrant(by=OPERATOR, signature_b58=second.signature_b58))
        assert not await driver.ledger.commit(RevokeGrant(by=OPERATOR, signature_b58=second.signature_b58))
        with refused("capability_missing", 403):
            await driver.send(make_task(2), access=sending(make_task(2)))

    async def test_a_grant_made_after_a_revoke_is_live(self, driver: LedgerDriver) -> None:
        first = await give(driver, make_grant(ALICE, SEND_TO_BOB, nonce="1"))
        await driver.ledger.commit(RevokeGrant(by=OPERATOR, signature_b58=first.signature_b58))
        await give(driver, make_grant(ALICE, SEND_TO_BOB, nonce="2"))
        await driver.send(make_task(), access=sending(make_task()))

    async def test_a_purge_drops_what_ended_before_and_keeps_what_lives(self, driver: LedgerDriver) -> None:
        first = await give(driver, make_grant(ALICE, SEND_TO_BOB, nonce="1"))
        second = await give(driver, make_grant(ALICE, SEND_TO_BOB, nonce="2"))
        await driver.ledger.commit(RevokeGrant(by=OPERATOR, signature_b58=first.signature_b58))
        driver.clock.advance(10)
        assert await driver.ledger.commit(PurgeGrants(by=OPERATOR, before_ms=driver.clock() - 10)) == 0
        assert await driver.ledger.commit(PurgeGrants(by=OPERATOR, before_ms=driver.clock())) == 1
        assert [grant.signature_b58 for grant in await driver.ledger.grants()] == [second.signature_b58]

    async def test_an_identity_is_known_by_its_token_until_it_is_revoked(self, driver: LedgerDriver) -> None:
        identity = make_identity(ALICE)
        assert driver.ledger.identity(identity.token_sha256) is None
        await driver.ledger.commit(Enroll(by=OPERATOR, identity=identity))
        assert driver.ledger.identity(identity.token_sha256) == identity
        assert driver.ledger.enrolled(ALICE) == ALICE
        assert driver.ledger.enrolled(AgentId(ALICE.display, BOB.pubkey)) == ALICE
        assert driver.ledger.enrolled(AgentId(BOB.display, ALICE.pubkey)) == ALICE
        await driver.ledger.commit(RevokeIdentity(by=OPERATOR, token_sha256=identity.token_sha256))
        known = driver.ledger.identity(identity.token_sha256)
        assert known is not None
        assert known.revoked_at_ms == driver.clock()
        assert driver.ledger.enrolled(ALICE) is None

    async def test_a_name_or_a_key_is_enrolled_once_at_a_time(self, driver: LedgerDriver) -> None:
        await driver.ledger.commit(Enroll(by=OPERATOR, identity=make_identity(ALICE)))
        for other in (AgentId(ALICE.display, BOB.pubkey), AgentId(BOB.display, ALICE.pubkey)):
            with refused("display_taken" if other.display == ALICE.display else "pubkey_taken", 409):
                await driver.ledger.commit(Enroll(by=OPERATOR, identity=make_identity(other, number=2)))
        await driver.ledger.commit(RevokeIdentity(by=OPERATOR, token_sha256=make_identity(ALICE).token_sha256))
        await driver.ledger.commit(Enroll(by=OPERATOR, identity=make_identity(ALICE, number=2)))

    async def test_a_rotated_token_takes_over_from_the_old_one_in_one_step(self, driver: LedgerDriver) -> None:
        old = make_identity(ALICE)
        new = make_identity(ALICE, number=2)
        await driver.ledger.commit(Enroll(by=OPERATOR, identity=old))
        await driver.ledger.commit(
            RotateToken(
                by=OPERATOR,
                token_sha256=old.token_sha256,
                new_token_sha256=new.token_sha256,
                new_token_prefix=new.token_prefix,
            )
        )
        before, after = driver.ledger.identity(old.token_sha256), driver.ledger.identity(new.token_sha256)
        assert before is not None
        assert before.revoked_at_ms is not None
        assert after is not None
        assert (after.agent, after.revoked_at_ms) == (ALICE, None)
        assert driver.ledger.enrolled(ALICE) == ALICE
        driver.clock.advance(1)
        assert await driver.ledger.commit(PurgeIdentities(by=OPERATOR, before_ms=driver.clock())) == 1
        assert len(await driver.ledger.identities()) == 1

    async def test_the_audit_is_one_chain_that_verifies(self, driver: LedgerDriver) -> None:
        for number in range(20):
            await driver.note(f"row {number}")
        report = await driver.ledger.audit_verify()
        assert (report.valid, report.events) == (True, 20)
        assert [row["kind"]["text"] for row in await driver.audit_rows()] == [f"row {number}" for number in range(20)]

    async def test_whoever_waits_for_the_audit_is_woken_by_the_next_row(self, driver: LedgerDriver) -> None:
        await driver.note("before")
        assert not await driver.ledger.audited(1)
        waiting = asyncio.create_task(driver.ledger.audited(60_000))
        await asyncio.sleep(0)
        await driver.note("after")
        assert await waiting

    async def test_whoever_waits_for_any_move_is_woken_by_the_next_one(self, driver: LedgerDriver) -> None:
        await driver.note("before")
        moved, same = driver.ledger.changes.next_change(), driver.ledger.changes.next_change()
        assert moved is same
        await asyncio.sleep(0)
        assert not moved.done()
        await driver.note("after")
        await asyncio.wait_for(asyncio.shield(moved), BOUND_S)
        assert not driver.ledger.changes.next_change().done()

    async def test_a_limit_on_audit_rows_applies_after_their_issuer_is_chosen(self, driver: LedgerDriver) -> None:
        with refused("capability_missing", 403):
            await driver.send(make_task(), access=sending(make_task()))
        for number in range(20):
            await driver.note(f"row {number}")
        (mine,) = await driver.ledger.audit_recent(ALICE.pubkey, 1, None)
        assert mine.index == 1

    async def test_audit_rows_are_read_page_by_page_below_a_place_and_before_a_time(self, driver: LedgerDriver) -> None:
        for number in range(5):
            await driver.note(f"row {number}")
            driver.clock.advance(10)
        whole = await driver.ledger.audit_recent(None, 10, None)
        newest = await driver.ledger.audit_recent(None, 2, None)
        assert newest == whole[-2:]
        older = await driver.ledger.audit_recent(None, 2, None, below=newest[0].place)
        assert older == whole[1:3]
        times = [record.timestamp_ms for record in whole]
        assert await driver.ledger.audit_recent(None, 10, times[1], times[3]) == whole[1:3]
        assert await driver.ledger.audit_recent(None, 10, None, below=whole[0].place) == ()

    async def test_a_purge_of_the_audit_leaves_a_marker_and_a_chain_that_verifies(self, driver: LedgerDriver) -> None:
        for number in range(3):
            await driver.note(f"old {number}")
        driver.clock.advance(10)
        await driver.note("new")
        found = await driver.ledger.audit_before(driver.clock())
        ((count, through, anchor_hash, _),) = found
        assert (count, through) == (3, 3)
        purged = await driver.ledger.commit(
            PurgeAudit(by=OPERATOR, before_ms=driver.clock(), through=through, anchor_hash=anchor_hash, count=count)
        )
        assert purged == 3
        kinds = [row["kind"] for row in await driver.audit_rows()]
        assert [kind["type"] for kind in kinds] == ["noted", "audit_purged"]
        assert (kinds[1]["purged"], kinds[1]["through_index"]) == (3, 3)
        await driver.check_audit()
