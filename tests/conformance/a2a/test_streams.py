"""Streams: their first frame and their last, their numbers, what can be resumed, and what ends with them."""

import asyncio
from itertools import pairwise

import pytest

from covenant.exchange import a2a_service as conversation
from covenant.exchange.tasks import reader as streams
from tests.conformance.a2a.bindings import Binding, Refused, words
from tests.conformance.a2a.client_answers import Frame, folded, known
from tests.conformance.a2a.http_bindings import Rpc, is_stream
from tests.conformance.a2a.server_under_test import ServerUnderTest, unique
from tests.waits import BOUND_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


def numbers(frames: list[Frame]) -> list[int]:
    return [frame.number for frame in frames]


async def test_a_stream_begins_with_its_task_and_closes_with_the_tasks_end(me: Binding) -> None:
    first, *rest = await me.streamed("words a b c")
    assert first.kind == "task"
    assert first.task is not None
    assert {frame.kind for frame in rest} == {"status", "artifact"}
    assert [frame.ends for frame in rest] == [False] * (len(rest) - 1) + [True]
    assert rest[-1].state == "completed"
    assert numbers([first, *rest]) == list(range(1, len(rest) + 2))
    assert folded([first, *rest]) == known(await me.get(first.task.id))


async def test_a_stream_tells_text_as_chunks_of_one_artifact(me: Binding) -> None:
    first, *rest = await me.streamed("words a b c")
    assert first.task is not None
    chunks = [frame for frame in rest if frame.made is not None]
    assert {frame.made.id for frame in chunks if frame.made} == {f"{first.task.id}-text-0"}
    assert [frame.made.text for frame in chunks if frame.made] == ["a ", "b ", "c ", ""]
    assert [frame.append for frame in chunks] == [False, True, True, True]
    assert [frame.last for frame in chunks] == [False, False, False, True]
    assert chunks[0].made is not None
    assert chunks[0].made.name == "response"
    assert rest[-2] is chunks[-1]
    assert rest[-1].message is not None
    assert rest[-1].message.text == "a b c "


async def test_a_stream_says_once_that_it_is_final(me: Binding) -> None:
    first, second, *rest = await me.streamed("words a b")
    assert first.kind == "task"
    assert (second.kind, second.state, second.final) == ("status", "working", False)
    assert [frame.final for frame in rest if frame.kind == "status"] == [True]


@pytest.mark.parametrize("verb", ["raise", "refuse", "nonsense"])
async def test_a_stream_of_a_task_that_does_not_succeed_ends_with_why(me: Binding, verb: str) -> None:
    frames = await me.streamed(verb)
    last = frames[-1]
    assert last.state == ("rejected" if verb == "refuse" else "failed")
    # Who waits for the last chunk of a text gets one, also of a text that was broken off.
    chunks = [frame.last for frame in frames if frame.made is not None]
    assert chunks == ([False, True] if verb == "raise" else [])
    assert last.message is not None
    assert last.message.text


@pytest.mark.usefixtures("patient")
async def test_a_bare_message_is_a_stream_of_one_frame(me: Binding) -> None:
    (only,) = await me.streamed("reply good day")
    assert only.kind == "message"
    assert only.message is not None
    assert (only.message.text, only.message.task_id) == ("good day", None)


async def test_a_bare_message_that_comes_late_ends_the_stream_of_its_task(
    me: Binding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "REPLY_S", 0.0)
    frames = await me.streamed("reply good day")
    last = frames[-1]
    assert (len(frames) == 1) == (last.kind == "message")
    assert last.kind == "message" or last.state == "completed"
    assert last.message is not None
    assert last.message.text == "good day"


async def test_a_stream_ends_where_the_task_waits_for_its_sender_and_the_next_one_goes_on(me: Binding) -> None:
    asked = await me.streamed("ask which?")
    assert asked[-1].state == "input-required"
    assert asked[-1].message is not None
    assert asked[-1].message.text == "which?"
    assert asked[0].task is not None
    answered = await me.streamed(words("French", task=asked[0].task.id))
    assert answered[0].kind == "task"
    assert answered[-1].state == "completed"
    assert answered[0].number > asked[-1].number
    assert folded(answered) == known(await me.get(asked[0].task.id))


async def test_progress_is_told_while_the_agent_works(me: Binding, under_test: ServerUnderTest) -> None:
    gate = unique()
    async with asyncio.timeout(BOUND_S), me.stream(f"gate {gate}") as frames:
        async for frame in frames:
            if frame.made is not None:
                break
        assert frame.made is not None
        assert frame.made.text == "before "
        under_test.gates.open(gate)
        assert [left.state async for left in frames][-1] == "completed"


async def test_streams_of_one_task_are_told_the_same_and_closing_one_ends_neither_the_others_nor_the_task(
    me: Binding, under_test: ServerUnderTest
) -> None:
    gate = unique()
    task = await me.task(f"gate {gate}", blocking=False)
    await under_test.gates.reached(gate)
    async with (
        asyncio.timeout(BOUND_S),
        me.subscribe(task.id, after=1) as one,
        me.subscribe(task.id, after=1) as other,
    ):
        async with me.subscribe(task.id, after=1) as third:
            assert (await anext(third)).kind == "task"
        under_test.gates.open(gate)
        first, second = [frame async for frame in one], [frame async for frame in other]
    assert first == second
    assert first[-1].state == "completed"
    assert (await me.get(task.id)).state == "completed"


async def test_a_client_that_leaves_its_stream_ends_nothing(me: Binding, under_test: ServerUnderTest) -> None:
    gate = unique()
    async with me.stream(f"gate {gate}") as frames:
        first = await anext(frames)
        await under_test.gates.reached(gate)
    assert first.task is not None
    under_test.gates.open(gate)
    rest = await me.followed(first.task.id, after=first.number)
    assert rest[-1].state == "completed"
    assert (await me.get(first.task.id)).text == "before after"


async def test_a_subscription_begins_with_the_task_as_it_is(me: Binding, under_test: ServerUnderTest) -> None:
    gate = unique()
    task = await me.task(f"gate {gate}", blocking=False)
    await under_test.gates.reached(gate)
    while "before" not in (await me.get(task.id)).text:
        pass
    async with asyncio.timeout(BOUND_S), me.subscribe(task.id) as frames:
        first = await anext(frames)
        under_test.gates.open(gate)
        rest = [frame async for frame in frames]
    assert first.task is not None
    if not me.old:
        assert (first.task.state, first.task.text) == ("working", "before ")
    assert rest[-1].state == "completed"
    assert folded([first, *rest]) == known(await me.get(task.id))


async def test_a_finished_task_cannot_be_subscribed_to(me: Binding) -> None:
    done = await me.task("echo")
    with pytest.raises(Refused, match="UNSUPPORTED_OPERATION"):
        await me.followed(done.id)
    # Whoever broke off gets what is missing, also when nothing is.
    (last,) = await me.followed(done.id, after=done.generation)
    assert last.task is not None
    assert last.task.state == "completed"


async def test_a_finished_task_is_replayed_and_ends_with_one_final_status(me: Binding) -> None:
    live = await me.streamed("words a b c")
    assert live[0].task is not None
    again = await me.followed(live[0].task.id)
    assert again == live
    assert [frame.final for frame in again if frame.final is not None] == [False, True]


async def test_a_stream_resumes_after_any_frame_without_a_gap_or_a_repeat(me: Binding) -> None:
    live = await me.streamed("words a b c d")
    assert live[0].task is not None
    done = await me.get(live[0].task.id)
    for frame in live:
        first, *rest = await me.followed(done.id, after=frame.number)
        assert first.number == frame.number
        assert first.task is not None
        assert rest == live[frame.number :]
        assert folded([first, *rest]) == known(done)
    (first, *rest) = await me.followed(done.id, after=0)
    assert numbers([first, *rest]) == numbers(live)


async def test_what_happens_between_the_past_and_the_live_part_of_a_stream_is_told_once(
    me: Binding, under_test: ServerUnderTest
) -> None:
    gates = [unique() for _ in range(20)]
    tasks = [await me.task(f"gate {gate}", blocking=False) for gate in gates]
    for gate in gates:
        await under_test.gates.reached(gate)

    async def follow(task_id: str, gate: str) -> list[Frame]:
        # At the same moment the agent says its last words.
        reading = asyncio.create_task(me.followed(task_id, after=1))
        await asyncio.sleep(0)
        under_test.gates.open(gate)
        return await reading

    async with asyncio.timeout(BOUND_S):
        told = await asyncio.gather(*(follow(task.id, gate) for task, gate in zip(tasks, gates, strict=True)))
    for task, frames in zip(tasks, told, strict=True):
        assert all(later == before + 1 for before, later in pairwise(numbers(frames)))
        assert folded(frames) == known(await me.get(task.id))


@pytest.mark.parametrize("cursor", ["-1", "99", "x", "1.5", "9" * 30])
async def test_a_cursor_that_no_frame_had_is_refused(me: Binding, cursor: str) -> None:
    done = await me.task("echo")
    with pytest.raises(Refused, match="INVALID_PARAMS"):
        await me.followed(done.id, after=cursor)


async def test_every_event_has_its_number_and_nobody_keeps_or_gathers_a_stream(me: Binding) -> None:
    task = await me.task("echo")
    said = me.saying(last_event_id="1")
    if isinstance(me, Rpc):
        reply = await said.raw(me.envelope("subscribe", {"id": task.id}))
    else:
        reply = await said.ask("subscribe", {"id": task.id})
    assert is_stream(reply)
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    events = reply.text.strip().split("\n\n")
    assert [event.splitlines()[0] for event in events] == [f"id: {number + 1}" for number in range(len(events))]
    assert all(("event: message" in event.splitlines()) == me.old for event in events)


async def test_a_quiet_stream_is_kept_alive(
    me: Binding, under_test: ServerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "KEEP_ALIVE_S", 0.01)
    gate = unique()
    task = await me.task(f"gate {gate}", blocking=False)
    await under_test.gates.reached(gate)
    body, said = me.envelope("subscribe", {"id": task.id}), {"authorization": f"Bearer {me.token}"}
    url, method = (me.url, "POST") if isinstance(me, Rpc) else (f"{me.url}/tasks/{task.id}:subscribe", "GET")
    content = body if isinstance(me, Rpc) else None
    async with asyncio.timeout(BOUND_S), me.http.stream(method, url, content=content, headers=said) as reply:
        seen = 0
        async for line in reply.aiter_lines():
            if line == ": keep-alive":
                seen += 1
                if seen == 3:
                    under_test.gates.open(gate)
        assert seen >= 3
    assert (await me.get(task.id)).state == "completed"


async def test_a_blocked_sender_that_is_turned_out_hears_so_and_its_task_goes_on(
    me: Binding, under_test: ServerUnderTest
) -> None:
    """Whoever has a token that was replaced must not be told what comes of the task."""
    operator, tenancy, catalogue = under_test.a2a.operator, under_test.a2a.tenancy, under_test.a2a.catalogue
    name = unique("tenant")
    minted = await tenancy.add(operator, name)
    agent = catalogue.agent("default", "actor")
    assert agent is not None
    catalogue.add_resident(name, agent.definition, "code")
    theirs = me.with_(token=minted.token)
    async with asyncio.timeout(BOUND_S):
        sending = asyncio.create_task(theirs.task("echo"))
        while not (page := await theirs.page()).tasks:
            assert not sending.done()
        rotated = await tenancy.rotate(operator, name)
        with pytest.raises(Refused, match="UNAUTHENTICATED"):
            await sending
    assert (await me.with_(token=rotated.token).get(page.tasks[0].id)).state == "submitted"


async def test_a_tenant_that_is_turned_out_loses_its_streams_and_not_its_tasks(
    me: Binding, under_test: ServerUnderTest
) -> None:
    operator, tenancy = under_test.a2a.operator, under_test.a2a.tenancy
    name = unique("tenant")
    minted = await tenancy.add(operator, name)
    agent = under_test.a2a.catalogue.agent("default", "actor")
    assert agent is not None
    under_test.a2a.catalogue.add_resident(name, agent.definition, "code")
    # Nobody works for it: its task stays where it is.
    theirs = me.with_(token=minted.token)

    async def reading(client: Binding, ready: asyncio.Event) -> list[Frame]:
        frames = []
        async with client.stream("echo") as told:
            async for frame in told:
                frames.append(frame)
                ready.set()
        return frames

    async with asyncio.timeout(BOUND_S):
        ready = asyncio.Event()
        task = asyncio.create_task(reading(theirs, ready))
        await ready.wait()
        rotated = await tenancy.rotate(operator, name)
        frames = await task
        assert [frame.ends for frame in frames] == [False]
        with pytest.raises(Refused, match="UNAUTHENTICATED"):
            await theirs.page()
        theirs = me.with_(token=rotated.token)
        assert frames[0].task is not None
        assert (await theirs.get(frames[0].task.id)).state == "submitted"
        ready = asyncio.Event()
        task = asyncio.create_task(reading(theirs, ready))
        await ready.wait()
        await tenancy.change(operator, name, disabled=True)
        assert [frame.ends for frame in await task] == [False]
        await tenancy.change(operator, name, disabled=False)
        assert (await theirs.page()).total == 2
