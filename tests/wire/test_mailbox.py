"""Requests become the model, with ids in canonical form and callers who are who they say."""

from typing import Any

import msgspec
import pytest

from covenant.model.content import Text
from covenant.model.errors import Invalid
from covenant.model.ids import AgentId, PublicKey, base58
from covenant.model.retry_policy import ForceError, Posture, Requeue, RetryPolicy
from covenant.model.task import DuplicateSafety, Idempotency, ResultStatus, Task
from covenant.wire.mailbox import NO_KEY, PostResult, RepairTask, RetryStaleRequest, SendTask

TASK_ID = "123e4567-e89b-42d3-a456-426614174000"
ALICE = AgentId("alice@here", PublicKey(base58(b"a" * 32)))
BOB = AgentId("bob@here", PublicKey(base58(b"b" * 32)))
EVE = AgentId("eve@there", PublicKey(base58(b"e" * 32)))


def enrolled(agent: AgentId) -> AgentId | None:
    """Alice and Bob are enrolled; found by display or by key, as the ledger does."""
    return next(
        (known for known in (ALICE, BOB) if agent.display == known.display or agent.pubkey == known.pubkey), None
    )


def task(**fields: Any) -> Task:
    given = {"id": TASK_ID, "recipient": {"display": BOB.display}, "intent_text": "do", **fields}
    return msgspec.convert(given, SendTask).task(ALICE, enrolled)


def test_sender_and_the_recipients_key_may_be_left_out() -> None:
    short = task()
    assert (short.sender, short.recipient) == (ALICE, BOB)
    full = task(sender=msgspec.to_builtins(ALICE), recipient=msgspec.to_builtins(BOB))
    assert full == short == task(sender={"display": ALICE.display}, parent=None, parts=None)


def test_only_the_door_says_where_a_task_comes_from() -> None:
    claimed = task(origin="peer", tenant="acme", depth=7)
    assert (claimed.origin, claimed.tenant, claimed.depth) == ("mailbox", None, 0)


def test_ids_are_brought_to_one_form() -> None:
    assert task(id=TASK_ID.upper(), parent=TASK_ID.upper()).id == TASK_ID
    assert task(parent=TASK_ID.upper()).parent == TASK_ID


def test_everything_a_sender_may_say_is_kept() -> None:
    sent = task(
        task_kind="t",
        deadline_ms=5,
        timeout_ms=6,
        context_id="c",
        idempotency={"duplicate_safety": "idempotent", "key": "k"},
        parts=[{"type": "text", "text": "x"}],
    )
    assert sent == Task(
        id=sent.id,
        sender=ALICE,
        recipient=BOB,
        intent_text="do",
        task_kind="t",
        deadline_ms=5,
        timeout_ms=6,
        context_id="c",
        idempotency=Idempotency(DuplicateSafety.IDEMPOTENT, "k"),
        parts=(Text("x"),),
    )


def test_a_claim_to_be_somebody_else_is_passed_on_to_be_refused() -> None:
    assert task(sender=msgspec.to_builtins(EVE)).sender == EVE
    assert task(sender={"display": EVE.display}).sender != ALICE
    assert task(sender={"display": ALICE.display, "pubkey": EVE.pubkey}).sender != ALICE


def test_a_recipient_elsewhere_needs_its_key_and_is_left_without_one() -> None:
    assert task(recipient=msgspec.to_builtins(EVE)).recipient == EVE
    assert task(recipient={"display": EVE.display}).recipient == AgentId(EVE.display, NO_KEY)


def test_a_name_with_another_key_is_not_silently_corrected() -> None:
    confused = {"display": BOB.display, "pubkey": EVE.pubkey}
    assert task(recipient=confused).recipient == AgentId(BOB.display, EVE.pubkey)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"id": "no-uuid"}, "invalid_id"),
        ({"parent": "no-uuid"}, "invalid_id"),
        ({"recipient": {"display": "bob"}}, "invalid_agent_id"),
        ({"recipient": {"display": "bob@x y", "pubkey": BOB.pubkey[:-1] + "0"}}, "invalid_agent_id"),
        ({"recipient": {"display": "eve@there", "pubkey": "abc"}}, "invalid_agent_id"),
        ({"sender": {"display": "@", "pubkey": ALICE.pubkey}}, "invalid_agent_id"),
        ({"sender": {"display": "eve@there", "pubkey": "0OIl"}}, "invalid_agent_id"),
    ],
)
def test_malformed_names_are_refused(fields: dict[str, Any], code: str) -> None:
    with pytest.raises(Invalid) as caught:
        task(**fields)
    assert caught.value.code == code


def test_a_result_has_content_even_when_none_was_given() -> None:
    posted = PostResult(task_id=TASK_ID, status=ResultStatus.OK).result()
    assert msgspec.json.encode(posted) == f'{{"task_id":"{TASK_ID}","status":"ok","content":[]}}'.encode()


def test_repairs_take_both_spellings_of_a_posture() -> None:
    for spelling in ("operator_accepted", "operator-accepted"):
        command = {"action": "requeue", "duplicate_risk": spelling}
        asked = msgspec.convert({"task_id": TASK_ID, "reason": "r", "command": command}, RepairTask)
        assert asked.parsed_command(None) == Requeue(Posture.OPERATOR_ACCEPTED)
    forced = {"action": "force_error", "message": "m", "lease_id": TASK_ID.upper()}
    asked = msgspec.convert({"task_id": TASK_ID, "reason": "r", "command": forced}, RepairTask)
    parsed = asked.parsed_command(asked.command.lease_id)
    assert isinstance(parsed, ForceError)
    assert parsed.lease_id == TASK_ID


def test_a_policy_is_filled_up_with_its_defaults() -> None:
    assert RetryStaleRequest().policy() == RetryPolicy()
    assert RetryStaleRequest(enabled=True, max_attempts=0).policy() == RetryPolicy(enabled=True, max_attempts=0)
