"""Delegations to peers: offered, followed, canceled, and given up when the provider is silent.

There is one delegation for a task: a later attempt, also after a restart, finds it. An offer waits for a peer that
cannot be reached. Where any peer may do it, or the peer is busy, the task is offered again: the next offer has another
id and takes the place of the one before (`placement`). Replies are checked against the offer (`offers`).

A provider that is silent for too long is lost. An operator has the offer sent again, or gives it up. If the provider
is heard from again, the delegation goes on by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final

import msgspec

from covenant.exchange.tasks.reader import TaskReader
from covenant.ledger.machine.decisions.peers import unknown_delegation
from covenant.ledger.machine.identity_commands import WriteAuditRow
from covenant.ledger.machine.peer_commands import (
    DelegationChanges,
    DelegationMoved,
    ReceivedFromPeer,
    ReceiveFromPeer,
    SendToPeer,
)
from covenant.model.errors import Conflict, Invalid, Refusal, Unavailable
from covenant.model.ids import AgentId, TaskId
from covenant.model.peers.delegation import (
    ACCEPTED,
    CANCELLING,
    LOST,
    OFFERED,
    REJECTED,
    RUNNING,
    Delegation,
    DelegationKey,
    DelegationRole,
    Peer,
)
from covenant.model.peers.delegation_messages import (
    DelegationAccept,
    DelegationCancel,
    DelegationOffer,
    DelegationOutcome,
    DelegationReject,
    DelegationResult,
    StatusReport,
)
from covenant.model.peers.instance import InstanceId
from covenant.model.task import Target, Task
from covenant.model.tenants import DEFAULT
from covenant.peers.directory.peer_directory import PeerDirectory
from covenant.peers.message_redaction import Redacted, outgoing, redact_aside
from covenant.peers.peer_settings import PeerContext, PeerService
from covenant.peers.requester.offers import (
    OfferBuilder,
    Told,
    cancel_message,
    check_accept,
    check_reject,
    check_result,
    check_status,
    settled_as,
    task_outcome,
)
from covenant.peers.requester.placement import INTRODUCTION_MS, OFFLINE, PASSING, OfferPlacement
from covenant.peers.transport.inbox import IncomingMessage
from covenant.wire import peers as wire

PROVIDER_LOST: Final = "provider_lost"
GRACE_MS: Final = 10_000
"""What a provider has beyond the agreed time for its last word."""
SILENT_INTERVALS: Final = 3
SWEEP_S: Final = 1.0
FORGOTTEN_MAX: Final = 1_000

log = logging.getLogger(__name__)
replace = msgspec.structs.replace


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
        self._tasks = TaskReader(context.ledger)
        self._placement = OfferPlacement(context, directory)
        self.peer = directory.find
        self.provider = self._placement.provider
        self.is_introduced = self._placement.is_introduced
        self._since_ms = self._now_ms()
        """Nobody is silent while we do not listen."""
        self._stopped = asyncio.Event()
        self._unsettled: set[TaskId] = set()
        """What has ended, while its task is not known to have."""
        self._followers: set[_Follower] = set()
        self._forgotten: set[str] = set()
        """Offers that peers speak of and our ledger has no record of, since it was restored."""
        context.ledger.on_peer(self._wake)

    async def delegation(self, task_id: TaskId) -> Delegation | None:
        found = await self._ledger.delegation_of(task_id)
        return found if found is not None and found.role is DelegationRole.REQUESTER else None

    def callee(self, tenant: str, named: str) -> Target | None:
        """`peer/profile`, or a profile that some peer offers; None if there is no such thing for this tenant."""
        who, slash, profile = named.partition("/")
        if tenant != DEFAULT or (slash and not (who and profile)):
            return None
        if slash:
            peer = self.peer(who)
            return Target(name=f"{peer.id}/{profile}", peer=peer.id, profile=profile)
        return Target(name=f"*/{named}", profile=named) if self.provider(named) is not None else None

    # Offering

    async def offer(self, task: Task, target: Target, told: Told = lambda _: None) -> Delegation:
        """Once for a task. `Unavailable` if its provider must be asked first, and cannot be now.

        `told` hears what was found in it that looks like a secret.
        """
        known = await self.delegation(task.id)
        if known is not None and not self.is_passing(known, task):
            await self._ledger.durable()
            return known
        peer = await self._placement.place(task.id, target)
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
        delegation = await self._known(task_id)
        if delegation.state is not LOST or delegation.offer is None:
            raise Conflict("not_lost", f"this delegation is {delegation.state.value}; only a lost one is offered again")
        return (
            await self._tell(
                delegation, "offer", changes=DelegationChanges(code=None, reason=None), message=delegation.offer, by=by
            )
        ).delegation

    async def force_error(self, by: AgentId, task_id: TaskId, reason: str) -> Delegation:
        """Give a lost one up, or one that does not answer a cancel. Its provider is told to stop, once it can be."""
        delegation = await self._known(task_id)
        if delegation.state not in (LOST, CANCELLING):
            raise Conflict("not_lost", f"this delegation is {delegation.state.value}; cancel it instead")
        return await self._give_up(delegation, reason, by)

    async def _give_up(self, delegation: Delegation, reason: str, by: AgentId | None = None) -> Delegation:
        code = delegation.code if delegation.state is CANCELLING and delegation.code else PROVIDER_LOST
        changes = DelegationChanges(code=code, reason=reason[:500])
        cancel = cancel_message(delegation, reason) if delegation.state is LOST else None
        return (await self._tell(delegation, "force_error", changes=changes, message=cancel, by=by)).delegation

    async def cancel(self, task_id: TaskId, reason: str) -> Delegation:
        """Durable: it reaches the provider whenever that can be reached. What has ended stays as it is.

        An offer that waits is not sent any more. If nobody began to send it, the delegation is over at once.
        """
        delegation = await self._known(task_id)
        if delegation.ended or delegation.state is CANCELLING:
            return delegation
        return (await self._tell(delegation, "cancel", message=cancel_message(delegation, reason))).delegation

    async def withdraw(self, task_id: TaskId, reason: str) -> None:
        """Whoever waited for it waits no more. If its task has not ended, the next attempt goes on with it."""
        delegation = await self.delegation(task_id)
        if delegation is not None and not delegation.ended and not await self._waits(delegation):
            await self.cancel(task_id, reason)

    # Following

    async def follow(self, task_id: TaskId) -> AsyncIterator[Delegation]:
        """As it is now, and whenever it has moved, until it has ended. What is told is durable."""
        follower = _Follower(task_id)
        self._followers.add(follower)
        try:
            while True:
                follower.moved.clear()
                delegation = await self._known(task_id)
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
                self._note(heard.moved.delegation)
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
            await self._tell(delegation, message=cancel_message(delegation, "it has ended already"))

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
                task = await self._task_outcome(delegation)
                return await check_result(incoming, delegation, message, us=self._keyring.id, task=task)

    # Its task

    async def shown(self, delegation: Delegation) -> Delegation:
        """As its task stands: what has ended has not for us, before its task has taken what came of it."""
        if delegation.role is DelegationRole.PROVIDER or delegation.settled or not delegation.ended:
            return delegation
        outcome = await self._task_outcome(delegation)
        if outcome is None:
            return replace(delegation, state=OFFERED if delegation.state is REJECTED else RUNNING)
        return replace(delegation, state=settled_as(delegation.state, outcome))

    def _note(self, delegation: Delegation) -> None:
        """Its end is to be its task's; and what it had at its provider is free again."""
        if not delegation.ended:
            if delegation.state is ACCEPTED:
                self._placement.accepted(delegation)
            return
        if not delegation.settled:
            self._unsettled.add(delegation.task_id)
        if delegation.state is REJECTED and delegation.code in (*PASSING, "untrusted"):
            full = delegation.code == "busy"
            self._placement.pause(delegation.peer, delegation.task_id, delegation.retry_after_ms, full=full)
        else:
            self._placement.leave(delegation.peer, delegation.task_id)

    async def _waits(self, delegation: Delegation) -> bool:
        entry = await self._ledger.entry(delegation.task_id)
        return entry is not None and not entry.finished

    async def _task_outcome(self, delegation: Delegation) -> DelegationOutcome | None:
        """How its task has ended; None if it has not."""
        if await self._waits(delegation):
            return None
        view = (await self._tasks.past(delegation.task_id)).view()
        return task_outcome(view) if view is not None else "cancelled"

    # Silence

    async def run(self) -> None:
        # What an earlier run had in its hands when it ended.
        self._unsettled |= {
            each.task_id
            for each in await self._ledger.delegations()
            if each.role is DelegationRole.REQUESTER and each.ended and not each.settled
        }
        for delegation in await self._ledger.delegations_live(DelegationRole.REQUESTER):
            self._placement.hold(delegation)
        while not self._stopped.is_set():
            try:
                await self.sweep()
            except Refusal as refusal:
                log.warning("peer.sweep_refused", extra={"code": refusal.code, "reason": refusal.message})
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), SWEEP_S)

    async def stop(self) -> None:
        self._stopped.set()

    async def sweep(self) -> int:
        """Find what is silent, over or not wanted any more. How many moved by that."""
        await self._settle()
        moved, now_ms = 0, self._now_ms()
        for delegation in tuple(await self._ledger.delegations_live(DelegationRole.REQUESTER)):
            try:
                moved += await self._look_at(delegation, now_ms)
            except Conflict as conflict:
                # It has moved meanwhile, which is what this is about.
                log.debug("peer.moved_meanwhile", extra={"offer_id": delegation.offer_id, "code": conflict.code})
        return moved

    async def _settle(self) -> None:
        for task_id in tuple(self._unsettled):
            delegation = await self.delegation(task_id)
            if delegation is not None and await self._waits(delegation):
                continue
            self._unsettled.discard(task_id)
            if delegation is not None and delegation.ended and not delegation.settled:
                outcome = await self._task_outcome(delegation)
                moved = outcome is not None and settled_as(delegation.state, outcome) is not delegation.state
                changes = DelegationChanges(result=None, settled=True)
                await self._tell(delegation, *((f"task_{outcome}",) if moved else ()), changes=changes)

    async def _look_at(self, delegation: Delegation, now_ms: int) -> bool:
        settings, state = self._settings, delegation.state
        if state is not CANCELLING and not await self._waits(delegation):
            await self.cancel(delegation.task_id, "nobody waits for it any more")
            return True
        if self._is_out_of_step(delegation):
            await self._resume(delegation)
            return True
        if delegation.anyone and state in (OFFERED, LOST) and not delegation.accepted_at_ms:
            away = self._placement.is_unreachable(delegation.peer)
            if away and self._placement.elsewhere(delegation):
                changes = DelegationChanges(code=OFFLINE, reason="the peer cannot be reached, and another one can")
                message = cancel_message(delegation, "offered to another peer")
                await self._tell(delegation, "reject", changes=changes, message=message)
                return True
        if self._ledger.clock.is_paused():
            # The wall clock was set just now: nobody is given up by it.
            return False
        age_ms = self._ledger.clock.age_ms
        agreed_ms = delegation.timeout_ms + GRACE_MS
        if state in (ACCEPTED, RUNNING) and age_ms(delegation.accepted_at_ms or now_ms) >= agreed_ms:
            changes = DelegationChanges(code="timeout", reason="the provider did not answer in the agreed time")
            await self._tell(delegation, "timeout", changes=changes, message=cancel_message(delegation, "timed out"))
            return True
        stamps = (self._since_ms, delegation.heard_at_ms, delegation.moved_at_ms if state is OFFERED else 0)
        silent_ms = min(age_ms(stamp) for stamp in stamps)
        silence_ms = max(settings.silence_ms, SILENT_INTERVALS * delegation.status_interval_ms)
        if state in (OFFERED, ACCEPTED, RUNNING) and silent_ms >= silence_ms:
            reason = f"nothing was heard for {silent_ms // 1000} s"
            await self._tell(delegation, "silence", changes=DelegationChanges(reason=reason))
            log.warning("peer.lost", extra={"peer": delegation.peer, "offer_id": delegation.offer_id})
            return True
        # Nobody waits for one that was told to stop: it is over, and its provider is told all the same.
        forced = state is CANCELLING or (settings.force_lost and state is LOST)
        if forced and min(silent_ms, age_ms(delegation.moved_at_ms)) >= settings.lost_after_ms:
            await self._give_up(delegation, "the provider was not heard of any more")
            return True
        return False

    # Restored ledgers

    def _is_out_of_step(self, delegation: Delegation) -> bool:
        peer = self._ledger.peer(delegation.peer)
        return peer is not None and delegation.offered_in != (self._context.epoch, peer.epoch)

    async def _resume(self, delegation: Delegation) -> None:
        """Our ledger was restored, or the provider's: say again what one of the two may have forgotten.

        A provider that has the work answers as it did, also if the work is done. One that has forgotten it begins it.
        """
        peer = self._ledger.peer(delegation.peer)
        assert peer is not None
        changes = DelegationChanges(offered_in=(self._context.epoch, peer.epoch))
        cancel = cancel_message(delegation, "it is still cancelled")
        again = cancel if delegation.state is CANCELLING else delegation.offer
        log.warning("peer.resumed", extra={"peer": peer.id, "offer_id": delegation.offer_id})
        await self._tell(delegation, changes=changes, message=again)

    # Telling

    async def _known(self, task_id: TaskId) -> Delegation:
        delegation = await self.delegation(task_id)
        if delegation is None:
            raise unknown_delegation(task_id)
        return delegation

    async def _tell(
        self,
        delegation: Delegation,
        *happenings: str,
        changes: DelegationChanges | None = None,
        message: DelegationOffer | DelegationCancel | None = None,
        by: AgentId | None = None,
    ) -> DelegationMoved:
        changes = changes or DelegationChanges()
        if isinstance(message, DelegationCancel):
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
                unsent_since_ms=self._since_ms if self._in_flight(delegation.key) == 0 else None,
            )
        )
        self._note(moved.delegation)
        return moved
