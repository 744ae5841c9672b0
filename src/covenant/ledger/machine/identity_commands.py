"""Commands about who may do what: identities, grants, tenants, the agents stored for them, and the audit."""

from __future__ import annotations

import msgspec

from covenant.ledger.machine.commands import AUDIT, Command, Key, _access_keys
from covenant.model.agent_definition import RESERVED, AgentDefinition, CatalogueAgent
from covenant.model.grant import Grant, Identity
from covenant.model.ids import AgentId
from covenant.model.task import CacheKey
from covenant.model.tenants import Tenant, TenantLimits, TenantRemoval


def _identity_keys(agent: AgentId) -> tuple[Key, ...]:
    return ("agent", agent.display), ("agent", agent.pubkey)


def _grant_keys(grant: Grant) -> tuple[Key, ...]:
    return ("grant", grant.signature_b58), ("grants", grant.subject.pubkey, grant.action)


class Enroll(Command[Identity], frozen=True, gc=False, kw_only=True):
    by: AgentId
    identity: Identity
    grants: tuple[Grant, ...] = ()

    def keys(self) -> tuple[Key, ...]:
        grants = (key for grant in self.grants for key in _grant_keys(grant))
        return (("identity", self.identity.token_sha256), *_identity_keys(self.identity.agent), *grants, AUDIT)


class IdentityCommand(Command[Identity], frozen=True, gc=False, kw_only=True):
    by: AgentId
    token_sha256: str

    def keys(self) -> tuple[Key, ...]:
        return ("identity", self.token_sha256), AUDIT


class RevokeIdentity(IdentityCommand, frozen=True, gc=False, kw_only=True):
    pass


class RotateToken(IdentityCommand, frozen=True, gc=False, kw_only=True):
    """A new token for the same identity; the old one ends with the same record that begins the new one."""

    new_token_sha256: str
    new_token_prefix: str

    def keys(self) -> tuple[Key, ...]:
        return ("identity", self.token_sha256), ("identity", self.new_token_sha256), AUDIT


class PurgeIdentities(Command[int], frozen=True, gc=False, kw_only=True):
    by: AgentId
    before_ms: int

    def keys(self) -> tuple[Key, ...]:
        return ("identities",), AUDIT


class MakeGrant(Command[Grant], frozen=True, gc=False, kw_only=True):
    by: AgentId
    grant: Grant

    def keys(self) -> tuple[Key, ...]:
        return (*_grant_keys(self.grant), AUDIT)


class RevokeGrant(Command[bool], frozen=True, gc=False, kw_only=True):
    by: AgentId
    signature_b58: str

    def keys(self) -> tuple[Key, ...]:
        return ("grant", self.signature_b58), AUDIT


class PurgeGrants(Command[int], frozen=True, gc=False, kw_only=True):
    by: AgentId
    before_ms: int

    def keys(self) -> tuple[Key, ...]:
        return ("grants",), AUDIT


class PurgeAudit(Command[int], frozen=True, gc=False, kw_only=True):
    """Drop audit rows of a chain up to `through`, whose chain hash is `anchor_hash`; a marker row says so."""

    by: AgentId
    before_ms: int
    through: int
    anchor_hash: str
    count: int
    chain: str = ""

    def keys(self) -> tuple[Key, ...]:
        return (*_access_keys(self.access), AUDIT)


class WriteAuditRow(Command[None], frozen=True, gc=False, kw_only=True):
    """Put a row into the audit, when nothing else changes."""

    by: AgentId
    row: dict[str, object]

    def keys(self) -> tuple[Key, ...]:
        return (*_access_keys(self.access), AUDIT)


class AddTenant(Command[Tenant], frozen=True, gc=False, kw_only=True):
    """`created_at_ms` of the tenant is when this is decided."""

    by: AgentId
    tenant: Tenant

    def keys(self) -> tuple[Key, ...]:
        return ("tenants",), ("tenant", self.tenant.name), *(("agent", display) for display in self.displays), AUDIT

    @property
    def displays(self) -> tuple[str, ...]:
        """Who comes with a tenant: their names must not be held by somebody else."""
        return tuple(f"{name}@{self.tenant.name}" for name in sorted(RESERVED))


class TenantCommand(Command[Tenant], frozen=True, gc=False, kw_only=True):
    by: AgentId
    name: str

    def keys(self) -> tuple[Key, ...]:
        return ("tenant", self.name), AUDIT


class ChangeTenant(TenantCommand, frozen=True, gc=False, kw_only=True):
    """None leaves a thing as it is."""

    disabled: bool | None = None
    limits: TenantLimits | None = None


class RotateTenant(TenantCommand, frozen=True, gc=False, kw_only=True):
    """A new token; the old one ends with the same record."""

    token_sha256: str
    token_prefix: str


class BeginTenantRemoval(TenantCommand, frozen=True, gc=False, kw_only=True):
    """From here on nobody speaks for the tenant and nothing is accepted for it. The same again changes nothing."""

    reason: str
    cancel_live: bool = False

    def keys(self) -> tuple[Key, ...]:
        return ("tenant", self.name), ("account", self.name), AUDIT


class EraseTenant(TenantCommand, frozen=True, gc=False, kw_only=True):
    """Drop what the registers and the cache hold of a tenant whose tasks have all ended.

    `removal` is what is written down of it: what is there to erase, and under which keys.
    """

    removal: TenantRemoval
    cached: tuple[CacheKey, ...] = ()

    def keys(self) -> tuple[Key, ...]:
        cached: list[Key] = [("cache", *msgspec.structs.astuple(key)) for key in self.cached]
        return ("tenant", self.name), ("account", self.name), ("tenants",), *cached, AUDIT


class FinishTenantRemoval(TenantCommand, frozen=True, gc=False, kw_only=True):
    """Nothing of the tenant is left but its record, which goes with this."""

    places: int
    """How many files or tables were searched."""

    def keys(self) -> tuple[Key, ...]:
        return ("tenants",), ("tenant", self.name), AUDIT


class PutAgent(Command[CatalogueAgent], frozen=True, gc=False, kw_only=True):
    """Store an agent for a tenant: a new one, or (`replace`) in place of the one with its id.

    `identity` is who it will be: its name must not be held by somebody else.
    """

    by: AgentId
    tenant: str
    definition: AgentDefinition
    identity: AgentId
    replace: bool = False

    def keys(self) -> tuple[Key, ...]:
        return ("tenant", self.tenant), ("catalogue", self.tenant), ("agent", self.identity.display), AUDIT


class RemoveAgent(Command[CatalogueAgent], frozen=True, gc=False, kw_only=True):
    by: AgentId
    tenant: str
    agent_id: str

    def keys(self) -> tuple[Key, ...]:
        return ("catalogue", self.tenant), AUDIT
