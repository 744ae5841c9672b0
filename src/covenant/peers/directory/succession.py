"""Succession of identities: following a peer's chain of identities to its present one, and showing ours.

A peer has another identity as soon as it shows changes that lead there from the one that we know, each signed by
both keys. An old key's signature is believed inside an envelope under the present key; an envelope under an old key
is not. A chain that leads from a replaced key to another successor than the known one is refused, and the audit notes
it.

Anybody may show us a chain, since its signatures prove it. A chain without a known peer is refused before any signature
is checked.
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from covenant.ledger.machine.peer_commands import ChangePeer, LearnPeer, SucceedPeer
from covenant.model.errors import Conflict, Invalid
from covenant.model.peers.delegation import Peer
from covenant.model.peers.instance import IdentityChange, InstanceId, KeyRevocation
from covenant.model.rate_limits import TokenBuckets
from covenant.peers.peer_settings import PeerContext, PeerService
from covenant.peers.transport.peer_client import required_address
from covenant.seal.envelope import Code, EnvelopeRefused, peer_refusal
from covenant.seal.identity import bundle_holds, chain_holds, former_keys, revocation_holds
from covenant.wire.peers import IDENTITY_PATH, Introduction, Received, decode_introduction

KEY_DEAD: Final = "key_dead"
FORKS_PER_MIN: Final = 6
ANNOUNCE_S: Final = 15.0

log = logging.getLogger(__name__)


class Succession(PeerService):
    def __init__(self, context: PeerContext) -> None:
        super().__init__(context)
        self._forks = TokenBuckets()

    async def announce(self, peer: Peer) -> None:
        """Shows a peer our present identity.

        A peer of an earlier release does not accept this, and learns it when it calls us.
        """
        body = msgspec.json.encode(self._keyring.introduction(self._now_ms()))
        await self._connections.to(required_address(self._address(peer), peer)).post(
            IDENTITY_PATH, body, timeout_s=ANNOUNCE_S
        )

    def find_former(self, peer_id: str) -> Peer | None:
        """The peer that had this id, and has another one now."""
        return next((peer for peer in self._ledger.peers() if peer_id in peer.ids[1:]), None)

    async def receive(self, body: bytes) -> Received:
        """Handles an introduction that an instance sends by itself. Raises a `Refusal` that anybody may see."""
        try:
            shown = decode_introduction(body)
        except Invalid:
            raise peer_refusal(EnvelopeRefused(Code.MALFORMED, "not an introduction")) from None
        before = self._ledger.peer(InstanceId(shown.keys.id))
        followed = before or await self.follow(shown)
        dead = await self._record_revocations(shown.revocations)
        if followed is None and not dead:
            raise peer_refusal(EnvelopeRefused(Code.UNKNOWN_SENDER, "no identity of this chain is a peer"))
        await self._ledger.durable()
        return Received(status="accepted", duplicate=before is not None)

    async def follow(self, shown: Introduction) -> Peer | None:
        """The peer under its new identity; None if the chain has no known peer, or does not hold.

        Raises Conflict if the new identity is known as another peer, or was given up before.
        """
        keys = shown.keys
        changes = shown.changes or ((keys.change,) if keys.change is not None else ())
        known = next((at for at, each in enumerate(changes) if self._ledger.peer(InstanceId(each.old_id))), None)
        if known is None:
            await self._note_fork(changes)
            return None
        if keys.id in self._keyring.ids or self.find_former(keys.id) is not None:
            raise Conflict("identity_superseded", f"the identity {keys.id} was given up before")
        if not chain_holds(changes, keys.id) or not bundle_holds(keys, InstanceId(keys.id), self._now_ms()):
            return None
        old = InstanceId(changes[known].old_id)
        former = former_keys(changes[known:], shown.revocations)
        log.warning("peer.identity_followed", extra={"peer": old, "now": keys.id, "changes": len(former)})
        return await self._ledger.commit(
            SucceedPeer(by=self._us, old=old, keys_shown=keys, vouched=True, former=former)
        )

    async def _note_fork(self, changes: tuple[IdentityChange, ...]) -> None:
        """A replaced key names another successor than the one that we followed: it may be stolen.

        Audits that, and raises.
        """
        for change in changes:
            peer = self.find_former(change.old_id)
            if peer is None or change.new_id in peer.ids:
                continue
            if self._forks.take(peer.id, self._monotonic_ms(), FORKS_PER_MIN) is None:
                await self._audit("identity_forked", peer=peer.id, before=change.old_id, shown=change.new_id)
            raise Conflict("identity_superseded", f"the identity {change.old_id} was given up before")

    async def _record_revocations(self, revocations: tuple[KeyRevocation, ...]) -> bool:
        """Records revoked keys of peers; returns whether there was one.

        A peer whose present key is revoked is denied.
        """
        found = False
        for dead in revocations:
            peer = self._ledger.peer(InstanceId(dead.id)) or self.find_former(dead.id)
            if peer is None or not revocation_holds(dead):
                continue
            found = True
            if peer.id == dead.id:
                log.warning("peer.key_dead", extra={"peer": peer.id})
                # A denied peer is not asked again who it is, so the conflict stays until the operator acts.
                await self._ledger.commit(ChangePeer(id=peer.id, by=self._us, denied=True))
                await self._ledger.commit(LearnPeer(id=peer.id, by=self._us, conflict=KEY_DEAD))
                continue
            former = tuple(
                msgspec.structs.replace(each, dead=True) if each.id == dead.id else each for each in peer.former
            )
            if former != peer.former:
                await self._ledger.commit(LearnPeer(id=peer.id, by=self._us, former=former))
        return found
