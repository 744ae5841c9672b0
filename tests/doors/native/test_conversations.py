"""`/v1/conversations`: threads of native clients, kept as tasks, over restarts and apart from A2A's contexts."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from covenant.agents.api import Agent
from covenant.exchange.a2a_service import A2ARequest
from covenant.model.a2a_requests import Message, SendMessage
from covenant.model.content import Text
from covenant.model.ids import TaskId
from covenant.model.task_event import Began
from tests.doors.native.test_run_routes import streaming, told
from tests.doors.simple.simple_under_test import TOKEN, Patient, SimpleUnderTest, echo, frames_of, open_simple
from tests.waits import BOUND_S

UNKNOWN = "00000000-0000-4000-8000-000000000000"


def parrot() -> Agent:
    """Says all that was said before."""
    agent = Agent("parrot")

    @agent
    async def repeat(turn: Any) -> str:
        before = [f"{said.role}:{said.parts[0].text}" for said in turn.history]
        return f"[{', '.join(before)}] {turn.text}"

    return agent


async def opened(s: SimpleUnderTest, agent: str = "parrot", **more: Any) -> str:
    response = await s.ask("POST", "/v1/conversations", json={"agent": agent, **more})
    assert response.status_code == 201, response.text
    conversation_id: str = response.json()["conversation_id"]
    return conversation_id


async def said(s: SimpleUnderTest, conversation_id: str, text: str, **headers: str) -> str:
    events = await told(s, f"/v1/conversations/{conversation_id}/messages", {"message": text}, **headers)
    assert events[-1][1] == "done"
    content: str = events[-1][2]["content"]
    return content


async def test_a_message_is_answered_with_what_was_said_before_in_mind_also_after_a_restart(tmp_path: Path) -> None:
    async with open_simple(tmp_path, parrot()) as s:
        conversation = await opened(s)
        other = await opened(s)
        assert await said(s, conversation, "one") == "[] one"
        s.clock.advance(10)
        assert await said(s, other, "elsewhere") == "[] elsewhere"
        assert await said(s, conversation, "two") == "[user:one, agent:[] one] two"
        s.clock.advance(10)
    async with open_simple(tmp_path, parrot(), clock=s.clock) as s:
        three = await said(s, conversation, "three")
        assert three == "[user:one, agent:[] one, user:two, agent:[user:one, agent:[] one] two] three"
        listed = (await s.ask("GET", f"/v1/conversations/{conversation}/messages")).json()
        assert listed["count"] == 6
        assert [each["role"] for each in listed["messages"]] == ["user", "agent"] * 3
        assert [each["content"] for each in listed["messages"] if each["role"] == "user"] == ["one", "two", "three"]


async def test_what_is_said_in_a_conversation_names_it_and_nothing_else_does(tmp_path: Path) -> None:
    async with open_simple(tmp_path, parrot()) as s:
        conversation = await opened(s)
        events = await told(s, f"/v1/conversations/{conversation}/messages", {"message": "one"})
        named = [carried["conversation_id"] for _, name, carried in events if name in ("request_received", "done")]
        assert named == [conversation, conversation]
        shown = (await s.ask("GET", f"/v1/requests/{events[0][2]['request_id']}")).json()["request"]
        assert shown["conversation_id"] == conversation
        alone = await told(s, "/v1/orchestrate", {"message": "two", "agent": "parrot"})
        assert not any("conversation_id" in carried for _, _, carried in alone)


async def test_a_run_that_would_close_a_chain_of_calls_is_refused(tmp_path: Path) -> None:
    async with open_simple(tmp_path, parrot()) as s:
        me = s.catalogue.identity("default", "parrot").pubkey
        conversation = await opened(s)
        for path in ("/v1/orchestrate", f"/v1/conversations/{conversation}/messages"):
            for headers, code in (
                ({"covenant-chain": me}, "loop_detected"),
                ({"covenant-depth": "4"}, "depth_exceeded"),
            ):
                body = {"message": "one", **({"agent": "parrot"} if path.endswith("orchestrate") else {})}
                response = await s.ask("POST", path, json=body, headers=headers)
                assert (response.status_code, response.json()["code"]) == (400, code)
        headers = {"covenant-chain": "a", "covenant-depth": "1"}
        events = await told(s, "/v1/orchestrate", {"message": "one", "agent": "parrot"}, **headers)
        (step, *_) = await s.ledger.steps(TaskId(events[0][2]["request_id"]), 0, 1)
        assert isinstance(step.what, Began)
        assert (step.what.task.chain, step.what.task.depth) == (("a",), 1)


async def test_conversations_are_listed_shown_and_deleted(tmp_path: Path) -> None:
    async with open_simple(tmp_path, parrot(), echo()) as s:
        first = await opened(s, title="A talk")
        s.clock.advance(1_000)
        second = await opened(s, "echo")
        listed = (await s.ask("GET", "/v1/conversations")).json()
        assert [each["conversation_id"] for each in listed["conversations"]] == [second, first]
        shown = (await s.ask("GET", f"/v1/conversations/{first}")).json()
        assert (shown["agent"], shown["title"]) == ("parrot", "A talk")
        page = (await s.ask("GET", "/v1/conversations?limit=1")).json()
        rest = (await s.ask("GET", f"/v1/conversations?limit=1&after={page['next']}")).json()
        assert [each["conversation_id"] for each in rest["conversations"]] == [first]
        deleted = await s.ask("DELETE", f"/v1/conversations/{first}")
        assert (deleted.status_code, deleted.json()) == (200, {"conversation_id": first, "deleted": True})
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/messages"), ("POST", "/messages")):
            gone = await s.ask(method, f"/v1/conversations/{first}{path}", json={"message": "x"})
            assert (gone.status_code, gone.json()["code"]) == (404, "unknown_conversation")
        assert (await s.ask("GET", "/v1/conversations")).json()["count"] == 1


async def test_the_master_is_talked_to_if_nobody_is_named_and_unknown_agents_are_refused(tmp_path: Path) -> None:
    async with open_simple(tmp_path) as s:
        made = await s.ask("POST", "/v1/conversations")
        assert (made.status_code, made.json()["agent"]) == (201, "index")
        nobody = await s.ask("POST", "/v1/conversations", json={"agent": "nobody"})
        assert (nobody.status_code, nobody.json()["code"]) == (404, "unknown_agent")


async def test_what_is_another_tenants_is_not_there(tmp_path: Path) -> None:
    async with open_simple(tmp_path, parrot()) as s:
        conversation, stranger = await opened(s), await s.tenant("stranger")
        assert (await s.ask("GET", "/v1/conversations", token=stranger)).json()["count"] == 0
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/messages"), ("POST", "/messages")):
            url = f"/v1/conversations/{conversation}{path}"
            foreign = await s.ask(method, url, token=stranger, json={"message": "x"})
            unknown = await s.ask(method, url.replace(conversation, UNKNOWN), json={"message": "x"})
            malformed = await s.ask(method, url.replace(conversation, "x"), json={"message": "x"})
            answers = {(each.status_code, each.text) for each in (foreign, unknown, malformed)}
            assert answers == {(404, '{"error":"conversation not found","code":"unknown_conversation"}')}
        # A task that is no conversation is none, whoever asks.
        task = (await told(s, "/v1/orchestrate", {"message": "x", "agent": "parrot"}))[0][2]["request_id"]
        assert (await s.ask("GET", f"/v1/conversations/{task}")).status_code == 404


async def test_one_message_at_a_time_and_the_same_one_again_is_the_same(tmp_path: Path) -> None:
    patient = Patient()
    async with open_simple(tmp_path, patient.agent) as s:
        conversation = await opened(s, "patient")
        path = f"/v1/conversations/{conversation}/messages"
        async with streaming(s, path, {"message": "x"}, **{"idempotency-key": "k"}) as response:
            frames = frames_of(response)
            async for _, name, _ in frames:
                if name == "text":
                    break
            busy = await s.ask("POST", path, json={"message": "y"})
            assert (busy.status_code, busy.json()["code"]) == (409, "conversation_busy")
            patient.go_on.set()
            rest = [name async for _, name, _ in frames]
            assert rest[-1] == "done"
        again = await told(s, path, {"message": "x"}, **{"idempotency-key": "k"})
        assert again[-1][1] == "done"
        assert (await s.ask("GET", path)).json()["count"] == 2


async def test_the_next_message_answers_what_the_agent_asked(tmp_path: Path) -> None:
    agent = Agent("asker")

    @agent
    async def ask(turn: Any) -> AsyncIterator[Any]:
        if turn.turn == 1:
            yield turn.need_input("Which one?")
        else:
            yield f"{turn.text} it is"

    async with open_simple(tmp_path, agent) as s:
        conversation = await opened(s, "asker")
        path = f"/v1/conversations/{conversation}/messages"
        assert (await told(s, path, {"message": "Pick"}))[-1][1] == "input_required"
        events = await told(s, path, {"message": "The red one"})
        assert (events[-1][1], events[-1][2]["content"]) == ("done", "The red one it is")
        listed = (await s.ask("GET", path)).json()["messages"]
        assert [each["content"] for each in listed] == ["Pick", "Which one?", "The red one", "The red one it is"]


async def test_naming_a_conversations_context_by_a2a_neither_reads_nor_joins_it(tmp_path: Path) -> None:
    async with open_simple(tmp_path, parrot()) as s:
        conversation = await opened(s)
        await said(s, conversation, "secret")
        agent = s.catalogue.agent("default", "parrot")
        caller = s.tenancy.recognise(TOKEN)
        assert agent is not None
        assert caller is not None
        message = Message(message_id="m", parts=(Text("hello"),), context_id=f"conversation:{conversation}")
        async with asyncio.timeout(BOUND_S):
            view = await s.conversations.send(A2ARequest(caller=caller, agent=agent), SendMessage(message=message))
        assert view.message is not None
        assert view.message.parts == (Text("[] hello"),)
        assert await said(s, conversation, "more") == "[user:secret, agent:[] secret] more"
