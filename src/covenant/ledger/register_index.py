"""Indexes in memory: push configurations; and identities, grants, tenants, stored agents and the audit's head."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import msgspec

from covenant.ledger.machine import effects
from covenant.ledger.machine.events import (
    AgentPut,
    AgentRemoved,
    AnyEvent,
    Audited,
    AuditPurged,
    GrantMade,
    GrantRevoked,
    GrantsPurged,
    GrantUsed,
    IdentitiesPurged,
    IdentityEnrolled,
    IdentityRevoked,
    PushDropped,
    PushEvent,
    PushMoved,
    PushPut,
    TenantErased,
    TenantPut,
    TenantRemoved,
)
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.clock_steps import Ages
from covenant.model.grant import GENESIS, AuditHead, Grant, Identity
from covenant.model.ids import AgentId, PublicKey, TaskId
from covenant.model.push import Push
from covenant.model.settings import Limits
from covenant.model.tenants import Tenant, host_of

R = TypeVar("R", Identity, Grant)

LINGER_MS: Final = 600_000
"""How long the configuration of an ended task that has nothing left to deliver can still be read by its owner."""


def idle_at_ms(push: Push, moved_at_ms: int, limits: Limits) -> int:
    """When the configuration of an ended task is dropped if nothing more happens to it."""
    return moved_at_ms + (LINGER_MS if push.done else limits.retention_ms)


class PushIndex:
    limits: Limits

    def __init__(self) -> None:
        self.pushes_by_task: dict[TaskId, dict[str, Push]] = {}
        """By task and id, oldest of a task first."""
        self.pushes_dead: dict[tuple[TaskId, str], None] = {}
        """Configurations that were given up, the longest ago first."""
        self._push_count = 0
        self._push_counts: dict[str, int] = {}
        """The number of configurations by tenant."""
        self._idle: list[tuple[int, TaskId, str]] = []
        """A heap with one entry for each configuration of an ended task: the earliest time at which it may be idle."""

    def apply_push(self, event: PushEvent, ts_ms: int) -> None:
        match event:
            case PushPut(push):
                self.put_push(push)
            case PushMoved(move):
                self.put_push(effects.moved_push(self.pushes_by_task[move.task_id][move.id], move, ts_ms))
            case PushDropped(task_id, push_id):
                of_task = self.pushes_by_task[task_id]
                self._count(of_task.pop(push_id), -1)
                if not of_task:
                    del self.pushes_by_task[task_id]
                self.pushes_dead.pop((task_id, push_id), None)
            case _:
                raise AssertionError(f"no push takes {event}")

    def put_push(self, push: Push) -> None:
        """Adds or replaces a configuration, from an event or a snapshot."""
        of_task = self.pushes_by_task.setdefault(push.task_id, {})
        old = of_task.get(push.id)
        of_task[push.id] = push
        if old is None:
            self._count(push, 1)
        if push.dead_at_ms is None:
            self.pushes_dead.pop((push.task_id, push.id), None)
        else:
            self.pushes_dead[push.task_id, push.id] = None
        if push.ended is not None and (old is None or old.ended is None):
            heapq.heappush(self._idle, (idle_at_ms(push, push.moved_at_ms, self.limits), push.task_id, push.id))

    def end_pushes(self, task_id: TaskId, generation: int) -> None:
        for push in tuple(self.pushes_by_task[task_id].values()):
            self.put_push(effects.ended_push(push, generation))

    def pushes(self, task_id: TaskId) -> Sequence[Push]:
        return tuple(self.pushes_by_task.get(task_id, {}).values())

    def push(self, task_id: TaskId, push_id: str) -> Push | None:
        of_task = self.pushes_by_task.get(task_id)
        return of_task.get(push_id) if of_task is not None else None

    def push_count(self) -> int:
        return self._push_count

    def push_count_of(self, tenant: str) -> int:
        return self._push_counts.get(tenant, 0)

    def _count(self, push: Push, change: int) -> None:
        tenant = host_of(push.recipient.display)
        self._push_count += change
        count = self._push_counts.pop(tenant, 0) + change
        if count:
            self._push_counts[tenant] = count

    def all_pushes(self) -> Iterator[Push]:
        return (push for of_task in self.pushes_by_task.values() for push in of_task.values())

    def pushes_idle(self, now_ms: int, count: int, ages: Ages) -> Sequence[Push]:
        found: dict[tuple[TaskId, str], Push] = {}
        back: dict[tuple[TaskId, str], int] = {}
        while self._idle and self._idle[0][0] <= now_ms and len(found) < count:
            _, task_id, push_id = heapq.heappop(self._idle)
            push = self.push(task_id, push_id)
            if push is None or push.ended is None:
                continue
            # The push or the clock may have moved since: then the push comes later. An event drops an idle push.
            moved_at_ms = ages.moment_ms(push.moved_at_ms, now_ms)
            back[task_id, push_id] = at_ms = idle_at_ms(push, moved_at_ms, self.limits)
            if at_ms <= now_ms:
                found[task_id, push_id] = push
        for (task_id, push_id), at_ms in back.items():
            heapq.heappush(self._idle, (at_ms, task_id, push_id))
        return tuple(found.values())


replace = msgspec.structs.replace


class RegisterIndex:
    def __init__(self) -> None:
        self.audit_head = GENESIS
        self.audit_anchor = GENESIS
        """The start of the audit chain since the last purge."""
        self.identities_by_token: dict[str, Identity] = {}
        self.grants_by_signature: dict[str, Grant] = {}
        self.tenants: dict[str, Tenant] = {}
        self.tenant = self.tenants.get
        """Tenants by name, oldest first."""
        self.tenants_by_token: dict[str, Tenant] = {}
        self.stored_agents: dict[str, dict[str, CatalogueAgent]] = {}
        """By tenant and id, oldest of a tenant first."""
        self._live: dict[str, Identity] = {}
        """Live identities by display, and by key: each display and key has at most one."""
        self._grants_by_subject: dict[tuple[PublicKey, str], tuple[Grant, ...]] = {}

    def register(self, event: AnyEvent) -> None:
        match event:
            case Audited(index, chain_hash):
                self.audit_head = AuditHead(index, chain_hash)
            case GrantUsed(signature):
                grant = self.grants_by_signature[signature]
                self.put_grant(replace(grant, used=grant.used + 1))
            case GrantMade(grant):
                self.put_grant(grant)
            case GrantRevoked(signature, revoked_at_ms):
                self.put_grant(replace(self.grants_by_signature[signature], revoked_at_ms=revoked_at_ms))
            case GrantsPurged(before_ms):
                for grant in revoked_before(self.grants_by_signature.values(), before_ms):
                    self._drop_grant(grant)
            case IdentityEnrolled(identity):
                self.put_identity(identity)
            case IdentityRevoked(token_sha256, revoked_at_ms):
                self.put_identity(replace(self.identities_by_token[token_sha256], revoked_at_ms=revoked_at_ms))
            case IdentitiesPurged(before_ms):
                for identity in revoked_before(self.identities_by_token.values(), before_ms):
                    del self.identities_by_token[identity.token_sha256]
            case TenantPut(tenant):
                self.put_tenant(tenant)
            case TenantErased(name, keys):
                self._erase_tenant(name, keys)
            case TenantRemoved(name):
                self.drop_tenant(name)
            case AgentPut(agent):
                self.put_agent(agent)
            case AgentRemoved(owner, agent_id):
                del self.stored_agents[owner][agent_id]
            case AuditPurged(through, anchor_hash):
                self.audit_anchor = AuditHead(through, anchor_hash)
            case _:
                raise AssertionError(f"no register takes {event}")

    def put_identity(self, identity: Identity) -> None:
        self.identities_by_token[identity.token_sha256] = identity
        agent = identity.agent
        if identity.revoked_at_ms is None:
            self._live[agent.display] = self._live[agent.pubkey] = identity
        elif self._live.get(agent.pubkey, identity).token_sha256 == identity.token_sha256:
            self._live.pop(agent.display, None)
            self._live.pop(agent.pubkey, None)

    def put_tenant(self, tenant: Tenant) -> None:
        old = self.tenants.get(tenant.name)
        if old is not None:
            self.tenants_by_token.pop(old.token_sha256, None)
        self.tenants[tenant.name] = tenant
        if tenant.token_sha256:
            self.tenants_by_token[tenant.token_sha256] = tenant

    def drop_tenant(self, name: str) -> None:
        tenant = self.tenants.pop(name, None)
        if tenant is not None:
            self.tenants_by_token.pop(tenant.token_sha256, None)

    def identities_at(self, host: str) -> Sequence[Identity]:
        """Identities whose display ends in this host, revoked ones too."""
        return [each for each in self.identities_by_token.values() if host_of(each.agent.display) == host]

    def grants_at(self, host: str, keys: Collection[str]) -> Sequence[Grant]:
        """Grants whose subject's display ends in this host, or that allow an action with such an agent."""
        return [each for each in self.grants_by_signature.values() if concerns_host(each, host, keys)]

    def _erase_tenant(self, name: str, keys: Collection[str]) -> None:
        self.stored_agents.pop(name, None)
        for grant in self.grants_at(name, keys):
            self._drop_grant(grant)
        for identity in self.identities_at(name):
            self.drop_identity(identity.token_sha256)

    def drop_identity(self, token_sha256: str) -> None:
        identity = self.identities_by_token.pop(token_sha256, None)
        if identity is not None:
            for name in (identity.agent.display, identity.agent.pubkey):
                if self._live.get(name, identity) is identity:
                    self._live.pop(name, None)

    def put_agent(self, agent: CatalogueAgent) -> None:
        self.stored_agents.setdefault(agent.tenant, {})[agent.id] = agent

    def put_grant(self, grant: Grant) -> None:
        self._drop_grant(grant)
        self.grants_by_signature[grant.signature_b58] = grant
        key = (grant.subject.pubkey, grant.action)
        self._grants_by_subject[key] = (*self._grants_by_subject.get(key, ()), grant)

    def _drop_grant(self, grant: Grant) -> None:
        if self.grants_by_signature.pop(grant.signature_b58, None) is None:
            return
        key = (grant.subject.pubkey, grant.action)
        rest = tuple(other for other in self._grants_by_subject[key] if other.signature_b58 != grant.signature_b58)
        if rest:
            self._grants_by_subject[key] = rest
        else:
            del self._grants_by_subject[key]

    def grants(self, subject: PublicKey, action: str) -> Sequence[Grant]:
        return self._grants_by_subject.get((subject, action), ())

    def grant(self, signature_b58: str) -> Grant | None:
        return self.grants_by_signature.get(signature_b58)

    def identity(self, token_sha256: str) -> Identity | None:
        return self.identities_by_token.get(token_sha256)

    def identities(self, name: str) -> Sequence[Identity]:
        identity = self._live.get(name)
        return () if identity is None else (identity,)

    def enrolled(self, agent: AgentId) -> AgentId | None:
        identity = self._live.get(agent.display) or self._live.get(agent.pubkey)
        return identity.agent if identity is not None else None

    def tenant_of(self, token_sha256: str) -> Tenant | None:
        return self.tenants_by_token.get(token_sha256)

    def tenant_count(self) -> int:
        return len(self.tenants)

    def agent(self, tenant: str, agent_id: str) -> CatalogueAgent | None:
        stored = self.stored_agents.get(tenant)
        return stored.get(agent_id) if stored is not None else None

    def agent_count(self, tenant: str) -> int:
        return len(self.stored_agents.get(tenant, ()))

    def identities_revoked_before(self, before_ms: int) -> int:
        return len(revoked_before(self.identities_by_token.values(), before_ms))

    def grants_revoked_before(self, before_ms: int) -> int:
        return len(revoked_before(self.grants_by_signature.values(), before_ms))


def concerns_host(grant: Grant, host: str, keys: Collection[str]) -> bool:
    """Whether a grant's subject is at this host, or its action names an agent there, by display or key."""
    return host in (host_of(grant.subject.display), grant.action.partition("@")[2]) or any(
        key in keys for key in (grant.subject.pubkey, grant.action.rpartition(".")[2])
    )


def revoked_before(items: Iterable[R], before_ms: int) -> list[R]:
    return [each for each in items if each.revoked_at_ms is not None and each.revoked_at_ms < before_ms]
