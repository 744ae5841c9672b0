"""Delegations to peers: offered, followed, canceled, and given up when the provider is silent.

There is one delegation for a task: a later attempt, also after a restart, finds it. An offer waits for a peer that
cannot be reached. Where any peer may do it, or the peer is busy, the task is offered again: the next offer has another
id and takes the place of the one before (`placement`). Replies are checked against the offer (`offers`).

What is said to a provider is committed by `delegation_writer`; silence is noticed by `delegation_sweep`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Final

from covenant.ledger.machine.identity_commands import WriteAuditRow
from covenant.ledger.machine.peer_commands import (
    DelegationChanges,
    ReceivedFromPeer,
    ReceiveFromPeer,
    SendToPeer,
)
from covenant.model.errors import Conflict, Invalid, Unavailable
from covenant.model.ids import AgentId, TaskId
from covenant.model.peers.delegation import (
    CANCELLING,
    LOST,
    REJECTED,
    Delegation,
    DelegationKey,
    DelegationRole,
    Peer,
)
from covenant.model.peers.delegation_messages import (
    DelegationAccept,
    DelegationOffer,
    DelegationReject,
    DelegationResult,
    StatusReport,
)
from covenant.model.peers.instance import InstanceId
from covenant.model.task import Target, Task
from covenant.peers.directory.peer_directory import PeerDirectory
from covenant.peers.message_redaction import Redacted, outgoing
from covenant.peers.peer_settings import PeerContext, PeerService
from covenant.peers.requester.delegation_sweep import DelegationSweep
from covenant.peers.requester.delegation_writer import DelegationWriter
from covenant.peers.requester.offers import (
    OfferBuilder,
    Told,
    cancel_message,
    check_accept,
    check_reject,
    check_result,
    check_status,
)
from covenant.peers.requester.placement import INTRODUCTION_MS, PASSING, OfferPlacement
from covenant.peers.transport.inbox import IncomingMessage
from covenant.wire import peers as wire

FORGOTTEN_MAX: Final = 1_000

log = logging.getLogger(__name__)


class _Follower:
    __slots__ = ("moved", "seen", "task_id")

    def __init__(self, task_id: TaskId) -> None:
        self.task_id = task_id
        self.moved = asyncio.Event()
        self.seen: Delegation | None = None


class Requester(PeerService):
    """Lives on one loop. `run` it, so that silence is noticed; `stop` it before the ledger closes."""

    def __init__(self, context: PeerContext, directory: PeerDirectory) -> None:
        super().__init__(context)
        self._directory = directory
        self._offers = OfferBuilder(context, directory)
        self._placement = OfferPlacement(context, directory)
        self._writer = DelegationWriter(context, self._placement)
        self._sweep = DelegationSweep(context, self._placement, self._writer)
        self.peer = directory.find
        self.provider = self._placement.provider
        self.is_introduced = self._placement.is_introduced
        self.delegation = self._writer.delegation
        self.cancel = self._writer.cancel
        self.answer = self._writer.answer
        self.shown = self._writer.shown
        self.run = self._sweep.run
        self.stop = self._sweep.stop
        self.sweep = self._sweep.sweep
        self._followers: set[_Follower] = set()
        self._forgotten: set[str] = set()
        """Offers that peers speak of and our ledger has no record of, since it was restored."""
        context.ledger.on_peer(self._wake)

    def callee(self, tenant: str, named: str) -> Target | None:
        """`peer/profile`, or a profile that some peer offers; None if there is no such thing for this tenant."""
        who, slash, profile = named.partition("/")
        if slash and not (who and profile):
            return None
        if slash:
            peer = self._placement.named(who, tenant)
            return Target(name=f"{peer.id}/{profile}", peer=peer.id, profile=profile)
        return Target(name=f"*/{named}", profile=named) if self.provider(named, tenant) is not None else None

    # Offering

    async def offer(self, task: Task, target: Target, told: Told = lambda _: None) -> Delegation:
        """Once for a task. `Unavailable` if its provider must be asked first, and cannot be now.

        `told` hears what was found in it that looks like a secret.
        """
        known = await self._writer.delegation(task.id)
        if known is not None and not self.is_passing(known, task):
            await self._ledger.durable()
            return known
        peer = await self._placement.place(task, target)
        try:
            if known is not None and known.code == "denied":
                await self._directory.capabilities(peer, fresh=True)
            made = await self._offers.make(task, peer, target, known.number + 1 if known is not None else 1)
            if made.findings:
                told(made.findings)
            return await self._begin(task, peer, target, made, known)
        except Unavailable as away:
            self._placement.pause(peer.id, task.id, away.retry_after_ms, full=False)
            raise
        except BaseException:
            self._placement.leave(peer.id, task.id)
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
            offered_in=(self._context.epoch, peer.epoch),
        )
        moved = await self._ledger.commit(
            SendToPeer(
                key=begin.key,
                begin=begin,
                happenings=("offer",),
                said=(outgoing(made.message),),
                replaces=before.key if before is not None else None,
            )
        )
        return moved.delegation

    def is_passing(self, delegation: Delegation, task: Task) -> bool:
        """Whether it was rejected for a reason that passes, and its task has time to be offered again."""
        if delegation.state is not REJECTED:
            return False
        waited_ms = self._now_ms() - delegation.since_ms
        if delegation.code == "denied" and delegation.number == 1:
            return True  # its token may have been revoked: it is asked for another one, once
        if delegation.code in PASSING:
            return waited_ms < (task.timeout_ms or self._settings.timeout_ms)
        # Two that are being introduced have not verified each other at the same moment.
        return delegation.code == "untrusted" and waited_ms < INTRODUCTION_MS

    async def offer_again(self, by: AgentId, task_id: TaskId) -> Delegation:
        """A lost one, word for word: a provider that has it answers as it did before."""
        delegation = await self._writer.known(task_id)
        if delegation.state is not LOST or delegation.offer is None:
            raise Conflict("not_lost", f"this delegation is {delegation.state.value}; only a lost one is offered again")
        return (
            await self._writer.tell(
                delegation, "offer", changes=DelegationChanges(code=None, reason=None), message=delegation.offer, by=by
            )
        ).delegation

    async def force_error(self, by: AgentId, task_id: TaskId, reason: str) -> Delegation:
        """Give a lost one up, or one that does not answer a cancel. Its provider is told to stop, once it can be."""
        delegation = await self._writer.known(task_id)
        if delegation.state not in (LOST, CANCELLING):
            raise Conflict("not_lost", f"this delegation is {delegation.state.value}; cancel it instead")
        return await self._writer.give_up(delegation, reason, by)

    async def withdraw(self, task_id: TaskId, reason: str) -> None:
        """Whoever waited for it waits no more. If its task has not ended, the next attempt goes on with it."""
        delegation = await self._writer.delegation(task_id)
        if delegation is not None and not delegation.ended and not await self._writer.waits(delegation):
            await self._writer.cancel(task_id, reason)

    # Following

    async def follow(self, task_id: TaskId) -> AsyncIterator[Delegation]:
        """As it is now, and whenever it has moved, until it has ended. What is told is durable."""
        follower = _Follower(task_id)
        self._followers.add(follower)
        try:
            while True:
                follower.moved.clear()
                delegation = await self._writer.known(task_id)
                if delegation != follower.seen:
                    follower.seen = delegation
                    await self._ledger.durable()
                    yield delegation
                    if delegation.ended:
                        return
                await follower.moved.wait()
        finally:
            self._followers.discard(follower)

    def _wake(self, peer_id: InstanceId) -> None:
        """Only those whose provider this is, or whose provider goes by another identity now."""
        for follower in self._followers:
            seen = follower.seen
            if seen is None or seen.peer == peer_id or self._ledger.peer(seen.peer) is None:
                follower.moved.set()

    # What is heard

    async def hear(self, incoming: IncomingMessage) -> ReceivedFromPeer:
        message = incoming.message
        if not isinstance(message, DelegationAccept | DelegationReject | StatusReport | DelegationResult):
            raise Invalid("type_not_supported", f"a requester is not sent a {wire.type_of(message)}")
        key = DelegationKey(DelegationRole.REQUESTER, incoming.peer.id, message.offer_id)
        delegation = await self._ledger.delegation(key)
        seq = incoming.envelope.seq
        envelope = incoming.envelope
        in_step = delegation is not None and (envelope.epoch, envelope.our_epoch) == (
            delegation.peer_epoch,
            delegation.epoch,
        )
        if delegation is None or delegation.ended or (in_step and seq is not None and seq != delegation.heard + 1):
            heard = await self._ledger.commit(ReceiveFromPeer(envelope=envelope, key=key))
            await self._remind(incoming, key, delegation)
            return heard
        hear = await self._heard(incoming, delegation, message)
        try:
            heard = await self._ledger.commit(hear)
            if heard.moved is not None:
                self._writer.note(heard.moved.delegation)
            return heard
        except Conflict as conflict:
            if conflict.code != "illegal_move":
                raise
            # Out of turn, like a reject of what was accepted. It is taken in, and changes nothing.
            log.warning(
                "peer.out_of_turn", extra={"peer": key.peer, "offer_id": key.offer_id, "typ": hear.envelope.typ}
            )
            return await self._ledger.commit(ReceiveFromPeer(envelope=incoming.envelope, key=key))

    async def _remind(self, incoming: IncomingMessage, key: DelegationKey, delegation: Delegation | None) -> None:
        """After a restore: what has ended for us is not to be done again, and what we have forgotten is noted."""
        goes_on = isinstance(incoming.message, DelegationAccept | StatusReport)
        if delegation is None:
            noted = key.offer_id in self._forgotten or len(self._forgotten) >= FORGOTTEN_MAX
            if self._context.epoch is not None and not noted:
                self._forgotten.add(key.offer_id)
                row: dict[str, object] = {"type": "delegation_forgotten", "peer": key.peer, "offer_id": key.offer_id}
                await self._ledger.commit(WriteAuditRow(by=self._us, row=row))
        elif delegation.ended and goes_on and incoming.envelope.epoch != delegation.peer_epoch:
            await self._writer.tell(delegation, message=cancel_message(delegation, "it has ended already"))

    async def _heard(
        self,
        incoming: IncomingMessage,
        delegation: Delegation,
        message: DelegationAccept | DelegationReject | StatusReport | DelegationResult,
    ) -> ReceiveFromPeer:
        match message:
            case DelegationAccept():
                return check_accept(incoming, delegation, message, self._now_ms())
            case DelegationReject():
                return check_reject(incoming, delegation, message, self._now_ms())
            case StatusReport():
                return check_status(incoming, delegation, message)
            case DelegationResult():
                task = await self._writer.task_outcome(delegation)
                return await check_result(incoming, delegation, message, us=self._keyring, task=task)
