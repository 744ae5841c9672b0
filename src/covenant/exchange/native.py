"""A message of a native client for one agent, the master unless it says otherwise, as a task like all others.

An agent can come with the message: a definition for this one request, which nobody else can call and which remembers
nothing. It is kept with the task, so that whoever works on it later, after a restart say, finds it there. Only this
door takes one: what A2A clients write into metadata is never read as an agent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final

import msgspec

from covenant.exchange.a2a_service import A2AExchange
from covenant.exchange.access.tenants import Caller
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.tasks.builder import check_message, read_idempotency, text_of, within_chain
from covenant.exchange.tasks.reader import TaskReader, parse_known_id
from covenant.exchange.tasks.task_stream import TaskStream
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.tasks import TaskRow
from covenant.ledger.machine.commands import Cancel
from covenant.ledger.machine.decisions.identities import unknown_agent
from covenant.model.a2a_requests import Message, SendMessage
from covenant.model.agent_definition import INDEX, AgentDefinition, CatalogueAgent, read_agent_definition
from covenant.model.call_context import Hop, check_hop
from covenant.model.content import Content, Text
from covenant.model.errors import Invalid, NotFound
from covenant.model.ids import TaskId
from covenant.model.sanitizer import without_reserved
from covenant.model.task import NATIVE, Task
from covenant.model.task_view import TaskView
from covenant.model.tracing import trace_of, traced


class TenantTasks:
    def __init__(self, ledger: Ledger, catalogue: Catalogue) -> None:
        self._ledger = ledger
        self._catalogue = catalogue
        self._views = TaskReader(ledger)

    async def list(self, caller: Caller, limit: int) -> Sequence[TaskRow]:
        """The newest first."""
        return await self._ledger.of_tenant(caller.tenant.name, limit)

    async def get(self, caller: Caller, request_id: str) -> TaskView:
        return await self._views.of_tenant(parse_known_id(request_id), caller.tenant.name)

    async def follow(
        self, caller: Caller, request_id: str, after: int, *, ends_when_parked: bool = False
    ) -> TaskStream:
        """Everything after this generation, until the end. From 0 on, the first view is the first step itself.

        `ends_when_parked`: also until it waits for its sender.
        """
        task_id = parse_known_id(request_id)
        with ExitStack() as stack:
            watch = stack.enter_context(self._ledger.watch(task_id))
            now = await self._views.of_tenant(task_id, caller.tenant.name)
            if not 0 <= after <= now.generation:
                raise Invalid("invalid_request", f"this request has come to {now.generation}, not to {after}")
            first = now
            if max(1, after) < now.generation:
                folded = (await self._views.past(task_id, max(1, after))).view()
                assert folded is not None, "a task that is known has a first step"
                first = folded
            stack.pop_all()
            return TaskStream(self._ledger, watch, first, ends_when_parked=ends_when_parked)

    async def cancel(self, caller: Caller, request_id: str) -> bool:
        """Whether this ended it. One that is unknown, another's or over is told apart by nobody."""
        try:
            view = await self.get(caller, request_id)
        except NotFound:
            return False
        if view.state.terminal:
            return False
        canceled = await self._ledger.commit(
            Cancel(
                task_id=view.task.id,
                recipient=view.task.recipient.pubkey,
                by=self._catalogue.client(caller.tenant.name),
                reason=f"by {caller.name}",
            )
        )
        return not canceled.before


INLINE: Final = "covenant.agent_def"
"""In a task's request metadata: the agent that came with it."""


class NativeRun(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. `definition` is an agent for this one request."""

    parts: tuple[Content, ...]
    agent: str = INDEX
    definition: dict[str, Any] | None = None
    about: dict[str, Any] | None = None
    """What the client says besides, kept with the request."""


class NativeRuns:
    def __init__(
        self, catalogue: Catalogue, conversations: A2AExchange, requests: TenantTasks, new_id: Callable[[], str]
    ) -> None:
        self._catalogue = catalogue
        self._conversations = conversations
        self._requests = requests
        self._new_id = new_id

    def agent(self, caller: Caller, agent_id: str) -> CatalogueAgent:
        agent = self._catalogue.agent(caller.tenant.name, agent_id)
        if agent is None:
            raise unknown_agent(agent_id)
        return agent

    async def start(self, caller: Caller, run: NativeRun, key: str | None, hop: Hop | None = None) -> TaskStream:
        """All that happens to it, from its first step on, until it ends or waits for its sender."""
        return await self.follow(caller, await self.task(caller, run, key, hop=hop))

    async def follow(self, caller: Caller, task: Task) -> TaskStream:
        await self._conversations.begin(task)
        return await self._requests.follow(caller, task.id, 0, ends_when_parked=True)

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
        """Refused if it cannot be asked. The same key makes the same task."""
        about = without_reserved(run.about) or {}
        agent_id = run.agent
        if run.definition is not None:
            agent_id = INDEX
            about[INLINE] = msgspec.to_builtins(inline_agent(run.definition))
        agent = self.agent(caller, agent_id)
        recipient = self._catalogue.identity(agent.tenant, agent.id)
        check_hop(hop, recipient, self._conversations.limits.depth_max)
        definition = agent.definition
        message = Message(message_id="", parts=run.parts)
        check_message(msgspec.structs.replace(message, message_id="m"), agent, definition.extensions)
        said = read_idempotency(SendMessage(message=message), key)
        sender, task_id = self._catalogue.client(agent.tenant), TaskId(self._new_id())
        if said is not None:
            place = f"{NATIVE} {context_id or ''} {agent_id}"
            task_id = await self._conversations.ids.find(caller, place, said.key, sender=sender, recipient=recipient)
        plain = len(run.parts) == 1 and run.parts[0] == Text(text_of(run.parts))
        task = Task(
            id=task_id,
            sender=sender,
            recipient=recipient,
            intent_text=text_of(run.parts),
            parts=() if plain else run.parts,
            parent=parent,
            context_id=context_id or task_id,
            timeout_ms=definition.turn_timeout_ms,
            tenant=agent.tenant,
            origin=NATIVE,
            request_metadata=about or None,
        )
        return task if hop is None else traced(within_chain(task, hop), trace_of(hop))


def inline_agent(given: dict[str, Any]) -> AgentDefinition:
    """For one request: played by a model, and by nothing else."""
    definition = read_agent_definition({"id": "inline", **given})
    if not definition.kind_rules.needs_model:
        raise Invalid("invalid_agent", '/kind: an agent that comes with a request is a "model" agent')
    return definition


def inline_of(task: Task) -> AgentDefinition | None:
    """The agent that came with a task, if one did."""
    definition = (task.request_metadata or {}).get(INLINE) if task.origin == NATIVE else None
    return msgspec.convert(definition, AgentDefinition) if definition is not None else None
