"""Messages and conversations of native clients, as tasks like all others.

A message is for one agent, by default the master. A message can bring its own agent: a definition for this one request,
which nobody else can call and which has no memory. It is kept with the task. Only this door takes such a definition:
the metadata of A2A clients is never read as an agent.

A conversation is a task of `conversations@<tenant>` that waits while the conversation is open, and is canceled when it
is deleted. Each message to it is a task of the agent, with the conversation as its parent and a context of its own; the
history is read from these tasks. A2A contexts are something else, and never mapped to conversations.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from covenant.exchange.a2a_service import A2AExchange
from covenant.exchange.access.tenants import Caller
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.task_lookup import TaskLookup
from covenant.exchange.tasks.builder import build_task, check_message, read_idempotency
from covenant.exchange.tasks.reader import TaskReader, TaskStream, parse_known_id
from covenant.exchange.tasks.writer import Intake
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.tasks import ListQuery, TaskScope
from covenant.ledger.machine.commands import Accept, Advance, Cancel, Starter
from covenant.model.a2a_requests import Message, SendMessage
from covenant.model.agent_definition import INDEX, AgentDefinition, CatalogueAgent, read_agent_definition
from covenant.model.content import Content, Resource, Text
from covenant.model.errors import Conflict, Invalid, NotFound
from covenant.model.ids import TaskId
from covenant.model.sanitizer import without_reserved
from covenant.model.task import A2A, NATIVE, Hop, Task, check_hop, fingerprint
from covenant.model.task_event import Interruption, MessageUpdate, StatusUpdate
from covenant.model.task_view import TaskView, fold
from covenant.wire.native import CONVERSATION, conversation_of

CONVERSATIONS_ID: Final = "conversations"
ABOUT: Final = "covenant.conversation"
HISTORY_TASKS_MAX: Final = 50
HISTORY_CHARACTERS_MAX: Final = 200_000
"""The most characters of history that an agent is given: the newest."""
OPEN: Final = "open"
KEPT: Final = "covenant.kept"
"""Key in a file's metadata: later requests of the conversation may read the file."""
KEPT_BYTES_MAX: Final = 10 * 1024 * 1024
"""The most bytes of kept files that an agent is shown."""
INLINE: Final = "covenant.agent_def"
"""Key in a task's request metadata: the agent definition that came with it."""


class Conversation(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    conversation_id: str
    agent: str
    title: str
    created_at_ms: int


class Conversations:
    def __init__(
        self, ledger: Ledger, catalogue: Catalogue, new_id: Callable[[], str], intake: Intake | None = None
    ) -> None:
        self._ledger = ledger
        self._catalogue = catalogue
        self._new_id = new_id
        self._intake = intake or Intake()
        self._reader = TaskReader(ledger)

    async def create(self, caller: Caller, agent: CatalogueAgent, title: str) -> Conversation:
        if self._intake.closed is not None:
            raise self._intake.closed
        tenant = caller.tenant.name
        recipient = self._catalogue.identity(tenant, CONVERSATIONS_ID)
        task = build_task(
            TaskId(self._new_id()),
            sender=self._catalogue.client(tenant),
            recipient=recipient,
            parts=(Text(title or f"a conversation with {agent.id}"),),
            tenant=tenant,
            origin=NATIVE,
            request_metadata={ABOUT: {"agent": agent.id, "title": title}},
        )
        digest, _ = fingerprint(task)
        starter = Starter(recipient, self._ledger.node, self._ledger.boot)
        accepted = await self._ledger.commit(Accept(task=task, digest=digest, starter=starter))
        if accepted.leased is not None:
            waits = StatusUpdate(OPEN, Interruption.INPUT_REQUIRED.value)
            lease_id = accepted.leased.lease.lease_id
            await self._ledger.commit(Advance(task_id=task.id, holder=recipient, lease_id=lease_id, updates=(waits,)))
        return _conversation(await self._view(caller, task.id))

    async def list(self, caller: Caller, limit: int, after: str = "") -> tuple[Sequence[Conversation], str]:
        """The open conversations, newest first, and the cursor of the next page."""
        tenant, catalogue = caller.tenant.name, self._catalogue
        listing = await self._ledger.listing(
            ListQuery(
                recipient=catalogue.identity(tenant, CONVERSATIONS_ID).pubkey,
                state=Interruption.INPUT_REQUIRED.value,
                after=catalogue.cursors.open(tenant, after),
                limit=limit,
            )
        )
        found = [_conversation(view) for steps in listing.tasks if (view := fold(steps)) is not None]
        return found, catalogue.cursors.seal(tenant, listing.next)

    async def get(self, caller: Caller, conversation_id: str) -> Conversation:
        return _conversation(await self._view(caller, conversation_id))

    async def delete(self, caller: Caller, conversation_id: str) -> None:
        """Ends the conversation. Its messages stay in the ledger, as tasks; running tasks go on."""
        view = await self._view(caller, conversation_id)
        by = self._catalogue.client(caller.tenant.name)
        await self._ledger.commit(
            Cancel(task_id=view.task.id, recipient=view.task.recipient.pubkey, by=by, reason=f"by {caller.name}")
        )

    async def messages(self, caller: Caller, conversation_id: str, limit: int) -> Sequence[TaskView]:
        found = await self.get(caller, conversation_id)
        recipient = self._catalogue.identity(caller.tenant.name, found.agent).pubkey
        query = ListQuery(recipient=recipient, context_id=context_of(found.conversation_id), limit=limit)
        return await _tasks(self._ledger, query, NATIVE)

    async def waiting(self, caller: Caller, conversation_id: str, task_id: TaskId) -> TaskView | None:
        """The task that waits for the client's next message, if one does.

        Refused while another task than `task_id` runs, since it would be unclear which one is answered.
        """
        for view in await self.messages(caller, conversation_id, HISTORY_TASKS_MAX):
            if view.task.id == task_id:
                return None
            if view.state.waits:
                return view
            if not view.state.terminal:
                raise Conflict(
                    "conversation_busy", f"request {view.task.id} of this conversation is under way; wait for its end"
                )
        return None

    async def _view(self, caller: Caller, conversation_id: str) -> TaskView:
        """An open conversation. One that is over or another tenant's, or any other task, is not found."""
        try:
            task_id = parse_known_id(conversation_id)
            recipient = self._catalogue.identity(caller.tenant.name, CONVERSATIONS_ID)
            view = await self._reader.get(task_id, TaskScope(recipient=recipient.pubkey))
        except NotFound:
            raise unknown_conversation() from None
        if view.state.terminal:
            raise unknown_conversation()
        return view


def unknown_conversation() -> NotFound:
    return NotFound("unknown_conversation", "conversation not found")


def context_of(conversation_id: str) -> str:
    return f"{CONVERSATION}{conversation_id}"


async def earlier_messages(ledger: Ledger, task: Task) -> tuple[MessageUpdate, ...]:
    """The messages before a task in its conversation or A2A context, within bounds; empty if it is in none.

    Anybody can name a context: only tasks of the same sender are part of it.
    """
    context_id, sender = task.context_id, task.sender.pubkey if task.origin == A2A else None
    if context_id is None or not _is_shared(task, context_id):
        return ()
    kept: list[MessageUpdate] = []
    room = HISTORY_CHARACTERS_MAX
    query = ListQuery(recipient=task.recipient.pubkey, sender=sender, context_id=context_id, limit=HISTORY_TASKS_MAX)
    for view in reversed(await _tasks(ledger, query, task.origin)):
        if view.task.id == task.id or not view.state.terminal:
            continue
        room -= sum(_length(message) for message in view.history)
        if room < 0:
            break
        kept[:0] = view.history
    return tuple(kept)


async def kept_files(ledger: Ledger, task: Task) -> dict[str, str]:
    """The texts of the files kept in a task's conversation, by name: the newest of each, within bounds."""
    context_id = task.context_id
    if context_id is None or conversation_of(task.origin, context_id) is None:
        return {}
    found: dict[str, str] = {}
    room = KEPT_BYTES_MAX
    recipient = task.recipient.pubkey
    query = ListQuery(recipient=recipient, context_id=context_id, limit=HISTORY_TASKS_MAX, artifacts=True)
    tasks = await _tasks(ledger, query, NATIVE)
    parts = (part for view in reversed(tasks) for artifact in reversed(view.artifacts) for part in artifact.parts)
    for part in parts:
        if not isinstance(part, Resource) or not (part.metadata or {}).get(KEPT) or part.filename in (None, *found):
            continue
        data = base64.b64decode(part.resource.blob or "")
        room -= len(data)
        if room < 0:
            break
        found[str(part.filename)] = data.decode(errors="replace")
    return found


def _is_shared(task: Task, context_id: str) -> bool:
    """Whether other tasks may share the task's context. A task that named no context has its own."""
    if task.origin == A2A:
        return context_id != task.id
    return conversation_of(task.origin, context_id) is not None


async def _tasks(ledger: Ledger, query: ListQuery, origin: str) -> list[TaskView]:
    """The newest tasks of the query, oldest first; only those of this origin."""
    listing = await ledger.listing(query)
    views = [view for steps in listing.tasks if (view := fold(steps)) is not None and view.task.origin == origin]
    return sorted(views, key=lambda view: (view.created_at_ms, view.task.id))


def _length(message: MessageUpdate) -> int:
    return sum(len(part.text) if isinstance(part, Text) else 1_000 for part in message.parts)


def _conversation(view: TaskView) -> Conversation:
    about = (view.task.request_metadata or {}).get(ABOUT, {})
    return Conversation(
        conversation_id=view.task.id,
        agent=about.get("agent", ""),
        title=about.get("title", ""),
        created_at_ms=view.created_at_ms,
    )


class NativeRun(msgspec.Struct, frozen=True, kw_only=True):
    """A request. `definition` is an agent for this request alone."""

    parts: tuple[Content, ...]
    agent: str = INDEX
    definition: dict[str, Any] | None = None
    about: dict[str, Any] | None = None
    """Metadata from the client, kept with the request."""
    not_before_ms: int | None = None


class NativeRuns:
    def __init__(self, catalogue: Catalogue, a2a: A2AExchange, lookup: TaskLookup, new_id: Callable[[], str]) -> None:
        self._catalogue = catalogue
        self._a2a = a2a
        self._lookup = lookup
        self._new_id = new_id

    def agent(self, caller: Caller, agent_id: str) -> CatalogueAgent:
        agent = self._catalogue.agent(caller.tenant.name, agent_id)
        if agent is None:
            raise self._catalogue.missing(caller.tenant.name, agent_id)
        return agent

    async def start(self, caller: Caller, run: NativeRun, key: str | None, hop: Hop | None = None) -> TaskStream:
        """Starts the run. Streams the task's steps from the first one, until it ends or waits for its sender."""
        return await self.follow(caller, await self.task(caller, run, key, hop=hop))

    async def follow(self, caller: Caller, task: Task) -> TaskStream:
        await self._a2a.writer.submit(task, bytes_max=self._a2a.settings.message_bytes_max)
        return await self._lookup.follow(caller, task.id, 0)

    async def task(
        self,
        caller: Caller,
        run: NativeRun,
        key: str | None,
        *,
        parent: TaskId | None = None,
        context_id: str | None = None,
        hop: Hop | None = None,
    ) -> Task:
        """Builds the task of a run. The same key makes the same task."""
        about = without_reserved(run.about) or {}
        agent_id = run.agent
        if run.definition is not None:
            agent_id = INDEX
            about[INLINE] = msgspec.to_builtins(inline_agent(run.definition))
        agent = self.agent(caller, agent_id)
        recipient, sender = self._catalogue.identity(agent.tenant, agent.id), self._catalogue.client(agent.tenant)
        check_hop(hop, recipient, self._a2a.depth_max)
        message = Message(message_id="m", parts=run.parts)
        check_message(message, agent, agent.definition.extensions)
        key_of, task_id = read_idempotency(SendMessage(message=message), key), TaskId(self._new_id())
        if key_of is not None:
            place = f"{NATIVE} {context_id or ''} {agent_id}"
            task_id = await self._a2a.ids.find(caller, place, key_of.key, sender=sender, recipient=recipient)
        return build_task(
            task_id,
            sender=sender,
            recipient=recipient,
            parts=run.parts,
            tenant=agent.tenant,
            origin=NATIVE,
            definition=agent.definition,
            hop=hop,
            context_id=context_id,
            parent=parent,
            key=key_of,
            request_metadata=about or None,
            not_before_ms=run.not_before_ms,
        )


def inline_agent(given: dict[str, Any]) -> AgentDefinition:
    """The definition of an agent for one request. It must be a model agent."""
    definition = read_agent_definition({"id": "inline", **given})
    if not definition.kind_rules.needs_model:
        raise Invalid("invalid_agent", '/kind: an agent that comes with a request must be a "model" agent')
    return definition


def inline_of(task: Task) -> AgentDefinition | None:
    definition = (task.request_metadata or {}).get(INLINE) if task.origin == NATIVE else None
    return msgspec.convert(definition, AgentDefinition) if definition is not None else None
