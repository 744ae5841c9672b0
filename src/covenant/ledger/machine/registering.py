"""Identities and grants: who may call, and what each may do. Only the operator's commands reach these decisions."""

from __future__ import annotations

import msgspec

from covenant.ledger.machine.access import authorize
from covenant.ledger.machine.commands import (
    Enroll,
    MakeGrant,
    Note,
    PurgeAudit,
    PurgeGrants,
    PurgeIdentities,
    RevokeGrant,
    RevokeIdentity,
    RotateToken,
)
from covenant.ledger.machine.decision import Decide
from covenant.ledger.machine.events import (
    AuditPurged,
    GrantMade,
    GrantRevoked,
    GrantsPurged,
    IdentitiesPurged,
    IdentityEnrolled,
    IdentityRevoked,
)
from covenant.model.errors import Conflict, NotFound
from covenant.model.grant import Grant, Identity
from covenant.model.ids import AgentId


def enroll(decide: Decide, command: Enroll) -> Identity:
    identity = command.identity
    if decide.view.identities(identity.agent.display):
        raise decide.refuse(
            Conflict(
                "display_taken",
                f"{identity.agent.display} is enrolled already; rotate its token, or revoke it first",
            )
        )
    taken = decide.view.identities(identity.agent.pubkey)
    if taken:
        raise decide.refuse(
            Conflict("pubkey_taken", f"this key is enrolled already, as {taken[0].agent.display}; enroll another")
        )
    decide.add(IdentityEnrolled(identity))
    decide.audit(
        command.by,
        {
            "type": "identity_enrolled",
            "display": identity.agent.display,
            "pubkey_b58": identity.agent.pubkey,
            "token_prefix": identity.token_prefix,
        },
    )
    for grant in command.grants:
        _grant(decide, command.by, grant)
    return identity


def revoke_identity(decide: Decide, command: RevokeIdentity) -> Identity:
    identity = _identity(decide, command.token_sha256)
    if identity.revoked_at_ms is not None:
        return identity
    decide.add(IdentityRevoked(identity.token_sha256, decide.now_ms))
    decide.audit(
        command.by,
        {
            "type": "identity_revoked",
            "display": identity.agent.display,
            "pubkey_b58": identity.agent.pubkey,
            "token_prefix": identity.token_prefix,
        },
    )
    return msgspec.structs.replace(identity, revoked_at_ms=decide.now_ms)


def rotate_token(decide: Decide, command: RotateToken) -> Identity:
    old = _identity(decide, command.token_sha256)
    if old.revoked_at_ms is not None:
        raise decide.refuse(Conflict("identity_revoked", "this token was revoked; enroll the identity anew"))
    new = msgspec.structs.replace(
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


def purge_identities(decide: Decide, command: PurgeIdentities) -> int:
    purged = decide.view.identities_revoked_before(command.before_ms)
    if purged:
        decide.add(IdentitiesPurged(command.before_ms))
    decide.audit(command.by, {"type": "identities_purged", "before_ms": command.before_ms, "purged": purged})
    return purged


def make_grant(decide: Decide, command: MakeGrant) -> Grant:
    _grant(decide, command.by, command.grant)
    return command.grant


def _grant(decide: Decide, by: AgentId, grant: Grant) -> None:
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


def revoke_grant(decide: Decide, command: RevokeGrant) -> bool:
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


def purge_grants(decide: Decide, command: PurgeGrants) -> int:
    purged = decide.view.grants_revoked_before(command.before_ms)
    if purged:
        decide.add(GrantsPurged(command.before_ms))
    decide.audit(command.by, {"type": "capabilities_purged", "before_ms": command.before_ms, "purged": purged})
    return purged


def purge_audit(decide: Decide, command: PurgeAudit) -> int:
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


def note(decide: Decide, command: Note) -> None:
    authorize(decide, command.access)
    decide.audit(command.by, command.row)


def _identity(decide: Decide, token_sha256: str) -> Identity:
    identity = decide.view.identity(token_sha256)
    if identity is None:
        raise decide.refuse(NotFound("unknown_identity", "no identity has this token"))
    return identity
