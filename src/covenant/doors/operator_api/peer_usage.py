"""The operator's report on what peers used of this instance, and it of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from typing import Annotated, Final

import msgspec

from covenant.doors.operator_api.operation import AnyApiOperation, ApiAnswer, ApiOperation, Services, fill, fit
from covenant.doors.operator_api.peers import Offset, PeerOperations, PeerQuery, require_peers
from covenant.exchange.access.principals import Principal
from covenant.model.peers.delegation import DelegationRole, Peer
from covenant.model.peers.instance import InstanceId
from covenant.model.peers.usage_by_day import USAGE_DAYS, PeerUsage, day_of
from covenant.wire.peers import Named

USAGE: Final = "/api/v1/a2a/usage"


class PeerUsageRequest(PeerQuery, frozen=True, kw_only=True):
    """Of one peer or all, on the last `days` days in UTC."""

    peer_id: Named | None = None
    profile: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    role: DelegationRole | None = None
    days: Annotated[int, msgspec.Meta(ge=1, le=USAGE_DAYS)] = 7
    limit: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 100
    offset: Offset = 0


class PeerUsageShown(msgspec.Struct, frozen=True, gc=False, kw_only=True, rename="camel"):
    """`role` is ours: of a provider, what the peer had of us. `peer` is null for one that was removed."""

    day: str
    role: DelegationRole
    peer_id: InstanceId
    peer: str | None
    profile: str
    offers: int
    accepted: int
    rejected: int
    completed: int
    failed: int
    cancelled: int
    timeout: int
    tokens: int


class PeerQuotaShown(msgspec.Struct, frozen=True, gc=False, kw_only=True, rename="camel", omit_defaults=True):
    """What a peer may have of us in a day, and has had today."""

    peer_id: InstanceId
    peer: str
    accepted_today: int
    tokens_today: int
    offers_per_day: int | None = None
    tokens_per_day: int | None = None


class PeerUsageAnswer(ApiAnswer, frozen=True, kw_only=True, rename="camel", tag="peer_usage"):
    usage: tuple[PeerUsageShown, ...]
    total: int
    quotas: tuple[PeerQuotaShown, ...]


async def peer_usage(services: Services, caller: Principal, request: PeerUsageRequest) -> PeerUsageAnswer:
    peers = await require_peers(services, caller, "showing what peers used")
    one = peers.find(request.peer_id) if request.peer_id is not None else None
    known, today = {each.id: each for each in await peers.peers()}, day_of(services.ledger.now_ms())
    kept = await services.ledger.peer_usage(today - request.days + 1, one.id if one is not None else None)
    found = [each for each in kept if request.profile in (None, each.profile) and request.role in (None, each.role)]
    page = found[request.offset : request.offset + request.limit]
    shown = [
        fill(PeerUsageShown, each, day=day_text(each.day), peer_id=each.peer, peer=_name_in(known, each.peer))
        for each in page
    ]
    asked = known.values() if one is None else (one,)
    quotas = [quota for peer in asked if (quota := _quota_shown(peers, peer, kept, today)) is not None]
    return PeerUsageAnswer(usage=fit(shown), total=len(found), quotas=tuple(quotas))


def day_text(day: int) -> str:
    return (date(1970, 1, 1) + timedelta(days=day)).isoformat()


def _name_in(known: dict[InstanceId, Peer], peer_id: InstanceId) -> str | None:
    peer = known.get(peer_id)
    return peer.name if peer is not None else None


def _quota_shown(peers: PeerOperations, peer: Peer, kept: Sequence[PeerUsage], today: int) -> PeerQuotaShown | None:
    offers, tokens = peers.quota(peer)
    if offers is None and tokens is None:
        return None
    had = [each for each in kept if (each.day, each.role, each.peer) == (today, DelegationRole.PROVIDER, peer.id)]
    return PeerQuotaShown(
        peer_id=peer.id,
        peer=peer.name,
        accepted_today=sum(each.accepted for each in had),
        tokens_today=sum(each.tokens for each in had),
        offers_per_day=offers,
        tokens_per_day=tokens,
    )


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation("GET", USAGE, peer_usage, "What peers used of this instance and it of them, by profile and day"),
)
