"""What is said to providers, and what becomes of a delegation by it: one commit a step."""

from __future__ import annotations

from typing import Final

import msgspec

from covenant.exchange.tasks.builder import text_of
from covenant.exchange.tasks.reader import TaskReader
from covenant.ledger.machine.decisions.peers import unknown_delegation
from covenant.ledger.machine.peer_commands import (
    DelegationChanges,
    DelegationMoved,
    SendToPeer,
)
from covenant.model.content import Content, File, Text
from covenant.model.ids import AgentId, TaskId
from covenant.model.peers.delegation import (
    ACCEPTED,
    CANCELLING,
    LOST,
    OFFERED,
    REJECTED,
    RUNNING,
    Delegation,
    DelegationRole,
)
from covenant.model.peers.delegation_messages import (
    DelegationCancel,
    DelegationInput,
    DelegationOffer,
    DelegationOutcome,
)
from covenant.peers.message_redaction import outgoing, redact_aside
from covenant.peers.peer_settings import PeerContext, PeerService
from covenant.peers.requester.offers import (
    cancel_message,
    settled_as,
    task_outcome,
)
from covenant.peers.requester.placement import PASSING, OfferPlacement

PROVIDER_LOST: Final = "provider_lost"

replace = msgspec.structs.replace


class DelegationWriter(PeerService):
    """`unsettled`: the tasks of what has ended, while the task is not known to have."""

    def __init__(self, context: PeerContext, placement: OfferPlacement) -> None:
        super().__init__(context)
        self._placement = placement
        self._tasks = TaskReader(context.ledger)
        self.since_ms = self._now_ms()
        """Nobody is silent while we do not listen."""
        self.unsettled: set[TaskId] = set()

    async def delegation(self, task_id: TaskId) -> Delegation | None:
        found = await self._ledger.delegation_of(task_id)
        return found if found is not None and found.role is DelegationRole.REQUESTER else None

    async def known(self, task_id: TaskId) -> Delegation:
        delegation = await self.delegation(task_id)
        if delegation is None:
            raise unknown_delegation(task_id)
        return delegation

    async def tell(
        self,
        delegation: Delegation,
        *happenings: str,
        changes: DelegationChanges | None = None,
        message: DelegationOffer | DelegationCancel | DelegationInput | None = None,
        by: AgentId | None = None,
    ) -> DelegationMoved:
        changes = changes or DelegationChanges()
        if isinstance(message, DelegationCancel | DelegationInput):
            cleared = await redact_aside(message, self._settings.redaction, delegation.key)
            message, changes = cleared.message, replace(changes, redacted=delegation.redacted + cleared.found)
        moved = await self._ledger.commit(
            SendToPeer(
                key=delegation.key,
                happenings=happenings,
                changes=changes,
                said=(outgoing(message),) if message is not None else (),
                by=by,
                withdraws=isinstance(message, DelegationCancel),
                unsent_since_ms=self.since_ms if self._in_flight(delegation.key) == 0 else None,
            )
        )
        self.note(moved.delegation)
        return moved

    async def cancel(self, task_id: TaskId, reason: str) -> Delegation:
        """Durable: it reaches the provider whenever that can be reached. What has ended stays as it is.

        An offer that waits is not sent any more. If nobody began to send it, the delegation is over at once.
        """
        delegation = await self.known(task_id)
        if delegation.ended or delegation.state is CANCELLING:
            return delegation
        return (await self.tell(delegation, "cancel", message=cancel_message(delegation, reason))).delegation

    async def answer(self, task_id: TaskId, turn: int, parts: tuple[Content, ...]) -> bool:
        """Answer what was asked, once for a turn of its task. False: nothing is asked, or this turn has answered."""
        delegation = await self.known(task_id)
        question = delegation.question
        if question is None or delegation.delegation_id is None or delegation.answered_turn >= turn:
            return False
        plain = all(type(part) is Text and part == Text(part.text) for part in parts)
        message = DelegationInput(
            offer_id=delegation.offer_id,
            delegation_id=delegation.delegation_id,
            question=question.number,
            text=text_of(parts) if plain else "",
            parts=() if plain else tuple(part for part in parts if not isinstance(part, File)),
        )
        changes = DelegationChanges(question=None, answered=question.number, answered_turn=turn)
        await self.tell(delegation, changes=changes, message=message)
        return True

    async def give_up(self, delegation: Delegation, reason: str, by: AgentId | None = None) -> Delegation:
        code = delegation.code if delegation.state is CANCELLING and delegation.code else PROVIDER_LOST
        changes = DelegationChanges(code=code, reason=reason[:500])
        cancel = cancel_message(delegation, reason) if delegation.state is LOST else None
        return (await self.tell(delegation, "force_error", changes=changes, message=cancel, by=by)).delegation

    async def shown(self, delegation: Delegation) -> Delegation:
        """As its task stands: what has ended has not for us, before its task has taken what came of it."""
        if delegation.role is DelegationRole.PROVIDER or delegation.settled or not delegation.ended:
            return delegation
        outcome = await self.task_outcome(delegation)
        if outcome is None:
            return replace(delegation, state=OFFERED if delegation.state is REJECTED else RUNNING)
        return replace(delegation, state=settled_as(delegation.state, outcome))

    def note(self, delegation: Delegation) -> None:
        """Its end is to be its task's; and what it had at its provider is free again."""
        if not delegation.ended:
            if delegation.state is ACCEPTED:
                self._placement.accepted(delegation)
            return
        if not delegation.settled:
            self.unsettled.add(delegation.task_id)
        if delegation.state is REJECTED and delegation.code in (*PASSING, "untrusted"):
            full = delegation.code == "busy"
            self._placement.pause(delegation.peer, delegation.task_id, delegation.retry_after_ms, full=full)
        else:
            self._placement.leave(delegation.peer, delegation.task_id)

    async def waits(self, delegation: Delegation) -> bool:
        entry = await self._ledger.entry(delegation.task_id)
        return entry is not None and not entry.finished

    async def task_outcome(self, delegation: Delegation) -> DelegationOutcome | None:
        """How its task has ended; None if it has not."""
        if await self.waits(delegation):
            return None
        view = (await self._tasks.past(delegation.task_id)).view()
        return task_outcome(view) if view is not None else "cancelled"
