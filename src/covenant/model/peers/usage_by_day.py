"""The use that each peer made of us and we of it, by profile and day: sums over delegations."""

from __future__ import annotations

from typing import Final

import msgspec

from covenant.model.peers.delegation import (
    ACCEPTED,
    CANCELLED,
    COMPLETED,
    FAILED,
    REJECTED,
    TIMEOUT,
    Delegation,
    DelegationRole,
    DelegationState,
)
from covenant.model.peers.instance import InstanceId

DAY_MS: Final = 86_400_000
USAGE_DAYS: Final = 92
"""The number of days for which the sums are kept."""
USAGE_ROWS_MAX: Final = 50_000
_OF_A_PROFILE: Final = frozenset({"busy", "rate_limited", "budget_too_low"})
"""Codes of rejects that are sent only if the profile exists; with any other code its name is not trusted."""

UsageKey = tuple[int, DelegationRole, InstanceId, str]
COUNTED: Final = ("offers", "accepted", "rejected", "completed", "failed", "cancelled", "timeout", "tokens")
_ENDS: Final[dict[DelegationState, str]] = {
    REJECTED: "rejected",
    COMPLETED: "completed",
    FAILED: "failed",
    CANCELLED: "cancelled",
    TIMEOUT: "timeout",
}


class PeerUsage(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """`day` counts from 1970, in UTC. An offer counts on the day it was made, its outcome on the day it ended."""

    day: int
    role: DelegationRole
    """The role of this instance: `provider` is the peer's use of our agents."""
    peer: InstanceId
    profile: str
    """Empty: the offer named no existing profile."""
    offers: int = 0
    accepted: int = 0
    rejected: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    timeout: int = 0
    tokens: int = 0

    @property
    def key(self) -> UsageKey:
        return self.day, self.role, self.peer, self.profile

    def plus(self, other: PeerUsage) -> PeerUsage:
        sums = {name: getattr(self, name) + getattr(other, name) for name in COUNTED}
        return msgspec.structs.replace(self, **sums)


def day_of(at_ms: int) -> int:
    return at_ms // DAY_MS


def usage_change(before: Delegation | None, after: Delegation, at_ms: int) -> PeerUsage | None:
    """The amounts that this change of a delegation adds to the sums; None: nothing."""
    counted: dict[str, int] = {}
    if before is None:
        counted["offers"] = 1
    if after.role is DelegationRole.PROVIDER:
        accepted = before is None and after.state is ACCEPTED
    else:
        accepted = after.delegation_id is not None and (before is None or before.delegation_id is None)
    if accepted:
        counted["accepted"] = 1
    if after.ended and (before is None or not before.ended):
        counted[_ENDS[after.state]] = 1
        counted["tokens"] = after.usage.total
    if not counted:
        return None
    known = after.role is DelegationRole.REQUESTER or after.state is not REJECTED or after.code in _OF_A_PROFILE
    profile = after.profile if known else ""
    return PeerUsage(day=day_of(at_ms), role=after.role, peer=after.peer, profile=profile, **counted)
