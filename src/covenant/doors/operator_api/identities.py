"""Operations on identities, capabilities and the audit; and login codes for the dashboard."""

from __future__ import annotations

import asyncio
from typing import Any, Final, Literal

import msgspec

from covenant.doors.operator_api.operation import (
    AnyApiOperation,
    ApiAnswer,
    ApiOperation,
    Services,
    fill,
    fit,
    page_limit,
)
from covenant.doors.waits import Pause
from covenant.exchange.access.principals import Principal
from covenant.exchange.audit_search import AuditFilter, find_audit
from covenant.ledger.contract.identities import LAST
from covenant.model.errors import Conflict
from covenant.model.grant import AuditReport, Grant, Identity
from covenant.model.ids import AgentId, PublicKey
from covenant.wire.mailbox import EmptyRequest, RecentRequest, Request, StrictRequest, Whole

CAPABILITIES_LIMIT: Final = 10
IDENTITIES_LIMIT: Final = 20
AUDIT_LIMIT: Final = 20
IDENTITIES_LIMIT_MAX: Final = 1_000


class EnrollIdentityRequest(StrictRequest, frozen=True, kw_only=True):
    """`pubkey` is minted if left out; `actions` are granted, unscoped, in the same step.

    `certificate`: the name of one that stands for the identity, instead of a token.
    """

    display: str
    pubkey: str | None = None
    actions: tuple[str, ...] | None = None
    certificate: str | None = None


class ListIdentitiesRequest(Request, frozen=True, kw_only=True):
    """`prefix` is the beginning of a display, a key or a token."""

    limit: Whole | None = None
    prefix: str | None = None
    status: Literal["live", "revoked"] | None = None


class RevokeIdentityRequest(StrictRequest, frozen=True, kw_only=True):
    """`identity` is a display, a key, or the first characters of a token. The operator's own token needs `force`."""

    identity: str
    force: bool | None = None


class RotateTokenRequest(StrictRequest, frozen=True, kw_only=True):
    """Without `identity`: the caller's own."""

    identity: str | None = None


class PurgeRequest(StrictRequest, frozen=True, kw_only=True):
    before_ms: Whole


class GrantCapabilityRequest(StrictRequest, frozen=True, kw_only=True):
    """Without `to`: to the operator itself."""

    action: str
    to: str | None = None
    scope: dict[str, Any] | None = None
    expires_at: Whole | None = None


class RevokeCapabilityRequest(StrictRequest, frozen=True, kw_only=True):
    signature_b58: str


class RecentAuditRequest(Request, frozen=True, kw_only=True):
    """`after`: the id of the newest row that the caller has; rows up to it are left out.

    `type` is a kind of row, `issuer` the beginning of a display. `below` is the `next` of the page before.
    """

    limit: Whole | None = None
    type: str | None = None
    issuer: str | None = None
    since_ms: Whole | None = None
    before_ms: Whole | None = None
    below: Whole | None = None
    after: str | None = None
    wait_ms: Whole | None = None


class GrantedAction(msgspec.Struct, frozen=True, gc=False):
    action: str
    signature_b58: str


class IdentityEnrolledAnswer(ApiAnswer, frozen=True, kw_only=True, tag="identity_enrolled"):
    """`token_b58` is shown here and never again."""

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
    """Each event is the row's exact text, which the hash chain covers. `next`: the `below` of older rows, if any."""

    limit: int
    since_ms: int | None
    events: tuple[msgspec.Raw, ...]
    truncated: bool = False
    next: int | None


class AuditIntegrity(ApiAnswer, frozen=True, kw_only=True, tag="audit_integrity"):
    report: AuditReport


class AuditPurgedAnswer(ApiAnswer, frozen=True, kw_only=True, tag="audit_purged"):
    before_ms: int
    purged: int


class LoginCodeAnswer(ApiAnswer, frozen=True, kw_only=True, tag="login_code"):
    """`url` opens the dashboard and logs in, once, within `lasts_ms`."""

    code: str
    url: str
    lasts_ms: int


async def enroll_identity(
    services: Services, caller: Principal, request: EnrollIdentityRequest
) -> IdentityEnrolledAnswer:
    enrolled = await services.registry.enroll(
        caller,
        request.display,
        pubkey=request.pubkey,
        actions=request.actions or (),
        certificate=request.certificate,
    )
    agent = enrolled.identity.agent
    return IdentityEnrolledAnswer(
        display=agent.display,
        pubkey_b58=agent.pubkey,
        token_b58=enrolled.token,
        granted=tuple(GrantedAction(grant.action, grant.signature_b58) for grant in enrolled.granted),
    )


async def list_identities(services: Services, caller: Principal, request: ListIdentitiesRequest) -> IdentityList:
    limit = page_limit(request.limit, IDENTITIES_LIMIT, most=IDENTITIES_LIMIT_MAX)
    found = [identity for identity in await services.registry.identities(caller) if _matches(identity, request)]
    # Sorted and then reversed: `reverse=True` would list identities of one millisecond oldest first.
    found = sorted(found, key=lambda identity: identity.registered_at_ms)[::-1]
    return IdentityList(
        identities=tuple(_identity(identity) for identity in found[:limit]),
        operator_pubkey_b58=caller.agent.pubkey,
        truncated=len(found) > limit,
    )


def _matches(identity: Identity, request: ListIdentitiesRequest) -> bool:
    if request.status is not None and (request.status == "revoked") != (identity.revoked_at_ms is not None):
        return False
    names = (identity.agent.display, identity.agent.pubkey, identity.token_prefix)
    return request.prefix is None or any(name.startswith(request.prefix) for name in names)


def _identity(identity: Identity) -> IdentityShown:
    registered_at, revoked_at = identity.registered_at_ms, identity.revoked_at_ms
    return fill(IdentityShown, identity, agent_id=identity.agent, registered_at=registered_at, revoked_at=revoked_at)


async def revoke_identity(
    services: Services, caller: Principal, request: RevokeIdentityRequest
) -> IdentityRevokedAnswer:
    revoked = await services.registry.revoke(caller, request.identity, force=bool(request.force))
    return IdentityRevokedAnswer(
        display=revoked.agent.display,
        pubkey_b58=revoked.agent.pubkey,
        token_prefix=revoked.token_prefix,
        revoked_at=revoked.revoked_at_ms,
    )


async def rotate_token(services: Services, caller: Principal, request: RotateTokenRequest) -> TokenRotated:
    rotated = await services.registry.rotate(caller, request.identity)
    return TokenRotated(display=rotated.identity.agent.display, token_b58=rotated.token)


async def purge_identities(services: Services, caller: Principal, request: PurgeRequest) -> IdentitiesPurgedAnswer:
    purged = await services.registry.purge_identities(caller, request.before_ms)
    return IdentitiesPurgedAnswer(before_ms=request.before_ms, purged=purged)


async def grant_capability(services: Services, caller: Principal, request: GrantCapabilityRequest) -> CapabilityGranted:
    grant = await services.registry.grant(
        caller, request.action, to=request.to, scope=request.scope, expires_at=request.expires_at
    )
    scope = msgspec.Raw(grant.scope_json.encode())
    return fill(CapabilityGranted, grant, subject_display=grant.subject.display, scope=scope)


async def recent_capabilities(services: Services, caller: Principal, request: RecentRequest) -> CapabilityList:
    limit = page_limit(request.limit, CAPABILITIES_LIMIT)
    now_ms = services.ledger.now_ms()
    grants = await services.registry.grants(caller, limit)
    return CapabilityList(limit=limit, capabilities=tuple(_capability(each, now_ms) for each in grants))


def _capability(grant: Grant, now_ms: int) -> CapabilityShown:
    budget = None
    if grant.max_uses is not None:
        budget = GrantBudget(grant.max_uses, grant.used, max(0, grant.max_uses - grant.used))
    return fill(
        CapabilityShown,
        grant,
        scope=msgspec.Raw(grant.scope_json.encode()),
        granted_at=grant.granted_at_ms,
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


async def revoke_capability(
    services: Services, caller: Principal, request: RevokeCapabilityRequest
) -> CapabilityRevoked:
    signature_b58, removed = await services.registry.revoke_grant(caller, request.signature_b58)
    return CapabilityRevoked(signature_b58=signature_b58, removed=removed)


async def purge_capabilities(services: Services, caller: Principal, request: PurgeRequest) -> CapabilitiesPurged:
    purged = await services.registry.purge_grants(caller, request.before_ms)
    return CapabilitiesPurged(before_ms=request.before_ms, purged=purged)


async def recent_audit(services: Services, caller: Principal, request: RecentAuditRequest) -> AuditRecent:
    limit = page_limit(request.limit, AUDIT_LIMIT)
    below = LAST if request.below is None else request.below
    filters = fill(AuditFilter, request)
    page = await find_audit(services.ledger, caller, filters, limit, below)
    records, following = page.records, request.after is not None
    if following:
        matches = [number for number, record in enumerate(records) if _row_id(record.row).id == request.after]
        records = records[matches[-1] + 1 :] if matches else records
    # Rows that do not fit are left for the next page: newer ones for a caller that follows, older ones otherwise.
    found = [msgspec.Raw(record.row.encode()) for record in records]
    events = fit(found) if following else fit(found[::-1])[::-1]
    truncated = len(events) < len(found)
    next_place = records[-len(events)].place if truncated and events and not following else page.next
    return AuditRecent(limit=limit, since_ms=request.since_ms, events=events, truncated=truncated, next=next_place)


async def audit_waiting(
    services: Services, caller: Principal, request: RecentAuditRequest, pause: Pause
) -> AuditRecent:
    """Waits until there is a row to show."""
    clock, give_up_ms = services.ledger.clock, services.give_up_ms(request.wait_ms)
    while True:
        remaining_ms = max(0, give_up_ms - clock.monotonic_ms())
        audited = asyncio.ensure_future(services.ledger.audited(remaining_ms))
        try:
            await asyncio.sleep(0)  # the wait begins before the audit is read, so that no row in between is missed
            answer = await recent_audit(services, caller, request)
            if answer.events or not remaining_ms:
                return answer
            await pause.until(audited)
        finally:
            audited.cancel()


class _RowId(msgspec.Struct, frozen=True, gc=False):
    id: str


_row_id: Final = msgspec.json.Decoder(_RowId).decode


async def verify_audit_integrity(services: Services, caller: Principal, _: EmptyRequest) -> AuditIntegrity:
    return AuditIntegrity(report=await services.registry.audit_verify(caller))


async def purge_audit(services: Services, caller: Principal, request: PurgeRequest) -> AuditPurgedAnswer:
    purged = await services.registry.audit_purge(caller, request.before_ms)
    return AuditPurgedAnswer(before_ms=request.before_ms, purged=purged)


async def make_login_code(services: Services, caller: Principal, _: EmptyRequest) -> LoginCodeAnswer:
    if services.login_codes is None:
        raise Conflict("ui_off", "this daemon serves no dashboard; set enabled = true under [ui] in its settings.toml")
    return fill(LoginCodeAnswer, await services.login_codes.make(caller))


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation("POST", "/identities/enroll", enroll_identity, "Mint a token for an identity"),
    ApiOperation("GET", "/identities/list", list_identities, "Who holds a token, the newest first"),
    ApiOperation("POST", "/identities/revoke", revoke_identity, "Revoke a token and end its live connections"),
    ApiOperation("POST", "/identities/rotate", rotate_token, "Replace a token; the old one ends at once"),
    ApiOperation("POST", "/identities/purge", purge_identities, "Forget tokens revoked before a time"),
    ApiOperation("GET", "/capabilities/recent", recent_capabilities, "The newest grants that concern you"),
    ApiOperation("POST", "/capabilities/grant", grant_capability, "Grant an action to an identity"),
    ApiOperation("POST", "/capabilities/revoke", revoke_capability, "Revoke a grant by its signature"),
    ApiOperation("POST", "/capabilities/purge", purge_capabilities, "Forget grants revoked before a time"),
    ApiOperation(
        "GET",
        "/audit/recent",
        recent_audit,
        "The newest audit rows that you caused; all of them, to the operator",
        wait=audit_waiting,
    ),
    ApiOperation("GET", "/audit/verify", verify_audit_integrity, "Verify the whole hash chain"),
    ApiOperation("POST", "/audit/purge", purge_audit, "Drop audit rows from before a time, leaving a marker"),
    ApiOperation("POST", "/login-codes", make_login_code, "A code that logs a browser in at the dashboard, once"),
)
