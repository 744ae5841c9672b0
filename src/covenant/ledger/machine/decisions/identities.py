"""Identities, grants, tenants and stored agents. Only the operator's commands reach these decisions."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import msgspec

from covenant.ledger.machine.decisions.context import DecisionContext, authorize
from covenant.ledger.machine.events import (
    AgentPut,
    AgentRemoved,
    AuditPurged,
    CacheDropped,
    GrantMade,
    GrantRevoked,
    GrantsPurged,
    IdentitiesPurged,
    IdentityEnrolled,
    IdentityRevoked,
    TenantErased,
    TenantPut,
    TenantRemoved,
)
from covenant.ledger.machine.identity_commands import (
    AddTenant,
    BeginTenantRemoval,
    ChangeTenant,
    Enroll,
    EraseTenant,
    FinishTenantRemoval,
    MakeGrant,
    PauseSchedule,
    PurgeAudit,
    PurgeGrants,
    PurgeIdentities,
    PutAgent,
    RemoveAgent,
    RevokeGrant,
    RevokeIdentity,
    RotateTenant,
    RotateToken,
    WriteAuditRow,
)
from covenant.model.agent_definition import CATCH_UP_S_MAX, CatalogueAgent
from covenant.model.errors import Conflict, NotFound, OverLimit
from covenant.model.grant import Grant, Identity
from covenant.model.ids import AgentId
from covenant.model.tenants import DEFAULT, SchedulePause, Tenant, TenantRemoval, schedule_key

replace = msgspec.structs.replace

PAUSES_MAX: Final = 1_000
RESUMED_KEPT_MS: Final = CATCH_UP_S_MAX * 1000
"""Once a pause has been over for this long, no schedule catches up to a time within it."""


def enroll(decide: DecisionContext, command: Enroll) -> Identity:
    identity = command.identity
    if decide.view.identities(identity.agent.display):
        raise Conflict(
            "display_taken",
            f"{identity.agent.display} is enrolled already; rotate its token, or revoke it first",
        )
    taken = decide.view.identities(identity.agent.pubkey)
    if taken:
        raise Conflict("pubkey_taken", f"this key is enrolled already, as {taken[0].agent.display}; enroll another")
    decide.add(IdentityEnrolled(identity))
    _audit_identity(decide, command.by, "identity_enrolled", identity)
    for grant in command.grants:
        _grant(decide, command.by, grant)
    return identity


def revoke_identity(decide: DecisionContext, command: RevokeIdentity) -> Identity:
    identity = _identity(decide, command.token_sha256)
    if identity.revoked_at_ms is not None:
        return identity
    decide.add(IdentityRevoked(identity.token_sha256, decide.now_ms))
    _audit_identity(decide, command.by, "identity_revoked", identity)
    return replace(identity, revoked_at_ms=decide.now_ms)


def _audit_identity(decide: DecisionContext, by: AgentId, kind: str, identity: Identity) -> None:
    agent, prefix = identity.agent, identity.token_prefix
    decide.audit(by, {"type": kind, "display": agent.display, "pubkey_b58": agent.pubkey, "token_prefix": prefix})


def rotate_token(decide: DecisionContext, command: RotateToken) -> Identity:
    old = _identity(decide, command.token_sha256)
    if old.revoked_at_ms is not None:
        raise Conflict("identity_revoked", "this token was revoked; enroll the identity anew")
    new = replace(
        old,
        token_sha256=command.new_token_sha256,
        token_prefix=command.new_token_prefix,
        registered_at_ms=decide.now_ms,
    )
    decide.add(IdentityEnrolled(new))
    decide.add(IdentityRevoked(old.token_sha256, decide.now_ms))
    decide.audit(
        command.by,
        {
            "type": "token_rotated",
            "display": old.agent.display,
            "old_token_prefix": old.token_prefix,
            "new_token_prefix": new.token_prefix,
        },
    )
    return new


def purge_identities(decide: DecisionContext, command: PurgeIdentities) -> int:
    purged = decide.view.identities_revoked_before(command.before_ms)
    if purged:
        decide.add(IdentitiesPurged(command.before_ms))
    decide.audit(command.by, {"type": "identities_purged", "before_ms": command.before_ms, "purged": purged})
    return purged


def make_grant(decide: DecisionContext, command: MakeGrant) -> Grant:
    _grant(decide, command.by, command.grant)
    return command.grant


def _grant(decide: DecisionContext, by: AgentId, grant: Grant) -> None:
    decide.add(GrantMade(grant))
    decide.audit(
        by,
        {
            "type": "capability_granted",
            "subject_display": grant.subject.display,
            "action": grant.action,
            "granted_by_display": grant.granted_by.display,
            "signature_b58": grant.signature_b58,
        },
    )


def revoke_grant(decide: DecisionContext, command: RevokeGrant) -> bool:
    grant = decide.view.grant(command.signature_b58)
    removed = grant is not None and grant.revoked_at_ms is None
    if removed:
        decide.add(GrantRevoked(command.signature_b58, decide.now_ms))
    decide.audit(
        command.by,
        {
            "type": "capability_revoked",
            "subject_display": grant.subject.display if grant else None,
            "action": grant.action if grant else None,
            "signature_b58": command.signature_b58,
            "removed": removed,
        },
    )
    return removed


def purge_grants(decide: DecisionContext, command: PurgeGrants) -> int:
    purged = decide.view.grants_revoked_before(command.before_ms)
    if purged:
        decide.add(GrantsPurged(command.before_ms))
    decide.audit(command.by, {"type": "capabilities_purged", "before_ms": command.before_ms, "purged": purged})
    return purged


def purge_audit(decide: DecisionContext, command: PurgeAudit) -> int:
    authorize(decide, command.access)
    decide.add(AuditPurged(command.through, command.anchor_hash))
    decide.audit(
        command.by,
        {
            "type": "audit_purged",
            "before_ms": command.before_ms,
            "through_index": command.through,
            "anchor_hash_hex": command.anchor_hash,
            "purged": command.count,
        },
    )
    return command.count


def write_audit_row(decide: DecisionContext, command: WriteAuditRow) -> None:
    authorize(decide, command.access)
    decide.audit(command.by, command.row)


def _identity(decide: DecisionContext, token_sha256: str) -> Identity:
    identity = decide.view.identity(token_sha256)
    if identity is None:
        raise NotFound("unknown_identity", "no identity has this token")
    return identity


def add_tenant(decide: DecisionContext, command: AddTenant) -> Tenant:
    name = command.tenant.name
    known = decide.view.tenant(name)
    if known is not None and known.removal is not None:
        raise being_removed(name)
    if known is not None:
        raise Conflict("tenant_exists", f"there is a tenant {name!r} already; rotate its token if it is lost")
    if decide.view.tenant_count() >= decide.view.limits.tenants_max:
        raise OverLimit(
            "too_many_tenants", f"there may be at most {decide.view.limits.tenants_max} tenants; remove one first"
        )
    for taken in (display for display in command.displays if decide.view.identities(display)):
        raise Conflict("display_taken", f"{taken} is an identity of its own; revoke it first")
    tenant = replace(command.tenant, created_at_ms=decide.now_ms, keyed_since_ms=decide.now_ms)
    return _put_tenant(decide, command.by, tenant, "tenant_added", token_prefix=tenant.token_prefix)


def _put_tenant(decide: DecisionContext, by: AgentId, tenant: Tenant, kind: str, **facts: Any) -> Tenant:
    """Stores the tenant as it is now, with an audit row that says what changed."""
    decide.add(TenantPut(tenant))
    decide.audit(by, {"type": kind, "tenant": tenant.name, **facts})
    return tenant


def change_tenant(decide: DecisionContext, command: ChangeTenant) -> Tenant:
    """Changes a tenant. A change to the present values leaves no audit row."""
    old = new = _tenant(decide, command.name)
    if command.disabled is not None and command.disabled != (old.disabled_at_ms is not None):
        new = replace(new, disabled_at_ms=decide.now_ms if command.disabled else None)
    if command.limits is not None:
        new = replace(new, limits=command.limits)
    if new == old:
        return old
    disabled, limits = new.disabled_at_ms is not None, msgspec.structs.asdict(new.limits)
    return _put_tenant(decide, command.by, new, "tenant_changed", disabled=disabled, limits=limits)


def rotate_tenant(decide: DecisionContext, command: RotateTenant) -> Tenant:
    old = _tenant(decide, command.name)
    new = replace(old, token_sha256=command.token_sha256, token_prefix=command.token_prefix)
    prefixes = {"old_token_prefix": old.token_prefix, "new_token_prefix": new.token_prefix}
    return _put_tenant(decide, command.by, new, "tenant_token_rotated", **prefixes)


def begin_tenant_removal(decide: DecisionContext, command: BeginTenantRemoval) -> Tenant:
    name = command.name
    old = decide.view.tenant(name)
    if old is None:
        raise unknown_tenant(name)
    if name == DEFAULT:
        raise Conflict("default_tenant", f"{DEFAULT} is there from the start, and cannot be removed")
    if old.removal is not None:
        return old
    live = decide.view.account(name).tasks
    if live and not command.cancel_live:
        raise Conflict(
            "tenant_at_work",
            f"{live} tasks of {name} have not ended; with `cancel_live` (`--cancel-live`) they are canceled",
        )
    new = replace(
        old,
        token_sha256="",
        token_prefix="",
        disabled_at_ms=old.disabled_at_ms or decide.now_ms,
        removal=TenantRemoval(begun_at_ms=decide.now_ms, reason=command.reason),
    )
    return _put_tenant(decide, command.by, new, "tenant_removal_begun", reason=command.reason, live_tasks=live)


def erase_tenant(decide: DecisionContext, command: EraseTenant) -> Tenant:
    old = _removed_tenant(decide, command.name)
    if live := decide.view.account(command.name).tasks:
        raise Conflict("tenant_at_work", f"{live} tasks of {command.name} have not ended")
    new = replace(old, removal=command.removal)
    decide.add(TenantPut(new))
    if command.cached:
        decide.add(CacheDropped(keys=command.cached))
    decide.add(TenantErased(command.name, command.removal.keys))
    return new


def finish_tenant_removal(decide: DecisionContext, command: FinishTenantRemoval) -> Tenant:
    tenant = _removed_tenant(decide, command.name)
    removal = tenant.removal
    assert removal is not None
    decide.add(TenantRemoved(tenant.name))
    decide.audit(
        command.by,
        {
            "type": "tenant_removed",
            "tenant": tenant.name,
            "reason": removal.reason,
            "tasks": removal.tasks,
            "digest": removal.digest,
            "canceled": removal.canceled,
            "agents": removal.agents,
            "identities": removal.identities,
            "grants": removal.grants,
            "pushes": removal.pushes,
            "cached": removal.cached,
            "places_searched": command.places,
        },
    )
    return tenant


def _removed_tenant(decide: DecisionContext, name: str) -> Tenant:
    tenant = decide.view.tenant(name)
    if tenant is None or tenant.removal is None:
        raise Conflict("not_being_removed", f"no removal of {name!r} has begun")
    return tenant


def being_removed(name: str) -> Conflict:
    return Conflict("tenant_removing", f"the tenant {name!r} is being removed; its name is free when that is done")


def pause_schedule(decide: DecisionContext, command: PauseSchedule) -> Tenant:
    tenant = _tenant(decide, command.name)
    key, oldest_ms = schedule_key(command.agent_id, command.schedule_id), decide.now_ms - RESUMED_KEPT_MS
    pauses = {
        name: pause for name, pause in tenant.schedule_pauses.items() if (pause.until_ms or decide.now_ms) > oldest_ms
    }
    old = pauses.get(key)
    if command.paused == (old is not None and old.until_ms is None):
        return tenant
    if command.paused and len(pauses) >= PAUSES_MAX and key not in pauses:
        raise OverLimit("too_many_pauses", f"a tenant may have at most {PAUSES_MAX} paused schedules; resume one first")
    if command.paused:
        pauses[key] = SchedulePause(decide.now_ms)
    elif old is not None:
        pauses[key] = SchedulePause(old.since_ms, decide.now_ms)
    new, kind = replace(tenant, schedule_pauses=pauses), "schedule_paused" if command.paused else "schedule_resumed"
    return _put_tenant(decide, command.by, new, kind, agent=command.agent_id, schedule=command.schedule_id)


def _forget_pauses(decide: DecisionContext, old: CatalogueAgent, kept: Collection[str] = ()) -> None:
    """Drops the pauses of removed schedules: a schedule that comes back under the same id is not paused."""
    tenant = decide.view.tenant(old.tenant)
    if tenant is None or not tenant.schedule_pauses:
        return
    gone = {schedule_key(old.id, each.id) for each in old.definition.schedules if each.id not in kept}
    pauses = {key: pause for key, pause in tenant.schedule_pauses.items() if key not in gone}
    if len(pauses) < len(tenant.schedule_pauses):
        decide.add(TenantPut(replace(tenant, schedule_pauses=pauses)))


def put_agent(decide: DecisionContext, command: PutAgent) -> CatalogueAgent:
    tenant, definition = command.tenant, command.definition
    _tenant(decide, tenant)
    old = decide.view.agent(tenant, definition.id)
    if command.replace and old is None:
        raise unknown_agent(definition.id)
    if old is not None and command.expected not in (None, old.definition):
        raise Conflict("agent_changed", f"{definition.id} was changed meanwhile; read it again, and repeat the change")
    if not command.replace:
        if old is not None:
            raise agent_exists(definition.id)
        _check_room(decide, command)
    agent = CatalogueAgent(
        tenant=tenant,
        definition=definition,
        created_at_ms=old.created_at_ms if old is not None else decide.now_ms,
        updated_at_ms=decide.now_ms,
    )
    if old is not None:
        _forget_pauses(decide, old, [each.id for each in definition.schedules])
    decide.add(AgentPut(agent))
    decide.audit(
        command.by,
        {
            "type": "agent_stored",
            "tenant": tenant,
            "agent": agent.id,
            "kind": definition.kind,
            "replaced": old is not None,
        },
    )
    return agent


def _check_room(decide: DecisionContext, command: PutAgent) -> None:
    most = decide.view.limits.agents_per_tenant_max
    if decide.view.agent_count(command.tenant) >= most:
        raise OverLimit("too_many_agents", f"a tenant may have at most {most} stored agents; remove one first")
    taken = [
        identity for identity in decide.view.identities(command.identity.display) if identity.agent != command.identity
    ]
    if taken:
        raise Conflict(
            "display_taken",
            f"{command.identity.display} is an identity of its own; revoke it first, or choose another id",
        )


def remove_agent(decide: DecisionContext, command: RemoveAgent) -> CatalogueAgent:
    agent = decide.view.agent(command.tenant, command.agent_id)
    if agent is None:
        raise unknown_agent(command.agent_id)
    _forget_pauses(decide, agent)
    decide.add(AgentRemoved(command.tenant, command.agent_id))
    decide.audit(command.by, {"type": "agent_removed", "tenant": command.tenant, "agent": command.agent_id})
    return agent


def _tenant(decide: DecisionContext, name: str) -> Tenant:
    tenant = decide.view.tenant(name)
    if tenant is None:
        raise unknown_tenant(name)
    if tenant.removal is not None:
        raise being_removed(name)
    return tenant


def unknown_tenant(name: str) -> NotFound:
    return NotFound("unknown_tenant", f"no tenant is called {name[:80]!r}")


def unknown_agent(agent_id: str) -> NotFound:
    """The refusal is the same for an agent that does not exist and for one of another tenant."""
    return NotFound(
        "unknown_agent",
        f"no agent {agent_id[:80]!r} for this tenant; "
        "`covenant agents list` and GET /v1/agents name those that there are",
    )


def agent_exists(agent_id: str) -> Conflict:
    return Conflict("agent_exists", f"there is an agent {agent_id!r} already; replace it, or choose another id")
