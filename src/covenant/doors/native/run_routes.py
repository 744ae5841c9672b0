"""`/v1/orchestrate` and `/v1/conversations`: native runs, as server-sent events from a task's first step on.

A run is a task like all others: a client that is cut off finds it under `/v1/requests/{id}`, and leaving ends nothing.
What is refused is refused before the stream opens, as JSON with a true status. `Idempotency-Key` names a run: the same
again is told again from its beginning, and goes on if it has not ended.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Annotated, Final, NamedTuple

import msgspec
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from covenant.doors.a2a.sse_stream import run_stream
from covenant.doors.http.bearer_auth import TRANSPORT, TenantGate
from covenant.doors.http.endpoint import TenantEndpoint, TenantRequest, described_routes, read_call_headers
from covenant.doors.http.openapi import Described
from covenant.doors.http.request_body import BODY_TOO_LARGE, read_body
from covenant.doors.http.responses import CLOSE, reply_internal, reply_problem
from covenant.doors.metrics import Meter
from covenant.doors.native.request_routes import tell
from covenant.doors.waits import CallerGoneError
from covenant.exchange.a2a_service import A2AExchange, A2ARequest
from covenant.exchange.access.tenants import Caller
from covenant.exchange.conversations import Conversation, Conversations, context_of
from covenant.exchange.native import NativeRun, NativeRuns
from covenant.exchange.tasks.task_stream import TaskStream
from covenant.model.a2a_requests import Message, SendMessage
from covenant.model.call_context import Hop
from covenant.model.content import Text
from covenant.model.errors import Refusal
from covenant.model.ids import TaskId
from covenant.model.task_view import TaskView
from covenant.wire.json_input import decode_query
from covenant.wire.native import (
    NewConversation,
    NewMessage,
    RequestEvent,
    RunRequest,
    decode_conversation,
    decode_message,
    decode_run,
    message_content,
)

ORCHESTRATE: Final = "/v1/orchestrate"
CONVERSATIONS: Final = "/v1/conversations"
CONVERSATION: Final = "/v1/conversations/{conversation_id}"
MESSAGES: Final = "/v1/conversations/{conversation_id}/messages"
LIMIT: Final = 50
LIMIT_MAX: Final = 100

Limit = Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX)]

log = logging.getLogger(__name__)


class ListConversations(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`after` is what the page before said is `next`."""

    limit: Limit = LIMIT
    after: Annotated[str, msgspec.Meta(max_length=200)] = ""


class ConversationPage(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`next` is empty on the last page."""

    count: int
    conversations: tuple[Conversation, ...]
    next: str


class ListMessages(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """How many requests back."""

    limit: Limit = LIMIT


class ConversationMessage(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    role: str
    content: str
    request_id: str
    state: str
    """Of the request that it is part of, in A2A's words."""
    created_at_ms: int


class MessagePage(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    count: int
    messages: tuple[ConversationMessage, ...]


class ConversationDeleted(msgspec.Struct, frozen=True, gc=False):
    conversation_id: str
    deleted: bool = True


class RunInput(NamedTuple):
    """A request for a run: its path, its body, its `Idempotency-Key`, and what it says of the calls before it."""

    path: dict[str, str]
    body: bytes
    key: str | None
    hop: Hop | None


class NativeDoor:
    def __init__(self, runs: NativeRuns, threads: Conversations, conversations: A2AExchange) -> None:
        self._runs = runs
        self._threads = threads
        self._conversations = conversations

    async def run(self, caller: Caller, said: RunInput) -> tuple[TaskStream, bool]:
        asked = decode_run(said.body)
        about = {"original_query": asked.original_query, "channel": asked.channel}
        run = NativeRun(
            parts=message_content(asked.message),
            agent=asked.agent,
            definition=asked.agent_def,
            about={name: said for name, said in about.items() if said is not None},
        )
        return await self._runs.start(caller, run, said.key, said.hop), True

    async def say(self, caller: Caller, said: RunInput) -> tuple[TaskStream, bool]:
        """A new task of the conversation's agent, or the answer that its last one waits for."""
        conversation_id, key = said.path["conversation_id"], said.key
        thread = await self._threads.get(caller, conversation_id)
        parts = message_content(decode_message(said.body).message)
        context_id = context_of(thread.conversation_id)
        run, parent = NativeRun(parts=parts, agent=thread.agent), TaskId(thread.conversation_id)
        task = await self._runs.task(caller, run, key, parent=parent, context_id=context_id, hop=said.hop)
        waiting = await self._threads.waiting(caller, conversation_id, task.id)
        if waiting is None:
            return await self._runs.follow(caller, task), True
        message = Message(message_id=task.id, parts=parts, task_id=waiting.task.id, context_id=context_id)
        ask = A2ARequest(caller=caller, agent=self._runs.agent(caller, thread.agent), idempotency_key=key)
        return await self._conversations.stream(ask, SendMessage(message=message)), False

    async def create(self, asked: TenantRequest) -> tuple[int, Conversation]:
        given = decode_conversation(asked.body)
        agent = self._runs.agent(asked.caller, given.agent)
        return 201, await self._threads.create(asked.caller, agent, given.title)

    async def list(self, asked: TenantRequest) -> tuple[int, ConversationPage]:
        query = decode_query(ListConversations, asked.query)
        found, after = await self._threads.list(asked.caller, query.limit, query.after)
        return 200, ConversationPage(count=len(found), conversations=tuple(found), next=after)

    async def show(self, asked: TenantRequest) -> tuple[int, Conversation]:
        return 200, await self._threads.get(asked.caller, asked.path["conversation_id"])

    async def delete(self, asked: TenantRequest) -> tuple[int, ConversationDeleted]:
        conversation_id = asked.path["conversation_id"]
        await self._threads.delete(asked.caller, conversation_id)
        return 200, ConversationDeleted(conversation_id)

    async def messages(self, asked: TenantRequest) -> tuple[int, MessagePage]:
        limit = decode_query(ListMessages, asked.query).limit
        found = await self._threads.said(asked.caller, asked.path["conversation_id"], limit)
        shown = tuple(message for view in found for message in _shown(view))
        return 200, MessagePage(count=len(shown), messages=shown)


def _shown(view: TaskView) -> list[ConversationMessage]:
    return [
        ConversationMessage(
            role=message.role,
            content="".join(part.text for part in message.parts if isinstance(part, Text)),
            request_id=view.task.id,
            state=view.state.value,
            created_at_ms=view.created_at_ms if message.role == "user" else view.updated_at_ms,
        )
        for message in view.history
    ]


Running = Callable[[Caller, RunInput], Awaitable[tuple[TaskStream, bool]]]
"""What is told, and whether from its first step on."""


class RunEndpoint:
    """A route that answers with a run's events, as an ASGI callable."""

    def __init__(self, gate: TenantGate, meter: Meter, name: str, run: Running, *, body_bytes_max: int) -> None:
        self._gate = gate
        self._meter = meter
        self._timer = meter.timer(TRANSPORT, name)
        self._name = name
        self._run = run
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            caller = await self._gate.enter(scope)
            limiter = self._gate.limiter
            with limiter.connected(caller), limiter.streaming(caller):
                body = await read_body(scope, receive, self._body_bytes_max)
                await self._answer(caller, scope, body, receive, send)
        except Refusal as refusal:
            self._meter.refused(TRANSPORT, refusal.code)
            await reply_problem(send, refusal, (CLOSE,) if refusal.code == BODY_TOO_LARGE else ())
        except CallerGoneError:
            return

    async def _answer(self, caller: Caller, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        started_s = perf_counter()
        try:
            said = RunInput(scope["path_params"], body, _key(scope), read_call_headers(scope))
            stream, from_start = await self._run(caller, said)
        except Refusal:
            raise
        except Exception:  # the last stand before the client: it hears nothing of what went wrong
            log.exception("http.failed", extra={"operation": self._name})
            self._meter.refused(TRANSPORT, "internal")
            await reply_internal(send, plain=True)
            return
        finally:
            self._timer.observe(perf_counter() - started_s)

        async def write(to: Send) -> None:
            await tell(stream, to, from_start=from_start)

        await run_stream(stream, caller, write, tenancy=self._gate.tenancy, receive=receive, send=send)


def _key(scope: Scope) -> str | None:
    key = next((value for name, value in scope["headers"] if name == b"idempotency-key"), None)
    return key.decode("latin-1") if key is not None else None


DESCRIBED: Final = (
    Described(
        path=ORCHESTRATE,
        method="POST",
        name="orchestrate",
        summary="Have an agent, or the master, do something; told as server-sent events. Idempotency-Key names the run",
        request=RunRequest,
        answer=RequestEvent,
        media_type="text/event-stream",
    ),
    Described(
        path=CONVERSATIONS,
        method="POST",
        name="create_conversation",
        summary="Begin a conversation with an agent, the master unless said otherwise",
        request=NewConversation,
        answer=Conversation,
        status=201,
    ),
    Described(
        path=CONVERSATIONS,
        method="GET",
        name="list_conversations",
        summary="Your open conversations, the newest first",
        query=ListConversations,
        answer=ConversationPage,
    ),
    Described(path=CONVERSATION, method="GET", name="show_conversation", summary="One of them", answer=Conversation),
    Described(
        path=CONVERSATION,
        method="DELETE",
        name="delete_conversation",
        summary="End a conversation; what was said stays under /v1/requests",
        answer=ConversationDeleted,
    ),
    Described(
        path=MESSAGES,
        method="POST",
        name="say_in_conversation",
        summary="The next message of a conversation; the answer comes as server-sent events",
        request=NewMessage,
        answer=RequestEvent,
        media_type="text/event-stream",
    ),
    Described(
        path=MESSAGES,
        method="GET",
        name="list_messages",
        summary="What was said in a conversation, the oldest first",
        query=ListMessages,
        answer=MessagePage,
    ),
)


def native_routes(door: NativeDoor, gate: TenantGate, meter: Meter, *, body_bytes_max: int) -> list[BaseRoute]:
    runs = {"orchestrate": door.run, "say_in_conversation": door.say}
    calls: dict[str, ASGIApp] = {
        name: RunEndpoint(gate, meter, name, run, body_bytes_max=body_bytes_max) for name, run in runs.items()
    }
    asked = {
        "create_conversation": door.create,
        "list_conversations": door.list,
        "show_conversation": door.show,
        "delete_conversation": door.delete,
        "list_messages": door.messages,
    }
    calls |= {
        name: TenantEndpoint(gate, meter, name, run, body_bytes_max=body_bytes_max) for name, run in asked.items()
    }
    return described_routes(DESCRIBED, calls)
