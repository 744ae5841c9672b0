"""Which peer is offered a task, and when: by liveness, trust, room and price.

A peer has as much room as it said, less what it does for us. A peer that rejects an offer as busy has no more room than
what it does for us now: the next task is offered when one of these has ended, or when the peer said to come back. A
task waits here for room. It is in the ledger meanwhile, so a daemon that stops loses nothing by it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from covenant.ledger.machine.decisions.peers import unknown_peer
from covenant.model.errors import Conflict, NotFound
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import Delegation, Peer, PeerCapabilities
from covenant.model.peers.instance import InstanceId, Trust
from covenant.model.task import Target, Task
from covenant.model.tenants import DEFAULT
from covenant.peers.directory.peer_directory import PeerDirectory
from covenant.peers.peer_settings import PeerContext, PeerService

LOOK_AGAIN_S: Final = 1.0
"""A peer can become reachable, or be introduced, without a word to us."""
PAUSE_MS: Final = 2_000
"""How long a peer that could not be asked, or said no time, is offered nothing."""
PAUSE_MS_MAX: Final = 60_000
INTRODUCTION_MS: Final = 15_000
"""How long two instances that know each other have to verify each other, before an offer counts as refused."""
PASSING: Final = frozenset({"busy", "rate_limited", "offline"})
"""Codes of rejects after which the task is offered again, there or elsewhere."""
OFFLINE: Final = "offline"


class _Lane:
    """What one peer does for us, and how much that may be."""

    def __init__(self) -> None:
        self.held: set[TaskId] = set()
        self.most = 1
        self.said_at_ms = 0
        """When the peer said how much room it has."""
        self.closed_until_ms = 0
        self.grows_at_ms = 0


class OfferPlacement(PeerService):
    """Lives on one loop."""

    def __init__(self, context: PeerContext, directory: PeerDirectory) -> None:
        super().__init__(context)
        self._directory = directory
        self._lanes: dict[InstanceId, _Lane] = {}
        self._waiting: set[asyncio.Event] = set()
        context.ledger.on_peer(lambda _: self._wake())

    # Who could do it

    def named(self, who: str, tenant: str) -> Peer:
        """To a tenant, a peer of another one does not exist."""
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
        """Of the tenant's peers that said they offer this, the one to ask first."""
        return next(iter(self._candidates(profile, tenant)), None)

    def _candidates(self, profile: str, tenant: str) -> Sequence[Peer]:
        found = [peer for peer in self._ledger.peers() if peer.tenant == tenant and _offers(peer, profile)]
        return sorted(found, key=lambda peer: self._preference(peer, profile), reverse=True)

    def _preference(self, peer: Peer, profile: str) -> tuple[bool, bool, bool, float, int]:
        """One that says no price is taken after those that do."""
        room = self._room(peer)
        trusted = peer.trust.covers(Trust.TRUSTED)
        return not self.is_unreachable(peer.id), trusted, room > 0, -_price(peer, profile), room

    def is_unreachable(self, peer: InstanceId) -> bool:
        return any(told(peer) for told in self._context.unreachable)

    def is_introduced(self) -> bool:
        """Every peer of the settings has said what it offers, or had time to. Until then a profile may still come.

        One whose id nobody knows yet is waited for: a task that no peer can do now has its own time to wait.
        """
        if any(pending() for pending in self._context.introducing):
            return False
        since_ms = self._now_ms() - INTRODUCTION_MS
        return not any(_is_new(peer) and peer.added_at_ms > since_ms for peer in self._ledger.peers())

    def elsewhere(self, delegation: Delegation) -> bool:
        """Whether a peer that can be reached, other than the one that was asked, has room for this."""
        asked = self._ledger.peer(delegation.peer)
        tenant = asked.tenant if asked is not None else DEFAULT
        others = (peer for peer in self._candidates(delegation.profile, tenant) if peer.id != delegation.peer)
        return any(self._is_ready(peer) and not self.is_unreachable(peer.id) for peer in others)

    # Who does it

    async def place(self, task: Task, target: Target) -> Peer:
        """Wait for a peer that has room, and take a place there. `leave` it when the delegation has ended."""
        woken = asyncio.Event()
        self._waiting.add(woken)
        try:
            while True:
                woken.clear()
                if (peer := self._ready(target, task.tenant or DEFAULT)) is not None:
                    self._lane(peer).held.add(task.id)
                    return peer
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN_S):
                        await woken.wait()
        finally:
            self._waiting.discard(woken)

    def _ready(self, target: Target, tenant: str) -> Peer | None:
        if target.peer:
            peer = self.named(target.peer, tenant)
            return peer if self._is_ready(peer) else None
        candidates = self._candidates(target.profile or "", tenant)
        if not candidates and self.is_introduced():
            raise NotFound("no_profile", f"no peer offers {target.profile!r}; see `covenant peers list`")
        return next(filter(self._is_ready, candidates), None)

    def _is_ready(self, peer: Peer) -> bool:
        return self._room(peer) > 0 and self._monotonic_ms() >= self._lane(peer).closed_until_ms

    def _room(self, peer: Peer) -> int:
        lane = self._lane(peer)
        return lane.most - len(lane.held)

    def _lane(self, peer: Peer) -> _Lane:
        lane = self._lanes.setdefault(peer.id, _Lane())
        said: PeerCapabilities | None = peer.capabilities
        if said is not None and said.issued_at_ms > lane.said_at_ms:
            lane.said_at_ms = said.issued_at_ms
            # What it does for us already is not in what it has left.
            lane.most = max(1, said.free_slots + len(lane.held))
        return lane

    # What came of it

    def hold(self, delegation: Delegation) -> None:
        """It was offered by an earlier run."""
        self._lanes.setdefault(delegation.peer, _Lane()).held.add(delegation.task_id)

    def leave(self, peer: InstanceId, task_id: TaskId) -> None:
        lane = self._lanes.get(peer)
        if lane is not None:
            lane.held.discard(task_id)
            self._wake()

    def accepted(self, delegation: Delegation) -> None:
        """It had room for this one, and perhaps has for another."""
        lane, now_ms = self._lanes.get(delegation.peer), self._monotonic_ms()
        if lane is not None and len(lane.held) >= lane.most and now_ms >= lane.grows_at_ms:
            lane.most = len(lane.held) + 1
            self._wake()

    def pause(self, peer: InstanceId, task_id: TaskId, retry_after_ms: int | None, *, full: bool) -> None:
        """It did not take this one now. `full`: because of what it does for us and others."""
        lane = self._lanes.setdefault(peer, _Lane())
        lane.held.discard(task_id)
        pause_ms = min(retry_after_ms if retry_after_ms is not None else PAUSE_MS, PAUSE_MS_MAX)
        lane.grows_at_ms = self._monotonic_ms() + pause_ms
        if full and lane.held:
            lane.most = len(lane.held)
        else:
            lane.most = max(1, lane.most)
            lane.closed_until_ms = lane.grows_at_ms
        self._wake()

    def _wake(self) -> None:
        for each in self._waiting:
            each.set()


def _is_new(peer: Peer) -> bool:
    never_asked = peer.trust is Trust.PEER and peer.verified_at_ms is None
    return peer.source == "setting" and not peer.denied and (never_asked or peer.capabilities is None)


def _offers(peer: Peer, profile: str) -> bool:
    known = peer.capabilities
    return known is not None and not peer.denied and peer.trust.covers(Trust.VERIFIED) and has_profile(known, profile)


def _price(peer: Peer, profile: str) -> float:
    offered = peer.capabilities.profiles if peer.capabilities is not None else ()
    said = (each.price for each in offered if each.name == profile and isinstance(each.price, int))
    return next(said, math.inf)


def has_profile(capabilities: PeerCapabilities, profile: str) -> bool:
    return any(each.name == profile for each in capabilities.profiles)
