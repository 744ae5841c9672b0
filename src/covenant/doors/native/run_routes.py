"""`/v1/orchestrate` and `/v1/conversations`: native runs, as server-sent events from a task's first step on.

A run is a task like all others: a client that is cut off finds it under `/v1/requests/{id}`, and leaving ends nothing.
What is refused is refused before the stream opens, as JSON with a true status. `Idempotency-Key` names a run: the same
again is told again from its beginning, and goes on if it has not ended.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final

import msgspec
from starlette.routing import BaseRoute

from covenant.doors.http.bearer_auth import TenantGate
from covenant.doors.http.endpoint import TenantCall, Writer, tenant_routes
from covenant.doors.http.openapi import Described
from covenant.doors.metrics import Meter
from covenant.doors.native.request_routes import write_events
from covenant.exchange.a2a_service import A2AExchange, A2ARequest
from covenant.exchange.conversations import Conversation, Conversations, context_of
from covenant.exchange.native import NativeRun, NativeRuns
from covenant.exchange.tasks.task_stream import TaskStream
from covenant.model.a2a_requests import Message, SendMessage
from covenant.model.content import Text
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
IDEMPOTENCY_KEY: Final = b"idempotency-key"
LIMIT: Final = 50
LIMIT_MAX: Final = 100

Limit = Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX)]


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


class NativeDoor:
    def __init__(self, runs: NativeRuns, threads: Conversations, conversations: A2AExchange) -> None:
        self._runs = runs
        self._threads = threads
        self._conversations = conversations

    async def orchestrate(self, asked: TenantCall) -> tuple[TaskStream, Writer]:
        given = decode_run(asked.body)
        about = {"original_query": given.original_query, "channel": given.channel}
        run = NativeRun(
            parts=message_content(given.message),
            agent=given.agent,
            definition=given.agent_def,
            about={name: said for name, said in about.items() if said is not None},
        )
        stream = await self._runs.start(asked.caller, run, asked.header(IDEMPOTENCY_KEY), asked.call_context)
        return stream, partial(write_events, stream, from_start=True)

    async def say_in_conversation(self, asked: TenantCall) -> tuple[TaskStream, Writer]:
        """A new task of the conversation's agent, or the answer that its last one waits for."""
        caller, conversation_id, key = asked.caller, asked.path["conversation_id"], asked.header(IDEMPOTENCY_KEY)
        thread = await self._threads.get(caller, conversation_id)
        parts = message_content(decode_message(asked.body).message)
        context_id = context_of(thread.conversation_id)
        run, parent = NativeRun(parts=parts, agent=thread.agent), TaskId(thread.conversation_id)
        task = await self._runs.task(caller, run, key, parent=parent, context_id=context_id, hop=asked.call_context)
        waiting = await self._threads.waiting(caller, conversation_id, task.id)
        if waiting is None:
            stream = await self._runs.follow(caller, task)
            return stream, partial(write_events, stream, from_start=True)
        message = Message(message_id=task.id, parts=parts, task_id=waiting.task.id, context_id=context_id)
        ask = A2ARequest(caller=caller, agent=self._runs.agent(caller, thread.agent), idempotency_key=key)
        stream = await self._conversations.stream(ask, SendMessage(message=message))
        return stream, partial(write_events, stream, from_start=False)

    async def create_conversation(self, asked: TenantCall) -> tuple[int, Conversation]:
        given = decode_conversation(asked.body)
        agent = self._runs.agent(asked.caller, given.agent)
        return 201, await self._threads.create(asked.caller, agent, given.title)

    async def list_conversations(self, asked: TenantCall) -> tuple[int, ConversationPage]:
        query = decode_query(ListConversations, asked.query)
        found, after = await self._threads.list(asked.caller, query.limit, query.after)
        return 200, ConversationPage(count=len(found), conversations=tuple(found), next=after)

    async def show_conversation(self, asked: TenantCall) -> tuple[int, Conversation]:
        return 200, await self._threads.get(asked.caller, asked.path["conversation_id"])

    async def delete_conversation(self, asked: TenantCall) -> tuple[int, ConversationDeleted]:
        conversation_id = asked.path["conversation_id"]
        await self._threads.delete(asked.caller, conversation_id)
        return 200, ConversationDeleted(conversation_id)

    async def list_messages(self, asked: TenantCall) -> tuple[int, MessagePage]:
        limit = decode_query(ListMessages, asked.query).limit
        found = await self._threads.messages(asked.caller, asked.path["conversation_id"], limit)
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
    return tenant_routes(DESCRIBED, door, gate, meter, body_bytes_max=body_bytes_max)
