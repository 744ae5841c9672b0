"""Bad input, over both doors: the code, the status, an audit row where access was refused, and nothing changed."""

import uuid
from pathlib import Path
from typing import Any

import pytest

from covenant.model.ids import base58
from covenant.model.settings import Limits
from tests.doors.doors_under_test import DoorsUnderTest, EnrolledCaller, new_task, now_ms, open_doors
from tests.doors.operator_api.test_operations import leased_task, result_of
from tests.doors.speakers import HttpSpeaker, IpcSpeaker, Speaker

KEY = base58(b"k" * 32)
UNKNOWN = str(uuid.uuid4())


async def refused(speaker: Speaker, actor: EnrolledCaller, kind: str, code: str, status: int, /, **fields: Any) -> str:
    """The message of the refusal, which has that code and (where the door has one) that status."""
    told = await speaker.tell(actor, kind, **fields)
    assert told.answer["kind"] == "error", told
    assert told.answer["code"] == code, told
    assert told.status in (None, status), told
    message: str = told.answer["message"]
    assert message
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"intent_text": " \n"}, "invalid_task"),
        ({"task_kind": " "}, "invalid_task"),
        ({"idempotency": {"duplicate_safety": "unsafe", "key": " "}}, "invalid_task"),
        ({"idempotency": {"duplicate_safety": "maybe", "key": "k"}}, "invalid_request"),
        ({"idempotency": {"duplicate_safety": "idempotent"}}, "invalid_request"),
        ({"id": "1234"}, "invalid_id"),
        ({"id": None}, "invalid_request"),
        ({"id": 7}, "invalid_request"),
        ({"parent": "r" * 36}, "invalid_id"),
        ({"intent_text": ["do"]}, "invalid_request"),
        ({"deadline_ms": "soon"}, "invalid_request"),
        ({"deadline_ms": -1}, "invalid_request"),
        ({"deadline_ms": 1.5}, "invalid_request"),
        ({"deadline_ms": 2**64}, "invalid_task"),
        ({"deadline_ms": 0}, "invalid_task"),
        ({"timeout_ms": 0}, "invalid_task"),
        ({"deadline_ms": 1}, "deadline_past"),
        ({"recipient": None}, "invalid_request"),
        ({"recipient": {"display": "bob"}}, "invalid_agent_id"),
        ({"recipient": {"display": "bob@@test", "pubkey": KEY}}, "invalid_agent_id"),
        ({"recipient": {"display": "granted@test"}}, "unknown_recipient"),
        ({"recipient": {"display": "nobody@test", "pubkey": "tooshort"}}, "invalid_agent_id"),
        ({"recipient": {"display": "bob@test", "pubkey": KEY}}, "recipient_mismatch"),
        ({"parts": [{"type": "video"}]}, "invalid_request"),
        ({"parts": [{"type": "Text", "text": "x"}]}, "invalid_request"),
        ({"parts": [{"type": "image", "data": "no base64", "mimeType": "image/png"}]}, "invalid_content"),
    ],
)
async def test_a_bad_task_is_refused_and_costs_no_audit_row(
    under_test: DoorsUnderTest, speaker: Speaker, change: dict[str, Any], code: str
) -> None:
    alice, bob = await under_test.pair()
    await under_test.grant("a2a.send.granted@test", alice)
    task = {**new_task(bob), **change}
    await refused(speaker, alice, "send_a2a_task", code, 400, task=task)
    assert not await under_test.ledger.audit_recent(alice.agent.pubkey, 100, None)
    assert (await speaker.ask(bob, "try_recv_a2a_task"))["task"] is None


def deep(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


TOO_DEEP = ("invalid_content", "update.parts")
TEXT = {"type": "text", "text": "t"}
NOT_BASE64 = (
    {"type": "image", "data": "!", "mimeType": "image/png"},
    {"type": "audio", "data": "abc", "mimeType": "audio/wav"},
    {"type": "resource", "resource": {"uri": "x", "blob": "a b="}},
)


@pytest.mark.parametrize(
    ("update", "code", "said"),
    [
        ({"type": "artifact", "artifact_id": "", "parts": [TEXT]}, "invalid_update", "update.artifact_id"),
        ({"type": "artifact", "artifact_id": "x" * 257, "parts": [TEXT]}, "invalid_update", "update.artifact_id"),
        ({"type": "artifact", "artifact_id": "a", "parts": []}, "invalid_update", "update.parts"),
        ({"type": "message", "parts": []}, "invalid_update", "update.parts"),
        ({"type": "message", "role": "user", "parts": [TEXT]}, "invalid_update", "update.role"),
        *(
            ({"type": "artifact", "artifact_id": "a", "parts": [TEXT, block]}, "invalid_content", "update.parts[1]")
            for block in NOT_BASE64
        ),
        ({"type": "status", "parts": [NOT_BASE64[0]]}, "invalid_content", "update.parts[0]"),
        ({"type": "artifact", "artifact_id": "a", "parts": [{"type": "json", "value": deep(40)}]}, *TOO_DEEP),
        ({"type": "status", "metadata": {"k": deep(40)}}, "invalid_content", "update.metadata"),
    ],
)
async def test_what_no_client_could_read_is_refused_to_who_works_on_a_task(
    under_test: DoorsUnderTest, speaker: Speaker, update: dict[str, Any], code: str, said: str
) -> None:
    alice, bob = await under_test.pair()
    task, lease = await leased_task(speaker, alice, bob)
    named = {"task_id": task["id"], "lease_id": lease["lease_id"]}
    assert said in await refused(speaker, bob, "update_a2a_task", code, 400, **named, update=update)
    for block in NOT_BASE64:
        result = result_of(task, content=[block])
        assert "content[0]" in await refused(speaker, bob, "post_a2a_result", "invalid_content", 400, result=result)
    good = {"type": "artifact", "artifact_id": "a", "parts": [{"type": "image", "data": "YQ==", "mimeType": "a/b"}]}
    assert (await speaker.ask(bob, "update_a2a_task", **named, update=good))["generation"] == 3


async def test_a_task_that_is_its_own_parent_is_refused(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, bob = await under_test.pair()
    task = new_task(bob)
    await refused(speaker, alice, "send_a2a_task", "invalid_task", 400, task={**task, "parent": task["id"]})


async def test_a_known_id_with_other_content_is_refused(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, bob = await under_test.pair()
    task = new_task(bob)
    await speaker.ask(alice, "send_a2a_task", task=task)
    other = {**task, "intent_text": "something else"}
    await refused(speaker, alice, "send_a2a_task", "duplicate_task_id", 409, task=other)
    assert (await speaker.ask(bob, "try_recv_a2a_task"))["task"]["intent_text"] == task["intent_text"]


async def test_a_task_in_somebody_elses_name_is_refused_and_audited(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice, bob = await under_test.pair()
    for sender in (bob.wire, {"display": "bob@test"}, {"display": "alice@test", "pubkey": KEY}):
        await refused(speaker, alice, "send_a2a_task", "sender_mismatch", 403, task=new_task(bob, sender=sender))
    rows = await under_test.audit("a2a_sender_mismatch")
    assert sorted(row["kind"]["claimed_sender_display"] for row in rows) == ["alice@test", "bob@test", "bob@test"]


async def test_sending_without_the_capability_is_refused_and_audited(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    _, bob = await under_test.pair()
    carol = await under_test.enroll("carol@test")
    message = await refused(speaker, carol, "send_a2a_task", "capability_missing", 403, task=new_task(bob))
    assert "a2a.send.bob@test" in message
    (row,) = await under_test.audit("capability_check")
    assert (row["kind"]["agent_id"], row["kind"]["passed"]) == ("a2a-send:bob@test", False)
    assert row["issuer"] == carol.wire


async def test_sending_outside_the_scope_is_refused_and_audited(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    _, bob = await under_test.pair()
    carol = await under_test.enroll("carol@test")
    await under_test.grant("a2a.send.bob@test", carol, task_id=UNKNOWN)
    await refused(speaker, carol, "send_a2a_task", "scope_rejected", 403, task=new_task(bob))
    assert await under_test.audit("capability_scope_rejected")
    await speaker.ask(carol, "send_a2a_task", task={**new_task(bob), "id": UNKNOWN})


@pytest.mark.parametrize("kind", ["renew_a2a_lease", "release_a2a_lease", "update_a2a_task"])
async def test_what_is_not_the_live_lease_is_stale(under_test: DoorsUnderTest, speaker: Speaker, kind: str) -> None:
    alice, bob = await under_test.pair()
    task, lease = await leased_task(speaker, alice, bob)
    bodies: dict[str, dict[str, Any]] = {
        "renew_a2a_lease": {},
        "release_a2a_lease": {"reason": "r"},
        "update_a2a_task": {"update": {"type": "status", "text": "t"}},
    }
    named = {"task_id": task["id"], **bodies[kind]}
    await refused(speaker, bob, kind, "stale_lease", 409, lease_id=UNKNOWN, **named)
    await refused(speaker, bob, kind, "unknown_lease", 404, lease_id="z", **named)
    await refused(speaker, bob, kind, "invalid_id", 400, lease_id="z" * 40, **named)
    await refused(speaker, alice, kind, "not_lessee", 403, lease_id=lease["lease_id"], **named)
    (row,) = await under_test.audit("a2a_access_refused")
    assert (row["issuer"], row["kind"]["task_id"]) == (alice.wire, task["id"])
    stranger = await under_test.enroll("carol@test")
    await refused(speaker, stranger, kind, "unknown_task", 404, lease_id=lease["lease_id"], **named)


async def test_results_are_refused_from_the_wrong_hands_and_in_the_wrong_state(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice, bob = await under_test.pair()
    carol = await under_test.enroll("carol@test", "a2a.respond.alice@test")
    task, lease = await leased_task(speaker, alice, bob)
    result = result_of(task)
    post = "post_a2a_result"
    await refused(speaker, bob, post, "unknown_task", 404, result={**result, "task_id": UNKNOWN})
    await refused(speaker, carol, post, "unknown_task", 404, result=result)
    assert {row["kind"]["task_id"] for row in await under_test.audit("a2a_result_rejected")} == {UNKNOWN, task["id"]}
    await refused(speaker, bob, post, "stale_lease", 409, result={**result, "lease_id": UNKNOWN})
    await refused(speaker, bob, post, "invalid_request", 400, result={**result, "status": "OK"})
    await refused(speaker, bob, post, "invalid_request", 400, result={**result, "content": "done"})
    await refused(speaker, bob, post, "unknown_task", 404, result={**result, "task_id": "x"})
    await refused(speaker, bob, post, "invalid_id", 400, result={**result, "task_id": "x" * 36})
    await speaker.ask(bob, post, result={**result, "lease_id": lease["lease_id"]})
    await refused(speaker, bob, post, "already_settled", 409, result=result_of(task, "other"))
    assert (await speaker.ask(alice, "try_recv_a2a_result", max=5))["results"] == [result]


async def test_a_result_of_the_sender_and_a_cancel_of_the_holder_are_refused_and_audited(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice, bob = await under_test.pair()
    await under_test.grant("a2a.respond.alice@test", alice)
    task, lease = await leased_task(speaker, alice, bob)
    named = {**result_of(task), "lease_id": lease["lease_id"]}
    await refused(speaker, alice, "post_a2a_result", "not_lessee", 403, result=named)
    await refused(speaker, bob, "cancel_a2a_task", "not_sender", 403, task_id=task["id"], reason="r")
    rows = await under_test.audit("a2a_access_refused")
    assert {row["kind"]["reason"]: row["issuer"] for row in rows} == {"not_lessee": alice.wire, "not_sender": bob.wire}


async def test_answering_without_the_capability_is_refused_and_audited(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice = await under_test.enroll("alice@test", "a2a.send.bob@test")
    bob = await under_test.enroll("bob@test")
    task, _ = await leased_task(speaker, alice, bob)
    await refused(speaker, bob, "post_a2a_result", "capability_missing", 403, result=result_of(task))
    assert (await under_test.audit("capability_check"))[0]["kind"]["agent_id"] == f"a2a-respond:{task['id']}"


async def test_answering_and_repairing_outside_the_scope_is_refused_and_audited(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice = await under_test.enroll("alice@test", "a2a.send.bob@test")
    bob = await under_test.enroll("bob@test")
    await under_test.grant("a2a.respond.alice@test", bob, task_id=UNKNOWN)
    await under_test.grant("a2a.repair.requeue", under_test.operator, duplicate_risk="idempotent")
    await under_test.grant("a2a.repair.force_error", under_test.operator, lease_id=UNKNOWN)
    task, lease = await leased_task(speaker, alice, bob)
    await refused(speaker, bob, "post_a2a_result", "scope_rejected", 403, result=result_of(task))
    for command in (
        {"action": "requeue", "duplicate_risk": "operator_accepted"},
        {"action": "force_error", "message": "m", "lease_id": lease["lease_id"]},
        {"action": "force_error", "message": "m"},
    ):
        asked = {"task_id": task["id"], "reason": "r", "command": command}
        await refused(speaker, under_test.operator, "repair_a2a_task", "scope_rejected", 403, request=asked)
    rows = [(row["issuer"], row["kind"]["action"]) for row in await under_test.audit("capability_scope_rejected")]
    assert sorted(action for _, action in rows) == [
        "a2a.repair.force_error",
        "a2a.repair.force_error",
        "a2a.repair.requeue",
        "a2a.respond.alice@test",
    ]
    assert [issuer for issuer, action in rows if "respond" in action] == [bob.wire]
    (entry,) = (await speaker.ask(bob, "a2a_queue"))["tasks"]
    assert entry["lease_id"] == lease["lease_id"]


async def test_a_foreign_task_is_not_found_by_any_verb(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    alice, bob = await under_test.pair()
    carol = await under_test.enroll("carol@test")
    task, _ = await leased_task(speaker, alice, bob)
    for task_id in (task["id"], UNKNOWN):
        await refused(speaker, carol, "show_a2a_task", "unknown_task", 404, task_id=task_id)
        await refused(speaker, carol, "cancel_a2a_task", "unknown_task", 404, task_id=task_id, reason="r")
    assert (await speaker.ask(carol, "a2a_tree", task_id=task["id"]))["tree"]["task"] is None


@pytest.mark.parametrize(
    ("asked", "code", "status"),
    [
        ({"command": {"action": "requeue", "duplicate_risk": "idempotent"}, "reason": " "}, "invalid_reason", 400),
        ({"command": {"action": "requeue", "duplicate_risk": "idempotent"}}, "invalid_request", 400),
        ({"command": {"action": "requeue"}, "reason": "r"}, "invalid_request", 400),
        ({"command": {"action": "requeue", "duplicate_risk": "some"}, "reason": "r"}, "invalid_request", 400),
        ({"command": {"action": "explode"}, "reason": "r"}, "invalid_request", 400),
        ({"command": {"action": "force_error", "message": " "}, "reason": "r"}, "invalid_repair", 400),
        (
            {"command": {"action": "requeue", "duplicate_risk": "idempotent", "lease_id": UNKNOWN}, "reason": "r"},
            "lease_mismatch",
            409,
        ),
    ],
)
async def test_bad_repairs_are_refused(
    under_test: DoorsUnderTest, speaker: Speaker, asked: dict[str, Any], code: str, status: int
) -> None:
    alice, bob = await under_test.pair()
    await under_test.grant("a2a.repair.requeue", under_test.operator)
    task, _ = await leased_task(speaker, alice, bob)
    request = {"task_id": task["id"], **asked}
    await refused(speaker, under_test.operator, "repair_a2a_task", code, status, request=request)
    assert await under_test.audit("a2a_repair_applied") == []


async def test_repairing_and_compacting_need_a_grant_even_of_the_operator(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice, bob = await under_test.pair()
    task, _ = await leased_task(speaker, alice, bob)
    command = {"action": "requeue", "duplicate_risk": "idempotent"}
    asked = {"task_id": task["id"], "reason": "r", "command": command}
    await refused(speaker, under_test.operator, "repair_a2a_task", "capability_missing", 403, request=asked)
    await refused(speaker, under_test.operator, "compact_a2a", "capability_missing", 403)
    checks = {
        row["kind"]["agent_id"] for row in await under_test.audit("capability_check") if not row["kind"]["passed"]
    }
    assert checks == {f"a2a-repair:{task['id']}", "a2a:compact"}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("enroll_identity", {"display": "eve@test"}),
        ("list_identities", {}),
        ("revoke_identity", {"identity": "alice@test"}),
        ("rotate_token", {"identity": "alice@test"}),
        ("purge_identities", {"before_ms": 1}),
        ("grant_capability", {"action": "a2a.compact"}),
        ("revoke_capability", {"signature_b58": "abc"}),
        ("purge_capabilities", {"before_ms": 1}),
        ("verify_audit_integrity", {}),
        ("purge_audit", {"before_ms": 1}),
    ],
)
async def test_what_only_the_operator_may_do_is_refused_to_others_and_audited(
    under_test: DoorsUnderTest, speaker: Speaker, kind: str, fields: dict[str, Any]
) -> None:
    _, bob = await under_test.pair()
    await refused(speaker, bob, kind, "operator_required", 403, **fields)
    (row,) = await under_test.audit("operator_required")
    assert row["kind"]["peer_display"] == "bob@test"


async def test_everybodys_tasks_are_for_the_operator_alone(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    _, bob = await under_test.pair()
    for kind in ("try_recv_a2a_task", "try_recv_a2a_result"):
        await refused(speaker, bob, kind, "operator_required", 403, scope="all")
    assert len(await under_test.audit("operator_required")) == 2
    await refused(speaker, bob, "retry_a2a_stale", "operator_required", 403, policy={})
    assert (await under_test.audit("operator_required"))[0]["issuer"] == bob.wire
    assert len(await under_test.audit("operator_required")) == 3


@pytest.mark.parametrize(
    ("kind", "fields", "code"),
    [
        ("try_recv_a2a_task", {"max": 0}, "invalid_limit"),
        ("try_recv_a2a_task", {"max": 100_000}, "invalid_limit"),
        ("try_recv_a2a_task", {"max": "many"}, "invalid_request"),
        ("try_recv_a2a_task", {"wait_ms": 10_000_000}, "invalid_wait"),
        ("try_recv_a2a_result", {"wait_ms": 10_000_000}, "invalid_wait"),
        ("try_recv_a2a_task", {"request_id": " "}, "invalid_request_id"),
        ("try_recv_a2a_task", {"request_id": "x" * 1_000}, "invalid_request_id"),
        ("try_recv_a2a_task", {"scope": "theirs"}, "invalid_request"),
        ("recent_a2a_tasks", {"limit": 0}, "invalid_limit"),
        ("recent_a2a_results", {"limit": 1_000_000}, "invalid_limit"),
        ("a2a_queue", {"limit": -3}, "invalid_request"),
        ("a2a_queue", {"state_filter": "resolved"}, "invalid_request"),
        ("recent_audit", {"limit": 0}, "invalid_limit"),
        ("recent_capabilities", {"limit": 5_000}, "invalid_limit"),
        ("list_identities", {"limit": 0}, "invalid_limit"),
        ("list_identities", {"status": "asleep"}, "invalid_request"),
        ("show_a2a_task", {"task_id": "h" * 36}, "invalid_id"),
        ("a2a_tree", {"task_id": "h" * 36}, "invalid_id"),
        ("cancel_a2a_task", {"task_id": UNKNOWN, "reason": " "}, "invalid_reason"),
        ("retry_a2a_stale", {"policy": {"scan_limit": 1_000_000}}, "invalid_policy"),
        ("retry_a2a_stale", {"policy": {"enabled": "yes"}}, "invalid_request"),
        ("enroll_identity", {"display": "no host"}, "invalid_agent_id"),
        ("enroll_identity", {"display": "a@b", "pubkey": "x"}, "invalid_agent_id"),
        ("enroll_identity", {"display": "a@b", "actions": ["*"]}, "invalid_action"),
        ("revoke_identity", {"identity": ""}, "invalid_identity"),
        ("grant_capability", {"action": "a2a send"}, "invalid_action"),
        ("grant_capability", {"action": "a2a.compact", "scope": []}, "invalid_request"),
        ("grant_capability", {"action": "a2a.compact", "scope": {"version": "1"}}, "invalid_scope"),
        ("grant_capability", {"action": "a2a.compact", "expires_at": 1}, "invalid_expiry"),
        ("purge_audit", {}, "invalid_request"),
        ("purge_audit", {"before_ms": -1}, "invalid_request"),
    ],
)
async def test_bad_fields_are_refused(
    under_test: DoorsUnderTest, speaker: Speaker, kind: str, fields: dict[str, Any], code: str
) -> None:
    await refused(speaker, under_test.operator, kind, code, 400, **fields)


async def test_identities_that_are_unknown_taken_or_the_operators_own(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    operator = under_test.operator
    await under_test.pair()
    await refused(speaker, operator, "revoke_identity", "unknown_identity", 404, identity="nobody@test")
    await refused(speaker, operator, "enroll_identity", "display_taken", 409, display="bob@test")
    await refused(speaker, operator, "revoke_identity", "self_revoke_forbidden", 409, identity="operator@test")
    assert await under_test.audit("identity_self_revoke_blocked")
    await refused(speaker, operator, "grant_capability", "unknown_identity", 404, action="a2a.compact", to="no@body")


async def test_what_is_too_large_or_too_many_is_refused(short_path: Path) -> None:
    bytes_max = {"task_bytes_max": 2_000, "result_bytes_max": 2_000, "update_bytes_max": 2_000}
    async with open_doors(short_path, limits=Limits(**bytes_max, queued_per_recipient_max=2)) as under_test:
        alice, bob = await under_test.pair()
        for speaker in (HttpSpeaker(), IpcSpeaker(under_test)):
            big = "x" * 3_000
            await refused(speaker, alice, "send_a2a_task", "task_too_large", 413, task=new_task(bob, big))
            task, lease = await leased_task(speaker, alice, bob)
            named = {"task_id": task["id"], "lease_id": lease["lease_id"]}
            update = {"type": "status", "text": big}
            await refused(speaker, bob, "update_a2a_task", "update_too_large", 413, **named, update=update)
            await refused(speaker, bob, "post_a2a_result", "result_too_large", 413, result=result_of(task, big))
            for _ in range(2):
                await speaker.ask(alice, "send_a2a_task", task=new_task(bob))
            await refused(speaker, alice, "send_a2a_task", "queue_full", 429, task=new_task(bob))
            await speaker.ask(bob, "try_recv_a2a_task", max=2)


async def test_a_recipient_that_did_not_ask_for_tasks_gets_none(short_path: Path) -> None:
    async with open_doors(short_path, mailbox={"recipient_admission": True}) as under_test:
        alice, bob = await under_test.pair()
        speaker = HttpSpeaker()
        await refused(speaker, alice, "send_a2a_task", "capability_missing", 403, task=new_task(bob))
        denied = [row for row in await under_test.audit("capability_check") if not row["kind"]["passed"]]
        assert [row["kind"]["agent_id"] for row in denied] == ["a2a-recv-gate:bob@test"]
        await under_test.grant("a2a.recv.alice@test", bob)
        await speaker.ask(alice, "send_a2a_task", task=new_task(bob, deadline_ms=now_ms() + 60_000))
