"""Remote agents that are broken, slow, dead or hostile: what the caller hears, and what it never does."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from covenant.daemon.connect import connect
from covenant.model.task_view import RemoteArtifact, TaskState
from covenant.outbound.call_errors import (
    AddressRefused,
    CallFailed,
    NoCard,
    OutcomeUnknown,
    RemoteRefused,
    RemoteTimedOut,
)
from covenant.outbound.remote import a2a_transport, task_follower
from covenant.outbound.remote.task_follower import FAILURES_MAX
from covenant.wire.a2a.card_codec import BadCard
from tests.outbound.http_servers import HERE, Request, always, http_server, redirect, reply
from tests.outbound.remotes import CONTEXT, TASK, Called, card, chunk, hand_made, status, task, timed_out
from tests.waits import BOUND_S


async def test_an_answer_that_is_in_artifacts_only_is_read() -> None:
    def behave(called: Called) -> None:
        called.result({"task": task("COMPLETED", made="all I have")})

    async with hand_made(behave) as hand, hand.connect() as remote:
        reply_ = await remote.send("go")
        assert (reply_.text, reply_.artifacts[0].artifact_id, reply_.context_id) == ("all I have", "a", CONTEXT)


async def test_an_artifact_counts_before_a_word_about_it() -> None:
    def behave(called: Called) -> None:
        called.result({"task": task("COMPLETED", "Done!", made="the report")})

    async with hand_made(behave) as hand, hand.connect() as remote:
        reply_ = await remote.send("go")
        assert reply_.text == "the report"
        assert reply_.message is not None


async def test_a_message_that_says_all_that_was_made_is_the_answer() -> None:
    def behave(called: Called) -> None:
        called.result({"task": task("COMPLETED", "first: the report", made="the report")})

    async with hand_made(behave) as hand, hand.connect() as remote:
        assert (await remote.send("go")).text == "first: the report"


async def test_a_remote_that_stays_working_is_polled_until_the_time_is_over_and_then_canceled() -> None:
    def behave(called: Called) -> None:
        called.result({"task": task()} if called.method == "SendMessage" else task())

    async with hand_made(behave, streaming=False) as hand, hand.connect() as remote:
        failed = await timed_out(
            lambda timeout_s: remote.send("go", timeout_s=timeout_s),
            known=lambda: hand.methods.count("GetTask") > 1,
        )
        assert TASK in str(failed)
        assert hand.canceled.is_set()
        assert hand.methods.count("SendMessage") <= hand.methods.count("CancelTask") + 1, "once for each call"


async def test_whether_a_remote_heard_that_it_is_to_stop_is_told_as_it_is() -> None:
    def behave(called: Called) -> None:
        if called.method == "CancelTask":
            called.writer.close()
        else:
            called.result({"task": task()} if called.method == "SendMessage" else task())

    async with hand_made(behave, streaming=False, stops=False) as hand, hand.connect() as remote:
        failed = await timed_out(lambda timeout_s: remote.send("go", timeout_s=timeout_s))
        assert "task task-1 could not be told to stop" in str(failed)
        assert hand.methods[-1] == "CancelTask"


async def test_a_remote_that_asks_is_answered_with_its_task_and_context() -> None:
    def behave(called: Called) -> None:
        known = called.params["message"].get("taskId")
        called.result({"task": task("COMPLETED", "thanks") if known else task("AUTH_REQUIRED", "who are you?")})

    async with hand_made(behave, streaming=False) as hand, hand.connect() as remote:
        asked = await remote.send("go")
        assert (asked.state, asked.text) == (TaskState.AUTH_REQUIRED, "who are you?")
        assert (await asked.continue_("me")).text == "thanks"
        message = hand.calls[-1].params["message"]
        assert (message["taskId"], message["contextId"]) == (TASK, CONTEXT)


async def test_a_state_from_before_the_answer_is_not_taken_for_the_next_question() -> None:
    def behave(called: Called) -> None:
        if called.method == "GetTask":
            called.result(task("COMPLETED", "thanks"))
        else:
            called.result({"task": task("INPUT_REQUIRED", "which?")})

    async with hand_made(behave, streaming=False) as hand, hand.connect() as remote:
        asked = await remote.send("go")
        assert asked.waits
        assert (await asked.continue_("that")).text == "thanks"


async def test_a_follow_up_stream_that_begins_with_the_question_and_an_artifact_is_heard_to_its_status() -> None:
    async def behave(called: Called) -> None:
        called.open()
        if "taskId" in called.params["message"]:
            called.frame({"task": task("INPUT_REQUIRED", "which?")})
            called.frame(chunk("that ", append=False))
            called.frame(chunk("one"))
            called.frame(status("COMPLETED"))
        else:
            called.frame({"task": task("INPUT_REQUIRED", "which?")})
        await called.close()

    async with hand_made(behave) as hand, hand.connect() as remote:
        asked = await remote.send("go")
        assert asked.waits
        answer = await asked.continue_("that")
        assert (answer.state, answer.text) == (TaskState.COMPLETED, "that one")
        assert hand.methods == ["SendStreamingMessage", "SendStreamingMessage"]


async def test_a_dead_remote_cannot_be_connected_to() -> None:
    async with http_server(always(reply())) as server:
        pass
    with pytest.raises(CallFailed) as raised:
        await connect(server.url(), allow_private=(HERE,))
    assert raised.value.code == "connect_failed"


async def test_a_remote_that_dies_after_its_card_fails_as_unreachable_and_not_as_unknown() -> None:
    async with hand_made(lambda called: None) as hand:
        remote = await hand.connect()
    with pytest.raises(CallFailed) as raised:
        await remote.send("go")
    assert raised.value.code == "connect_failed"
    await remote.close()


async def test_a_slow_remote_is_given_up_in_time() -> None:
    async def behave(called: Called) -> None:
        await called.request.reader.read()

    async with hand_made(behave, streaming=False) as hand, hand.connect() as remote:
        async with asyncio.timeout(BOUND_S):
            with pytest.raises(RemoteTimedOut):
                await remote.send("go", timeout_s=0.3)
        await asyncio.wait_for(hand.served.closed.wait(), BOUND_S)


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_message_that_may_have_been_taken_is_not_sent_again(streaming: bool) -> None:
    async def behave(called: Called) -> None:
        called.writer.close()

    async with hand_made(behave, streaming=streaming) as hand, hand.connect() as remote:
        with pytest.raises(OutcomeUnknown, match="may have taken"):
            await remote.send("go")
        assert len(hand.methods) == 1


@pytest.mark.parametrize("streaming", [True, False])
async def test_under_an_idempotency_key_it_is_sent_again(streaming: bool) -> None:
    async def behave(called: Called) -> None:
        if len(hand.methods) < 3:
            called.writer.close()
        else:
            called.result({"task": task("COMPLETED", "at last")})

    async with hand_made(behave, streaming=streaming) as hand, hand.connect() as remote:
        assert (await remote.send("go", idempotency_key="k")).text == "at last"
        assert [call.headers["idempotency-key"] for call in hand.calls] == ["k"] * 3
        assert len({call.params["message"]["messageId"] for call in hand.calls}) == 1


async def test_what_was_refused_for_the_moment_is_sent_again_when_the_remote_says() -> None:
    def behave(called: Called) -> None:
        if len(hand.methods) == 1:
            called.answer({"error": "busy"}, status=429, retry_after="1")
        else:
            called.result({"task": task("COMPLETED", "now")})

    async with hand_made(behave, streaming=False) as hand, hand.connect() as remote:
        began_s = asyncio.get_running_loop().time()
        assert (await remote.send("go")).text == "now"
        assert asyncio.get_running_loop().time() - began_s >= 1.0


async def test_polls_outlive_troubles_and_do_not_send_again() -> None:
    async def behave(called: Called) -> None:
        if called.method == "SendMessage":
            called.result({"task": task()})
        elif hand.methods.count("GetTask") == 1:
            called.answer({"error": "busy"}, status=503, retry_after="0")
        elif hand.methods.count("GetTask") == 2:
            called.writer.close()
        else:
            called.result(task("COMPLETED", made="done"))

    async with hand_made(behave, streaming=False) as hand, hand.connect() as remote:
        troubles: list[str] = []
        assert (await remote.send("go", troubled=troubles.append)).text == "done"
        assert hand.methods == ["SendMessage", "GetTask", "GetTask", "GetTask"]
        assert ["busy" in troubles[0], *troubles[1:]] == [True, "the answer is not an HTTP response"]


@pytest.mark.parametrize("how", ["http", "rpc"])
async def test_a_404_while_polling_ends_the_wait_at_once(how: str) -> None:
    def behave(called: Called) -> None:
        if called.method == "SendMessage":
            called.result({"task": task()})
        elif how == "http":
            called.answer({"error": "what task?"}, status=404)
        else:
            called.error(-32001, "what task?")

    async with hand_made(behave, streaming=False) as hand, hand.connect() as remote:
        with pytest.raises(RemoteRefused, match=f"no longer knows task {TASK}") as raised:
            await remote.send("go")
        assert (raised.value.code, raised.value.task_id) == ("unknown_task", TASK)
        assert hand.methods == ["SendMessage", "GetTask"]


async def test_a_broken_stream_goes_on_after_its_last_frame() -> None:
    async def behave(called: Called) -> None:
        called.open()
        if called.method == "SendStreamingMessage":
            called.frame({"task": task()}, 1)
            called.frame(chunk("one ", append=False), 2)
            called.frame(chunk("two "), 3)
        else:
            # What the last frame was about is told once more, as a snapshot that stands there.
            called.frame({"task": task(made="one two ")}, 3)
            called.frame(chunk("two "), 3)
            called.frame(chunk("three"), 4)
            called.frame(status("COMPLETED"), 5)
        await called.close()

    async with hand_made(behave) as hand, hand.connect() as remote:
        stream = remote.stream("go")
        told = "".join([news.text async for news in stream if isinstance(news, RemoteArtifact)])
        assert told == stream.reply.text == "one two three"
        assert hand.methods == ["SendStreamingMessage", "SubscribeToTask"]
        assert hand.calls[1].headers["last-event-id"] == "3"


async def test_a_broken_stream_without_numbers_goes_on_from_a_snapshot_without_saying_anything_twice() -> None:
    async def behave(called: Called) -> None:
        called.open()
        if called.method == "SendStreamingMessage":
            called.frame({"task": task()})
            called.frame(chunk("one ", append=False))
        else:
            called.frame({"task": task(made="one two ")})
            called.frame(chunk("three"))
            called.frame(status("COMPLETED"))
        await called.close()

    async with hand_made(behave) as hand, hand.connect() as remote:
        stream = remote.stream("go")
        told = [news.text async for news in stream if isinstance(news, RemoteArtifact)]
        assert told == ["one ", "two ", "three"]
        assert stream.reply.text == "one two three"
        assert "last-event-id" not in hand.calls[1].headers


async def test_what_a_remote_without_numbers_says_twice_is_put_right_in_the_end() -> None:
    async def behave(called: Called) -> None:
        if called.method == "GetTask":
            called.result(task("COMPLETED", made="one two three"))
            return
        called.open()
        if called.method == "SendStreamingMessage":
            called.frame({"task": task()})
            called.frame(chunk("one ", append=False))
        else:
            # The snapshot has what comes after it, as of servers that look before they listen.
            called.frame({"task": task(made="one two ")})
            called.frame(chunk("two "))
            called.frame(chunk("three"))
            called.frame(status("COMPLETED"))
        await called.close()

    async with hand_made(behave) as hand, hand.connect() as remote:
        stream = remote.stream("go")
        told = [news.update async for news in stream if isinstance(news, RemoteArtifact)]
        assert [update.append for update in told] == [False, True, True, True, False]
        assert stream.reply.text == "one two three"
        assert hand.methods == ["SendStreamingMessage", "SubscribeToTask", "GetTask"]


async def test_a_stream_that_cannot_be_resumed_is_polled_and_compared() -> None:
    async def behave(called: Called) -> None:
        if called.method == "GetTask":
            called.result(task("COMPLETED", made="one two three"))
            return
        called.open()
        if called.method == "SendStreamingMessage":
            called.frame({"task": task()})
            called.frame(chunk("one ", append=False))
        else:
            # Neither a number nor a snapshot: what came between cannot be known.
            called.frame(chunk("three"))
        await called.close()

    async with hand_made(behave) as hand, hand.connect() as remote:
        stream = remote.stream("go")
        told = [news.text async for news in stream if isinstance(news, RemoteArtifact)]
        assert told == ["one ", "two three"]
        assert hand.methods == ["SendStreamingMessage", "SubscribeToTask", "GetTask"]


async def test_a_remote_that_refuses_to_be_subscribed_to_is_polled() -> None:
    async def behave(called: Called) -> None:
        if called.method == "SubscribeToTask":
            called.error(-32004, "it is over")
        elif called.method == "GetTask":
            called.result(task("COMPLETED", "over"))
        else:
            called.open()
            called.frame({"task": task()})
            await called.close()

    async with hand_made(behave) as hand, hand.connect() as remote:
        assert (await remote.send("go")).text == "over"
        assert hand.methods == ["SendStreamingMessage", "SubscribeToTask", "GetTask"]


async def test_a_remote_whose_streams_always_break_is_polled_in_the_end() -> None:
    async def behave(called: Called) -> None:
        if called.method == "GetTask":
            called.result(task("COMPLETED", "over"))
            return
        called.open()
        called.frame({"task": task()})
        await called.close()

    async with hand_made(behave) as hand, hand.connect() as remote:
        assert (await remote.send("go")).text == "over"
        assert hand.methods.count("SubscribeToTask") == 3
        assert hand.methods.count("SendStreamingMessage") == 1


@pytest.mark.parametrize("code", [-32009, -32007, -32601])
async def test_a_server_that_does_not_know_this_dialect_is_asked_in_the_other(code: int) -> None:
    def behave(called: Called) -> None:
        if "/" not in called.method:
            called.error(code)
        else:
            called.result({"kind": "message", "messageId": "m", "role": "agent", "parts": [{"text": "old"}]})

    async with hand_made(behave) as hand, hand.connect() as remote:
        assert (await remote.send("go")).text == "old"
        assert hand.methods == ["SendStreamingMessage", "SendMessage", "message/stream"]
        assert ("a2a-version" in hand.calls[0].headers, "a2a-version" in hand.calls[2].headers) == (True, False)
        await remote.send("again")
        # What was learned is remembered.
        assert hand.methods[3:] == ["message/stream"]


async def test_what_cannot_be_read_is_said_to_be_so_and_not_sent_again() -> None:
    def behave(called: Called) -> None:
        called.result({"task": {"id": TASK, "status": "fine", "artifacts": 5}})

    async with hand_made(behave) as hand, hand.connect() as remote:
        with pytest.raises(RemoteRefused) as raised:
            await remote.send("go")
        assert raised.value.code == "bad_answer"
        assert len(hand.methods) == 1


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_body_of_100_megabytes_is_not_read(streaming: bool) -> None:
    async def behave(called: Called) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\nconnection: close\r\n\r\n"
        called.writer.write(head % (b"text/event-stream" if streaming else b"application/json"))
        called.writer.write(b"data: ")
        for _ in range(100):
            called.writer.write(b"x" * 1024 * 1024)
            await called.writer.drain()
        await called.close()

    async with hand_made(behave, streaming=streaming) as hand, hand.connect() as remote:
        with pytest.raises(OutcomeUnknown, match="more than 4194304 bytes"):
            await remote.send("go", idempotency_key="k")
        assert len(hand.methods) == 1
        await asyncio.wait_for(hand.served.closed.wait(), BOUND_S)


async def test_a_card_of_100_megabytes_is_not_read() -> None:
    async with http_server(always(reply(200, b"", content_length=str(100 << 20)))) as server:
        with pytest.raises(CallFailed) as raised:
            await connect(server.url(), allow_private=(HERE,))
        assert raised.value.code == "too_large"


async def test_a_card_that_redirects_to_a_private_address_is_not_followed() -> None:
    async with http_server(always(reply(200, b"{}")), host="127.0.0.2") as inside:
        async with http_server(redirect(inside.url())) as server:
            with pytest.raises(AddressRefused):
                await connect(server.url(), allow_private=(HERE,))
        assert inside.connections == 0


async def test_a_card_that_names_a_private_address_leads_nowhere() -> None:
    async with (
        http_server(always(reply(200, b"{}")), host="127.0.0.2") as inside,
        hand_made(lambda called: None, made=lambda url: card(inside.url("/rpc"))) as hand,
        hand.connect() as remote,
    ):
        with pytest.raises(AddressRefused):
            await remote.send("go")
        assert inside.connections == 0


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"version": "1"}, "name"),
        ({"name": "x"}, "version"),
        ({"name": 5, "version": "1"}, "name"),
        ({"name": "x", "version": {}}, "version"),
        ({"name": " ", "version": "1"}, "name"),
        ([1], "card"),
        (b"<html>", "card"),
    ],
)
async def test_a_card_without_a_name_or_a_version_is_none(said: Any, field: str) -> None:
    async with hand_made(lambda called: None, made=lambda url: said) as hand:
        with pytest.raises(BadCard) as raised:
            await hand.connect()
        assert raised.value.field == field


async def test_a_card_with_wrong_types_everywhere_else_is_read_for_what_it_is() -> None:
    def behave(called: Called) -> None:
        called.result({"message": {"messageId": "m", "role": "ROLE_AGENT", "parts": [{"text": "hi"}]}})

    def made(url: str) -> dict[str, Any]:
        wrong = {"skills": "many", "capabilities": [], "securitySchemes": 7, "security": {}, "description": None}
        ways = [5, {"url": 5}, {"url": url, "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}]
        return {"name": "x", "version": "1", "supportedInterfaces": ways, "signatures": "no", **wrong}

    async with hand_made(behave, made=made) as hand, hand.connect() as remote:
        assert (await remote.send("go")).text == "hi"


async def test_a_card_that_offers_nothing_known_is_refused_by_what_it_offers() -> None:
    def made(url: str) -> dict[str, Any]:
        way = {"url": url, "protocolBinding": "CARRIER-PIGEON", "protocolVersion": "1.0"}
        return {"name": "x", "version": "1", "supportedInterfaces": [way]}

    async with hand_made(lambda called: None, made=made) as hand:
        with pytest.raises(NoCard, match="CARRIER-PIGEON"):
            await hand.connect()


async def test_the_host_s_card_is_not_taken_for_an_agent_that_it_does_not_name() -> None:
    async def speak(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.target == "/.well-known/agent-card.json":
            writer.write(reply(200, json.dumps(card("http://elsewhere.example/rpc")).encode()))
        else:
            writer.write(reply(404))

    async with http_server(speak) as server, connect(server.url("/my/agent"), allow_private=(HERE,)) as remote:
        assert remote.card is None
        assert remote.interface.url == server.url("/my/agent")
    assert [request.target for request in server.requests] == [
        "/my/agent/agent-card.json",
        "/my/agent/.well-known/agent-card.json",
        "/.well-known/agent-card.json",
    ]


async def test_a_page_for_people_is_not_taken_for_a_card_that_is_elsewhere() -> None:
    async def speak(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.target == "/app/.well-known/agent-card.json":
            writer.write(reply(200, json.dumps(card(server.url("/rpc"))).encode()))
        else:
            writer.write(reply(200, b"<html>"))

    async with http_server(speak) as server, connect(server.url("/app"), allow_private=(HERE,)) as remote:
        assert remote.interface.url == server.url("/rpc")


async def test_an_error_object_counts_whatever_status_it_comes_under() -> None:
    def behave(called: Called) -> None:
        called.answer({"id": 1, "error": {"code": -32001, "message": "what task?"}, "jsonrpc": "2.0"}, status=404)

    async with hand_made(behave) as hand, hand.connect() as remote:
        with pytest.raises(RemoteRefused) as raised:
            await remote.get(TASK)
        assert (raised.value.code, raised.value.rpc_code) == ("unknown_task", -32001)


@pytest.mark.parametrize("style", [{}, {"indent": 1}, {"separators": (",", ":")}], ids=["spaced", "lines", "compact"])
@pytest.mark.parametrize("code_first", [True, False])
async def test_an_error_in_a_rest_answer_is_an_error_however_it_is_laid_out(
    style: dict[str, Any], code_first: bool
) -> None:
    reason = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "TASK_NOT_FOUND"}
    error = {"error": {"code": 404, "message": "what task?", "details": [reason]}}
    body = json.dumps({"trace": 1, **error} if code_first else error, **style).encode()

    async def speak(request: Request, writer: asyncio.StreamWriter) -> None:
        rest = [{"url": server.url("/rest"), "protocolBinding": "HTTP+JSON", "protocolVersion": "1.0"}]
        is_card = request.target.endswith("agent-card.json")
        content = json.dumps(card(server.url("/rest"), supportedInterfaces=rest)).encode() if is_card else body
        writer.write(reply(200, content, content_type="application/json"))

    async with http_server(speak) as server, connect(server.url(), allow_private=(HERE,)) as remote:
        with pytest.raises(RemoteRefused) as raised:
            await remote.get(TASK)
        assert (raised.value.code, raised.value.remote_message) == ("unknown_task", "what task?")


async def test_two_hundred_calls_at_once_are_held_and_answered() -> None:
    everybody = asyncio.Event()

    async def behave(called: Called) -> None:
        called.open()
        called.frame({"task": task()})
        if len(hand.methods) == 200:
            everybody.set()
        await everybody.wait()
        called.frame(status("COMPLETED", called.params["message"]["parts"][0]["text"]))
        await called.close()

    async with hand_made(behave) as hand, hand.connect(timeout_s=BOUND_S) as remote:
        replies = await asyncio.gather(*(remote.send(str(number)) for number in range(200)))
        assert {reply_.text for reply_ in replies} == {str(number) for number in range(200)}
        assert hand.methods == ["SendStreamingMessage"] * 200


def test_the_client_needs_neither_the_official_sdk_nor_grpc() -> None:
    program = (
        "import sys, covenant; from covenant.outbound.remote import remote_client, simple; covenant.connect; "
        "sys.exit(bool({'a2a', 'grpc', 'google.protobuf', 'httpx2'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


async def test_whoever_leaves_before_a_stream_has_begun_cancels_what_comes_of_it() -> None:
    asked, told = asyncio.Event(), asyncio.Event()

    async def behave(called: Called) -> None:
        asked.set()
        await told.wait()
        called.open()
        called.frame({"task": task()})
        await called.writer.drain()

    async with hand_made(behave) as hand, hand.connect() as remote:
        calling = asyncio.ensure_future(anext(remote.stream("hello")))
        await asyncio.wait_for(asked.wait(), BOUND_S)
        calling.cancel()
        told.set()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert hand.methods == ["SendStreamingMessage", "CancelTask"]
        assert hand.calls[-1].params["id"] == TASK


async def test_whoever_leaves_while_the_message_is_on_its_way_cancels_what_comes_of_it() -> None:
    gate = asyncio.Event()

    async def behave(called: Called) -> None:
        await gate.wait()
        called.result({"task": task()})

    async with hand_made(behave, streaming=False) as hand, hand.connect() as remote:
        calling = asyncio.create_task(remote.send("go"))
        await asyncio.wait_for(hand.served.asked.wait(), BOUND_S)
        while not hand.methods:
            hand.served.asked.clear()
            await asyncio.wait_for(hand.served.asked.wait(), BOUND_S)
        calling.cancel()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert hand.methods == ["SendMessage", "CancelTask"]


@pytest.mark.parametrize(
    "foreign",
    [
        lambda: status("COMPLETED", "not yours"),
        lambda: chunk("not yours"),
        lambda: {"task": task("COMPLETED", "not yours")},
        lambda: {"message": {"messageId": "m", "role": "ROLE_AGENT", "parts": [{"text": "not yours"}], "taskId": TASK}},
    ],
    ids=["status", "chunk", "task", "message"],
)
async def test_a_frame_about_another_task_is_not_believed_and_the_task_is_polled(foreign: Callable[[], Any]) -> None:
    async def behave(called: Called) -> None:
        if called.method == "GetTask":
            called.result(task("COMPLETED", made="mine"))
            return
        called.open()
        called.frame({"task": task()})
        called.frame(json.loads(json.dumps(foreign()).replace(TASK, "task-2")))
        await called.close()

    async with hand_made(behave) as hand, hand.connect() as remote:
        stream = remote.stream("go")
        assert [event.text async for event in stream] == ["", "mine", ""]
        assert (stream.reply.task_id, stream.reply.text) == (TASK, "mine")
        assert hand.methods == ["SendStreamingMessage", "SubscribeToTask", "GetTask", "GetTask"]


@pytest.mark.parametrize("streaming", [True, False])
async def test_an_answer_to_a_task_that_names_another_task_is_refused(streaming: bool) -> None:
    async def behave(called: Called) -> None:
        other = json.loads(json.dumps({"task": task("COMPLETED", "not yours")}).replace(TASK, "task-2"))
        if streaming:
            called.open()
            called.frame(other)
            await called.close()
        else:
            called.result(other)

    async with hand_made(behave, streaming=streaming) as hand, hand.connect() as remote:
        with pytest.raises(RemoteRefused, match="reported task task-2 instead of task task-1") as raised:
            await remote.send("go", task_id=TASK)
        assert (raised.value.code, raised.value.task_id, len(hand.methods)) == ("bad_answer", TASK, 1)


@pytest.mark.parametrize("method", ["GetTask", "CancelTask"])
async def test_an_answer_about_another_task_than_the_asked_one_is_refused(method: str) -> None:
    def behave(called: Called) -> None:
        called.result(task("COMPLETED") | {"id": "task-2"})

    async with hand_made(behave, stops=False) as hand, hand.connect() as remote:
        ask = remote.get if method == "GetTask" else remote.cancel
        with pytest.raises(RemoteRefused, match="reported task task-2 instead of task task-1") as raised:
            await ask(TASK)
        assert (hand.methods, raised.value.code) == ([method], "bad_answer")


async def comment(called: Called, until: asyncio.Event) -> None:
    """Keeps a stream alive that says nothing."""
    while not until.is_set():
        called.writer.write(b": still here\n\n")
        with suppress(TimeoutError):
            await asyncio.wait_for(until.wait(), 0.01)


@pytest.fixture
def _soon_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a2a_transport, "QUIET_S", 0.1)


@pytest.mark.usefixtures("_soon_quiet")
async def test_a_quiet_stream_of_a_task_that_works_is_followed_to_its_end() -> None:
    asked = asyncio.Event()

    async def behave(called: Called) -> None:
        if called.method == "GetTask":
            called.result(task(made="one "))
            if hand.methods.count("GetTask") == 3:
                asked.set()
            return
        called.open()
        called.frame({"task": task()})
        called.frame(chunk("one ", append=False))
        await comment(called, asked)
        called.frame(chunk("two"))
        called.frame(status("COMPLETED"))
        await called.close()

    async with hand_made(behave) as hand, hand.connect(timeout_s=BOUND_S) as remote:
        assert (await remote.send("go")).text == "one two"
        assert set(hand.methods) == {"SendStreamingMessage", "GetTask"}


@pytest.mark.usefixtures("_soon_quiet")
@pytest.mark.parametrize("resumed", [False, True])
async def test_a_stream_of_comments_alone_does_not_hide_how_the_task_goes_on(resumed: bool) -> None:
    over = asyncio.Event()

    async def behave(called: Called) -> None:
        if called.method == "GetTask":
            ended = hand.methods.count("GetTask") > 2
            called.result(task("COMPLETED", made="one two three") if ended else task(made="one two "))
            return
        called.open()
        if called.method == "SendStreamingMessage":
            called.frame({"task": task()}, 1)
            called.frame(chunk("one ", append=False), 2)
        if called.method == "SubscribeToTask" or not resumed:
            await comment(called, over)
        await called.close()

    async with hand_made(behave) as hand, hand.connect(timeout_s=BOUND_S) as remote:
        stream = remote.stream("go")
        assert [event.text async for event in stream] == ["", "one ", "two ", "three", ""]
        assert stream.reply.ok
        over.set()


@pytest.mark.usefixtures("_soon_quiet")
@pytest.mark.parametrize("key", [None, "k"])
async def test_an_answer_may_take_longer_than_a_stream_is_quiet_and_is_asked_for_once(key: str | None) -> None:
    """Many agents think for minutes, and then answer with a message, without a task."""
    over = asyncio.Event()

    async def behave(called: Called) -> None:
        called.open()
        asyncio.get_running_loop().call_later(5 * a2a_transport.QUIET_S, over.set)
        await comment(called, over)
        called.frame({"message": {"messageId": "m", "role": "ROLE_AGENT", "parts": [{"text": "done"}]}})
        await called.close()

    async with hand_made(behave) as hand, hand.connect(timeout_s=BOUND_S) as remote:
        assert (await remote.send("go", idempotency_key=key)).text == "done"
        assert hand.methods == ["SendStreamingMessage"]


@pytest.mark.usefixtures("_soon_quiet")
async def test_a_stream_of_comments_alone_holds_its_caller_no_longer_than_the_call_may_take() -> None:
    over = asyncio.Event()

    async def behave(called: Called) -> None:
        called.open()
        await comment(called, over)

    async with hand_made(behave) as hand, hand.connect(timeout_s=0.5) as remote:
        with pytest.raises(RemoteTimedOut):
            await remote.send("go")
        assert hand.methods == ["SendStreamingMessage"]
        over.set()


@pytest.mark.usefixtures("_soon_quiet")
async def test_a_stream_of_comments_alone_that_names_no_task_counts_as_broken_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(task_follower, "UNANSWERED_QUIETS_MAX", 3)
    over = asyncio.Event()

    async def behave(called: Called) -> None:
        called.open()
        if len(hand.methods) < 3:
            await comment(called, over)
        else:
            called.frame({"task": task("COMPLETED", "at last")})
        await called.close()

    async with hand_made(behave) as hand, hand.connect(timeout_s=BOUND_S) as remote:
        with pytest.raises(OutcomeUnknown, match=r"no event in .* minutes.*Send it again only if"):
            await remote.send("go")
        assert len(hand.methods) == 1
        assert (await remote.send("go", idempotency_key="k")).text == "at last"
        assert len(hand.methods) == 3
        over.set()


@pytest.mark.usefixtures("_soon_quiet")
async def test_a_remote_that_tells_of_its_task_only_now_and_then_is_followed_for_as_long_as_its_stream_lives() -> None:
    over = asyncio.Event()

    async def behave(called: Called) -> None:
        if called.method == "GetTask":
            looks = hand.methods.count("GetTask")
            called.answer({}, 503) if looks % 2 else called.result(task())
            if looks > 2 * FAILURES_MAX:
                over.set()
            return
        called.open()
        called.frame({"task": task()})
        await comment(called, over)
        called.frame(status("COMPLETED"))
        await called.close()

    async with hand_made(behave) as hand, hand.connect(timeout_s=BOUND_S) as remote:
        assert (await remote.send("go")).ok


@pytest.mark.usefixtures("_soon_quiet")
async def test_a_quiet_stream_of_a_remote_that_does_not_tell_of_its_task_ends() -> None:
    over = asyncio.Event()

    async def behave(called: Called) -> None:
        if called.method == "GetTask":
            called.error(-32001, "what task?")
            return
        called.open()
        called.frame({"task": task()})
        await comment(called, over)

    async with hand_made(behave) as hand, hand.connect(timeout_s=BOUND_S) as remote:
        with pytest.raises(RemoteRefused, match="no longer knows"):
            await remote.send("go")
        over.set()
