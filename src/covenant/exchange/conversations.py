"""Conversations of native clients, each with one agent, kept as tasks like everything else.

A conversation is a task of `conversations@<tenant>` that waits for as long as the conversation is open, and is canceled
when it is deleted. Each message to it is a task of the agent, with the conversation as its parent and a context of its
own; what was said before is read from there. A2A's contexts are something else, and never mapped to conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from covenant.exchange.access.tenants import Caller
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.tasks.builder import build_task
from covenant.exchange.tasks.reader import TaskReader, parse_known_id
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.tasks import ListQuery, TaskScope
from covenant.ledger.machine.commands import Accept, Advance, Cancel, Starter
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.content import Text
from covenant.model.errors import Conflict, NotFound
from covenant.model.ids import PublicKey, TaskId
from covenant.model.task import NATIVE, Task, fingerprint
from covenant.model.task_event import Interruption, MessageUpdate, StatusUpdate
from covenant.model.task_view import TaskView, fold
from covenant.wire.native import CONVERSATION, conversation_of

KEEPER: Final = "conversations"
ABOUT: Final = "covenant.conversation"
HISTORY_TASKS_MAX: Final = 50
HISTORY_CHARACTERS_MAX: Final = 200_000
"""What an agent is told of what was said before: the newest of it."""
OPEN: Final = "open"


class Conversation(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    conversation_id: str
    agent: str
    title: str
    created_at_ms: int


class Conversations:
    def __init__(self, ledger: Ledger, catalogue: Catalogue, new_id: Callable[[], str]) -> None:
        self._ledger = ledger
        self._catalogue = catalogue
        self._new_id = new_id
        self._reader = TaskReader(ledger)

    async def create(self, caller: Caller, agent: CatalogueAgent, title: str) -> Conversation:
        tenant = caller.tenant.name
        keeper = self._catalogue.identity(tenant, KEEPER)
        task = build_task(
            TaskId(self._new_id()),
            sender=self._catalogue.client(tenant),
            recipient=keeper,
            parts=(Text(title or f"a conversation with {agent.id}"),),
            tenant=tenant,
            origin=NATIVE,
            request_metadata={ABOUT: {"agent": agent.id, "title": title}},
        )
        digest, _ = fingerprint(task)
        starter = Starter(keeper, self._ledger.node, self._ledger.boot)
        accepted = await self._ledger.commit(Accept(task=task, digest=digest, starter=starter))
        if accepted.leased is not None:
            waits = StatusUpdate(OPEN, Interruption.INPUT_REQUIRED.value)
            lease_id = accepted.leased.lease.lease_id
            await self._ledger.commit(Advance(task_id=task.id, holder=keeper, lease_id=lease_id, updates=(waits,)))
        return _conversation(await self._view(caller, task.id))

    async def list(self, caller: Caller, limit: int, after: str = "") -> tuple[Sequence[Conversation], str]:
        """Those that are open, the newest first, and where the next page begins."""
        listing = await self._ledger.listing(
            ListQuery(
                recipient=self._catalogue.identity(caller.tenant.name, KEEPER).pubkey,
                state=Interruption.INPUT_REQUIRED.value,
                after=after,
                limit=limit,
            )
        )
        return [_conversation(view) for steps in listing.tasks if (view := fold(steps)) is not None], listing.next

    async def get(self, caller: Caller, conversation_id: str) -> Conversation:
        return _conversation(await self._view(caller, conversation_id))

    async def delete(self, caller: Caller, conversation_id: str) -> None:
        """Ends it. What was said stays in the ledger, as tasks; what is under way goes on."""
        view = await self._view(caller, conversation_id)
        by = self._catalogue.client(caller.tenant.name)
        await self._ledger.commit(
            Cancel(task_id=view.task.id, recipient=view.task.recipient.pubkey, by=by, reason=f"by {caller.name}")
        )

    async def messages(self, caller: Caller, conversation_id: str, limit: int) -> Sequence[TaskView]:
        found = await self.get(caller, conversation_id)
        recipient = self._catalogue.identity(caller.tenant.name, found.agent).pubkey
        return await _tasks(self._ledger, recipient, context_of(found.conversation_id), limit)

    async def waiting(self, caller: Caller, conversation_id: str, task_id: TaskId) -> TaskView | None:
        """The task that waits for the client's next words, if one does.

        Refused while one is under way, unless it is this one, sent again: who is answered must be clear.
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
        """One that is open. What is over, another's or no conversation is not there."""
        try:
            task_id = parse_known_id(conversation_id)
            keeper = self._catalogue.identity(caller.tenant.name, KEEPER)
            view = await self._reader.get(task_id, TaskScope(recipient=keeper.pubkey))
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
    """What was said in a task's conversation before it, within bounds; nothing if it is in none."""
    context_id = task.context_id
    if context_id is None or conversation_of(task.origin, context_id) is None:
        return ()
    kept: list[MessageUpdate] = []
    room = HISTORY_CHARACTERS_MAX
    for view in reversed(await _tasks(ledger, task.recipient.pubkey, context_id, HISTORY_TASKS_MAX)):
        if view.task.id == task.id or not view.state.terminal:
            continue
        room -= sum(_length(message) for message in view.history)
        if room < 0:
            break
        kept[:0] = view.history
    return tuple(kept)


async def _tasks(ledger: Ledger, recipient: PublicKey, context_id: str, limit: int) -> list[TaskView]:
    """The newest, the oldest of them first. Only those that came by this door: anybody can name a context."""
    listing = await ledger.listing(ListQuery(recipient=recipient, context_id=context_id, limit=limit))
    views = [view for steps in listing.tasks if (view := fold(steps)) is not None and view.task.origin == NATIVE]
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
