"""Delegations to peers: offered, followed, answered, canceled and given up. Each step is one commit.

A task has one delegation: a later attempt finds it, also after a restart. An offer waits for a peer that cannot be
reached. If any peer may do the task, or the peer is busy, the task is offered again (`placement`): the next offer has
another id and takes the place of the one before. A provider's replies are checked against the offer (`offers`). A
provider that is silent is noticed by `delegation_sweep`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from covenant.exchange.delegation_outcome import by_task, view_outcome
from covenant.exchange.tasks.builder import text_of
from covenant.exchange.tasks.reader import TaskReader
from covenant.ledger.machine.decisions.peers import unknown_delegation
from covenant.ledger.machine.peer_commands import (
    DelegationChanges,
    DelegationMoved,
    ReceivedFromPeer,
    ReceiveFromPeer,
    SendToPeer,
)
from covenant.model.content import Content, File, Text
from covenant.model.errors import Conflict, Forbidden, Invalid, NotFound, Unavailable
from covenant.model.ids import AgentId, TaskId
from covenant.model.peers.delegation import (
    ACCEPTED,
    CANCELLING,
    LOST,
    REJECTED,
    Delegation,
    DelegationRole,
    Peer,
)
from covenant.model.peers.delegation_messages import (
    DelegationAccept,
    DelegationCancel,
    DelegationInput,
    DelegationOffer,
    DelegationOutcome,
    DelegationReject,
    DelegationResult,
    StatusReport,
)
from covenant.model.peers.instance import InstanceId
from covenant.model.task import Target, Task
from covenant.outbound.concurrency import wait_at_most
from covenant.peers.directory.peer_directory import PeerDirectory
from covenant.peers.message_redaction import Redacted, outgoing, redact_aside
from covenant.peers.peer_settings import PeerContext, PeerService
from covenant.peers.requester.offers import (
    OfferBuilder,
    OnFindings,
    cancel_message,
    check_accept,
    check_reject,
    check_result,
    check_status,
)
from covenant.peers.requester.placement import INTRODUCTION_MS, PASSING, OfferPlacement, may_pass_on
from covenant.peers.transport.inbox import IncomingMessage
from covenant.wire import peers as wire

PROVIDER_LOST: Final = "provider_lost"
FORGOTTEN_MAX: Final = 1_000
RETRY_S: Final = 0.5

log = logging.getLogger(__name__)


class _Follower:
    def __init__(self) -> None:
        self.moved = asyncio.Event()
        self.seen: Delegation | None = None


class Requester(PeerService):
    """Must be used on one event loop."""

    def __init__(self, context: PeerContext, directory: PeerDirectory) -> None:
        super().__init__(context)
        self._directory = directory
        self._offers = OfferBuilder(context, directory)
        self._tasks = TaskReader(context.ledger)
        self.placement = OfferPlacement(context, directory)
        self.since_ms = self._now_ms()
        """No provider counts as silent before this daemon began to listen."""
        self.unsettled: set[TaskId] = set()
        """The tasks of delegations that have ended, while it is not known that the task has."""
        self._followers: set[_Follower] = set()
        self._forgotten: set[str] = set()
        """Offers in messages of peers that our restored ledger does not have."""
        context.ledger.on_peer(self._wake)

    def callee(self, tenant: str, named: str) -> Target | None:
        """The target of `peer/profile`, or of a profile that some peer offers; None if this tenant has no such peer."""
        who, slash, profile = named.partition("/")
        if slash and not (who and profile):
            return None
        if slash:
            peer = self.placement.named(who, tenant)
            return Target(name=f"{peer.id}/{profile}", peer=peer.id, profile=profile)
        return Target(name=f"*/{named}", profile=named) if self.placement.provider(named, tenant) is not None else None

    # Offering

    async def offer(self, task: Task, target: Target, on_findings: OnFindings = lambda _: None) -> Delegation:
        """Offers a task to a peer, once. Raises `Unavailable` if the peer must be asked first and does not answer.

        `on_findings` is called with the secrets that were found in the offer, if there are any.
        """
        known = await self.delegation(task.id)
        if known is not None and not self.is_passing(known, task):
            await self._ledger.durable()
            return known
        peer = await self.placement.place(task, target)
        try:
            if known is not None and known.code == "denied":
                await self._directory.capabilities(peer, fresh=True)
            made = await self._offers.make(task, peer, target, known.number + 1 if known is not None else 1)
            if made.findings:
                on_findings(made.findings)
            return await self._begin(task, peer, target, made, known)
        except Unavailable as unavailable:
            self.placement.pause(peer.id, task.id, unavailable.retry_after_ms, full=False)
            raise
        except (Conflict, Forbidden, NotFound) as refusal:
            if self._ledger.peer(peer.id) is None:  # it has another identity by now, and is found by the old id, too
                self.placement.leave(peer.id, task.id)
                return await self.offer(task, target, on_findings)
            if isinstance(refusal, Conflict):
                self.placement.leave(peer.id, task.id)
                raise
            self.placement.refuse(peer.id, task.id)
            if target.peer or not self.placement.has_candidates(task, target.profile or ""):
                raise
            return await self.offer(task, target, on_findings)
        except BaseException:
            self.placement.leave(peer.id, task.id)
            raise

    async def _begin(
        self, task: Task, peer: Peer, target: Target, made: Redacted[DelegationOffer], before: Delegation | None
    ) -> Delegation:
        begin = Delegation.offered(
            DelegationRole.REQUESTER,
            peer.id,
            task.id,
            made.message,
            redacted=made.found,
            number=before.number + 1 if before is not None else 1,
            since_ms=before.since_ms if before is not None else self._now_ms(),
            anyone=not target.peer,
            renewed=before is not None and before.code == "denied",
            offered_in=(self._context.ledger_epoch, peer.epoch),
        )
        moved = await self._ledger.commit(
            SendToPeer(
                key=begin.key,
                begin=begin,
                transitions=("offer",),
                messages=(outgoing(made.message),),
                replaces=before.key if before is not None else None,
            )
        )
        return moved.delegation

    def is_passing(self, delegation: Delegation, task: Task) -> bool:
        """Whether the offer was rejected for a reason that passes, and the task has time to be offered again."""
        if delegation.state is not REJECTED:
            return False
        waited_ms = self._now_ms() - delegation.since_ms
        if delegation.code == "denied" and not delegation.renewed:
            return True  # our token may have been revoked: the peer is asked for another one, once
        if may_pass_on(delegation):
            return self.placement.has_candidates(task, delegation.profile)
        if delegation.code in PASSING:
            return waited_ms < (task.timeout_ms or self._settings.timeout_ms)
        # Two instances that have just met do not verify each other at the same moment.
        return delegation.code == "untrusted" and waited_ms < INTRODUCTION_MS

    async def offer_again(self, by: AgentId, task_id: TaskId) -> Delegation:
        """Sends the offer of a lost delegation again, unchanged: a provider that has the offer answers as before."""
        delegation = await self.required_delegation(task_id)
        if delegation.state is not LOST or delegation.offer is None:
            raise Conflict("not_lost", f"this delegation is {delegation.state.value}; only a lost one is offered again")
        return (
            await self.commit(
                delegation, "offer", changes=DelegationChanges(code=None, reason=None), message=delegation.offer, by=by
            )
        ).delegation

    async def force_error(self, by: AgentId, task_id: TaskId, reason: str) -> Delegation:
        """Gives up a delegation that is lost, or whose provider does not answer a cancel.

        The provider gets the cancel as soon as it can be reached.
        """
        delegation = await self.required_delegation(task_id)
        if delegation.state not in (LOST, CANCELLING):
            raise Conflict("not_lost", f"this delegation is {delegation.state.value}; cancel it instead")
        return await self.give_up(delegation, reason, by)

    async def withdraw(self, task_id: TaskId, reason: str) -> None:
        """The attempt that waited for this delegation has stopped. Cancels the delegation if its task has ended.

        If the task has not ended, its next attempt goes on with the delegation.
        """
        delegation = await self.delegation(task_id)
        if delegation is not None and not delegation.ended and not await self.is_awaited(delegation):
            await self.cancel(task_id, reason)

    # Records of delegations, and messages to the provider

    async def delegation(self, task_id: TaskId) -> Delegation | None:
        found = await self._ledger.delegation_of(task_id)
        return found if found is not None and found.role is DelegationRole.REQUESTER else None

    async def required_delegation(self, task_id: TaskId) -> Delegation:
        delegation = await self.delegation(task_id)
        if delegation is None:
            raise unknown_delegation(task_id)
        return delegation

    async def commit(
        self,
        delegation: Delegation,
        *transitions: str,
        changes: DelegationChanges | None = None,
        message: DelegationOffer | DelegationCancel | DelegationInput | None = None,
        by: AgentId | None = None,
    ) -> DelegationMoved:
        changes = changes or DelegationChanges()
        if isinstance(message, DelegationCancel | DelegationInput):
            cleared = await redact_aside(message, self._settings.redaction, delegation.key)
            message = cleared.message
            changes = msgspec.structs.replace(changes, redacted=delegation.redacted + cleared.found)
        command = SendToPeer(
            key=delegation.key,
            transitions=transitions,
            changes=changes,
            messages=(outgoing(message),) if message is not None else (),
            by=by,
            withdraws=isinstance(message, DelegationCancel),
            unsent_since_ms=self._unsent_since_ms(delegation),
        )
        try:
            moved = await self._ledger.commit(command)
        except NotFound:
            now = await self.delegation(delegation.task_id)
            if now is None or now.peer == delegation.peer or now.offer_id != delegation.offer_id:
                raise
            # Its peer has another identity since the delegation was read. The offer may have been sent to the old one.
            moved = await self._ledger.commit(msgspec.structs.replace(command, key=now.key, unsent_since_ms=None))
        self.note(moved.delegation)
        return moved

    def _unsent_since_ms(self, delegation: Delegation) -> int | None:
        """Since when this daemon knows which offers it began to send; None: this one was begun.

        On a shared ledger the message in the outbox says whether it was begun.
        """
        if self._in_flight(delegation.key):
            return None
        return self.since_ms if self._context.shared is None else 0

    async def cancel(self, task_id: TaskId, reason: str) -> Delegation:
        """Cancels a delegation, durably: the provider gets the cancel as soon as it can be reached.

        A delegation that has ended stays as it is. An offer that still waits is not sent any more; if nobody began to
        send it, the delegation ends at once.
        """
        delegation = await self.required_delegation(task_id)
        if delegation.ended or delegation.state is CANCELLING:
            return delegation
        return (await self.commit(delegation, "cancel", message=cancel_message(delegation, reason))).delegation

    async def note_asked(self, delegation: Delegation) -> None:
        """Records which question the task is about to ask its sender."""
        assert delegation.question is not None
        if delegation.asked != delegation.question.number:
            await self.commit(delegation, changes=DelegationChanges(asked=delegation.question.number))

    async def answer(self, task_id: TaskId, turn: int, parts: tuple[Content, ...]) -> bool:
        """Sends the provider the answer to its question, once for a turn of the task.

        False if the provider asks nothing, or if this turn has answered already. False too if the provider asks another
        question by now than the task's sender was asked, which happens after one of the ledgers was restored.
        """
        delegation = await self.required_delegation(task_id)
        question = delegation.question
        if question is None or delegation.delegation_id is None or delegation.answered_turn >= turn:
            return False
        if question.number != delegation.asked:
            return False
        plain = all(type(part) is Text and part == Text(part.text) for part in parts)
        message = DelegationInput(
            offer_id=delegation.offer_id,
            delegation_id=delegation.delegation_id,
            question=question.number,
            text=text_of(parts) if plain else "",
            parts=() if plain else tuple(part for part in parts if not isinstance(part, File)),
        )
        changes = DelegationChanges(
            question=None, message=None, answered=question.number, answered_turn=turn, doubted=0
        )
        await self.commit(delegation, changes=changes, message=message)
        return True

    async def give_up(self, delegation: Delegation, reason: str, by: AgentId | None = None) -> Delegation:
        code = delegation.code if delegation.state is CANCELLING and delegation.code else PROVIDER_LOST
        changes = DelegationChanges(code=code, reason=reason[:500])
        cancel = cancel_message(delegation, reason) if delegation.state is LOST else None
        return (await self.commit(delegation, "force_error", changes=changes, message=cancel, by=by)).delegation

    async def shown(self, delegation: Delegation) -> Delegation:
        """The delegation with the status of its task here."""
        if delegation.role is DelegationRole.PROVIDER or delegation.settled:
            return delegation
        return by_task(delegation, await self.task_outcome(delegation))

    def note(self, delegation: Delegation) -> None:
        """Called after a move: a delegation that has ended is settled later, and its place at the provider is free."""
        if not delegation.ended:
            if delegation.state is ACCEPTED:
                self.placement.accepted(delegation)
            return
        if not delegation.settled:
            self.unsettled.add(delegation.task_id)
        if delegation.state is REJECTED and delegation.code in (*PASSING, "untrusted"):
            full = delegation.code == "busy"
            self.placement.pause(delegation.peer, delegation.task_id, delegation.retry_after_ms, full=full)
        elif delegation.state is REJECTED and may_pass_on(delegation):
            self.placement.refuse(delegation.peer, delegation.task_id)
        else:
            self.placement.leave(delegation.peer, delegation.task_id)

    async def is_awaited(self, delegation: Delegation) -> bool:
        """Whether the task here has not ended, so that it waits for the delegation."""
        entry = await self._ledger.entry(delegation.task_id)
        return entry is not None and not entry.finished

    async def task_outcome(self, delegation: Delegation) -> DelegationOutcome | None:
        """How the task here has ended; None if it has not."""
        if await self.is_awaited(delegation):
            return None
        return view_outcome((await self._tasks.past(delegation.task_id)).view())

    # Following

    async def follow(self, task_id: TaskId) -> AsyncIterator[Delegation]:
        """The delegation as it is now, and again whenever it moves, until it has ended. Each state is durable first."""
        follower = _Follower()
        self._followers.add(follower)
        try:
            while True:
                follower.moved.clear()
                try:
                    delegation = await self.required_delegation(task_id)
                    if delegation != follower.seen:
                        await self._ledger.durable()
                except Unavailable:
                    if self._context.shared is None:
                        raise
                    await wait_at_most(follower.moved, RETRY_S)  # the database may be back by then
                    continue
                if delegation != follower.seen:
                    follower.seen = delegation
                    if self._context.shared is not None:
                        self.note(delegation)  # the message may have come to another daemon
                    yield delegation
                    if delegation.ended:
                        return
                await follower.moved.wait()
        finally:
            self._followers.discard(follower)

    def _wake(self, peer_id: InstanceId) -> None:
        """Wakes the followers of delegations to this peer, and those whose peer has another identity now."""
        self.placement.wake()
        for follower in self._followers:
            seen = follower.seen
            if seen is None or seen.peer == peer_id or self._ledger.peer(seen.peer) is None:
                follower.moved.set()

    async def receive(self, incoming: IncomingMessage) -> ReceivedFromPeer:
        message = incoming.message
        if not isinstance(message, DelegationAccept | DelegationReject | StatusReport | DelegationResult):
            raise Invalid("type_not_supported", f"a requester takes no message of type {wire.type_of(message)}")
        key, envelope = incoming.key, incoming.envelope
        delegation = await self._ledger.delegation(key)
        in_step = delegation is not None and (envelope.epoch, envelope.our_epoch) == (
            delegation.peer_epoch,
            delegation.epoch,
        )
        if (
            delegation is None
            or delegation.ended
            or (in_step and envelope.seq is not None and envelope.seq != delegation.received_seq + 1)
        ):
            received = await self._ledger.commit(ReceiveFromPeer(envelope=envelope, key=key))
            await self._answer_unexpected(incoming, delegation)
            return received
        command = await self._receive_command(incoming, delegation, message)
        try:
            received = await self._ledger.commit(command)
            if received.moved is not None:
                self.note(received.moved.delegation)
            return received
        except Conflict as conflict:
            if conflict.code != "illegal_move":
                raise
            # A message out of turn, such as a reject after an accept, is recorded as received and changes nothing.
            log.warning(
                "peer.out_of_turn", extra={"peer": key.peer, "offer_id": key.offer_id, "typ": command.envelope.typ}
            )
            return await self._ledger.commit(ReceiveFromPeer(envelope=envelope, key=key))

    async def _answer_unexpected(self, incoming: IncomingMessage, delegation: Delegation | None) -> None:
        """After a restore: cancels work at the provider that has ended here, and audits offers that our ledger lost."""
        key, goes_on = incoming.key, isinstance(incoming.message, DelegationAccept | StatusReport)
        if delegation is None:
            noted = key.offer_id in self._forgotten or len(self._forgotten) >= FORGOTTEN_MAX
            if self._context.ledger_epoch is not None and not noted:
                self._forgotten.add(key.offer_id)
                await self._audit("delegation_forgotten", peer=key.peer, offer_id=key.offer_id)
        elif delegation.ended and goes_on and incoming.envelope.epoch != delegation.peer_epoch:
            await self.commit(delegation, message=cancel_message(delegation, "it has ended already"))

    async def _receive_command(
        self,
        incoming: IncomingMessage,
        delegation: Delegation,
        message: DelegationAccept | DelegationReject | StatusReport | DelegationResult,
    ) -> ReceiveFromPeer:
        restored = self._context.ledger_epoch is not None
        if incoming.envelope.epoch != delegation.peer_epoch:
            # A restored provider has forgotten its last reports, and counts on from an earlier one.
            delegation = msgspec.structs.replace(delegation, status_seq=0)
        match message:
            case DelegationAccept():
                return check_accept(incoming, delegation, message, self._now_ms(), restored=restored)
            case DelegationReject():
                return check_reject(incoming, delegation, message, self._now_ms())
            case StatusReport():
                return check_status(incoming, delegation, message)
            case DelegationResult():
                task = await self.task_outcome(delegation)
                return await check_result(incoming, delegation, message, us=self._keyring, task=task, restored=restored)
