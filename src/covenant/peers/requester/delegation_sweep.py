"""The sweep over delegations to peers: whose provider is silent, whose task has ended, or whose ledger was restored.

A provider that is silent for too long is lost. An operator sends the offer again, or gives the delegation up. If the
provider sends a message again, the delegation continues by itself.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Final

import msgspec

from covenant.exchange.delegation_outcome import settled_as
from covenant.ledger.machine.peer_commands import DelegationChanges
from covenant.model.errors import Conflict, Refusal
from covenant.model.peers.delegation import (
    ACCEPTED,
    CANCELLING,
    LOST,
    OFFERED,
    RUNNING,
    Delegation,
    DelegationRole,
)
from covenant.peers.peer_settings import PeerContext, PeerService
from covenant.peers.requester.offers import cancel_message
from covenant.peers.requester.placement import OFFLINE
from covenant.peers.requester.requester_service import Requester

GRACE_MS: Final = 10_000
"""How long after the agreed time a provider may still send its result."""
SILENT_INTERVALS: Final = 3
SWEEP_S: Final = 1.0

log = logging.getLogger(__name__)


class DelegationSweep(PeerService):
    """`run` it; `stop` it before the ledger closes."""

    def __init__(self, context: PeerContext, requester: Requester) -> None:
        super().__init__(context)
        self._requester = requester
        self._placement = requester.placement
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        if self._context.shared is None:
            await self.resume()
            for delegation in await self._ledger.delegations_live(DelegationRole.REQUESTER):
                self._placement.hold(delegation)
        while not self._stopped.is_set():
            try:
                await self.sweep()
            except Refusal as refusal:
                log.warning("peer.sweep_refused", extra={"code": refusal.code, "reason": refusal.message})
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), SWEEP_S)

    async def resume(self) -> None:
        """Finds the delegations that have ended and are not settled yet: another run, or another daemon, began them."""
        self._requester.unsettled |= {
            each.task_id
            for each in await self._ledger.delegations()
            if each.role is DelegationRole.REQUESTER and each.ended and not each.settled
        }

    async def stop(self) -> None:
        self._stopped.set()

    async def sweep(self) -> int:
        """Looks at every live delegation once. Returns how many of them moved."""
        await self._settle()
        moved, now_ms = 0, self._now_ms()
        for delegation in tuple(await self._ledger.delegations_live(DelegationRole.REQUESTER)):
            if not self._context.serves(delegation.peer):
                continue
            try:
                moved += await self._check_delegation(delegation, now_ms)
            except Conflict as conflict:
                # The delegation has moved meanwhile, so there is nothing to do about it.
                log.debug("peer.sweep_conflict", extra={"offer_id": delegation.offer_id, "code": conflict.code})
        return moved

    async def _settle(self) -> None:
        for task_id in tuple(self._requester.unsettled):
            delegation = await self._requester.delegation(task_id)
            if delegation is not None and await self._requester.is_awaited(delegation):
                continue
            self._requester.unsettled.discard(task_id)
            if delegation is not None and delegation.ended and not delegation.settled:
                outcome = await self._requester.task_outcome(delegation)
                moved = outcome is not None and settled_as(delegation.state, outcome) is not delegation.state
                changes = DelegationChanges(result=None, settled=True)
                await self._requester.commit(delegation, *((f"task_{outcome}",) if moved else ()), changes=changes)

    async def _check_delegation(self, delegation: Delegation, now_ms: int) -> bool:
        settings, state = self._settings, delegation.state
        if state is not CANCELLING and not await self._requester.is_awaited(delegation):
            await self._requester.cancel(delegation.task_id, "nobody waits for it any more")
            return True
        if self._is_out_of_step(delegation):
            await self._repeat_after_restore(delegation)
            return True
        if delegation.anyone and state in (OFFERED, LOST) and not delegation.accepted_at_ms:
            away = self._placement.is_unreachable(delegation.peer)
            if away and self._placement.elsewhere(delegation):
                changes = DelegationChanges(code=OFFLINE, reason="the peer cannot be reached, and another one can")
                message = cancel_message(delegation, "offered to another peer")
                await self._requester.commit(delegation, "reject", changes=changes, message=message)
                return True
        if self._ledger.clock.is_paused():
            # The wall clock was set just now: no delegation is given up by it.
            return False
        age_ms = self._ledger.clock.age_ms
        agreed_ms = delegation.timeout_ms + GRACE_MS
        if state in (ACCEPTED, RUNNING) and age_ms(delegation.accepted_at_ms or now_ms) >= agreed_ms:
            changes = DelegationChanges(code="timeout", reason="the provider did not answer in the agreed time")
            await self._requester.commit(
                delegation, "timeout", changes=changes, message=cancel_message(delegation, "timed out")
            )
            return True
        stamps = (self._requester.since_ms, delegation.heard_at_ms, delegation.moved_at_ms if state is OFFERED else 0)
        silent_ms = min(age_ms(stamp) for stamp in stamps)
        silence_ms = max(settings.silence_ms, SILENT_INTERVALS * delegation.status_interval_ms)
        if state in (OFFERED, ACCEPTED, RUNNING) and silent_ms >= silence_ms:
            reason = f"no message came for {silent_ms // 1000} s"
            await self._requester.commit(delegation, "silence", changes=DelegationChanges(reason=reason))
            log.warning("peer.lost", extra={"peer": delegation.peer, "offer_id": delegation.offer_id})
            return True
        # Nobody waits for a delegation that is being canceled: it ends, and its provider still gets the cancel.
        forced = state is CANCELLING or (settings.force_lost and state is LOST)
        if forced and min(silent_ms, age_ms(delegation.moved_at_ms)) >= settings.lost_after_ms:
            await self._requester.give_up(delegation, "the provider sent no more messages")
            return True
        return False

    # Restored ledgers

    def _is_out_of_step(self, delegation: Delegation) -> bool:
        peer = self._ledger.peer(delegation.peer)
        return peer is not None and delegation.offered_in != (self._context.ledger_epoch, peer.epoch)

    async def _repeat_after_restore(self, delegation: Delegation) -> None:
        """Our ledger was restored, or the provider's: repeats the offer or the cancel that one of them may have lost.

        A provider that has the work answers as before, even if it is done. A provider that has lost it begins again.
        """
        peer = self._ledger.peer(delegation.peer)
        assert peer is not None
        changes = DelegationChanges(offered_in=(self._context.ledger_epoch, peer.epoch))
        if delegation.offered_in[1] != peer.epoch:
            # A provider that was restored may have forgotten an answer, or the answer may still be on its way.
            changes = msgspec.structs.replace(changes, doubted=delegation.answered)
        cancel = cancel_message(delegation, "it is still cancelled")
        again = cancel if delegation.state is CANCELLING else delegation.offer
        log.warning("peer.resumed", extra={"peer": peer.id, "offer_id": delegation.offer_id})
        await self._requester.commit(delegation, changes=changes, message=again)
