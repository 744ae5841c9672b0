"""What callers ask about identities, capabilities and the audit."""

from __future__ import annotations

from typing import Any, Literal

from covenant.wire.mailbox import Request, Strict, Whole


class EnrollIdentity(Strict, frozen=True, kw_only=True):
    """`pubkey` is minted if left out; `actions` are granted, unscoped, in the same step."""

    display: str
    pubkey: str | None = None
    actions: tuple[str, ...] | None = None


class ListIdentities(Request, frozen=True, kw_only=True):
    """`prefix` is of a display, a key or a token."""

    limit: Whole | None = None
    prefix: str | None = None
    status: Literal["live", "revoked"] | None = None


class RevokeIdentity(Strict, frozen=True, kw_only=True):
    """`identity` is a display, a key, or the first characters of a token. The operator's own token needs `force`."""

    identity: str
    force: bool | None = None


class RotateToken(Strict, frozen=True, kw_only=True):
    """Without `identity`: the caller's own."""

    identity: str | None = None


class Purge(Strict, frozen=True, kw_only=True):
    before_ms: Whole


class GrantCapability(Strict, frozen=True, kw_only=True):
    """Without `to`: to the operator itself."""

    action: str
    to: str | None = None
    scope: dict[str, Any] | None = None
    expires_at: Whole | None = None


class RevokeCapability(Strict, frozen=True, kw_only=True):
    signature_b58: str


class RecentAudit(Request, frozen=True, kw_only=True):
    limit: Whole | None = None
    since_ms: Whole | None = None
