"""The registers in memory: identities, grants, tenants, stored agents, peers and revoked tokens, as of a version.

A change is decided by one node at a time, on the newest version, and is one version more. A row says what became of
one thing; what is gone leaves a row without a body, so that other nodes hear of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from covenant.ledger.contract.identities import Register, RegisterChange
from covenant.ledger.machine import effects
from covenant.ledger.machine.events import (
    AgentPut,
    AgentRemoved,
    AnyEvent,
    GrantMade,
    GrantRevoked,
    GrantsPurged,
    IdentitiesPurged,
    IdentityEnrolled,
    IdentityRevoked,
    PeerPut,
    PeerRemoved,
    PeerSucceeded,
    TenantErased,
    TenantPut,
    TenantRemoved,
    TokenRevoked,
)
from covenant.ledger.registries import Registries
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.grant import Grant, Identity
from covenant.model.peers.delegation import Peer
from covenant.model.peers.instance import InstanceId
from covenant.model.tenants import Tenant

IDENTITY: Final = "identity"
GRANT: Final = "grant"
TENANT: Final = "tenant"
AGENT: Final = "agent"
PEER: Final = "peer"
REVOKED: Final = "revoked_token"

_KINDS: Final[dict[str, type[Any]]] = {
    IDENTITY: Identity,
    GRANT: Grant,
    TENANT: Tenant,
    AGENT: CatalogueAgent,
    PEER: Peer,
    REVOKED: TokenRevoked,
}
_DECODERS: Final = {kind: msgspec.json.Decoder(what).decode for kind, what in _KINDS.items()}

replace = msgspec.structs.replace


class RegisterRow(NamedTuple):
    """`body` is None of what is gone."""

    kind: str
    name: str
    body: Any


def agent_name(tenant: str, agent_id: str) -> str:
    return msgspec.json.encode((tenant, agent_id)).decode()


def decode_row(kind: str, name: str, body: str | None) -> RegisterRow:
    return RegisterRow(kind, name, None if body is None else _DECODERS[kind](body))


class Registers(Registries):
    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self.peers: dict[InstanceId, Peer] = {}
        """The oldest first."""
        self._peers_by_name: dict[str, Peer] = {}
        self.tokens: dict[str, TokenRevoked] = {}

    def peer(self, peer_id: InstanceId) -> Peer | None:
        return self.peers.get(peer_id)

    def peer_named(self, name: str) -> Peer | None:
        return self._peers_by_name.get(name)

    def token_revoked(self, token_id: str) -> bool:
        return token_id in self.tokens

    def heard(self, peer_id: InstanceId, heard_at_ms: int) -> None:
        """It said something: known beside the registers, as it changes all day."""
        peer = self.peers.get(peer_id)
        if peer is not None and peer.heard_at_ms < heard_at_ms:
            self._put_peer(effects.heard(peer, heard_at_ms))

    def changes(self, events: Iterable[AnyEvent]) -> list[RegisterRow]:
        """The rows that these events come to. Nothing changes here yet."""
        return [row for event in events if (made := _ROWS.get(type(event))) is not None for row in made(self, event)]

    def put(self, rows: Iterable[RegisterRow]) -> list[RegisterChange]:
        """Take in rows that are durable; what listeners are told of it."""
        changed: list[RegisterChange] = []
        for row in rows:
            _PUTS[row.kind](self, row.name, row.body)
            if row.kind == IDENTITY:
                changed.append(RegisterChange(Register.IDENTITIES, row.name))
            elif row.kind == TENANT:
                changed.append(RegisterChange(Register.TENANTS, row.name))
            elif row.kind == AGENT:
                changed.append(RegisterChange(Register.AGENTS, msgspec.json.decode(row.name, type=tuple[str, str])[0]))
        return changed

    def _put_identity(self, name: str, identity: Identity | None) -> None:
        if identity is None:
            self.drop_identity(name)
        else:
            self.put_identity(identity)

    def _put_grant_row(self, name: str, grant: Grant | None) -> None:
        if grant is not None:
            self.put_grant(grant)
        elif (old := self.grants_by_signature.get(name)) is not None:
            self._drop_grant(old)

    def _put_tenant(self, name: str, tenant: Tenant | None) -> None:
        if tenant is None:
            self.drop_tenant(name)
        else:
            self.put_tenant(tenant)

    def _put_agent(self, name: str, agent: CatalogueAgent | None) -> None:
        if agent is not None:
            self.put_agent(agent)
            return
        tenant, agent_id = msgspec.json.decode(name, type=tuple[str, str])
        self.stored_agents.get(tenant, {}).pop(agent_id, None)

    def _put_peer_row(self, name: str, peer: Peer | None) -> None:
        if peer is not None:
            self._put_peer(peer)
        elif (old := self.peers.pop(InstanceId(name), None)) is not None and self._peers_by_name[old.name].id == name:
            del self._peers_by_name[old.name]

    def _put_peer(self, peer: Peer) -> None:
        old = self.peers.get(peer.id)
        if old is not None:
            self._peers_by_name.pop(old.name, None)
            if old.heard_at_ms > peer.heard_at_ms:
                peer = effects.heard(peer, old.heard_at_ms)
        self.peers[peer.id] = self._peers_by_name[peer.name] = peer

    def _put_token(self, name: str, revoked: TokenRevoked | None) -> None:
        if revoked is None:
            self.tokens.pop(name, None)
        else:
            self.tokens[name] = revoked


_PUTS: Final[dict[str, Callable[[Registers, str, Any], None]]] = {
    IDENTITY: Registers._put_identity,  # noqa: SLF001  the table is the class's own
    GRANT: Registers._put_grant_row,  # noqa: SLF001
    TENANT: Registers._put_tenant,  # noqa: SLF001
    AGENT: Registers._put_agent,  # noqa: SLF001
    PEER: Registers._put_peer_row,  # noqa: SLF001
    REVOKED: Registers._put_token,  # noqa: SLF001
}


def _identities_purged(registers: Registers, event: IdentitiesPurged) -> Sequence[RegisterRow]:
    known = registers.identities_by_token.values()
    gone = [each for each in known if each.revoked_at_ms is not None and each.revoked_at_ms < event.before_ms]
    return [RegisterRow(IDENTITY, each.token_sha256, None) for each in gone]


def _grants_purged(registers: Registers, event: GrantsPurged) -> Sequence[RegisterRow]:
    known = registers.grants_by_signature.values()
    gone = [each for each in known if each.revoked_at_ms is not None and each.revoked_at_ms < event.before_ms]
    return [RegisterRow(GRANT, each.signature_b58, None) for each in gone]


def _identity_revoked(registers: Registers, event: IdentityRevoked) -> Sequence[RegisterRow]:
    identity = replace(registers.identities_by_token[event.token_sha256], revoked_at_ms=event.revoked_at_ms)
    return (RegisterRow(IDENTITY, event.token_sha256, identity),)


def _grant_revoked(registers: Registers, event: GrantRevoked) -> Sequence[RegisterRow]:
    grant = replace(registers.grants_by_signature[event.signature_b58], revoked_at_ms=event.revoked_at_ms)
    return (RegisterRow(GRANT, event.signature_b58, grant),)


def _tenant_erased(registers: Registers, event: TenantErased) -> Sequence[RegisterRow]:
    name = event.tenant
    return [
        *(RegisterRow(AGENT, agent_name(name, each), None) for each in registers.stored_agents.get(name, ())),
        *(RegisterRow(GRANT, each.signature_b58, None) for each in registers.grants_at(name, event.keys)),
        *(RegisterRow(IDENTITY, each.token_sha256, None) for each in registers.identities_at(name)),
    ]


_ROWS: Final[dict[type[AnyEvent], Callable[[Registers, Any], Sequence[RegisterRow]]]] = {
    IdentityEnrolled: lambda _, event: (RegisterRow(IDENTITY, event.identity.token_sha256, event.identity),),
    IdentityRevoked: _identity_revoked,
    IdentitiesPurged: _identities_purged,
    GrantMade: lambda _, event: (RegisterRow(GRANT, event.grant.signature_b58, event.grant),),
    GrantRevoked: _grant_revoked,
    GrantsPurged: _grants_purged,
    TenantPut: lambda _, event: (RegisterRow(TENANT, event.tenant.name, event.tenant),),
    TenantErased: _tenant_erased,
    TenantRemoved: lambda _, event: (RegisterRow(TENANT, event.tenant, None),),
    AgentPut: lambda _, event: (RegisterRow(AGENT, agent_name(event.agent.tenant, event.agent.id), event.agent),),
    AgentRemoved: lambda _, event: (RegisterRow(AGENT, agent_name(event.tenant, event.agent_id), None),),
    PeerPut: lambda _, event: (RegisterRow(PEER, event.peer.id, event.peer),),
    PeerRemoved: lambda _, event: (RegisterRow(PEER, event.id, None),),
    PeerSucceeded: lambda _, event: (
        RegisterRow(PEER, event.old, None),
        RegisterRow(PEER, event.peer.id, event.peer),
    ),
    TokenRevoked: lambda _, event: (RegisterRow(REVOKED, event.token_id, event),),
}

REGISTER_EVENTS: Final = frozenset(_ROWS)
