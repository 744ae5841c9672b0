"""SendMessage: what is answered when, what of a message reaches the agent, and what continues which task."""

import asyncio

import pytest

from tests.conformance.a2a.agents import BYTES, EXTENSION
from tests.conformance.a2a.bindings import Binding, Refused, words
from tests.conformance.a2a.client_answers import Part, Said
from tests.conformance.a2a.server_under_test import ServerUnderTest, unique

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_blocking_send_answers_with_the_finished_task_and_its_artifacts(me: Binding) -> None:
    task = await me.task("words a b c")
    assert (task.state, task.text) == ("completed", "a b c ")
    assert task.message is not None
    assert (task.message.role, task.message.text, task.message.task_id) == ("agent", "a b c ", task.id)
    assert task == await me.get(task.id)


@pytest.mark.parametrize(("verb", "state"), [("ask", "input-required"), ("auth", "auth-required")])
async def test_a_blocking_send_answers_when_the_task_waits_for_its_sender(me: Binding, verb: str, state: str) -> None:
    task = await me.task(f"{verb} which?")
    assert task.state == state
    assert task.message is not None
    assert task.message.text


async def test_a_send_that_need_not_block_is_answered_before_the_work_is_done(
    me: Binding, under_test: ServerUnderTest
) -> None:
    gate = unique()
    task = await me.task(f"gate {gate}", blocking=False)
    assert task.state in ("submitted", "working")
    await under_test.gates.reached(gate)
    assert (await me.get(task.id)).state == "working"
    under_test.gates.open(gate)
    if me.old:
        assert (await me.followed(task.id))[-1].state == "completed"
    else:
        async with me.subscribe(task.id, after=1) as frames:
            assert [frame async for frame in frames][-1].state == "completed"


async def test_an_agent_may_answer_with_a_bare_message(me: Binding) -> None:
    said = await me.send(words("reply good day", context="talk-1"))
    assert isinstance(said, Said)
    assert (said.role, said.text, said.context_id, said.task_id) == ("agent", "good day", "talk-1", None)


async def test_a_context_is_made_where_none_was_named_and_kept_where_one_was(me: Binding) -> None:
    made, named = await me.task("echo"), await me.task(words("echo", context="my own"))
    assert made.context_id
    assert named.context_id == "my own"
    said = await me.send("reply x")
    assert isinstance(said, Said)
    assert said.context_id


async def test_tasks_get_ids_of_their_own_which_no_client_chooses(me: Binding) -> None:
    first, second = await me.task("echo"), await me.task("echo")
    assert first.id != second.id
    chosen = unique()
    with pytest.raises(Refused, match="TASK_NOT_FOUND"):
        await me.send(words("echo", task=chosen))
    with pytest.raises(Refused, match="TASK_NOT_FOUND"):
        await me.get(chosen)


async def test_two_messages_of_one_id_are_two_tasks(me: Binding) -> None:
    same = words("echo", message_id="the-same")
    assert (await me.task(same)).id != (await me.task(same)).id


@pytest.mark.parametrize(("verb", "state"), [("ask", "input-required"), ("auth", "auth-required")])
async def test_an_answer_continues_the_task_that_waits_for_it(me: Binding, verb: str, state: str) -> None:
    parked = await me.task(words(f"{verb} which?", message_id="m-1"))
    assert parked.state == state
    # The context is inferred from the task.
    done = await me.task(words("French", task=parked.id, message_id="m-2"))
    assert (done.id, done.context_id, done.state) == (parked.id, parked.context_id, "completed")
    assert done.message is not None
    assert done.message.text.startswith("turn 2: French")
    assert done.history is not None
    assert [said.message_id for said in done.history if said.role == "user"] == ["m-1", "m-2"]
    assert {said.task_id for said in done.history} == {done.id}


async def test_a_message_to_a_running_task_becomes_its_next_turn(me: Binding, under_test: ServerUnderTest) -> None:
    gate = unique()
    task = await me.task(f"gate {gate}", blocking=False)
    await under_test.gates.reached(gate)
    later = asyncio.create_task(me.task(words("and then?", task=task.id, context=task.context_id, message_id="m-2")))
    while not any(said.message_id == "m-2" for said in (await me.get(task.id)).history or ()):
        assert not later.done()
    under_test.gates.open(gate)
    done = await later
    assert (done.id, done.state) == (task.id, "completed")
    assert done.message is not None
    assert done.message.text.startswith("turn 2: and then?")
    assert "before after" in done.text


async def test_a_message_in_another_context_than_its_task_is_refused(me: Binding) -> None:
    parked = await me.task("ask")
    with pytest.raises(Refused, match="INVALID_PARAMS"):
        await me.send(words("French", task=parked.id, context="another"))
    assert (await me.get(parked.id)).state == "input-required"


@pytest.mark.parametrize("verb", ["echo", "refuse", "raise"])
async def test_a_finished_task_takes_no_further_message(me: Binding, verb: str) -> None:
    done = await me.task(verb)
    before = await me.get(done.id)
    for _ in range(2):
        with pytest.raises(Refused, match=f"UNSUPPORTED_OPERATION: .* it is {done.state}, and takes no more messages"):
            await me.send(words("more", task=done.id))
    with pytest.raises(Refused, match="UNSUPPORTED_OPERATION"):
        await me.streamed(words("more", task=done.id))
    assert await me.get(done.id) == before


async def test_history_is_as_long_as_was_asked_for(me: Binding) -> None:
    sent = {length: await me.task("echo", history=length) for length in (None, 0, 1, 5)}
    assert {length: len(task.history or ()) for length, task in sent.items()} == {None: 2, 0: 0, 1: 1, 5: 2}
    assert sent[0].history is None
    newest = sent[1].history
    assert newest is not None
    assert newest[0].role == "agent"
    done = sent[0].id
    assert [len((await me.get(done, length)).history or ()) for length in (None, 0, 1, 5)] == [2, 0, 1, 2]
    assert (await me.get(done, 0)).history is None
    page = await me.page(contextId=sent[0].context_id, historyLength=1)
    assert [len(task.history or ()) for task in page.tasks] == [1]


PARTS = (
    Part("text", "some words", metadata={"k": 1}),
    Part("raw", BYTES, "image/png", "all.png"),
    Part("url", "https://example.com/a", "text/html", "a.html"),
    Part("data", {"a": [1, None, {"b": True}]}),
)


async def test_files_and_data_reach_the_agent_and_come_back_as_they_went(me: Binding) -> None:
    task = await me.task(words("mirror", *PARTS, metadata={"mood": "good"}))
    assert task.history is not None
    assert task.history[0].parts == (Part("text", "mirror"), *PARTS)
    assert task.history[0].metadata == {"mood": "good"}
    assert task.artifacts is not None
    assert {part for made in task.artifacts for part in made.parts if part.kind in ("raw", "url")} == set(PARTS[1:3])
    assert [part for made in task.artifacts for part in made.parts if part.kind == "data"] == [PARTS[3]]
    assert await me.get(task.id) == task


async def test_files_of_an_agent_are_real_base64_with_their_media_types(me: Binding) -> None:
    task = await me.task("file")
    assert task.artifacts is not None
    assert [(made.name, made.parts) for made in task.artifacts] == [
        ("all.bin", (Part("raw", BYTES, "application/octet-stream", "all.bin"),)),
        ("page.html", (Part("raw", b"<p>", "text/html", "page.html"),)),
    ]


async def test_what_goes_with_a_message_reaches_the_agent(me: Binding) -> None:
    earlier = await me.task("echo")
    message = words("told", metadata={"k": ["v"]}, references=(earlier.id,), context="c-9")
    task = await me.task(message, modes=("text/plain", "application/json"))
    assert task.artifacts is not None
    assert [made.parts[0].value for made in task.artifacts] == [
        {"metadata": {"k": ["v"]}, "references": [earlier.id]},
        {"modes": ["text/plain", "application/json"], "context": "c-9"},
    ]
    assert task.history is not None
    assert task.history[0].references == (earlier.id,)


async def test_a_media_type_that_the_agent_does_not_take_is_refused(me: Binding) -> None:
    plain = me.with_(agent="plain")
    for part in (
        Part("data", {"a": 1}),
        Part("raw", b"x", "application/pdf"),
        Part("raw", b"x"),
        Part("url", "https://example.com", "text/html"),
    ):
        with pytest.raises(Refused, match="CONTENT_TYPE_NOT_SUPPORTED"):
            await plain.send(words("mirror", part))
        with pytest.raises(Refused, match="CONTENT_TYPE_NOT_SUPPORTED"):
            await plain.streamed(words("mirror", part))
    assert (await plain.task(words("mirror", Part("raw", b"x", "image/png")))).state == "completed"


async def test_an_extension_that_the_agent_requires_must_be_declared(me: Binding) -> None:
    mannered = me.with_(agent="mannered")
    for client in (mannered, mannered.saying(a2a_extensions="https://example.com/extensions/manners/v2")):
        with pytest.raises(Refused, match="EXTENSION_SUPPORT_REQUIRED") as refused:
            await client.send("echo")
        assert EXTENSION in refused.value.message
    assert (await mannered.saying(a2a_extensions=f"urn:other, {EXTENSION}").task("echo")).state == "completed"
    said = await mannered.task(words("echo", extensions=(EXTENSION,)))
    assert said.history is not None
    assert said.history[0].extensions == (EXTENSION,)
    # Those that nobody requires are no reason to refuse.
    assert (await me.saying(a2a_extensions="urn:unknown").task("echo")).state == "completed"


async def test_an_agent_that_will_not_ends_its_task_as_rejected_and_says_why(me: Binding) -> None:
    task = await me.task("refuse")
    assert task.state == "rejected"
    assert task.message is not None
    assert task.message.text == "not today"


async def test_an_agent_that_raises_ends_its_task_as_failed_and_its_secrets_stay(me: Binding) -> None:
    task = await me.task("raise")
    assert (task.state, task.text) == ("failed", "so far ")
    assert task.message is not None
    assert task.message.text
    assert "secret" not in repr(await me.get(task.id))


async def test_what_a_turn_used_up_is_told_with_the_task(me: Binding) -> None:
    task = await me.task("spend")
    assert task.notes["covenant.usage"] == {"tokens": 7}
