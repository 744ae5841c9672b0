"""Which peer is offered a task, and when: by liveness, trust, room and price.

A peer has as many free slots as it reported, less our delegations to it. A peer that rejects an offer as busy has no
free slot: the next task is offered when one of our delegations there has ended, or at the time that the peer named. A
task waits here for a slot. It is in the ledger meanwhile, so a stop of the daemon loses nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Final

from covenant.ledger.machine.decisions.peers import unknown_peer
from covenant.model.errors import Conflict, NotFound
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import Delegation, Peer, PeerCapabilities
from covenant.model.peers.instance import InstanceId, Trust
from covenant.model.task import Target, Task
from covenant.model.tenants import DEFAULT
from covenant.outbound.concurrency import wait_at_most
from covenant.peers.directory.peer_directory import PeerDirectory
from covenant.peers.peer_settings import PeerContext, PeerService

LOOK_AGAIN_S: Final = 1.0
"""How often a waiting task looks again, since a peer can become reachable without a message to us."""
PAUSE_MS: Final = 2_000
"""How long a peer is offered nothing after it could not be asked, or was busy and gave no time."""
PAUSE_MS_MAX: Final = 60_000
INTRODUCTION_MS: Final = 15_000
"""How long two instances that know each other have to verify each other, before an offer counts as refused."""
PASSING: Final = frozenset({"busy", "rate_limited", "offline"})
"""Codes of rejects after which the task is offered again, to the same or another peer."""
OFFLINE: Final = "offline"
REFUSING: Final = frozenset({"no_profile", "denied", "version", "budget_too_low", "depth_exceeded"})
"""Codes of rejects that are about the peer: another one may do the task."""
REFUSED_MAX: Final = 1_000


class _PeerSlots:
    """Our delegations to one peer, and how many it accepts."""

    def __init__(self) -> None:
        self.held: set[TaskId] = set()
        self.slots_max = 1
        self.reported_at_ms = 0
        """When the peer last reported its free slots."""
        self.closed_until_ms = 0
        self.grows_at_ms = 0
        self.refused: set[TaskId] = set()
        """Tasks that the peer will not do, and that another one may."""


class OfferPlacement(PeerService):
    """Must be used on one event loop. `wake` it when a peer has changed."""

    def __init__(self, context: PeerContext, directory: PeerDirectory) -> None:
        super().__init__(context)
        self._directory = directory
        self._slots: dict[InstanceId, _PeerSlots] = {}
        self._waiting: set[asyncio.Event] = set()

    # Candidates

    def named(self, who: str, tenant: str) -> Peer:
        """Finds a peer of this tenant. To a tenant, the peers of other tenants do not exist."""
        try:
            peer = self._directory.find(who)
        except NotFound:
            raise unknown_peer(who) from None
        except Conflict:
            if tenant == DEFAULT:
                raise
            raise unknown_peer(who) from None
        if peer.tenant != tenant:
            raise unknown_peer(who)
        return peer

    def provider(self, profile: str, tenant: str = DEFAULT) -> Peer | None:
        """The tenant's peer to ask first, of those that offer this profile; None if no peer offers it."""
        return next(iter(self._candidates(profile, tenant)), None)

    def has_candidates(self, task: Task, profile: str) -> bool:
        """Whether some peer offers this and has not refused the task."""
        return bool(self._candidates(profile, task.tenant or DEFAULT, task.id))

    def _candidates(self, profile: str, tenant: str, task_id: TaskId | None = None) -> Sequence[Peer]:
        found = [peer for peer in self._ledger.peers() if peer.tenant == tenant and _offers(peer, profile)]
        found = [peer for peer in found if task_id not in self._slots_of(peer).refused]
        return sorted(found, key=lambda peer: self._preference(peer, profile), reverse=True)

    def _preference(self, peer: Peer, profile: str) -> tuple[bool, bool, bool, float, int]:
        """Higher is better. A peer without a price comes after those that have one."""
        room = self._room(peer)
        trusted = peer.trust.covers(Trust.TRUSTED)
        return not self.is_unreachable(peer.id), trusted, room > 0, -_price(peer, profile), room

    def is_unreachable(self, peer: InstanceId) -> bool:
        return any(check(peer) for check in self._context.unreachable)

    def is_introduced(self) -> bool:
        """Whether every peer of the settings has said what it offers, or has had time to.

        Until then a peer may still turn out to offer a profile. A peer of the settings that has never answered is
        waited for without a limit here, since a task that waits for it has its own timeout.
        """
        if any(pending() for pending in self._context.introducing):
            return False
        since_ms = self._now_ms() - INTRODUCTION_MS
        return not any(_is_new(peer) and peer.added_at_ms > since_ms for peer in self._ledger.peers())

    def elsewhere(self, delegation: Delegation) -> bool:
        """Whether another peer than the one that was asked can be reached and has room for this delegation."""
        asked = self._ledger.peer(delegation.peer)
        tenant = asked.tenant if asked is not None else DEFAULT
        others = (peer for peer in self._candidates(delegation.profile, tenant) if peer.id != delegation.peer)
        return any(self._is_ready(peer) and not self.is_unreachable(peer.id) for peer in others)

    # Places

    async def place(self, task: Task, target: Target) -> Peer:
        """Waits for a peer with room, and takes a place there. `leave` it when the delegation has ended."""
        woken = asyncio.Event()
        self._waiting.add(woken)
        try:
            while True:
                woken.clear()
                if (peer := self._ready(target, task)) is not None:
                    self._slots_of(peer).held.add(task.id)
                    return peer
                await wait_at_most(woken, LOOK_AGAIN_S)
        finally:
            self._waiting.discard(woken)

    def _ready(self, target: Target, task: Task) -> Peer | None:
        tenant = task.tenant or DEFAULT
        if target.peer:
            peer = self.named(target.peer, tenant)
            return peer if self._is_ready(peer) else None
        candidates = self._candidates(target.profile or "", tenant, task.id)
        if not candidates and self.is_introduced():
            raise NotFound("no_profile", f"no peer offers {target.profile!r}; see `covenant peers list`")
        return next(filter(self._is_ready, candidates), None)

    def _is_ready(self, peer: Peer) -> bool:
        return self._room(peer) > 0 and self._monotonic_ms() >= self._slots_of(peer).closed_until_ms

    def _room(self, peer: Peer) -> int:
        slots = self._slots_of(peer)
        return slots.slots_max - len(slots.held)

    def _slots_of(self, peer: Peer) -> _PeerSlots:
        slots = self._slots.setdefault(peer.id, _PeerSlots())
        reported: PeerCapabilities | None = peer.capabilities
        if reported is not None and reported.issued_at_ms > slots.reported_at_ms:
            slots.reported_at_ms = reported.issued_at_ms
            # The free slots that a peer reports do not include those that our delegations hold.
            slots.slots_max = max(1, reported.free_slots + len(slots.held))
        return slots

    # Answers of a peer

    def hold(self, delegation: Delegation) -> None:
        """Takes the place of a delegation that an earlier run offered."""
        self._slots.setdefault(delegation.peer, _PeerSlots()).held.add(delegation.task_id)

    def leave(self, peer: InstanceId, task_id: TaskId) -> None:
        slots = self._slots.get(peer)
        if slots is not None:
            slots.held.discard(task_id)
            self.wake()

    def refuse(self, peer: InstanceId, task_id: TaskId) -> None:
        slots = self._slots.setdefault(peer, _PeerSlots())
        if len(slots.refused) >= REFUSED_MAX:
            slots.refused.clear()
        slots.refused.add(task_id)
        self.leave(peer, task_id)

    def accepted(self, delegation: Delegation) -> None:
        """The peer had room for this delegation, so it may have room for one more."""
        slots, now_ms = self._slots.get(delegation.peer), self._monotonic_ms()
        if slots is not None and len(slots.held) >= slots.slots_max and now_ms >= slots.grows_at_ms:
            slots.slots_max = len(slots.held) + 1
            self.wake()

    def pause(self, peer: InstanceId, task_id: TaskId, retry_after_ms: int | None, *, full: bool) -> None:
        """The peer did not accept this task now. `full`: because all its slots are taken."""
        slots = self._slots.setdefault(peer, _PeerSlots())
        slots.held.discard(task_id)
        pause_ms = min(retry_after_ms if retry_after_ms is not None else PAUSE_MS, PAUSE_MS_MAX)
        slots.grows_at_ms = self._monotonic_ms() + pause_ms
        if full and slots.held:
            slots.slots_max = len(slots.held)
        else:
            slots.slots_max = max(1, slots.slots_max)
            slots.closed_until_ms = slots.grows_at_ms
        self.wake()

    def wake(self) -> None:
        """Called when a peer has changed: tasks that wait for a place try again."""
        for each in self._waiting:
            each.set()


def may_pass_on(delegation: Delegation) -> bool:
    """Whether the offer was rejected for a reason of this peer only, so that another peer may do the task."""
    is_asked_anew = delegation.code == "denied" and not delegation.renewed  # for another token
    return delegation.anyone and delegation.code in REFUSING and not is_asked_anew


def _is_new(peer: Peer) -> bool:
    never_asked = peer.trust is Trust.PEER and peer.verified_at_ms is None
    return peer.source == "setting" and not peer.denied and (never_asked or peer.capabilities is None)


def _offers(peer: Peer, profile: str) -> bool:
    known = peer.capabilities
    return known is not None and not peer.denied and peer.trust.covers(Trust.VERIFIED) and known.offers(profile)


def _price(peer: Peer, profile: str) -> float:
    offered = peer.capabilities.profiles if peer.capabilities is not None else ()
    prices = (each.price for each in offered if each.name == profile and isinstance(each.price, int))
    return next(prices, math.inf)
