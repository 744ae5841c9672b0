"""`/v1/agents`, `/v1/requests`, `/v1/orchestrate` and `/v1/conversations`: a tenant's agents, and their work.

- Agents: the body is an agent's bare definition, or has the shape of an answer, with the definition in `agent_def`.
  PATCH replaces the whole definition.
- Requests: the request id is the task id. Events begin with the first one, or after `Last-Event-ID` or `since`.
- Runs: a run is a task whose events are streamed as server-sent events; disconnecting ends nothing. A refusal comes
  before the stream opens. `Idempotency-Key` names a run: a repeat gets the same run's events from the beginning.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Final

import msgspec
from starlette.types import Send

from covenant.doors.http.endpoint import TOO_SLOW, TenantCall, Writer
from covenant.doors.http.openapi import route
from covenant.doors.http.responses import AlreadyExists
from covenant.doors.operator_api.tenants import AgentShown
from covenant.exchange.a2a_service import A2AExchange, A2ARequest
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.native import Conversation, Conversations, NativeRun, NativeRuns, context_of
from covenant.exchange.task_lookup import TaskLookup
from covenant.exchange.tasks.reader import TaskStream
from covenant.ledger.contract.tasks import TaskRow
from covenant.model.a2a_requests import Message, SendMessage
from covenant.model.agent_definition import AgentDefinition, CatalogueAgent, read_agent_definition
from covenant.model.errors import Conflict, Invalid, NotFound
from covenant.model.ids import TaskId
from covenant.model.task_view import TaskState, TaskView, plain_text
from covenant.wire.json_input import decode, decode_query
from covenant.wire.native import (
    NewConversation,
    NewMessage,
    RequestEvent,
    RequestEvents,
    RequestShown,
    RunRequest,
    conversation_of,
    decode_conversation,
    decode_message,
    decode_run,
    message_content,
    request_state,
    show_request,
)
from covenant.wire.sse import KEEP_ALIVE, last_event_id

AGENTS: Final = "/v1/agents"
AGENT: Final = "/v1/agents/{agent_id}"
DEFINITION_KEY: Final = "agent_def"
AGENT_BYTES_MAX: Final = 1024 * 1024

_JSON: Final = msgspec.json.Decoder(dict[str, Any])
_SHOWN_FIELDS: Final = frozenset(AgentShown.__struct_fields__)
REQUESTS: Final = "/v1/requests"
REQUEST: Final = "/v1/requests/{request_id}"
EVENTS: Final = "/v1/requests/{request_id}/events"
CANCEL: Final = "/v1/requests/{request_id}/cancel"
REQUEST_BYTES_MAX: Final = 64 * 1024
LIMIT: Final = 100
LIMIT_MAX: Final = 200
ORCHESTRATE: Final = "/v1/orchestrate"
CONVERSATIONS: Final = "/v1/conversations"
CONVERSATION: Final = "/v1/conversations/{conversation_id}"
MESSAGES: Final = "/v1/conversations/{conversation_id}/messages"
IDEMPOTENCY_KEY: Final = b"idempotency-key"
CONVERSATIONS_LIMIT: Final = 50
CONVERSATIONS_MAX: Final = 100


class Agents(msgspec.Struct, frozen=True, gc=False):
    count: int
    agents: tuple[AgentShown, ...]


class Deleted(msgspec.Struct, frozen=True, gc=False):
    deleted: bool = True


class AgentDoor:
    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    @route("GET", AGENTS, "Your agents, index first")
    async def list_own_agents(self, call: TenantCall) -> tuple[int, Agents]:
        found = await self._catalogue.list(call.caller.tenant.name)
        return 200, Agents(len(found), tuple(AgentShown.of(agent) for agent in found))

    @route("GET", AGENT, "One of your agents")
    async def show_own_agent(self, call: TenantCall) -> tuple[int, AgentShown]:
        return 200, AgentShown.of(await self._agent(call))

    @route(
        "POST",
        AGENTS,
        "Add an agent: its definition, bare or as agent_def; 409 shows the existing one",
        request=AgentDefinition,
        status=201,
    )
    async def add_own_agent(self, call: TenantCall) -> tuple[int, AgentShown]:
        definition = read_agent_definition(_definition(call.body))
        try:
            return 201, AgentShown.of(await self._catalogue.store(call.caller, definition))
        except Conflict as conflict:
            existing = self._catalogue.agent(call.caller.tenant.name, definition.id)
            if existing is None:
                raise
            raise AlreadyExists(conflict, AgentShown.of(existing)) from None

    @route("PATCH", AGENT, "Replace an agent's definition wholesale", request=AgentDefinition)
    async def replace_own_agent(self, call: TenantCall) -> tuple[int, AgentShown]:
        definition = _definition(call.body)
        agent = await self._agent(call)
        if definition.setdefault("id", agent.id) != agent.id:
            raise Invalid("invalid_agent", f"/id: must be {agent.id!r}, as in the path")
        if agent.source == "builtin":
            # The definition's own id is reserved, and a refusal for that would mislead.
            return 200, AgentShown.of(await self._catalogue.replace(call.caller, agent.definition))
        return 200, AgentShown.of(await self._catalogue.replace(call.caller, read_agent_definition(definition)))

    @route("DELETE", AGENT, "Remove an agent")
    async def remove_own_agent(self, call: TenantCall) -> tuple[int, Deleted]:
        agent = await self._agent(call)
        await self._catalogue.remove(call.caller, agent.id)
        return 200, Deleted()

    async def _agent(self, call: TenantCall) -> CatalogueAgent:
        return await self._catalogue.show(call.caller.tenant.name, call.path["agent_id"])


def _definition(body: bytes) -> dict[str, Any]:
    given = decode(_JSON, body)
    definition = given.get(DEFINITION_KEY)
    if definition is None:
        return given
    for key in given.keys() - _SHOWN_FIELDS:
        raise Invalid("invalid_agent", f"unknown key /{key[:200]}; the definition goes into /{DEFINITION_KEY}")
    if not isinstance(definition, dict):
        raise Invalid("invalid_agent", f"/{DEFINITION_KEY}: must be an object")
    return definition


Limit = Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX)]
Cursor = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class ListRequests(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    limit: Limit = LIMIT


class FollowRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`since` or `since_seq`: the number of the last event that the client has seen; 0 or none: from the beginning."""

    since: Cursor | None = None
    since_seq: Cursor | None = None


class RequestList(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    count: int
    requests: tuple[RequestShown, ...]


class OneRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    request: RequestShown


class Cancelled(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """`reason` is the same for a request that is unknown, of another tenant, or over."""

    request_id: str
    cancelled: bool
    reason: str | None = None


class RequestDoor:
    def __init__(self, requests: TaskLookup) -> None:
        self._requests = requests

    @route("GET", REQUESTS, "Your requests, the newest first", query=ListRequests)
    async def list_requests(self, call: TenantCall) -> tuple[int, RequestList]:
        limit = decode_query(ListRequests, call.query).limit
        found = await self._requests.list(call.caller, limit)
        rows = tuple(_list_row(call.caller.tenant.name, row) for row in found)
        return 200, RequestList(count=len(rows), requests=rows)

    @route("GET", REQUEST, "One of your requests")
    async def show_request(self, call: TenantCall) -> tuple[int, OneRequest]:
        try:
            view = await self._requests.get(call.caller, call.path["request_id"])
        except NotFound:
            raise NotFound("unknown_request", "request not found") from None
        return 200, OneRequest(request=show_request(view))

    @route("POST", CANCEL, "Cancel a request; 404 has the same shape, if none is running", second_status=404)
    async def cancel_request(self, call: TenantCall) -> tuple[int, Cancelled]:
        request_id = call.path["request_id"]
        try:
            await self._requests.cancel(call.caller, request_id)
        except (NotFound, Conflict):
            # An unknown request, another tenant's and one that is over must look the same.
            return 404, Cancelled(request_id=request_id, cancelled=False, reason="no such request is running")
        return 200, Cancelled(request_id=request_id, cancelled=True)

    @route(
        "GET",
        EVENTS,
        "The events of a request, as server-sent events; resume with Last-Event-ID, or since",
        query=FollowRequest,
        events=RequestEvent,
    )
    async def follow_request(self, call: TenantCall) -> tuple[TaskStream, Writer]:
        after = _cursor(call)
        try:
            request_id = call.path["request_id"]
            stream = await self._requests.follow(call.caller, request_id, after, ends_when_parked=False)
        except NotFound:
            raise NotFound("unknown_request", "request not found") from None
        return stream, partial(write_events, stream, from_start=after == 0)


def _list_row(tenant: str, row: TaskRow) -> RequestShown:
    return RequestShown(
        request_id=row.task_id,
        tenant_id=tenant,
        agent_id=row.agent_id,
        conversation_id=conversation_of(row.origin, row.context_id),
        origin=row.origin,
        state=request_state(row.state),
        a2a_state=row.state,
        started_at_ms=row.created_at_ms,
        updated_at_ms=row.updated_at_ms,
        completed_at_ms=row.updated_at_ms if TaskState(row.state).terminal else None,
        error_message=row.error_message or None,
        last_seq=row.generation,
    )


def _cursor(call: TenantCall) -> int:
    """The last event that the client has seen. After a reconnect `Last-Event-ID` is newer than the URL's `since`."""
    header = call.header(b"last-event-id")
    seen = last_event_id(header) if header is not None else None
    if seen is not None:
        return seen
    query = decode_query(FollowRequest, call.query)
    return query.since if query.since is not None else query.since_seq or 0


async def write_events(stream: TaskStream, send: Send, *, from_start: bool) -> None:
    events = RequestEvents(stream.first.task, stream.first.created_at_ms)
    if from_start:
        await send({"type": "http.response.body", "body": events.received(), "more_body": True})
    async for steps in stream:
        body = events.frames(steps) if steps else KEEP_ALIVE
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": TOO_SLOW if stream.cut else b"", "more_body": False})


ConversationLimit = Annotated[int, msgspec.Meta(ge=1, le=CONVERSATIONS_MAX)]


class ListConversations(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`after` is the `next` of the page before."""

    limit: ConversationLimit = CONVERSATIONS_LIMIT
    after: Annotated[str, msgspec.Meta(max_length=200)] = ""


class ConversationPage(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`next` is empty on the last page."""

    count: int
    conversations: tuple[Conversation, ...]
    next: str


class ListMessages(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`limit`: the most requests whose messages are listed."""

    limit: ConversationLimit = CONVERSATIONS_LIMIT


class ConversationMessage(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    role: str
    content: str
    request_id: str
    state: str
    """The state of the message's request, in A2A's words."""
    created_at_ms: int


class MessagePage(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    count: int
    messages: tuple[ConversationMessage, ...]


class ConversationDeleted(msgspec.Struct, frozen=True, gc=False):
    conversation_id: str
    deleted: bool = True


class RunDoor:
    def __init__(self, runs: NativeRuns, conversations: Conversations, exchange: A2AExchange) -> None:
        self._runs = runs
        self._conversations = conversations
        self._exchange = exchange

    @route(
        "POST",
        ORCHESTRATE,
        "Give an agent, or the master, a message; its events are streamed. Idempotency-Key names the run",
        request=RunRequest,
        events=RequestEvent,
    )
    async def orchestrate(self, call: TenantCall) -> tuple[TaskStream, Writer]:
        given = decode_run(call.body)
        about = {"original_query": given.original_query, "channel": given.channel}
        run = NativeRun(
            parts=message_content(given.message),
            agent=given.agent,
            definition=given.agent_def,
            about={name: value for name, value in about.items() if value is not None},
            not_before_ms=given.not_before_ms,
        )
        stream = await self._runs.start(call.caller, run, call.header(IDEMPOTENCY_KEY), call.call_context)
        return stream, partial(write_events, stream, from_start=True)

    @route(
        "POST",
        MESSAGES,
        "The next message of a conversation; the answer comes as server-sent events",
        request=NewMessage,
        events=RequestEvent,
    )
    async def say_in_conversation(self, call: TenantCall) -> tuple[TaskStream, Writer]:
        """Starts a new task of the conversation's agent, or answers the one that waits."""
        caller, conversation_id, key = call.caller, call.path["conversation_id"], call.header(IDEMPOTENCY_KEY)
        conversation = await self._conversations.get(caller, conversation_id)
        parts = message_content(decode_message(call.body).message)
        context_id = context_of(conversation.conversation_id)
        run, parent = NativeRun(parts=parts, agent=conversation.agent), TaskId(conversation.conversation_id)
        task = await self._runs.task(caller, run, key, parent=parent, context_id=context_id, hop=call.call_context)
        waiting = await self._conversations.waiting(caller, conversation_id, task.id)
        if waiting is None:
            stream = await self._runs.follow(caller, task)
            return stream, partial(write_events, stream, from_start=True)
        message = Message(message_id=task.id, parts=parts, task_id=waiting.task.id, context_id=context_id)
        ask = A2ARequest(caller=caller, agent=self._runs.agent(caller, conversation.agent), idempotency_key=key)
        stream = await self._exchange.stream(ask, SendMessage(message=message))
        return stream, partial(write_events, stream, from_start=False)

    @route(
        "POST",
        CONVERSATIONS,
        "Begin a conversation with an agent; with the master if none is named",
        request=NewConversation,
        status=201,
    )
    async def create_conversation(self, call: TenantCall) -> tuple[int, Conversation]:
        given = decode_conversation(call.body)
        agent = self._runs.agent(call.caller, given.agent)
        return 201, await self._conversations.create(call.caller, agent, given.title)

    @route("GET", CONVERSATIONS, "Your open conversations, the newest first", query=ListConversations)
    async def list_conversations(self, call: TenantCall) -> tuple[int, ConversationPage]:
        query = decode_query(ListConversations, call.query)
        found, after = await self._conversations.list(call.caller, query.limit, query.after)
        return 200, ConversationPage(count=len(found), conversations=tuple(found), next=after)

    @route("GET", CONVERSATION, "One of your conversations")
    async def show_conversation(self, call: TenantCall) -> tuple[int, Conversation]:
        return 200, await self._conversations.get(call.caller, call.path["conversation_id"])

    @route("DELETE", CONVERSATION, "End a conversation; its messages stay under /v1/requests")
    async def delete_conversation(self, call: TenantCall) -> tuple[int, ConversationDeleted]:
        conversation_id = call.path["conversation_id"]
        await self._conversations.delete(call.caller, conversation_id)
        return 200, ConversationDeleted(conversation_id)

    @route("GET", MESSAGES, "The messages of a conversation, the oldest first", query=ListMessages)
    async def list_messages(self, call: TenantCall) -> tuple[int, MessagePage]:
        limit = decode_query(ListMessages, call.query).limit
        found = await self._conversations.messages(call.caller, call.path["conversation_id"], limit)
        shown = tuple(message for view in found for message in _messages_of(view))
        return 200, MessagePage(count=len(shown), messages=shown)


def _messages_of(view: TaskView) -> list[ConversationMessage]:
    return [
        ConversationMessage(
            role=message.role,
            content=plain_text(message.parts),
            request_id=view.task.id,
            state=view.state.value,
            created_at_ms=view.created_at_ms if message.role == "user" else view.updated_at_ms,
        )
        for message in view.history
    ]
