"""Runs: a message of a native client for one agent, the master unless it says otherwise, as a task like all others.

An agent can come with the message: a constitution for this one request, which nobody else can call and which remembers
nothing. It is kept with the task, so that whoever works on it later, after a restart say, finds it there. Only this
door takes one: what A2A clients write into metadata is never read as an agent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from covenant.exchange.catalogue import Catalogue
from covenant.exchange.chains import check_hop
from covenant.exchange.conversation import Conversations
from covenant.exchange.messages import PROCESS_TIMEOUT_MS, check_message, declared, text_of, within_chain
from covenant.exchange.requests import Requests
from covenant.exchange.streams import Stream
from covenant.exchange.tenancy import Caller
from covenant.ledger.machine.tenanting import unknown_agent
from covenant.model.asking import Message, SendMessage
from covenant.model.constitution import INDEX, CatalogueAgent, Constitution, read_constitution
from covenant.model.content import Content, Text
from covenant.model.errors import Invalid
from covenant.model.hop import Hop
from covenant.model.ids import TaskId
from covenant.model.metadata import without_reserved
from covenant.model.task import NATIVE, Task
from covenant.model.tracing import trace_of, traced

INLINE: Final = "covenant.agent_def"
"""In a task's request metadata: the agent that came with it."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. `definition` is an agent for this one request."""

    parts: tuple[Content, ...]
    agent: str = INDEX
    definition: dict[str, Any] | None = None
    about: dict[str, Any] | None = None
    """What the client says besides, kept with the request."""


class Runs:
    def __init__(
        self, catalogue: Catalogue, conversations: Conversations, requests: Requests, new_id: Callable[[], str]
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

    async def start(self, caller: Caller, run: Run, key: str | None, hop: Hop | None = None) -> Stream:
        """All that happens to it, from its first step on, until it ends or waits for its sender."""
        return await self.follow(caller, await self.task(caller, run, key, hop=hop))

    async def follow(self, caller: Caller, task: Task) -> Stream:
        await self._conversations.begin(task)
        return await self._requests.follow(caller, task.id, 0, ends_when_parked=True)

    async def task(
        self,
        caller: Caller,
        run: Run,
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
        constitution = agent.constitution
        message = Message(message_id="", parts=run.parts)
        check_message(msgspec.structs.replace(message, message_id="m"), agent, constitution.extensions)
        said = declared(SendMessage(message=message), key)
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
            timeout_ms=constitution.timeout_ms or (PROCESS_TIMEOUT_MS if constitution.kind == "process" else None),
            tenant=agent.tenant,
            origin=NATIVE,
            request_metadata=about or None,
        )
        return task if hop is None else traced(within_chain(task, hop), trace_of(hop))


def inline_agent(definition: dict[str, Any]) -> Constitution:
    """For one request: played by a model, and by nothing else."""
    constitution = read_constitution({"id": "inline", **definition})
    if constitution.kind != "model":
        raise Invalid("invalid_agent", '/kind: an agent that comes with a request is a "model" agent')
    return constitution


def inline_of(task: Task) -> Constitution | None:
    """The agent that came with a task, if one did."""
    definition = (task.request_metadata or {}).get(INLINE) if task.origin == NATIVE else None
    return msgspec.convert(definition, Constitution) if definition is not None else None
