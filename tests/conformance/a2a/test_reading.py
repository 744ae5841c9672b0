"""GetTask and ListTasks: what a task is told with, and how many of them are read page by page."""

import asyncio
import re
from typing import Any

import pytest

from tests.conformance.a2a.bindings import Binding, Refused, words
from tests.conformance.a2a.client_answers import Told
from tests.conformance.a2a.server_under_test import ServerUnderTest, unique
from tests.waits import BOUND_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


async def test_a_task_is_told_whole(me: Binding) -> None:
    sent = await me.task(words("spend", message_id="mine", context="c-1"))
    task = await me.get(sent.id)
    assert task.history is not None
    assert [(said.message_id, said.role, said.text) for said in task.history] == [
        ("mine", "user", "spend"),
        (f"{task.id}-r", "agent", "spent"),
    ]
    assert task.text == "spent"
    assert UTC.fullmatch(task.timestamp)
    assert UTC.fullmatch(task.notes["covenant.created_at"])
    assert task.notes["covenant.created_at"] <= task.timestamp


async def test_a_task_that_nobody_knows_is_not_found(me: Binding) -> None:
    for unknown in ("nobody", unique(), "00000000-0000-4000-8000-000000000000", "é", "x" * 300):
        with pytest.raises(Refused, match="TASK_NOT_FOUND"):
            await me.get(unknown)
        with pytest.raises(Refused, match="TASK_NOT_FOUND"):
            await me.cancel(unknown)
        with pytest.raises(Refused, match="TASK_NOT_FOUND"):
            await me.followed(unknown)
        with pytest.raises(Refused, match="TASK_NOT_FOUND"):
            await me.send(words("echo", task=unknown))


async def test_a_listing_has_the_newest_status_first(me: Binding, under_test: ServerUnderTest) -> None:
    context, gate = unique(), unique()
    slow = await me.task(words(f"gate {gate}", context=context), blocking=False)
    quick = await me.task(words("echo", context=context))
    under_test.gates.open(gate)
    await me.followed(slow.id, after=1)
    page = await me.page(contextId=context)
    first, second = page.tasks
    assert {first.id, second.id} == {slow.id, quick.id}
    # Times are told in milliseconds: two that are the same have no order.
    assert first.timestamp >= second.timestamp
    assert first.id == slow.id or first.timestamp == second.timestamp


async def test_a_listing_is_read_page_by_page_each_task_once(me: Binding) -> None:
    context = unique()
    sent = {(await me.task(words("echo", context=context))).id for _ in range(7)}
    seen: list[str] = []
    token, sizes = "", []
    while True:
        page = await me.page(contextId=context, pageSize=3, pageToken=token)
        assert page.total == 7
        sizes.append((page.size, len(page.tasks)))
        seen += [task.id for task in page.tasks]
        token = page.next
        if not token:
            break
        # What comes in between disturbs nobody's place.
        await me.task(words("echo", context=unique()))
    assert sizes == [(3, 3), (3, 3), (1, 1)]
    assert (len(seen), set(seen)) == (7, sent)


@pytest.mark.parametrize("artifacts", [False, True])
async def test_a_page_ends_where_it_is_large_and_the_next_goes_on_there(me: Binding, artifacts: bool) -> None:
    context = unique()
    large = [(await me.task(words("x" * 900_000, context=context), history=0)).id for _ in range(5)]
    small = (await me.task(words("echo", context=context))).id
    seen, token = list[list[str]](), ""
    while not seen or token:
        page = await me.page(contextId=context, pageSize=100, pageToken=token, includeArtifacts=artifacts)
        assert page.total == 6
        seen.append([task.id for task in page.tasks])
        token = page.next
    assert [task_id for ids in seen for task_id in ids] == [small, *reversed(large)]
    assert seen[0][0] == small
    assert len(seen) >= 3
    assert all(1 <= len(ids) <= 3 for ids in seen)


async def test_a_listing_has_artifacts_only_where_they_were_asked_for(me: Binding) -> None:
    context = unique()
    await me.task(words("words a b", context=context))
    silent = await me.task(words("silent", context=context))
    assert [task.artifacts for task in (await me.page(contextId=context)).tasks] == [None, None]
    assert [task.artifacts for task in (await me.page(contextId=context, includeArtifacts=False)).tasks] == [None, None]
    shown = (await me.page(contextId=context, includeArtifacts=True)).tasks
    assert [(task.id == silent.id, task.text) for task in shown] == [(True, ""), (False, "a b ")]
    assert shown[0].artifacts == ()


async def test_a_listing_is_filtered_by_context_state_and_moment(me: Binding) -> None:
    context = unique()
    done: dict[str, Told] = {}
    for verb, state in {"echo": "completed", "ask": "input-required", "refuse": "rejected", "raise": "failed"}.items():
        done[state] = await me.task(words(verb, context=context))
    for state, task in done.items():
        page = await me.page(contextId=context, status=me.state(state))
        assert [each.id for each in page.tasks] == [task.id]
        assert page.total == 1
    assert (await me.page(contextId=context, status=me.state("canceled"))).tasks == ()
    middle = done["rejected"].timestamp
    page = await me.page(contextId=context, statusTimestampAfter=middle)
    assert {task.id for task in page.tasks} == {
        task.id for task in done.values() if (await me.get(task.id)).timestamp >= middle
    }
    assert (await me.page(contextId=unique())).tasks == ()


async def test_a_page_without_tasks_says_so_in_all_its_fields(me: Binding) -> None:
    answer = await me.answer("list", {"contextId": unique()})
    assert answer == {"tasks": [], "nextPageToken": "", "pageSize": 0, "totalSize": 0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pageSize", -1),
        ("pageSize", "many"),
        ("historyLength", "all"),
        ("status", "TASK_STATE_SLEEPING"),
        ("statusTimestampAfter", "yesterday"),
        ("statusTimestampAfter", "2025-02-30T00:00:00Z"),
    ],
)
async def test_a_listing_is_refused_where_it_asks_for_what_cannot_be(me: Binding, field: str, value: Any) -> None:
    with pytest.raises(Refused, match="INVALID_PARAMS") as refused:
        await me.page(**{field: value})
    assert field in refused.value.message


@pytest.mark.parametrize(
    ("field", "value"), [("pageSize", 0), ("pageSize", 101), ("pageToken", "made-up"), ("historyLength", -1)]
)
async def test_a_listing_with_numbers_that_cannot_be_is_refused(me: Binding, field: str, value: Any) -> None:
    with pytest.raises(Refused, match="INVALID_PARAMS") as refused:
        await me.page(**{field: value})
    assert field in refused.value.message


async def test_reads_are_answered_while_every_place_of_the_tenant_is_taken(
    me: Binding, under_test: ServerUnderTest
) -> None:
    operator, tenancy, catalogue = under_test.a2a.operator, under_test.a2a.tenancy, under_test.a2a.catalogue
    name = unique("tenant")
    minted = await tenancy.add(operator, name)
    await tenancy.change(operator, name, limits=type(minted.tenant.limits)(live_tasks=1))
    agent = catalogue.agent("default", "actor")
    assert agent is not None
    catalogue.add_resident(name, agent.definition, "code")
    theirs = me.with_(token=minted.token)
    async with theirs.stream("echo") as frames:
        first = await anext(frames)
        assert first.task is not None
        with pytest.raises(Refused, match="RESOURCE_EXHAUSTED"):
            await theirs.send("echo")
        assert (await theirs.get(first.task.id)).state == "submitted"
        assert (await theirs.page()).total == 1
        async with theirs.subscribe(first.task.id, after=1) as again:
            assert (await anext(again)).kind == "task"
        assert (await theirs.cancel(first.task.id)).state == "canceled"
        assert [frame.state async for frame in frames][-1] == "canceled"
    async with asyncio.timeout(BOUND_S):
        while await full(theirs):
            pass


async def full(client: Binding) -> bool:
    """Whether the tenant still has as many live tasks as it may have."""
    try:
        await client.task("echo", blocking=False)
    except Refused as refused:
        return refused.name == "RESOURCE_EXHAUSTED"
    return False
