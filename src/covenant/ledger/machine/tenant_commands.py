"""Commands about tenants and the agents stored for them."""

from __future__ import annotations

from covenant.ledger.machine.commands import AUDIT, Command, Key
from covenant.model.agent_definition import RESERVED, CatalogueAgent, AgentDefinition
from covenant.model.ids import AgentId
from covenant.model.tenants import Tenant, TenantLimits


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


class PutAgent(Command[CatalogueAgent], frozen=True, gc=False, kw_only=True):
    """Store an agent for a tenant: a new one, or (`replace`) in place of the one with its id.

    `identity` is who it will be: its name must not be held by somebody else.
    """

    by: AgentId
    tenant: str
    constitution: AgentDefinition
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
