"""A message of a peer, as the parts that act on it get it: proven, opened, read, and not acted on yet."""

from __future__ import annotations

from typing import NamedTuple

from covenant.model.peers.peer_record import Peer
from covenant.model.peers.delegation import ReceivedEnvelope
from covenant.model.peers.delegation_messages import DelegationMessage


class Incoming(NamedTuple):
    """Whoever takes it commits one `Hear` with this envelope, and everything that follows from it in the same."""

    peer: Peer
    envelope: ReceivedEnvelope
    message: DelegationMessage
