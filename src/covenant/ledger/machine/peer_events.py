"""What happened between this instance and its peers. Part of the closed union in `events`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from covenant.ledger.machine.event import Event
from covenant.model.peers.peer_record import Peer
from covenant.model.peers.delegation import Delegation, DelegationKey, ReceivedEnvelope, OutboxMessage, OutboxMove
from covenant.model.ids import AgentId
from covenant.model.peers.instance import InstanceId


class PeerEvent(Event, frozen=True, gc=False):
    """Of a peer. No event of a task: what follows for one is an event of its own, in the same record."""


class PeerPut(PeerEvent, frozen=True, gc=False, tag="peer_put"):
    """The peer as it is from here on."""

    peer: Peer


class PeerRemoved(PeerEvent, frozen=True, gc=False, tag="peer_removed"):
    """With what waited for it."""

    id: InstanceId


class PeerSucceeded(PeerEvent, frozen=True, gc=False, tag="peer_succeeded"):
    """`old` goes by another id from here on, and so does all that is kept under it."""

    old: InstanceId
    peer: Peer


class EnvelopeTaken(PeerEvent, frozen=True, gc=False, tag="envelope_taken"):
    envelope: ReceivedEnvelope
    offer_id: str | None = None


class DelegationPut(PeerEvent, frozen=True, gc=False, tag="delegation_put"):
    """The delegation as it is from here on. Its offer is said once: until it ends, it stays what it was."""

    delegation: Delegation


class DelegationDropped(PeerEvent, frozen=True, gc=False, tag="delegation_dropped"):
    """Ended, and the oldest of too many. Its task is in the archive."""

    key: DelegationKey


class ParcelPut(PeerEvent, frozen=True, gc=False, tag="parcel_put"):
    """Put into the outbox; or in the place of the one with its number."""

    parcel: OutboxMessage


class ParcelMoved(PeerEvent, frozen=True, gc=False, tag="parcel_moved"):
    move: OutboxMove


class ParcelsDropped(PeerEvent, frozen=True, gc=False, tag="parcels_dropped"):
    """The peer has all that was said of this delegation through this number."""

    key: DelegationKey
    through: int


class TokenRevoked(PeerEvent, frozen=True, gc=False, tag="token_revoked"):
    token_id: str
    by: AgentId
    at_ms: int
    until_ms: int


_PEER_OF: Final[dict[type[PeerEvent], Callable[[Any], InstanceId]]] = {
    PeerPut: lambda event: event.peer.id,
    PeerRemoved: lambda event: event.id,
    PeerSucceeded: lambda event: event.peer.id,
    EnvelopeTaken: lambda event: event.envelope.sender,
    DelegationPut: lambda event: event.delegation.peer,
    DelegationDropped: lambda event: event.key.peer,
    ParcelPut: lambda event: event.parcel.peer,
    ParcelMoved: lambda event: event.move.delegation.peer,
    ParcelsDropped: lambda event: event.key.peer,
}


def peer_of(event: PeerEvent) -> InstanceId | None:
    """Whose it is; None of what is about no peer in particular."""
    found = _PEER_OF.get(type(event))
    return found(event) if found is not None else None
