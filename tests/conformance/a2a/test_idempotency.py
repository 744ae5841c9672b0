"""A key makes a send the same send: one task, whoever repeats it, and nobody else's."""

import asyncio
from typing import Any

import pytest

from covenant.model.ids import TaskId
from covenant.model.task import DuplicateSafety, Idempotency
from tests.conformance.a2a.bindings import Binding, Refused, words
from tests.conformance.a2a.client_answers import Told
from tests.conformance.a2a.server_under_test import ServerUnderTest, unique
from tests.waits import BOUND_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_same_key_and_message_many_times_at_once_is_one_task(
    me: Binding, under_test: ServerUnderTest
) -> None:
    key, gate, context = unique(), unique(), unique()
    keyed, message = me.saying(idempotency_key=key), words(f"gate {gate}", context=context)
    async with asyncio.timeout(BOUND_S):
        sending = [asyncio.create_task(keyed.task(message)) for _ in range(20)]
        await under_test.gates.reached(gate)
        under_test.gates.open(gate)
        tasks = await asyncio.gather(*sending)
    assert len({task.id for task in tasks}) == 1
    assert {task.state for task in tasks} == {"completed"}
    assert {task.text for task in tasks} == {"before after"}
    assert (await me.page(contextId=context)).total == 1
    again = await keyed.task(message)
    assert again == tasks[0]
    frames = await keyed.streamed(message)
    assert frames[-1].task is not None or frames[-1].ends
    assert (await me.page(contextId=context)).total == 1


@pytest.mark.parametrize("changed", ["text", "context", "metadata"])
async def test_the_same_key_for_another_message_is_refused(me: Binding, changed: str) -> None:
    keyed = me.saying(idempotency_key=unique())
    first = await keyed.task(words("echo", context="c"))
    other: dict[str, Any] = {
        "text": words("echo!", context="c"),
        "context": words("echo", context="d"),
        "metadata": words("echo", context="c", metadata={"k": 1}),
    }
    for attempt in (keyed.send(other[changed]), keyed.streamed(other[changed])):
        with pytest.raises(Refused, match="IDEMPOTENCY_KEY_REUSED"):
            await attempt
    assert (await keyed.task(words("echo", context="c"))).id == first.id


async def test_the_same_key_with_a_new_message_id_is_the_same_send(me: Binding) -> None:
    """Official clients make a new id for each try."""
    keyed, context = me.saying(idempotency_key=unique()), unique()
    first = await keyed.task(words("echo", context=context, message_id="m-1"))
    again = await keyed.task(words("echo", context=context, message_id="m-2"))
    assert again == first
    frames = await keyed.streamed(words("echo", context=context, message_id="m-3"))
    assert frames[-1].task is not None or frames[-1].ends
    assert (await me.page(contextId=context)).total == 1


async def test_a_key_is_its_callers_and_its_agents_own(me: Binding, under_test: ServerUnderTest) -> None:
    key = unique()
    a2a = under_test.a2a
    rotated = await a2a.tenancy.rotate(a2a.operator, "default")
    callers = [me, me.with_(token=rotated.token), me.with_(token=under_test.neighbour)]
    ids = []
    for client in (*callers, me.with_(agent="other")):
        keyed = client.saying(idempotency_key=key)
        task = await keyed.task("echo")
        assert (await keyed.task("echo")).id == task.id
        ids.append(task.id)
    assert len(set(ids)) == 4


async def test_a_key_may_stand_in_metadata_and_may_declare_the_work_idempotent(
    me: Binding, under_test: ServerUnderTest
) -> None:
    key = unique()
    plain, declared = {"key": key}, {"key": unique(), "duplicate_safety": "idempotent"}
    first = await me.task("echo", metadata={"covenant.idempotency": plain})
    assert (await me.saying(idempotency_key=key).task("echo", metadata={"covenant.idempotency": plain})).id == first.id
    second = await me.task(words("echo", metadata={"covenant.idempotency": declared}))
    third = await me.task(words("echo", metadata={"covenant.idempotency": declared}))
    assert second.id == third.id != first.id
    shown = [await under_test.a2a.ledger.show(TaskId(task.id), None, 1) for task in (first, second)]
    safety = [task.task.idempotency for task in shown if task is not None]
    # A key alone says that the request is the same, and nothing about the work.
    assert safety[0] == Idempotency(DuplicateSafety.UNSAFE, key)
    assert safety[1] == Idempotency(DuplicateSafety.IDEMPOTENT, declared["key"])


async def test_a_message_to_a_task_that_is_repeated_under_its_key_is_said_once(me: Binding) -> None:
    parked = await me.task("ask")
    keyed, message = me.saying(idempotency_key=unique()), words("French", task=parked.id, message_id="m-2")
    tasks = [await keyed.task(message) for _ in range(3)]
    assert [task == tasks[0] for task in tasks] == [True] * 3
    assert await keyed.task(words("French", task=parked.id, message_id="m-3")) == tasks[0], "tried again by an SDK"
    assert [said.message_id for said in tasks[0].history or () if said.role == "user"] == ["m-1", "m-2"]
    with pytest.raises(Refused, match="UNSUPPORTED_OPERATION"):
        await me.task(message)
    with pytest.raises(Refused, match="UNSUPPORTED_OPERATION"):
        await keyed.task(words("German", task=parked.id, message_id="m-2"))


async def test_a_message_that_is_repeated_under_its_key_is_answered_with_what_came_of_it_since(me: Binding) -> None:
    """A reply was lost, and comes again, also if the task waits for its sender once more or has gone further."""
    task = await me.task("ask")
    said = [
        (me.saying(idempotency_key=unique()), words(f"again {n}", task=task.id, message_id=f"m-{n}")) for n in range(3)
    ]
    async with asyncio.timeout(BOUND_S):
        for keyed, message in said:
            first = await keyed.task(message)
            assert first.state == "input-required"
            assert await keyed.task(message) == first
        last = await me.get(task.id)
        # Also under an earlier key: it is what has become of the task that answers, and nothing is said again.
        for keyed, message in said:
            assert await keyed.task(message) == last
            frames = await keyed.streamed(message)
            assert (frames[0].kind, frames[-1].state) == ("task", "input-required")
            with pytest.raises(Refused, match="IDEMPOTENCY_KEY_REUSED"):
                await keyed.task(words("something else", task=task.id, message_id="m-9"))
    assert await me.get(task.id) == last
    assert [each.message_id for each in last.history or () if each.role == "user"] == ["m-1", "m-0", "m-1", "m-2"]


async def test_of_two_messages_at_once_under_one_key_one_is_said(me: Binding, under_test: ServerUnderTest) -> None:
    gate = unique()
    task = await me.task(f"gate {gate}", blocking=False)
    await under_test.gates.reached(gate)
    keyed = me.saying(idempotency_key=unique())
    messages = [words(text, task=task.id, message_id="m-2") for text in ("French", "German") * 5]
    said = await asyncio.gather(*(keyed.task(each, blocking=False) for each in messages), return_exceptions=True)
    assert {type(each) for each in said} == {Told, Refused}
    assert {str(each).partition(":")[0] for each in said if isinstance(each, Refused)} == {"IDEMPOTENCY_KEY_REUSED"}
    under_test.gates.open(gate)
    await me.followed(task.id, after=1)
    told = await me.get(task.id)
    assert len([each for each in told.history or () if each.role == "user"]) == 2


async def test_a_key_that_was_used_for_another_message_to_a_task_is_refused(
    me: Binding, under_test: ServerUnderTest
) -> None:
    gate, key = unique(), unique()
    task = await me.task(f"gate {gate}", blocking=False)
    await under_test.gates.reached(gate)
    keyed = me.saying(idempotency_key=key)

    def say(client: Binding, text: str) -> Any:
        return client.task(words(text, task=task.id, message_id="m-2"), blocking=False)

    for _ in range(2):
        assert (await say(keyed, "French")).id == task.id
    with pytest.raises(Refused, match="IDEMPOTENCY_KEY_REUSED"):
        await say(keyed, "German")
    # Another caller's key is another key.
    rotated = await under_test.a2a.tenancy.rotate(under_test.a2a.operator, "default")
    await say(keyed.with_(token=rotated.token), "Dutch")
    under_test.gates.open(gate)
    done = (await me.followed(task.id, after=1))[-1]
    assert done.state == "completed"
    told = await me.get(task.id)
    assert [said.text for said in told.history or () if said.role == "user"][1:] == ["French", "Dutch"]
