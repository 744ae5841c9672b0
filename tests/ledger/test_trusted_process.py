"""A process that uses the library trusts itself: it settles as whoever has the lease, in one durable step."""

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import msgspec
import pytest

import covenant
from covenant import AgentId, ForceError, Idempotency, Mailbox, RepairRequest, Requeue, Result, Task
from covenant.model.errors import Conflict, Invalid, NotFound, Refusal
from covenant.model.ids import LeaseId, PublicKey, TaskId
from covenant.model.retry_policy import Posture
from covenant.model.task import DuplicateSafety, ResultStatus

ALICE = AgentId("alice@host", PublicKey("1" * 31 + "2"))
BOB = AgentId("bob@host", PublicKey("1" * 31 + "3"))
TASK = Task(
    id=TaskId("123e4567-e89b-42d3-a456-426614174000"), sender=ALICE, recipient=BOB, intent_text="add two numbers"
)
RESULT = Result(task_id=TASK.id, status=ResultStatus.OK)


@pytest.fixture
async def mailbox() -> AsyncIterator[Mailbox]:
    async with Mailbox.memory() as opened:
        await opened.send_task(TASK)
        yield opened


async def test_a_result_needs_no_word_about_who_has_the_lease(mailbox: Mailbox) -> None:
    await mailbox.recv_task()
    assert not (await mailbox.send_result(RESULT)).duplicate
    assert await mailbox.try_recv_result_for(ALICE) == RESULT


async def test_the_same_result_again_is_a_duplicate_also_when_only_the_archive_knows_the_task(mailbox: Mailbox) -> None:
    await mailbox.recv_task()
    await mailbox.send_result(RESULT)
    assert (await mailbox.send_result(RESULT)).duplicate
    await mailbox.recv_result()
    assert await mailbox.recent_tasks(1) == ()  # waits for the archive, after which the task leaves memory
    assert (await mailbox.send_result(RESULT)).duplicate


async def test_another_result_for_a_settled_task_is_refused(mailbox: Mailbox) -> None:
    await mailbox.recv_task()
    await mailbox.send_result(RESULT)
    with pytest.raises(Conflict, match="already settled"):
        await mailbox.send_result(Result(task_id=TASK.id, status=ResultStatus.ERROR, error_message="too late"))


async def test_a_task_that_nobody_leased_has_no_result_yet(mailbox: Mailbox) -> None:
    with pytest.raises(Conflict, match="not leased"):
        await mailbox.send_result(RESULT)


async def test_a_task_that_was_leased_twice_wants_its_lease_named(mailbox: Mailbox) -> None:
    await mailbox.recv_task()
    await mailbox.repair_task(TASK.id, Requeue(Posture.OPERATOR_ACCEPTED), "the first try was lost")
    second = await mailbox.recv_task_for(BOB)
    with pytest.raises(Conflict, match="lease_id"):
        await mailbox.send_result(RESULT)
    await mailbox.send_result(RESULT, second.lease.lease_id)
    assert await mailbox.recv_result() == RESULT


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"intent_text": " "}, "invalid_task"),
        ({"task_kind": " "}, "invalid_task"),
        ({"idempotency": Idempotency(DuplicateSafety.IDEMPOTENT, " ")}, "invalid_task"),
        ({"deadline_ms": 1}, "deadline_past"),
        ({"intent_text": "x" * 2_000_000}, "task_too_large"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
async def test_a_task_is_checked_as_a_door_would(mailbox: Mailbox, change: dict[str, Any], code: str) -> None:
    with pytest.raises(Refusal) as refused:
        await mailbox.send_task(msgspec.structs.replace(TASK, id=TaskId(str(uuid4())), **change))
    assert refused.value.code == code
    assert [entry.task.id for entry in await mailbox.task_queue(10)] == [TASK.id]


async def test_a_repair_is_checked_as_a_door_would(mailbox: Mailbox) -> None:
    await mailbox.recv_task()
    for command, reason in ((Requeue(Posture.IDEMPOTENT), " "), (ForceError(" "), "it hangs")):
        with pytest.raises(Invalid):
            await mailbox.repair_task(TASK.id, command, reason)
    assert [entry.state for entry in await mailbox.task_queue(10)] == ["in_flight"]


async def test_a_result_for_a_task_that_is_not_known_is_refused(mailbox: Mailbox) -> None:
    other = TaskId("00000000-0000-4000-8000-000000000000")
    with pytest.raises(NotFound, match="not found"):
        await mailbox.send_result(Result(task_id=other, status=ResultStatus.OK))


async def test_every_verb_that_leases_tells_the_lease(mailbox: Mailbox) -> None:
    received = await mailbox.recv_task()
    assert received == TASK
    assert [TASK].index(received) == 0, "from either side"
    assert hash(received) == hash(TASK)
    assert (await mailbox.task_queue(1))[0].lease_id == received.lease.lease_id
    await mailbox.release(TASK.id, received.lease.lease_id, "not begun")
    again = await mailbox.try_recv_task_for(BOB)
    assert again is not None
    assert again.lease.lease_id != received.lease.lease_id
    assert (await mailbox.send_task(again)).duplicate, "it is sent as the task that it is"
    await mailbox.send_result(RESULT, again.lease.lease_id)


async def test_a_lease_is_renewed_and_given_back_under_its_own_id_only(mailbox: Mailbox) -> None:
    held = (await mailbox.recv_task()).lease
    assert (await mailbox.renew(TASK.id, held.lease_id)).renewed_at_ms >= held.leased_at_ms
    await mailbox.release(TASK.id, held.lease_id, "somebody else is faster")
    second = (await mailbox.recv_task()).lease
    for stale in (mailbox.renew(TASK.id, held.lease_id), mailbox.release(TASK.id, held.lease_id, "late")):
        with pytest.raises(Conflict) as refused:
            await stale
        assert refused.value.code == "stale_lease"
    with pytest.raises(Invalid):
        await mailbox.release(TASK.id, second.lease_id, " ")
    with pytest.raises(NotFound):
        await mailbox.renew(TaskId(str(uuid4())), held.lease_id)


async def test_how_an_id_begins_is_enough_for_every_verb(mailbox: Mailbox) -> None:
    begun = TaskId(TASK.id[:-2])
    lease_id = (await mailbox.recv_task()).lease.lease_id
    child = mailbox.new_task(BOB, ALICE, "a part of it", parent=TASK.id)
    await mailbox.send_task(child)
    assert (await mailbox.show(begun)).task == TASK
    assert (await mailbox.tree(begun)).task_id == TASK.id
    assert [found.task_id for found in (await mailbox.find(parent=begun)).tasks] == [child.id]
    await mailbox.renew(begun, LeaseId(lease_id[:8]))
    command = Requeue(Posture.OPERATOR_ACCEPTED, LeaseId(lease_id[:8]))
    assert (await mailbox.repair_task(begun, command, "gone")).task_id == TASK.id
    lease_id = (await mailbox.recv_task_for(BOB)).lease.lease_id
    await mailbox.release(begun, LeaseId(lease_id[:8].upper()), "not begun")
    lease_id = (await mailbox.recv_task_for(BOB)).lease.lease_id
    await mailbox.send_result(msgspec.structs.replace(RESULT, task_id=begun), LeaseId(lease_id[:8]))
    assert (await mailbox.cancel(TaskId(child.id[:8]), "not needed")).canceled
    with pytest.raises(NotFound, match="no task begins with 'zz'"):
        await mailbox.show(TaskId("zz"))


async def test_a_task_is_canceled_and_shown_with_its_tree(mailbox: Mailbox) -> None:
    child = mailbox.new_task(BOB, ALICE, "a part of it", parent=TASK.id)
    await mailbox.send_task(child)
    assert (await mailbox.cancel(child.id, "not needed")).canceled
    shown = await mailbox.show(child.id)
    assert (shown.a2a_state, shown.task) == ("canceled", child)
    tree = await mailbox.tree(TASK.id)
    assert (tree.task_id, [part.task_id for part in tree.children]) == (TASK.id, [child.id])
    with pytest.raises(NotFound):
        await mailbox.show(TaskId(str(uuid4())))


async def test_a_repair_is_asked_for_as_the_documents_have_it(mailbox: Mailbox) -> None:
    lease_id = (await mailbox.recv_task()).lease.lease_id
    command = Requeue(Posture.OPERATOR_ACCEPTED, lease_id)
    outcome = await mailbox.repair_task(RepairRequest(task_id=TASK.id, command=command, reason="its holder is gone"))
    assert (outcome.action, outcome.state) == ("requeued", "queued")
    with pytest.raises(Invalid, match="command"):
        await mailbox.repair_task(TASK.id)


def test_everything_that_is_exported_is_there() -> None:
    for name in covenant.__all__:
        assert getattr(covenant, name) is not None
    assert issubclass(covenant.NotFoundError, covenant.NotFound)
    assert issubclass(covenant.NotFound, covenant.Refusal)
    assert {kind.__name__ for kind in covenant.model.errors.REFUSALS} <= set(covenant.__all__)


async def test_tasks_are_found_live_and_finished(mailbox: Mailbox) -> None:
    await mailbox.recv_task()
    await mailbox.send_result(RESULT)
    await mailbox.recv_result()
    await mailbox.send_task(Mailbox.new_task(ALICE, BOB, "Multiply them", parent=TASK.id))
    page = await mailbox.find(count=True)
    assert (page.total, page.next, [task.intent for task in page.tasks]) == (
        2,
        None,
        ["Multiply them", "add two numbers"],
    )
    assert isinstance(page, covenant.FoundPage)
    assert [task.task_id for task in (await mailbox.find(state="done", agent=BOB.display, text=None)).tasks] == [
        TASK.id
    ]
    assert [task.parent for task in (await mailbox.find(text="multiply", order="moved")).tasks] == [TASK.id]


@pytest.mark.parametrize(
    ("filters", "error", "says"),
    [
        ({"limit": "many"}, covenant.WrongType, "limit"),
        ({"count": 1}, covenant.WrongType, "count"),
        ({"agent": b"bob"}, covenant.WrongType, "agent"),
        ({"since_ms": 1.5}, covenant.WrongType, "since_ms"),
        ({"order": "name"}, covenant.WrongType, "order"),
        ({"text": "\ud800"}, covenant.WrongType, "text"),
        ({"agnet": "bob@host"}, TypeError, "agent"),
        ({"since_ms": -1}, Invalid, "since_ms"),
        ({"limit": 201}, Invalid, "limit"),
        ({"state": "zzz"}, Invalid, "state"),
    ],
)
async def test_a_query_is_checked_as_a_door_would(
    mailbox: Mailbox, filters: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        await mailbox.find(**filters)
