"""What happened between this instance and its peers. Part of the closed union in `events`."""

from __future__ import annotations

from covenant.ledger.machine.event import Event
from covenant.model.acquaintance import Peer
from covenant.model.correspondence import Delegation, DelegationKey, Envelope, Parcel, ParcelMove
from covenant.model.ids import AgentId
from covenant.model.peer import InstanceId


class PeerEvent(Event, frozen=True, gc=False):
    """Of a peer. No event of a task: what follows for one is an event of its own, in the same record."""

    @property
    def peer_id(self) -> InstanceId | None:
        """Whose; None if it is of no one's."""
        raise NotImplementedError


class PeerPut(PeerEvent, frozen=True, gc=False, tag="peer_put"):
    """The peer as it is from here on."""

    peer: Peer

    @property
    def peer_id(self) -> InstanceId:
        return self.peer.id


class PeerRemoved(PeerEvent, frozen=True, gc=False, tag="peer_removed"):
    """With what waited for it."""

    id: InstanceId

    @property
    def peer_id(self) -> InstanceId:
        return self.id


class PeerSucceeded(PeerEvent, frozen=True, gc=False, tag="peer_succeeded"):
    """`old` goes by another id from here on, and so does all that is kept under it."""

    old: InstanceId
    peer: Peer

    @property
    def peer_id(self) -> InstanceId:
        return self.peer.id


class EnvelopeTaken(PeerEvent, frozen=True, gc=False, tag="envelope_taken"):
    envelope: Envelope
    offer_id: str | None = None

    @property
    def peer_id(self) -> InstanceId:
        return self.envelope.sender


class DelegationPut(PeerEvent, frozen=True, gc=False, tag="delegation_put"):
    """The delegation as it is from here on. Its offer is said once: until it ends, it stays what it was."""

    delegation: Delegation

    @property
    def peer_id(self) -> InstanceId:
        return self.delegation.peer


class DelegationDropped(PeerEvent, frozen=True, gc=False, tag="delegation_dropped"):
    """Ended, and the oldest of too many. Its task is in the archive."""

    key: DelegationKey

    @property
    def peer_id(self) -> InstanceId:
        return self.key.peer


class ParcelPut(PeerEvent, frozen=True, gc=False, tag="parcel_put"):
    """Put into the outbox; or in the place of the one with its number."""

    parcel: Parcel

    @property
    def peer_id(self) -> InstanceId:
        return self.parcel.peer


class ParcelMoved(PeerEvent, frozen=True, gc=False, tag="parcel_moved"):
    move: ParcelMove

    @property
    def peer_id(self) -> InstanceId:
        return self.move.delegation.peer


class ParcelsDropped(PeerEvent, frozen=True, gc=False, tag="parcels_dropped"):
    """The peer has all that was said of this delegation through this number."""

    key: DelegationKey
    through: int

    @property
    def peer_id(self) -> InstanceId:
        return self.key.peer


class TokenRevoked(PeerEvent, frozen=True, gc=False, tag="token_revoked"):
    token_id: str
    by: AgentId
    at_ms: int
    until_ms: int

    @property
    def peer_id(self) -> None:
        return None
