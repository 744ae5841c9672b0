"""Ids by how they begin, in every operation that takes one; and that nobody learns so of what it may not see."""

import uuid
from typing import Any, Final

import pytest

from covenant.doors.operator_api.operation_table import OPERATIONS
from covenant.ledger.machine.commands import PutPush
from covenant.model.a2a_requests import PushConfig
from covenant.model.ids import TaskId
from tests.doors.doors_under_test import DoorsUnderTest, EnrolledCaller, new_task
from tests.doors.speakers import Speaker

ID_FIELDS: Final = {"task_id", "lease_id", "push_id", "parent"}
ELSEWHERE: Final = {"inspect_a2a_agent"}
"""Whose ids are those of another server."""
KINDS: Final = [operation.kind for operation in OPERATIONS if operation.request.ids]
WRAPPED: Final = {"send_a2a_task": "task", "post_a2a_result": "result", "repair_a2a_task": "request"}


def test_every_operation_with_an_id_of_a_task_takes_how_it_begins() -> None:
    for operation in OPERATIONS:
        fields = ID_FIELDS & set(operation.request.__struct_fields__)
        assert operation.kind in ELSEWHERE or fields == set(operation.request.ids), operation.kind


async def held(under_test: DoorsUnderTest, speaker: Speaker) -> tuple[EnrolledCaller, str, str]:
    """The operator, who has sent itself a task with a push configuration and holds its lease; both ids."""
    operator = under_test.operator
    for action in ("a2a.respond.operator@test", "a2a.repair.requeue", "a2a.send.operator@test"):
        await under_test.grant(action, operator)
    task = new_task(operator)
    await speaker.ask(operator, "send_a2a_task", task=task)
    taken = await speaker.ask(operator, "try_recv_a2a_task")
    config = PushConfig(url="https://hook.example/x", id="push-of-mine")
    await under_test.ledger.commit(PutPush(task_id=TaskId(task["id"]), viewer=None, recipient=None, config=config))
    return operator, task["id"], taken["lease"]["lease_id"]


def asked(kind: str, task_id: str, lease_id: str, operator: EnrolledCaller) -> dict[str, Any]:
    command = {"action": "requeue", "duplicate_risk": "idempotent", "lease_id": lease_id}
    own: dict[str, dict[str, Any]] = {
        "send_a2a_task": {**new_task(operator), "parent": task_id},
        "post_a2a_result": {"task_id": task_id, "status": "ok", "content": [], "lease_id": lease_id},
        "repair_a2a_task": {"task_id": task_id, "command": command, "reason": "r"},
        "find_a2a_tasks": {"parent": task_id},
        "renew_a2a_lease": {"lease_id": lease_id},
        "release_a2a_lease": {"lease_id": lease_id, "reason": "r"},
        "update_a2a_task": {"lease_id": lease_id, "update": {"type": "status", "text": "t"}},
        "cancel_a2a_task": {"reason": "r"},
        "answer_a2a_task": {"text": "t"},
        "signal_a2a_task": {"name": "n"},
        "retry_a2a_push": {"push_id": "push-of"},
    }
    fields = own.get(kind, {})
    if kind in WRAPPED:
        return {WRAPPED[kind]: fields}
    return fields if "parent" in fields else {"task_id": task_id, **fields}


@pytest.mark.parametrize("kind", KINDS)
async def test_how_an_id_begins_is_enough(under_test: DoorsUnderTest, speaker: Speaker, kind: str) -> None:
    operator, task_id, lease_id = await held(under_test, speaker)
    short = asked(kind, task_id[:9].upper(), lease_id[:9].upper(), operator)
    told = await speaker.tell(operator, kind, **short)
    # Nobody has asked for an answer: that is what the task itself is refused for.
    assert told.answer.get("code") in (None, "not_waiting"), told
    for given in ("zz", "ffffffff-0000"):
        missed = await speaker.tell(operator, kind, **asked(kind, given, lease_id, operator))
        assert (missed.answer["code"], missed.answer["message"]) == (
            "unknown_task",
            f"no task begins with {given!r}",
        )


async def test_what_several_begin_with_names_them(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    operator, *_ = await held(under_test, speaker)
    twins = [f"abcdef00-0000-4000-8000-{number:012d}" for number in range(12)]
    for task_id in twins:
        await speaker.ask(operator, "send_a2a_task", task={**new_task(operator), "id": task_id})
    told = await speaker.tell(operator, "show_a2a_task", task_id="abcdef")
    assert told.answer["code"] == "ambiguous_id"
    named = [each for each in twins if each in told.answer["message"]]
    assert (len(named), told.answer["message"][-1]) == (10, "…")


async def test_nobody_learns_of_the_ids_of_another_by_how_they_begin(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice, bob = await under_test.pair()
    dave = await under_test.enroll("dave@test")
    carol = await under_test.enroll("carol@test", "a2a.send.dave@test")
    ids = {name: f"abcdef00-0000-4000-8000-00000000000{each}" for each, name in enumerate(("bob", "dave"))}
    await speaker.ask(alice, "send_a2a_task", task={**new_task(bob), "id": ids["bob"]})
    await speaker.ask(carol, "send_a2a_task", task={**new_task(dave), "id": ids["dave"]})
    # What is ambiguous to the operator is not to those who see one of the two.
    assert (await speaker.tell(under_test.operator, "show_a2a_task", task_id="abcdef")).answer["code"] == "ambiguous_id"
    for caller, name in ((alice, "bob"), (carol, "dave")):
        assert (await speaker.ask(caller, "show_a2a_task", task_id="abcdef"))["task"]["id"] == ids[name]
    stranger = await under_test.enroll("eve@test")
    lease_id = (await speaker.ask(bob, "try_recv_a2a_task"))["lease"]["lease_id"]
    for given in ("abcdef", "abcdef00-0000-4000-8000-00000000000", "0"):
        told = await speaker.tell(stranger, "show_a2a_task", task_id=given)
        assert told.answer["message"] == f"no task begins with {given!r}"
    answers = [
        await speaker.tell(stranger, "renew_a2a_lease", task_id=task_id, lease_id=lease_id[:1])
        for task_id in (ids["bob"], str(uuid.uuid4()))
    ]
    assert answers[0].answer == answers[1].answer
    assert answers[0].answer["code"] == "unknown_lease"


async def test_identities_and_grants_are_named_by_how_they_begin(under_test: DoorsUnderTest, speaker: Speaker) -> None:
    operator = under_test.operator
    alice, bob = await under_test.pair()
    grants = [await speaker.ask(operator, "grant_capability", action="a2a.compact", to="alice@") for _ in range(2)]
    assert {each["subject_display"] for each in grants} == {"alice@test"}
    first, second = (each["signature_b58"] for each in grants)
    told = await speaker.ask(operator, "revoke_capability", signature_b58=first[:20])
    assert (told["signature_b58"], told["removed"]) == (first, True)
    # To bob, who has no such grant, how alice's begins is how none does.
    refused = [await speaker.tell(bob, "revoke_capability", signature_b58=given) for given in (second[:20], "zz")]
    assert refused[0].answer == refused[1].answer
    assert refused[0].answer["code"] == "operator_required"
    assert (await speaker.tell(operator, "revoke_capability", signature_b58="zz")).answer["code"] == "unknown_grant"
    assert (await speaker.ask(alice, "revoke_capability", signature_b58=second[:20]))["removed"]
    assert (await speaker.tell(operator, "revoke_identity", identity="zz")).answer["code"] == "unknown_identity"
    twice = await speaker.tell(operator, "revoke_capability", signature_b58="")
    assert twice.answer["code"] == "ambiguous_id"
    await under_test.enroll("alice@test2")
    assert (await speaker.ask(operator, "rotate_token", identity="alice@test"))["display"] == "alice@test"
    several = await speaker.tell(operator, "revoke_identity", identity="alice")
    assert several.answer["code"] == "ambiguous_identity"
    assert "alice@test2" in several.answer["message"]
    assert (await speaker.ask(operator, "revoke_identity", identity=bob.agent.pubkey[:20]))["display"] == "bob@test"
