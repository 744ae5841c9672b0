"""Identities, grants and audit: the operator's changes, and each caller's view of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from covenant.exchange.access.principals import IdentityAuth, Principal, require_operator
from covenant.exchange.access.tenants import CERTIFICATE_PREFIX_LENGTH, check_certificate_free
from covenant.exchange.id_prefixes import choose
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.machine.identity_commands import (
    Enroll,
    MakeGrant,
    PurgeAudit,
    PurgeGrants,
    PurgeIdentities,
    RevokeGrant,
    RevokeIdentity,
    RotateToken,
    WriteAuditRow,
)
from covenant.model.errors import Conflict, Invalid
from covenant.model.grant import AuditReport, Grant, Identity, check_action, read_scope
from covenant.model.ids import AgentId, PublicKey, check_display, check_pubkey
from covenant.seal.certificates import certificate_key
from covenant.seal.keys import (
    TOKEN_PREFIX_LENGTH,
    new_private_key,
    new_token,
    nonce,
    public_key,
    sign_grant,
    token_hash,
)

ENROLL_GRANTS_MAX: Final = 100
SIGNATURE_LENGTH_MIN: Final = 80
"""The least length of a whole signature in base58; a shorter text is a prefix."""
SCOPE_BYTES_MAX: Final = 8_192

_encode = msgspec.json.Encoder(order="deterministic").encode


class EnrolledIdentity(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`token` is returned once, here, and stored nowhere."""

    identity: Identity
    token: str
    granted: tuple[Grant, ...] = ()


class ReservedIdentity(msgspec.Struct, frozen=True, gc=False):
    """The key and the grants that an identity under a catalogue agent's name must have."""

    pubkey: PublicKey
    actions: tuple[str, ...] = ()


class IdentityAdmin:
    """`save_operator_token` stores a rotated operator token where the operator's tools find it.

    `reserved` returns the identity reserved for a name, and refuses names that nobody may enroll under.
    """

    def __init__(
        self,
        ledger: Ledger,
        identity_auth: IdentityAuth,
        operator: AgentId,
        operator_key: bytes,
        save_operator_token: Callable[[str], None],
        *,
        reserved: Callable[[str], ReservedIdentity | None] = lambda _: None,
    ) -> None:
        self._ledger = ledger
        self._identity_auth = identity_auth
        self._operator = operator
        self._operator_key = operator_key
        self._save_operator_token = save_operator_token
        self._reserved = reserved
        self.refusals_unreported: Final = identity_auth.refusals_unreported

    async def enroll(
        self,
        principal: Principal,
        display: str,
        *,
        pubkey: str | None = None,
        actions: Sequence[str] = (),
        certificate: str | None = None,
    ) -> EnrolledIdentity:
        """Enrolls an identity. `certificate`: the name of a certificate that stands for it, instead of a token."""
        await require_operator(self._ledger, principal, "enrolling an identity")
        check_display(display)
        if len(actions) > ENROLL_GRANTS_MAX:
            raise Invalid(
                "invalid_limit",
                f"`enroll` takes at most {ENROLL_GRANTS_MAX} grants; grant the others afterwards",
            )
        key, actions = self._key_and_actions(display, pubkey, actions)
        agent = AgentId(display, key)
        taken = self._ledger.enrolled(agent)
        if taken is not None and taken.pubkey == key:
            raise Conflict("pubkey_taken", f"this key is enrolled already, as {taken.display}")
        token, certificate_hash = ("", certificate_key(certificate)) if certificate is not None else (new_token(), "")
        if certificate is not None:
            check_certificate_free(self._ledger, certificate_hash)
        identity = Identity(
            agent=agent,
            token_sha256=certificate_hash or token_hash(token),
            token_prefix=certificate_hash[:CERTIFICATE_PREFIX_LENGTH] or token[:TOKEN_PREFIX_LENGTH],
            registered_at_ms=self._ledger.now_ms(),
        )
        grants = tuple(self._sign(agent, action, {}, None) for action in actions)
        await self._ledger.commit(Enroll(by=principal.agent, identity=identity, grants=grants))
        return EnrolledIdentity(identity=identity, token=token, granted=grants)

    def _key_and_actions(
        self, display: str, pubkey: str | None, actions: Sequence[str]
    ) -> tuple[PublicKey, Sequence[str]]:
        """The key of a new identity, and the actions that are granted to it."""
        given = check_pubkey(pubkey) if pubkey is not None else None
        reserved = self._reserved(display)
        if reserved is None:
            return given if given is not None else public_key(new_private_key()), actions
        if given not in (None, reserved.pubkey):
            raise Invalid("pubkey_given", f"{display} is an agent with the key {reserved.pubkey}; leave the key out")
        return reserved.pubkey, tuple(dict.fromkeys((*actions, *reserved.actions)))

    async def identities(self, principal: Principal) -> Sequence[Identity]:
        await require_operator(self._ledger, principal, "listing identities")
        return await self._ledger.identities()

    async def revoke(self, principal: Principal, which: str, *, force: bool = False) -> Identity:
        """Revokes a token, by display or token prefix, and ends its live connections."""
        await require_operator(self._ledger, principal, "revoking an identity")
        identity = await self._find(which)
        if identity.operator and not force:
            await self._ledger.commit(
                WriteAuditRow(
                    by=principal.agent,
                    row={
                        "type": "identity_self_revoke_blocked",
                        "display": identity.agent.display,
                        "pubkey_b58": identity.agent.pubkey,
                        "token_prefix": identity.token_prefix,
                    },
                )
            )
            raise Conflict(
                "self_revoke_forbidden",
                "this is the operator's own token; rotate it instead, or use --force and restart the daemon",
            )
        return await self._ledger.commit(RevokeIdentity(by=principal.agent, token_sha256=identity.token_sha256))

    async def rotate(self, principal: Principal, which: str | None) -> EnrolledIdentity:
        await require_operator(self._ledger, principal, "rotating a token")
        old_hash = principal.token_sha256 if which is None else (await self._find(which)).token_sha256
        token = new_token()
        if old_hash == principal.token_sha256:
            # First the file, then the record: a daemon that finds an unknown token in the file at its start takes it
            # for the operator's, so a crash in between locks nobody out.
            self._save_operator_token(token)
        identity = await self._ledger.commit(
            RotateToken(
                by=principal.agent,
                token_sha256=old_hash,
                new_token_sha256=token_hash(token),
                new_token_prefix=token[:TOKEN_PREFIX_LENGTH],
            )
        )
        return EnrolledIdentity(identity=identity, token=token)

    async def purge_identities(self, principal: Principal, before_ms: int) -> int:
        await require_operator(self._ledger, principal, "purging identities")
        return await self._ledger.commit(PurgeIdentities(by=principal.agent, before_ms=before_ms))

    async def _find(self, which: str) -> Identity:
        """The live identity with this display or key, or the only one whose display, key or token begins with it."""
        if not which:
            raise Invalid("invalid_identity", "name an identity by name@host, or by the prefix of its token")
        live = [each for each in await self._ledger.identities() if each.revoked_at_ms is None]
        named = [each for each in live if which in (each.agent.display, each.agent.pubkey)]
        candidates = [
            each
            for each in live
            if any(name.startswith(which) for name in (each.agent.display, each.agent.pubkey, each.token_prefix))
        ]
        return choose(which, named or candidates, "identity", _describe_identity, code="ambiguous_identity")

    async def grant(
        self,
        principal: Principal,
        action: str,
        *,
        to: str | None = None,
        scope: dict[str, Any] | None = None,
        expires_at: int | None = None,
    ) -> Grant:
        """Grants a capability; only the operator may. `to` is by default the operator itself."""
        await require_operator(self._ledger, principal, "granting a capability", action=action)
        subject = principal.agent if to is None else (await self._find(to)).agent
        if expires_at is not None and expires_at <= self._ledger.now_ms():
            raise Invalid("invalid_expiry", "expires_at is already past; give epoch milliseconds in the future")
        grant = self._sign(subject, action, scope or {}, expires_at)
        return await self._ledger.commit(MakeGrant(by=principal.agent, grant=grant))

    def _sign(self, subject: AgentId, action: str, scope: dict[str, Any], expires_at: int | None) -> Grant:
        check_action(action)
        pins, max_uses = read_scope(scope)
        scope_json = _encode(scope).decode()
        if len(scope_json) > SCOPE_BYTES_MAX:
            raise Invalid("invalid_scope", f"the scope may have at most {SCOPE_BYTES_MAX} bytes")
        unsigned = Grant(
            signature_b58="",
            subject=subject,
            action=action,
            granted_by=self._operator,
            granted_at_ms=self._ledger.now_ms(),
            nonce=nonce(),
            scope_json=scope_json,
            pins=pins,
            expires_at=expires_at,
            max_uses=max_uses,
        )
        return msgspec.structs.replace(unsigned, signature_b58=sign_grant(self._operator_key, unsigned))

    async def revoke_grant(self, principal: Principal, signature_b58: str) -> tuple[str, bool]:
        """Revokes a grant, named by a prefix of its signature. An identity may give up its own."""
        known = await self._ledger.grants()
        if len(signature_b58) < SIGNATURE_LENGTH_MIN:
            viewer = principal.viewer
            candidates = [
                each
                for each in known
                if each.revoked_at_ms is None
                and viewer in (None, each.subject.pubkey)
                and each.signature_b58.startswith(signature_b58)
            ]
            if candidates or principal.operator:
                signature_b58 = choose(signature_b58, candidates, "grant", _describe_grant).signature_b58
        grant = next((g for g in known if g.signature_b58 == signature_b58), None)
        if not principal.operator and (grant is None or grant.subject.pubkey != principal.agent.pubkey):
            await require_operator(self._ledger, principal, "revoking another's capability")
        removed = await self._ledger.commit(RevokeGrant(by=principal.agent, signature_b58=signature_b58))
        return signature_b58, removed

    async def grants(self, principal: Principal, limit: int) -> Sequence[Grant]:
        """The newest grants that concern the caller, newest first; for the operator, all."""
        if not 1 <= limit <= 1_000:
            raise Invalid("invalid_limit", "limit must be between 1 and 1000")
        viewer = principal.viewer
        mine = [
            grant
            for grant in await self._ledger.grants()
            if viewer is None or viewer in (grant.subject.pubkey, grant.granted_by.pubkey)
        ]
        # Reversed after a stable sort, so that grants of the same millisecond are newest first, too.
        return sorted(mine, key=lambda grant: grant.granted_at_ms)[::-1][:limit]

    async def purge_grants(self, principal: Principal, before_ms: int) -> int:
        await require_operator(self._ledger, principal, "purging capabilities")
        return await self._ledger.commit(PurgeGrants(by=principal.agent, before_ms=before_ms))

    async def audit_verify(self, principal: Principal) -> AuditReport:
        await require_operator(self._ledger, principal, "verifying the audit")
        return await self._ledger.audit_verify()

    async def audit_purge(self, principal: Principal, before_ms: int) -> int:
        """Deletes old rows. A marker row says how many rows are gone and where the chain is anchored now."""
        await require_operator(self._ledger, principal, "purging the audit")
        purged = 0
        for mark in await self._ledger.audit_before(before_ms):
            purged += await self._ledger.commit(
                PurgeAudit(
                    by=principal.agent,
                    before_ms=before_ms,
                    through=mark.through,
                    anchor_hash=mark.anchor_hash,
                    count=mark.rows,
                    chain=mark.chain,
                )
            )
        return purged


def _describe_identity(identity: Identity) -> str:
    return f"{identity.agent.display} ({identity.token_prefix}…)"


def _describe_grant(grant: Grant) -> str:
    return f"{grant.signature_b58}  {grant.action}  {grant.subject.display}"


def operator_agent(display: str, key: bytes) -> AgentId:
    return AgentId(display, PublicKey(public_key(key)))
