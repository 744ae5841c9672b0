"""Tenants: whose agents and tasks are whose. A tenant is a name, a token, and how much it may ask for."""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec

from covenant.model.errors import Invalid
from covenant.model.ids import PublicKey

DEFAULT: Final = "default"
"""There from the first start. The operator's token speaks for it too."""
TENANT_NAME_LENGTH_MAX: Final = 63
"""With an agent's id and the sign between them it still fits a display name."""

LIMIT_MAX: Final = 1_000_000
LIMIT_BYTES_MAX: Final = 2**40
Limit = Annotated[int, msgspec.Meta(ge=0, le=LIMIT_MAX)]

_NAME = re.compile(r"[A-Za-z0-9_\-]+").fullmatch


class TenantLimits(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """How much at once, how often, and how much may wait. 0: the daemon's own default, which is a setting."""

    concurrency: Limit = 0
    """Turns that the daemon's own agents work on at once. More of them wait in the queue."""
    rate_per_min: Limit = 0
    burst: Limit = 0
    """Requests that may come at once after a pause. 0: as many as the rate."""
    connections: Limit = 0
    """Requests that are being answered at once; streams and long waits are among them."""
    streams: Limit = 0
    live_tasks: Limit = 0
    queued_bytes: Annotated[int, msgspec.Meta(ge=0, le=LIMIT_BYTES_MAX)] = 0
    """Size of these tasks and of the messages that wait for them."""
    kept_hours: Limit = 0
    """How long finished tasks are kept."""
    kept_bytes: Annotated[int, msgspec.Meta(ge=0, le=LIMIT_BYTES_MAX)] = 0
    """What finished tasks may take on disk."""

    @staticmethod
    def most(name: str) -> int:
        return LIMIT_BYTES_MAX if name.endswith("_bytes") else LIMIT_MAX


class TenantRemoval(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A removal that has begun. It ends with the record of the tenant itself.

    Before anything is erased it is written down what that is: a resumed removal tells the same.
    """

    begun_at_ms: int
    reason: str
    canceled: int = 0
    tasks: int = 0
    digest: str = ""
    """SHA-256 of the ids of these tasks, one a line, sorted. Empty: not written down yet."""
    agents: int = 0
    identities: int = 0
    grants: int = 0
    pushes: int = 0
    cached: int = 0
    keys: tuple[PublicKey, ...] = ()
    """The public keys of its agents and callers: what its tasks are known by."""


class Tenant(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Only the SHA-256 of its token is kept; `token_prefix` is for people to tell tokens apart.

    Both are empty where no token was made yet: nobody can speak for it, except the operator for the first tenant.
    """

    name: str
    token_sha256: str = ""
    token_prefix: str = ""
    created_at_ms: int = 0
    disabled_at_ms: int | None = None
    limits: TenantLimits = TenantLimits()
    removal: TenantRemoval | None = None
    keyed_since_ms: int = 0
    """Idempotency keys name other tasks than those of an earlier tenant of this name. 0: made before there was this."""


def host_of(display: str) -> str:
    """Whose an agent or caller is, by its display: the tenant, or the host of an identity of its own."""
    return display.rpartition("@")[2]


def check_tenant_name(name: str) -> str:
    if len(name) > TENANT_NAME_LENGTH_MAX or _NAME(name) is None:
        raise Invalid(
            "invalid_tenant",
            f"{name[:80]!r} is no tenant's name: letters, digits, `_` and `-`, at most {TENANT_NAME_LENGTH_MAX}",
        )
    return name
