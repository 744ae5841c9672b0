"""Commands about identities, grants, tenants, their stored agents, and the audit."""

from __future__ import annotations

from covenant.ledger.machine.commands import Command
from covenant.model.agent_definition import RESERVED, AgentDefinition, CatalogueAgent
from covenant.model.grant import Grant, Identity
from covenant.model.ids import AgentId
from covenant.model.task import CacheKey
from covenant.model.tenants import Tenant, TenantLimits, TenantRemoval


class Enroll(Command[Identity], frozen=True, gc=False, kw_only=True):
    by: AgentId
    identity: Identity
    grants: tuple[Grant, ...] = ()


class IdentityCommand(Command[Identity], frozen=True, gc=False, kw_only=True):
    by: AgentId
    token_sha256: str


class RevokeIdentity(IdentityCommand, frozen=True, gc=False, kw_only=True):
    pass


class RotateToken(IdentityCommand, frozen=True, gc=False, kw_only=True):
    """A new token for the same identity; one record ends the old token and begins the new one."""

    new_token_sha256: str
    new_token_prefix: str


class PurgeIdentities(Command[int], frozen=True, gc=False, kw_only=True):
    by: AgentId
    before_ms: int


class MakeGrant(Command[Grant], frozen=True, gc=False, kw_only=True):
    by: AgentId
    grant: Grant


class RevokeGrant(Command[bool], frozen=True, gc=False, kw_only=True):
    by: AgentId
    signature_b58: str


class PurgeGrants(Command[int], frozen=True, gc=False, kw_only=True):
    by: AgentId
    before_ms: int


class PurgeAudit(Command[int], frozen=True, gc=False, kw_only=True):
    """Drops audit rows of a chain up to `through`, whose chain hash is `anchor_hash`; a marker row records it."""

    by: AgentId
    before_ms: int
    through: int
    anchor_hash: str
    count: int
    chain: str = ""


class WriteAuditRow(Command[None], frozen=True, gc=False, kw_only=True):
    """Writes an audit row when nothing else changes."""

    by: AgentId
    row: dict[str, object]


class AddTenant(Command[Tenant], frozen=True, gc=False, kw_only=True):
    """The tenant's `created_at_ms` is the time of this decision."""

    by: AgentId
    tenant: Tenant

    @property
    def displays(self) -> tuple[str, ...]:
        """The displays that come with a tenant: no other identity may have them."""
        return tuple(f"{name}@{self.tenant.name}" for name in sorted(RESERVED))


class TenantCommand(Command[Tenant], frozen=True, gc=False, kw_only=True):
    by: AgentId
    name: str


class ChangeTenant(TenantCommand, frozen=True, gc=False, kw_only=True):
    """None leaves a field unchanged."""

    disabled: bool | None = None
    limits: TenantLimits | None = None


class RotateTenant(TenantCommand, frozen=True, gc=False, kw_only=True):
    """A new token; the same record ends the old one."""

    token_sha256: str
    token_prefix: str


class BeginTenantRemoval(TenantCommand, frozen=True, gc=False, kw_only=True):
    """From here on the tenant's tokens are refused, and it accepts no tasks. Repeating it changes nothing."""

    reason: str
    cancel_live: bool = False


class EraseTenant(TenantCommand, frozen=True, gc=False, kw_only=True):
    """Erases the registers and cached results of a tenant whose tasks have all ended.

    `removal` records what there is to erase, and under which keys.
    """

    removal: TenantRemoval
    cached: tuple[CacheKey, ...] = ()


class FinishTenantRemoval(TenantCommand, frozen=True, gc=False, kw_only=True):
    """Only the tenant's own record is left, and goes with this."""

    places: int
    """The number of files or tables that were searched."""


class PauseSchedule(TenantCommand, frozen=True, gc=False, kw_only=True):
    """Begins or ends (`paused=False`) the pause of a schedule. Repeating it leaves no audit row."""

    agent_id: str
    schedule_id: str
    paused: bool = True


class PutAgent(Command[CatalogueAgent], frozen=True, gc=False, kw_only=True):
    """Stores an agent for a tenant: a new one, or (`replace`) instead of the one with its id.

    `identity` is the agent's identity: no other one may have its display.
    """

    by: AgentId
    tenant: str
    definition: AgentDefinition
    identity: AgentId
    replace: bool = False
    expected: AgentDefinition | None = None
    """The definition to replace: refused if the agent has another one by now. None: any."""


class RemoveAgent(Command[CatalogueAgent], frozen=True, gc=False, kw_only=True):
    by: AgentId
    tenant: str
    agent_id: str
