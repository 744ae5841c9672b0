"""Peers, and what was said to them and heard from them.

Peers are few and change seldom: looking one up costs a look in memory. Delegations and messages are many: reading them
may take a while.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from covenant.ledger.contract import Commits
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import Delegation, DelegationKey, DelegationRole, LoggedMessage, OutboxMessage
from covenant.model.peers.instance import InstanceId
from covenant.model.peers.peer_record import Peer


class PeerLedger(Commits, Protocol):
    def on_peer(self, callback: Callable[[InstanceId], None]) -> None:
        """Called when something about a peer has become durable: what is known of it, said to it or heard from it.

        For as many listeners as there are.
        """

    def peer(self, peer_id: InstanceId) -> Peer | None: ...
    def peer_named(self, name: str) -> Peer | None: ...
    def peers(self) -> Sequence[Peer]:
        """The oldest first."""

    def token_revoked(self, token_id: str) -> bool: ...
    async def delegation(self, key: DelegationKey) -> Delegation | None: ...
    async def delegation_of(self, task_id: TaskId) -> Delegation | None:
        """The one that a task here stands for, or works on."""

    async def delegations(self) -> Sequence[Delegation]:
        """The one that moved last first; of those that have ended, as many as are kept."""

    async def delegations_live(self, role: DelegationRole, peer: InstanceId | None = None) -> Sequence[Delegation]: ...
    async def parcels(self, peer: InstanceId) -> Sequence[OutboxMessage]:
        """What waits for a peer: by delegation, each in its order."""

    async def addressees(self) -> Sequence[InstanceId]:
        """The peers for whom something waits."""

    async def envelope_taken(self, sender: InstanceId, jti: str) -> bool: ...
    async def message_log(self) -> Sequence[LoggedMessage]:
        """What went to and fro lately, the newest first."""
