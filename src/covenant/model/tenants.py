"""Tenants: the owners of agents and tasks. A tenant has a name, a token and limits."""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec

from covenant.model.errors import Invalid
from covenant.model.ids import PublicKey

DEFAULT: Final = "default"
"""The tenant that exists from the first start. The operator's token also acts for it."""
TENANT_NAME_LENGTH_MAX: Final = 63
"""An agent's id, `@` and a tenant's name still fit into a display name."""

LIMIT_MAX: Final = 1_000_000
LIMIT_BYTES_MAX: Final = 2**40
Limit = Annotated[int, msgspec.Meta(ge=0, le=LIMIT_MAX)]

_NAME = re.compile(r"[A-Za-z0-9_\-]+").fullmatch


class TenantLimits(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A tenant's limits. 0: the daemon's default, which is a setting."""

    concurrency: Limit = 0
    """Turns that the daemon's own agents work on at once. Further turns wait in the queue."""
    rate_per_min: Limit = 0
    burst: Limit = 0
    """Requests that may come at once after a pause. 0: as many as the rate."""
    connections: Limit = 0
    """Requests that are being answered at once, streams and long waits among them."""
    streams: Limit = 0
    live_tasks: Limit = 0
    queued_bytes: Annotated[int, msgspec.Meta(ge=0, le=LIMIT_BYTES_MAX)] = 0
    """Bytes of live tasks and of the messages that wait for them."""
    kept_hours: Limit = 0
    """Hours for which finished tasks are kept."""
    kept_bytes: Annotated[int, msgspec.Meta(ge=0, le=LIMIT_BYTES_MAX)] = 0
    """Bytes of finished tasks on disk."""

    @staticmethod
    def most(name: str) -> int:
        return LIMIT_BYTES_MAX if name.endswith("_bytes") else LIMIT_MAX


class LimitUse(msgspec.Struct, frozen=True, gc=False):
    """`most` is the limit in force, the tenant's own or the daemon's default; 0: no limit.

    `used` is None while it cannot be read.
    """

    used: int | None
    most: int


class TenantUse(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A tenant's present use of each limit. Turns, requests, connections and streams are those at this daemon."""

    concurrency: LimitUse
    requests: LimitUse
    """Spent requests of `burst`, which refill at the tenant's rate."""
    connections: LimitUse
    streams: LimitUse
    live_tasks: LimitUse
    queued_bytes: LimitUse
    kept_bytes: LimitUse
    files: LimitUse
    file_bytes: LimitUse


class TenantRemoval(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A removal of a tenant that has begun. Deleting the tenant's own record ends it.

    Its extent is recorded before anything is erased, so that a resumed removal reports the same.
    """

    begun_at_ms: int
    reason: str
    canceled: int = 0
    tasks: int = 0
    digest: str = ""
    """SHA-256 of the ids of these tasks, sorted, one a line. Empty: the extent is not recorded yet."""
    agents: int = 0
    identities: int = 0
    grants: int = 0
    pushes: int = 0
    cached: int = 0
    keys: tuple[PublicKey, ...] = ()
    """The public keys of the tenant's agents and callers, by which its tasks are found."""


class SchedulePause(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A paused schedule. `until_ms` is the time of its resumption: runs that were due earlier are dropped."""

    since_ms: int
    until_ms: int | None = None


class Tenant(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Only the SHA-256 of the token is stored; people tell tokens apart by `token_prefix`.

    Both are empty until a token is made: until then only the operator can act, and only for the first tenant.
    """

    name: str
    token_sha256: str = ""
    token_prefix: str = ""
    created_at_ms: int = 0
    disabled_at_ms: int | None = None
    limits: TenantLimits = TenantLimits()
    removal: TenantRemoval | None = None
    keyed_since_ms: int = 0
    """Distinguishes this tenant's idempotency keys from those of an earlier one of its name. 0: an old version's."""
    schedule_pauses: dict[str, SchedulePause] = {}
    """Paused schedules, keyed by `schedule_key`."""


def schedule_key(agent_id: str, schedule_id: str) -> str:
    return f"{agent_id}/{schedule_id}"


def host_of(display: str) -> str:
    """The part of a display name after `@`: a tenant, or the host of an identity outside any tenant."""
    return display.rpartition("@")[2]


def check_tenant_name(name: str) -> str:
    if len(name) > TENANT_NAME_LENGTH_MAX or _NAME(name) is None:
        raise Invalid(
            "invalid_tenant",
            f"{name[:80]!r} is not a tenant name; use letters, digits, `_` and `-`, at most {TENANT_NAME_LENGTH_MAX}",
        )
    return name
