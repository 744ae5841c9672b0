"""The registers in memory, as of a version: identities, grants, tenants, stored agents, peers, revoked tokens and
replaced secrets.

One node at a time decides a change, on the newest version, and makes the next version. A row is the present state of
one item; a removed item leaves a row without a body, so that other nodes learn of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import asyncpg
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
from covenant.ledger.postgres.connections import fetch_rows
from covenant.ledger.register_index import RegisterIndex, revoked_before
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
RESIDENT: Final = "resident"
SECRET: Final = "secret"  # noqa: S105  a kind of row


class StoredResident(msgspec.Struct, frozen=True, gc=False):
    """An agent from code or a file that a run of a node serves."""

    node: str
    boot: str
    agent: CatalogueAgent


_KINDS: Final[dict[str, type[Any]]] = {
    IDENTITY: Identity,
    GRANT: Grant,
    TENANT: Tenant,
    AGENT: CatalogueAgent,
    PEER: Peer,
    REVOKED: TokenRevoked,
    RESIDENT: StoredResident,
    SECRET: str,
}
_DECODERS: Final = {kind: msgspec.json.Decoder(what).decode for kind, what in _KINDS.items()}

replace = msgspec.structs.replace


class RegisterRow(NamedTuple):
    """`body` is None for a removed item."""

    kind: str
    name: str
    body: Any


def agent_name(tenant: str, agent_id: str) -> str:
    return msgspec.json.encode((tenant, agent_id)).decode()


def resident_name(node: str, agent: CatalogueAgent) -> str:
    return msgspec.json.encode((node, agent.tenant, agent.id)).decode()


def decode_row(kind: str, name: str, body: str | None) -> RegisterRow:
    return RegisterRow(kind, name, None if body is None else _DECODERS[kind](body))


class Registers(RegisterIndex):
    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self.peers: dict[InstanceId, Peer] = {}
        """The oldest first."""
        self._peers_by_name: dict[str, Peer] = {}
        self.tokens: dict[str, TokenRevoked] = {}
        self.residents: dict[str, StoredResident] = {}
        self.secrets: dict[str, str] = {}
        """Replaced secrets, encrypted."""
        self._kept: dict[str, dict[str, Any]] = {REVOKED: self.tokens, RESIDENT: self.residents, SECRET: self.secrets}
        self._indexed: dict[str, tuple[Callable[[Any], None], Callable[[str], None]]] = {
            IDENTITY: (self.put_identity, self.drop_identity),
            GRANT: (self.put_grant, self._drop_grant_of),
            TENANT: (self.put_tenant, self.drop_tenant),
            AGENT: (self.put_agent, self._drop_agent),
            PEER: (self._put_peer, self._drop_peer),
        }
        """By the kind of the rows: how one is put, and how a removed one is dropped by its name."""

    def peer(self, peer_id: InstanceId) -> Peer | None:
        return self.peers.get(peer_id)

    def peer_named(self, name: str) -> Peer | None:
        return self._peers_by_name.get(name)

    def token_revoked(self, token_id: str) -> bool:
        return token_id in self.tokens

    def note_heard(self, peer_id: InstanceId, heard_at_ms: int) -> None:
        """Updates when a peer was last heard: stored beside the registers, as it changes all day."""
        peer = self.peers.get(peer_id)
        if peer is not None and peer.heard_at_ms < heard_at_ms:
            self._put_peer(effects.last_heard(peer, heard_at_ms))

    def changes(self, events: Iterable[AnyEvent]) -> list[RegisterRow]:
        """The rows that these events make. Nothing changes here yet."""
        return [row for event in events if (made := _ROWS.get(type(event))) is not None for row in made(self, event)]

    def put(self, rows: Iterable[RegisterRow]) -> list[RegisterChange]:
        """Applies durable rows, and returns the changes for listeners."""
        changed: list[RegisterChange] = []
        for kind, name, body in rows:
            if kind in self._indexed:
                put, drop = self._indexed[kind]
                if body is None:
                    drop(name)
                else:
                    put(body)
            elif body is None:
                self._kept[kind].pop(name, None)
            else:
                self._kept[kind][name] = body
            if (change_of := _CHANGES.get(kind)) is not None:
                changed.append(change_of(name))
        return changed

    def _drop_grant_of(self, signature_b58: str) -> None:
        if (grant := self.grants_by_signature.get(signature_b58)) is not None:
            self._drop_grant(grant)

    def _drop_agent(self, name: str) -> None:
        tenant, agent_id = msgspec.json.decode(name, type=tuple[str, str])
        self.stored_agents.get(tenant, {}).pop(agent_id, None)

    def _drop_peer(self, name: str) -> None:
        if (peer := self.peers.pop(InstanceId(name), None)) is not None:
            self._drop_peer_name(peer)

    def _drop_peer_name(self, peer: Peer) -> None:
        """Another peer may have the name by now: a register's rows do not come in the order of their changes."""
        named = self._peers_by_name.get(peer.name)
        if named is not None and named.id == peer.id:
            del self._peers_by_name[peer.name]

    def _put_peer(self, peer: Peer) -> None:
        old = self.peers.get(peer.id)
        if old is not None:
            self._drop_peer_name(old)
            if old.heard_at_ms > peer.heard_at_ms:
                peer = effects.last_heard(peer, old.heard_at_ms)
        self.peers[peer.id] = self._peers_by_name[peer.name] = peer


_CHANGES: Final[dict[str, Callable[[str], RegisterChange]]] = {
    IDENTITY: lambda name: RegisterChange(Register.IDENTITIES, name),
    TENANT: lambda name: RegisterChange(Register.TENANTS, name),
    AGENT: lambda name: RegisterChange(Register.AGENTS, msgspec.json.decode(name)[0]),
    RESIDENT: lambda name: RegisterChange(Register.AGENTS, msgspec.json.decode(name)[1]),
    SECRET: lambda name: RegisterChange(Register.SECRETS, name),
}
"""What listeners are told of a row, by its kind. Rows of other kinds have no listeners."""


def _identities_purged(registers: Registers, event: IdentitiesPurged) -> Sequence[RegisterRow]:
    gone = revoked_before(registers.identities_by_token.values(), event.before_ms)
    return [RegisterRow(IDENTITY, each.token_sha256, None) for each in gone]


def _grants_purged(registers: Registers, event: GrantsPurged) -> Sequence[RegisterRow]:
    gone = revoked_before(registers.grants_by_signature.values(), event.before_ms)
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


async def refresh_registers(connection: asyncpg.Connection[Any], registers: Registers) -> list[RegisterChange]:
    """Applies changes of the registers since the known version."""
    known = registers.version
    rows = await fetch_rows("nodes", connection, "registers", version=known)
    new = [row for row in rows if row["version"] > known]
    changes = registers.put(decode_row(row["kind"], row["name"], row["body"]) for row in new)
    registers.version = max([known, *(row["version"] for row in new)])
    return changes
