"""The registry's operations: identities, capabilities and the audit."""

from __future__ import annotations

from typing import Final

import msgspec

from covenant.doors.operator_api.answers import ApiAnswer
from covenant.doors.operator_api.operation import AnyApiOperation, ApiOperation, Services
from covenant.doors.operator_api.paging import fit
from covenant.exchange.access.principals import Principal
from covenant.model.audit_chain import AuditReport
from covenant.model.errors import Invalid
from covenant.model.grant import Grant, Identity
from covenant.model.ids import AgentId, PublicKey
from covenant.wire.mailbox import EmptyRequest, RecentRequest
from covenant.wire.operator_requests import (
    EnrollIdentityRequest,
    GrantCapabilityRequest,
    ListIdentitiesRequest,
    PurgeRequest,
    RecentAuditRequest,
    RevokeCapabilityRequest,
    RevokeIdentityRequest,
    RotateTokenRequest,
)


class GrantedAction(msgspec.Struct, frozen=True, gc=False):
    action: str
    signature_b58: str


class IdentityEnrolledAnswer(ApiAnswer, frozen=True, kw_only=True, tag="identity_enrolled"):
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


class IdentityList(ApiAnswer, frozen=True, kw_only=True, tag="identity_list"):
    identities: tuple[IdentityShown, ...]
    operator_pubkey_b58: PublicKey
    truncated: bool


class IdentityRevokedAnswer(ApiAnswer, frozen=True, kw_only=True, tag="identity_revoked"):
    display: str
    pubkey_b58: PublicKey
    token_prefix: str
    revoked_at: int | None


class TokenRotated(ApiAnswer, frozen=True, kw_only=True, tag="token_rotated"):
    display: str
    token_b58: str


class IdentitiesPurgedAnswer(ApiAnswer, frozen=True, kw_only=True, tag="identities_purged"):
    before_ms: int
    purged: int


class CapabilityGranted(ApiAnswer, frozen=True, kw_only=True, tag="capability_granted"):
    subject_display: str
    action: str
    signature_b58: str
    scope: msgspec.Raw
    expires_at: int | None


class GrantBudget(msgspec.Struct, frozen=True, gc=False):
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
    budget: GrantBudget | None


class CapabilityList(ApiAnswer, frozen=True, kw_only=True, tag="capability_list"):
    limit: int
    capabilities: tuple[CapabilityShown, ...]


class CapabilityRevoked(ApiAnswer, frozen=True, kw_only=True, tag="capability_revoked"):
    signature_b58: str
    removed: bool


class CapabilitiesPurged(ApiAnswer, frozen=True, kw_only=True, tag="capabilities_purged"):
    before_ms: int
    purged: int


class AuditRecent(ApiAnswer, frozen=True, kw_only=True, tag="audit_recent"):
    """Each event is the row's exact text, as the hash chain covers it."""

    limit: int
    since_ms: int | None
    events: tuple[msgspec.Raw, ...]
    truncated: bool = False


class AuditIntegrity(ApiAnswer, frozen=True, kw_only=True, tag="audit_integrity"):
    report: AuditReport


class AuditPurgedAnswer(ApiAnswer, frozen=True, kw_only=True, tag="audit_purged"):
    before_ms: int
    purged: int


CAPABILITIES_LIMIT: Final = 10
IDENTITIES_LIMIT: Final = 20
AUDIT_LIMIT: Final = 20
IDENTITIES_LIMIT_MAX: Final = 1_000


async def enroll(office: Services, caller: Principal, request: EnrollIdentityRequest) -> IdentityEnrolledAnswer:
    enrolled = await office.registry.enroll(
        caller, request.display, pubkey=request.pubkey, actions=request.actions or ()
    )
    agent = enrolled.identity.agent
    return IdentityEnrolledAnswer(
        display=agent.display,
        pubkey_b58=agent.pubkey,
        token_b58=enrolled.token,
        granted=tuple(GrantedAction(grant.action, grant.signature_b58) for grant in enrolled.granted),
    )


async def identities(office: Services, caller: Principal, request: ListIdentitiesRequest) -> IdentityList:
    limit = IDENTITIES_LIMIT if request.limit is None else request.limit
    if not 1 <= limit <= IDENTITIES_LIMIT_MAX:
        raise Invalid("invalid_limit", f"limit must be between 1 and {IDENTITIES_LIMIT_MAX}")
    found = [identity for identity in await office.registry.identities(caller) if _asked_for(identity, request)]
    # Turned round and not sorted in reverse: so those enrolled within one millisecond are told newest first too.
    found = sorted(found, key=lambda identity: identity.registered_at_ms)[::-1]
    return IdentityList(
        identities=tuple(_identity(identity) for identity in found[:limit]),
        operator_pubkey_b58=caller.agent.pubkey,
        truncated=len(found) > limit,
    )


def _asked_for(identity: Identity, request: ListIdentitiesRequest) -> bool:
    if request.status is not None and (request.status == "revoked") != (identity.revoked_at_ms is not None):
        return False
    names = (identity.agent.display, identity.agent.pubkey, identity.token_prefix)
    return request.prefix is None or any(name.startswith(request.prefix) for name in names)


def _identity(identity: Identity) -> IdentityShown:
    return IdentityShown(
        agent_id=identity.agent,
        token_prefix=identity.token_prefix,
        registered_at=identity.registered_at_ms,
        revoked_at=identity.revoked_at_ms,
        operator=identity.operator,
    )


async def revoke_identity(office: Services, caller: Principal, request: RevokeIdentityRequest) -> IdentityRevokedAnswer:
    revoked = await office.registry.revoke(caller, request.identity, force=bool(request.force))
    return IdentityRevokedAnswer(
        display=revoked.agent.display,
        pubkey_b58=revoked.agent.pubkey,
        token_prefix=revoked.token_prefix,
        revoked_at=revoked.revoked_at_ms,
    )


async def rotate_token(office: Services, caller: Principal, request: RotateTokenRequest) -> TokenRotated:
    rotated = await office.registry.rotate(caller, request.identity)
    return TokenRotated(display=rotated.identity.agent.display, token_b58=rotated.token)


async def purge_identities(office: Services, caller: Principal, request: PurgeRequest) -> IdentitiesPurgedAnswer:
    purged = await office.registry.purge_identities(caller, request.before_ms)
    return IdentitiesPurgedAnswer(before_ms=request.before_ms, purged=purged)


async def grant(office: Services, caller: Principal, request: GrantCapabilityRequest) -> CapabilityGranted:
    made = await office.registry.grant(
        caller, request.action, to=request.to, scope=request.scope, expires_at=request.expires_at
    )
    return CapabilityGranted(
        subject_display=made.subject.display,
        action=made.action,
        signature_b58=made.signature_b58,
        scope=msgspec.Raw(made.scope_json.encode()),
        expires_at=made.expires_at,
    )


async def capabilities(office: Services, caller: Principal, request: RecentRequest) -> CapabilityList:
    limit = CAPABILITIES_LIMIT if request.limit is None else request.limit
    now_ms = office.ledger.now_ms()
    grants = await office.registry.grants(caller, limit)
    return CapabilityList(limit=limit, capabilities=tuple(_capability(each, now_ms) for each in grants))


def _capability(grant: Grant, now_ms: int) -> CapabilityShown:
    budget = None
    if grant.max_uses is not None:
        budget = GrantBudget(grant.max_uses, grant.used, max(0, grant.max_uses - grant.used))
    return CapabilityShown(
        signature_b58=grant.signature_b58,
        subject=grant.subject,
        action=grant.action,
        scope=msgspec.Raw(grant.scope_json.encode()),
        granted_by=grant.granted_by,
        granted_at=grant.granted_at_ms,
        expires_at=grant.expires_at,
        revoked_at=grant.revoked_at_ms,
        effective=_effective(grant, now_ms),
        budget=budget,
    )


def _effective(grant: Grant, now_ms: int) -> str:
    if grant.live(now_ms):
        return "live"
    if grant.revoked_at_ms is not None:
        return "revoked"
    return "expired" if grant.expires_at is not None and now_ms > grant.expires_at else "spent"


async def revoke_capability(office: Services, caller: Principal, request: RevokeCapabilityRequest) -> CapabilityRevoked:
    removed = await office.registry.revoke_grant(caller, request.signature_b58)
    return CapabilityRevoked(signature_b58=request.signature_b58, removed=removed)


async def purge_capabilities(office: Services, caller: Principal, request: PurgeRequest) -> CapabilitiesPurged:
    purged = await office.registry.purge_grants(caller, request.before_ms)
    return CapabilitiesPurged(before_ms=request.before_ms, purged=purged)


async def audit_recent(office: Services, caller: Principal, request: RecentAuditRequest) -> AuditRecent:
    limit = AUDIT_LIMIT if request.limit is None else request.limit
    found = [
        msgspec.Raw(record.row.encode())
        for record in await office.registry.audit_recent(caller, limit, request.since_ms)
    ]
    events = fit(found)
    return AuditRecent(limit=limit, since_ms=request.since_ms, events=events, truncated=len(events) < len(found))


async def audit_verify(office: Services, caller: Principal, _: EmptyRequest) -> AuditIntegrity:
    return AuditIntegrity(report=await office.registry.audit_verify(caller))


async def audit_purge(office: Services, caller: Principal, request: PurgeRequest) -> AuditPurgedAnswer:
    purged = await office.registry.audit_purge(caller, request.before_ms)
    return AuditPurgedAnswer(before_ms=request.before_ms, purged=purged)


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation(
        kind="enroll_identity",
        method="POST",
        path="/identities/enroll",
        request=EnrollIdentityRequest,
        answer=IdentityEnrolledAnswer,
        run=enroll,
        summary="Mint a token for an identity",
    ),
    ApiOperation(
        kind="list_identities",
        method="GET",
        path="/identities/list",
        request=ListIdentitiesRequest,
        answer=IdentityList,
        run=identities,
        summary="Who holds a token, the newest first",
    ),
    ApiOperation(
        kind="revoke_identity",
        method="POST",
        path="/identities/revoke",
        request=RevokeIdentityRequest,
        answer=IdentityRevokedAnswer,
        run=revoke_identity,
        summary="Revoke a token and end its live connections",
    ),
    ApiOperation(
        kind="rotate_token",
        method="POST",
        path="/identities/rotate",
        request=RotateTokenRequest,
        answer=TokenRotated,
        run=rotate_token,
        summary="Replace a token; the old one ends at once",
    ),
    ApiOperation(
        kind="purge_identities",
        method="POST",
        path="/identities/purge",
        request=PurgeRequest,
        answer=IdentitiesPurgedAnswer,
        run=purge_identities,
        summary="Forget tokens revoked before a time",
    ),
    ApiOperation(
        kind="recent_capabilities",
        method="GET",
        path="/capabilities/recent",
        request=RecentRequest,
        answer=CapabilityList,
        run=capabilities,
        summary="The newest grants that concern you",
    ),
    ApiOperation(
        kind="grant_capability",
        method="POST",
        path="/capabilities/grant",
        request=GrantCapabilityRequest,
        answer=CapabilityGranted,
        run=grant,
        summary="Grant an action to an identity",
    ),
    ApiOperation(
        kind="revoke_capability",
        method="POST",
        path="/capabilities/revoke",
        request=RevokeCapabilityRequest,
        answer=CapabilityRevoked,
        run=revoke_capability,
        summary="Revoke a grant by its signature",
    ),
    ApiOperation(
        kind="purge_capabilities",
        method="POST",
        path="/capabilities/purge",
        request=PurgeRequest,
        answer=CapabilitiesPurged,
        run=purge_capabilities,
        summary="Forget grants revoked before a time",
    ),
    ApiOperation(
        kind="recent_audit",
        method="GET",
        path="/audit/recent",
        request=RecentAuditRequest,
        answer=AuditRecent,
        run=audit_recent,
        summary="The newest audit rows that you caused; all of them, to the operator",
    ),
    ApiOperation(
        kind="verify_audit_integrity",
        method="GET",
        path="/audit/verify",
        request=EmptyRequest,
        answer=AuditIntegrity,
        run=audit_verify,
        summary="Verify the whole hash chain",
    ),
    ApiOperation(
        kind="purge_audit",
        method="POST",
        path="/audit/purge",
        request=PurgeRequest,
        answer=AuditPurgedAnswer,
        run=audit_purge,
        summary="Drop audit rows from before a time, leaving a marker",
    ),
)
