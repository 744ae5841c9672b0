"""Tenants and their stored agents: who may be added, changed, replaced and removed, and the rows that says so in."""

from __future__ import annotations

import msgspec

from covenant.ledger.machine.decision import Decide
from covenant.ledger.machine.events import AgentPut, AgentRemoved, TenantPut
from covenant.ledger.machine.tenant_commands import AddTenant, ChangeTenant, PutAgent, RemoveAgent, RotateTenant
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.errors import Conflict, NotFound, OverLimit
from covenant.model.tenants import Tenant

replace = msgspec.structs.replace


def add_tenant(decide: Decide, command: AddTenant) -> Tenant:
    name = command.tenant.name
    if decide.view.tenant(name) is not None:
        raise decide.refuse(
            Conflict("tenant_exists", f"there is a tenant {name!r} already; rotate its token if it is lost")
        )
    if decide.view.tenant_count() >= decide.view.limits.tenants_max:
        raise decide.refuse(
            OverLimit("too_many_tenants", f"there may be at most {decide.view.limits.tenants_max} tenants")
        )
    for taken in (display for display in command.displays if decide.view.identities(display)):
        raise decide.refuse(Conflict("display_taken", f"{taken} is an identity of its own; revoke it first"))
    tenant = replace(command.tenant, created_at_ms=decide.now_ms)
    decide.add(TenantPut(tenant))
    decide.audit(command.by, {"type": "tenant_added", "tenant": name, "token_prefix": tenant.token_prefix})
    return tenant


def change_tenant(decide: Decide, command: ChangeTenant) -> Tenant:
    """What is so already leaves no trace."""
    old = new = _tenant(decide, command.name)
    if command.disabled is not None and command.disabled != (old.disabled_at_ms is not None):
        new = replace(new, disabled_at_ms=decide.now_ms if command.disabled else None)
    if command.limits is not None:
        new = replace(new, limits=command.limits)
    if new == old:
        return old
    decide.add(TenantPut(new))
    decide.audit(
        command.by,
        {
            "type": "tenant_changed",
            "tenant": new.name,
            "disabled": new.disabled_at_ms is not None,
            "limits": msgspec.structs.asdict(new.limits),
        },
    )
    return new


def rotate_tenant(decide: Decide, command: RotateTenant) -> Tenant:
    old = _tenant(decide, command.name)
    new = replace(old, token_sha256=command.token_sha256, token_prefix=command.token_prefix)
    decide.add(TenantPut(new))
    decide.audit(
        command.by,
        {
            "type": "tenant_token_rotated",
            "tenant": new.name,
            "old_token_prefix": old.token_prefix,
            "new_token_prefix": new.token_prefix,
        },
    )
    return new


def put_agent(decide: Decide, command: PutAgent) -> CatalogueAgent:
    tenant, constitution = command.tenant, command.constitution
    _tenant(decide, tenant)
    old = decide.view.agent(tenant, constitution.id)
    if command.replace and old is None:
        raise decide.refuse(unknown_agent(constitution.id))
    if not command.replace:
        if old is not None:
            raise decide.refuse(agent_exists(constitution.id))
        _check_room(decide, command)
    agent = CatalogueAgent(
        tenant=tenant,
        constitution=constitution,
        created_at_ms=old.created_at_ms if old is not None else decide.now_ms,
        updated_at_ms=decide.now_ms,
    )
    decide.add(AgentPut(agent))
    decide.audit(
        command.by,
        {
            "type": "agent_stored",
            "tenant": tenant,
            "agent": agent.id,
            "kind": constitution.kind,
            "replaced": old is not None,
        },
    )
    return agent


def _check_room(decide: Decide, command: PutAgent) -> None:
    most = decide.view.limits.agents_per_tenant_max
    if decide.view.agent_count(command.tenant) >= most:
        raise decide.refuse(OverLimit("too_many_agents", f"a tenant may have at most {most} stored agents"))
    taken = [
        identity for identity in decide.view.identities(command.identity.display) if identity.agent != command.identity
    ]
    if taken:
        raise decide.refuse(
            Conflict(
                "display_taken",
                f"{command.identity.display} is an identity of its own; revoke it first, or choose another id",
            )
        )


def remove_agent(decide: Decide, command: RemoveAgent) -> CatalogueAgent:
    agent = decide.view.agent(command.tenant, command.agent_id)
    if agent is None:
        raise decide.refuse(unknown_agent(command.agent_id))
    decide.add(AgentRemoved(command.tenant, command.agent_id))
    decide.audit(command.by, {"type": "agent_removed", "tenant": command.tenant, "agent": command.agent_id})
    return agent


def _tenant(decide: Decide, name: str) -> Tenant:
    tenant = decide.view.tenant(name)
    if tenant is None:
        raise decide.refuse(unknown_tenant(name))
    return tenant


def unknown_tenant(name: str) -> NotFound:
    return NotFound("unknown_tenant", f"no tenant is called {name[:80]!r}")


def unknown_agent(agent_id: str) -> NotFound:
    """The same for an agent that is nowhere and for one that is another tenant's."""
    return NotFound("unknown_agent", f"no agent {agent_id[:80]!r} for this tenant")


def agent_exists(agent_id: str) -> Conflict:
    return Conflict("agent_exists", f"there is an agent {agent_id!r} already")
