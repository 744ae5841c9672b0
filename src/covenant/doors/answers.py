"""Every answer of the mailbox, by `kind`: one shape over HTTP and the local socket.

Fields without a default are always there, `null` included; the others are left out when they say nothing. Tasks and
results leave out what is absent.
"""

from __future__ import annotations

from typing import Final

import msgspec

from covenant.ledger.contract.tasks import LeaseRecord, QueueEntry, TreeNode, UpdateRecord
from covenant.model.agent_definition import AgentDefinition, CatalogueAgent, ignored_keys
from covenant.model.audit_chain import AuditReport
from covenant.model.errors import Refusal
from covenant.model.ids import AgentId, LeaseId, PublicKey, TaskId
from covenant.model.repair import RepairOutcome, RetryReport
from covenant.model.result import Ending, Result
from covenant.model.task import Lease, Task
from covenant.model.task_event import MessageUpdate
from covenant.model.tenants import TenantLimits


class Answer(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag_field="kind", omit_defaults=True):
    """The root of everything a caller may be told."""


class Error(Answer, frozen=True, kw_only=True, tag="error"):
    code: str
    message: str
    retry_after_ms: int | None = None


class TaskQueued(Answer, frozen=True, kw_only=True, tag="a2a_task_queued"):
    """`replayed`: a cached result answers it. `following`: the task whose result will be this one's too."""

    task_id: TaskId
    duplicate: bool = False
    replayed: bool = False
    following: TaskId | None = None


class LeaseShown(msgspec.Struct, frozen=True, gc=False):
    lease_id: LeaseId
    attempt: int
    leased_at_ms: int

    @classmethod
    def of(cls, lease: Lease) -> LeaseShown:
        return cls(lease.lease_id, lease.attempt, lease.leased_at_ms)


class LeasedShown(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """`messages`: what a later turn of the task is about; the first one is about the task itself."""

    task: Task
    lease: LeaseShown
    turn: int = 1
    messages: tuple[MessageUpdate, ...] = ()


class TaskOpt(Answer, frozen=True, kw_only=True, tag="a2a_task_opt"):
    """The first of `tasks` stands at the top as well."""

    task: Task | None
    lease: LeaseShown | None
    tasks: tuple[LeasedShown, ...]


class Tasks(Answer, frozen=True, kw_only=True, tag="a2a_tasks"):
    """`truncated`: more was asked for than one answer may hold."""

    tasks: tuple[Task, ...]
    truncated: bool = False


class ResultPosted(Answer, frozen=True, kw_only=True, tag="a2a_result_posted"):
    """`goes_on`: messages came meanwhile, so it ended the turn and not the task."""

    task_id: TaskId
    duplicate: bool = False
    goes_on: bool = False


class ResultOpt(Answer, frozen=True, kw_only=True, tag="a2a_result_opt"):
    """The first of `results` stands at the top as well."""

    result: Result | None
    results: tuple[Result, ...]


class Results(Answer, frozen=True, kw_only=True, tag="a2a_results"):
    results: tuple[Result, ...]
    truncated: bool = False


class CountsShown(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """How much there is of everything, whatever the filters and limits leave of it."""

    queued: int
    in_flight: int
    parked: int
    following: int
    result_pending: int
    cached: int
    holders_lost: int
    delegations_lost: int = 0
    """Of those that peers do: `covenant peers delegations` shows them."""


class QueueShown(Answer, frozen=True, kw_only=True, tag="a2a_queue"):
    """`counts` are for the operator."""

    tasks: tuple[QueueEntry, ...]
    results: tuple[Result, ...]
    truncated: bool = False
    counts: CountsShown | None = None


class LeaseRenewed(Answer, frozen=True, kw_only=True, tag="a2a_lease_renewed"):
    task_id: TaskId
    lease: LeaseShown


class LeaseReleased(Answer, frozen=True, kw_only=True, tag="a2a_lease_released"):
    task_id: TaskId


class RequestWithdrawn(Answer, frozen=True, kw_only=True, tag="a2a_request_withdrawn"):
    """How many leases and results went back."""

    request_id: str
    leases: int
    results: int


class TaskUpdated(Answer, frozen=True, kw_only=True, tag="a2a_task_updated"):
    task_id: TaskId
    generation: int
    duplicate: bool = False


class TaskCanceled(Answer, frozen=True, kw_only=True, tag="a2a_task_canceled"):
    """`canceled` is false when the task had ended otherwise; `ending` and `result` say how."""

    task_id: TaskId
    canceled: bool
    ending: Ending
    result: Result


class TaskShown(Answer, frozen=True, kw_only=True, tag="a2a_task"):
    task: Task
    state: str
    a2a_state: str
    attempt: int
    turn: int
    generation: int
    created_at_ms: int
    updated_at_ms: int
    leases: tuple[LeaseRecord, ...]
    updates: tuple[UpdateRecord, ...]
    result: Result | None
    cause: str | None
    holder_lost: bool
    truncated: bool = False


class TreeShown(Answer, frozen=True, kw_only=True, tag="a2a_tree"):
    tree: TreeNode


class Repaired(Answer, frozen=True, kw_only=True, tag="a2a_repaired"):
    outcome: RepairOutcome


class AutoRetried(Answer, frozen=True, kw_only=True, tag="a2a_auto_retried"):
    report: RetryReport


class Compacted(Answer, frozen=True, kw_only=True, tag="a2a_compacted"):
    dropped: int


class GrantedAction(msgspec.Struct, frozen=True, gc=False):
    action: str
    signature_b58: str


class IdentityEnrolled(Answer, frozen=True, kw_only=True, tag="identity_enrolled"):
    """`token_b58` is told here and never again."""

    display: str
    pubkey_b58: PublicKey
    token_b58: str
    granted: tuple[GrantedAction, ...]


class IdentityShown(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    agent_id: AgentId
    token_prefix: str
    registered_at: int
    revoked_at: int | None
    operator: bool


class IdentityList(Answer, frozen=True, kw_only=True, tag="identity_list"):
    identities: tuple[IdentityShown, ...]
    operator_pubkey_b58: PublicKey
    truncated: bool


class IdentityRevoked(Answer, frozen=True, kw_only=True, tag="identity_revoked"):
    display: str
    pubkey_b58: PublicKey
    token_prefix: str
    revoked_at: int | None


class TokenRotated(Answer, frozen=True, kw_only=True, tag="token_rotated"):
    display: str
    token_b58: str


class IdentitiesPurged(Answer, frozen=True, kw_only=True, tag="identities_purged"):
    before_ms: int
    purged: int


class CapabilityGranted(Answer, frozen=True, kw_only=True, tag="capability_granted"):
    subject_display: str
    action: str
    signature_b58: str
    scope: msgspec.Raw
    expires_at: int | None


class Budget(msgspec.Struct, frozen=True, gc=False):
    max_uses: int
    used: int
    remaining: int


class CapabilityShown(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`effective`: live, revoked, expired or spent."""

    signature_b58: str
    subject: AgentId
    action: str
    scope: msgspec.Raw
    granted_by: AgentId
    granted_at: int
    expires_at: int | None
    revoked_at: int | None
    effective: str
    budget: Budget | None


class CapabilityList(Answer, frozen=True, kw_only=True, tag="capability_list"):
    limit: int
    capabilities: tuple[CapabilityShown, ...]


class CapabilityRevoked(Answer, frozen=True, kw_only=True, tag="capability_revoked"):
    signature_b58: str
    removed: bool


class CapabilitiesPurged(Answer, frozen=True, kw_only=True, tag="capabilities_purged"):
    before_ms: int
    purged: int


class AuditRecent(Answer, frozen=True, kw_only=True, tag="audit_recent"):
    """Each event is the row's exact text, as the hash chain covers it."""

    limit: int
    since_ms: int | None
    events: tuple[msgspec.Raw, ...]
    truncated: bool = False


class AuditIntegrity(Answer, frozen=True, kw_only=True, tag="audit_integrity"):
    report: AuditReport


class AuditPurged(Answer, frozen=True, kw_only=True, tag="audit_purged"):
    before_ms: int
    purged: int


class TenantShown(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`token_prefix` is empty where no token was made yet. `agents` counts those it can call."""

    name: str
    token_prefix: str
    created_at_ms: int
    disabled: bool
    disabled_at_ms: int | None
    limits: TenantLimits
    agents: int


class TenantAdded(Answer, frozen=True, kw_only=True, tag="tenant_added"):
    """`token` is told here and never again."""

    tenant: TenantShown
    token: str


class TenantList(Answer, frozen=True, kw_only=True, tag="tenant_list"):
    tenants: tuple[TenantShown, ...]


class TenantChanged(Answer, frozen=True, kw_only=True, tag="tenant_changed"):
    tenant: TenantShown


class TenantRotated(Answer, frozen=True, kw_only=True, tag="tenant_rotated"):
    tenant: TenantShown
    token: str


class AgentShown(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An agent of a catalogue. `source`: stored, file, code or builtin. `agent_def` is its whole constitution.

    `ignored` are the keys of it that nothing acts on.
    """

    id: str
    name: str
    role: str
    kind: str
    model: str
    source: str
    created_at_ms: int
    updated_at_ms: int
    agent_def: AgentDefinition
    ignored: tuple[str, ...] = ()

    @classmethod
    def of(cls, agent: CatalogueAgent) -> AgentShown:
        made = agent.constitution
        return cls(
            id=made.id,
            name=made.name,
            role=made.role,
            kind=made.kind,
            model=made.model,
            source=agent.source,
            created_at_ms=agent.created_at_ms,
            updated_at_ms=agent.updated_at_ms,
            agent_def=made,
            ignored=ignored_keys(made),
        )


class AgentList(Answer, frozen=True, kw_only=True, tag="agent_list"):
    tenant: str
    count: int
    agents: tuple[AgentShown, ...]


class AgentAdded(Answer, frozen=True, kw_only=True, tag="agent_added"):
    tenant: str
    agent: AgentShown


class AgentAnswer(Answer, frozen=True, kw_only=True, tag="agent"):
    """`identity` is who it is in the ledger: as whom a worker of it is enrolled."""

    tenant: str
    agent: AgentShown
    identity: AgentId


class AgentRemoved(Answer, frozen=True, kw_only=True, tag="agent_removed"):
    tenant: str
    agent_id: str


class PushShown(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A push configuration, without its secrets: of its address, only the host.

    `delivered` is the last generation that its receiver has; `attempts` have failed since.
    """

    task_id: TaskId
    push_id: str
    agent: str
    host: str
    made_at_ms: int
    moved_at_ms: int
    delivered: int
    attempts: int
    state: str
    next_ms: int | None = None
    failure: str | None = None
    dead_at_ms: int | None = None


class PushList(Answer, frozen=True, kw_only=True, tag="a2a_pushes"):
    """Those given up first. `count` and `dead` are of all there are, `pushes` as many as fit."""

    count: int
    dead: int
    pushes: tuple[PushShown, ...]


class PushRetried(Answer, frozen=True, kw_only=True, tag="a2a_push_retried"):
    push: PushShown


class Protocol(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    protocol: str = "covenant.ipc"
    version: int = 1
    min_supported: int = 1
    max_supported: int = 1


class ProtocolInfo(Answer, frozen=True, kw_only=True, tag="protocol_info"):
    info: Protocol
    server: str


class Authenticated(Answer, frozen=True, kw_only=True, tag="authenticated"):
    display: str


class AuthenticationFailed(Answer, frozen=True, kw_only=True, tag="authentication_failed"):
    reason: str


class Pong(Answer, frozen=True, kw_only=True, tag="pong"):
    pass


_encode = msgspec.json.Encoder().encode

# The tag comes first, so the older spelling is a matter of the first bytes.
_KIND: Final = b'{"kind":"a2a_'
_LEGACY_KIND: Final = b'{"kind":"a2_a_'


def encode(answer: Answer) -> bytes:
    return _encode(answer)


def encode_legacy(answer: Answer) -> bytes:
    """`a2_a_…` instead of `a2a_…`, for clients of the protocol's first implementation."""
    body = _encode(answer)
    return _LEGACY_KIND + body[len(_KIND) :] if body.startswith(_KIND) else body


def error_of(refusal: Refusal) -> Error:
    return Error(code=refusal.code, message=refusal.message, retry_after_ms=refusal.retry_after_ms)


INTERNAL_ERROR: Final = Error(code="internal", message="internal error")
