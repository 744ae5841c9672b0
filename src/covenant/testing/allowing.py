"""Capabilities and the audit: denied by default, every check on record, no use spent in vain."""

from __future__ import annotations

import asyncio

import pytest

from covenant.ledger.machine.commands import (
    Access,
    Enroll,
    PurgeAudit,
    PurgeGrants,
    PurgeIdentities,
    RevokeGrant,
    RevokeIdentity,
    RotateToken,
)
from covenant.ledger.machine.view import Limits
from covenant.model.grant import REQUEUE_ACTION, Scope, recv_actions, send_actions
from covenant.model.ids import AgentId, LeaseId
from covenant.testing.cast import (
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
from covenant.testing.desk import Desk, refused
from covenant.testing.engine import Engine
from covenant.testing.grants import give, responding, sending
from covenant.testing.suite import Suite

SEND_TO_BOB = send_actions(BOB)[0]


class AllowingSuite(Suite):
    async def test_without_a_grant_nothing_is_sent_and_the_refusal_is_on_record(self, desk: Desk) -> None:
        task = make_task()
        with refused("capability_missing", 403):
            await desk.send(task, access=sending(task))
        assert await desk.ledger.entry(task.id) is None
        (row,) = await desk.audit_rows()
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
        self, desk: Desk, form: int
    ) -> None:
        grant = await give(desk, make_grant(ALICE, send_actions(BOB)[form]))
        task = make_task()
        await desk.send(task, access=sending(task))
        kind = (await desk.audit_rows())[-1]["kind"]
        assert kind["passed"] is True
        assert [by["signature_b58"] for by in kind["authorized_by"]] == [grant.signature_b58]

    async def test_a_grant_is_for_its_subject_and_its_action_alone(self, desk: Desk) -> None:
        await give(desk, make_grant(ALICE, SEND_TO_BOB))
        for task in (make_task(1, sender=CAROL), make_task(2, recipient=CAROL)):
            with refused("capability_missing", 403):
                await desk.send(task, access=sending(task))

    async def test_an_expired_grant_is_none(self, desk: Desk) -> None:
        await give(desk, make_grant(ALICE, SEND_TO_BOB, expires_at=desk.clock() + 10))
        await desk.send(make_task(1), access=sending(make_task(1)))
        desk.clock.advance(11)
        with refused("capability_missing", 403):
            await desk.send(make_task(2), access=sending(make_task(2)))

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
    async def test_a_pinned_field_that_differs_or_is_left_out_refuses(self, desk: Desk, pins: Scope) -> None:
        await give(desk, make_grant(ALICE, SEND_TO_BOB, pins=pins))
        task = make_task()
        with refused("scope_rejected", 403):
            await desk.send(task, access=sending(task))
        assert (await desk.audit_types())[-1] == "capability_scope_rejected"

    async def test_one_grant_that_fits_is_enough_among_many_that_do_not(self, desk: Desk) -> None:
        await give(desk, make_grant(ALICE, SEND_TO_BOB, nonce="1", pins=Scope(task_id=task_id(9))))
        await give(desk, make_grant(ALICE, SEND_TO_BOB, nonce="2", expires_at=1))
        await give(desk, make_grant(ALICE, send_actions(BOB)[1], nonce="3", pins=Scope(task_id=task_id(1))))
        await desk.send(make_task(), access=sending(make_task()))

    async def test_a_grant_is_used_as_often_as_it_says(self, desk: Desk) -> None:
        await give(desk, make_grant(ALICE, SEND_TO_BOB, max_uses=2))
        for number in (1, 2):
            await desk.send(make_task(number), access=sending(make_task(number)))
        with refused("capability_missing", 403):
            await desk.send(make_task(3), access=sending(make_task(3)))
        assert (await desk.audit_types())[-2:] == ["capability_budget_exhausted", "capability_check"]

    async def test_uses_are_counted_right_by_callers_at_the_same_moment(self, desk: Desk) -> None:
        await give(desk, make_grant(ALICE, SEND_TO_BOB, max_uses=3))
        answers = await asyncio.gather(
            *(desk.send(make_task(number), access=sending(make_task(number))) for number in range(10)),
            return_exceptions=True,
        )
        assert len([answer for answer in answers if not isinstance(answer, BaseException)]) == 3
        assert len(await desk.take(count=100)) == 3

    async def test_a_call_rejected_by_scope_spends_no_use(self, desk: Desk) -> None:
        await give(desk, make_grant(ALICE, SEND_TO_BOB, max_uses=1, pins=Scope(task_id=task_id(7))))
        for number in (1, 2, 3):
            with refused("scope_rejected", 403):
                await desk.send(make_task(number), access=sending(make_task(number)))
        await desk.send(make_task(7), access=sending(make_task(7)))
        with refused("capability_missing", 403):
            await desk.send(make_task(7, intent_text="other"), access=sending(make_task(7)))

    async def test_a_call_refused_for_whatever_reason_spends_no_use(self, engine: Engine) -> None:
        desk = Desk(await engine.open(Limits(queued_per_recipient_max=1)), engine.clock)
        await give(desk, make_grant(ALICE, SEND_TO_BOB, max_uses=1))
        await give(desk, make_grant(OPERATOR, REQUEUE_ACTION, max_uses=1))
        await desk.taken(make_task(1))
        await desk.send(make_task(2))
        unwanted = Access(caller=BOB, actions=recv_actions(ALICE), scope_id="a2a-recv-gate:bob", what="send")
        for task, admission, code in (
            (make_task(3, deadline_ms=1), None, "deadline_past"),
            (make_task(1, intent_text="other"), None, "duplicate_task_id"),
            (make_task(4), unwanted, "capability_missing"),
            (make_task(5), None, "queue_full"),
        ):
            with refused(code):
                await desk.send(task, access=sending(task), admission=admission)
        repair = Access(caller=OPERATOR, actions=(REQUEUE_ACTION,), scope_id="a2a-repair", what="repair")
        with refused("lease_mismatch", 409):
            await desk.requeue(task_id(1), lease_id=LeaseId("99999999-9999-4999-8999-999999999999"), access=repair)
        assert [grant.used for grant in await desk.ledger.grants()] == [0, 0]
        await desk.requeue(task_id(1), access=repair)
        await desk.take(count=2)
        await desk.send(make_task(5), access=sending(make_task(5)))
        assert [grant.used for grant in await desk.ledger.grants()] == [1, 1]

    async def test_a_repeated_send_or_result_is_answered_as_the_first_was_and_spends_no_second_use(
        self, desk: Desk
    ) -> None:
        task = make_task()
        await give(desk, make_grant(ALICE, SEND_TO_BOB, max_uses=1))
        await give(desk, make_grant(BOB, f"a2a.respond.{ALICE.display}", max_uses=1))
        for duplicate in (False, True, True):
            assert (await desk.send(task, access=sending(task))).duplicate is duplicate
        leased = await desk.take_one()
        for duplicate in (False, True, True):
            settled = await desk.settle(
                ok(task.id), lease_id=leased.lease.lease_id, access=responding(task, BOB), holder=BOB
            )
            assert settled.duplicate is duplicate
        assert {grant.used for grant in await desk.ledger.grants()} == {1}

    async def test_a_result_needs_the_capability_to_respond(self, desk: Desk) -> None:
        task = make_task()
        leased = await desk.taken(task)
        with refused("capability_missing", 403):
            await desk.settle(ok(task.id), lease_id=leased.lease.lease_id, access=responding(task, BOB))
        assert (await desk.entry(task.id)).lease == leased.lease

    async def test_an_unknown_task_is_refused_before_any_capability_is_checked(self, desk: Desk) -> None:
        with refused("unknown_task", 404):
            await desk.settle(ok(task_id(1)), access=responding(make_task(), BOB))
        assert await desk.audit_types() == ["a2a_result_rejected"]
        access = Access(caller=OPERATOR, actions=(REQUEUE_ACTION,), scope_id="a2a-repair", what="repair")
        with refused("unknown_task", 404):
            await desk.requeue(task_id(1), access=access)
        assert "capability_check" not in await desk.audit_types()

    async def test_a_repair_needs_its_capability_with_the_posture_it_is_pinned_to(self, desk: Desk) -> None:
        await desk.taken(make_task())

        def access(risk: str) -> Access:
            return Access(caller=OPERATOR, actions=(REQUEUE_ACTION,), scope_id="r", what="repair", duplicate_risk=risk)

        with refused("capability_missing", 403):
            await desk.requeue(task_id(1), access=access("idempotent"))
        await give(desk, make_grant(OPERATOR, REQUEUE_ACTION, pins=Scope(duplicate_risk="idempotent")))
        with refused("scope_rejected", 403):
            await desk.requeue(task_id(1), access=access("operator_accepted"))
        await desk.requeue(task_id(1), access=access("idempotent"))

    async def test_a_recipients_admission_is_checked_as_its_own(self, desk: Desk) -> None:
        task = make_task()
        admission = Access(
            caller=BOB, actions=recv_actions(ALICE), scope_id="a2a-recv-gate:bob", what="send", peer=ALICE.pubkey
        )
        await give(desk, make_grant(ALICE, SEND_TO_BOB))
        with refused("capability_missing", 403):
            await desk.send(task, access=sending(task), admission=admission)
        await give(desk, make_grant(BOB, recv_actions(ALICE)[0]))
        await desk.send(task, access=sending(task), admission=admission)

    async def test_equal_grants_are_two_and_revoking_one_leaves_the_other(self, desk: Desk) -> None:
        first = await give(desk, make_grant(ALICE, SEND_TO_BOB, nonce="1"))
        second = await give(desk, make_grant(ALICE, SEND_TO_BOB, nonce="2"))
        assert await desk.ledger.commit(RevokeGrant(by=OPERATOR, signature_b58=first.signature_b58))
        await desk.send(make_task(1), access=sending(make_task(1)))
        assert await desk.ledger.commit(RevokeGrant(by=OPERATOR, signature_b58=second.signature_b58))
        assert not await desk.ledger.commit(RevokeGrant(by=OPERATOR, signature_b58=second.signature_b58))
        with refused("capability_missing", 403):
            await desk.send(make_task(2), access=sending(make_task(2)))

    async def test_a_grant_made_after_a_revoke_is_live(self, desk: Desk) -> None:
        first = await give(desk, make_grant(ALICE, SEND_TO_BOB, nonce="1"))
        await desk.ledger.commit(RevokeGrant(by=OPERATOR, signature_b58=first.signature_b58))
        await give(desk, make_grant(ALICE, SEND_TO_BOB, nonce="2"))
        await desk.send(make_task(), access=sending(make_task()))

    async def test_a_purge_drops_what_ended_before_and_keeps_what_lives(self, desk: Desk) -> None:
        first = await give(desk, make_grant(ALICE, SEND_TO_BOB, nonce="1"))
        second = await give(desk, make_grant(ALICE, SEND_TO_BOB, nonce="2"))
        await desk.ledger.commit(RevokeGrant(by=OPERATOR, signature_b58=first.signature_b58))
        desk.clock.advance(10)
        assert await desk.ledger.commit(PurgeGrants(by=OPERATOR, before_ms=desk.clock() - 10)) == 0
        assert await desk.ledger.commit(PurgeGrants(by=OPERATOR, before_ms=desk.clock())) == 1
        assert [grant.signature_b58 for grant in await desk.ledger.grants()] == [second.signature_b58]

    async def test_an_identity_is_known_by_its_token_until_it_is_revoked(self, desk: Desk) -> None:
        identity = make_identity(ALICE)
        assert desk.ledger.identity(identity.token_sha256) is None
        await desk.ledger.commit(Enroll(by=OPERATOR, identity=identity))
        assert desk.ledger.identity(identity.token_sha256) == identity
        assert desk.ledger.enrolled(ALICE) == ALICE
        assert desk.ledger.enrolled(AgentId(ALICE.display, BOB.pubkey)) == ALICE
        assert desk.ledger.enrolled(AgentId(BOB.display, ALICE.pubkey)) == ALICE
        await desk.ledger.commit(RevokeIdentity(by=OPERATOR, token_sha256=identity.token_sha256))
        known = desk.ledger.identity(identity.token_sha256)
        assert known is not None
        assert known.revoked_at_ms == desk.clock()
        assert desk.ledger.enrolled(ALICE) is None

    async def test_a_name_or_a_key_is_enrolled_once_at_a_time(self, desk: Desk) -> None:
        await desk.ledger.commit(Enroll(by=OPERATOR, identity=make_identity(ALICE)))
        for other in (AgentId(ALICE.display, BOB.pubkey), AgentId(BOB.display, ALICE.pubkey)):
            with refused("display_taken" if other.display == ALICE.display else "pubkey_taken", 409):
                await desk.ledger.commit(Enroll(by=OPERATOR, identity=make_identity(other, number=2)))
        await desk.ledger.commit(RevokeIdentity(by=OPERATOR, token_sha256=make_identity(ALICE).token_sha256))
        await desk.ledger.commit(Enroll(by=OPERATOR, identity=make_identity(ALICE, number=2)))

    async def test_a_rotated_token_takes_over_from_the_old_one_in_one_step(self, desk: Desk) -> None:
        old = make_identity(ALICE)
        new = make_identity(ALICE, number=2)
        await desk.ledger.commit(Enroll(by=OPERATOR, identity=old))
        await desk.ledger.commit(
            RotateToken(
                by=OPERATOR,
                token_sha256=old.token_sha256,
                new_token_sha256=new.token_sha256,
                new_token_prefix=new.token_prefix,
            )
        )
        before, after = desk.ledger.identity(old.token_sha256), desk.ledger.identity(new.token_sha256)
        assert before is not None
        assert before.revoked_at_ms is not None
        assert after is not None
        assert (after.agent, after.revoked_at_ms) == (ALICE, None)
        assert desk.ledger.enrolled(ALICE) == ALICE
        desk.clock.advance(1)
        assert await desk.ledger.commit(PurgeIdentities(by=OPERATOR, before_ms=desk.clock())) == 1
        assert len(await desk.ledger.identities()) == 1

    async def test_the_audit_is_one_chain_that_verifies(self, desk: Desk) -> None:
        for number in range(20):
            await desk.note(f"row {number}")
        report = await desk.ledger.audit_verify()
        assert (report.valid, report.events) == (True, 20)
        assert [row["kind"]["text"] for row in await desk.audit_rows()] == [f"row {number}" for number in range(20)]

    async def test_a_limit_on_audit_rows_applies_after_their_issuer_is_chosen(self, desk: Desk) -> None:
        with refused("capability_missing", 403):
            await desk.send(make_task(), access=sending(make_task()))
        for number in range(20):
            await desk.note(f"row {number}")
        (mine,) = await desk.ledger.audit_recent(ALICE.pubkey, 1, None)
        assert mine.index == 1

    async def test_a_purge_of_the_audit_leaves_a_marker_and_a_chain_that_verifies(self, desk: Desk) -> None:
        for number in range(3):
            await desk.note(f"old {number}")
        desk.clock.advance(10)
        await desk.note("new")
        found = await desk.ledger.audit_before(desk.clock())
        assert found is not None
        count, through, anchor_hash = found
        assert (count, through) == (3, 3)
        purged = await desk.ledger.commit(
            PurgeAudit(by=OPERATOR, before_ms=desk.clock(), through=through, anchor_hash=anchor_hash, count=count)
        )
        assert purged == 3
        kinds = [row["kind"] for row in await desk.audit_rows()]
        assert [kind["type"] for kind in kinds] == ["noted", "audit_purged"]
        assert (kinds[1]["purged"], kinds[1]["through_index"]) == (3, 3)
        await desk.check_audit()
