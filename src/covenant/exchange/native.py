"""A message of a native client for one agent, the master unless it says otherwise, as a task like all others.

An agent can come with the message: a definition for this one request, which nobody else can call and which remembers
nothing. It is kept with the task, so that whoever works on it later, after a restart say, finds it there. Only this
door takes one: what A2A clients write into metadata is never read as an agent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from covenant.exchange.a2a_service import A2AExchange
from covenant.exchange.access.tenants import Caller
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.task_lookup import TaskLookup
from covenant.exchange.tasks.builder import build_task, check_message, read_idempotency
from covenant.exchange.tasks.reader import TaskStream
from covenant.ledger.machine.decisions.identities import unknown_agent
from covenant.model.a2a_requests import Message, SendMessage
from covenant.model.agent_definition import INDEX, AgentDefinition, CatalogueAgent, read_agent_definition
from covenant.model.content import Content
from covenant.model.errors import Invalid
from covenant.model.ids import TaskId
from covenant.model.sanitizer import without_reserved
from covenant.model.task import NATIVE, Hop, Task, check_hop

INLINE: Final = "covenant.agent_def"
"""In a task's request metadata: the agent that came with it."""


class NativeRun(msgspec.Struct, frozen=True, kw_only=True):
    """A request. `definition` is an agent for this request alone."""

    parts: tuple[Content, ...]
    agent: str = INDEX
    definition: dict[str, Any] | None = None
    about: dict[str, Any] | None = None
    """Metadata from the client, kept with the request."""


class NativeRuns:
    def __init__(self, catalogue: Catalogue, a2a: A2AExchange, lookup: TaskLookup, new_id: Callable[[], str]) -> None:
        self._catalogue = catalogue
        self._a2a = a2a
        self._lookup = lookup
        self._new_id = new_id

    def agent(self, caller: Caller, agent_id: str) -> CatalogueAgent:
        agent = self._catalogue.agent(caller.tenant.name, agent_id)
        if agent is None:
            raise unknown_agent(agent_id)
        return agent

    async def start(self, caller: Caller, run: NativeRun, key: str | None, hop: Hop | None = None) -> TaskStream:
        """The task's steps from the first one on, until it ends or waits for its sender."""
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
        """Build the task of a run. The same key makes the same task."""
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
        said, task_id = read_idempotency(SendMessage(message=message), key), TaskId(self._new_id())
        if said is not None:
            place = f"{NATIVE} {context_id or ''} {agent_id}"
            task_id = await self._a2a.ids.find(caller, place, said.key, sender=sender, recipient=recipient)
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
            request_metadata=about or None,
        )


def inline_agent(given: dict[str, Any]) -> AgentDefinition:
    """The definition of an agent for one request. Only a model may play it."""
    definition = read_agent_definition({"id": "inline", **given})
    if not definition.kind_rules.needs_model:
        raise Invalid("invalid_agent", '/kind: an agent that comes with a request is a "model" agent')
    return definition


def inline_of(task: Task) -> AgentDefinition | None:
    definition = (task.request_metadata or {}).get(INLINE) if task.origin == NATIVE else None
    return msgspec.convert(definition, AgentDefinition) if definition is not None else None
