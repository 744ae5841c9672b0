"""Look-ups that memory answers at once: who is known, what a peer is owed, which webhooks are told.

They wait for nothing, so they may see a record that is not on disk yet. What rests on one is a command of its own, and
that is durable only together with what it was decided on.
"""

from __future__ import annotations

from collections.abc import Sequence

from covenant.ledger.log.state import LedgerState
from covenant.model.peers.peer_record import Peer
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.peers.delegation import Delegation, DelegationKey, LoggedMessage, OutboxMessage
from covenant.model.peers.delegation import DelegationRole
from covenant.model.grant import Identity
from covenant.model.ids import AgentId, TaskId
from covenant.model.peers.instance import InstanceId
from covenant.model.push import Push
from covenant.model.tenants import Tenant


class Lookups:
    _state: LedgerState

    def pushes(self, task_id: TaskId) -> Sequence[Push]:
        return self._state.pushes(task_id)

    def peer(self, peer_id: InstanceId) -> Peer | None:
        return self._state.peer(peer_id)

    def peer_named(self, name: str) -> Peer | None:
        return self._state.peer_named(name)

    def peers(self) -> Sequence[Peer]:
        return tuple(self._state.peers_by_id.values())

    def delegation(self, key: DelegationKey) -> Delegation | None:
        return self._state.delegation(key)

    def delegation_of(self, task_id: TaskId) -> Delegation | None:
        return self._state.delegation_of(task_id)

    def delegations(self) -> Sequence[Delegation]:
        return tuple(self._state.delegations())

    def delegations_live(self, role: DelegationRole, peer: InstanceId | None = None) -> Sequence[Delegation]:
        return self._state.delegations_live(role, peer)

    def parcels(self, peer: InstanceId) -> Sequence[OutboxMessage]:
        return tuple(self._state.parcels_of(peer))

    def addressees(self) -> Sequence[InstanceId]:
        return self._state.addressees()

    def envelope_taken(self, sender: InstanceId, jti: str) -> bool:
        return self._state.envelope_taken(sender, jti)

    def token_revoked(self, token_id: str) -> bool:
        return self._state.token_revoked(token_id)

    def message_log(self) -> Sequence[LoggedMessage]:
        return tuple(reversed(self._state.messages))

    def identity(self, token_sha256: str) -> Identity | None:
        return self._state.identities_by_token.get(token_sha256)

    def enrolled(self, agent: AgentId) -> AgentId | None:
        return self._state.enrolled(agent)

    def tenant(self, name: str) -> Tenant | None:
        return self._state.tenants.get(name)

    def tenant_of(self, token_sha256: str) -> Tenant | None:
        return self._state.tenants_by_token.get(token_sha256)

    def agent(self, tenant: str, agent_id: str) -> CatalogueAgent | None:
        return self._state.agent(tenant, agent_id)

    def agents(self, tenant: str) -> Sequence[CatalogueAgent]:
        return tuple(self._state.stored_agents.get(tenant, {}).values())
